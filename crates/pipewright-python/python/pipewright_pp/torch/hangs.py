"""The result of `watch`: who waits for which operation of whom, the cycle, and the wait that nobody answers.

Rules. Operations of one stream (group, direction, peer and tag) are matched in their order, as Gloo does. A rank that waits
for its operation `n` waits for every rank that has not issued its part of `n`. If the waits form a cycle, its ranks are the
culprits. Otherwise each chain of waits ends at a rank that does not wait: it has ended, failed, left, or still computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .positions import PEER_KINDS, UNKNOWN, Operation, Position

#: The lines of each part of a report.
_SHOWN = 8


@dataclass(frozen=True)
class Wait:
    """A rank that waits for an operation.

    >>> from pipewright_pp.torch import Operation, Wait
    >>> print(Wait(0, Operation("recv", "0", 1, peer=1), on=(1,), why="rank 1 has finished its step"))
    rank 0 waits for recv 1 from rank 1, tag 0: rank 1 has finished its step
    """

    rank: int
    operation: Operation
    """The operation of this rank that does not end."""
    on: tuple[int, ...] = ()
    """The ranks that have not done their part. Empty if all have: the operation is under way."""
    why: str = ""
    """What the others do instead."""
    place: str = ""
    """Where the rank stands: its step, its place in the program and its line."""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"rank {self.rank}{place} waits for {self.operation}: {self.why}"


@dataclass(frozen=True)
class HangReport:
    """The ranks of a step that does not end.

    >>> from pipewright_pp.torch import HangReport, Operation, Wait
    >>> waits = (Wait(0, Operation("recv", "0", 1, peer=1), (1,)), Wait(1, Operation("recv", "0", 1, peer=0), (0,)))
    >>> HangReport(waits=waits, cycle=(0, 1), culprits=(0, 1)).cycle
    (0, 1)
    """

    waits: tuple[Wait, ...] = ()
    """The waits of all ranks."""
    cycle: tuple[int, ...] = ()
    """Ranks that wait for each other: each for the next one, and the last for the first. Empty without a cycle."""
    culprits: tuple[int, ...] = ()
    """The ranks where the reason is: of the cycle, and those for which others wait and that do not wait."""
    ends: Mapping[int, str] = field(default_factory=dict)
    """What the ranks do for which others wait, and that do not wait."""
    notes: tuple[str, ...] = ()
    """Operations without a counterpart, messages of different sizes, and departures from the program."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """Where each rank stands that has answered."""
    silent: Mapping[int, str] = field(default_factory=dict)
    """The ranks that have not answered, and what is known of them."""
    idle_s: float = 0.0
    """The seconds without progress."""
    error: str = ""
    """The error of the operation that has failed, if one has: on Gloo, the end of a process is an error for its peers."""

    def __str__(self) -> str:
        count = len(self.positions) + len(self.silent)
        waiting = {wait.rank for wait in self.waits}
        reason = f"an operation has failed ({self.error})" if self.error else f"no progress for {self.idle_s:.3g} s"
        lines = [f"the step does not end: {reason}, {len(waiting)} of {count} ranks wait"]
        if self.cycle:
            lines.append("cycle: " + " -> ".join(_shortened([*self.cycle, self.cycle[0]])))
        lines += [f"rank {rank} {text}" for rank, text in list(self.ends.items())[:_SHOWN]]
        if len(self.ends) > _SHOWN:
            lines.append(f"not waiting either: {_ranges(list(self.ends)[_SHOWN:])}")
        shown: list[Wait] = []
        for chosen in (self.culprits, self.ends, waiting if count <= _SHOWN else ()):
            shown += [wait for wait in self.waits if wait not in shown and (wait.rank in chosen or set(wait.on) & set(chosen))]
        lines += [f"  {wait}" for wait in shown[:_SHOWN]]
        lines += [f"  {note}" for note in self.notes[:_SHOWN]]
        named = {wait.rank for wait in shown[:_SHOWN]} | set(self.ends)
        if rest := sorted(waiting - named):
            lines.append(f"waiting for these: {_ranges(rest)}")
        if others := sorted(set(self.positions) - waiting - named):
            lines.append(f"not waiting, and nobody waits for them: {_ranges(others)}")
        if unheard := sorted(set(self.silent) - named):
            lines.append(f"not answering: {_ranges(unheard)}; {self.silent[unheard[0]]}")
        return "\n".join(lines)


def judge(
    positions: Mapping[int, Position], silent: Mapping[int, str], *, idle_s: float = 0.0, error: str = "", verdict: str = ""
) -> HangReport:
    """Returns the report. `verdict` says whether the program itself is wrong, if it is known."""
    waits = [wait for position in positions.values() for wait in _waits_of(position, positions, silent)]
    targets: dict[int, set[int]] = {}
    for wait in waits:
        targets.setdefault(wait.rank, set()).update(wait.on)
    waiting = {rank for rank, on in targets.items() if on}
    ends = {
        rank: _doing(positions.get(rank), silent.get(rank, ""), idle_s)
        for rank in sorted({rank for on in targets.values() for rank in on} - waiting)
    }
    if not waits:
        ends = {rank: _doing(position, "", idle_s) for rank, position in positions.items() if position.state == "inside"}
        ends |= {rank: f"does not answer: {reason}" for rank, reason in silent.items()}
    cycle = _cycle({rank: on & waiting for rank, on in targets.items()})
    notes, named = _departures(positions)
    named |= _droppers(waits, positions)
    culprits = named or _culprits(waits, ends, cycle, positions)
    if verdict:
        notes.insert(0, verdict)
    notes += _sizes(positions)
    running = {rank for rank in ends if rank in positions and positions[rank].state == "inside"}
    notes += _unmatched(positions, {(wait.rank, wait.operation) for wait in waits}, running)
    return HangReport(
        tuple(waits), cycle, tuple(sorted(culprits)), ends, tuple(notes), dict(positions), dict(silent), idle_s, error
    )


def _waits_of(position: Position, positions: Mapping[int, Position], silent: Mapping[int, str]) -> list[Wait]:
    found = []
    for operation in position.waits:
        on = () if operation == UNKNOWN else _missing(position.rank, operation, positions)
        why = _why(position, operation, on, positions, silent)
        found.append(Wait(position.rank, operation, on, why, _place(position)))
    return found


def _missing(rank: int, operation: Operation, positions: Mapping[int, Position]) -> tuple[int, ...]:
    """Returns the ranks that have not done their part of an operation."""
    members = [member for member in positions[rank].groups.get(operation.group, ()) if member != rank]
    if operation.kind not in PEER_KINDS:
        return tuple(member for member in members if not _joins(positions.get(member), operation))
    other_kind = "recv" if operation.kind == "send" else "send"
    if operation.peer is None:
        given = sum(positions[member].count((operation.group, "send", rank, operation.tag)) for member in members if member in positions)
        return () if given >= operation.number else tuple(members)
    other = positions.get(operation.peer)
    if other is None:
        return (operation.peer,)
    if (matched := _counterpart(rank, operation, positions)) is not None and matched.is_dropped:
        return (operation.peer,)
    counts = [other.count((operation.group, other_kind, rank, operation.tag))]
    if other_kind == "recv":
        counts.append(other.count((operation.group, "recv", None, operation.tag)))
    return () if sum(counts) >= operation.number else (operation.peer,)


def _counterpart(rank: int, operation: Operation, positions: Mapping[int, Position]) -> Operation | None:
    """Returns the operation of the peer that a send or a receive is matched with."""
    if operation.peer is None or operation.peer not in positions or operation.kind not in PEER_KINDS:
        return None
    kind = "recv" if operation.kind == "send" else "send"
    return positions[operation.peer].issued((operation.group, kind, rank, operation.tag), operation.number)


def _joins(member: Position | None, operation: Operation) -> bool:
    """Returns whether a rank has issued the same collective operation."""
    if member is None or member.count(operation.stream) < operation.number:
        return False
    own = member.issued(operation.stream, operation.number)
    if own is None:
        return True
    same_shape = not operation.kind.startswith(("all_reduce", "broadcast")) or own.shapes == operation.shapes
    return own.kind == operation.kind and same_shape


def _why(
    position: Position, operation: Operation, on: tuple[int, ...], positions: Mapping[int, Position], silent: Mapping[int, str]
) -> str:
    if operation == UNKNOWN:
        return "its other ranks are not known"
    if (matched := _counterpart(position.rank, operation, positions)) is not None and matched.is_dropped:
        return f"rank {operation.peer} has dropped the work of {matched} without waiting for it"
    if not on:
        return "all ranks have done their part, so it is under way, or its link is slow or broken"
    texts = []
    for rank in on[:3]:
        other = positions.get(rank)
        if other is None:
            texts.append(f"rank {rank} does not answer")
        elif operation.kind not in PEER_KINDS and (own := other.issued(operation.stream, operation.number)) is not None:
            texts.append(f"rank {rank} has {own} in its place")
        else:
            texts.append(_instead(position, operation, other) or f"rank {rank} {_short(other)}")
    return "; ".join([*texts, *([f"and {_ranges(on[3:])}"] if len(on) > 3 else [])])


def _instead(position: Position, operation: Operation, other: Position) -> str:
    """Returns the operation of the other rank that this rank does not match, if there is one: another tag, or another group."""
    wanted = "recv" if operation.kind == "send" else "send"
    for stream, issued in other.streams.items():
        _, kind, peer, tag = stream
        is_unmatched = issued[-1].number > position.count((stream[0], operation.kind, other.rank, tag))
        if operation.kind in PEER_KINDS and kind == wanted and peer == position.rank and is_unmatched:
            return f"rank {other.rank} has {issued[-1]} instead"
    return ""


def _short(position: Position) -> str:
    """Returns what a rank does, in some words."""
    if position.state == "failed":
        return "has failed"
    if position.state in ("left", "ended"):
        return "has left the watch" if position.state == "left" else "has ended"
    if position.waits:
        return f"waits for {position.waits[0]}"
    return f"is at {position.where}" if position.where else "runs"


def _doing(position: Position | None, silent: str, idle_s: float) -> str:
    """Returns what a rank does that does not wait."""
    if position is None:
        return f"does not answer: {silent or 'it has no monitor'}"
    if position.state == "failed":
        return f"has failed in step {position.step}: {position.failure}"
    if position.state == "ended":
        return f"has ended after step {position.step}"
    if position.state == "left":
        return f"has left the watch after step {position.step}" + (f" and is at {position.where}" if position.where else "")
    if position.waits:
        return f"waits for {position.waits[0]}, which the others have answered"
    begun = f"in action {position.action} of step {position.step}" if position.kind and position.action else f"in step {position.step}"
    finished = position.standing is not None and not position.kind
    begun = f"has finished step {position.step} of its schedule and" if finished else f"does not wait: {begun}, it"
    where = f"is at {position.where}" if position.where else "runs Python code"
    still = f" for {position.idle_s:.3g} s" if position.idle_s >= idle_s / 2 else ""
    return f"{begun} {where}{still}"


def _place(position: Position) -> str:
    parts = [f"step {position.step}"]
    if position.standing is not None and position.kind:
        parts.append(position.standing.place)
    return ", ".join([*parts, *([position.where] if position.where else [])])


def _cycle(targets: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Returns the shortest cycle through the lowest rank that is on one."""
    left = {rank: set(on) for rank, on in targets.items() if on}
    while True:
        entered = {rank for on in left.values() for rank in on}
        kept = {rank: on & set(left) for rank, on in left.items() if rank in entered and on & set(left)}
        if kept == left:
            break
        left = kept
    for start in sorted(left):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            for rank in sorted(left[path[-1]]):
                if rank == start:
                    return tuple(path)
                if rank not in seen:
                    seen.add(rank)
                    paths.append([*path, rank])
    return ()


