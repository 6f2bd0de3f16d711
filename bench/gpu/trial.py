#!/usr/bin/env python3
"""Tests Pipewright on a machine with a GPU and reports the results, in less than eight minutes.

    bench/gpu/trial.py --binary pipewright-cuda --out trial/

The machine needs a driver, Python 3.11 and PyTorch (without PyTorch, the comparisons are left out), and neither Rust nor
a network: the binary is built elsewhere by `build.sh`. The parts, in order:

    devices       what `pipewright devices` lists
    golden        the test model `llama-tiny` against the losses and gradient norms of PyTorch in f32, on one, two and
                  four ranks that share the device, under five schedules; then one run in each other precision
    throughput    the bench model, scaled up, in each precision, against PyTorch on the same device
    memory        peak bytes of the same model with and without recomputation, and the estimate of `pipewright check`

A part that fails or that the time does not allow is reported as such, and the next one runs. `trial.json` and
`trial.txt` in `--out` have all figures; they are written after each part, so a trial that is killed leaves what it found.
The exit code is 0 if every run gave a result, apart from those of PyTorch where it is not installed, and the golden losses
are right.

With `--device wgpu:cpu --tiny --precisions f32` the same script runs on a software device with small sizes; this is how
`.ci/devices` tests it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import peer

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parents[1] / "crates/pipewright-models/tests/data/llama-tiny"
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "zbvzerobubble": 2, "dualpipev": 2}
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4
PRECISIONS = ("f32", "bf16")


@dataclass(frozen=True)
class Size:
    """Sizes of the throughput model and of its runs, and the golden runs: their schedules, numbers of ranks and steps."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    golden_ranks: tuple[int, ...] = (1, 2, 4)
    golden_steps: int = 12
    hidden: int = 2048
    layers: int = 16
    heads: int = 16
    sequence: int = 1024
    microbatches: int = 8
    steps: int = 6

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward layers, in the proportion of the bench model (1376 to 512)."""
        return self.hidden * 43 // 16


TINY = Size(
    schedules=("1f1b", "zbvzerobubble"),
    golden_ranks=(2,),
    golden_steps=3,
    hidden=64,
    layers=4,
    heads=4,
    sequence=32,
    microbatches=4,
    steps=3,
)


class Trial:
    """The state of a trial: where things are, what was found, and how much time is left."""

    def __init__(self, options: argparse.Namespace):
        self.binary = options.binary.resolve()
        self.device = options.device
        self.size = TINY if options.tiny else Size()
        self.precisions = options.precisions
        self.out = options.out
        self.scratch = options.scratch / "pipewright-trial"
        self.deadline = time.monotonic() + options.minutes * 60
        self.environment = cuda_environment()
        self.found: dict[str, object] = {"device": self.device, "tiny": options.tiny}
        self.lines: list[str] = []

    def left(self) -> float:
        """Seconds until the end of the trial."""
        return self.deadline - time.monotonic()

    def say(self, line: str) -> None:
        """Adds a line to the table and shows it."""
        self.lines.append(line)
        print(line, flush=True)

    def record(self, part: str, row: dict[str, object]) -> None:
        """Adds a row to a part and writes everything found so far."""
        self.found.setdefault(part, []).append(row)
        self.save()

    def save(self) -> None:
        """Writes both files; each replaces the former one whole."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name, text in (("trial.json", json.dumps(self.found, indent=1)), ("trial.txt", "\n".join(self.lines))):
            part = self.out / f"{name}.part"
            part.write_text(text + "\n")
            part.replace(self.out / name)

    def run(self, arguments: list[str], limit: float) -> str:
        """Runs the command with `arguments` and returns what it printed.

        Raises `Failure` with the end of its messages when it fails or takes longer than `limit` seconds.
        """
        output = self.finish([str(self.binary), *arguments], limit, self.environment)
        if output.returncode != 0:
            raise Failure(f"exit code {output.returncode}: " + " ".join(output.stderr.split())[-600:])
        return output.stdout

    def finish(
        self, command: list[str], limit: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        """Runs a program to its end. Raises `Failure` when it takes longer than `limit` seconds."""
        limit = max(1.0, min(limit, self.left()))
        try:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"did not end within {error.timeout:.0f} s") from error

    def train(self, settings: dict[str, object], limit: float) -> list[dict[str, object]]:
        """Runs `pipewright train` with `settings` and returns the lines of its metrics."""
        run = self.scratch / "run"
        shutil.rmtree(run, ignore_errors=True)
        self.run(["train", *self.words(settings)], limit)
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def estimate(self, settings: dict[str, object]) -> int:
        """Returns the bytes that `pipewright check` expects of all ranks of a run with `settings` together."""
        checked = json.loads(self.run(["check", "--format", "json", *self.words(settings)], limit=60))
        return sum(rank["total"] for rank in checked["memory"]["ranks"])

    def words(self, settings: dict[str, object]) -> list[str]:
        """Returns the arguments of a command for `settings`."""
        settings = {"run.device": self.device, "run.out": str(self.scratch / "run"), **settings}
        pairs = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
        return [word for pair in pairs for word in ("--set", pair)]


