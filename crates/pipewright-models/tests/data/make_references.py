"""Makes the folders qwen2-tiny and llama-tied-tiny beside this file: a model, token rows, and what PyTorch trains.

The tests read the folders and never this file; it says where their numbers come from. To make them again:

    pip install torch==2.15.0 transformers==5.23.0
    python make_references.py

The recipe is that of llama-tiny: 12 steps of AdamW on batches of 8 rows of 64 tokens, in float32 on one thread.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

BATCH, SEQ_LEN, STEPS = 8, 64, 12
NOTE = (
    "AdamW lr=0.002 betas=(0.9,0.95) eps=1e-8 weight_decay=0.1 on every parameter (decoupled); global grad-norm clip 1.0; "
    "loss = mean token cross entropy over the whole batch; f32. Rows of tokens.jsonl in order, `batch` rows a step, "
    "seq_len+1 ids a row: inputs are row[:-1], targets row[1:]."
)
SIZES = dict(vocab_size=256, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=128)
SIZES |= dict(initializer_range=0.05)  # wide enough that gradients are clipped at some steps


def token_rows(generator):
    """Rows that repeat a few phrases, so that there is something to learn."""
    phrases = [torch.randint(0, 256, (17,), generator=generator).tolist() for _ in range(6)]
    rows = []
    for _ in range(BATCH * STEPS):
        row = []
        while len(row) < SEQ_LEN + 1:
            row += phrases[torch.randint(0, len(phrases), (1,), generator=generator).item()]
        start = torch.randint(0, len(row) - SEQ_LEN, (1,), generator=generator).item()
        rows.append(row[start : start + SEQ_LEN + 1])
    return rows


def train(model, rows, count, after_step=lambda: None):
    """Losses, gradient norms before clipping, and the trained model's logits after the last token of the first row. A batch
    has `count` rows. `after_step` is called after each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for start in range(0, len(rows), count):
        batch = torch.tensor(rows[start : start + count])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after_step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows[:count])[:, :-1]).logits
    return steps, logits[0, -1, :16].tolist()


def write(name, seed, model, rows, count, note=NOTE, **further):
    """Writes the folder `name`: the model, the rows, and what PyTorch trains on batches of `count` rows. `further` are more
    entries of its expected.json."""
    folder = Path(__file__).parent / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    steps, logits = train(model, rows, count)
    expected = {"note": note, "seed": seed, "batch": count, "seq_len": len(rows[0]) - 1, "steps": len(steps), "expected": steps}
    expected |= {"final_last_logits_first16": logits} | further
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def make(name, seed, model_of):
    torch.manual_seed(seed)
    model = model_of()
    # Biases start as zeros, and a reader that drops them would go unnoticed.
    for path, parameter in model.named_parameters():
        if path.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    write(name, seed, model, token_rows(torch.Generator().manual_seed(seed)), BATCH)


def qwen2():
    sizes = SIZES | dict(intermediate_size=80, num_key_value_heads=2, rope_theta=1e6, rms_norm_eps=1e-6)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, max_window_layers=4, tie_word_embeddings=False))


def llama_tied():
    sizes = SIZES | dict(intermediate_size=88, num_key_value_heads=1, rms_norm_eps=1e-5)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make("qwen2-tiny", 11, qwen2)
    make("llama-tied-tiny", 13, llama_tied)
