"""`compare_timelines`: a step that has run and its prediction: where the time went, and what another plan would gain.

The lateness of a step is divided along its critical path: from the last computation backwards, each begins when the one before
it on its rank has ended, or when a message has arrived. So the measured step is the sum of the actions, messages and gaps on
this path. Their predicted times, on the same path, add up to the predicted step or less. The rest is the slack of the path: the
prediction waits for something else meanwhile. Differences therefore add up to the lateness exactly.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipewright_pp import _native
from pipewright_pp._native import Costs, Program, Timeline
from pipewright_pp.errors import CostsError, PipewrightError

__all__ = ["Gain", "LateAction", "LateCause", "Lateness", "compare_timelines"]

Kind = Literal["action", "rank", "message", "link", "host", "missing", "slack"]

_COMPUTATION = re.compile(r"(\d+)([FBIW])(\d+)")

#: A rank is slow as a whole if all its kinds of actions take at least this much longer, in shares of their predicted times.
_SLOW_RANK = 0.1

#: Schedules that do not train, or cut more than microbatches.
_OTHER_KINDS = ("forwardonly", "vocab1f1b", "seq1f1b")


@dataclass(frozen=True)
class LateAction:
    """A computation of the step, measured and predicted. Times are in seconds, or in the unit of the timelines.

    >>> import pipewright_pp as pw
    >>> schedule = pw.schedule("gpipe", ranks=2, microbatches=1)
    >>> slow = schedule.simulate("F=1,B=2,hop=1")
    >>> pw.compare_timelines(slow, schedule.simulate("F=1,B=2")).actions[0].action
    '0F0'
    """

    action: str
    rank: int
    stage: int
    measured_start: float
    measured_s: float
    predicted_start: float | None
    """None if the prediction lacks the action."""
    predicted_s: float | None
    late_s: float
    """How much later it ends than predicted; both steps begin at 0. 0 if the prediction lacks it."""
    why: str
    """What adds most to the lateness here; empty if nothing is added."""
    is_critical: bool
    """Whether it is on the critical path of the measured step."""


@dataclass(frozen=True)
class LateCause:
    """A cause of the step's lateness.

    >>> import pipewright_pp as pw
    >>> schedule = pw.schedule("gpipe", ranks=2, microbatches=1)
    >>> slow = schedule.simulate("F=1,B=2,hop=1")
    >>> print(pw.compare_timelines(slow, schedule.simulate("F=1,B=2")).causes[0])
    messages from rank 0 to rank 1: 1 more (50% of the lateness)
    """

    kind: Kind
    """`action`, `rank` (all its actions), `link`, `host` (a gap in which a rank does nothing), `missing` (an action that the
    prediction lacks) or `slack` (negative: the prediction waits for something else meanwhile)."""
    text: str
    seconds: float
    """The measured time on the critical path minus the predicted time."""
    share: float
    """The share of the step's lateness; 0 if the step is not late."""
    rank: int | None
    """The rank; of a link, the receiver."""
    stage: int | None
    """The stage of an action."""
    from_rank: int | None
    """The sender of a link."""

    def __str__(self) -> str:
        share = f" ({self.share:.0%} of the lateness)" if self.share else ""
        return f"{self.text}: {abs(self.seconds):.3g} {'more' if self.seconds >= 0 else 'less'}{share}"


@dataclass(frozen=True)
class Gain:
    """What the simulator predicts for a change, from the measured costs.

    >>> import pipewright_pp as pw
    >>> schedule = pw.schedule("gpipe", ranks=2, microbatches=4)
    >>> step = schedule.simulate("F=1,B=2")
    >>> {gain.change for gain in pw.compare_timelines(step, step).gains()} >= {"8 microbatches of half the size"}
    True
    """

    change: str
    step_s: float
    """The step with the change."""
    saved_s: float
    """The measured order at the same costs minus this."""
    peak: float
    """The most activations of a rank, in microbatches of the measured step."""

    def __str__(self) -> str:
        return f"{self.change}: {self.step_s:.3g}, {self.saved_s:.3g} less ({self.peak:g} activations at most)"


