"""Makes the folder `chat-lora` beside this file: chats, how TRL turns them into tokens and labels, and how PEFT trains on them.

TRL's `SFTTrainer` prepares the chats with the chat template in the folder and `assistant_only_loss`, and its collator makes the
batches, for two tokenizers: one whose ids are bytes, and one with special tokens and merges, `tokenizer.json`. The adapter is
`lora/qwen3-tiny`, on `qwen3-tiny`. To make it again:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 trl==1.16.0
    python make_chat_lora_references.py
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
from peft import PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).parent
FOLDER = HERE / "chat-lora"
BASE, ADAPTER = HERE / "qwen3-tiny", HERE / "lora/qwen3-tiny"
VOCABULARY, SEQ_LEN, BATCH, STEPS, RATE = 256, 127, 8, 30, 5e-3
NOTE = (
    "LoRA by PEFT from the adapter in lora/qwen3-tiny, on a frozen base in f32; AdamW lr=0.005 betas=(0.9,0.95) eps=1e-8 "
    "weight_decay=0.1 on the adapters (decoupled); global grad-norm clip 1.0 of the adapters. The chats in order, again and again, "
    "`batch` chats a step in a batch of TRL's collator; the loss is transformers' of these ids and labels. `rows` has the ids of "
    "each chat without padding, cut to seq_len + 1, and as labels -100 where a token does not count."
)
TEMPLATE = """\
{%- if messages[0].role != 'system' %}
    {{- '<|system|>Be brief.<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.strip() + '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler", "in", "mind", "Ü", "世界", "don't", "2"]


def chats():
    """Chats with one or two questions, whose answers differ much in length. Some have instructions."""
    random.seed(11)
    words = lambda most: " ".join(random.choices(WORDS, k=random.randint(1, most)))
    for index in range(5 * BATCH):
        system = [{"role": "system", "content": "In rhymes."}] if index % 3 == 0 else []
        turns = 1 + index % 2
        yield system + [message for _ in range(turns) for message in [
            {"role": "user", "content": words(4)[: 24 // turns]},
            {"role": "assistant", "content": " " + words(2 + index % 6)[: 44 // turns - 8]}]]


def of_bytes():
    """A tokenizer whose ids are bytes."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def of_merges(texts):
    """A tokenizer with special tokens and with merges of the bytes in the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="<|end|>", pad_token="<|end|>")


def adapted():
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, ADAPTER, is_trainable=True)


def prepare(tokenizer, all_chats):
    """The trainer with the prepared chats, and the rows and labels of its collator without padding."""
    if tokenizer.pad_token is None:
        # The mask of the attention says what is padding, so any id will do.
        tokenizer.pad_token = tokenizer.eos_token = "A"
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), assistant_only_loss=True, max_length=SEQ_LEN + 1, use_cpu=True, bf16=False, report_to=[],
        gradient_checkpointing=False, disable_tqdm=True)
    data = Dataset.from_list([{"messages": messages} for messages in all_chats])
    trainer = SFTTrainer(model=adapted(), args=args, train_dataset=data, processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(all_chats))])
    rows = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"]):
        length = int(mask.sum())
        assert length <= SEQ_LEN + 1 and (labels[length:] == -100).all(), length
        assert (labels[:length] == -100).any() and (labels[:length] != -100).any()
        rows.append({"ids": ids[:length].tolist(), "labels": labels[:length].tolist()})
    return trainer, rows


def train(trainer):
    """The loss and the gradient norm before clipping of each step."""
    model = trainer.model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    data, steps = trainer.train_dataset, []
    for step in range(STEPS):
        batch = trainer.data_collator([data[(step * BATCH + row) % len(data)] for row in range(BATCH)])
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    return steps


def main():
    torch.set_num_threads(1)
    all_chats = list(chats())
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in all_chats]
    (FOLDER / "chats.jsonl").write_text("".join(lines))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    merges = of_merges([message["content"] for messages in all_chats for message in messages])
    merges.backend_tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    versions = {library.__name__: library.__version__ for library in (trl, peft, transformers)}
    expected = {"note": NOTE, **versions, "seq_len": SEQ_LEN, "batch": BATCH, "lr": RATE}
    for name, tokenizer in (("bytes", of_bytes()), ("merges", merges)):
        trainer, rows = prepare(tokenizer, all_chats)
        expected[name] = {"steps": train(trainer), "rows": rows}
    # A row and a step per line.
    text = json.dumps(expected, indent=1)
    (FOLDER / "expected.json").write_text(compact(text) + "\n")


def compact(text):
    """JSON in which lists of numbers have one line each."""
    lines, open_list = [], None
    for line in text.splitlines():
        if open_list is not None:
            open_list += line.strip() if line.strip().startswith("]") else line.strip() + " "
            if line.strip().startswith("]"):
                lines.append(open_list.replace(" ]", "]"))
                open_list = None
        elif line.rstrip().endswith("[") and not line.strip().startswith('"rows"') and not line.strip().startswith('"steps"'):
            open_list = line.rstrip()
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
