"""Makes the files of the folder delayed beside this file: what PyTorch trains of llama-tiny with weights that are delayed by one
update. Batch t is computed at W(t-1), with W(-1) = W(0), and W(t+1) = update(W(t), gradient of batch t, clipped by its own norm).

The tests read the files and never this file; it says where their numbers come from. To make them again:

    pip install torch==2.15.0 transformers==5.23.0
    python make_delayed_references.py
"""

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

DATA = Path(__file__).parent
NOTE = (
    "{name}, weights delayed by one step: the loss and gradient of batch t (from 0) are at W(t-1), W(-1)=W(0); "
    "W(t+1)=update(W(t), clipped gradient); AdamW lr=2e-3 betas=(0.9,0.95) eps=1e-8 weight_decay=0.1, or SGD lr=0.05; clip 1.0"
)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


def train(name):
    newer = LlamaForCausalLM.from_pretrained(DATA / "llama-tiny", dtype=torch.float32)
    older = LlamaForCausalLM.from_pretrained(DATA / "llama-tiny", dtype=torch.float32)
    optimizer = OPTIMIZERS[name](newer.parameters())
    rows = [json.loads(line) for line in (DATA / "llama-tiny/tokens.jsonl").read_text().splitlines()]
    steps = []
    for start in range(0, len(rows), 8):
        batch = torch.tensor(rows[start : start + 8])
        older.zero_grad()
        logits = older(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(older.parameters(), 1.0)
        with torch.no_grad():
            for old, new in zip(older.parameters(), newer.parameters()):
                new.grad = old.grad.clone()
                old.copy_(new)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        expected = {"note": NOTE.format(name=name), "optimizer": name, "expected": train(name)}
        (DATA / f"delayed/llama-tiny-{name}.json").write_text(json.dumps(expected, indent=1))
