"""Makes the folder `score` beside this file: models with a score or labels, records, and how TRL and transformers train on them.

TRL's `RewardTrainer` prepares pairs and computes their losses, and transformers' `*ForSequenceClassification` the losses of
labels; the loop over the steps is this script's. The pairs and the tokenizer are those of the folder `preference`. The padding
token is another one than the token that ends texts, because transformers takes the last token that is not padding. To make it
again:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0
    python make_score_references.py
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

import peft
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2ForSequenceClassification, LlamaConfig,
    LlamaForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification)
from trl import RewardConfig, RewardTrainer

from make_chat_lora_references import WORDS

HERE = Path(__file__).parent
FOLDER, RECORDS_OF_PAIRS = HERE / "score", HERE / "preference"
RECORDS, STEPS, RATE, BATCH, ACCUMULATED = 16, 10, 5e-3, 2, 2
NOTE = (
    "AdamW lr=0.005 betas=(0.9,0.95) eps=1e-8 weight_decay=0.1 on every trained parameter (decoupled); global grad-norm clip 1.0. "
    "The records in order, again and again: `accumulated` batches of `batch` records a step, whose losses and metrics are averaged."
)
KEYS = ["accuracy", "margin", "min_reward", "mean_reward", "max_reward"]
SIZES = dict(
    vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=3)
LABELS = ["bad", "fair", "good"]
NAMES = dict(id2label=dict(enumerate(LABELS)), label2id={label: number for number, label in enumerate(LABELS)})


def make_models():
    """A reward model, two classifiers, and adapters with another score on the reward model and on one of them."""
    torch.manual_seed(7)
    gpt2 = GPT2Config(
        vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=3, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **NAMES)
    for name, model in {
        "llama": LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)),
        "qwen3": Qwen3ForSequenceClassification(Qwen3Config(**SIZES, tie_word_embeddings=True, **NAMES)),
        "gpt2": GPT2ForSequenceClassification(gpt2),
    }.items():
        model.save_pretrained(FOLDER / name)
    for name in ("llama", "qwen3"):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")
        model = get_peft_model(load(name), lora)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name or "modules_to_save" in parameter_name:
                parameter.data.normal_(std=0.1)
        model.peft_config["default"].base_model_name_or_path = name
        model.save_pretrained(FOLDER / f"{name}-adapter")
        (FOLDER / f"{name}-adapter/README.md").unlink()


def load(name):
    return AutoModelForSequenceClassification.from_pretrained(FOLDER / name, dtype=torch.float32, attn_implementation="eager")


def model_of(name, has_adapter):
    return PeftModel.from_pretrained(load(name), FOLDER / f"{name}-adapter", is_trainable=True) if has_adapter else load(name)


def steps_of(model, loss_of, metrics_of):
    """The loss, the gradient norm before clipping and the metrics of each step. `loss_of` takes the numbers of records."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps, taken = [], 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for _ in range(ACCUMULATED):
            part = loss_of([(taken + row) % RECORDS for row in range(BATCH)]) / ACCUMULATED
            taken += BATCH
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        steps.append({"loss": loss, "grad_norm": norm.item(), **metrics_of()})
    return steps


def rewards(tokenizer, name, data, has_adapter, settings):
    args = RewardConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, disable_tqdm=True,
        per_device_train_batch_size=BATCH, max_length=64, **settings)
    rows = Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
    trainer = RewardTrainer(model=model_of(name, has_adapter), args=args, train_dataset=rows, processing_class=tokenizer)
    model, prepared = trainer.model.train(), trainer.train_dataset
    assert len(prepared) == RECORDS

    def loss_of(numbers):
        return trainer.compute_loss(model, trainer.data_collator([prepared[number] for number in numbers]))

    def metrics_of():
        values = {key: sum(own) / len(own) for key in KEYS if (own := trainer._metrics["train"][key])}
        trainer._metrics["train"].clear()
        return values

    return steps_of(model, loss_of, metrics_of)


def classes(tokenizer, name, data, has_adapter):
    records = [json.loads(line) for line in data.read_text().splitlines()]
    model, hits = model_of(name, has_adapter).train(), []

    def ids_of(record):
        if "text" in record:
            return tokenizer(record["text"])["input_ids"]
        return tokenizer.apply_chat_template(record["messages"], return_dict=True)["input_ids"]

    def loss_of(numbers):
        batch = tokenizer.pad({"input_ids": [ids_of(records[number]) for number in numbers]}, return_tensors="pt")
        labels = [records[number]["label"] for number in numbers]
        labels = torch.tensor([LABELS.index(label) if isinstance(label, str) else label for label in labels])
        output = model(**batch, labels=labels)
        hits.append((output.logits.argmax(-1) == labels).float().mean().item())
        return output.loss

    def metrics_of():
        accuracy = sum(hits) / len(hits)
        hits.clear()
        return {"accuracy": accuracy}

    return steps_of(model, loss_of, metrics_of)


def write(name, rows):
    path = FOLDER / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    make_models()
    tokenizer = AutoTokenizer.from_pretrained(RECORDS_OF_PAIRS)
    tokenizer.pad_token = "<|system|>"
    random.seed(5)
    words = lambda least, most: " ".join(random.choices(WORDS, k=random.randint(least, most)))
    pairs = [json.loads(line) for line in (RECORDS_OF_PAIRS / "pairs.jsonl").read_text().splitlines()]
    margins = write("margins.jsonl", [pair | {"margin": random.choice([0, 0.5, 1.25])} for pair in pairs])
    texts = [{"text": words(1, 9), "label": random.randrange(3)} for _ in range(RECORDS)]
    message = lambda role: {"role": role, "content": words(1, 5)}
    chats = [{"messages": [message("user"), message("assistant")], "label": LABELS[row["label"]]} for row in texts]
    texts, chats = write("texts.jsonl", texts), write("chats.jsonl", chats)
    of_pairs = lambda name: RECORDS_OF_PAIRS / f"{name}.jsonl"
    runs = {
        "reward": (rewards, "llama", of_pairs("pairs"), False, {}),
        "reward_centered": (rewards, "llama", margins, False, {"center_rewards_coefficient": 0.1}),
        "reward_chat_lora": (rewards, "llama", of_pairs("chats"), True, {}),
        "reward_shared_lora": (rewards, "llama", of_pairs("shared"), True, {}),
        "classes": (classes, "qwen3", texts, False),
        "classes_gpt2": (classes, "gpt2", texts, False),
        "classes_chat_lora": (classes, "qwen3", chats, True),
    }
    versions = {library.__name__: library.__version__ for library in (trl, peft, transformers)}
    expected = {"note": NOTE, **versions, "lr": RATE, "batch": BATCH, "accumulated": ACCUMULATED}
    for name, (train, *arguments) in runs.items():
        expected[name] = train(tokenizer, *arguments)
        print(name, expected[name][0], expected[name][-1])
    lines = json.dumps(expected, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    (FOLDER / "expected.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
