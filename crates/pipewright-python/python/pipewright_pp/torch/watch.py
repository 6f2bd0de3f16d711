"""`watch`: when a step does not end, prints who waits for which message of whom.

Each rank records what it issues and what it waits for (`operations.py`), and the actions of its stages. One thread on each
rank, its monitor, looks now and then whether this number of events has changed. If it has not for `deadline_s`, the monitor
calls all ranks together through a store:

1. It adds to the key of this round. The first rank to do so collects. The monitors of the other ranks see the key, also
   where the step has ended or waits in C++, because a wait releases the interpreter's lock.
2. Each monitor writes its rank's position (`positions.py`).
3. The rank that collects waits for the positions for a few seconds, makes one report (`hangs.py`), writes it for the others,
   and prints it. A rank that does not answer is named, with what is known of its process.

Nothing is exchanged while steps end. The hooks stay after the block, because the counts of messages must be complete, and
the monitor stays to answer; `Watch.close` removes both.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import versions
from .annotate import WRAPPED, around_computations, before_messages, restore
from .errors import HangError, VerifyError
from .exchange import Exchange
from .hangs import HangReport, judge
from .positions import Position, Standing, standing_of
from .reading import SINGLE_STAGE, program_of
from .runtime import actions_of, transport_of

if TYPE_CHECKING:
    from .operations import Operations

#: The exit code of `on_hang="exit"`: as the command line's for a rank that is lost.
EXIT = 4

_rounds = itertools.count()
_monitor: Monitor | None = None


def watch(
    schedule: Any = None,
    *,
    deadline_s: float = 300.0,
    on_hang: Literal["report", "raise", "exit"] = "report",
    store: Any = None,
    tell: Callable[[HangReport], None] | None = None,
    allow_untested: bool = False,
) -> Watch:
    """Returns a context that watches the steps of this rank, and reports a step that does not end.

    All ranks use it, around one step or around the loop of all steps. `schedule` is this rank's schedule of PyTorch; without it,
    the sends, receives and collective operations are watched, and actions and stages are not named. After `deadline_s` seconds
    without progress, one rank makes a report of all ranks and gives it to `tell`, which by default writes it to the standard
    error output. `Watch.report` has it on each rank that waits.

    `on_hang` says what follows: `report` continues to wait; `raise` makes waits on CPU tensors end with a `HangError` shortly after
    the deadline, after which the process group is of no use; `exit` ends each process that is in the context with exit code 4.

    The ranks meet in the store of the process group. It is on rank 0, and ends with it; `store` is another one: a path that all
    ranks share, for a `FileStore`, or a store.

    Raises `ValueError` for a wrong argument and without a process group, and `UntestedVersion`.

    >>> import pipewright_pp.torch as pt
    >>> def train(schedule, batches):
    ...     with pt.watch(schedule, deadline_s=120):
    ...         for batch in batches:
    ...             schedule.step(batch)
    """
    torch, _ = versions.load(allow_untested=allow_untested)
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise ValueError(f"deadline_s is {deadline_s}; a number of seconds above 0 was expected")
    if on_hang not in ("report", "raise", "exit"):
        raise ValueError(f'on_hang is {on_hang!r}; "report", "raise" or "exit" was expected')
    if schedule is not None and not (hasattr(schedule, "_n_microbatches") and hasattr(schedule, "step")):
        raise ValueError(f"read a {type(schedule).__name__}; a schedule of torch.distributed.pipelining was expected")
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError("there is no process group; call torch.distributed.init_process_group in each process first")
    return Watch(_monitor_of(torch.distributed, store), schedule, deadline_s, on_hang, tell or _print)


class Watch:
    """The context of `watch`. It can be entered again.

    >>> import pipewright_pp.torch as pt
    >>> def train(schedule, batches):
    ...     watch = pt.watch(schedule)
    ...     for batch in batches:
    ...         with watch:
    ...             schedule.step(batch)
    """

    def __init__(
        self, monitor: Monitor, schedule: Any, deadline_s: float, on_hang: str, tell: Callable[[HangReport], None]
    ) -> None:
        self.deadline_s, self.on_hang, self.tell, self.schedule = deadline_s, on_hang, tell, schedule
        #: The last report; None if every step has ended.
        self.report: HangReport | None = None
        self._monitor = monitor
        if schedule is not None:
            monitor.follow(schedule)

    def __enter__(self) -> Watch:
        self._monitor.enter(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._monitor.leave(error)

    def close(self) -> None:
        """Removes the hooks, and ends the monitor of this process. It no longer answers other ranks.

        >>> import pipewright_pp.torch as pt
        >>> def end(watch: pt.Watch) -> None:
        ...     watch.close()
        """
        self._monitor.close()


def _monitor_of(distributed: Any, store: Any) -> Monitor:
    """Returns the monitor of this process: one for each process group."""
    global _monitor
    default = distributed.distributed_c10d._get_default_store()
    if _monitor is None or _monitor.is_closed or _monitor.default is not default:
        if _monitor is not None:
            _monitor.close()
        if store is None:
            store = default.clone() if hasattr(default, "clone") else default
        elif isinstance(store, (str, Path)):
            store = distributed.FileStore(str(store), -1)
        _monitor = Monitor(distributed, default, store)
    return _monitor


class Monitor:
    """Follows this rank, and answers and calls the others."""

    def __init__(self, distributed: Any, default: Any, store: Any) -> None:
        from .operations import Operations

        self.default = default
        self.is_closed = False
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.operations: Operations = Operations(self._error)
        self._distributed, self._store = distributed, store
        self._life, self._round = next(_rounds), 0
        self._watch: Watch | None = None
        self._state, self._failure, self._step, self._kind = "left", "", 0, ""
        self._actions: list[str] = []
        self._schedule: Any = None
        self._main = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self._report: HangReport | None = None
        self._broken = ""
        self._reported, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, watch: Watch) -> None:
        if self._thread is None:
            self._start()
        self._watch, self._schedule, self._state, self._main = watch, watch.schedule, "inside", threading.get_ident()
        self.operations.events += 1
        self.operations.limit = None
        if watch.schedule is None:
            self._step += 1
        if watch.on_hang == "raise":
            self.operations.limit = timedelta(seconds=watch.deadline_s + 2 * _answer_s(watch) + 2 * _period_s(watch))

    def leave(self, error: BaseException | None) -> None:
        self._state, self.operations.limit = "left", None
        self.operations.events += 1
        if isinstance(error, Exception) and not isinstance(error, HangError):
            self._state, self._failure = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            self._publish_end()

    def follow(self, schedule: Any) -> None:
        """Records the actions of a schedule's stages, and its steps. A second call does nothing."""
        if getattr(schedule.step, "is_watched", False):
            return
        for stage in _stages(schedule):
            before = {name: stage.__dict__.get(name) for name in WRAPPED}
            self._undo.append(lambda stage=stage, before=before: restore(stage, before))  # type: ignore[misc]
            around_computations(stage, self._computing)
            before_messages(stage, self._messaging)
        step, own = schedule.step, schedule.__dict__.get("step")

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._step += 1
            self._actions, self._schedule = [], schedule
            self._kind = "step" if getattr(schedule, "_has_backward", True) else "eval"
            self.operations.actions.clear()
            result = step(*args, **kwargs)
            self._kind = ""
            return result

        watched.is_watched = True  # type: ignore[attr-defined]
        schedule.step = watched
        self._undo.append(lambda: restore(schedule, {"step": own}))

    def _computing(self, action: str, _: int) -> nullcontext[None]:
        self._actions.append(action)
        self.operations.events += 1
        return _NOTHING

    def _messaging(self, action: str, operations: list[Any]) -> None:
        self._actions.append(action)
        for operation in operations:
            self.operations.actions[id(operation.tensor)] = action

    def close(self) -> None:
        self.is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
            atexit.unregister(self._end)
        while self._undo:
            self._undo.pop()()
        self.operations.remove()

    def _start(self) -> None:
        self.operations.install()
        self._exchange("process").publish("process", (socket.gethostname(), os.getpid()))
        self._thread = threading.Thread(target=self._follow_ranks, name="pipewright-watch", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """Says at the end of the process that it has ended, and ends the thread before the interpreter does."""
        if self._state != "failed":
            self._state = "ended"
        self._publish_end()
        self.is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _publish_end(self) -> None:
        try:
            self._exchange("end").publish("end", self.position())
        except VerifyError:
            pass  # The store has ended first, and nobody asks through it any more.

    def _exchange(self, name: object, rank: int | None = None) -> Exchange:
        return Exchange(self._store, self.rank if rank is None else rank, self.ranks, f"watch/{self._life}/{name}", 60.0)

    def _follow_ranks(self) -> None:
        """The thread: answers calls of other ranks, and calls them if this rank makes no progress or a message has failed."""
        events, since, is_told = -1, time.monotonic(), False
        while True:
            self._wake.wait(_period_s(self._watch))
            self._wake.clear()
            if self.is_closed:
                return
            now = time.monotonic()
            if self.operations.events != events:
                events, since, is_told = self.operations.events, now, False
                self._reported.clear()
            watch, error = self._watch, self._broken
            is_late = self._state == "inside" and watch is not None and (now - since >= watch.deadline_s or error != "")
            calls = is_late and not is_told
            try:
                if calls or self._store.check([self._claim()]):
                    is_told = self._answer(watch, calls, now - since, error) or is_told
            except Exception as failure:
                if calls and watch is not None:
                    is_told = True
                    self._take(watch, self._alone(failure, now - since, error), collects=True)

    def _claim(self) -> str:
        return f"pipewright/watch/{self._life}/{self._round}/claim"

    def _answer(self, watch: Watch | None, calls: bool, idle_s: float, error: str) -> bool:
        """Takes part in a round: writes this rank's position, and collects them or waits for the report.

        Returns whether this rank has got a report.
        """
        collects = calls and self._store.add(self._claim(), 1) == 1
        exchange, reports = self._exchange(self._round), self._exchange(self._round, rank=0)
        exchange.publish("position", self.position(idle_s))
        self._round += 1
        if watch is None or self._state != "inside":
            return False
        if collects:
            report = self._collect(exchange, watch, idle_s, error)
            reports.publish("report", report)
        else:
            report = exchange.receive("report", 0, time.monotonic() + 2 * _answer_s(watch) + 2 * _period_s(watch))
        self._take(watch, report, collects=collects)
        return True

    def _take(self, watch: Watch, report: HangReport, *, collects: bool) -> None:
        self._report = watch.report = report
        self._reported.set()
        if collects:
            watch.tell(report)
        if watch.on_hang == "exit":
            # The store may end with this process, and the other ranks read the report from it.
            time.sleep(_answer_s(watch) if collects else 0.0)
            os._exit(EXIT)

    def _collect(self, exchange: Exchange, watch: Watch, idle_s: float, error: str) -> HangReport:
        until = time.monotonic() + _answer_s(watch) + _period_s(watch)
        positions: dict[int, Position] = {}
        silent: dict[int, str] = {}
        missing = list(range(self.ranks))
        while missing and time.monotonic() < until:
            for rank in [rank for rank in missing if exchange.has("position", rank)]:
                positions[rank] = exchange.receive("position", rank, until)
                missing.remove(rank)
            time.sleep(0.01)
        for rank in missing:
            end = self._read("end", rank)
            if end is not None:
                positions[rank] = end
            else:
                silent[rank] = self._process_of(rank)
        return judge(positions, silent, idle_s=idle_s, error=error, verdict=self._verdict())

    def _read(self, kind: str, rank: int) -> Any:
        exchange = self._exchange(kind)
        return exchange.receive(kind, rank, time.monotonic() + 1.0) if exchange.has(kind, rank) else None

    def _process_of(self, rank: int) -> str:
        """Returns what is known of the process of a rank that does not answer."""
        found = self._read("process", rank)
        if found is None:
            return "it has not entered the watch"
        host, process = found
        if host != socket.gethostname():
            return f"process {process} on {host} has ended, or its interpreter is blocked"
        return f"process {process} {'is blocked' if _is_alive(process) else 'has ended'}"

    def _alone(self, failure: Exception, idle_s: float, error: str) -> HangReport:
        """Returns the report of this rank alone, for a store that does not respond."""
        line = _line(failure)
        reason = f"the store does not respond ({line}); the store of the process group is in the process of rank 0"
        silent = {rank: reason for rank in range(self.ranks) if rank != self.rank}
        return judge({self.rank: self.position(idle_s)}, silent, idle_s=idle_s, error=error)

    def position(self, idle_s: float = 0.0) -> Position:
        """Returns where this rank stands."""
        return Position(
            rank=self.rank,
            state=self._state,
            failure=self._failure,
            step=self._step,
            kind=self._kind,
            action=self._actions[-1] if self._actions else None,
            waits=self.operations.waits() if self._state == "inside" or self._state == "left" else (),
            streams=self.operations.streams(),
            groups=self.operations.groups(),
            where=_where(self._main) if self._state != "ended" else "",
            idle_s=idle_s,
            standing=self._standing(),
        )

    def _standing(self) -> Standing | None:
        if self._schedule is None:
            return None
        try:
            rows, stage = actions_of(program_of(self._schedule, allow_untested=True)), _stages(self._schedule)[0]
        except Exception:
            return None  # The verdict of the rank that collects says why.
        is_single = any(of.__name__ in SINGLE_STAGE for of in type(self._schedule).__mro__)
        return standing_of(rows, stage.group_rank, self._actions, computations_only=is_single)

    def _verdict(self) -> str:
        """Returns what is wrong with the program; empty if it is sound or not known."""
        if self._schedule is None:
            return ""
        try:
            program = program_of(self._schedule, allow_untested=True)
            program.validate(transport=transport_of(self._distributed, _stages(self._schedule)[0]))
        except Exception as error:
            return f"the program of rank {self.rank} itself is wrong: {error}"
        return f"the program of rank {self.rank} is sound"

    def _error(self, error: RuntimeError) -> Exception | None:
        """Waits for the report after an operation has failed because a rank or a connection is lost, or is late.

        The picture is of this moment: without the wait, the end of this process would be the failure of the next ranks.
        """
        watch = self._watch
        if watch is None or self._state != "inside" or not _LOST.search(str(error)):
            return None
        if not self._reported.is_set():
            self._broken = _line(error)
            self._wake.set()
            self._reported.wait(2 * _answer_s(watch) + 2 * _period_s(watch))
            self._broken = ""
        if watch.on_hang == "exit" and self._report is not None:
            time.sleep(2 * _answer_s(watch))  # The monitor ends the process meanwhile.
        if watch.on_hang != "raise" or self._report is None:
            return None
        return HangError(str(self._report), report=self._report)


_NOTHING = nullcontext()

#: The errors of back ends whose peer or connection is lost or late.
_LOST = re.compile("onnection|peer|imed out|imeout|closed|reset")


def _line(error: Exception) -> str:
    """Returns the first sentence of an error, without the place in the source of the back end."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ", "", line).split(". ")[0][:200]


def _stages(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]


def _period_s(watch: Watch | None) -> float:
    """Returns the time between two looks of the monitor."""
    return min(max(watch.deadline_s / 10, 0.05), 1.0) if watch is not None else 1.0


def _answer_s(watch: Watch) -> float:
    """Returns how long the ranks have to answer."""
    return 1.0 + 3 * _period_s(watch)


def _is_alive(process: int) -> bool:
    """Returns whether a process of this host runs. A process whose parent has not read its end has ended."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True


def _where(thread: int) -> str:
    """Returns the line of the user's code that a thread runs, and the function of PyTorch that is called there."""
    frame = sys._current_frames().get(thread)
    called = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "pipewright_pp.", "threading", "contextlib")):
            line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return f"{line} in {called}" if called else line
        if name.startswith("torch.") and frame.f_code.co_name not in ("wrapper", "_fn"):
            called = frame.f_code.co_name
        frame = frame.f_back
    return ""


def _print(report: HangReport) -> None:
    sys.stderr.write(f"pipewright_pp.torch.watch: {report}\n")
    sys.stderr.flush()
