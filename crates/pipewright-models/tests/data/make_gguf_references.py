"""Makes `llama-gguf`, a Llama in GGUF whose matrices have all types that are read, and the results of training adapters on it with
PEFT: `llama-gguf` and `lora/llama-gguf` of this folder.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 gguf==0.19.0
    python make_gguf_references.py

`gemma2-tiny.gguf` and `gemma3-tiny.gguf` are the models of these folders, as the converter of llama.cpp writes them.
The weights for PEFT are those that gguf-py decodes, with the rows of queries and keys in the order of transformers.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
BATCH, STEPS, LENGTH, RATE = 8, 3, 32, 2e-3
NOTE = (
    "LoRA by PEFT on the weights that gguf-py decodes, computed in f32; AdamW lr=2e-3 betas=(0.9,0.95) eps=1e-8 weight_decay=0; "
    "global grad-norm clip 1.0; loss = mean token cross entropy over the whole batch; rows of tokens.jsonl in order: inputs are "
    "row[:-1], targets row[1:]."
)
config = LlamaConfig(
    vocab_size=48, hidden_size=256, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)
random = np.random.default_rng(11)
KINDS = {
    "attn_q": [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q4_K],
    "attn_k": [Kind.Q6_K, Kind.Q4_K, Kind.Q8_0, Kind.F16],
    "attn_v": [Kind.Q5_K, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K],
    "attn_output": [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    "ffn_gate": [Kind.Q4_K, Kind.Q6_K, Kind.BF16, Kind.F16],
    "ffn_up": [Kind.Q5_K, Kind.F16, Kind.Q4_K, Kind.Q6_K],
    "ffn_down": [Kind.Q8_0, Kind.Q5_1, Kind.Q4_0, Kind.Q5_0],
}
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# The halves of a block of random codes, so that its elements have a spread of about 0.04.
HALVES = {Kind.Q4_K: {0: 2e-4, 2: 1.5e-3}, Kind.Q5_K: {0: 1e-4, 2: 1.55e-3}, Kind.Q6_K: {208: 4e-5}}


def blocks(kind, shape, scale=1.0):
    """Returns data of a type, and its decoded elements."""
    if kind in HALVES:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
        for place, number in HALVES[kind].items():
            halves = (number * scale * (1 + 0.2 * random.standard_normal(len(data)))).astype(np.float16)
            data[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
        data = data.reshape(shape[0], -1)
    else:
        data = gguf.quants.quantize(random.normal(0, 0.04 * scale, shape).astype(np.float32), kind)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32)


def ordered(weights, heads):
    """Returns the rows of queries or keys in the order of transformers."""
    return weights.reshape(heads, -1, 2, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


folder = HERE / "llama-gguf"
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
writer.add_block_count(4)
writer.add_context_length(128)
writer.add_embedding_length(256)
writer.add_feed_forward_length(32)
writer.add_head_count(4)
writer.add_head_count_kv(2)
writer.add_key_length(16)
writer.add_value_length(16)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(16)
writer.add_vocab_size(48)
weights = {}


def add(name, theirs, kind, shape, heads=None, scale=1.0):
    data, decoded = blocks(kind, shape, scale)
    if kind in (Kind.F32, Kind.F16):
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, data, raw_dtype=kind)
    weights[theirs] = torch.from_numpy(ordered(decoded, heads) if heads else decoded)


def add_norm(name, theirs):
    data = (1 + 0.1 * random.standard_normal(256)).astype(np.float32)
    writer.add_tensor(name, data)
    weights[theirs] = torch.from_numpy(data)


add("token_embd.weight", "model.embed_tokens.weight", Kind.Q6_K, (48, 256), scale=5.0)
add_norm("output_norm.weight", "model.norm.weight")
add("output.weight", "lm_head.weight", Kind.Q6_K, (48, 256))
SHAPES = {"attn_q": (64, 256), "attn_k": (32, 256), "attn_v": (32, 256), "attn_output": (256, 64), "ffn_down": (256, 32)}
for layer in range(4):
    add_norm(f"blk.{layer}.attn_norm.weight", f"model.layers.{layer}.input_layernorm.weight")
    add_norm(f"blk.{layer}.ffn_norm.weight", f"model.layers.{layer}.post_attention_layernorm.weight")
    for name, kinds in KINDS.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(name)
        theirs = f"model.layers.{layer}.{NAMES[name]}.weight"
        add(f"blk.{layer}.{name}.weight", theirs, kinds[layer], SHAPES.get(name, (32, 256)), heads)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

torch.manual_seed(0)
model = LlamaForCausalLM(config)
missing = model.load_state_dict(weights, strict=True)
lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"])
model = get_peft_model(model, lora)
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.05)
model.save_pretrained(HERE / "lora" / "llama-gguf")
adapter = HERE / "lora" / "llama-gguf"
(adapter / "README.md").unlink(missing_ok=True)
described = json.loads((adapter / "adapter_config.json").read_text())
described["base_model_name_or_path"] = "llama-gguf"
described["target_modules"].sort()
(adapter / "adapter_config.json").write_text(json.dumps(described, indent=2))
rows = random.integers(0, 48, (BATCH * STEPS, LENGTH + 1))
(folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.tolist()))
model.train()
rows = torch.tensor(rows)
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
expected = {"note": NOTE, "batch": BATCH, "seq_len": LENGTH, "lr": RATE, "weight_decay": 0.0, "expected": steps}
(folder / "expected.json").write_text(json.dumps({"batch": 0, "seq_len": 0, "expected": []}))
(adapter / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
print(json.dumps(steps))


def convert(name, arch, model_arch, extra):
    """Writes a model of this folder as llama.cpp's converter does: matrices as F32, and norms with 1 added."""
    source = json.loads((HERE / name / "config.json").read_text())
    target = HERE / f"{name}.gguf"
    writer = gguf.GGUFWriter(target, arch)
    layers = source["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(source["max_position_embeddings"])
    writer.add_embedding_length(source["hidden_size"])
    writer.add_feed_forward_length(source["intermediate_size"])
    writer.add_head_count(source["num_attention_heads"])
    writer.add_head_count_kv(source["num_key_value_heads"])
    writer.add_key_length(source["head_dim"])
    writer.add_value_length(source["head_dim"])
    writer.add_layer_norm_rms_eps(source["rms_norm_eps"])
    writer.add_sliding_window(source["sliding_window"])
    for key, value in extra.items():
        writer.add_float32(f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(model_arch, layers)
    with safe_open(HERE / name / "model.safetensors", "np") as file:
        for tensor in file.keys():
            data = file.get_tensor(tensor).astype(np.float32)
            data = data + 1 if tensor.endswith("norm.weight") else data
            theirs = "output.weight" if tensor == "lm_head.weight" else names.get_name(tensor, (".weight",))
            writer.add_tensor(theirs, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


convert("gemma2-tiny", "gemma2", gguf.MODEL_ARCH.GEMMA2, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
convert("gemma3-tiny", "gemma3", gguf.MODEL_ARCH.GEMMA3, {"rope.freq_base": 1000000.0})
