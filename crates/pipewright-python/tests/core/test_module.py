"""`python -m pipewright_pp` runs the commands of the command line that need no training."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "command_line.json").read_text())
PROFILE = str(FOLDER / "profile.toml")
SIZE = ["--ranks", "4", "--microbatches", "8"]
# Times of the engine itself, and figures of a search that the golden data leave out.
TIMES = ("engine_ms", "search_s", "activation_buffers", "simulated")

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def start(arguments, **keys):
    words = [sys.executable, "-m", "pipewright_pp", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keys)


def check(arguments, code=0, error="", **keys):
    """Returns the output of a command, which must end with this exit code and this part of a message."""
    process = start(arguments, **keys)
    printed, said = process.communicate(timeout=120)
    assert (process.returncode, error in said) == (code, True), said
    return printed


def figures(*arguments):
    printed = json.loads(check([*arguments, "--format", "json"]))
    return {key: value for key, value in printed.items() if key not in TIMES}


def test_the_output_is_the_command_line_s():
    golden = GOLDEN["schedules"]["zbvzerobubble"]
    for level in ("compute", "full"):
        assert check(["schedule", "zbv", *SIZE, "--level", level]) == golden["csv"][level]
    assert figures("simulate", "zbv", *SIZE, "--cost", GOLDEN["costs"]) == golden["simulate"]
    assert figures("simulate", "1f1b", *SIZE, "--profile", PROFILE) == GOLDEN["profile"]


def test_programs_are_lowered_validated_and_compared(tmp_path):
    check(["schedule", "1f1b", *SIZE, "-o", "1f1b.csv"], error="wrote 1f1b.csv", cwd=tmp_path)
    check(["lower", "1f1b.csv", "--pass", "send-recv", "-o", "program.csv"], cwd=tmp_path)
    assert "sound" in check(["validate", "program.csv", "--transport", "all"], cwd=tmp_path)
    rows = (tmp_path / "1f1b.csv").read_text().splitlines()
    (tmp_path / "wrong.csv").write_text("\n".join(",".join(reversed(row.split(","))) for row in rows) + "\n")
    check(["validate", "wrong.csv"], code=3, cwd=tmp_path)
    assert "zb-h1" in check(["compare", "1f1b", "zb-h1", *SIZE])
    assert "forwards before" in check(["vpp", "--ranks", "4", "--chunks", "2", "--microbatches", "8"])


def test_a_model_is_planned_for_a_cluster(tmp_path):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(MODEL))
    words = ["plan", str(model), "--cluster", "h100", "--nodes", "1", "--global-batch", "64", "--seq-len", "4096"]
    plans = json.loads(check([*words, "--format", "json"]))["plans"]
    assert plans[0]["predicted_step_s"] > 0
    assert "h100" in check(["clusters"])
    # As the cache of the Hugging Face hub has it.
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    model.rename(snapshot / "config.json")
    again = [words[0], str(tmp_path / "models--x--y"), *words[2:], "--format", "json"]
    assert json.loads(check(again))["plans"] == plans


def test_a_plan_for_a_profile_is_written(tmp_path):
    words = ["plan", "--profile", PROFILE, "--ranks", "4", "--microbatches", "8", "-o", "planned.toml"]
    check(words, error="wrote planned.toml", cwd=tmp_path)
    assert "[pipeline]" in (tmp_path / "planned.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "Usage: python -m pipewright_pp"),
        (["train"], "unrecognized subcommand 'train'"),
        (["schedule", "nothing", *SIZE], "nothing"),
        (["plan", "run.toml"], "run.toml: only the program `pipewright` reads configurations for training"),
        (["plan", "--set", "run.steps=1"], "only the program `pipewright`"),
        (["plan", "run.toml", "--cluster", "h100"], "only the program `pipewright`"),
        (["plan", "--ranks", "2", "--microbatches", "4"], "--profile is missing"),
        (["simulate", "1f1b", *SIZE, "--profile", "no.toml"], "no.toml: cannot read the profile"),
    ],
)
def test_wrong_input_is_a_sentence(arguments, error, tmp_path):
    assert check(arguments, code=2, error=error, cwd=tmp_path) == ""


def test_a_closed_output_and_ctrl_c_end_the_command():
    long_schedule = ["schedule", "1f1b", "--ranks", "64", "--microbatches", "4096"]
    process = start(long_schedule)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    process = start(long_schedule)
    # It has begun, and the rest does not fit into the pipe.
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
