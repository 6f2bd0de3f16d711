"""Compares losses in half precision with those in single precision, and with PyTorch under autocast.

    python bench/precision/compare.py PIPEWRIGHT [STEPS]

The first table is about the first steps of the built-in sample. The second one is about the same model and rows in
Pipewright and in PyTorch (2.15, which must be installed): the sample's model with its initial parameters, on rows of this
repository's text, at a constant learning rate. Each number is the difference of two losses, relative to the loss in single
precision: the largest of all steps, and that of the last step.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "peer"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from llama import LlamaConfig, LlamaStage  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

ROWS, SEQUENCE = 16, 128
RATE = 2e-3


def losses_of(run: Path) -> list[float]:
    """Returns the losses of the steps that a run has finished."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def train(program: str, out: Path, steps: int, settings: list[str]) -> list[float]:
    """Starts a run with these settings and stops it after some steps. Returns their losses."""
    arguments = [argument for setting in [*settings, f"run.out={out}"] for argument in ("--set", setting)]
    run = subprocess.Popen([program, "train", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while run.poll() is None and len(losses_of(out)) < steps:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, words = run.communicate()
    found = losses_of(out)[:steps]
    if len(found) < steps:
        sys.exit(words)
    return found


def export_initial(program: str, folder: Path) -> Path:
    """Writes the sample's model with its initial parameters, which one step with no learning rate to speak of keeps."""
    run, model = folder / "initial", folder / "model"
    settings = ["run.steps=1", "optimizer.learning_rate=1e-30", f"run.out={run}"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    subprocess.run([program, "train", *arguments], cwd=ROOT, check=True, capture_output=True)
    subprocess.run([program, "export", str(run), str(model)], cwd=ROOT, check=True, capture_output=True)
    return model


def write_rows(path: Path, count: int) -> list[list[int]]:
    """Writes rows of token ids, which are the bytes of the repository's text."""
    text = b"".join(path.read_bytes() for path in sorted(ROOT.glob("crates/**/*.rs")))
    length = SEQUENCE + 1
    rows = [list(text[row * length : (row + 1) * length]) for row in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train_in_pytorch(model: Path, rows: list[list[int]], half: bool) -> list[float]:
    """Trains the model on the rows as Pipewright does."""
    sizes = json.loads((model / "config.json").read_text())
    rope = sizes.get("rope_theta") or sizes["rope_parameters"]["rope_theta"]
    names = [field.name for field in fields(LlamaConfig) if field.name in sizes]
    config = LlamaConfig(**{name: sizes[name] for name in names} | {"rope_theta": rope})
    stage = LlamaStage(config, SEQUENCE, 0, 1)
    weights = load_file(model / "model.safetensors")
    stage.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for first in range(0, len(rows), ROWS):
        batch = torch.tensor(rows[first : first + ROWS])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = stage(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def show(what: str, found: list[float], single: list[float]) -> None:
    """Prints a line of a table."""
    errors = [abs(a - b) / b for a, b in zip(found, single, strict=True)]
    print(f"{what:36} {single[-1]:8.4f} {found[-1]:8.4f} {max(errors):9.2e} {errors[-1]:9.2e}", flush=True)


def main() -> None:
    """Runs everything and prints two tables."""
    program, steps = str(Path(sys.argv[1]).resolve()), int(sys.argv[2]) if len(sys.argv) > 2 else 50
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{'last of ' + str(steps) + ' losses':36} {'single':>8} {'half':>8} {'largest':>9} {'last':>9}")
        runs = {
            name: train(program, folder / name, steps, [f"run.precision={name}"]) for name in ("f32", "bf16", "f16")
        }
        for name in ("bf16", "f16"):
            show(f"sample, {name}", runs[name], runs["f32"])
        model = export_initial(program, folder)
        rows = write_rows(folder / "rows.jsonl", ROWS * steps)
        same = [f"data.path={folder / 'rows.jsonl'}", "data.shuffle=false", "optimizer.schedule=constant"]
        own = {
            name: train(program, folder / f"rows-{name}", steps, [*same, f"run.precision={name}"])
            for name in ("f32", "bf16", "f16")
        }
        peer = {half: train_in_pytorch(model, rows, half) for half in (False, True)}
        show("same rows, bf16", own["bf16"], own["f32"])
        show("same rows, f16", own["f16"], own["f32"])
        show("same rows, PyTorch, bf16 autocast", peer[True], peer[False])
        show("same rows, PyTorch, f32 (to ours)", peer[False], own["f32"])


main()
