"""Random models and PyTorch's pipelines of them, for the tests of `verify`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pipewright_pp.torch as pt
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

#: Schedules of PyTorch with the number of stages on each rank.
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
MULTI = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


class Residual(nn.Module):
    """A layer with a norm and a residual sum."""

    def __init__(self, width: int, inner: nn.Module):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def perceptron(width: int) -> nn.Module:
    """Two linear layers with an activation in place."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))


class Attention(nn.Module):
    """Self-attention of one head over the second dimension."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Layered(nn.Module):
    """A model whose parts keep the names of its layers, as torchtitan's do."""

    def __init__(self, layers: list[nn.Module], first: int = 0):
        super().__init__()
        self.layers = nn.ModuleDict({str(first + index): layer for index, layer in enumerate(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def random_layers(choice: random.Random, count: int) -> tuple[list[nn.Module], torch.Tensor, torch.Tensor, Any]:
    """Layers of a random kind and width, with a batch of 48 rows, its target and its loss."""
    width, kind = choice.choice([4, 8, 40]), choice.choice(["linear", "residual", "attention"])
    rows = (48, 5, width) if kind == "attention" else (48, width)
    makers = {
        "linear": lambda: nn.Sequential(nn.Linear(width, width), choice.choice([nn.Tanh(), nn.LeakyReLU(), nn.GELU()])),
        "residual": lambda: Residual(width, perceptron(width)),
        "attention": lambda: Residual(width, Attention(width)),
    }
    layers = [makers[kind]() for _ in range(count)]
    x, y, loss_fn = torch.randn(*rows), torch.randn(*rows), nn.functional.mse_loss
    if choice.random() < 0.4:
        words = 11
        layers[0] = nn.Embedding(words, width)
        layers[-1] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))
        x, y = torch.randint(words, rows[:-1]), torch.randint(words, rows[:-1])
        loss_fn = token_loss
    return layers, x, y, loss_fn


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of tokens."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def cuts(choice: random.Random, layers: int, stages: int) -> list[range]:
    """The layers of each stage, at random."""
    edges = [0, *sorted(choice.sample(range(1, layers), stages - 1)), layers]
    return [range(first, end) for first, end in zip(edges, edges[1:])]


def stages_of(name: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """The stages of a rank under a schedule of PyTorch."""
    if name in SINGLE:
        return [rank]
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * index for index in range(per_rank)]


@dataclass(frozen=True)
class Run:
    """The report of a random pipeline, and the stage that has the fault."""

    name: str
    report: pt.Report
    stage: int


def random_run(rank: int, ranks: int, seed: int, fault: str | None = None) -> Run:
    """Verifies a random model under a random schedule, sound or with a fault in a random stage; the same on all ranks."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    name = choice.choice(SINGLE + MULTI)
    per_rank = 1 if name in SINGLE else 2 if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else choice.choice([2, 3])
    count, microbatches = ranks * per_rank, choice.choice([2, 4, 6]) * ranks
    layers, x, y, loss_fn = random_layers(choice, count + choice.randrange(3))
    microbatches = microbatches if 48 % microbatches == 0 else 2 * ranks
    cut = cuts(choice, len(layers), count)
    keeps_names, steps, clips = choice.random() < 0.5, choice.random() < 0.5, choice.random() < 0.3
    whole = Layered(layers) if keeps_names else nn.Sequential(*layers)
    own = stages_of(name, rank, ranks, per_rank)
    faulty = choice.randrange(count)
    layers = copy.deepcopy(layers)
    modules = {
        index: Layered([layers[at] for at in cut[index]], cut[index].start)
        if keeps_names
        else nn.Sequential(*(layers[at] for at in cut[index]))
        for index in own
    }
    stages = [PipelineStage(module, index, count, torch.device("cpu")) for index, module in modules.items()]
    make = getattr(pipelining, name)
    schedule = make(stages[0] if name in SINGLE else stages, n_microbatches=microbatches, loss_fn=loss_fn)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    max_norm = 0.05 if clips else None
    inject = FAULTS[fault] if fault and faulty in modules else None
    if fault == "output" and inject:
        inject(modules[faulty])

    def step() -> dict[str, Any]:
        losses: list[torch.Tensor] = []
        has_last = count - 1 in modules
        schedule.step(*([x] if 0 in modules else []), **({"target": y, "losses": losses} if has_last else {}))
        figures: dict[str, Any] = {"losses": losses}
        if fault != "output" and inject:
            inject(modules[faulty])
        if max_norm is not None:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
            torch.distributed.all_reduce(norm)
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.sqrt())
            figures["grad_norm"] = norm.sqrt()
        if steps:
            optimizer.step()
        return figures

    report = pt.verify(step, whole, x, y, stages=stages, loss_fn=loss_fn, max_norm=max_norm, deadline_s=60)
    return Run(f"seed {seed}: {name}, {ranks} ranks, {count} stages, {microbatches} microbatches", report, faulty)


def largest(module: nn.Module) -> torch.Tensor:
    """The largest gradient of a stage."""
    return max((parameter.grad for parameter in module.parameters()), key=lambda gradient: float(gradient.norm()))


def scale_all(module: nn.Module) -> None:
    """Multiplies all gradients of a stage."""
    for parameter in module.parameters():
        parameter.grad.mul_(0.7)


#: Faults of one stage: of its output, before the step; of its gradients, after the backwards.
FAULTS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda module: module.register_forward_hook(lambda _, __, output: output * 1.01),
    "zero": lambda module: largest(module).zero_(),
    "one gradient": lambda module: largest(module).mul_(1.1),
    "a part of a gradient": lambda module: largest(module).view(-1)[::2].add_(0.1 * float(largest(module).abs().max())),
    "all gradients": scale_all,
}


def random_runs(rank: int, ranks: int, seeds: list[int], faults: list[str | None]) -> list[Run]:
    """The reports of several seeds, each with the next fault."""
    return [random_run(rank, ranks, seed, faults[index % len(faults)]) for index, seed in enumerate(seeds)]
