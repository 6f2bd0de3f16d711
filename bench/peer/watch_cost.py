"""Measures what `pipewright_pp.torch.watch` costs a step that ends: two Gloo processes, `Schedule1F1B`, 8 microbatches.

It prints the median time of a step, and the time of a processor that the hooks take in it: as many messages, waits and actions
as the step has, on operations that do nothing, with the hooks and without them.

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

STEPS, MICROBATCHES, WIDTH, ROWS = 40, 8, 256, 64


def run(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    stage = PipelineStage(torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=mse_loss)
    x, y = torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)

    def step() -> float:
        start = time.perf_counter()
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
        return time.perf_counter() - start

    step()
    step_s = statistics.median(step() for _ in range(STEPS))
    dist.barrier()
    if rank == 0:
        hooks_s = seconds_of_hooks(schedule)
        print(f"a step takes {1e3 * step_s:.2f} ms, and the hooks take {1e3 * hooks_s:.3f} ms: {100 * hooks_s / step_s:.2f}%")
    dist.barrier()
    dist.destroy_process_group()


def seconds_of_hooks(schedule: Schedule1F1B) -> float:
    """Returns the seconds of the hooks in a step of one rank."""
    group, stage = dist.distributed_c10d._get_default_group(), schedule._stage
    originals = dist.ProcessGroup.__dict__["send"], dist.Work.__dict__["wait"]
    work, tensor = Nothing(), [torch.zeros(1)]
    stage.forward_one_chunk = lambda microbatch: None
    dist.ProcessGroup.send, dist.Work.wait = (lambda *_: work), (lambda *_: None)

    def calls(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            for _ in range(2 * MICROBATCHES):
                dist.Work.wait(dist.ProcessGroup.send(group, tensor, 1, 0))
                stage.forward_one_chunk(0)
        return (time.thread_time() - start) / count

    try:
        before = min(calls(100) for _ in range(20))
        watch = pt.watch(schedule)
        with watch:
            after = min(calls(100) for _ in range(20))
        watch.close()
    finally:
        dist.ProcessGroup.send, dist.Work.wait = originals
    return after - before


class Nothing:
    """A work that is done."""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(Path(folder),), nprocs=2)
