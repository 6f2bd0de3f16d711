"""Trains the scaled bench model in PyTorch on one GPU and prints its speed as one line of JSON.

`trial.py` runs this file as a process of its own, so that its memory is free again afterwards:

    peer.py PRECISION COMPILED HIDDEN INTERMEDIATE LAYERS HEADS SEQUENCE MICROBATCHES STEPS

The arithmetic is that of Pipewright's run: gradients accumulated over microbatches of one row, the mean loss, the global
norm clipped at 1, AdamW. With bf16, PyTorch's autocast computes products in bf16 and keeps f32 parameters.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

VOCABULARY = 256
LEARNING_RATE = 3e-4
NOT_INSTALLED = 69


def token_rows(rows: int, sequence: int) -> list[list[int]]:
    """Random token ids, one more per row than the sequence has, the same in every call."""
    generator = random.Random(42)
    return [[generator.randrange(VOCABULARY) for _ in range(sequence + 1)] for _ in range(rows)]


def train(precision: str, *, compiled: bool, sizes: list[int]) -> dict[str, object]:
    """Trains for some steps after a first one that is not counted, and returns the figures."""
    import torch
    import torch.nn.functional as F
    from llama import LlamaConfig, LlamaStage, initialise

    hidden, intermediate, layers, heads, sequence, microbatches, steps = sizes
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaStage(config, sequence, stage=0, stages=1)
    initialise(model, seed=42)
    model = model.to(device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rows = torch.tensor(token_rows(microbatches, sequence), device=device)
    milliseconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for row in rows:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = forward(row[None, :-1])
            loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), row[1:]) / microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        milliseconds.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "tokens_per_second": microbatches * sequence * 1e3 / statistics.median(milliseconds[1:]),
        "step_ms": milliseconds,
        "peak_bytes": peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "torch": torch.__version__,
        "on": str(device),
    }


def main() -> int:
    """Reads the arguments, trains and prints."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peer"))
    precision, compiled, *sizes = sys.argv[1:]
    try:
        import torch  # noqa: F401
    except ImportError:
        return NOT_INSTALLED
    print(json.dumps(train(precision, compiled=compiled == "1", sizes=[int(size) for size in sizes])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
