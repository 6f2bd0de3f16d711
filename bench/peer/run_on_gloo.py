"""Runs PyTorch's pipeline programs on Gloo and compares what happens with the verdicts of `pipewright validate --transport`.

    run_on_gloo.py run --ranks 2,3,4 --out FILE.jsonl      runs all programs of these numbers of ranks, a line for each
    run_on_gloo.py report FILE.jsonl ..                    prints the tables, and exits with 1 if a run contradicts its verdict
    run_on_gloo.py golden FILE.jsonl ..                    prints the programs that a test of pipewright-schedule judges (JSON)
    run_on_gloo.py sends                                   measures whether Gloo's sends wait for their receive

`--pipewright` names the binary. Each program runs for real, with small layers, one process for each rank; its gradients are
compared with those of the unpipelined model. `run` continues a file that an interrupted run has left.

The model of Gloo is `edge`: messages of a directed pair of ranks have no tags (PyTorch's pipelines leave `tag` at 0), and the
k-th send meets the k-th receive. A send completes when its receive runs, whatever its size; `sends` measures this. PyTorch's
batched exchanges are single operations on Gloo. A process group for each directed pair (`pipeline_per_edge_p2p`) has
the same queues.
"""

import argparse
import collections
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_programs import SCHEDULES, programs, table
from gloo_world import World
from reorder import is_operation

TRANSPORTS = ("edge", "pair", "rank", "rank, grouped")
# The outcome of a run on Gloo for each verdict.
EXPECTED = {"sound": "right", "crossed": "wrong", "may hang": "hang", "crossed, may hang": "hang"}
OUTCOMES = ("right", "wrong", "hang", "other")


def run(options):
    # The processes of a world end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = Path(options.out)
    done = {line["key"] for line in read([out])} if out.exists() else set()
    with out.open("a") as file:
        for ranks in options.ranks:
            world = World(ranks)
            try:
                for program in programs(ranks):
                    run_program(world, program, options, done, file)
            finally:
                world.stop()


def run_program(world, program, options, done, file):
    """Runs a program that is not done, and writes its line."""
    key = json.dumps(asdict(program))
    rows = None if program.runner == "native" else table(program)
    if key in done or (rows is None and program.runner != "native"):
        return
    outcome = world.run(program, rows, options.deadline)
    judgement = judged(rows or outcome.rows, outcome, options.pipewright)
    if outcome.word == "hang" and not is_named(judgement):
        # A busy machine may look like a hang.
        outcome = world.run(program, rows, 6 * options.deadline)
        judgement = judged(rows or outcome.rows, outcome, options.pipewright)
    line = {"key": key, "options": program.options(), **asdict(program), **vars(outcome)}
    print(json.dumps(line | {"rows": rows or outcome.rows, **judgement}), file=file, flush=True)
    verdict = judgement["verdicts"]["edge"]
    print(f"{program.ranks} {program.schedule} ({program.options()}): {verdict}, {outcome.word}", flush=True)


def is_named(judgement):
    """Whether the verdict says that the program hangs, at the actions where its ranks stand."""
    return "may hang" in judgement["verdicts"]["edge"] and judgement["stands"]


def judged(rows, outcome, binary):
    """The verdicts on a table, and whether the ranks of a program that hung stand where the verdict says."""
    if rows is None:
        raise RuntimeError(f"PyTorch's own step has no table unless it ends: {outcome.word} {outcome.message}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.csv"
        path.write_text("".join(",".join(row) + "\n" for row in rows))

        def validate(*arguments):
            command = [binary, "validate", str(path), "--quiet", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 3):
                raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
            return done.stdout

        verdicts = json.loads(validate("--transport", "all", "--format", "json"))
        grouped = json.loads(validate("--transport", "rank", "--grouped", "--format", "json"))
        judgement = {"verdicts": {name: verdicts[name] for name in ("buffered", "edge", "pair", "rank")}}
        judgement["verdicts"]["rank, grouped"] = grouped["rank"]
        if outcome.word == "hang":
            judgement["stands"] = stands(validate("--transport", "edge"), outcome.positions)
    return judgement


def stands(verdict, positions):
    """Whether each rank that waits in its row, by the verdict's cycle, stands at that action."""
    holds = re.findall(r"rank (\d+) at position (\d+) \((.+?)\) waits for (\S+)\n", verdict + "\n")
    own = [(int(rank), int(position)) for rank, position, action, _ in holds if not is_operation(action)]
    return bool(own) and all(positions[rank] == position for rank, position in own)


def read(paths):
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]


