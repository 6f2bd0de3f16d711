"""Trains a model directory with PyTorch and transformers, one step for each line of the standard input.

The folder has a Hugging Face model and `tokens.json`: the rows of ids of a batch, each with one id more than the model
sees at once. A row is a microbatch, and the batch is the same in every step. A step is that of `pipeline.py`: losses
averaged over the microbatches, gradients clipped by their global norm, AdamW on every parameter. Computes in f32.

The first line of the output has the settings. Each further one has a step's loss, gradient norm and seconds. Every line
is an object in JSON.

Pipewright's bench writes the model and its parameters, and compares the results.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Both are read when the libraries load: nothing is fetched, and one thread computes.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402


def main() -> None:
    """Answers the lines of the standard input until it ends."""
    options = parse_options()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load(options)
    step = make_step(model, options)
    answer(
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        experts=model.config._experts_implementation,
        attention=model.config._attn_implementation,
        chunk_size=getattr(model.config, "chunk_size", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    for _ in sys.stdin:
        start = time.perf_counter()
        loss, norm = step()
        answer(loss=loss, grad_norm=norm, seconds=time.perf_counter() - start)


def answer(**figures: object) -> None:
    """Prints a line of the output."""
    print(json.dumps(figures), flush=True)


def load(options: argparse.Namespace) -> torch.nn.Module:
    """The model of the folder, ready for training."""
    config = AutoConfig.from_pretrained(options.folder)
    if hasattr(config, "chunk_size"):
        config.chunk_size = options.chunk_size
    model = AutoModelForCausalLM.from_pretrained(
        options.folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        experts_implementation=options.experts,
    )
    model.train()
    return model


def make_step(model: torch.nn.Module, options: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """The function that runs a step and returns its loss and its gradient norm before clipping."""
    rows = torch.tensor(json.loads((options.folder / "tokens.json").read_text()))
    microbatches = [(row[:, :-1].contiguous(), row[:, 1:].flatten()) for row in rows.split(1)]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=options.rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )

    def step() -> tuple[float, float]:
        total = 0.0
        for inputs, targets in microbatches:
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets) / len(microbatches)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def parse_options() -> argparse.Namespace:
    """Reads the command line. The defaults are the fastest settings on one core, as `README.md` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the model with its tokens.json")
    parser.add_argument("--experts", default="grouped_mm", choices=["eager", "grouped_mm"])
    parser.add_argument("--chunk-size", default=64, type=int, metavar="N", help="of the scan of Mamba-2")
    parser.add_argument("--rate", default=3e-5, type=float, help="the learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