@dataclass(frozen=True)
class _Event:
    action: str
    rank: int
    stage: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class _Step:
    """The computations and receives of a timeline, on a clock that begins with the step."""

    def __init__(self, timeline: Timeline):
        columns = timeline.events
        origin = min(columns["start"], default=0.0)
        rows = zip(columns["action"], columns["rank"], columns["stage"], columns["start"], columns["end"])
        events = [_Event(action, rank, stage, start - origin, end - origin) for action, rank, stage, start, end in rows]
        self.ranks = max((event.rank for event in events), default=-1) + 1
        self.receives = {(event.rank, event.action): event for event in events if "RECV_" in event.action}
        self.lanes: list[list[_Event]] = [[] for _ in range(self.ranks)]
        self.of_part: dict[str, _Event] = {}
        for event in sorted(events, key=lambda event: (event.start, event.end)):
            if parts := _parts(event.action):
                self.lanes[event.rank].append(event)
                self.of_part |= {f"{stage}{kind}{microbatch}": event for stage, kind, microbatch in parts}
        self.computations = {event.action: event for lane in self.lanes for event in lane}
        self.makespan = max((event.end for event in self.computations.values()), default=0.0)

    def predicted(self, action: str) -> tuple[float, float] | None:
        """Returns the start and the duration of an action. A whole backward has the time of its halves, if there are two."""
        if (event := self.computations.get(action)) is not None:
            return event.start, event.duration
        halves = [self.computations.get(action.replace("B", half)) for half in "IW"] if _parts(action) else []
        found = [half for half in halves if half is not None]
        return (found[0].start, sum(half.duration for half in found)) if len(found) == 2 else None

    def producer(self, event: _Event) -> _Event | None:
        """Returns the computation on another rank that an action gets its last message from."""
        found = [made for text in _needed(event.action) if (made := self.of_part.get(text)) is not None and made.rank != event.rank]
        return max(found, key=lambda made: made.end, default=None)

    def gaps(self) -> dict[str, _Gap]:
        """Returns the gap in front of each action."""
        found = {}
        for lane in self.lanes:
            free = 0.0
            for event in lane:
                found[event.action] = _gap(self, event, free)
                free = event.end
        return found

    def hops(self) -> dict[tuple[int, int], float]:
        """Returns the shortest time from the end of a computation to the start of one that gets its message, by link."""
        found: dict[tuple[int, int], float] = {}
        for event in self.computations.values():
            if (made := self.producer(event)) is not None:
                link = (made.rank, event.rank)
                found[link] = min(found.get(link, float("inf")), max(event.start - made.end, 0.0))
        return found


@dataclass(frozen=True)
class _Gap:
    """The time in front of an action: for a computation of another rank, for its message, and for nothing that is known."""

    producer: _Event | None
    waited: float
    link: float
    host: float


def _gap(step: _Step, event: _Event, free: float) -> _Gap:
    gap, made = max(event.start - free, 0.0), step.producer(event)
    if made is None or gap == 0.0:
        return _Gap(made, 0.0, 0.0, gap)
    receives = [receive for text in _receives(event.action) if (receive := step.receives.get((event.rank, text))) is not None]
    covered = gap
    if receives:
        covered = max(min(max(receive.end for receive in receives), event.start) - free, 0.0)
    elif made.end <= free:
        covered = 0.0
    waited = min(max(made.end - free, 0.0), gap)
    covered = max(covered, waited)
    return _Gap(made, waited, covered - waited, gap - covered)


def compare_timelines(measured: Timeline, predicted: Timeline) -> Lateness:
    """Compares a step that has run with its prediction, and says where the time went.

    `measured` is `pipewright_pp.torch.timeline_of` of PyTorch's traces, or `read_trace` of Pipewright's; `predicted` is
    the result of `simulate`, with costs in seconds for a trace in seconds. Both have the same stages on the same ranks.

    Raises `CostsError` if the timelines have other ranks, or no computation in common.

    >>> import pipewright_pp as pw
    >>> schedule = pw.schedule("1f1b", ranks=2, microbatches=4)
    >>> slow = schedule.simulate(pw.Costs(forward=[1, 1.5], backward=[2, 3]))
    >>> print(pw.compare_timelines(slow, schedule.simulate("F=1,B=2")).explain().splitlines()[0])
    The step takes 19.5, and 14 were predicted: 5.5 more (39%).
    """
    step, plan = _Step(measured), _Step(predicted)
    if step.ranks != plan.ranks:
        raise CostsError(f"the measured step has {step.ranks} ranks, and the prediction has {plan.ranks}; predict the same pipeline")
    if not any(plan.predicted(action) for action in step.computations):
        raise CostsError("the prediction has no action of the measured step; predict the same pipeline")
    return Lateness(step, plan)