def cuda_environment() -> dict[str, str]:
    """The environment in which the command finds CUDA's headers and its run-time compiler.

    Where no toolkit is installed, those that came with PyTorch's packages serve.
    """
    environment = dict(os.environ)
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    libraries = sorted({str(library.parent) for library in packages.glob("*/lib/lib*.so*")})
    known = environment.get("LD_LIBRARY_PATH", "").split(":")
    environment["LD_LIBRARY_PATH"] = ":".join(path for path in [*known, *libraries] if path)
    has_toolkit = "CUDA_PATH" in environment or any(Path(path).exists() for path in ("/usr/local/cuda", "/opt/cuda"))
    headers = sorted(packages.glob("*/include/cuda_fp16.h"))
    if headers and not has_toolkit:
        environment["CUDA_PATH"] = str(headers[0].parents[1])
    return environment


class Failure(Exception):
    """A part of the trial that gave no result, with the reason."""


class LeftOut(Exception):
    """A comparison that this machine does not allow, with the reason."""


def devices(trial: Trial) -> None:
    """Lists the devices and, where NVIDIA's tool is installed, the driver."""
    listed = trial.run(["devices"], limit=60)
    trial.found["devices"] = listed.splitlines()
    trial.say(listed.rstrip())
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        trial.found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
        trial.say(f"driver {trial.found['driver']}")


def golden(trial: Trial) -> None:
    """Compares `llama-tiny` with PyTorch under each schedule and number of ranks, then in bf16."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    trial.say(f"\nllama-tiny against PyTorch (at most {LOSS_TOLERANCE:g} and {NORM_TOLERANCE:g})")
    trial.say(f"{'schedule':<18}{'ranks':>6}{'precision':>11}{'loss':>12}{'grad norm':>12}{'seconds':>9}")
    runs = [(schedule, ranks, "f32") for ranks in trial.size.golden_ranks for schedule in trial.size.schedules]
    runs += [("1f1b", 2, precision) for precision in trial.precisions if precision != "f32"]
    for schedule, ranks, precision in runs:
        row = {"schedule": schedule, "ranks": ranks, "precision": precision}
        start = time.monotonic()
        try:
            metrics = trial.train(golden_settings(trial, expected, schedule, ranks, precision), limit=120)
            pairs = list(zip(metrics, expected["expected"][: trial.size.golden_steps], strict=True))
            row["loss_error"] = max(abs(step["loss"] / goal["loss"] - 1) for step, goal in pairs)
            row["norm_error"] = max(abs(step["grad_norm"] / goal["grad_norm"] - 1) for step, goal in pairs)
            row["within"] = row["loss_error"] <= LOSS_TOLERANCE and row["norm_error"] <= NORM_TOLERANCE
            found = f"{row['loss_error']:>12.1e}{row['norm_error']:>12.1e}{time.monotonic() - start:>9.1f}"
            note = "" if row["within"] or precision != "f32" else "  NOT WITHIN"
        except Failure as failure:
            row["failure"] = str(failure)
            found, note = "", f"  FAILED: {failure}"
        trial.say(f"{schedule:<18}{ranks:>6}{precision:>11}{found}{note}")
        trial.record("golden", row)


def golden_settings(trial: Trial, expected: dict, schedule: str, ranks: int, precision: str) -> dict[str, object]:
    """The recipe of the reference (`note` in `expected.json`)."""
    return {
        "model.from": str(GOLDEN),
        "data.path": str(GOLDEN / "tokens.jsonl"),
        "data.shuffle": False,
        "data.seq_len": expected["seq_len"],
        "pipeline.schedule": schedule,
        "pipeline.ranks": ranks,
        "pipeline.stages_per_rank": SCHEDULES[schedule],
        "pipeline.microbatches": expected["batch"],
        "pipeline.microbatch_size": 1,
        "optimizer.learning_rate": 2e-3,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "run.steps": trial.size.golden_steps,
        "run.precision": precision,
    }


def throughput(trial: Trial) -> None:
    """Measures tokens per second of the scaled bench model, ours and PyTorch's in turn."""
    size = trial.size
    trial.say(f"\nhidden {size.hidden}, {size.layers} layers, sequence {size.sequence}, tokens/s (median step)")
    trial.say(f"{'program':<26}{'precision':>10}{'ranks':>6}{'tokens/s':>12}{'first loss':>12}")
    for precision in trial.precisions:
        for ranks in (1, 2):
            row = {"program": "pipewright", "precision": precision, "ranks": ranks}
            attempt(trial, row, "throughput", lambda p=precision, r=ranks: ours(trial, p, r))
        for compiled in (False, True):
            row = {"program": "pytorch, compiled" if compiled else "pytorch", "precision": precision, "ranks": 1}
            attempt(trial, row, "throughput", lambda p=precision, c=compiled: theirs(trial, p, compiled=c))


