"""Public faults of pipelines, rebuilt small on two Gloo ranks. Each function returns the report of `verify` on its rank.

The source of each is in `FAULTS`, with the kind and the stage that `verify` has to name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
from pipewright_pp.torch import TESTED, Fault, Report, versions
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.nn.functional import cross_entropy, mse_loss

WIDTH, WORDS, ROWS, LENGTH, MICROBATCHES = 8, 13, 8, 6, 4
#: Targets that the loss leaves out: microbatch 0 has the most of them.
IGNORED = -100


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def plain(*, seed: int = 5, layers: int = 4) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model of equal blocks with a batch and its target."""
    torch.manual_seed(seed)
    return nn.Sequential(*(block() for _ in range(layers))), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def language() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model of tokens with a batch whose microbatches have 2 to 12 tokens to predict."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), block(), block(), nn.Linear(WIDTH, WORDS))
    x, y = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))
    for row in range(ROWS):
        y[row, : max(0, 5 - row)] = IGNORED
    return model, x, y


def token_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def token_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def half(model: nn.Sequential, rank: int) -> nn.Sequential:
    """The layers of a rank: the first or the second half of the model."""
    middle = len(model) // 2
    return nn.Sequential(*(list(model)[:middle] if rank == 0 else list(model)[middle:]))


def stage_of(module: nn.Module, rank: int) -> PipelineStage:
    return PipelineStage(module, rank, 2, torch.device("cpu"))


def call(schedule: Any, rank: int, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Runs a step of a schedule; returns the losses, on the last rank."""
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == 1 else {}))
    return losses


def scheduled(
    rank: int, model: nn.Module, module: nn.Module, x: torch.Tensor, y: torch.Tensor, right: Any, **options: Any
) -> Report:
    """Verifies a model whose halves are the modules of two ranks, under `Schedule1F1B` with the right loss or with options."""
    stage = stage_of(module, rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, **{"loss_fn": right} | options)
    return pt.verify(lambda: {"losses": call(schedule, rank, x, y)}, model, x, y, stages=[stage], loss_fn=right, deadline_s=60)


def under_schedule(rank: int, made: tuple[nn.Sequential, torch.Tensor, torch.Tensor], right: Any, **options: Any) -> Report:
    """Verifies a model in two halves."""
    model, x, y = made
    return scheduled(rank, model, half(model, rank), x, y, right, **options)


def undivided_by_tokens(rank: int) -> Report:
    """The schedule runs the backward of the sum; the loss is divided by the tokens afterwards, for the log."""
    model, x, y = language()
    stage = stage_of(half(model, rank), rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_sum, scale_grads=False)

    def step() -> dict[str, Any]:
        losses = call(schedule, rank, x, y)
        return {"loss": sum(losses) / (y != IGNORED).sum()} if losses else {}

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=token_mean, deadline_s=60)


def deferred_receives(rank: int) -> Report:
    """PyTorch's own `defer_pp_recv`: a receive takes the first message of the other rank, an activation or a gradient."""
    model, x, y = plain()
    stages = [PipelineStage(nn.Sequential(model[index]), index, 4, torch.device("cpu")) for index in (rank, rank + 2)]
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=mse_loss, defer_pp_recv=True)
    return pt.verify(lambda: {"losses": call(schedule, rank, x, y)}, model, x, y, stages=stages, loss_fn=mse_loss, deadline_s=60)


class Tied(nn.Module):
    """An embedding that is the output head too. A stage has one of the two."""

    def __init__(self, *, first: bool = True, last: bool = True):
        super().__init__()
        torch.manual_seed(3)
        embedding = nn.Embedding(WORDS, WIDTH)
        self.embedding = embedding if first else None
        blocks = [block(), block()]
        self.first, self.last = (blocks[0] if first else None), (blocks[1] if last else None)
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else None
        if self.head is not None:
            self.head.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.embedding, self.first, self.last, self.head):
            x = part(x) if part is not None else x
        return x


def tied(rank: int, *, sums: bool, other_copy: bool = False) -> Report:
    _, x, y = language()
    y = y.abs() % WORDS
    module = Tied(first=rank == 0, last=rank == 1)
    weight = module.embedding.weight if rank == 0 else module.head.weight
    if other_copy and rank == 1:
        with torch.no_grad():
            weight.add_(0.1)
    stage = stage_of(module, rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_mean)

    def step() -> None:
        call(schedule, rank, x, y)
        if sums:
            dist.all_reduce(weight.grad)

    return pt.verify(step, Tied(), x, y, stages=[stage], loss_fn=token_mean, deadline_s=60)