class Lateness:
    """The result of `compare_timelines`.

    >>> import pipewright_pp as pw
    >>> step = pw.schedule("1f1b", ranks=2, microbatches=4).simulate("F=1,B=2")
    >>> pw.compare_timelines(step, step).late_s
    0.0
    """

    def __init__(self, step: Any, plan: Any) -> None:
        self._step: _Step = step
        self._plan: _Step = plan
        self.measured_s: float = step.makespan
        """The measured step, from its first action to the end of its last computation."""
        self.predicted_s: float = plan.makespan
        self._gaps = step.gaps()
        self._planned_gaps = plan.gaps()
        self._hops = plan.hops()
        self._slow = self._slow_ranks()
        path = list(self._path())
        self.causes: tuple[LateCause, ...] = self._causes(path)
        """The causes of the lateness, the largest first. Their seconds add up to `late_s`."""
        critical = {event.action for event in path}
        self.actions: tuple[LateAction, ...] = tuple(self._action(event, critical) for lane in step.lanes for event in lane)
        """The computations, by rank and start."""

    @property
    def late_s(self) -> float:
        """The measured step minus the predicted one."""
        return self.measured_s - self.predicted_s

    @property
    def ranks(self) -> list[dict[str, float]]:
        """What each rank adds to its time: measured minus predicted computation (`slower`), and the measured time that it waits
        for computations of other ranks (`message`), for their messages (`link`), and for nothing that is known (`host`)."""
        found = []
        for lane in self._step.lanes:
            gaps = [self._gaps[event.action] for event in lane]
            found.append(
                {
                    "slower": sum(event.duration - self._predicted_s(event) for event in lane),
                    "message": sum(gap.waited for gap in gaps),
                    "link": sum(gap.link for gap in gaps),
                    "host": sum(gap.host for gap in gaps),
                }
            )
        return found

    def explain(self) -> str:
        """Returns the largest causes in words.

        >>> import pipewright_pp as pw
        >>> schedule = pw.schedule("gpipe", ranks=2, microbatches=1)
        >>> print(pw.compare_timelines(schedule.simulate("F=1,B=2,hop=1"), schedule.simulate("F=1,B=2")).explain())
        The step takes 7, and 5 were predicted: 2 more (40%).
        - messages from rank 0 to rank 1: 1 more (50% of the lateness)
        - messages from rank 1 to rank 0: 1 more (50% of the lateness)
        """
        late = self.late_s
        change = f"{abs(late):.3g} {'more' if late >= 0 else 'less'} ({abs(late) / self.predicted_s:.0%})" if self.predicted_s else ""
        lines = [f"The step takes {self.measured_s:.3g}, and {self.predicted_s:.3g} were predicted: {change}."]
        large = [cause for cause in self.causes if abs(cause.seconds) > 0.01 * max(abs(late), 0.01 * self.measured_s)]
        return "\n".join([*lines, *(f"- {cause}" for cause in large[:6])])

    def gains(self) -> list[Gain]:
        """Returns what other orders, an even cut and smaller microbatches would gain at the measured costs, the most first.

        Each stage has the median times of its measured actions, and messages the median time of those that a rank waits for.
        Orders are Pipewright's schedules with the same stages on the same ranks, as far as no rank has more activations alive than
        it had. An even cut gives all stages the mean time. Smaller microbatches take half the time, which small ones do not.
        """
        return _gains(self._step, [gap.link for gap in self._gaps.values() if gap.waited > 0.0])

    def _predicted_s(self, event: _Event) -> float:
        found = self._plan.predicted(event.action)
        return found[1] if found else 0.0

    def _slow_ranks(self) -> dict[int, float]:
        """Returns the ranks of which all kinds of actions are slower, and how many times as long they take."""
        slow = {}
        for rank, lane in enumerate(self._step.lanes):
            ratios: dict[str, list[float]] = defaultdict(list)
            for event in lane:
                if (predicted := self._predicted_s(event)) > 0.0:
                    ratios[re.sub(r"\d+(?=$|\))|(?<=[FBIW])\d+", "", event.action)].append(event.duration / predicted)
            medians = [statistics.median(of_kind) for of_kind in ratios.values()]
            if len(medians) > 1 and min(medians) >= 1 + max(_SLOW_RANK, (max(medians) - 1) / 2):
                slow[rank] = statistics.median(medians)
        return slow

    def _path(self) -> Iterator[_Event]:
        """Returns the critical path of the measured step, backwards."""
        before = {event.action: lane[index - 1] if index else None for lane in self._step.lanes for index, event in enumerate(lane)}
        event = max(self._step.computations.values(), key=lambda event: event.end, default=None)
        while event is not None:
            yield event
            gap = self._gaps[event.action]
            event = gap.producer if gap.waited > 0.0 else before[event.action]

    def _causes(self, path: Sequence[_Event]) -> tuple[LateCause, ...]:
        seconds: dict[tuple[Kind, str, int | None, int | None, int | None], float] = defaultdict(float)
        expected = 0.0
        for event in path:
            gap, found = self._gaps[event.action], self._plan.predicted(event.action)
            predicted = found[1] if found else 0.0
            seconds[self._slower(event, is_planned=found is not None)] += event.duration - predicted
            hop = 0.0
            if gap.producer is not None and (gap.waited > 0.0 or gap.link > 0.0):
                link = (gap.producer.rank, event.rank)
                hop = self._hops.get(link, 0.0) if gap.waited > 0.0 else 0.0
                text = f"messages from rank {link[0]} to rank {link[1]}"
                seconds["link", text, link[1], None, link[0]] += gap.link - hop
            seconds["host", f"gaps of rank {event.rank} between actions", event.rank, None, None] += gap.host
            expected += predicted + hop
        seconds["slack", "other waits of the prediction on this path", None, None, None] = expected - self.predicted_s
        late, late_unit = self.late_s, max(self.measured_s, 1e-300)
        causes = [
            LateCause(kind, text, value, value / late if late > 0.0 and kind != "slack" else 0.0, rank, stage, sender)
            for (kind, text, rank, stage, sender), value in seconds.items()
            if abs(value) > 1e-12 * late_unit
        ]
        return tuple(sorted(causes, key=lambda cause: (-round(abs(cause.seconds) / late_unit, 6), cause.text)))

    def _slower(self, event: _Event, *, is_planned: bool) -> tuple[Kind, str, int | None, int | None, int | None]:
        if not is_planned:
            return ("missing", f"actions of rank {event.rank} that the prediction lacks", event.rank, None, None)
        if event.rank in self._slow:
            text = f"all actions of rank {event.rank}, which take {self._slow[event.rank]:.3g} times as long"
            return ("rank", text, event.rank, None, None)
        kinds = "".join(sorted({kind for _, kind, _ in _parts(event.action)}))
        text = f"{kinds} of stage {event.stage} on rank {event.rank}"
        return ("action", text, event.rank, event.stage, None)

    def _action(self, event: _Event, critical: set[str]) -> LateAction:
        found, gap = self._plan.predicted(event.action), self._gaps[event.action]
        start, duration = found if found else (None, None)
        late = event.end - (start + duration) if start is not None and duration is not None else 0.0
        sender, planned = gap.producer, self._planned_gaps.get(event.action, _Gap(None, 0.0, 0.0, 0.0))
        added = {
            "slower rank" if event.rank in self._slow else "slower action": event.duration - duration if duration is not None else 0.0,
            f"waits for {sender.action} of rank {sender.rank}" if sender else "waits": gap.waited - planned.waited,
            f"slow message from rank {sender.rank}" if sender else "link": gap.link - planned.link,
            "gap of the host": gap.host - planned.host,
        }
        why = max(added, key=lambda name: added[name])
        is_late = late > 0.0 and added[why] > 0.01 * max(event.duration, late)
        return LateAction(
            event.action, event.rank, event.stage, event.start, event.duration, start, duration, late,
            why if is_late else "" if found else "not in the prediction", event.action in critical,
        )  # fmt: skip


