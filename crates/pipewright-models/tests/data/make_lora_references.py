"""Makes the folder `lora` beside this file: adapters of PEFT on tiny models of this folder, and how PEFT trains them.

Each folder has the adapter before its training, as PEFT writes it, and the results of 30 steps. To make it again:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
    python make_lora_references.py

With the folders of a base and of an adapter, it prints the first logits of the adapted model after the last token of the first
row of `tokens.jsonl`, and with that of a merged model too, the largest difference between the logits of the two:

    python make_lora_references.py BASE ADAPTER [MERGED]

With names of folders, it makes only these. Adapters of the experts' own layers (OLDER) need transformers 4, whose experts are layers:

    pip install torch==2.15.0 transformers==4.57.6 peft==0.21.2
    python make_lora_references.py qwen3-moe-tiny-own-experts
"""

import json
import shutil
import sys
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
BATCH, STEPS, RATE = 8, 30, 5e-3
NOTE = (
    "LoRA by PEFT, dropout 0, on a frozen base in f32; AdamW lr=0.005 betas=(0.9,0.95) eps=1e-8 weight_decay=0.1 on the adapters "
    "(decoupled); global grad-norm clip 1.0 of the adapters; loss = mean token cross entropy over the whole batch. Rows of the base's "
    "tokens.jsonl in order, again and again, `batch` rows a step: inputs are row[:-1], targets row[1:]."
)
# The base of each folder, and its adapter. Layers of Qwen 2 have biases, which the magnitudes of DoRA do not scale. DeepSeek V3 has
# its dense and shared layers as parameters, as `pipewright export` writes them: PEFT takes modules of these names for experts.
DEEPSEEK_LAYERS = ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts", "model.layers.2.mlp.shared_experts"]
ADAPTERS = {
    "qwen3-tiny": ("qwen3-tiny", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")),
    "gpt2-tiny": (
        "gpt2-tiny",
        LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=True, task_type="CAUSAL_LM"),
    ),
    "llama-tiny": (
        "llama-tiny",
        LoraConfig(r=6, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    ),
    "qwen2-tiny-dora": (
        "qwen2-tiny",
        LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM"),
    ),
    # The loss smooths its targets by so much.
    "llama-tiny-smoothed": (
        "llama-tiny",
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        0.1,
    ),
    # Whole modules are trained too, and saved beside the adapters.
    "llama-tiny-saved": (
        "llama-tiny",
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens", "lm_head", "input_layernorm"],
            task_type="CAUSAL_LM",
        ),
    ),
    # The head has an adapter.
    "llama-tiny-head": (
        "llama-tiny",
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"),
    ),
    # The table of the embedding has an adapter. A tied head multiplies by the table itself.
    "llama-tiny-embedding": (
        "llama-tiny",
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    ),
    "llama-tied-tiny-embedding": (
        "llama-tied-tiny",
        LoraConfig(r=3, lora_alpha=6, use_rslora=True, target_modules=["v_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    ),
    # The experts that a router chooses have adapters: the matrices of all experts of a block are two parameters.
    "qwen3-moe-tiny-experts": (
        "qwen3-moe-tiny",
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            task_type="CAUSAL_LM",
        ),
    ),
    "mixtral-tiny-experts": (
        "mixtral-tiny",
        LoraConfig(r=3, lora_alpha=4, target_modules=[], target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM"),
    ),
    "granite-hybrid-tiny": (
        "granite-hybrid-tiny",
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"],
            task_type="CAUSAL_LM",
        ),
    ),
    # The matrices of Mamba-2 have adapters, and so have the experts that a router chooses.
    "granite-hybrid-rope-tiny-mamba": (
        "granite-hybrid-rope-tiny",
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["in_proj", "out_proj", "o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            task_type="CAUSAL_LM",
        ),
    ),
    "deepseek-v3-tiny": (
        "deepseek-v3-tiny",
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            target_parameters=[
                f"{layer}.{name}.weight" for layer in DEEPSEEK_LAYERS for name in ["gate_proj", "up_proj", "down_proj"]
            ],
            task_type="CAUSAL_LM",
        ),
    ),
}
OLDER = {
    "qwen3-moe-tiny-own-experts": (
        "qwen3-moe-tiny",
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
    ),
}
IS_OLDER = transformers.__version__.startswith("4.")


def base(folder):
    config = AutoConfig.from_pretrained(folder)
    if IS_OLDER:
        # The folder has the names of version 5.
        described = json.loads((Path(folder) / "config.json").read_text())
        config.num_experts = described["num_local_experts"]
        config.rope_theta = described["rope_parameters"]["rope_theta"]
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


def train(model, rows, smoothing):
    """The loss and the gradient norm before clipping of each step, and the first logits after the last token of the first row."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(STEPS):
        batch = torch.tensor([rows[(step * BATCH + row) % len(rows)] for row in range(BATCH)])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(rows[:BATCH])[:, :-1]).logits
    return steps, logits[0, -1, :16].tolist()


def make(folder, name, config, smoothing=0.0):
    torch.manual_seed(17)
    model = get_peft_model(base(HERE / name), config)
    folder = HERE / "lora" / folder
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    (folder / "adapter_model.safetensors").chmod(0o644)
    described = json.loads((folder / "adapter_config.json").read_text())
    described |= {"base_model_name_or_path": name, "target_modules": sorted(described["target_modules"])}
    if described["target_parameters"]:
        described["target_parameters"] = sorted(described["target_parameters"])
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
    rows = rows_of(HERE / name)
    steps, logits = train(model.train(), rows, smoothing)
    expected = {"note": NOTE, "peft": peft.__version__, "transformers": transformers.__version__, "batch": BATCH}
    expected |= {"seq_len": len(rows[0]) - 1, "lr": RATE, "expected": steps, "final_last_logits_first16": logits}
    if smoothing:
        expected["label_smoothing"] = smoothing
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def compare(folder, adapter, merged=None):
    """Prints the logits of an adapter, and how far those of the merged model are from them."""
    ids = torch.tensor(rows_of(Path(folder))[:1])[:, :-1]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base(folder), adapter).eval()(input_ids=ids).logits
        print(json.dumps(adapted[0, -1, :16].tolist()))
        if merged:
            print("largest difference:", (base(merged).eval()(input_ids=ids).logits - adapted).abs().max().item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    adapters = OLDER if IS_OLDER else ADAPTERS
    if len(sys.argv) > 1 and sys.argv[1] not in adapters:
        compare(*sys.argv[1:])
    else:
        for folder in sys.argv[1:] or adapters:
            name, *rest = adapters[folder]
            make(folder, name, *rest)
