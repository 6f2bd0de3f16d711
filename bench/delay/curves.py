#!/usr/bin/env python3
"""Trains the built-in sample with synchronous and with delayed weights, for several seeds, and prints a table of the losses.

    python3 bench/delay/curves.py [PIPEWRIGHT] [-- SETTING ...]     (default: target/release/pipewright)

Each run is that of `pipewright train` without a configuration, for STEPS steps; a SETTING such as optimizer.learning_rate=0.001
holds for all runs. A line of the table is a variant: the mean training loss of 50 steps around several points of the run, the mean
and the deviation over the seeds, and the mean and the deviation of what each seed loses against the same optimizer without delay.
Environment: STEPS (1000), SEEDS (42,43,44,45,46), VARIANTS (names of the table, separated by commas), OUT (a folder that keeps the
metrics; runs that are there already are not repeated), RANKS (1; the losses are the same for every number).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = int(os.environ.get("STEPS", 1000))
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "42,43,44,45,46").split(",")]
RANKS = int(os.environ.get("RANKS", 1))
WINDOW = 50
VARIANTS = {
    "adamw": ("adamw", 0, "none"),
    "adamw delayed": ("adamw", 1, "none"),
    "adamw corrected": ("adamw", 1, "error-feedback"),
    "muon": ("muon", 0, "none"),
    "muon delayed": ("muon", 1, "none"),
    "muon corrected": ("muon", 1, "error-feedback"),
}


def losses(binary, folder, variant, seed, settings):
    """Trains one variant from one seed, and returns the loss of each step."""
    optimizer, delay, correction = VARIANTS[variant]
    out = folder / f"{variant.replace(' ', '-')}-{seed}"
    metrics = out / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) < STEPS:
        chosen = {
            "optimizer.name": optimizer,
            "optimizer.delay": delay,
            "optimizer.delay_correction": correction,
            "pipeline.ranks": RANKS,
            "run.steps": STEPS,
            "run.seed": seed,
            "run.out": out,
            "run.checkpoint_every": 0,
        }
        sets = [f"{key}={value}" for key, value in chosen.items()] + settings
        command = [binary, "train", *(word for setting in sets for word in ("--set", setting))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()][:STEPS]


def spread(numbers):
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def main():
    words = sys.argv[1:]
    settings = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    binary = words[0] if words else "target/release/pipewright"
    names = [name.strip() for name in os.environ.get("VARIANTS", ",".join(VARIANTS)).split(",")]
    points = [STEPS // 4, STEPS // 2, STEPS]
    print("| variant | " + " | ".join(f"steps {end - WINDOW + 1} to {end}" for end in points) + " | against no delay |")
    print("|---|" + "---|" * (len(points) + 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("OUT", temporary))
        folder.mkdir(parents=True, exist_ok=True)
        ends = {}
        for name in names:
            curves = [losses(binary, folder, name, seed, settings) for seed in SEEDS]
            means = [[statistics.fmean(curve[end - WINDOW : end]) for curve in curves] for end in points]
            ends[name] = means[-1]
            cells = [f"{statistics.fmean(mean):.3f} ± {spread(mean):.3f}" for mean in means]
            base = ends.get(name.split()[0])
            lost = [late - early for late, early in zip(means[-1], base)] if base and " " in name else None
            cells.append(f"{statistics.fmean(lost):+.4f} ± {spread(lost):.4f}" if lost else "")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
