"""The pipeline actions in a trace of PyTorch's profiler (Kineto's JSON, `export_chrome_trace`).

PyTorch's pipeline runtime names a range of each action `PP:` and the action (`PP:2F0`). The range is the time of the
processor. It differs from the time of the action in two ways, which this module undoes:

- A receive only starts in the range of `RECV`. The computation that uses the tensor waits for it at its beginning. The
  wait ends where the first operation of the computation begins.
- On a GPU, the range has the launches of kernels. An action has the kernels whose launch is in its range.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pipewright_pp.torch.errors import TraceError

PREFIX = "PP:"

#: The largest trace that is read, in bytes before and after decompression.
MAX_BYTES = 4 << 30

_CHUNK_BYTES = 1 << 20

#: The largest time in microseconds, and the largest base in nanoseconds: more than 250 years.
_MAX_TIME = 1 << 63

_COMPUTATION = re.compile(r"\d+[FBIW]\d+|\(.*\)OVERLAP_F_B")
_PIPELINE_NAME = re.compile(r"PP:(\(.*\)OVERLAP_F_B|\d+[A-Z_]+\d*)")
# Ranges of the same names in the trace of a single-stage schedule, whose stage the name lacks.
_SINGLE_STAGE_NAME = re.compile(r"(Forward|Backward) \d+")
_MESSAGE_NAMES = ("c10d::", "gloo:", "nccl:")


@dataclass(frozen=True)
class Span:
    """An action of a rank: its text, and its start and end in microseconds.

    The range of the processor begins at `start`. A computation has its tensors at `ready`; on a GPU, that is the start of
    its first kernel, and `end` is the end of the last one.
    """

    action: str
    start: float
    ready: float
    end: float

    @property
    def is_computation(self) -> bool:
        """Whether the action computes, as F, B, I and W do."""
        return _COMPUTATION.fullmatch(self.action) is not None


@dataclass(frozen=True)
class RankTrace:
    """The trace of one process: the rank that PyTorch has written into it, if any, and its actions by their start.

    The times of the actions count from `base_ns`, in nanoseconds since the epoch.
    """

    name: str
    rank: int | None
    base_ns: int
    spans: tuple[Span, ...]


def read(path: str | PathLike[str]) -> RankTrace:
    """Reads the trace of one process; its name may end with `.gz`.

    Raises `TraceError` if the file cannot be read, is not a trace, or has no action of a pipeline.
    """
    name = str(path)
    document = _document(Path(path), name)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise TraceError(f"{name}: no list `traceEvents`; a trace of torch.profiler was expected", trace=name)
    slices = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and _is_timed(event, name)]
    rank = _object(document, "distributedInfo", name).get("rank")
    if rank is not None and not _is_whole(rank):
        raise TraceError(f"{name}: the rank in `distributedInfo` is {rank!r}; a whole number was expected", trace=name)
    base_ns = document.get("baseTimeNanoseconds", 0)
    if not _is_whole(base_ns):
        raise TraceError(f"{name}: `baseTimeNanoseconds` is {base_ns!r}; nanoseconds since the epoch were expected", trace=name)
    return RankTrace(name, rank, base_ns, tuple(_spans(slices, name)))


def _document(path: Path, name: str) -> Any:
    try:
        return json.loads(_content(path, name))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{name}: cannot be read: {error}", trace=name) from error
    except RecursionError as error:
        raise TraceError(f"{name}: nested too deeply; a trace of torch.profiler was expected", trace=name) from error
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{name}: not JSON: {error}; a trace of torch.profiler was expected", trace=name) from error


def _content(path: Path, name: str) -> bytearray:
    content = bytearray()
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_BYTES:
                raise TraceError(f"{name}: larger than {MAX_BYTES >> 30} GiB; record fewer steps", trace=name)
    return content


def _object(owner: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """Returns the object `key` of an object, or an empty object if the key is missing or null."""
    found = owner.get(key)
    if found is not None and not isinstance(found, dict):
        raise TraceError(f"{name}: `{key}` is a {type(found).__name__}; an object was expected", trace=name)
    return found or {}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TIME


def _is_timed(event: dict[str, Any], name: str) -> bool:
    """Returns whether a slice has a name and times. Raises `TraceError` for a time that is out of range."""
    times = [event.get(key) for key in ("ts", "dur")]
    numbers = [time for time in times if isinstance(time, (int, float)) and not isinstance(time, bool)]
    for time in numbers:
        # NaN fails every comparison.
        if not -_MAX_TIME < time < _MAX_TIME:
            raise TraceError(f"{name}: a slice has the time {time}; microseconds were expected", trace=name)
    return len(numbers) == len(times) and isinstance(event.get("name"), str)


def _spans(slices: list[dict[str, Any]], name: str) -> list[Span]:
    ranges = [event for event in slices if event.get("cat") == "user_annotation"]
    actions = [event for event in ranges if _PIPELINE_NAME.fullmatch(event["name"])]
    if not actions:
        single = any(_SINGLE_STAGE_NAME.fullmatch(event["name"]) for event in ranges)
        reason = "its ranges have the names of a single-stage schedule, which do not name stages" if single else "none is named PP:"
        raise TraceError(
            f"{name}: no action of a pipeline among {len(ranges)} ranges ({reason}). PyTorch names the actions of its "
            "multi-stage schedules; for ScheduleGPipe and Schedule1F1B, call pipewright_pp.torch.annotate(schedule) first",
            trace=name,
        )
    actions.sort(key=lambda event: event["ts"])
    ready_at = _Ready([event for event in slices if event.get("cat") == "cpu_op"])
    kernels = _Kernels(slices, name)
    return [_span(event, ready_at, kernels) for event in actions]


def _span(event: dict[str, Any], ready_at: _Ready, kernels: _Kernels) -> Span:
    start, end = event["ts"], event["ts"] + event["dur"]
    span = Span(event["name"].removeprefix(PREFIX), start, start, end)
    launched = kernels.between(start, end, moves_messages=not span.is_computation)
    if launched is not None:
        return replace(span, ready=launched[0], end=launched[1])
    return replace(span, ready=ready_at.first_operation(start, end)) if span.is_computation else span


class _Ready:
    """The starts of the operations that compute, in order."""

    def __init__(self, operations: list[dict[str, Any]]):
        computing = (event for event in operations if not event["name"].startswith(_MESSAGE_NAMES))
        self._starts = sorted(event["ts"] for event in computing)

    def first_operation(self, start: float, end: float) -> float:
        """Returns the start of the first operation in a range.

        If the range has no operation, the computation does nothing, as PyTorch's `I` of stage 0, and all of the range is
        a wait. In a trace without any operation, the waits are not known, and the start of the range is returned.
        """
        if not self._starts:
            return start
        index = bisect_left(self._starts, start)
        return min(self._starts[index], end) if index < len(self._starts) else end


class _Kernels:
    """The kernels of a GPU by the time of their launch. Kernels that move messages are kept apart."""

    def __init__(self, slices: list[dict[str, Any]], name: str):
        launches = {
            correlation: event["ts"]
            for event in slices
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and (correlation := _correlation(event, name)) is not None
        }
        self._by_kind: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for event in slices:
            correlation = _correlation(event, name)
            launch = None if correlation is None else launches.get(correlation)
            if event.get("cat") == "kernel" and launch is not None:
                moves_messages = "nccl" in event["name"].lower()
                self._by_kind[moves_messages].append((launch, event["ts"], event["ts"] + event["dur"]))
        for kernels in self._by_kind.values():
            kernels.sort()

    def between(self, start: float, end: float, *, moves_messages: bool) -> tuple[float, float] | None:
        """Returns the first start and the last end of the kernels that were launched in a range; None without kernels."""
        kernels = self._by_kind[moves_messages]
        first, last = bisect_left(kernels, (start,)), bisect_left(kernels, (end,))
        launched = kernels[first:last]
        if not launched:
            return None
        return min(kernel[1] for kernel in launched), max(kernel[2] for kernel in launched)


def _correlation(event: dict[str, Any], name: str) -> int | None:
    found = _object(event, "args", name).get("correlation")
    if found is not None and not _is_whole(found):
        raise TraceError(f"{name}: the correlation of a kernel is {found!r}; a whole number was expected", trace=name)
    return found
