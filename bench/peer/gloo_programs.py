"""The programs that `run_on_gloo.py` runs: PyTorch's schedules with its options, and the same programs reordered.

A program is a table with one row of actions for each rank, in PyTorch's notation (`0SEND_F3`). PyTorch lowers every table.
Here are no processes and no tensors.
"""

import random
from dataclasses import dataclass

import torch
import torch.distributed.pipelining.schedules as pipelining
from reorder import reordered
from schedules import stages_of

# Schedule, stages per rank.
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, (1,)),
    "1F1B": (pipelining.Schedule1F1B, (1,)),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, (2, 3)),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, (2, 3)),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, (2, 3)),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, (2,)),
    "DualPipeV": (pipelining.ScheduleDualPipeV, (2,)),
}
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Program:
    """A schedule, its size and the options of PyTorch."""

    schedule: str
    ranks: int
    per_rank: int
    microbatches: int
    # `native`: PyTorch's own step of GPipe and 1F1B, which batches exchanges. `lowered`: the runtime of tables.
    runner: str = "lowered"
    deferred: bool = False
    # The limit of pending sends (`max_outstanding_sends`).
    sends: int | None = None
    # A process group for each directed pair of ranks (`torch.distributed.config.pipeline_per_edge_p2p`).
    per_edge: bool = False
    # The seed that reorders sends, receives and waits; `None` for PyTorch's order.
    seed: int | None = None

    @property
    def stages(self):
        return self.ranks * self.per_rank

    def stages_of(self, rank):
        """The indices of the stages of a rank."""
        if self.schedule in V_SHAPED:
            return [rank, self.stages - 1 - rank]
        return list(range(rank, self.stages, self.ranks))

    def options(self):
        """The options in words."""
        words = [self.runner] if self.schedule in SINGLE else []
        words += ["defer_pp_recv"] if self.deferred else []
        words += [] if self.sends is None else [f"max_outstanding_sends={self.sends}"]
        words += ["per edge"] if self.per_edge else []
        words += [] if self.seed is None else ["reordered"]
        return ", ".join(words) or "default"


def loss_of(output, target):
    return torch.nn.functional.mse_loss(output, target)


def make_schedule(program, stages):
    """PyTorch's schedule of a program, in its own order."""
    kind, _ = SCHEDULES[program.schedule]
    options = {"defer_pp_recv": program.deferred, "max_outstanding_sends": program.sends}
    if program.schedule not in SINGLE:
        return kind(stages, program.microbatches, loss_fn=loss_of, **options)
    single = kind(stages[0], program.microbatches, loss_fn=loss_of)
    if program.runner == "native":
        return single
    runtime = pipelining._PipelineScheduleRuntime(stages, program.microbatches, loss_fn=loss_of, **options)
    runtime._prepare_schedule_with_comms({rank: computations(program, rank) for rank in range(program.ranks)})
    return runtime


def computations(program, rank):
    """The computations of a rank in PyTorch's own step of GPipe and 1F1B.

    `_get_pipeline_order` of PyTorch 2.15 gives another order for 1F1B: its last rank begins with microbatch 1.
    """
    count = program.microbatches
    ahead = count if program.schedule == "GPipe" else program.ranks - rank
    cells = [f"{rank}F{index}" for index in range(ahead)]
    for index in range(count):
        cells += [f"{rank}B{index}"] + ([f"{rank}F{index + ahead}"] if index + ahead < count else [])
    return [pipelining._Action.from_str(cell) for cell in cells]


def table(program):
    """The rows of a program that is lowered; `None` if PyTorch refuses its size."""
    stages = stages_of(0, program.ranks, program.per_rank, program.schedule in V_SHAPED)
    try:
        made = make_schedule(program, stages)
    except ValueError:
        return None
    rows = [[str(action) for action in made.pipeline_order_with_comms[rank]] for rank in range(program.ranks)]
    return rows if program.seed is None else reordered(rows, program.seed)


def programs(ranks):
    """All programs for a number of ranks: PyTorch's options first, then reordered ones."""
    chosen = random.Random(ranks)
    made = []
    for schedule, (_, per_ranks) in SCHEDULES.items():
        for per_rank in per_ranks:
            size = {"schedule": schedule, "ranks": ranks, "per_rank": per_rank}
            # DualPipeV needs two microbatches for each rank.
            least = 2 * ranks if schedule == "DualPipeV" else ranks
            small, large = (size | {"microbatches": count} for count in (least, 2 * least))
            if schedule in SINGLE:
                made += [Program(**small, runner="native", per_edge=per_edge) for per_edge in (False, True)]
                made += [Program(**large, runner="native")]
            made += [Program(**small, deferred=deferred) for deferred in (False, True)]
            made += [Program(**large, deferred=deferred) for deferred in (False, True)]
            made += [Program(**small, deferred=deferred, per_edge=True) for deferred in (False, True)]
            made += [Program(**small, deferred=deferred, sends=sends) for deferred in (False, True) for sends in (1, 2)]
            made += [Program(**small, seed=chosen.randrange(10**6), per_edge=index % 2 == 1) for index in range(4)]
            made += [Program(**small, deferred=True, seed=chosen.randrange(10**6))]
    return made
