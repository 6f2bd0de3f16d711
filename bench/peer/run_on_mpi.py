"""Runs Pipewright's programs over MPI with each kind of communicator, and compares what happens with `pipewright validate`.

    run_on_mpi.py run --ranks 2,3,4 --out FILE.jsonl    runs the programs of these numbers of ranks, a line for each run
    run_on_mpi.py report FILE.jsonl ..                  prints the table, and exits with 1 if a run contradicts its verdict

`--pipewright` names the binary. It needs mpi4py and `mpirun`, and no PyTorch. A program is the lowering of a schedule of the
catalogue with one of several lists of passes, or the same with some messages moved. Its messages carry the stage, the direction
and the microbatch, and computations take no time. Messages have no tags.

| communicator | what the interpreter calls |
|---|---|
| `edge` | `MPI_Issend` and `MPI_Irecv` at once; a computation waits for its receive |
| `pair` | the same, but the next operation of a pair of ranks starts when the one before it is complete |
| `rank` | each operation of a rank is complete before the next action of its row begins |
| `rank, grouped` | operations that follow each other in a row start together, and are all complete before the next action |

`eager` in the name of a communicator means `MPI_Isend` in place of `MPI_Issend`, for messages of 24 bytes at even boundaries
and 256 KiB at odd ones: Open MPI sends the small ones at once, and the large ones wait for their receive.
"""

import argparse
import collections
import json
import mmap
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpi_program import Interpreter
from reorder import reordered

SCHEDULES = (
    "gpipe 1f1b loopedbfs interleaved1f1b interleavedzerobubble zbvzerobubble dualpipev zb-h1 zb-h2 interleaved-zb-h1 "
    "v-half v-min group-interleaved hanayo zb-greedy"
).split()
PASSES = ("send-recv", "send-early,send-recv", "send-recv,wait-send", "send-recv,wait-send,defer-recv")
COMMUNICATORS = {
    "edge": ("edge",),
    "pair": ("pair",),
    "rank": ("rank",),
    "rank, grouped": ("rank", "--grouped"),
    "pair, eager": ("pair", "--eager", "4096", "--message-bytes"),
    "rank, eager": ("rank", "--eager", "4096", "--message-bytes"),
}
SMALL, LARGE = 24, 256 << 10
OUTCOMES = ("right", "crossed", "hang", "other")
EXPECTED = {"sound": "right", "crossed": "crossed", "may hang": "hang", "crossed, may hang": "hang"}


def run(options):
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            jobs = Path(folder) / "jobs.jsonl"
            made = list(all_jobs(ranks, options.pipewright, Path(folder)))
            jobs.write_text("".join(json.dumps(job) + "\n" for job in made))
            command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--allow-run-as-root"]
            command += ["--mca", "mpi_yield_when_idle", "1", sys.executable, __file__, "work"]
            command += [str(jobs), options.out, str(options.deadline)]
            # A process leaves without `MPI_Finalize`, which would wait for the operations of programs that hang.
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        done = sum(line["ranks"] == ranks for line in read([options.out]))
        print(f"{ranks} ranks: {done} runs", flush=True)
        if done != len(made):
            sys.exit(f"{options.out} has {done} runs of {ranks} ranks, and {len(made)} were made; remove it and run again")