def attempt(trial: Trial, row: dict[str, object], part: str, measure: Callable[[], dict[str, object]]) -> None:
    """Adds what `measure` finds to `row`, or why it found nothing, and adds the row to `part`."""
    title, figures = COLUMNS[part]
    try:
        if trial.left() < 20:
            raise Failure("no time is left")
        row |= measure()
        found = figures(row)
    except Failure as failure:
        row["failure"] = str(failure)
        found = f"  FAILED: {failure}"
    except LeftOut as reason:
        row["left_out"] = str(reason)
        found = f"  left out: {reason}"
    trial.say(title.format(**row) + found)
    trial.record(part, row)


def speed(row: dict[str, object]) -> str:
    """The columns of the throughput."""
    return f"{row['tokens_per_second']:>12.0f}{row['first_loss']:>12.4f}"


def peak(row: dict[str, object]) -> str:
    """The columns of the memory."""
    sizes = [row["peak_bytes"], row["estimated_bytes"]]
    return "".join(f"{size / 2**20:>10.0f}" for size in sizes) + f"{statistics.median(row['step_ms'][1:]):>12.1f}"


COLUMNS = {"throughput": ("{program:<26}{precision:>10}{ranks:>6}", speed), "memory": ("{recompute:<12}", peak)}


def ours(trial: Trial, precision: str, ranks: int, **more: object) -> dict[str, object]:
    """Trains the scaled model for a few steps. The first step compiles kernels and is not counted."""
    metrics = trial.train({**scaled_settings(trial, precision, ranks), **more}, limit=100)
    tokens = trial.size.microbatches * trial.size.sequence
    milliseconds = statistics.median(step["step_ms"] for step in metrics[1:])
    return {
        "tokens_per_second": tokens * 1e3 / milliseconds,
        "step_ms": [step["step_ms"] for step in metrics],
        "peak_bytes": max(sum(step["peak_bytes"]) for step in metrics),
        "first_loss": metrics[0]["loss"],
        "last_loss": metrics[-1]["loss"],
    }


def theirs(trial: Trial, precision: str, *, compiled: bool) -> dict[str, object]:
    """Trains the same model in PyTorch, in this process's interpreter but a process of its own."""
    size = trial.size
    sizes = [size.hidden, size.intermediate, size.layers, size.heads, size.sequence, size.microbatches, size.steps]
    command = [sys.executable, str(HERE / "peer.py"), precision, str(int(compiled)), *map(str, sizes)]
    output = trial.finish(command, limit=120)
    if output.returncode == peer.NOT_INSTALLED:
        raise LeftOut("PyTorch is not installed")
    if output.returncode != 0:
        raise Failure(" ".join(output.stderr.split())[-600:])
    return json.loads(output.stdout.splitlines()[-1])


