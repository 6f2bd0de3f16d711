"""Measures how far bfloat16 moves the losses of the models beside this file in PyTorch.

Each model is trained three times by the recipe of its `expected.json`: in float32; with products in bfloat16 under
`torch.autocast`, which keeps the sums of the blocks in float32; and with all parameters and hidden states in bfloat16, from
parameters in float32 that are rounded in each step. The table has the largest difference of the losses over the steps,
relative to float32, and for comparison that between float32 here and in `expected.json`. The loss is the cross entropy;
auxiliary losses are off. Pipewright rounds hidden states too, so that stages send half the bytes. Its tests allow three
times the larger of the two differences, because products have other last bits on other machines. To measure them again:

    pip install torch==2.15.0 transformers==5.23.0
    python measure_bfloat16.py [MODEL...]
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = ["llama-tiny", "llama-tied-tiny", "llama31-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny", "nemotron-h-tiny"]


def logits_of(model, ids, how):
    """Runs the model in float32, under autocast, or with rounded parameters and hidden states."""
    arguments = {"input_ids": ids, "use_cache": False}
    if how == "rounded":
        rounded = {name: value.to(torch.bfloat16) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, rounded, kwargs=arguments).logits
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        return model(**arguments).logits


def losses(folder, expected, how):
    """Trains the folder's model and returns its loss in each step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    rate = expected.get("lr", 2e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    rows = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    found = []
    for step in range(expected["steps"]):
        batch = torch.tensor(rows[step * expected["batch"] : (step + 1) * expected["batch"]])
        logits = logits_of(model, batch[:, :-1], how)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def difference(found, expected):
    """The largest relative difference of two curves."""
    return max(abs(a - b) / b for a, b in zip(found, expected))


def main():
    torch.set_num_threads(1)
    print(f"{'model':18} {'autocast':>9} {'rounded':>9} {'float32 here':>13}")
    for name in sys.argv[1:] or MODELS:
        folder = HERE / name
        expected = json.loads((folder / "expected.json").read_text())
        single = losses(folder, expected, "float32")
        half, rounded = (difference(losses(folder, expected, how), single) for how in ("autocast", "rounded"))
        known = [step["loss"] for step in expected["expected"]]
        print(f"{name:18} {half:9.1e} {rounded:9.1e} {difference(single, known):13.1e}", flush=True)


main()
