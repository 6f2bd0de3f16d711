"""Proves, predicts, plans and draws pipeline-parallel training.

>>> import pipewright_pp as pw
>>> schedule = pw.schedule("1f1b", ranks=4, microbatches=8)
>>> program = schedule.lower()
>>> program.validate()
{}
>>> timeline = program.simulate(costs=pw.Costs(forward=1, backward=2))
>>> timeline.makespan, round(timeline.bubble_fraction, 3)
(30.0, 0.2)

The package `pipewright` of PyPI is another project. The command line `pipewright` has the same names and numbers. Long calls release the interpreter's lock and end with
Ctrl-C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipewright_pp import errors
from pipewright_pp._native import (
    Comparison,
    Costs,
    Frame,
    Plan,
    Profile,
    Program,
    Schedule,
    Timeline,
    __version__,
    compare,
    plan,
    read_csv,
    read_trace,
    schedule,
    schedules,
)
from pipewright_pp.errors import *

if TYPE_CHECKING:
    from pipewright_pp.lateness import Gain, LateAction, LateCause, Lateness, compare_timelines

__all__ = [
    *errors.__all__,
    "Comparison",
    "Costs",
    "Frame",
    "Gain",
    "LateAction",
    "LateCause",
    "Lateness",
    "Plan",
    "Profile",
    "Program",
    "Schedule",
    "Timeline",
    "__version__",
    "compare",
    "compare_timelines",
    "plan",
    "read_csv",
    "read_trace",
    "schedule",
    "schedules",
]


def __getattr__(name: str) -> object:
    """Imports the comparison of timelines when it is used, because an import of the package is fast."""
    if name in ("Gain", "LateAction", "LateCause", "Lateness", "compare_timelines"):
        from pipewright_pp import lateness

        return getattr(lateness, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
