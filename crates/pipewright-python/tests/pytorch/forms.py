"""Sound pipelines of many forms, of which `verify` must say nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pipewright_pp as pw
import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
from faults import MICROBATCHES, ROWS, WIDTH, block, call, half, plain, stage_of
from pipewright_pp.torch import Report
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss


def check(
    rank: int, model: Any, own: nn.Module, x: Any, y: Any, *, make: Any = Schedule1F1B, given: Any = None, **options: Any
) -> Report:
    """Verifies a model whose stages are `own`. `given` are keyword arguments of the schedule's step on each rank."""
    stage = stage_of(own, rank)
    schedule = make(stage, MICROBATCHES, loss_fn=mse_loss)

    def step() -> None:
        first = [x["x"] if isinstance(x, dict) else x] if rank == 0 else []
        schedule.step(*first, **(given or {}), **({"target": y} if rank == 1 else {}))

    return pt.verify(step, model, x, y, stages=[stage], **{"loss_fn": mse_loss, "deadline_s": 60} | options)


class Masked(nn.Module):
    """A layer with a mask as a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * mask


class MaskedModel(nn.Module):
    """Layers that all get the mask."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def keyword_arguments(rank: int) -> Report:
    torch.manual_seed(4)
    layers = [Masked() for _ in range(4)]
    x, y, mask = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), (torch.rand(ROWS, 1) > 0.5).float()
    own = MaskedModel(layers[2 * rank : 2 * rank + 2])
    return check(rank, MaskedModel(layers), own, {"x": x, "mask": mask}, y, given={"mask": mask})


class Skip(nn.Module):
    """A layer that hands on two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, first = value if isinstance(value, tuple) else (value, value * 2)
        return torch.tanh(self.linear(x)), first + x


class Ends(nn.Module):
    """The part of a model of `Skip` layers that a stage has: the last one adds its two tensors."""

    def __init__(self, layers: list[nn.Module], *, is_last: bool):
        super().__init__()
        self.layers, self.is_last = nn.Sequential(*layers), is_last

    def forward(self, *values: torch.Tensor) -> Any:
        x, first = self.layers(values if len(values) > 1 else values[0])
        return x + first if self.is_last else (x, first)


def two_tensors(rank: int) -> Report:
    torch.manual_seed(4)
    layers = [Skip() for _ in range(4)]
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    own = Ends(layers[2 * rank : 2 * rank + 2], is_last=rank == 1)

    def names(stage: int, name: str) -> str:
        _, layer, rest = name.split(".", 2)
        return f"layers.{2 * stage + int(layer)}.{rest}"

    return check(rank, Ends(layers, is_last=True), own, x, y, names=names)


def converted(rank: int, dtype: torch.dtype) -> Report:
    model, x, y = plain()
    model = model.to(dtype)
    return check(rank, model, copy.deepcopy(half(model, rank)), x.to(dtype), y.to(dtype))


def wrapped_in_replicas(rank: int) -> Report:
    """Two ranks, each with a replica of both stages, wrapped in DDP."""
    model, x, y = plain()
    parts = [nn.parallel.DistributedDataParallel(copy.deepcopy(half(model, index))) for index in range(2)]

    def step() -> None:
        rows, targets = x.chunk(2)[rank], y.chunk(2)[rank]
        mse_loss(parts[1](parts[0](rows)), targets).backward()

    return pt.verify(step, model, x, y, stages=dict(enumerate(parts)), loss_fn=mse_loss, replica=rank, replicas=2, deadline_s=60)


def two_passes(rank: int) -> Report:
    """Gradient accumulation over two calls of a schedule, with the right scale."""
    model, x, y = plain()
    stage = stage_of(copy.deepcopy(half(model, rank)), rank)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: mse_loss(output, target) / 4, scale_grads=False)

    def step() -> None:
        for rows, target in zip(x.chunk(2), y.chunk(2)):
            call(schedule, rank, rows, target)

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60)


def executed_plan(rank: int) -> Report:
    """Pipewright's own stages and schedule, with a recomputed stage."""
    model, x, y = plain()
    plan = pw.schedule("zbvzerobubble", ranks=2, microbatches=MICROBATCHES)
    stages = pt.stages(plan, copy.deepcopy(model), boundaries=[1, 2, 3])
    stages[0].submod.recompute = rank == 0
    schedule = pt.schedule(plan, stages, mse_loss)
    has_last = any(stage.is_last for stage in stages)

    def step() -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": []} if has_last else {}))

    return pt.verify(step, model, x, y, stages=stages, loss_fn=mse_loss, deadline_s=60)


