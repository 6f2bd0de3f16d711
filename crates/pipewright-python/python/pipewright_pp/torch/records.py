"""The values that the ranks of a pipeline record in one step, as sketches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .sketches import Sketch


@dataclass
class Call:
    """A microbatch on a stage. Gradients are kept by the position of their tensor; integers have none."""

    inputs: list[Sketch] = field(default_factory=list)
    outputs: list[Sketch] = field(default_factory=list)
    output_gradients: dict[int, Sketch] = field(default_factory=dict)
    input_gradients: dict[int, Sketch] = field(default_factory=dict)
    draws: bool = False
    """Whether the forward takes random numbers."""


@dataclass
class Parameter:
    """A parameter of a stage: its values before and after the step, and its gradient as the optimizer gets it."""

    before: Sketch
    trainable: bool
    after: Sketch | None = None
    gradient: Sketch | None = None
    is_stepped: bool | None = False
    """Whether an optimizer of `torch.optim` has stepped it; None if the rank's optimizers have copies of parameters."""


@dataclass
class Buffer:
    """A buffer of a stage: its values before and after the step."""

    before: Sketch
    after: Sketch | None = None


@dataclass
class StageRecord:
    """A stage of one replica of the pipeline."""

    stage: int
    replica: int
    rank: int
    calls: dict[int, Call] = field(default_factory=dict)
    """The microbatches by their position in the step of the replica."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """The shapes of all tensors that the stage gets as arguments."""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    """The types of devices for which the stage's last forward ran under `torch.autocast`, with the precision."""


@dataclass
class RankRecord:
    """The values of a rank."""

    stages: list[StageRecord] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    """The figures that the step returns: `loss`, `losses`, `grad_norm` and `tokens`."""