def report(options):
    lines = read(options.files)
    contradictions = [line for line in lines if line["word"] != EXPECTED[line["verdicts"]["edge"]]]
    elsewhere = [line for line in lines if line["word"] == "hang" and not line["stands"]]
    print(f"PyTorch {torch.__version__.split('+')[0]}, Gloo, {len(lines)} programs\n")
    counts_by_verdict(lines)
    counts_of_models(lines)
    hangs = sum(line["word"] == "hang" for line in lines)
    for verdict, extreme in (("sound", max), ("crossed", min)):
        errors = [line["error"] for line in lines if line["verdicts"]["edge"] == verdict and line["error"] is not None]
        if errors:
            print(f"the {extreme.__name__} relative error of a stage's gradient with the verdict `{verdict}`: {extreme(errors):.1e}")
    print(f"{len(contradictions)} runs contradict their verdict")
    print(f"{len(elsewhere)} of {hangs} hangs stand elsewhere than the verdict says")
    for line in contradictions + elsewhere:
        print(f"  {line['key']}: {line['verdicts']['edge']}, {line['word']} {line['message']}")
    sys.exit(1 if contradictions or elsewhere else 0)


def counts_by_verdict(lines):
    """Prints for each schedule how many runs ended as their verdict says, by verdict, and how many did not."""
    groups = collections.defaultdict(collections.Counter)
    for line in lines:
        agrees = line["word"] == EXPECTED[line["verdicts"]["edge"]]
        groups[line["schedule"], words(line)][line["word"] if agrees else "other"] += 1
    print("| schedule | order of messages | `sound`: right | `crossed`: wrong gradients | `may hang`: hung | other |")
    print("|---|---|---|---|---|---|")
    rows = sorted(groups.items(), key=lambda group: order(*group[0]))
    for (schedule, option), counts in [*rows, (("all", ""), sum(groups.values(), collections.Counter()))]:
        print(f"| {schedule} | {option} | " + " | ".join(str(counts[word]) for word in OUTCOMES) + " |")
    print()


def order(schedule, *rest):
    """The key that sorts rows of a table: schedules as they are declared."""
    return list(SCHEDULES).index(schedule.split(" ")[0]), schedule, *rest


def words(line):
    """The options of a line for a table. Limits of sends and groups for each edge share a row."""
    return "reordered" if line["seed"] is not None else "`defer_pp_recv`" if line["deferred"] else "PyTorch's order"


def counts_of_models(lines):
    """Prints how many programs in PyTorch's order each model calls sound."""
    groups = collections.defaultdict(list)
    for line in lines:
        if line["seed"] is None:
            runner = f" ({line['runner']})" if line["schedule"] in ("GPipe", "1F1B") else ""
            groups[line["schedule"] + runner, words(line)].append(line["verdicts"])
    print("| schedule | options | programs | " + " | ".join(f"sound for `{name}`" for name in TRANSPORTS) + " |")
    print("|---|---|---|" + "---|" * len(TRANSPORTS))
    for (schedule, option), verdicts in sorted(groups.items(), key=lambda group: order(*group[0])):
        sound = [sum(verdict[name] == "sound" for verdict in verdicts) for name in TRANSPORTS]
        print(f"| {schedule} | {option} | {len(verdicts)} | " + " | ".join(map(str, sound)) + " |")
    print()


def golden(options):
    """Prints the smallest program of each schedule, order, outcome and combination of verdicts, one in a line."""
    smallest = {}
    for line in read(options.files):
        key = (line["schedule"], line["runner"], words(line), line["word"], tuple(line["verdicts"].values()))
        size = sum(map(len, line["rows"]))
        if key not in smallest or size < smallest[key][0]:
            smallest[key] = (size, line)
    kept = ("schedule", "ranks", "microbatches", "options", "word", "verdicts")
    tables = []
    for _, line in smallest.values():
        table = {name: line[name] for name in kept} | {"program": "".join(",".join(row) + "\n" for row in line["rows"])}
        # A clone stays small.
        tables += [json.dumps(table)] if len(table["program"]) < 4000 else []
    print("[\n" + ",\n".join(sorted(tables)) + "\n]")


def sends(_options):
    """Measures how long a wait for a send takes when its receive runs one second later."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=send_or_receive, args=(rank, folder)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def send_or_receive(rank, folder):
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(minutes=2))
    for elements in (1, 1 << 10, 1 << 20):
        tensor = torch.zeros(elements)
        dist.barrier()
        if rank == 1:
            time.sleep(1)
            dist.irecv(tensor, 0).wait()
            continue
        begin = time.monotonic()
        dist.isend(tensor, 1).wait()
        print(f"{elements * 4} bytes: the wait for the send took {time.monotonic() - begin:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=list(range(2, 9)))
    runs.add_argument("--out", required=True)
    runs.add_argument("--deadline", type=float, default=20, help="seconds without progress that count as a hang; six times as many if the verdict does not name it")
    runs.add_argument("--pipewright", default="target/debug/pipewright")
    runs.set_defaults(work=run)
    reports = commands.add_parser("report")
    reports.add_argument("files", nargs="+")
    reports.set_defaults(work=report)
    tables = commands.add_parser("golden")
    tables.add_argument("files", nargs="+")
    tables.set_defaults(work=golden)
    commands.add_parser("sends").set_defaults(work=sends)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
