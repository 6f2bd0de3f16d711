"""Writes `command_line.json`, what the command line prints for the cases of `test_command_line.py`.

Run it with the path of the binary after a change of the command line's numbers:

    python crates/pipewright-python/tests/core/golden/make.py target/debug/pipewright
"""

import json
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
PROFILE = str(FOLDER / "profile.toml")
COSTS = "F=1,I=1.5,W=0.5,hop=0.1"
EXCHANGES = "hop=0.1,exchange=0.8,exchanges=8"
# Settings of the engine's own times and of its plan's search, which differ from run to run.
TIMES = ("engine_ms", "search_s", "activation_buffers", "simulated")


def main(binary: str) -> None:
    def run(*arguments: str) -> str:
        return subprocess.run([binary, *arguments], check=True, capture_output=True, text=True).stdout

    def figures(*arguments: str) -> dict:
        printed = json.loads(run(*arguments, "--format", "json"))
        return {key: value for key, value in printed.items() if key not in TIMES}

    names = [line.split()[0] for line in run("schedule", "--list").splitlines()]
    size = ["--ranks", "4", "--microbatches", "8"]
    plan = ["--profile", PROFILE, "--ranks", "4", "--microbatches", "16", "--data-parallel", "1"]
    plan += ["--memory", "8GiB", "--time-limit", "600s"]
    golden = {
        "costs": COSTS,
        "schedules": {
            name: {
                "csv": {level: run("schedule", name, *size, "--level", level) for level in ("compute", "comms", "full")},
                "simulate": figures("simulate", name, *size, "--cost", COSTS),
                "logical": figures("simulate", name, *size, "--logical"),
            }
            for name in names
        },
        "exchange_costs": EXCHANGES,
        "exchanges": figures("simulate", "dualpipev", *size, "--cost", EXCHANGES),
        "profile": figures("simulate", "1f1b", *size, "--profile", PROFILE),
        "profile_recompute": figures(
            "simulate", "1f1b", *size, "--profile", PROFILE, "--boundaries", "4,8,12", "--recompute", "0,1"
        ),
        "plan": figures("plan", *plan),
    }
    (FOLDER / "command_line.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
