"""Steps that do not end, for the tests of `watch`. Each function runs one rank; `HUNG` says what the report has to name."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

#: The seconds without progress after which a rank asks the others.
DEADLINE_S = 1.0
#: The seconds before a rank ends, in which the others enter the watch.
BEFORE_END_S = 0.3
WIDTH, ROWS = 4, 8


def rows(count: int = 4) -> torch.Tensor:
    return torch.zeros(count)


def send(rank: int, tag: int = 0, count: int = 4) -> None:
    dist.send(rows(count), rank, tag=tag)


def recv(rank: int | None, tag: int = 0, count: int = 4) -> None:
    dist.recv(rows(count), rank, tag=tag)


class Layer(nn.Module):
    """A linear layer that calls a function in the forward of one microbatch."""

    def __init__(self, call: Callable[[], Any] | None = None, at: int = 2):
        super().__init__()
        self.linear, self.call, self.at, self.count = nn.Linear(WIDTH, WIDTH), call, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "meta":
            self.count += 1
        if self.call is not None and self.count == self.at:
            self.call()
        return self.linear(x)


def single(name: str, rank: int, ranks: int, call: Any = None, *, microbatches: int = 4, group: Any = None) -> Any:
    """A single-stage schedule."""
    stage = PipelineStage(Layer(call), rank, ranks, torch.device("cpu"), group=group)
    return getattr(pipelining, name)(stage, n_microbatches=microbatches, loss_fn=mse_loss)


def several(name: str, rank: int, ranks: int, call: Any = None, *, microbatches: int = 4) -> Any:
    """A multi-stage schedule of two stages on each rank."""
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [rank, 2 * ranks - 1 - rank] if is_v else [rank, ranks + rank]
    stages = [PipelineStage(Layer(call if index == own[0] else None), index, 2 * ranks, torch.device("cpu")) for index in own]
    return getattr(pipelining, name)(stages, n_microbatches=microbatches, loss_fn=mse_loss)


def table(rank: int, text: str) -> Any:
    """A schedule of a table with messages, one stage on each rank."""
    lines = text.split("\n")
    stage = PipelineStage(Layer(), rank, len(lines), torch.device("cpu"))
    schedule = _PipelineScheduleRuntime([stage], 2, loss_fn=mse_loss)
    from torch.distributed.pipelining.schedules import _Action

    actions = {row: [_Action.from_str(cell) for cell in line.split(",")] for row, line in enumerate(lines)}
    schedule._prepare_schedule_with_comms(actions, format="compute_comms")
    return schedule


def call(schedule: Any, method: str = "step") -> None:
    """Runs a step of a schedule, or an evaluation."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    count = schedule._n_microbatches
    inputs = [torch.randn(ROWS // 4 * count, WIDTH)] if any(stage.is_first for stage in stages) else []
    options = {"target": torch.randn(ROWS // 4 * count, WIDTH), "losses": []} if any(stage.is_last for stage in stages) else {}
    getattr(schedule, method)(*inputs, **options)


def nothing(_: int, __: int) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """A step of some ranks that does not end.

    `make` returns a rank's schedule; `body` runs it, or plain operations. The report has to have the `culprits`, and its text
    the `texts`.
    """

    ranks: int
    body: Callable[[int, Any], Any]
    culprits: set[int]
    texts: tuple[str, ...]
    make: Callable[[int, int], Any] = nothing
    cycle: tuple[int, ...] = ()


def by_rank(*bodies: Callable[[], Any]) -> Callable[[int, Any], Any]:
    """A body of its own for each rank."""
    return lambda rank, _: bodies[rank]()


def done() -> None:
    return None


def several_calls(*calls: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for one in calls:
            one()

    return run


def all_wait() -> None:
    """Waits until the other ranks are in the watch, and then a little longer."""
    store = dist.distributed_c10d._get_default_store()
    while store.add("entered", 0) < dist.get_world_size():
        time.sleep(0.02)
    time.sleep(BEFORE_END_S)


def fails() -> None:
    all_wait()
    raise ValueError("no more batches")


def kill(number: int) -> None:
    all_wait()
    os.kill(os.getpid(), number)
    time.sleep(60)


def some_messages(rank: int, sends: int, receives: int) -> None:
    for _ in range(sends if rank == 0 else receives):
        send(1) if rank == 0 else recv(0)


def dropped(rank: int, _: Any) -> None:
    if rank == 0:
        dist.isend(rows(), 1)
        recv(1)
    else:
        time.sleep(0.3)
        recv(0)
        send(0)


def in_group(rank: int, members: list[int], missing: int) -> None:
    group = dist.new_group(members)
    if rank in members and rank != missing:
        dist.all_reduce(rows(), group=group)


def other_group(rank: int, _: Any) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(rows(), group=group if rank == 0 else None)


def batches(rank: int, _: Any) -> None:
    operations = [dist.P2POp(dist.isend, rows(), 1)] if rank == 0 else [dist.P2POp(dist.irecv, rows(), 0) for _ in range(2)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def replicas(rank: int, counts: tuple[int, int]) -> None:
    """Two pipelines of two ranks with different numbers of microbatches, and the sums between them after each."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(counts[rank // 2]):
        send(rank + 1) if rank % 2 == 0 else recv(rank - 1)
        dist.all_reduce(rows(), group=groups[rank % 2])


def exchange_with(rank: int, ranks: int, *, sends_first: bool) -> None:
    """A ring in which all ranks send to the next one first, or receive from the one before first."""
    calls = [lambda: send((rank + 1) % ranks), lambda: recv((rank - 1) % ranks)]
    for one in calls if sends_first else reversed(calls):
        one()


def train_then(rank: int, schedule: Any, after: Callable[[int], Any]) -> None:
    call(schedule)
    after(rank)


def wrong_neighbours(rank: int, ranks: int) -> Any:
    """The stages of a V on rank 1, which takes them for the stages of a loop."""
    schedule = several("ScheduleZBVZeroBubble", rank, ranks)
    if rank == 1:
        for stage in schedule._stages:
            stage.stage_index_to_group_rank = {index: index % ranks for index in range(2 * ranks)}
        schedule.stage_index_to_group_rank = schedule._stages[0].stage_index_to_group_rank
    return schedule


def on(rank: int, function: Callable[[], Any]) -> Callable[[int], Any]:
    """Returns the function for one rank, and None for the others."""
    return lambda of: function if of == rank else None


SLEEPS, FAILS = on(1, lambda: time.sleep(60)), on(1, fails)

#: Each rank computes the backward of a microbatch before the forward of the next one, or all forwards first.
IN_TURN = (
    "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD"
)
FORWARDS_FIRST = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD"
)
#: Rank 0 waits for the gradient of the first microbatch before it sends the second one, and rank 1 computes both forwards first.
DEADLOCK = IN_TURN.split("\n")[0] + "\n" + FORWARDS_FIRST.split("\n")[1]

HUNG = {
    "crossed tags": Case(
        2,
        by_rank(several_calls(lambda: send(1, 1), lambda: send(1, 2)), several_calls(lambda: recv(0, 2), lambda: recv(0, 1))),
        {0, 1},
        ("send 1 to rank 1, tag 1", "recv 1 from rank 0, tag 2", "cycle: rank 0 -> rank 1 -> rank 0"),
        cycle=(0, 1),
    ),
    "both send first": Case(2, lambda rank, _: exchange_with(rank, 2, sends_first=True), {0, 1}, ("send 1 to rank 1",), cycle=(0, 1)),
    "both receive first": Case(2, lambda rank, _: exchange_with(rank, 2, sends_first=False), {0, 1}, ("recv 1 from rank 0",), cycle=(0, 1)),
    "a missing send": Case(2, by_rank(done, lambda: recv(0)), {0, 1}, ("rank 1 (step 1, hung.py", "recv 1 from rank 0", "rank 0 has left")),
    "a missing receive": Case(2, by_rank(lambda: send(1), done), {0, 1}, ("send 1 to rank 1", "rank 1 has left the watch")),
    "a wrong peer of a send": Case(3, by_rank(lambda: send(2), lambda: recv(0), done), {0, 2}, ("send 1 to rank 2", "recv 1 from rank 0")),
    "a wrong peer of a receive": Case(3, by_rank(lambda: send(1), lambda: recv(2), done), {1, 2}, ("recv 1 from rank 2", "send 1 to rank 1")),
    "a wrong tag": Case(
        2,
        by_rank(lambda: send(1, 7), lambda: recv(0, 5)),
        {0, 1},
        ("rank 1 has recv 1 from rank 0, tag 5, float32[4], 16 bytes instead", "rank 0 has send 1 to rank 1, tag 7"),
        cycle=(0, 1),
    ),
    "one receive too many": Case(2, lambda rank, _: some_messages(rank, 2, 3), {0, 1}, ("recv 3 from rank 0",)),
    "one send too many": Case(2, lambda rank, _: some_messages(rank, 3, 2), {0, 1}, ("send 3 to rank 1",)),
    "a rank that fails": Case(2, by_rank(lambda: recv(1), fails), {1}, ("has failed in step 1: ValueError: no more batches", "recv 1")),
    "a rank that is killed": Case(3, by_rank(lambda: recv(1), lambda: kill(signal.SIGKILL), lambda: recv(0)), {1}, ("has ended", "recv 1")),
    "a rank that is stopped": Case(2, by_rank(lambda: recv(1), lambda: kill(signal.SIGSTOP)), {1}, ("is blocked", "recv 1 from rank 1")),
    "a message larger than its buffer": Case(
        3, by_rank(several_calls(lambda: send(1, count=8), lambda: recv(1)), lambda: recv(0), lambda: recv(1)), {1}, ("has ended", "recv 1")
    ),
    "a message smaller than its buffer": Case(
        2,
        by_rank(several_calls(lambda: send(1, count=2), lambda: recv(1)), several_calls(lambda: recv(0), lambda: recv(0))),
        {0, 1},
        ("different sizes: rank 0 has send 1 to rank 1, tag 0, float32[2], 8 bytes",),
        cycle=(0, 1),
    ),
    "a rank that sleeps": Case(2, by_rank(lambda: recv(1), lambda: time.sleep(60)), {1}, ("rank 1 does not wait", "hung.py", "recv 1")),
    "a rank that waits for a thread": Case(2, by_rank(lambda: send(1), lambda: threading.Event().wait(60)), {1}, ("hung.py", "send 1")),
    "a rank that waits for a key": Case(
        2,
        by_rank(lambda: recv(1), lambda: dist.distributed_c10d._get_default_store().wait(["a"], timedelta(seconds=60))),
        {1},
        ("rank 1 does not wait", "recv 1 from rank 1"),
    ),
    "a sum on a part of the ranks": Case(3, lambda rank, _: rank == 1 or dist.all_reduce(rows()), {1}, ("all_reduce, operation", "rank 1 has left")),
    "collectives in another order": Case(
        2,
        by_rank(lambda: dist.all_reduce(rows()), lambda: dist.broadcast(rows(), 0)),
        {0, 1},
        ("all_reduce", "broadcast with root 0", "in its place"),
        cycle=(0, 1),
    ),
    "a collective and a message": Case(2, by_rank(lambda: dist.all_reduce(rows()), lambda: recv(0)), {0, 1}, ("all_reduce", "recv 1"), cycle=(0, 1)),
    "a broadcast with two roots": Case(
        3,
        lambda rank, _: (dist.broadcast(rows(), 1 if rank == 1 else 0), dist.barrier()),
        {0, 1},
        ("broadcast with root 1", "broadcast with root 0, operation 1 of group 0, float32[4], 16 bytes in its place"),
        cycle=(0, 1),
    ),
    "a missing barrier": Case(3, lambda rank, _: rank == 2 or dist.barrier(), {2}, ("barrier, operation", "rank 2 has left")),
    "a gather without its root": Case(
        3,
        lambda rank, _: rank == 0 or dist.gather(rows(), dst=0) or dist.barrier(),
        {0},
        ("rank 0 has left",),
    ),
    "objects on a part of the ranks": Case(2, by_rank(lambda: dist.all_gather_object([None] * 2, 1), done), {1}, ("all_gather",)),
    "a group of which a rank is missing": Case(3, lambda rank, _: in_group(rank, [0, 1], 1), {1}, ("all_reduce, operation 1", "rank 1 has left")),
    "another group": Case(3, other_group, {0, 1, 2}, ("operation 1 of group 1", "operation 1 of group 0"), cycle=(0, 1)),
    "a group that a rank does not make": Case(2, lambda rank, _: recv(0) if rank else dist.new_group([0, 1]), {0}, ("in new_group", "recv 1")),
    "a ring of three": Case(3, lambda rank, _: exchange_with(rank, 3, sends_first=False), {0, 1, 2}, ("recv 1 from rank 2",), cycle=(0, 2, 1)),
    "a ring of five": Case(
        5, lambda rank, _: exchange_with(rank, 5, sends_first=True), {0, 1, 2, 3, 4}, ("send 1 to rank 4",), cycle=(0, 1, 2, 3, 4)
    ),
    "a receive from any rank": Case(3, by_rank(lambda: recv(None), done, done), {0, 1, 2}, ("recv 1 from any rank",)),
    "a forgotten wait": Case(2, dropped, {0}, ("rank 0 has dropped the work of send 1 to rank 1",), cycle=(0, 1)),
    "a batch with one receive too many": Case(2, batches, {0, 1}, ("recv 2 from rank 0",)),
    "replicas with other numbers": Case(4, lambda rank, _: replicas(rank, (3, 2)), {2, 3}, ("all_reduce, operation 3", "rank 3 has left")),
    "fewer microbatches on one rank": Case(
        3,
        lambda _, schedule: call(schedule),
        {2},
        ("another program than the others: rank 2",),
        lambda rank, ranks: single("ScheduleGPipe", rank, ranks, microbatches=3 if rank == 2 else 4),
        cycle=(1, 2),
    ),
    "other schedules on two ranks": Case(
        2,
        lambda _, schedule: call(schedule),
        {0, 1},
        ("another program than the others: ranks 0-1", "is sound", "at 0RECV_B0, action 4 of 12", "at 1RECV_F1, action 3 of 12"),
        lambda rank, _: table(rank, [IN_TURN, FORWARDS_FIRST][rank]),
        cycle=(0, 1),
    ),
    "an evaluation on one rank": Case(
        2,
        lambda rank, schedule: call(schedule, "eval" if rank == 1 else "step"),
        {0, 1},
        ("another call than the others: ranks 0-1 (rank 0 in step(), rank 1 in eval())", "1RECV_F0"),
        lambda rank, ranks: single("ScheduleGPipe", rank, ranks),
        cycle=(0, 1),
    ),
    "one step too many": Case(
        2,
        lambda rank, schedule: [call(schedule) for _ in range(2 - rank)],
        {1},
        ("step 2", "rank 1 has left the watch after step 1"),
        lambda rank, ranks: single("Schedule1F1B", rank, ranks),
    ),
    "a table with a deadlock": Case(
        2,
        lambda _, schedule: call(schedule),
        {0, 1},
        ("the program of rank", "itself is wrong", "1RECV_F1", "0RECV_B0"),
        lambda rank, _: table(rank, DEADLOCK),
        cycle=(0, 1),
    ),
    "a stage that fails": Case(
        2,
        lambda _, schedule: call(schedule),
        {1},
        ("rank 1 has failed in step 1: RuntimeError", "is sound", "0SEND_F"),
        lambda rank, ranks: single("Schedule1F1B", rank, ranks, FAILS(rank)),
    ),
    "a stage that is killed": Case(
        3,
        lambda _, schedule: call(schedule),
        {1},
        ("rank 1 does not answer", "has ended", "rank 2 (step 1", "0SEND_F1"),
        lambda rank, ranks: single("Schedule1F1B", rank, ranks, on(1, lambda: kill(signal.SIGKILL))(rank)),
    ),
    "a stage that sleeps": Case(
        2,
        lambda _, schedule: call(schedule),
        {1},
        ("rank 1 does not wait: in action 1F", "hung.py"),
        lambda rank, ranks: several("ScheduleInterleaved1F1B", rank, ranks, SLEEPS(rank)),
    ),
    "a stage that sums on one rank": Case(
        2,
        lambda _, schedule: call(schedule),
        {0, 1},
        ("all_reduce, operation", "0SEND_F", "at 1F0"),
        lambda rank, ranks: single("ScheduleGPipe", rank, ranks, on(1, lambda: dist.all_reduce(rows()))(rank)),
        cycle=(0, 1),
    ),
    "wrong neighbours in a V": Case(2, lambda _, schedule: call(schedule), {1}, ("rank 1 has failed", "PipeliningMetadataError"), wrong_neighbours),
    "a norm on a part of the ranks": Case(
        2,
        lambda rank, schedule: train_then(rank, schedule, lambda rank: rank == 0 and dist.all_reduce(rows(1))),
        {1},
        ("all_reduce, operation", "rank 1 has left the watch after step 1"),
        lambda rank, ranks: several("ScheduleZBVZeroBubble", rank, ranks),
    ),
    "a rank without a step": Case(
        2,
        lambda rank, schedule: rank == 1 or call(schedule),
        {1},
        ("rank 1 has left the watch after step 0",),
        lambda rank, ranks: single("ScheduleGPipe", rank, ranks),
    ),
    "a barrier after a step on one rank": Case(
        3,
        lambda rank, schedule: train_then(rank, schedule, lambda rank: rank == 1 and dist.barrier()),
        {0, 2},
        ("barrier", "rank 0 has left the watch after step 1"),
        lambda rank, ranks: single("Schedule1F1B", rank, ranks),
    ),
    "other numbers of microbatches in a V": Case(
        2,
        lambda _, schedule: call(schedule),
        {0, 1},
        ("another program than the others: ranks 0-1",),
        lambda rank, ranks: several("ScheduleZBVZeroBubble", rank, ranks, microbatches=[8, 4][rank]),
    ),
}


def run(rank: int, case: str, folder: Path) -> None:
    """Runs a rank of a case until its report is written."""
    found = HUNG[case]
    start(rank, found.ranks, folder)
    schedule = found.make(rank, found.ranks)
    with pt.watch(schedule, deadline_s=DEADLINE_S, tell=lambda report: write(report, folder)):
        dist.distributed_c10d._get_default_store().add("entered", 1)
        found.body(rank, schedule)
    time.sleep(60)


def start(rank: int, ranks: int, folder: Path, address: str | None = None) -> None:
    """Joins the process group."""
    os.dup2(os.open(folder / f"errors{rank}", os.O_CREAT | os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    address = address or (folder / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    dist.barrier()


def write(report: Any, folder: Path, name: str = "report") -> None:
    """Writes the report for the test."""
    part = folder / f"{name}.part"
    part.write_bytes(pickle.dumps(report))
    part.rename(folder / name)


def crossed(rank: int) -> None:
    """Messages whose tags are crossed."""
    for tag in (1, 2) if rank == 0 else (2, 1):
        send(1, tag) if rank == 0 else recv(0, tag)


def raising(rank: int, folder: Path) -> None:
    """Waits that end with an error, on both ranks."""
    start(rank, 2, folder)
    found = None
    try:
        with pt.watch(deadline_s=DEADLINE_S, on_hang="raise", tell=lambda report: None):
            crossed(rank)
    except pt.HangError as error:
        found = error
    write(found, folder, f"result{rank}")
    time.sleep(60)


def exiting(rank: int, folder: Path) -> None:
    """Processes that end after the report, which the standard error output has."""
    start(rank, 2, folder)
    with pt.watch(deadline_s=DEADLINE_S, on_hang="exit"):
        crossed(rank)


def with_a_server(rank: int, folder: Path, port: int, store: Path | None, killed: int) -> None:
    """A rank is killed. Rank 0 has the store of the process group, a server."""
    start(rank, 3, folder, f"tcp://127.0.0.1:{port}")
    with pt.watch(deadline_s=DEADLINE_S, store=store, tell=lambda report: write(report, folder)):
        dist.distributed_c10d._get_default_store().add("entered", 1)
        if rank == killed:
            kill(signal.SIGKILL)
        recv((rank - 1) % 3)


def sound(rank: int, folder: Path) -> None:
    """Steps that end, some of them slowly: no report."""
    start(rank, 2, folder)
    reports: list[Any] = []
    standings, works = [], []
    schedules = [
        *(single(name, rank, 2) for name in ("ScheduleGPipe", "Schedule1F1B")),
        *(several(name, rank, 2) for name in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")),
    ]
    for schedule in schedules:
        for _ in range(3):
            with pt.watch(schedule, deadline_s=DEADLINE_S, tell=reports.append) as watch:
                call(schedule)
                dist.all_reduce(rows())
        standings.append(watch._monitor.position().standing)
        if type(schedule).__name__ not in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # Their evaluations fail in PyTorch.
            call(schedule, "eval")
    with watch:
        for _ in range(4):  # Slower than the deadline, with progress.
            time.sleep(DEADLINE_S / 3 if rank == 0 else 0)
            send(1) if rank == 0 else recv(0)
        for _ in range(20):
            works.append(dist.isend(rows(), 1) if rank == 0 else dist.irecv(rows(), 0))
        for work in works:
            work.wait()
    streams = watch._monitor.position().streams
    before = dist.ProcessGroup.send
    watch.close()
    is_removed = dist.ProcessGroup.send is not before and "step" not in schedule.__dict__
    time.sleep(1.5 * DEADLINE_S)
    dist.barrier()
    write((reports, watch.report, standings, {key: kept[-1].number for key, kept in streams.items()}, is_removed), folder, f"result{rank}")
