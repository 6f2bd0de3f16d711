"""Processes that run one pipeline program after another on Gloo, and a watchdog that ends them when a program hangs.

The processes of a world are forked once and stay alive. Each of them reports its position in its row through shared memory.
If no position changes for the deadline, the program hangs: the world is killed, and the next program gets another one.
"""

import logging
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as pipelining
from defer_recv import data, expected_gradients, layers
from gloo_programs import make_schedule
from torch.distributed.pipelining import PipelineStage

# The time to start a world, in seconds.
START = 240
# A relative error above this is wrong. Rounding gives less than 1e-6, and a tensor of another microbatch more than 5e-6 in
# the deepest model, whose later stages hardly depend on their inputs.
TOLERANCE = 2e-6
# PyTorch's functions that a program replaces to record its actions.
RECORDED = ("_batch_p2p", "_wait_batch_p2p", "_get_profiler_function_name")
ORIGINALS = {name: getattr(pipelining, name) for name in RECORDED}


@dataclass
class Outcome:
    """What happened to a program."""

    # `right`, `wrong`, `hang` or `error`.
    word: str
    # The largest relative error of the gradient of a stage. (The whole gradient hides the first stages of a deep model.)
    error: float | None = None
    # The actions that each rank ran, when PyTorch's own step of a schedule has no table.
    rows: list[list[str]] | None = None
    # Where each rank stood in its row when the program hung.
    positions: list[int] = field(default_factory=list)
    message: str = ""


class World:
    """One process for each rank."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.processes = []

    def start(self):
        context = multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.positions = context.Array("i", self.ranks, lock=False)
        self.pipes, self.processes = [], []
        for rank in range(self.ranks):
            own, other = context.Pipe()
            arguments = (rank, self.ranks, self.folder.name, self.positions, other)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            self.pipes.append(own)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(START):
                raise RuntimeError(f"a process has not joined within {START} s")
            pipe.recv()

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def run(self, program, rows, deadline):
        """Runs a program, with these rows if it is lowered. The deadline is in seconds without progress."""
        if not self.processes:
            self.start()
        for rank, pipe in enumerate(self.pipes):
            self.positions[rank] = -1
            pipe.send((program, rows))
        outcome = self.await_replies(deadline)
        if outcome.word in ("hang", "error"):
            self.stop()
        return outcome

    def await_replies(self, deadline):
        replies = [None] * self.ranks
        seen, until = list(self.positions), time.monotonic() + deadline
        while None in replies:
            for rank, pipe in enumerate(self.pipes):
                if replies[rank] is None and pipe.poll(0.005):
                    replies[rank] = pipe.recv()
                    until = time.monotonic() + deadline
            failed = next((reply for reply in replies if isinstance(reply, str)), None)
            if failed is not None:
                return Outcome("error", message=failed)
            if list(self.positions) != seen:
                seen, until = list(self.positions), time.monotonic() + deadline
            if time.monotonic() > until:
                return Outcome("hang", positions=seen)
        error = max(reply[0] for reply in replies)
        return Outcome("right" if error < TOLERANCE else "wrong", error, [reply[1] for reply in replies])


def run_rank(rank, ranks, folder, positions, pipe):
    """The work of one process: programs until the pipe ends."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    # A hang must not become an error of Gloo.
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(hours=1))
    pipe.send("joined")
    expected = {}
    while True:
        try:
            program, rows = pipe.recv()
        except EOFError:
            return
        size = (program.stages, program.microbatches)
        if size not in expected:
            expected[size] = expected_gradients(*size)
        try:
            pipe.send(step(program, rows, rank, positions, expected[size]))
        except Exception as error:  # The world ends, and the report has the text.
            pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


def step(program, rows, rank, positions, expected):
    """Runs one step; returns the largest relative error of a stage's gradient, and the row of a native step."""
    own = program.stages_of(rank)
    model = layers(program.stages)
    with dist.config.patch(pipeline_per_edge_p2p=program.per_edge):
        stages = [PipelineStage(model[index], index, program.stages, torch.device("cpu")) for index in own]
        made = make_schedule(program, stages)
        recorded = []
        for name, original in ORIGINALS.items():
            setattr(pipelining, name, original)
        if rows is None:
            record_native(stages[0], recorded, rank, positions)
        else:
            load(made, rows)
            count_positions(rank, positions)
        inputs, targets = data(program.microbatches)
        last = program.stages - 1
        made.step(*([inputs] if 0 in own else []), target=targets if last in own else None, losses=[])
    errors = []
    for index in own:
        found = torch.cat([parameter.grad.flatten() for parameter in model[index].parameters()])
        errors.append(((found - expected[index]).norm() / expected[index].norm()).item())
    return max(errors), recorded


def load(schedule, rows):
    """Gives a table to the runtime, as `_load_csv` does."""
    schedule._max_outstanding_sends = None
    actions = {rank: [pipelining._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(actions, format="compute_comms")


def count_positions(rank, positions):
    """Counts the actions that the runtime begins: it asks for the name of each."""

    def name(action):
        positions[rank] += 1
        return ORIGINALS["_get_profiler_function_name"](action)

    pipelining._get_profiler_function_name = name


def record_native(stage, recorded, rank, positions):
    """Records what PyTorch's own step of GPipe or 1F1B does: computations, messages and waits, in their order."""
    actions, sends = {}, {}

    def add(cell):
        recorded.append(cell)
        positions[rank] = len(recorded)

    for method, cell in {
        "get_fwd_send_ops": "SEND_F",
        "get_fwd_recv_ops": "RECV_F",
        "get_bwd_send_ops": "SEND_B",
        "get_bwd_recv_ops": "RECV_B",
    }.items():
        def operations(microbatch, *, cell=cell, original=getattr(stage, method)):
            made = original(microbatch)
            # The operation is kept, so that its `id` stays its own.
            actions.update({id(made[0]): (f"{stage.stage_index}{cell}{microbatch}", made)} if made else {})
            return made

        setattr(stage, method, operations)
    for method, letter in {"forward_one_chunk": "F", "backward_one_chunk": "B"}.items():
        def compute(microbatch, *rest, letter=letter, original=getattr(stage, method), **named):
            add(f"{stage.stage_index}{letter}{microbatch}")
            return original(microbatch, *rest, **named)

        setattr(stage, method, compute)

    def batch(operations, desc=None):
        if len({operation.group.group_name for operation in operations}) > 1:
            return ORIGINALS["_batch_p2p"](operations, desc=desc)
        cells = [actions[id(operation)][0] for operation in operations]
        [add(cell) for cell in cells]
        works = ORIGINALS["_batch_p2p"](operations, desc=desc)
        sends.update({id(work): (cell, work) for cell, work in zip(cells, works, strict=True) if "SEND" in cell})
        return works

    def wait(works):
        [add(sends[id(work)][0].replace("SEND", "WAIT_SEND")) for work in works if id(work) in sends]
        ORIGINALS["_wait_batch_p2p"](works)

    pipelining._batch_p2p, pipelining._wait_batch_p2p = batch, wait