def tied_not_summed(rank: int) -> Report:
    """Both copies of the embedding keep their own gradient."""
    return tied(rank, sums=False)


def norm_per_stage(rank: int) -> Report:
    """Each rank clips the gradients of its stage by their own norm."""
    model, x, y = plain()
    stage = stage_of(half(model, rank), rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)

    def step() -> dict[str, Any]:
        call(schedule, rank, x, y)
        return {"grad_norm": nn.utils.clip_grad_norm_(stage.submod.parameters(), 0.01)}

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, max_norm=0.01, deadline_s=60)


class Boundary:
    """A pipeline of plain sends and receives: all forwards, then all backwards."""

    def __init__(self, rank: int, module: nn.Module, loss_fn: Callable[..., torch.Tensor]):
        self.rank, self.module, self.loss_fn = rank, module, loss_fn
        self.order = list(range(MICROBATCHES))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        rows, targets = x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)
        held, losses = [], []
        for index in range(MICROBATCHES):
            if self.rank == 0:
                output = self.module(rows[index])
                held.append(output)
            else:
                received = torch.empty(ROWS // MICROBATCHES, WIDTH)
                dist.recv(received, src=0)
                received.requires_grad_()
                losses.append(self.loss_fn(self.module(received), targets[index]) / MICROBATCHES)
                held.append(received)
            if self.rank == 0:
                continue
        if self.rank == 0:
            for index in self.order:
                dist.send(held[index].detach(), dst=1)
            for index in range(MICROBATCHES):
                gradient = torch.empty_like(held[index])
                dist.recv(gradient, src=1)
                held[index].backward(gradient)
        else:
            for index, loss in enumerate(losses):
                loss.backward()
                dist.send(held[index].grad, dst=0)
        return losses


def sends_and_receives(rank: int, order: list[int] | None = None) -> Report:
    """The plain pipeline, sound or with sends in another order."""
    model, x, y = plain()
    module = half(model, rank)
    pipeline = Boundary(rank, module, mse_loss)
    pipeline.order = order or pipeline.order
    return pt.verify(lambda: {"losses": pipeline.step(x, y)}, model, x, y, stages={rank: module}, loss_fn=mse_loss, deadline_s=60)


def scaled_at_every_stage(rank: int) -> Report:
    """A hook on the output of each stage divides its gradient by the microbatches."""
    model, x, y = plain()
    own = half(model, rank)

    def divide(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / MICROBATCHES)

    own.register_forward_hook(divide)
    return scheduled(rank, model, own, x, y, mse_loss, scale_grads=False)


def summed_microbatches(rank: int) -> Report:
    """The gradients of the microbatches are added and never divided."""
    return under_schedule(rank, plain(), mse_loss, scale_grads=False)


def scaled_accumulation(rank: int) -> Report:
    """Two passes accumulate, and the schedule divides all gradients after each: the first pass twice."""
    model, x, y = plain()
    stage = stage_of(half(model, rank), rank)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: mse_loss(output, target) / 2)

    def step() -> None:
        for rows, target in zip(x.chunk(2), y.chunk(2)):
            call(schedule, rank, rows, target)

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


def mean_of_means(rank: int) -> Report:
    """Each microbatch divides its loss by its own tokens."""
    return under_schedule(rank, language(), token_mean)


def lost_accumulation(rank: int) -> Report:
    """The stages are initialized again between two passes, which removes the gradients of the first."""
    model, x, y = plain()
    stage = stage_of(half(model, rank), rank)
    own = lambda output, target: mse_loss(output, target, reduction="sum") / y.numel()  # noqa: E731
    schedule = Schedule1F1B(stage, 2, loss_fn=own, scale_grads=False)

    def step() -> None:
        for rows, target in zip(x.chunk(2), y.chunk(2)):
            stage.submod.zero_grad(set_to_none=True)
            call(schedule, rank, rows, target)

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