class LossOfRows(nn.Module):
    """A last layer that returns the loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def loss_in_the_model(rank: int) -> Report:
    model, x, _ = plain()
    model = nn.Sequential(*list(model)[:3], LossOfRows())
    own = copy.deepcopy(half(model, rank))

    def step() -> None:
        for rows in x.chunk(MICROBATCHES):
            if rank == 0:
                output = own(rows)
                dist.send(output.detach(), dst=1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, src=1)
                output.backward(gradient)
            else:
                received = torch.empty(ROWS // MICROBATCHES, WIDTH)
                dist.recv(received, src=0)
                received.requires_grad_()
                (own(received) / MICROBATCHES).backward()
                dist.send(received.grad, dst=0)

    return pt.verify(step, model, x, stages={rank: own}, deadline_s=60)


class Checkpointed(nn.Sequential):
    """A stage that plain code runs again in the backward, with its hooks."""

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self, x, use_reentrant=False)


def recomputed_in_plain_code(rank: int) -> Report:
    """Each rank has both stages, and recomputes them."""
    model, x, y = plain()
    parts = [Checkpointed(*copy.deepcopy(half(model, index))) for index in range(2)]

    def step() -> None:
        for rows, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)):
            (mse_loss(parts[1].again(parts[0].again(rows)), target) / MICROBATCHES).backward()

    own = dict(enumerate(parts)) if rank == 0 else {}
    return pt.verify(step, model, x, y, stages=own, loss_fn=mse_loss, deadline_s=60)


def made_by_a_function(rank: int) -> Report:
    model, x, y = plain()
    return check(rank, lambda: plain()[0], copy.deepcopy(half(model, rank)), x, y)


def frozen_on_both_sides(rank: int) -> Report:
    model, x, y = plain()
    model[0].requires_grad_(False)
    return check(rank, model, copy.deepcopy(half(model, rank)), x, y)


def tensors_without_parameters(rank: int) -> Report:
    """A stage that ends and begins with layers that have no parameters."""
    torch.manual_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    model = nn.Sequential(*layers)
    return check(rank, model, copy.deepcopy(half(model, rank)), x, y, make=ScheduleGPipe)


class Attention(nn.Module):
    """Attention over the second dimension. The bias of the keys has no gradient. It may have a mask with minus infinity."""

    def __init__(self, *, is_masked: bool = False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1) if is_masked else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        return x + nn.functional.scaled_dot_product_attention(*parts, attn_mask=self.mask)


def of_layers(rank: int, layers: list[nn.Module], *, optimizer: Any = None, context: Any = nullcontext, **options: Any) -> Report:
    """Verifies layers over five positions, with a step of an optimizer, and with the schedule's step within a context."""
    shape, dtype = (ROWS, 5, WIDTH), next(layers[0].parameters()).dtype
    model, x, y = nn.Sequential(*layers), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    stage = stage_of(copy.deepcopy(half(model, rank)), rank)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)

    def step() -> None:
        with context():
            call(schedule, rank, x, y)
        if optimizer is not None:
            optimizer(stage.submod.parameters()).step()

    return pt.verify(step, model, x, y, stages=[stage], loss_fn=mse_loss, deadline_s=60, **options)


