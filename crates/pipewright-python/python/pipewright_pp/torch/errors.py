"""The exceptions of `pipewright_pp.torch`: each says what was read and what was expected."""

from __future__ import annotations

from typing import Any

from pipewright_pp.errors import PipewrightError

__all__ = [
    "ChainError",
    "HangError",
    "MeasureError",
    "PipelineDiffers",
    "PlanMismatch",
    "TableError",
    "TraceError",
    "UntestedVersion",
    "VerifyError",
]


def sentence_of(error: BaseException) -> str:
    """Returns the text of an error in one line. The name of its class is a part of it, unless the error is of this package."""
    if isinstance(error, (PipewrightError, OSError)) and str(error):
        return str(error)
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__


class UntestedVersion(PipewrightError, RuntimeError):
    """PyTorch is missing, or its version was never tried."""

    read: str | None = None
    """The version; None if PyTorch cannot be imported."""
    expected: str = ""
    """The versions that were tried."""


class TableError(PipewrightError, ValueError):
    """A value is not a schedule of PyTorch, or its table has other entries than actions."""

    rank: int | None = None
    """The rank of the entry, if one entry is wrong."""
    position: int | None = None
    """The position of the entry in its row, counted from 0."""


class PlanMismatch(PipewrightError, ValueError):
    """A plan does not fit the stages, the layers or the process group, or PyTorch cannot run it."""


class TraceError(PipewrightError, ValueError):
    """A trace cannot be read as the step of a pipeline."""

    trace: str | None = None
    """The file of the trace, if one trace is wrong."""


class MeasureError(PipewrightError, ValueError):
    """The machine cannot be measured as asked: a device or a folder is missing, or the ranks do not fit each other."""


class ChainError(PipewrightError, ValueError):
    """Modules cannot be measured as the layers of a model."""

    layer: int | None = None
    """The layer, counted from 0, if one layer is wrong."""


class VerifyError(PipewrightError, ValueError):
    """A pipeline cannot be verified as asked: an argument is wrong, or a rank has failed or does not respond."""

    rank: int | None = None
    """The rank, if one rank has failed or does not respond."""
    timed_out: bool = False
    """Whether a wait has ended without a result, so that the error of another rank may be the cause."""


class PipelineDiffers(PipewrightError, ValueError):
    """A pipeline computes something else than the uncut model."""

    findings: tuple[Any, ...] = ()
    """The differences (`pipewright_pp.torch.Finding`), the first one first."""


class HangError(PipewrightError, RuntimeError):
    """A step does not end, and this rank waits in it for another one."""

    report: Any = None
    """The waits of all ranks (`pipewright_pp.torch.HangReport`)."""
