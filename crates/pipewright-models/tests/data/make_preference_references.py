"""Makes the folder `preference` beside this file: records for preference training, and how TRL trains on them.

TRL's trainers prepare the records and compute the losses (`DPOTrainer`, `KTOTrainer`, and `ORPOTrainer` and `CPOTrainer` of
`trl.experimental`); the loop over the steps is this script's. The adapter is the one in `lora/llama-tiny`, with other numbers than
zeros in its second matrices, on `llama-tiny`, which is also the reference. Without label smoothing in its sigmoid loss, TRL has it in `aot_unpaired`, which is the same loss for a batch of one
pair. To make it again:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0
    python make_preference_references.py
"""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import peft
import torch
import transformers
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from make_chat_lora_references import WORDS, of_merges

HERE = Path(__file__).parent
FOLDER = HERE / "preference"
BASE, ADAPTER = HERE / "llama-tiny", FOLDER / "adapter"
RECORDS, STEPS, RATE, LONGEST = 16, 10, 5e-3, 65
NOTE = (
    "LoRA by PEFT from the adapter in the folder, on a frozen base in f32; AdamW lr=0.005 betas=(0.9,0.95) eps=1e-8 "
    "weight_decay=0.1 on the adapters (decoupled); global grad-norm clip 1.0 of the adapters. The records in order, again and "
    "again: `accumulated` batches of `batch` records a step, whose losses and metrics are averaged. A reward "
    "of completions with a label is the mean over all completions of the step with this label."
)
KEYS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "kl", "nll_loss"]
SHARED = dict(
    output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, disable_tqdm=True,
    max_length=LONGEST, beta=0.1)
# The file, the trainer, the settings of the loss, and the records of a batch.
LOSSES = {
    "dpo": ("pairs", DPOTrainer, DPOConfig, {}, 2),
    "dpo_chat": ("chats", DPOTrainer, DPOConfig, {"beta": 0.3}, 2),
    "dpo_shared": ("shared", DPOTrainer, DPOConfig, {}, 2),
    "dpo_smoothed": ("pairs", DPOTrainer, DPOConfig, {"loss_type": ["aot_unpaired"], "label_smoothing": 0.2}, 1),
    "ipo": ("pairs", DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}, 2),
    "orpo": ("pairs", ORPOTrainer, ORPOConfig, {}, 2),
    "simpo": ("pairs", CPOTrainer, CPOConfig,
              {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.3, "beta": 2.0, "label_smoothing": 0.1}, 2),
    "kto": ("labelled", KTOTrainer, KTOConfig, {"desirable_weight": 1.5, "undesirable_weight": 0.75}, 2),
}


def records():
    """The records of each file. Chosen and rejected completions differ in length."""
    random.seed(5)
    words = lambda least, most: " ".join(random.choices(WORDS, k=random.randint(least, most)))
    pairs = [{"prompt": words(1, 5), "chosen": " " + words(1, 6), "rejected": " " + words(1, 6)} for _ in range(RECORDS)]
    message = lambda role, content: [{"role": role, "content": content}]
    chats = [{
        "prompt": message("user", pair["prompt"]),
        "chosen": message("assistant", pair["chosen"].strip()),
        "rejected": message("assistant", pair["rejected"].strip()),
    } for pair in pairs]
    shared = [{side: chat["prompt"] + chat[side] for side in ("chosen", "rejected")} for chat in chats]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if index % 3 else "rejected"], "label": index % 3 > 0}
        for index, pair in enumerate(pairs)]
    return {"pairs": pairs, "chats": chats, "shared": shared, "labelled": labelled}


def base():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager")


def train(tokenizer, rows, trainer_type, config_type, settings, batch):
    """The loss, the gradient norm before clipping and the metrics of each step."""
    args = config_type(**{**SHARED, "per_device_train_batch_size": batch, **settings})
    model = PeftModel.from_pretrained(base(), ADAPTER, is_trainable=True)
    reference = {"ref_model": base()} if trainer_type in (DPOTrainer, KTOTrainer) else {}
    trainer = trainer_type(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **reference)
    model, data = trainer.model.train(), trainer.train_dataset
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    stored = lambda: trainer._metrics["train"] if hasattr(trainer, "_metrics") else trainer._stored_metrics["train"]
    assert len(data) == RECORDS
    accumulated, steps, taken = 4 // batch, [], 0
    for _ in range(STEPS):
        stored().clear()
        optimizer.zero_grad()
        loss, counts = 0.0, {"chosen": [], "rejected": []}
        for _ in range(accumulated):
            examples = [data[(taken + row) % RECORDS] for row in range(batch)]
            taken += batch
            if "label" in examples[0]:
                chosen = sum(example["label"] for example in examples)
                for side, count in (("chosen", chosen), ("rejected", batch - chosen)):
                    counts[side] += [count] if count else []
            part = trainer.compute_loss(model, trainer.data_collator(examples)) / accumulated
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        metrics = {key: mean(values, counts.get(key.split("/")[-1])) for key in KEYS if (values := stored().get(key))}
        if counts["chosen"]:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        steps.append({"loss": loss, "grad_norm": norm.item(), **metrics})
    return {"data": f"{rows_name(rows)}.jsonl", "batch": batch, "accumulated": accumulated, "steps": steps}


def mean(values, counts):
    """The mean of the values of batches, which count by the numbers of their records, if these differ."""
    counts = counts or [1] * len(values)
    return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)


def rows_name(rows):
    return next(name for name, own in records().items() if own == rows)


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    all_records = records()
    texts = [text for pair in all_records["pairs"] for text in pair.values()]
    tokenizer = of_merges(texts)
    tokenizer.save_pretrained(FOLDER)
    for name, rows in all_records.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))
    model = PeftModel.from_pretrained(base(), HERE / "lora/llama-tiny")
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    model.peft_config["default"].base_model_name_or_path = "llama-tiny"
    model.save_pretrained(ADAPTER)
    (ADAPTER / "README.md").unlink()
    versions = {library.__name__: library.__version__ for library in (trl, peft, transformers)}
    expected = {"note": NOTE, **versions, "lr": RATE}
    for name, (file, *settings) in LOSSES.items():
        expected[name] = train(tokenizer, all_records[file], *settings)
        print(name, expected[name]["steps"][0])
    lines = json.dumps(expected, indent=1).replace("\n    ", " ").replace("\n   }", " }")
    (FOLDER / "expected.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
