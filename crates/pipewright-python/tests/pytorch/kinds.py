"""One small pipeline for each kind of fault that `faults.py` does not have, and for what a rank may do wrong."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
from faults import (
    IGNORED,
    MICROBATCHES,
    ROWS,
    WIDTH,
    Boundary,
    TwoHeads,
    block,
    call,
    half,
    language,
    plain,
    sends_and_receives,
    stage_of,
    tied,
    token_mean,
    token_sum,
)
from pipewright_pp.torch import Fault, Report
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import mse_loss


def changed(
    rank: int, change: Callable[[nn.Module], None], *, layers: Any = None, extra: Any = None, targets: Any = None, **options: Any
) -> Report:
    """Verifies a model in two halves, whose stages `change` changes. `extra(stage)` runs after the schedule's step."""
    model, x, y = plain()
    model = layers() if layers else model
    own = copy.deepcopy(half(model, rank))
    change(own)
    stage = stage_of(own, rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    target = targets(y) if targets else y

    def step() -> Any:
        losses = call(schedule, rank, x, target)
        return extra(own) if extra else {"losses": losses}

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60, **options)


def nothing(_: nn.Module) -> None:
    """Leaves a stage as it is."""


def with_dropout(rank: int) -> Report:
    make = lambda: nn.Sequential(block(), block(), nn.Dropout(0.5), block(), block(), block())  # noqa: E731
    return changed(rank, nothing, layers=make)


def with_batch_norm(rank: int) -> Report:
    make = lambda: nn.Sequential(block(), block(), nn.BatchNorm1d(WIDTH), block())  # noqa: E731
    return changed(rank, nothing, layers=make)


def batch_norm_in_other_mode(rank: int) -> Report:
    make = lambda: nn.Sequential(block(), block(), block(), nn.BatchNorm1d(WIDTH))  # noqa: E731
    return changed(rank, lambda own: own.eval() if rank == 1 else None, layers=make)


def targets_in_other_order(rank: int) -> Report:
    return changed(rank, nothing, targets=lambda y: y.view(MICROBATCHES, -1, WIDTH).flip(0).reshape(ROWS, WIDTH))


def sends_in_other_order(rank: int) -> Report:
    return sends_and_receives(rank, [0, 2, 1, 3])


def another_batch(rank: int) -> Report:
    model, x, y = plain()
    stage = stage_of(half(model, rank), rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    return pt.verify(lambda: call(schedule, rank, x + 1, y), model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


def other_values(rank: int) -> Report:
    def change(own: nn.Module) -> None:
        if rank == 1:
            with torch.no_grad():
                own[0][0].weight.mul_(1.5)

    return changed(rank, change)


def another_seed(rank: int) -> Report:
    def change(own: nn.Module) -> None:
        torch.manual_seed(100 + rank)
        own.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)

    return changed(rank, change)


def one_other_weight(rank: int) -> Report:
    """The only parameter of the last stage has another value, and its name is also a name of the first stage."""
    torch.manual_seed(5)
    model, x, y = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))), *plain()[1:]
    own = copy.deepcopy(half(model, rank))
    if rank == 1:
        own[0].reset_parameters()
    stage = stage_of(own, rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    return pt.verify(lambda: call(schedule, rank, x, y), model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


def another_mask(rank: int) -> Report:
    """The mask of the last stage has minus infinity in other places."""
    mask = torch.full((WIDTH, WIDTH), float("-inf"))

    def make() -> nn.Sequential:
        model = nn.Sequential(block(), block(), block(), block())
        model[3].register_buffer("mask", mask.triu(1))
        return model

    def change(own: nn.Sequential) -> None:
        if rank == 1:
            own[1].mask = mask.triu(2)

    return changed(rank, change, layers=make)


def one_norm_on_all_ranks(rank: int) -> Report:
    return changed(rank, nothing, extra=lambda _: {"grad_norm": 3.0})


def another_copy(rank: int) -> Report:
    return tied(rank, sums=True, other_copy=True)


def frozen_here(rank: int) -> Report:
    return changed(rank, lambda own: own[1].requires_grad_(False) if rank == 0 else None)


def frozen_moved(rank: int) -> Report:
    def make() -> nn.Sequential:
        model = nn.Sequential(*(block() for _ in range(4)))
        model[2].requires_grad_(False)
        return model

    def decay(own: nn.Module) -> None:
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.mul_(0.99)

    return changed(rank, nothing, layers=make, extra=decay)


def part_of_the_optimizer(rank: int) -> Report:
    def optimize(own: nn.Module) -> None:
        parameters = [*own[0].parameters()] if rank == 1 else [*own.parameters()]
        torch.optim.SGD(parameters, lr=0.1).step()

    return changed(rank, nothing, extra=optimize)


def norm_of_a_stage(rank: int) -> Report:
    def norm(own: nn.Module) -> dict[str, Any]:
        return {"grad_norm": nn.utils.get_total_norm([parameter.grad for parameter in own.parameters()])}

    return changed(rank, nothing, extra=norm)


def token_count(rank: int) -> Report:
    model, x, y = language()
    stage = stage_of(half(model, rank), rank)
    own = lambda output, target: token_sum(output, target) / (y != IGNORED).sum()  # noqa: E731
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=own, scale_grads=False)

    def step() -> dict[str, Any]:
        call(schedule, rank, x, y)
        return {"tokens": y.numel()}

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=token_mean, deadline_s=60)


