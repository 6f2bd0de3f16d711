"""What PyTorch's pipeline schedules look like after its own passes, and whether it reads schedules of Pipewright.

    schedules.py dump                 prints the sweep that the tests of pipewright-schedule compare with (JSON)
    schedules.py defer                prints schedules of PyTorch with deferred receives, which the same tests validate (JSON)
    schedules.py budget               prints digests of PyTorch's schedules with limits of sends, for the same tests (JSON)
    schedules.py load FILE.csv ..     lets PyTorch read schedules, with or without communication; a line for each file

`dump` lowers PyTorch's schedules with sharded parameters, for several windows (`max_active_stages`), lookaheads
(`unshard_lookahead`) and places of the wait for a reduction (`defer_reduce_grad_wait`). It needs no process group.
"""

import argparse
import csv
import json
import logging
import re

import torch
import torch.distributed.pipelining.schedules as pipelining

# Schedule, stages per rank.
SCHEDULES = [
    (pipelining.ScheduleLoopedBFS, "loopedbfs", (2, 3)),
    (pipelining.ScheduleInterleaved1F1B, "interleaved1f1b", (2, 4)),
    (pipelining.ScheduleInterleavedZeroBubble, "interleavedzerobubble", (2, 3)),
    (pipelining.ScheduleZBVZeroBubble, "zbvzerobubble", (2,)),
    (pipelining.ScheduleDualPipeV, "dualpipev", (2,)),
]
RANKS = (2, 3)
WINDOWS = (1, 2, 3)
LETTERS = {
    pipelining.UNSHARD: "U",
    pipelining.RESHARD: "R",
    pipelining.REDUCE_GRAD: "G",
    pipelining.WAIT_REDUCE_GRAD: "A",
}


class Stage:
    """The parts of a stage that a schedule reads before its first step."""

    def __init__(self, index, stages, rank, ranks):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = None


def stages_of(rank, ranks, per_rank, is_v):
    """The stages of a rank, as a schedule wants them."""
    count = ranks * per_rank
    indices = [rank, count - 1 - rank] if is_v else range(rank, count, ranks)
    return [Stage(index, count, rank, ranks) for index in indices]


def lookaheads(window, ranks):
    """The lookaheads that a window allows, without those that another one equals."""
    yield "full"
    if window > 1:
        yield "auto"
        yield tuple([1] * ranks)
    if window > 2:
        yield tuple(window - rank % 2 for rank in range(ranks))
        yield tuple(1 + rank % window for rank in range(ranks))


def lowered(schedule, name, size, options):
    """The schedule of PyTorch with its actions after all passes; `None` if it does not exist."""
    ranks, per_rank, microbatches = size
    is_v = name in ("zbvzerobubble", "dualpipev")
    stages = stages_of(0, ranks, per_rank, is_v)
    try:
        return schedule(stages, microbatches, loss_fn=torch.nn.MSELoss(), **options)
    except ValueError:
        return None


def inserted(row):
    """The actions of a row that passes have added, each with the number of computations before it."""
    cells, computed = [], 0
    for action in row:
        if action.is_compute_op:
            computed += 1
        elif action.computation_type in LETTERS:
            cells.append(f"{computed}:{action.stage_index}{LETTERS[action.computation_type]}")
    return " ".join(cells)


def dump():
    tables = []
    for schedule, name, per_ranks in SCHEDULES:
        sizes = [(ranks, per_rank, ranks * factor) for ranks in RANKS for per_rank in per_ranks for factor in (1, 2)]
        for size in sizes:
            table = cases(schedule, name, size)
            if table["cases"]:
                tables.append(table)
    return {"torch": torch.__version__.split("+")[0], "tables": tables}


def cases(schedule, name, size):
    """One schedule of one size, with what the passes add for each combination of options."""
    ranks, per_rank, microbatches = size
    table = {"schedule": name, "ranks": ranks, "stages_per_rank": per_rank, "microbatches": microbatches}
    table |= {"compute": None, "cases": []}
    for window in WINDOWS:
        for lookahead in lookaheads(window, ranks):
            for deferred in (False, True):
                options = {"max_active_stages": window, "unshard_lookahead": lookahead}
                made = lowered(schedule, name, size, options | {"defer_reduce_grad_wait": deferred})
                if made is None:
                    continue
                rows = [made.pipeline_order_with_comms[rank] for rank in range(ranks)]
                compute = "".join(",".join(str(a) for a in row if a.is_compute_op) + "\n" for row in rows)
                table["compute"] = table["compute"] or compute
                assert table["compute"] == compute, "passes keep the order of computations"
                text = lookahead if isinstance(lookahead, str) else "/".join(map(str, lookahead))
                case = {"window": window, "lookahead": text, "deferred": deferred}
                table["cases"].append(case | {"rows": [inserted(row) for row in rows]})
    return table