def _gains(step: _Step, waited: Sequence[float]) -> list[Gain]:
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    rows = []
    for lane in step.lanes:
        rows.append([text for event in lane for text in _texts(event.action)])
        for event in lane:
            parts = _parts(event.action)
            for stage, kind, _ in parts:
                times[kind, int(stage)].append(event.duration / len(parts))
    try:
        program = Program(rows)
    except PipewrightError:
        return []  # The trace lacks a part of the step.
    medians = {key: statistics.median(values) for key, values in times.items()}
    stages = range(program.stages)
    if any(("F", stage) not in medians for stage in stages):
        return []
    halves = {half: [medians.get((half, stage)) for stage in stages] for half in "BIW"}
    forward = [medians["F", stage] for stage in stages]
    whole = [b if b is not None else (i or 0.0) + (w or 0.0) for b, i, w in zip(halves["B"], halves["I"], halves["W"])]
    inputs = [i if i is not None else all_of / 2 for i, all_of in zip(halves["I"], whole)]
    costs = _StageCosts(forward, whole, inputs, statistics.median(waited) if waited else 0.0)
    base = program.lower(["send-recv"]).simulate(costs.costs())
    peaks = base.peak_activations
    found = []

    def add(change: str, timeline: Timeline, size: float = 1.0) -> None:
        saved = base.makespan - timeline.makespan
        if saved > 0.005 * base.makespan:
            found.append(Gain(change, timeline.makespan, saved, size * max(timeline.peak_activations)))

    add("an even cut", program.lower(["send-recv"]).simulate(costs.even().costs()))
    for entry in _native.schedules():
        name = entry["name"]
        if name in _OTHER_KINDS:
            continue
        per_rank = program.stages // program.ranks
        try:
            other = _native.schedule(
                name, ranks=program.ranks, microbatches=program.microbatches, stages_per_rank=per_rank if per_rank > 1 else None
            )
            if other.stage_to_rank != program.stage_to_rank:
                continue
            timeline = _lowered(other.rows).simulate(costs.costs())
        except (PipewrightError, ValueError):
            continue  # The schedule does not exist in this size.
        if all(peak <= measured for peak, measured in zip(timeline.peak_activations, peaks)):
            add(f"the order {name}", timeline)
        if (smaller := _smaller(name, program, per_rank, costs)) is not None and _same_order(other.rows, rows):
            add(f"{2 * program.microbatches} microbatches of half the size", smaller, size=0.5)
    return sorted(found, key=lambda gain: -gain.saved_s)


