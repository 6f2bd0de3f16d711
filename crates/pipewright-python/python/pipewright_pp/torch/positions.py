"""Where a rank stands in a step that does not end: its operations, its last action, and its place in the program."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tables import Rows, parts_of

#: The operations that have one peer. All others are collective operations of a group.
PEER_KINDS = ("send", "recv")

#: The group, the kind (`send`, `recv` or `collective`), the peer (None for a collective operation) and the tag of operations
#: that are matched in their order.
Stream = tuple[str, str, "int | None", int]


@dataclass(frozen=True)
class Operation:
    """An operation of torch.distributed on one rank.

    >>> from pipewright_pp.torch import Operation
    >>> print(Operation("recv", "0", 3, peer=2, tag=7, shapes=("float32[4, 8]",), bytes=128, action="1RECV_F2"))
    1RECV_F2 (recv 3 from rank 2, tag 7, float32[4, 8], 128 bytes)
    """

    kind: str
    """`send`, `recv`, or the name of a collective operation."""
    group: str
    """The name of the process group."""
    number: int
    """Its number in its stream, counted from 1: the operations with the same group, peer, direction and tag."""
    peer: int | None = None
    """The other rank; None for a collective operation, and for a receive from any rank."""
    tag: int = 0
    shapes: tuple[str, ...] = ()
    """The types and shapes of its tensors, such as `float32[4, 8]`."""
    bytes: int = 0
    """The size of its tensors."""
    action: str | None = None
    """The action of the schedule that it is a part of, such as `1RECV_F2`, if that is known."""
    is_dropped: bool = False
    """Whether its work was dropped without a wait, which may cancel it."""

    @property
    def stage(self) -> int | None:
        """The stage of the action."""
        return int(self.action[: _digits(self.action)]) if self.action else None

    @property
    def microbatch(self) -> int | None:
        """The microbatch of the action."""
        return int(self.action[-_digits(self.action[::-1]) :]) if self.action else None

    @property
    def stream(self) -> Stream:
        """The operations among which `number` counts."""
        return (self.group, self.kind if self.kind in PEER_KINDS else "collective", self.peer, self.tag)

    def __str__(self) -> str:
        shown = [f"{self.kind} {self.number}"]
        if self.kind in PEER_KINDS:
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            shown = [f"{shown[0]} {'to' if self.kind == 'send' else 'from'} {other}", f"tag {self.tag}"]
        elif self.group:
            shown = [f"{self.kind}, operation {self.number} of group {self.group}"]
        shown += [*self.shapes[:2], *(["..."] if len(self.shapes) > 2 else []), *([f"{self.bytes} bytes"] if self.shapes else [])]
        text = ", ".join(shown)
        return f"{self.action} ({text})" if self.action else text


def _digits(text: str) -> int:
    return len(text) - len(text.lstrip("0123456789"))


#: The wait for an operation that was issued before the hooks, or by C++ (such as the reductions of DDP).
UNKNOWN = Operation("an operation that the watch does not see", "", 0)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands in the program of its schedule."""

    digest: str
    """Names the program of all ranks."""
    place: str
    """The last action that it has begun, with its number in the rank's row."""
    departure: str | None = None
    """The first action that is not the program's next one."""


def standing_of(rows: Rows, row: int, ran: Sequence[str], *, computations_only: bool) -> Standing:
    """Returns where a rank stands that has begun the actions `ran` of its row in this step.

    Single-stage schedules join messages, so only their computations have the order of the program.
    """
    digest = hashlib.sha256("\n".join(",".join(of_rank) for of_rank in rows).encode()).hexdigest()
    own = rows[row] if 0 <= row < len(rows) else []
    expected = [part for cell in own for part in parts_of(cell) if _is_recorded(part, computations_only)]
    found = [action for action in ran if not computations_only or "_" not in action]
    departure = None
    for index, action in enumerate(found):
        if index >= len(expected) or action != expected[index]:
            due = expected[index] if index < len(expected) else "the end of the step"
            departure = f"it runs {action} as action {index + 1} of the step, where the program has {due}"
            break
    place = "before its first action"
    if found:
        at = next((index for index, cell in enumerate(own) if found[-1] in parts_of(cell)), None)
        place = f"in {found[-1]}, which is not in its row" if at is None else f"at {found[-1]}, action {at + 1} of {len(own)}"
    return Standing(digest, place, departure)


def _is_recorded(action: str, computations_only: bool) -> bool:
    kind = action.strip("0123456789")
    return kind in ("F", "B", "I", "W") or (not computations_only and kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))


@dataclass(frozen=True)
class Position:
    """Where a rank stands: the answer of its monitor."""

    rank: int
    state: str = "inside"
    """`inside` the watch, `left` it, `failed` by an exception in it, or its process has `ended`."""
    failure: str = ""
    """The exception of a rank that has failed."""
    step: int = 0
    """The number of the schedule's steps that it has begun, or of the blocks that it has entered without a schedule."""
    kind: str = ""
    """`step` or `eval` while it is in a call of the schedule."""
    action: str | None = None
    """The last action that it has begun."""
    waits: tuple[Operation, ...] = ()
    """The operations that it waits for."""
    streams: Mapping[Stream, tuple[Operation, ...]] = field(default_factory=dict)
    """The last operations of each stream."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each process group that it has used."""
    where: str = ""
    """The line of the user's code that it runs, and the function that is called there."""
    idle_s: float = 0.0
    """The seconds since an operation or an action has begun or ended."""
    standing: Standing | None = None
    """Its place in the program, if the schedule is known."""

    def count(self, stream: Stream) -> int:
        """Returns the number of operations that it has issued in a stream."""
        return self.streams[stream][-1].number if stream in self.streams else 0

    def issued(self, stream: Stream, number: int) -> Operation | None:
        """Returns an operation by its number, if it is one of the last ones of its stream."""
        return next((operation for operation in self.streams.get(stream, ()) if operation.number == number), None)


def shape_text(dtype: Any, shape: Sequence[int]) -> str:
    """Returns a type and a shape as text."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def size_of(dtype: Any, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor."""
    return int(dtype.itemsize) * math.prod(shape)