def weight_of_a_part(rank: int) -> Report:
    """The loss of the second head is not divided by the microbatches, the first one is."""
    model, x, y = language()
    model = nn.Sequential(*list(model)[:3], TwoHeads())
    stage = stage_of(half(model, rank), rank)

    def own(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return token_sum(outputs[0], target) + 4 * token_sum(outputs[1], target)

    def right(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return token_sum(outputs[0], target) + token_sum(outputs[1], target)

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=own, scale_grads=False)
    return pt.verify(lambda: call(schedule, rank, x, y), model, x, y, stages=[stage], loss_fn=right, deadline_s=60)


def sent_in_bf16(rank: int) -> Report:
    """The activations go through bfloat16 between the ranks."""
    model, x, y = plain()
    module = half(model, rank)
    module.register_forward_pre_hook(lambda _, args: args[0].bfloat16().float() if rank == 1 else None)
    # The hook of `verify` comes later, so it sees the value as it was received.
    step = Boundary(rank, module, mse_loss).step
    return pt.verify(lambda: step(x, y), model, x, y, stages={rank: module}, loss_fn=mse_loss, deadline_s=60)


def loss_of_the_log(rank: int) -> Report:
    return changed(rank, nothing, extra=lambda _: {"loss": 7.0} if rank == 1 else None)


class Draws(nn.Module):
    """A layer that takes random numbers and does not use them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return x


def random_numbers(rank: int) -> Report:
    make = lambda: nn.Sequential(block(), block(), block(), nn.Identity())  # noqa: E731

    def change(own: nn.Sequential) -> None:
        if rank == 1:
            own[1] = Draws()

    return changed(rank, change, layers=make)


def skipped_microbatch(rank: int) -> Report:
    """The last rank does not run the forward of the last microbatch, and sends a gradient of zeros."""
    model, x, y = plain()
    module = half(model, rank)
    pipeline = Boundary(rank, module, mse_loss)

    def step() -> None:
        if rank == 0:
            pipeline.step(x, y)
            return
        gradients = []
        for index in range(MICROBATCHES):
            received = torch.empty(ROWS // MICROBATCHES, WIDTH)
            dist.recv(received, src=0)
            received.requires_grad_()
            if index < MICROBATCHES - 1:
                (mse_loss(module(received), y.chunk(MICROBATCHES)[index]) / MICROBATCHES).backward()
            gradients.append(received.grad if received.grad is not None else torch.zeros_like(received))
        for gradient in gradients:
            dist.send(gradient, dst=0)

    return pt.verify(step, model, x, y, stages={rank: module}, loss_fn=mse_loss, deadline_s=60)


def replicas(rank: int, factor: float | None) -> Report:
    """Two replicas of one stage each. Their gradients are summed and multiplied, or not summed at all."""
    model, x, y = plain()
    module = copy.deepcopy(model)

    def step() -> None:
        rows, targets = x.chunk(2)[rank], y.chunk(2)[rank]
        for part, target in zip(rows.chunk(2), targets.chunk(2)):
            (mse_loss(module(part), target) / 2).backward()
        if factor is not None:
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.mul_(factor)

    return pt.verify(step, model, x, y, stages={0: module}, loss_fn=mse_loss, replica=rank, replicas=2, deadline_s=60)


#: The kind, the stage, the microbatch and the action that `verify` has to name; None for a sound pipeline.
KINDS: dict[str, tuple[Callable[[int], Report], tuple[Fault, int | None, int | None, str | None] | None]] = {
    "sends and receives": (sends_and_receives, None),
    "tied and summed": (lambda rank: tied(rank, sums=True), None),
    "replicas": (lambda rank: replicas(rank, 0.5), None),
    "dropout": (with_dropout, (Fault.DROPOUT, 0, 0, "0F0")),
    "batch norm": (with_batch_norm, (Fault.BATCH_NORM, 1, None, None)),
    "batch norm in another mode": (batch_norm_in_other_mode, (Fault.BATCH_NORM, 1, 0, "1F0")),
    "order of the targets": (targets_in_other_order, (Fault.ORDER, 1, 0, "1B0")),
    "order of the sends": (sends_in_other_order, (Fault.ORDER, 1, 1, "1RECV_F1")),
    "another batch": (another_batch, (Fault.BATCH, 0, 0, "0F0")),
    "other values": (other_values, (Fault.VALUES, 1, None, None)),
    "another seed": (another_seed, (Fault.VALUES, 0, None, None)),
    "one other weight": (one_other_weight, (Fault.VALUES, 1, None, None)),
    "another mask": (another_mask, (Fault.STALE_BUFFER, 1, None, None)),
    "one norm": (one_norm_on_all_ranks, (Fault.NORM, 0, None, None)),
    "another copy": (another_copy, (Fault.SHARED_COPY, 1, None, None)),
    "frozen here only": (frozen_here, (Fault.MISSING, 0, None, None)),
    "frozen moved": (frozen_moved, (Fault.FROZEN, 1, None, None)),
    "a part of the optimizer": (part_of_the_optimizer, (Fault.PARTIAL_STEP, 1, None, None)),
    "norm of a stage": (norm_of_a_stage, (Fault.NORM, 0, None, None)),
    "tokens": (token_count, (Fault.TOKENS, 0, None, None)),
    "a part of the loss": (weight_of_a_part, (Fault.ONE_PART, 1, 0, "1B0")),
    "another precision": (sent_in_bf16, (Fault.CROSSED, 1, 0, "1RECV_F0")),
    "loss of the log": (loss_of_the_log, (Fault.LOSS, 1, None, None)),
    "random numbers": (random_numbers, (Fault.RANDOM, 1, 0, "1F0")),
    "a skipped microbatch": (skipped_microbatch, (Fault.SKIPPED, 1, 3, "1F3")),
    "replicas not divided": (lambda rank: replicas(rank, 1.0), (Fault.REPLICAS, 0, None, None)),
    "replicas not summed": (lambda rank: replicas(rank, None), (Fault.REPLICAS, 0, None, None)),
}


def all_kinds(rank: int) -> dict[str, Report]:
    """The reports by name."""
    return {name: run(rank) for name, (run, _) in KINDS.items()}


def without_gradients(module: nn.Module, x: torch.Tensor) -> None:
    """A step whose stage runs in a checkpoint of the old kind."""
    torch.utils.checkpoint.checkpoint(module, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


def mistakes(rank: int) -> dict[str, str]:
    """The messages of what a caller may do wrong."""
    model, x, y = plain()
    own = half(model, rank)
    module = {rank: own}
    run = lambda: Boundary(rank, own, mse_loss).step(x, y)  # noqa: E731
    fails = lambda: 1 / 0 if rank == 1 else None  # noqa: E731
    slow = lambda: time.sleep(3) if rank == 0 else None  # noqa: E731

    def attempt(step: Any = run, *args: Any, stages: Any = None, **options: Any) -> str:
        own.zero_grad()
        given, options = args or (model, x, y), {"loss_fn": mse_loss, "deadline_s": 60} | options
        try:
            return str(pt.verify(step, *given, stages=module if stages is None else stages, **options))
        except pt.VerifyError as error:
            return str(error)

    return {
        "stages": attempt(stages=[3]),
        "no stages": attempt(stages=[]),
        "twice": attempt(stages={0: own}),
        "no model": attempt(run, None, x, y),
        "not a model": attempt(run, lambda: 3, x, y),
        "meta": attempt(run, copy.deepcopy(model).to("meta"), x, y),
        "batch on another device": attempt(run, model, x.to("meta"), y),
        "no tensor": attempt(run, model, "a text", y),
        "few rows": attempt(run, model, x[:2], y[:2]),
        "no loss": attempt(loss_fn=None),
        "failing loss": attempt(loss_fn=lambda output, target: 1 / 0),
        "not a loss": attempt(loss_fn=lambda output, target: 3),
        "failing": attempt(fails),
        "figures": attempt(lambda: {"lose": 1}),
        "not numbers": attempt(lambda: {"loss": "much"}),
        "no forward": attempt(lambda: None),
        "another model": attempt(run, nn.Sequential(nn.Linear(3, 3)), x, y),
        "deadline": attempt(deadline_s=0),
        "replica": attempt(replica=2),
        "tolerance": attempt(tolerance=-1.0),
        "waits": attempt(slow, deadline_s=1.5),
        "text": attempt(deadline_s="60"),
        "no number": attempt(replicas=None),
        "count": attempt(tokens="many"),
        "not a step": attempt(3),
        "not a function": attempt(loss_fn="mse"),
        "lazy": attempt(run, nn.Sequential(nn.LazyLinear(WIDTH)), x, y),
        "lazy stage": attempt(stages={rank: nn.LazyLinear(WIDTH)}),
        "old checkpoint": attempt(lambda: without_gradients(own, torch.randn(2, WIDTH))),
        "no text": attempt(lambda: (_ for _ in ()).throw(AssertionError()) if rank == 1 else None),
    }