@dataclass(frozen=True)
class _StageCosts:
    """The times of each stage, and of a message."""

    forward: list[float]
    whole: list[float]
    inputs: list[float]
    hop: float

    def even(self) -> _StageCosts:
        """Returns the costs of a cut in which all stages take the mean time."""
        forward, whole, inputs = ([statistics.mean(of)] * len(of) for of in (self.forward, self.whole, self.inputs))
        return _StageCosts(forward, whole, inputs, self.hop)

    def costs(self, share: float = 1.0) -> Costs:
        weights = [max(whole - inputs, 0.0) for whole, inputs in zip(self.whole, self.inputs)]
        return Costs(
            forward=[share * value for value in self.forward],
            backward=[share * value for value in self.whole],
            input_backward=[share * value for value in self.inputs],
            weight_backward=[share * value for value in weights],
            hop=self.hop,
        )


def _lowered(rows: Sequence[Sequence[str | None]]) -> Program:
    return Program([[cell for cell in row if cell] for row in rows]).lower(["send-recv"])


def _smaller(name: str, program: Program, per_rank: int, costs: _StageCosts) -> Timeline | None:
    """Returns the step with twice as many microbatches of half the size."""
    try:
        larger = _native.schedule(
            name, ranks=program.ranks, microbatches=2 * program.microbatches, stages_per_rank=per_rank if per_rank > 1 else None
        )
        return _lowered(larger.rows).simulate(costs.costs(0.5))
    except (PipewrightError, ValueError):
        return None


def _same_order(rows: Sequence[Sequence[str | None]], measured: Sequence[Sequence[str]]) -> bool:
    """Returns whether two tables have the same order. A backward may be in two halves, of which the first one has its place."""

    def order(row: Sequence[str | None]) -> list[str]:
        return [text.replace("I", "B") for cell in row if cell for text in _texts(cell) if "W" not in text]

    return [order(row) for row in rows] == [order(row) for row in measured]


def _parts(action: str) -> list[tuple[str, str, str]]:
    """Returns the stage, kind and microbatch of a computation, or of the several of an overlap; nothing for a message."""
    inner = action[1 : action.index(")")].split(";") if action.startswith("(") else [action]
    found = [match.groups() for text in inner if (match := _COMPUTATION.fullmatch(text))]
    return [(stage, kind, microbatch) for stage, kind, microbatch in found]


def _texts(action: str) -> list[str]:
    return ["".join(part) for part in _parts(action)]


def _needed(action: str) -> Iterator[str]:
    """Returns the computations whose messages an action needs."""
    for stage, kind, microbatch in _parts(action):
        if kind == "F":
            yield f"{int(stage) - 1}F{microbatch}"
        elif kind in "BI":
            yield f"{int(stage) + 1}B{microbatch}"
            yield f"{int(stage) + 1}I{microbatch}"


def _receives(action: str) -> list[str]:
    return [f"{stage}RECV_{'F' if kind == 'F' else 'B'}{microbatch}" for stage, kind, microbatch in _parts(action) if kind != "W"]
