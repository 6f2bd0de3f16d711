"""Makes `gpt2-nf4` and `gpt2-gguf`, a GPT-2 that bitsandbytes has quantised and one in GGUF, and the results of training adapters on
both with PEFT: these folders, and those of the same names in `lora`.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 bitsandbytes==0.50.2 gguf==0.19.0
    python make_gpt2_quantised_references.py

transformers replaces `Conv1D` by linear layers and transposes their matrices, and so does the converter of llama.cpp. `gpt2-tiny.gguf`
is the model of its folder, as that converter writes it.
"""

import json
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
BATCH, STEPS, LENGTH, RATE = 8, 3, 32, 2e-3
NOTE = (
    "LoRA by PEFT on a quantised base, computed in f32; AdamW lr=2e-3 betas=(0.9,0.95) eps=1e-8 weight_decay=0; global grad-norm clip "
    "1.0; loss = mean token cross entropy over the whole batch; rows of tokens.jsonl in order: inputs are row[:-1], targets row[1:]."
)
KINDS = [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.F16, Kind.Q4_1, Kind.Q5_0, Kind.BF16, Kind.Q8_0]
random = np.random.default_rng(17)
torch.manual_seed(17)
config = GPT2Config(
    vocab_size=48, n_positions=32, n_embd=64, n_layer=2, n_head=4, n_inner=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0, initializer_range=0.1,
)
rows = torch.from_numpy(random.integers(0, 48, (BATCH * STEPS, LENGTH + 1)))


def is_transposed(name):
    return name.startswith("transformer.h.") and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def convert(tensors, source, target, kind_of):
    """Writes tensors as llama.cpp's converter does, with the element types of `kind_of`, and returns what gguf-py decodes."""
    writer = gguf.GGUFWriter(target, "gpt2")
    writer.add_block_count(source["n_layer"])
    writer.add_context_length(source["n_positions"])
    writer.add_embedding_length(source["n_embd"])
    writer.add_feed_forward_length(source["n_inner"] or 4 * source["n_embd"])
    writer.add_head_count(source["n_head"])
    writer.add_layer_norm_eps(source["layer_norm_epsilon"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, source["n_layer"])
    decoded, blocks = {}, 0
    for name, data in tensors.items():
        data = data.astype(np.float32)
        data = data.T.copy() if is_transposed(name) else data
        kind = Kind.F32
        if is_transposed(name):
            kind, blocks = kind_of(blocks), blocks + 1
        theirs = names.get_name(name, (".weight", ".bias"))
        raw = gguf.quants.quantize(data, kind)
        writer.add_tensor(theirs, raw) if kind in (Kind.F32, Kind.F16) else writer.add_tensor(theirs, raw, raw_dtype=kind)
        values = gguf.quants.dequantize(raw, kind).astype(np.float32)
        decoded[name] = torch.from_numpy(values.T.copy() if is_transposed(name) else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def train(model, name):
    """Trains adapters, and writes the first ones and the results."""
    adapter = HERE / "lora" / name
    shutil.rmtree(adapter, ignore_errors=True)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"]))
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(adapter)
    (adapter / "README.md").unlink(missing_ok=True)
    described = json.loads((adapter / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = name
    described["target_modules"].sort()
    (adapter / "adapter_config.json").write_text(json.dumps(described, indent=2))
    (HERE / name / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.tolist()))
    (HERE / name / "expected.json").write_text(json.dumps({"batch": 0, "seq_len": 0, "expected": []}))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
    (adapter / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(name, json.dumps(steps))


for name in ["gpt2-nf4", "gpt2-gguf"]:
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
plain = GPT2LMHeadModel(config)
weights = {name: tensor.numpy() for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
decoded = convert(weights, config.to_dict(), HERE / "gpt2-gguf" / "tiny.gguf", lambda index: KINDS[index])
on_decoded = GPT2LMHeadModel(config)
on_decoded.load_state_dict(decoded, strict=False)
train(on_decoded, "gpt2-gguf")
whole = Path(tempfile.mkdtemp())
plain.save_pretrained(whole)
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
quantised = AutoModelForCausalLM.from_pretrained(whole, quantization_config=four_bits, dtype=torch.float32, device_map="cpu")
quantised.save_pretrained(HERE / "gpt2-nf4")
train(AutoModelForCausalLM.from_pretrained(HERE / "gpt2-nf4", dtype=torch.float32), "gpt2-nf4")
shutil.rmtree(whole)
source = json.loads((HERE / "gpt2-tiny" / "config.json").read_text())
tiny = load_file(HERE / "gpt2-tiny" / "model.safetensors")
convert(tiny, source, HERE / "gpt2-tiny.gguf", lambda index: Kind.F32)
