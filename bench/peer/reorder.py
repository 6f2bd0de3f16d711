"""Moves sends, receives and waits of a program to other positions that its computations allow.

A program has one row of cells for each rank, in PyTorch's notation: `2F0`, `1RECV_B3`, `(0F1;3B0)OVERLAP_F_B`.
"""

import random
import re

CELL = re.compile(r"(\d+)([A-Z_]+?)(\d*)$")
MESSAGE = re.compile(r"(\d+)((?:WAIT_)?(?:SEND|RECV)_[FB])(\d+)$")


def parts(cell):
    """The actions of a cell, each as its stage, its kind and its microbatch (`None` if it has none)."""
    inner = cell[1 : cell.index(")")].split(";") if cell.startswith("(") else [cell]
    found = [CELL.match(part).groups() for part in inner]
    return [(int(stage), kind, int(microbatch) if microbatch else None) for stage, kind, microbatch in found]


def is_message(cell):
    """Whether a cell is a send, a receive or the wait for a send."""
    return MESSAGE.match(cell) is not None


def is_operation(cell):
    """Whether a cell is a send or a receive."""
    return is_message(cell) and "WAIT" not in cell


def reordered(rows, seed):
    """The rows with one to four sends, receives or waits moved."""
    rows = [list(row) for row in rows]
    chosen = random.Random(seed)
    for _ in range(chosen.randint(1, 4)):
        row = chosen.choice([row for row in rows if any(map(is_message, row))])
        moved = chosen.choice([cell for cell in row if is_message(cell)])
        row.remove(moved)
        first, last = bounds(row, moved)
        row.insert(chosen.randint(first, last), moved)
    return rows


def bounds(rest, cell):
    """The first and the last position for a message or its wait, in the row without it."""
    stage, kind, microbatch = parts(cell)[0]
    direction = kind[-1]
    computation = position(rest, stage, "F" if direction == "F" else "BI", microbatch)
    if kind.startswith("RECV"):
        return 0, computation
    if kind.startswith("WAIT"):
        return rest.index(f"{stage}SEND_{direction}{microbatch}") + 1, len(rest)
    wait = f"{stage}WAIT_SEND_{direction}{microbatch}"
    ends = [rest.index(wait) if wait in rest else len(rest)]
    # The backward of a stage drops the output of its forward.
    ends += [position(rest, stage, "BI", microbatch)] if direction == "F" else []
    return computation + 1, min(ends)


def position(row, stage, kinds, microbatch):
    """The position of the computation of one of the kinds; the end of the row if it has none."""
    wanted = [(stage, kind, microbatch) for kind in kinds]
    return next((index for index, cell in enumerate(row) if any(part in wanted for part in parts(cell))), len(row))
