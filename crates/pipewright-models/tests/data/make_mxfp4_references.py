"""Makes the model `gpt-oss-mxfp4` of this folder, and the results of training adapters on it: `lora/gpt-oss-mxfp4`.

The model has random weights. Its experts are in MXFP4 as gpt-oss publishes them, and its attention and all else in bfloat16. The
results are those of transformers' own dequantisation and of PEFT. To make all again:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
    python make_mxfp4_references.py
"""

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent
NAME = "gpt-oss-mxfp4"
BATCH, STEPS, RATE = 8, 8, 2e-3
NOTE = (
    "LoRA by PEFT on the attention of a base whose experts are in MXFP4, computed in f32; AdamW lr=2e-3 betas=(0.9,0.95) "
    "eps=1e-8 weight_decay=0; global grad-norm clip 1.0; loss = mean token cross entropy over the whole batch; rows of the "
    "base's tokens.jsonl in order: inputs are row[:-1], targets row[1:]."
)
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantised(matrix):
    """Returns the blocks and scales of a matrix [experts, outputs, inputs]."""
    parts = matrix.float().unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(parts.abs().amax(-1).clamp_min(1e-30))) - 2
    scaled = parts / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def make_model():
    config = GptOssConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=5, initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "truncate": False,
                         "original_max_position_embeddings": 16},
    )
    torch.manual_seed(20)
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    folder = HERE / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantised(tensor.transpose(1, 2))
            decoded = convert_moe_packed_tensors(blocks, scales)
            assert (decoded - tensor).abs().max() < 0.3 * tensor.abs().max()
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict()
    written.update(architectures=["GptOssForCausalLM"], dtype="bfloat16", quantization_config={
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    })
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    rows = open(HERE / "llama-nf4" / "tokens.jsonl").read().splitlines()[: BATCH * STEPS]
    rows = [json.dumps([token % 48 for token in json.loads(row)[:33]], separators=(",", ":")) for row in rows]
    (folder / "tokens.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "expected.json").write_text('{"batch": 8, "seq_len": 32, "expected": []}\n')


def load():
    return AutoModelForCausalLM.from_pretrained(
        HERE / NAME, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )


def make_adapter():
    folder = HERE / "lora" / NAME
    shutil.rmtree(folder, ignore_errors=True)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    model = get_peft_model(load(), lora)
    torch.manual_seed(21)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = NAME
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train():
    model = PeftModel.from_pretrained(load(), HERE / "lora" / NAME, is_trainable=True)
    model = model.float().train()
    rows = torch.tensor([json.loads(line) for line in open(HERE / NAME / "tokens.jsonl")])
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
    expected = {"note": NOTE, "batch": BATCH, "seq_len": 32, "lr": RATE, "weight_decay": 0.0, "expected": steps}
    (HERE / "lora" / NAME / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


make_model()
make_adapter()
train()
