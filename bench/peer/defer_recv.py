"""Compares the gradients of PyTorch's schedules, with and without `defer_pp_recv`, with those of the unpipelined model.

    defer_recv.py [--ranks 2] [--microbatches 4]

Each rank is a Gloo process. For every schedule the script prints the relative error of the gradient of the whole model:
the norm of the difference from the unpipelined gradient, divided by the norm of the unpipelined gradient. It exits with 1
if a schedule with `defer_pp_recv=False` is wrong.
"""

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as pipelining
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage

WIDTH, ROWS = 16, 4
DEADLINE = timedelta(seconds=60)

# Schedule, stages per rank, whether the second stage of a rank is on the way back of a V.
SCHEDULES = {
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2, False),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (pipelining.ScheduleDualPipeV, 2, True),
}


def layers(count):
    """The model: linear layers with different weights."""
    made = []
    for index in range(count):
        torch.manual_seed(index)
        made.append(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
    return made


def data(microbatches):
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(7)
    shape = (microbatches * ROWS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(output, target):
    return torch.nn.functional.mse_loss(output, target)


def expected_gradients(count, microbatches):
    """The gradients of the unpipelined model, layer by layer."""
    model = torch.nn.Sequential(*layers(count))
    inputs, targets = data(microbatches)
    for microbatch, target in zip(inputs.split(ROWS), targets.split(ROWS)):
        (loss_of(model(microbatch), target) / microbatches).backward()
    return [torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in model]


def run_rank(rank, options, folder):
    """What one process does: every schedule, without and with deferred receives."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=options.ranks, timeout=DEADLINE
    )
    for name in SCHEDULES:
        errors = [relative_error(name, rank, options, deferred) for deferred in (False, True)]
        if rank == 0:
            print(f"{name:24} defer_pp_recv=False {errors[0]:9.2e}   defer_pp_recv=True {errors[1]:9.2e}", flush=True)
            assert errors[0] < 1e-5, f"{name} is wrong without deferred receives"
    dist.barrier()
    dist.destroy_process_group()


def relative_error(name, rank, options, deferred):
    """The relative error of the gradient of one step."""
    schedule, per_rank, is_v = SCHEDULES[name]
    count, microbatches = options.ranks * per_rank, options.microbatches
    own = [rank, count - 1 - rank] if is_v else list(range(rank, count, options.ranks))
    model = layers(count)
    stages = [PipelineStage(model[index], index, count, torch.device("cpu")) for index in own]
    made = schedule(stages, microbatches, loss_fn=loss_of, defer_pp_recv=deferred)
    inputs, targets = data(microbatches)
    made.step(*([inputs] if 0 in own else []), target=targets if count - 1 in own else None, losses=[])
    expected = expected_gradients(count, microbatches)
    squares = torch.zeros(2, dtype=torch.float64)
    for index in own:
        found = torch.cat([p.grad.flatten() for p in model[index].parameters()])
        squares[0] += (found - expected[index]).double().square().sum()
        squares[1] += expected[index].double().square().sum()
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