def scaled_settings(trial: Trial, precision: str, ranks: int) -> dict[str, object]:
    """The bench model at the trial's size, on random tokens, which `peer.py` draws too."""
    size = trial.size
    rows = trial.scratch / "rows.jsonl"
    if not rows.exists():
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("\n".join(json.dumps(row) for row in peer.token_rows(size.microbatches, size.sequence)) + "\n")
    return {
        "model.architecture": "llama",
        "model.vocab_size": peer.VOCABULARY,
        "model.hidden_size": size.hidden,
        "model.intermediate_size": size.intermediate,
        "model.num_hidden_layers": size.layers,
        "model.num_attention_heads": size.heads,
        "model.num_key_value_heads": size.heads,
        "data.path": str(rows),
        "data.tokenizer": "bytes",
        "data.seq_len": size.sequence,
        "data.shuffle": False,
        "pipeline.schedule": "1f1b",
        "pipeline.ranks": ranks,
        "pipeline.microbatches": size.microbatches,
        "pipeline.microbatch_size": 1,
        "optimizer.learning_rate": peer.LEARNING_RATE,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "run.steps": size.steps,
        "run.precision": precision,
    }


def memory(trial: Trial) -> None:
    """Compares peak bytes, with the estimate of `check`, and step time with and without recomputation.

    Under `gpipe`: on one rank, 1F1B runs each backward right after its forward and recomputes nothing. The peak has the
    temporary tensors of a step and what the back end keeps, and the estimate does not include them.
    """
    trial.say(f"\n{'recompute':<12}{'peak MiB':>10}{'check MiB':>10}{'ms a step':>12}")
    for recompute in ("none", "stage", "block"):
        more = {"pipeline.recompute": recompute, "pipeline.schedule": "gpipe"}
        attempt(trial, {"recompute": recompute}, "memory", lambda m=more: with_estimate(trial, m))


def with_estimate(trial: Trial, more: dict[str, object]) -> dict[str, object]:
    """Trains the scaled model on one rank in single precision, and asks `check` for its memory."""
    estimated = trial.estimate({**scaled_settings(trial, "f32", 1), **more})
    return {**ours(trial, "f32", 1, **more), "estimated_bytes": estimated}


def main() -> int:
    """Runs every part; the exit code is 0 if all of them gave a result and the golden losses are right."""
    trial = Trial(parse_options())
    failed = []
    for part in (devices, golden, throughput, memory):
        try:
            part(trial)
        except (Failure, OSError, subprocess.SubprocessError) as failure:
            trial.say(f"{part.__name__}: FAILED: {failure}")
            trial.found.setdefault("failed_parts", []).append({"part": part.__name__, "failure": str(failure)})
            failed.append(part.__name__)
    shutil.rmtree(trial.scratch, ignore_errors=True)
    rows = [row for part in ("golden", "throughput", "memory") for row in trial.found.get(part, [])]
    failures = [row for row in rows if "failure" in row or (row.get("precision") == "f32" and not row.get("within", True))]
    trial.say(f"\n{len(rows) - len(failures)} of {len(rows)} runs as expected; {trial.left():.0f} s were left")
    trial.save()
    return 1 if failed or failures else 0


def parse_options() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=Path, required=True, help="the command `pipewright`, built for the device")
    parser.add_argument("--device", default="cuda", help="as `run.device` (default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("trial"), help="folder of trial.json and trial.txt")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="folder for runs, fast and large")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test of the script")
    parser.add_argument(
        "--precisions",
        type=lambda text: text.split(","),
        default=",".join(PRECISIONS),
        help="the precisions of the runs (default: %(default)s)",
    )
    options = parser.parse_args()
    if not set(options.precisions) <= set(PRECISIONS):
        parser.error(f"--precisions: at most {', '.join(PRECISIONS)}")
    if not options.binary.is_file():
        parser.error(f"--binary: `{options.binary}` is not a file; build.sh makes it")
    if not GOLDEN.is_dir():
        parser.error(f"`{GOLDEN}` is missing; run the script inside a checkout")
    return options


if __name__ == "__main__":
    sys.exit(main())