def layers_of_equal_values(rank: int) -> Report:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return of_layers(rank, list(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).layers))


def rounded_away(rank: int) -> Report:
    """AdamW changes parameters in bf16 by less than their precision."""
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16) for _ in range(4)]
    return of_layers(rank, layers, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0))


def copies_in_f32(rank: int) -> Report:
    """The optimizer has copies of the parameters in f32, but for the norms."""
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16) for _ in range(4)]

    def optimizer(parameters: Any) -> Any:
        copies = [parameter if parameter.dim() == 1 else parameter.detach().float() for parameter in parameters]
        return torch.optim.SGD(copies, lr=1e-3)

    return of_layers(rank, layers, optimizer=optimizer)


def no_gradient_for_a_bias(rank: int) -> Report:
    torch.manual_seed(4)
    return of_layers(rank, [Attention() for _ in range(4)], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))


def infinite_masks(rank: int) -> Report:
    torch.manual_seed(4)
    return of_layers(rank, [Attention(is_masked=True) for _ in range(4)])


def under_autocast(rank: int) -> Report:
    torch.manual_seed(4)
    return of_layers(rank, [block() for _ in range(4)], context=lambda: torch.autocast("cpu", torch.bfloat16))


class Between(nn.Module):
    """Two layers, or the part of a stage. The first stage ends within a sum that no module of the model returns."""

    def __init__(self, layers: list[nn.Module], *, first: bool = True, last: bool = True):
        super().__init__()
        self.layers, self.first, self.last = nn.ModuleList(layers), first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = 3 * self.layers[0](x)
        return self.layers[-1](torch.tanh(x)) if self.last else x


def cut_between_modules(rank: int) -> Report:
    torch.manual_seed(4)
    layers: list[nn.Module] = [nn.Sequential(block(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    own = copy.deepcopy(Between([layers[rank]], first=rank == 0, last=rank == 1))
    return check(rank, Between(layers), own, x, y)


class Named(nn.Module):
    """A model that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(block() for _ in range(4)))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.layers(x * weights), "cache": None}


def dictionary_and_whole_tensor(rank: int) -> Report:
    """One stage returns a dictionary, and gets a tensor whole that has as many rows as the batch."""
    torch.manual_seed(4)
    model, x, y, weights = Named(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.rand(WIDTH)
    own, loss_fn = copy.deepcopy(model), lambda output, target: mse_loss(output["logits"], target)

    def step() -> None:
        for rows, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)):
            (loss_fn(own(rows, weights), target) / MICROBATCHES).backward()

    stages = {0: own} if rank == 0 else {}
    return pt.verify(step, model, (x, weights), y, stages=stages, loss_fn=loss_fn, deadline_s=60)


FORMS: dict[str, Callable[[int], Report]] = {
    "keyword arguments": keyword_arguments,
    "two tensors": two_tensors,
    "f64": lambda rank: converted(rank, torch.float64),
    "bf16": lambda rank: converted(rank, torch.bfloat16),
    "replicas in DDP": wrapped_in_replicas,
    "two passes": two_passes,
    "a plan": executed_plan,
    "the loss in the model": loss_in_the_model,
    "recomputed": recomputed_in_plain_code,
    "a function": made_by_a_function,
    "frozen": frozen_on_both_sides,
    "no parameters at the cut": tensors_without_parameters,
    "layers of equal values": layers_of_equal_values,
    "rounded away": rounded_away,
    "copies in f32": copies_in_f32,
    "no gradient for a bias": no_gradient_for_a_bias,
    "infinite masks": infinite_masks,
    "autocast": under_autocast,
    "cut between modules": cut_between_modules,
    "a dictionary": dictionary_and_whole_tensor,
}


def all_forms(rank: int) -> dict[str, Report]:
    """The reports by name."""
    return {name: run(rank) for name, run in FORMS.items()}