def _culprits(
    waits: Sequence[Wait], ends: Mapping[int, str], cycle: tuple[int, ...], positions: Mapping[int, Position]
) -> set[int]:
    culprits = set(ends) | set(cycle)
    for wait in waits:
        if not wait.on and wait.operation != UNKNOWN and not culprits:
            culprits |= {wait.rank} | ({wait.operation.peer} if wait.operation.peer is not None else set())
        for rank in wait.on:
            other = positions.get(rank)
            # A rank that has finished the same step may lack the operation, or the rank that waits has one too many.
            finished = (
                other is not None
                and rank in ends
                and (other.state in ("left", "ended") or (other.standing is not None and not other.kind))
            )
            if finished and wait.operation.kind in PEER_KINDS and other is not None and other.step == positions[wait.rank].step:
                culprits.add(wait.rank)
    return culprits


def _droppers(waits: Sequence[Wait], positions: Mapping[int, Position]) -> set[int]:
    """Returns the ranks that have dropped the work of an operation for which another rank waits."""
    matched = [(wait.operation.peer, _counterpart(wait.rank, wait.operation, positions)) for wait in waits]
    return {peer for peer, operation in matched if peer is not None and operation is not None and operation.is_dropped}


def _departures(positions: Mapping[int, Position]) -> tuple[list[str], set[int]]:
    """Returns how ranks differ in what they execute, and the ranks that differ from most."""
    notes, ranks = [], set()
    digests = {rank: position.standing.digest for rank, position in positions.items() if position.standing is not None}
    kinds = {rank: position.kind for rank, position in positions.items() if position.kind}
    for values, text in ((digests, "another program than the others"), (kinds, "another call than the others")):
        counts = Counter(values.values())
        if len(counts) > 1:
            largest = max(counts.values())
            usual = [value for value, count in counts.items() if count == largest]
            different = [rank for rank, value in values.items() if len(usual) > 1 or value != usual[0]]
            calls = f" ({', '.join(f'rank {rank} in {kinds[rank]}()' for rank in sorted(kinds)[:4])})" if values is kinds else ""
            notes.append(f"{text}: {_ranges(different)}{calls}")
            ranks |= set(different)
    for rank, position in positions.items():
        if position.standing is not None and position.standing.departure and position.kind == "step":
            notes.append(f"rank {rank} departs from the program: {position.standing.departure}")
            ranks.add(rank)
    return notes, ranks


