"""PyTorch's tables of a pipeline as text, in the notation that both sides share.

A table has one row for each rank, and a row has one action or bubble (`None`) for each position. The text of an action is
PyTorch's own (`2F0`, `1RECV_B3`), which `pipewright` reads. Two things differ between versions of PyTorch: the waits for
sends and the waits for reductions (`versions.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipewright_pp.torch.errors import TableError

#: The text of an action or of two at once, as in PyTorch's and Pipewright's files.
_ACTION = re.compile(r"\d+[A-Z_]+\d*|\((?:\d+[A-Z_]+\d*;)+\d+[A-Z_]+\d*\)[A-Z_]+")
_COMMUNICATION = re.compile(r"\d+(?:SEND|RECV|WAIT_SEND)_[FB]\d+")
_SEND = re.compile(r"(\d+)(SEND_[FB])(\d+)")
_OFFLOAD = re.compile(r"\d+(?:OFFLOAD|RELOAD)\d+")
_WAIT = re.compile(r"\d+(?:WAIT_SEND_[FB]\d+|WAIT_REDUCE_GRAD)")

Rows = list[list[str]]


def rows_of(table: Any) -> Rows:
    """Returns the rows of a table: a mapping from ranks to rows, or a sequence of rows.

    Raises `TableError` if it is something else, if a rank is missing, or if an entry is not an action.
    """
    if isinstance(table, Mapping):
        expected = list(range(len(table)))
        if sorted(table, key=str) != sorted(expected, key=str):
            raise TableError(
                f"the table has rows for the ranks {list(table)}; a row for each of {len(table)} ranks from 0 was expected"
            )
        table = [table[rank] for rank in expected]
    if not isinstance(table, Sequence) or isinstance(table, (str, bytes)):
        raise TableError(
            f"the table is of type {type(table).__name__}; a row of actions for each rank was expected, as in `pipeline_order`"
        )
    if not table:
        raise TableError("the table is empty; a row of actions for each rank was expected")
    return [_row(rank, row) for rank, row in enumerate(table)]


def communicates(rows: Rows) -> bool:
    """Returns whether the rows have messages."""
    return any(_COMMUNICATION.fullmatch(cell) for row in rows for cell in row)


def with_waits(rows: Rows) -> Rows:
    """Adds the wait that tables before 2.15 imply: each reduction of gradients is complete when its action ends.

    The waits for sends are left to Pipewright, whose sends need none.
    """
    if any(cell.endswith("WAIT_REDUCE_GRAD") for row in rows for cell in row):
        return rows
    return [[part for cell in row for part in _with_wait(cell)] for row in rows]


def offloads(rows: Rows) -> list[str]:
    """Returns the actions that move tensors out of memory or back, which PyTorch does not know."""
    return [cell for row in rows for cell in row if _OFFLOAD.fullmatch(cell)]


def without_waits(rows: Rows) -> Rows:
    """Removes all waits, for a version that does not know them. Its runtime waits for sends at the end of a step."""
    return [[cell for cell in row if not _WAIT.fullmatch(cell)] for row in rows]


def unwaited_sends(rows: Rows) -> list[str]:
    """Returns the sends that no wait follows."""
    sends = [match for row in rows for cell in row if (match := _SEND.fullmatch(cell))]
    waits = {cell for row in rows for cell in row if _WAIT.fullmatch(cell)}
    return [match[0] for match in sends if f"{match[1]}WAIT_{match[2]}{match[3]}" not in waits]


def parts_of(cell: str) -> list[str]:
    """Returns the actions of a cell: two or more for an overlap, otherwise one."""
    return cell[1 : cell.index(")")].split(";") if cell.startswith("(") else [cell]


def _with_wait(cell: str) -> list[str]:
    is_reduction = re.fullmatch(r"\d+REDUCE_GRAD", cell)
    return [cell, cell.replace("REDUCE_GRAD", "WAIT_REDUCE_GRAD")] if is_reduction else [cell]


def _row(rank: int, row: Any) -> list[str]:
    if not isinstance(row, Sequence) or isinstance(row, (str, bytes)):
        raise TableError(f"row {rank} of the table is {row!r}; a sequence of actions was expected", rank=rank)
    return [_cell(rank, position, action) for position, action in enumerate(row)]


def _cell(rank: int, position: int, action: Any) -> str:
    if action is None or action == "":
        return ""
    text = str(action).strip()
    is_action = isinstance(action, str) or hasattr(action, "computation_type")
    if not is_action or not _ACTION.fullmatch(text):
        raise TableError(
            f"rank {rank}, position {position}: read {action!r}; an action such as 2F0, or None for a bubble, was expected",
            rank=rank,
            position=position,
        )
    return text
