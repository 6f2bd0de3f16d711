"""Makes `stacked_experts.json` beside this file: the tensors in which transformers stores the experts of the models here with
`save_original_format=False`.

The tests put the matrices of a model together themselves, and compare names, shapes and bytes with these. To make it again:

    pip install torch==2.15.0 transformers==5.23.0
    python make_stacked_references.py
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = ["qwen2-moe-tiny", "qwen3-moe-window-tiny", "mixtral-tiny", "deepseek-v2-tiny", "deepseek-v3-tiny", "nemotron-h-tiny"]
PARTS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj", "gate.weight"]
NOTE = "`shape` and 64-bit FNV-1a of the bytes, in f32, of the tensors of all experts and of the routers next to them."


def fnv(data):
    code = 0xCBF29CE484222325
    for byte in data:
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return f"{code:016x}"


def stacked(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=False)
        tensors = load_file(Path(folder) / "model.safetensors")
    mixtures = [path.split(".experts.")[0] for path in tensors if ".experts." in path]
    parts = {f"{mixture}.{part}" for mixture in mixtures for part in PARTS}
    return {
        path: {"shape": list(tensor.shape), "fnv": fnv(tensor.contiguous().numpy().tobytes())}
        for path, tensor in sorted(tensors.items())
        if path in parts
    }


if __name__ == "__main__":
    expected = {"note": NOTE, "transformers": transformers.__version__, "models": {name: stacked(name) for name in MODELS}}
    lines = json.dumps(expected, indent=1).replace("[\n     ", "[").replace("\n     ", " ").replace("\n    ]", "]")
    (HERE / "stacked_experts.json").write_text(lines + "\n")