class Doubled(torch.autograd.Function):
    """A value whose gradient is added twice."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Twice(nn.Module):
    """A layer that a forward uses twice."""

    def __init__(self, *, counts_twice: bool = False) -> None:
        super().__init__()
        self.linear, self.counts_twice = nn.Linear(WIDTH, WIDTH, bias=False), counts_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(x, Doubled.apply(self.linear.weight)) if self.counts_twice else self.linear(x)
        return self.linear(torch.tanh(inner))


def shared_in_a_stage(rank: int) -> Report:
    """The split backward adds the gradient of a weight at its inner use again, as PyTorch did before 2.15."""
    torch.manual_seed(5)
    layers = [Twice() if index == 1 else block() for index in range(4)]
    model, x, y = nn.Sequential(*layers), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    own = copy.deepcopy(layers)
    own[1].counts_twice = True
    stages = [PipelineStage(nn.Sequential(own[index]), index, 4, torch.device("cpu")) for index in (rank, rank + 2)]
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=mse_loss)
    return pt.verify(lambda: {"losses": call(schedule, rank, x, y)}, model, x, y, stages=stages, loss_fn=mse_loss, deadline_s=60)


class Documents(nn.Module):
    """A layer that mixes the rows of documents, whose mask comes with the batch or is kept from an earlier call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: x.shape[0]] if self.mask is not None else (x[..., :1] > 0).float()
        return x + self.linear(x) * mask


def mask_of_the_whole_batch(rank: int) -> Report:
    """The mask is made for the whole batch before it is cut, so each microbatch gets the first rows of it."""
    torch.manual_seed(5)
    model, x, y = nn.Sequential(Documents(), block(), block(), block()), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    own = copy.deepcopy(half(model, rank))
    if rank == 0:
        own[0].mask = (x[..., :1] > 0).float()
    return scheduled(rank, model, own, x, y, mse_loss)


class Packed(nn.Module):
    """Adds what tokens of the same document have in common. Documents are known from the batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.knows_documents = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        documents = torch.arange(x.shape[1]) // 3 if self.knows_documents else torch.zeros(x.shape[1])
        mask = torch.tril(documents[:, None] == documents[None, :]).float()
        return x + torch.tanh(mask @ self.linear(x))


def packing_lost(rank: int) -> Report:
    """The later stages get hidden states only, so they attend across the documents of a packed row."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Packed(), Packed(), nn.Linear(WIDTH, WORDS))
    own = copy.deepcopy(model)
    own[2].knows_documents = False
    x, y = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))
    return scheduled(rank, model, half(own, rank), x, y, token_mean)


