"""`timeline_of`: the traces of all ranks of a step as one timeline, for `view` and for measured costs.

The result is Pipewright's own trace (Chrome's format, one process for each rank), which the native part reads. It puts
the ranks on one clock: no message arrives before it is sent.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import pipewright_pp
from pipewright_pp.torch import kineto
from pipewright_pp.torch.errors import TraceError
from pipewright_pp.torch.kineto import RankTrace, Span

TraceFiles = Mapping[int, "str | PathLike[str]"] | Iterable["str | PathLike[str]"]


def timeline_of(traces: TraceFiles, *, step: int = -1) -> pipewright_pp.Timeline:
    """Reads the profiler's traces of all ranks of a pipeline as the timeline of one step.

    `traces` are files that `torch.profiler` has exported on each rank, or a mapping from the rank in the pipeline to its file.
    Without a mapping, the ranks follow from the ranks that PyTorch has written into the traces, in their order.
    `step` is the step of the trace, counted from 0; by default, the last one.

    Raises `TraceError` if a file is not a trace, has no rank or no action of a pipeline, or lacks the step.
    """
    return pipewright_pp.read_trace(trace_text(traces, step=step))


def trace_text(traces: TraceFiles, *, step: int = -1) -> str:
    """Returns the text of the trace that `timeline_of` reads."""
    ranks = _by_rank(traces)
    steps = {trace.name: steps_of(trace.spans) for trace in ranks}
    counts = {name: len(of_rank) for name, of_rank in steps.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise TraceError(f"the traces have different numbers of steps ({listed}); record the same steps on every rank")
    count = next(iter(counts.values()))
    if not -count <= step < count:
        raise TraceError(f"step {step} was asked for, but the traces have {count}; steps are counted from 0")
    # Nanoseconds since the epoch are too large to be exact as a float; their differences are not.
    first_ns = min(trace.base_ns for trace in ranks)
    events = []
    for rank, trace in enumerate(ranks):
        later = (trace.base_ns - first_ns) / 1e3
        events += [event | {"ts": event["ts"] + later} for event in _events(rank, steps[trace.name][step])]
    origin = min(event["ts"] for event in events)
    for event in events:
        event["ts"] -= origin
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def steps_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Divides the actions of a rank into steps: each step has every action once.

    The profiler must start between two steps. A step that has fewer actions than another one, because the profiler ended within
    it, is left out.
    """
    steps: list[list[Span]] = []
    seen: set[str] = set()
    for span in spans:
        if not steps or span.action in seen:
            steps.append([])
            seen = set()
        steps[-1].append(span)
        seen.add(span.action)
    most = max(map(len, steps), default=0)
    return [step for step in steps if len(step) == most]


def _by_rank(traces: TraceFiles) -> list[RankTrace]:
    if isinstance(traces, (str, bytes)) or not isinstance(traces, Iterable):
        raise TraceError(f"read {traces!r}; the files of all ranks were expected, or a mapping from ranks to files")
    if isinstance(traces, Mapping):
        expected = list(range(len(traces)))
        if set(traces) != set(expected):
            raise TraceError(f"the mapping has the ranks {list(traces)}; all ranks from 0 to {len(traces) - 1} were expected")
        return [kineto.read(traces[rank]) for rank in expected]
    ranks = [kineto.read(path) for path in traces]
    if not ranks:
        raise TraceError("no trace was given; the files of all ranks were expected")
    of_rank: dict[int, list[str]] = defaultdict(list)
    for trace in ranks:
        if trace.rank is None:
            raise TraceError(
                f"{trace.name}: the trace has no rank (`distributedInfo`), because no process group existed while it was "
                "recorded; pass a mapping from ranks to files",
                trace=trace.name,
            )
        of_rank[trace.rank].append(trace.name)
    for rank, names in of_rank.items():
        if len(names) > 1:
            raise TraceError(f"{' and '.join(names)} are both of rank {rank}; one trace of each rank was expected", trace=names[0])
    return sorted(ranks, key=lambda trace: trace.rank or 0)


def _events(rank: int, step: list[Span]) -> list[dict[str, Any]]:
    """Returns the entries of a rank.

    A receive lasts from the time at which the rank waits for its tensor until the computation that uses it begins. The rank
    waits if the receive was started and no computation runs. The processor of a GPU runs ahead, so what is not a computation
    begins after the computations before it.
    """
    receives = {span.action: span for span in step if "RECV_" in span.action}
    events = []
    last_end = float("-inf")
    for span in step:
        if not span.is_computation:
            if span.action not in receives:
                start = max(span.ready, last_end)
                events.append(_event(rank, span.action, start, max(start, span.end)))
            continue
        for action in _receives_of(span.action):
            if (receive := receives.pop(action, None)) is not None:
                events.append(_event(rank, action, min(max(receive.start, last_end), span.ready), span.ready))
        events.append(_event(rank, span.action, span.ready, span.end))
        last_end = span.end
    events.extend(_event(rank, span.action, span.start, span.end) for span in receives.values())
    return events


def _receives_of(computation: str) -> list[str]:
    """Returns the receives whose tensors a computation uses, whether or not they exist."""
    needed = re.findall(r"(\d+)([FBI])(\d+)", computation)
    return [f"{stage}RECV_{'F' if kind == 'F' else 'B'}{microbatch}" for stage, kind, microbatch in needed]


def _event(rank: int, action: str, start: float, end: float) -> dict[str, Any]:
    return {
        "name": action,
        "ph": "X",
        "pid": rank + 1,
        "tid": rank + 1,
        "ts": start,
        "dur": max(end - start, 0.0),
        "args": {"action": action},
    }
