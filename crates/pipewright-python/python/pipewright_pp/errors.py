"""The exceptions of the package, with what they say as fields.

All of them are `PipewrightError`. Wrong input is also a `ValueError`, and a schedule that does not fit into the
memory is also a `MemoryError`. A file that cannot be read raises Python's own `OSError`, and a wrong argument a plain
`ValueError` or `TypeError`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ClusterError",
    "CostsError",
    "InternalError",
    "LowerError",
    "OutOfMemoryError",
    "ParseError",
    "PipewrightError",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "ValidationError",
    "Violation",
]


class Violation(NamedTuple):
    """A place in a program where it is unsound."""

    rank: int
    """The rank whose row has the violation."""
    position: int
    """The position in the row, counted from 0; of a missing action, the length of the row."""
    text: str
    """What is wrong, and what to do."""

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}: {self.text}"


class PipewrightError(Exception):
    """The base of all exceptions of the package."""

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self),), self.__dict__)


class ScheduleError(PipewrightError, ValueError):
    """The name of a schedule is unknown, or the schedule cannot have this size or setting."""

    suggestion: str | None = None
    """The nearest name of a schedule, if the name is unknown and one is similar."""


class ParseError(ScheduleError):
    """A text, a file or rows are not a schedule."""

    path: str | None = None
    """The file, if it was read from one."""
    line: int | None = None
    """The line of a text, counted from 1, if the mistake has one."""
    column: int | None = None
    """The column of the line in bytes, counted from 1."""
    rank: int | None = None
    """The rank of a row that is not text, if the mistake has one."""
    position: int | None = None
    """The position in that row, counted from 0."""


class LowerError(PipewrightError, ValueError):
    """A pass does not exist, has no effect in its place, or fails."""

    blocked: list[str] = []
    """The ranks that wait for each other, if no order of messages exists."""


class ValidationError(PipewrightError, ValueError):
    """A program is unsound, or unsound on a transport."""

    violations: list[Violation] = []
    """Every violation that is listed. On a transport: the receives that get another tensor, and the actions that wait
    for each other, each for the next one and the last one for the first."""
    omitted: int = 0
    """The number of violations that are not listed."""
    verdicts: dict[str, str] = {}
    """The verdict of each transport that was asked for: `sound`, `may hang`, `crossed` or `crossed, may hang`."""


class CostsError(PipewrightError, ValueError):
    """Costs are out of range, or do not fit the number of stages."""


class ClusterError(PipewrightError, ValueError):
    """A model, a machine or a layout of a prediction has a mistake, or they do not fit each other."""

    problems: list[str] = []
    """Every problem."""


class ProfileError(PipewrightError, ValueError):
    """A profile has invalid values, or a key that no profile has."""

    problems: list[str] = []
    """Every problem."""


class PlanError(PipewrightError, ValueError):
    """No plan meets a request, or a cut does not fit its profile."""

    rank: int | None = None
    """The rank that lacks the most memory, if no plan fits."""
    needed: int | None = None
    """The bytes that it needs in the plan that lacks the least."""
    memory: int | None = None
    """The bytes that it has."""


class OutOfMemoryError(PipewrightError, MemoryError):
    """A schedule would not fit into the free memory. It is refused before anything is allocated for it."""

    cells: int = 0
    """The most cells that the schedule has."""
    needed: int = 0
    """The bytes that it needs at most."""
    free: int = 0
    """The bytes that are free."""


class InternalError(PipewrightError, RuntimeError):
    """A mistake of the package itself. Please report it."""