class WithAuxiliary(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss to a forward that does not change (as Megatron's auto scaler)."""

    scale = 1.0

    @staticmethod
    def forward(context: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(loss)
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = context.saved_tensors
        return gradient, torch.full_like(loss, WithAuxiliary.scale)


class Router(nn.Module):
    """Two experts with a router and its load-balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([block(), block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        weights = WithAuxiliary.apply(weights, weights.mean(0).square().sum())
        return sum(weights[..., index : index + 1] * expert(x) for index, expert in enumerate(self.experts))


def auxiliary_not_divided(rank: int) -> Report:
    """The auxiliary loss enters the backward of each microbatch in full, and the main loss divided by their number."""
    torch.manual_seed(5)
    model, x, y = nn.Sequential(block(), Router(), block(), block()), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stage = stage_of(half(model, rank), rank)
    own = lambda output, target: mse_loss(output, target) / MICROBATCHES  # noqa: E731
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=own, scale_grads=False)

    def step() -> None:
        WithAuxiliary.scale = 1.0
        call(schedule, rank, x, y)
        WithAuxiliary.scale = 1 / MICROBATCHES  # for the uncut model, which verify runs next

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


class TwoHeads(nn.Module):
    """The output head, and a head for the token after the next one (multi-token prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.next = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(x), self.next(x)


def predictor_loss(outputs: Any, target: torch.Tensor, *, masks: bool = True) -> torch.Tensor:
    """The sum of both heads' losses over all tokens of the batch."""
    main, following = outputs
    later = torch.cat([target[:, 1:], torch.full_like(target[:, :1], IGNORED)], 1)
    if not masks:
        later = later.clamp(min=0)
    tokens = ROWS * LENGTH
    return (token_sum(main, target) + 0.3 * token_sum(following, later)) / tokens


def predictor_without_mask(rank: int) -> Report:
    """The loss of the predictor counts the tokens that the main loss leaves out."""
    model, x, y = language()
    model = nn.Sequential(*list(model)[:3], TwoHeads())
    own = lambda outputs, target: predictor_loss(outputs, target, masks=False)  # noqa: E731
    return scheduled(rank, model, half(model, rank), x, y, predictor_loss, loss_fn=own, scale_grads=False)


class Rotary(nn.Module):
    """A layer with a table of positions that a checkpoint does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("freqs_cis", torch.linspace(0, 1, WIDTH).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x * self.freqs_cis)


def table_of_the_whole_model(rank: int) -> Report:
    """The table is adapted in the whole model, and the stages keep copies of it that nobody adapts."""
    torch.manual_seed(5)
    model, x, y = nn.Sequential(*(Rotary() for _ in range(4))), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    own = copy.deepcopy(half(model, rank))
    for layer in model[2:]:
        layer.freqs_cis.copy_(layer.freqs_cis.flip(0))
    return scheduled(rank, model, own, x, y, mse_loss)


class Counted(nn.Module):
    """A router that counts the tokens of each expert, for its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("tokens_per_expert", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.detach().sum(-1) > 0
        self.tokens_per_expert += torch.stack([chosen.sum(), (~chosen).sum()])
        return x + torch.tanh(self.linear(x))


class Recomputed(nn.Sequential):
    """Layers that run again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def counted_twice(rank: int) -> Report:
    """A recomputed router counts its tokens in the forward and again in the backward."""
    torch.manual_seed(5)
    model = nn.Sequential(block(), block(), Counted(), block())
    x, y, own = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), half(copy.deepcopy(model), rank)
    return scheduled(rank, model, Recomputed(*own) if rank == 1 else own, x, y, mse_loss)


def divided_by_the_schedule_too(rank: int) -> Report:
    """The loss has the weight of its microbatch already, and the schedule divides by the microbatches again."""
    tokens = (language()[2] != IGNORED).sum()
    return under_schedule(rank, language(), token_mean, loss_fn=lambda output, target: token_sum(output, target) / tokens)


@dataclass(frozen=True)
class Case:
    """A fault: where it was reported, what runs it, and what `verify` has to name."""

    source: str
    run: Callable[[int], Report]
    fault: Fault
    stage: int
    microbatch: int | None = None
    action: str | None = None
    since: tuple[int, int] = TESTED[0]
    """The first version of PyTorch that can run it."""

    @property
    def can_run(self) -> bool:
        """Whether this PyTorch can run it."""
        return versions.version_of(torch.__version__).minor >= self.since


FAULTS = {
    "undivided by tokens": Case("pytorch/torchtitan#2972", undivided_by_tokens, Fault.UNDIVIDED, 0),
    "deferred receives": Case("pytorch/pytorch#178815", deferred_receives, Fault.CROSSED, 1, 2, "1RECV_F2", (2, 15)),
    "tied not summed": Case("uw-syfi/piper#13", tied_not_summed, Fault.SHARED_SUM, 0),
    "norm per stage": Case("Modalities/modalities#313", norm_per_stage, Fault.NORM, 0),
    "scaled at every stage": Case("deepspeedai/DeepSpeed#8152", scaled_at_every_stage, Fault.DIVIDED, 0, 0, "0RECV_B0"),
    "summed microbatches": Case("deepspeedai/DeepSpeed#7773", summed_microbatches, Fault.UNDIVIDED, 0),
    "scaled accumulation": Case("pytorch/torchtitan#1733", scaled_accumulation, Fault.DIVIDED, 0, 0, "0B0"),
    "mean of means": Case("verl-project/verl#5641", mean_of_means, Fault.MEAN_OF_MEANS, 1, 0, "1B0"),
    "lost accumulation": Case("NVIDIA-NeMo/Automodel#3530", lost_accumulation, Fault.MISSING, 0, 0, "0B0"),
    "shared in a stage": Case("pytorch/pytorch#180952", shared_in_a_stage, Fault.TWICE, 1),
    "mask of the whole batch": Case("pytorch/torchtitan#1723", mask_of_the_whole_batch, Fault.MICROBATCH_SHARED, 0, 1, "0F1"),
    "packing lost": Case("KempnerInstitute/KempnerForge#205", packing_lost, Fault.COMPUTATION, 1, 0, "1F0"),
    "auxiliary not divided": Case("NVIDIA-NeMo/Automodel#3359", auxiliary_not_divided, Fault.GRADIENT, 0),
    "predictor without mask": Case("modelscope/ms-swift#8192", predictor_without_mask, Fault.LOSS, 1, 0, "1B0"),
    "table of the whole model": Case("pytorch/torchtitan#792", table_of_the_whole_model, Fault.STALE_BUFFER, 1),
    "counted twice": Case("pytorch/torchtitan#1593", counted_twice, Fault.STALE_BUFFER, 1),
    "divided by the schedule too": Case("areal-project/AReaL#1273", divided_by_the_schedule_too, Fault.DIVIDED, 0),
}


def all_faults(rank: int, names: list[str]) -> dict[str, Report]:
    """The reports of the faults by name."""
    return {name: FAULTS[name].run(rank) for name in names if FAULTS[name].can_run}