def all_jobs(ranks, binary, folder):
    """Every program with every communicator and its verdict."""
    chosen = random.Random(ranks)
    # Every second schedule; the next number of ranks has the others.
    for index, schedule in list(enumerate(SCHEDULES))[ranks % 2 :: 2]:
        passes = PASSES[(index // 2 + ranks) % len(PASSES)]
        rows = lowered(schedule, ranks, passes, binary, folder)
        if rows is None:
            continue
        for seed in (None, chosen.randrange(10**6)):
            program = {"schedule": schedule, "ranks": ranks, "passes": passes, "seed": seed}
            table = rows if seed is None else reordered(rows, seed)
            path = folder / "program.csv"
            path.write_text("".join(",".join(row) + "\n" for row in table))
            for communicator in COMMUNICATORS:
                verdict, cycle = judged(path, communicator, binary)
                yield program | {"communicator": communicator, "verdict": verdict, "cycle": cycle, "rows": table}


def lowered(schedule, ranks, passes, binary, folder):
    """The rows of a schedule after passes; `None` if the schedule cannot have this number of ranks."""
    compute, program = folder / "compute.csv", folder / "lowered.csv"
    microbatches = 2 * ranks
    size = ["--ranks", str(ranks), "--microbatches", str(microbatches)]
    made = call(binary, "schedule", schedule, *size, "--level", "compute", "--format", "csv", "-o", str(compute))
    if made.returncode != 0:
        return None
    done = call(binary, "lower", str(compute), "--pass", passes, "-o", str(program))
    if done.returncode != 0:
        raise RuntimeError(f"{schedule}, {passes}: {done.stderr}")
    return [line.split(",") for line in program.read_text().splitlines()]


def judged(path, communicator, binary):
    """The verdict in words, and the messages of its cycle."""
    arguments = list(COMMUNICATORS[communicator])
    if "--message-bytes" in arguments:
        arguments.append(",".join(str(LARGE if boundary % 2 else SMALL) for boundary in range(64)))
    done = call(binary, "validate", str(path), "--quiet", "--transport", *arguments)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{path}: {done.stderr}")
    word = re.search(r"^(?:edge|pair|rank) +(sound|crossed, may hang|crossed|may hang)", done.stdout, re.M)
    holds = re.findall(r"rank (\d+) at position \d+ \((\d+(?:SEND|RECV)_[FB]\d+)\)", done.stdout)
    return word.group(1), [(int(rank), cell) for rank, cell in holds]


def call(binary, *arguments):
    return subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)


def work(options):
    """One process of MPI: runs all jobs, and the first process writes the results."""
    # The import joins MPI.
    from mpi4py import MPI

    control = MPI.COMM_WORLD.Dup()
    rank, ranks = control.Get_rank(), control.Get_size()
    shared = Path(options.jobs).with_suffix(".positions")
    if rank == 0:
        shared.write_bytes(bytes(8 * (ranks + 1)))
    wait_for_all(control.Ibarrier())
    with shared.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    communicator, leftovers = control.Dup(), []
    for line in Path(options.jobs).read_text().splitlines():
        job = json.loads(line)
        watch = Watch(memory, rank, ranks, options.deadline * (1 if "hang" in job["verdict"] else 10))
        interpreter = Interpreter(MPI, communicator, job["rows"], job["communicator"], (SMALL, LARGE))
        has_finished = interpreter.run(watch)
        # No operation of the verdict's cycle may have completed.
        advanced = sum(owner == rank and cell in interpreter.completed for owner, cell in job["cycle"])
        own = struct.pack("3q", not has_finished, interpreter.crossed, advanced)
        every = bytearray(len(own) * ranks)
        wait_for_all(control.Iallgather([own, MPI.BYTE], [every, MPI.BYTE]))
        watch.reset()
        hung, crossed, advanced = (sum(counts) for counts in zip(*struct.iter_unpack("3q", every)))
        if rank == 0:
            line = {name: job[name] for name in ("schedule", "ranks", "passes", "seed", "communicator", "verdict")}
            line["word"] = "hang" if hung else "crossed" if crossed else "right"
            with open(options.out, "a") as out:
                print(json.dumps(line | {"advanced": advanced}), file=out, flush=True)
        wait_for_all(control.Ibarrier())
        if hung:
            # The operations of a program that hangs stay in its communicator.
            leftovers.append((communicator, interpreter))
            communicator = control.Dup()
    wait_for_all(control.Ibarrier())
    os._exit(0)


def wait_for_all(request):
    """Waits for a collective operation, and leaves the processor to others."""
    while not request.Test():
        time.sleep(1e-3)


class Watch:
    """The positions of all ranks in shared memory. The first rank notices when none of them changes any more."""

    def __init__(self, memory, rank, ranks, deadline):
        self.memory, self.rank, self.ranks, self.deadline = memory, rank, ranks, deadline
        self.seen, self.until = None, 0.0

    def reset(self):
        struct.pack_into("q", self.memory, 8 * self.rank, 0)
        if self.rank == 0:
            struct.pack_into("q", self.memory, 8 * self.ranks, 0)

    def set(self, progress):
        struct.pack_into("q", self.memory, 8 * self.rank, progress)

    def is_over(self):
        """Whether the program is called a hang."""
        values = struct.unpack_from(f"{self.ranks + 1}q", self.memory)
        if self.rank == 0 and values[-1] == 0:
            now = time.monotonic()
            if values != self.seen:
                self.seen, self.until = values, now + self.deadline
            elif now > self.until:
                struct.pack_into("q", self.memory, 8 * self.ranks, 1)
        return values[-1] != 0

    def all_done(self):
        return all(value < 0 for value in struct.unpack_from(f"{self.ranks}q", self.memory))


def read(paths):
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]


def report(options):
    lines = read(options.files)
    groups = collections.defaultdict(collections.Counter)
    for line in lines:
        kind = "reordered" if line["seed"] is not None else "as lowered"
        groups[f"`{line['communicator']}`", kind][line["word"] if line["word"] == EXPECTED[line["verdict"]] else "other"] += 1
    programs = {(line["schedule"], line["ranks"], line["passes"], line["seed"]) for line in lines}
    print(f"{len(programs)} programs, {len(lines)} runs over MPI\n")
    print("| communicator | order of messages | `sound`: right | `crossed`: crossed | `may hang`: hung | other |")
    print("|---|---|---|---|---|---|")
    for (communicator, kind), counts in [*groups.items(), (("all", ""), sum(groups.values(), collections.Counter()))]:
        print(f"| {communicator} | {kind} | " + " | ".join(str(counts[word]) for word in OUTCOMES) + " |")
    contradictions = [line for line in lines if line["word"] != EXPECTED[line["verdict"]]]
    elsewhere = [line for line in lines if line["word"] == "hang" and line["advanced"]]
    print(f"\n{len(contradictions)} runs contradict their verdict")
    print(f"{len(elsewhere)} of {sum(line['word'] == 'hang' for line in lines)} hangs have completed an operation of the cycle")
    for line in contradictions + elsewhere:
        print(f"  {line}")
    sys.exit(1 if contradictions or elsewhere else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=list(range(2, 9)))
    runs.add_argument("--out", required=True)
    runs.add_argument("--deadline", type=float, default=2, help="seconds without progress that count as a hang; ten times as many if no hang is expected")
    runs.add_argument("--pipewright", default="target/debug/pipewright")
    runs.set_defaults(work=run)
    works = commands.add_parser("work", help="one process of `run`")
    works.add_argument("jobs")
    works.add_argument("out")
    works.add_argument("deadline", type=float)
    works.set_defaults(work=work)
    reports = commands.add_parser("report")
    reports.add_argument("files", nargs="+")
    reports.set_defaults(work=report)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