def _sizes(positions: Mapping[int, Position]) -> list[str]:
    """Returns the messages whose sender and receiver have tensors of different sizes, among the last ones."""
    notes = []
    for rank, position in positions.items():
        for (_, kind, peer, _), issued in position.streams.items():
            if kind != "send" or peer is None or peer not in positions:
                continue
            for operation in issued:
                received = _counterpart(rank, operation, positions)
                if received is not None and received.bytes != operation.bytes:
                    notes.append(f"different sizes: rank {rank} has {operation}, and rank {peer} has {received}")
    return notes


def _unmatched(positions: Mapping[int, Position], waited: set[tuple[int, Operation]], running: set[int]) -> list[str]:
    """Returns the operations without a counterpart that no rank waits for. Ranks that still run may yet issue it."""
    notes = []
    for rank, position in positions.items():
        for (group, kind, peer, tag), issued in position.streams.items():
            if peer is None or peer not in positions or peer in running or (rank, issued[-1]) in waited:
                continue
            other = "recv" if kind == "send" else "send"
            done = positions[peer].count((group, other, rank, tag)) + positions[peer].count((group, other, None, tag))
            if issued[-1].number > done:
                notes.append(f"rank {rank} has issued {issued[-1]}, and rank {peer} has no {other} for it")
    return notes


def _ranges(given: Iterable[int]) -> str:
    """Returns ranks as text: ranks 0, 2-5."""
    runs: list[list[int]] = []
    ranks = sorted(given)
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _shortened(ranks: Sequence[int]) -> list[str]:
    shown = [f"rank {rank}" for rank in ranks]
    return shown if len(shown) <= 2 * _SHOWN else [*shown[:_SHOWN], "...", *shown[-2:]]
