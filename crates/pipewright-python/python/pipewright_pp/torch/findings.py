"""The result of `verify`: the differences of a pipeline from the uncut model, and the fault that each is like."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .errors import PipelineDiffers


class Fault(enum.Enum):
    """The kinds of faults that a difference can be like. The value is the name in reports.

    >>> import pipewright_pp.torch as pt
    >>> pt.Fault.CROSSED.value
    'crossed messages'
    """

    CROSSED = "crossed messages"
    ORDER = "wrong microbatch order"
    BATCH = "another batch"
    SKIPPED = "a missing forward"
    VALUES = "other parameters at the start"
    SHARED_COPY = "another copy of a shared parameter"
    SHARED_SUM = "gradients of a shared parameter that are not summed"
    STALE_BUFFER = "a stale buffer"
    BATCH_NORM = "batch norm"
    DROPOUT = "dropout that differs"
    RANDOM = "another random state"
    COMPUTATION = "another computation in a stage"
    MICROBATCH_SHARED = "a value of the whole batch in each microbatch"
    LOSS = "another loss"
    TOKENS = "another number of tokens"
    GRADIENT = "another gradient in a stage"
    MISSING = "a missing gradient"
    TWICE = "a gradient added twice"
    DIVIDED = "a loss divided twice"
    UNDIVIDED = "a loss that is not divided"
    MEAN_OF_MEANS = "a mean of means"
    ONE_PART = "another weight of a part of the loss"
    SCALE = "another scale of the gradients"
    REPLICAS = "another scale of replicas"
    NORM = "a norm of a part of the gradients"
    FROZEN = "a frozen part that moved"
    PARTIAL_STEP = "an optimizer step on a part of the parameters"


@dataclass(frozen=True)
class Finding:
    """A difference between the pipeline and the uncut model.

    >>> import pipewright_pp.torch as pt
    >>> print(pt.Finding(pt.Fault.CROSSED, "the input differs", 1.5, stage=1, microbatch=0, action="1RECV_F0"))
    stage 1, microbatch 0, 1RECV_F0: the input differs by 1.5: crossed messages
    """

    fault: Fault
    """The kind of fault that the difference is like."""
    text: str
    """The value that differs."""
    difference: float | None = None
    """The norm of the difference relative to the norm of the uncut model's value; None if the value has no size."""
    stage: int | None = None
    """The first stage with the difference, if it belongs to one."""
    microbatch: int | None = None
    """The first microbatch with the difference, counted over the whole step, if it belongs to one."""
    action: str | None = None
    """The action that gets or makes the value, such as `1F0`, if it is the value of an action."""
    rank: int | None = None
    """The rank of the stage."""
    advice: str = ""
    """The observation behind the kind of fault."""

    def __str__(self) -> str:
        places = [
            f"stage {self.stage}" if self.stage is not None else "",
            f"microbatch {self.microbatch}" if self.microbatch is not None else "",
            self.action or "",
        ]
        place = ", ".join(part for part in places if part)
        start = f"{place}: " if place else ""
        end = f" ({self.advice})" if self.advice else ""
        size = f" by {self.difference:.2g}" if self.difference is not None else ""
        return f"{start}{self.text}{size}: {self.fault.value}{end}"


@dataclass(frozen=True)
class Report:
    """The result of `verify`, equal on all ranks.

    >>> import pipewright_pp.torch as pt
    >>> report = pt.Report(values=84, largest=3e-7)
    >>> report.is_sound
    True
    >>> print(report)
    the pipeline computes the same as the uncut model: 84 values, the largest relative difference is 3e-07
    """

    findings: tuple[Finding, ...] = ()
    """The differences in the order of the step: forwards, loss, backwards, gradients, and the state after it."""
    values: int = 0
    """The number of values that were compared."""
    largest: float = 0.0
    """The largest relative difference of values that count as equal."""
    actions: list[list[str]] = field(default_factory=list)
    """The actions of each rank in the order in which it ran them, as in a table of PyTorch."""
    loss: float | None = None
    """The loss of the uncut model on the batch."""
    grad_norm: float | None = None
    """The norm of all gradients of the uncut model, before clipping."""

    @property
    def is_sound(self) -> bool:
        """Whether no value differs."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first difference; None if no value differs."""
        return self.findings[0] if self.findings else None

    def raise_if_different(self) -> None:
        """Raises `PipelineDiffers` if a value differs.

        >>> import pipewright_pp.torch as pt
        >>> pt.Report().raise_if_different()
        """
        if self.findings:
            raise PipelineDiffers(str(self), findings=self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return (
                f"the pipeline computes the same as the uncut model: {self.values} values, the largest relative difference is "
                f"{self.largest:.1g}"
            )
        lines = [f"the pipeline differs from the uncut model in {len(self.findings)} of {self.values} comparisons"]
        return "\n".join([*lines, *(f"{index}. {finding}" for index, finding in enumerate(self.findings[:10], start=1))])
