"""Measures what `pipewright_pp.torch.watch` costs a step that ends: two Gloo processes, `Schedule1F1B`, 8 microbatches.

Steps with the watch and without it alternate in one run, because the speed of a shared machine changes within seconds. A second
figure is the time that the hooks themselves take: the same calls on operations that do nothing.

    bench/.venv/bin/python bench/peer/watch_cost.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import pipewright_pp.torch as pt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

PAIRS, BLOCK, MICROBATCHES, WIDTH, ROWS = 20, 3, 8, 256, 64


def run(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    stage = PipelineStage(torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=mse_loss)
    x, y = torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)

    def block() -> float:
        start = time.perf_counter()
        for _ in range(BLOCK):
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
        return (time.perf_counter() - start) / BLOCK

    block()
    plain, watched = [], []
    for _ in range(PAIRS):
        plain.append(block())
        watch = pt.watch(schedule)
        with watch:
            watched.append(block())
        dist.barrier()
        watch.close()
    shares = [after / before for before, after in zip(plain, watched)]
    if rank == 0:
        quartiles = [100 * (value - 1) for value in statistics.quantiles(shares, n=4)]
        print(f"a step takes {1e3 * statistics.median(plain):.2f} ms without the watch")
        print(f"with it, {quartiles[1]:+.2f}% (quartiles {quartiles[0]:+.2f}% and {quartiles[2]:+.2f}%)")
        print(f"the hooks take {1e6 * hooks_s(schedule):.0f} us in a step")
    dist.barrier()
    dist.destroy_process_group()


def hooks_s(schedule: Schedule1F1B) -> float:
    """Returns the seconds of the hooks in a step: its operations and waits, and its actions, with calls that do nothing."""
    group = dist.distributed_c10d._get_default_group()
    originals = dist.ProcessGroup.__dict__["send"], dist.Work.__dict__["wait"]
    stage = schedule._stage
    stage.forward_one_chunk = lambda microbatch: None
    work = _Nothing()
    dist.ProcessGroup.send, dist.Work.wait = (lambda *_: work), (lambda *_: None)
    tensor = [torch.zeros(1)]

    def calls(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            for _ in range(2 * MICROBATCHES):
                dist.Work.wait(dist.ProcessGroup.send(group, tensor, 1, 0))
                stage.forward_one_chunk(0)
        return (time.thread_time() - start) / count

    try:
        before = min(calls(200) for _ in range(5))
        watch = pt.watch(schedule)
        with watch:
            after = min(calls(200) for _ in range(5))
        watch.close()
    finally:
        dist.ProcessGroup.send, dist.Work.wait = originals
    return after - before


class _Nothing:
    """A work that is done."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(Path(folder),), nprocs=2)
