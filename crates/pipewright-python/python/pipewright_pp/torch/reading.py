"""`program_of`: a schedule of PyTorch as a program, for `validate`, `simulate` and `view`."""

from __future__ import annotations

from typing import Any

import pipewright_pp
from pipewright_pp.torch import tables, versions
from pipewright_pp.torch.errors import TableError
from pipewright_pp.torch.tables import Rows

#: The single-stage schedules by the names that Pipewright has for the order in which they compute. Their tables are not
#: read: `Schedule1F1B` numbers the microbatches of its last rank from 1 in `pipeline_order`, and does not run this table.
SINGLE_STAGE = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "_ScheduleForwardOnly": "forwardonly"}


def program_of(schedule: Any, *, allow_untested: bool = False) -> pipewright_pp.Program:
    """Reads a schedule of `torch.distributed.pipelining`, or a table of actions, as a program.

    A multi-stage schedule has a table with messages, which is read as it is. Single-stage schedules, and tables of
    computations alone, get a receive directly before each computation that needs a tensor and a send directly after
    the one that makes it. A table is what PyTorch has in `pipeline_order`: for each rank its actions, or their texts.

    Raises `TableError` if the value is something else or its actions do not form a schedule, and `UntestedVersion` for a
    schedule object of a version that was never tried.
    """
    if not _is_schedule(schedule):
        return program_of_rows(tables.with_waits(tables.rows_of(schedule)))
    versions.load(allow_untested=allow_untested)
    name = next((SINGLE_STAGE[of.__name__] for of in type(schedule).__mro__ if of.__name__ in SINGLE_STAGE), None)
    if name is None:
        return program_of_rows(tables.with_waits(rows_of_schedule(schedule)))
    computations = pipewright_pp.schedule(name, ranks=schedule._num_stages, microbatches=schedule._n_microbatches)
    return computations.lower(passes=["send-recv"] if name == "forwardonly" else ["reduce-grad", "send-recv"])


def program_of_rows(rows: Rows) -> pipewright_pp.Program:
    """Returns the program of a table's rows; a table without messages is lowered."""
    try:
        program = pipewright_pp.Program(rows)
        return program if tables.communicates(rows) else program.lower(passes=["send-recv"])
    except pipewright_pp.PipewrightError as error:
        raise TableError(f"the actions of the table do not form a schedule: {error}") from error


def rows_of_schedule(schedule: Any) -> Rows:
    """Returns the rows of a schedule object, with messages if it has such rows.

    Raises `TableError` if it has no rows.
    """
    table = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if table:
        return tables.rows_of(table)
    raise TableError(
        f"the {type(schedule).__name__} has no table yet; load one (`_load_csv`), or construct one of PyTorch's schedules"
    )


def _is_schedule(value: Any) -> bool:
    return hasattr(value, "pipeline_order") and hasattr(value, "_n_microbatches")