def deferred():
    """Schedules with deferred receives, without the actions of sharded parameters."""
    tables = []
    for schedule, name, per_ranks in SCHEDULES:
        for ranks, microbatches in ((2, 4), (4, 8)):
            size = (ranks, per_ranks[0], microbatches)
            made = lowered(schedule, name, size, {"defer_pp_recv": True})
            rows = [made.pipeline_order_with_comms[rank] for rank in range(ranks)]
            kept = ([str(a) for a in row if a.computation_type not in LETTERS] for row in rows)
            table = {"schedule": name, "ranks": ranks, "stages_per_rank": per_ranks[0], "microbatches": microbatches}
            tables.append(table | {"comms": "".join(",".join(row) + "\n" for row in kept)})
    return "[\n" + ",\n".join(json.dumps(table) for table in tables) + "\n]"


BUDGETS = (1, 2, 3, 4, 6, 8)


def limited():
    """Schedules with limits of sends (`max_outstanding_sends`): a digest of each table, or the refusal."""
    tables = []
    for schedule, name, _ in SCHEDULES:
        is_v = name in ("zbvzerobubble", "dualpipev")
        for ranks, per_rank, microbatches in ((2, 2, 4), (3, 2, 6), (4, 2, 8), (5, 2 if is_v else 4, 10)):
            for defers in (False, True):
                size = (ranks, per_rank, microbatches)
                table = {"schedule": name, "ranks": ranks, "stages_per_rank": per_rank, "microbatches": microbatches}
                free = table_text(schedule, name, size, defers, None)
                table |= {"deferred": defers, "free": digest(free)}
                if defers and changes_places(free):
                    table["free_rows"] = free
                found = {budget: table_text(schedule, name, size, defers, budget) for budget in BUDGETS}
                table["budgets"] = {budget: text if "\n" not in text else digest(text) for budget, text in found.items()}
                tables.append(table)
    return "[\n" + ",\n".join(json.dumps(table) for table in tables) + "\n]"


def table_text(schedule, name, size, defers, budget):
    """The rows of PyTorch's program, or the place at which it refuses the limit."""
    ranks, per_rank, microbatches = size
    stages = stages_of(0, ranks, per_rank, name in ("zbvzerobubble", "dualpipev"))
    options = {"defer_pp_recv": defers, "max_outstanding_sends": budget}
    try:
        made = schedule(stages, microbatches, loss_fn=torch.nn.MSELoss(), **options)
    except ValueError as refusal:
        rank, send = re.search(r"on pipeline rank (\d+) before (\w+)\.", str(refusal)).groups()
        return f"rank {rank} {send}"
    return "".join(",".join(map(str, made.pipeline_order_with_comms[rank])) + "\n" for rank in range(ranks))


def changes_places(text):
    """Whether a rank receives messages of another one in another order than they are sent."""
    rows = [[pipelining._Action.from_str(cell) for cell in row.split(",")] for row in text.splitlines()]
    rank_of = {part.stage_index: rank for rank, row in enumerate(rows) for a in row for part in a.sub_actions or (a,)}
    ends = {pipelining.SEND_F: 1, pipelining.SEND_B: -1, pipelining.RECV_F: -1, pipelining.RECV_B: 1}
    sent, received = {}, {}
    for rank, row in enumerate(rows):
        for action in (a for a in row if a.computation_type in ends):
            kind = action.computation_type
            stages = (action.stage_index, action.stage_index + ends[kind])
            message = (sorted(stages), kind in (pipelining.SEND_F, pipelining.RECV_F), action.microbatch_index)
            other = rank_of[stages[1]]
            if kind in (pipelining.SEND_F, pipelining.SEND_B):
                sent.setdefault((rank, other), []).append(message)
            else:
                received.setdefault((other, rank), []).append(message)
    return sent != received


def digest(text):
    """The FNV-1a hash of a text, in 64 bits."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def printed(swept):
    """The sweep as JSON with one case per line."""
    tables = []
    for table in swept["tables"]:
        cases = ",\n".join(json.dumps(case) for case in table.pop("cases"))
        tables.append(json.dumps(table)[:-1] + ', "cases": [\n' + cases + "\n]}")
    return '{"torch": "' + swept["torch"] + '", "tables": [\n' + ",\n".join(tables) + "\n]}"


def load(path):
    """Lets PyTorch read a schedule; returns what it says."""
    try:
        with open(path, newline="") as file:
            actions = [pipelining._Action.from_str(cell) for row in csv.reader(file) for cell in row]
    except RuntimeError as error:
        return f"refused: {error}"
    with open(path, newline="") as file:
        ranks = sum(1 for _ in csv.reader(file))
    parts = [part for action in actions if action for part in action.sub_actions or (action,)]
    stages = 1 + max(part.stage_index for part in parts)
    microbatches = 1 + max(part.microbatch_index or 0 for part in parts)
    stage = Stage(0, stages, 0, ranks)
    runtime = pipelining._PipelineScheduleRuntime([stage], microbatches, loss_fn=torch.nn.MSELoss())
    try:
        runtime._load_csv(path, format="compute_only" if all(part.is_compute_op for part in parts) else "compute_comms")
    except (ValueError, AssertionError, RuntimeError, KeyError) as error:
        return f"refused: {error}"
    return "read"


def main():
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["dump", "defer", "budget", "load"])
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    if arguments.command == "dump":
        print(printed(dump()))
    elif arguments.command == "defer":
        print(deferred())
    elif arguments.command == "budget":
        print(limited())
    for path in arguments.files:
        print(f"{path}: {load(path)}")


if __name__ == "__main__":
    main()
