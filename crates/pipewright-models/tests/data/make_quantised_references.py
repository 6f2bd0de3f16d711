"""Makes the results of training adapters on the bases `llama-nf4` and `llama-fp4` of this folder: `lora/*/expected.json`.

Both are `llama-tiny` as bitsandbytes quantises it on a processor, written by `save_pretrained`. The folders in `lora` have the
first adapters. To make the results again:

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 bitsandbytes==0.50.2
    python make_quantised_references.py

The kernel of bitsandbytes 0.50.2 for processors takes scales of other blocks where the inputs of a layer are not a multiple of
64 (`down_proj` has 176): at row `r` and column `c` of `n`, block `r * n // 64 + c // 64` in place of `(r * n + c) // 64`, by which
the elements were quantised, and which its portable kernel takes. So this script uses the portable one. With `--processor` it uses
the kernel for processors, and prints the results.
"""

import json
import sys
from pathlib import Path

import bitsandbytes.backends.cpu.ops  # the kernel that is replaced
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.backends.utils import _get_4bit_code
from peft import PeftModel
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
BATCH, STEPS, RATE = 8, 8, 2e-3
NOTE = (
    "LoRA by PEFT on a base that bitsandbytes has quantised, computed in f32; AdamW lr=2e-3 betas=(0.9,0.95) eps=1e-8 "
    "weight_decay=0; global grad-norm clip 1.0; loss = mean token cross entropy over the whole batch; rows of the base's "
    "tokens.jsonl in order: inputs are row[:-1], targets row[1:]."
)


def portable(A, absmax, blocksize, quant_type, shape, dtype):
    A = A if A.dtype == torch.uint8 else A.view(torch.uint8)
    code = _get_4bit_code(quant_type, A.device)
    return _dequantize_4bit_compute(A.reshape(-1), absmax, code, blocksize, shape, dtype)


def run(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, HERE / "lora" / name, is_trainable=True)
    model.train()
    rows = torch.tensor([json.loads(line) for line in open(HERE / name / "tokens.jsonl")])
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    steps = []
    for step in range(STEPS):
        batch = rows[step * BATCH : (step + 1) * BATCH]
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    return steps


torch.manual_seed(0)
if "--processor" not in sys.argv:
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", portable, "CPU", allow_override=True)
for name in ["llama-nf4", "llama-fp4"]:
    steps = run(name)
    if "--processor" in sys.argv:
        print(json.dumps(steps))
        continue
    expected = {"note": NOTE, "batch": BATCH, "seq_len": 64, "lr": RATE, "weight_decay": 0.0, "expected": steps}
    (HERE / "lora" / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
