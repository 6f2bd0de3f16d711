"""Writes a model with random weights in the shape of a published one: in NF4 as bitsandbytes does, with double quantisation,
or in bfloat16. The weights mean nothing; memory and time do not depend on them.

    pip install numpy safetensors
    python random_model.py SHAPE DIR [--bf16] [--table] [--layers N]

`--table` writes the table of the tokens in NF4 too.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# Hidden size, inner size, layers, heads, key heads, width of a head, tokens of the vocabulary, whether the head is tied.
SHAPES = {
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "llama-7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "llama-2048": (2048, 5632, 6, 16, 16, 128, 32000, False),
    "llama-1024": (1024, 2816, 6, 16, 16, 64, 32000, False),
}
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
BLOCK, NESTED = 64, 256

parser = argparse.ArgumentParser()
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("dir", type=Path)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--table", action="store_true")
parser.add_argument("--layers", type=int)
options = parser.parse_args()
hidden, inner, layers, heads, key_heads, width, vocabulary, tied = SHAPES[options.shape]
layers = options.layers or layers
random = np.random.default_rng(7)
is_qwen = options.shape.startswith("qwen")
files = {}


def write(name, tensors):
    files.update({tensor: name for tensor in tensors})
    # numpy has no bfloat16: its bits are written as 16-bit numbers, and the header is changed.
    path = options.dir / name
    save_file(tensors, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for entry in header.values():
        if entry.get("dtype") == "U16":
            entry["dtype"] = "BF16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def halves(shape, scale):
    numbers = (scale * random.standard_normal(shape, dtype=np.float32)).view(np.uint32)
    return (numbers >> 16).astype(np.uint16)


def matrix(tensors, name, rows, columns, is_quantised):
    if not is_quantised:
        tensors[name] = halves((rows, columns), columns**-0.5)
        return
    count, scale = rows * columns, 3.5 * columns**-0.5
    blocks = -(-count // BLOCK)
    tensors[name] = random.integers(0, 256, (count // 2, 1), dtype=np.uint8)
    tensors[name + ".absmax"] = random.integers(0, 256, blocks, dtype=np.uint8)
    tensors[name + ".quant_map"] = np.array(NF4, dtype=np.float32)
    tensors[name + ".nested_absmax"] = np.full(-(-blocks // NESTED), 0.2 * scale, dtype=np.float32)
    tensors[name + ".nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [rows, columns],
             "nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": scale}
    state = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8)
    tensors[name + ".quant_state.bitsandbytes__nf4"] = state.copy()


options.dir.mkdir(parents=True)
one = np.full(hidden, 0x3F80, dtype=np.uint16)
ends = {"model.norm.weight": one}
matrix(ends, "model.embed_tokens.weight", vocabulary, hidden, options.table and not options.bf16)
if not tied:
    matrix(ends, "lm_head.weight", vocabulary, hidden, False)
write("model-00001.safetensors", ends)
for layer in range(layers):
    path, tensors = f"model.layers.{layer}.", {}
    for name, rows, columns in [
        ("self_attn.q_proj", heads * width, hidden), ("self_attn.k_proj", key_heads * width, hidden),
        ("self_attn.v_proj", key_heads * width, hidden), ("self_attn.o_proj", hidden, heads * width),
        ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
    ]:
        matrix(tensors, f"{path}{name}.weight", rows, columns, not options.bf16)
    tensors[path + "input_layernorm.weight"] = tensors[path + "post_attention_layernorm.weight"] = one
    if is_qwen:
        of_head = np.full(width, 0x3F80, dtype=np.uint16)
        tensors[path + "self_attn.q_norm.weight"] = tensors[path + "self_attn.k_norm.weight"] = of_head
    write(f"model-{layer + 2:05}.safetensors", tensors)
(options.dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
config = {
    "architectures": ["Qwen3ForCausalLM" if is_qwen else "LlamaForCausalLM"], "model_type": "qwen3" if is_qwen else "llama",
    "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
    "num_key_value_heads": key_heads, "head_dim": width, "vocab_size": vocabulary, "tie_word_embeddings": tied,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16",
    "attention_bias": False,
}
if not options.bf16:
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
(options.dir / "config.json").write_text(json.dumps(config, indent=2))
