"""Makes the folder `masked` beside this file: chats, and how transformers trains the tiny models of this folder on them.

The chats are rendered with `phi3`, their bytes are the token ids, and the loss counts what the assistant writes. A step has
8 chats in two halves, each a forward of its own, whose losses transformers weighs by the targets of the whole step
(`num_items_in_batch`), as its Trainer does with accumulated gradients. To make it again:

    pip install torch==2.15.0 transformers==5.23.0
    python make_masked_references.py
"""

import json
import random
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TEMPLATE = HERE / "../../../pipewright-data/src/settings/templates/phi3.jinja"
MODELS = ["llama-tiny", "llama-tied-tiny", "llama31-tiny", "qwen2-tiny", "qwen3-tiny"]
BATCH, STEPS, SEQ_LEN = 8, 4, 127
WORDS = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler", "in", "mind", "Ü", "世界"]


def chats():
    """Chats of one or two questions whose answers differ much in length."""
    random.seed(7)
    words = lambda most: " ".join(random.choices(WORDS, k=random.randint(1, most)))
    for index in range(BATCH * STEPS):
        turns = 1 + index % 2
        yield [message for _ in range(turns) for message in [
            {"role": "user", "content": words(3)[:10]}, {"role": "assistant", "content": words(1 + index % 7)[:12]}]]


def example(messages):
    """The token ids of a chat, and its labels: -100 where the assistant does not write."""
    texts, spans = render_jinja_template([messages], chat_template=TEMPLATE.read_text(), return_assistant_tokens_mask=True)
    ids = list(texts[0].encode())
    labels = [-100] * len(ids)
    for start, end in spans[0]:
        start, end = (len(texts[0][:at].encode()) for at in (start, end))
        labels[start:end] = ids[start:end]
    assert len(ids) <= SEQ_LEN + 1, len(ids)
    return ids, labels


def train(model, examples):
    """The loss and the gradient norm of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(STEPS):
        rows = examples[step * BATCH : (step + 1) * BATCH]
        count = torch.tensor(sum(label != -100 for _, labels in rows for label in labels[1:]))
        optimizer.zero_grad()
        loss = 0.0
        for half in (rows[: BATCH // 2], rows[BATCH // 2 :]):
            ids, labels = (torch.tensor([row[part] + [fill] * (SEQ_LEN + 1 - len(row[part])) for row in half])
                           for part, fill in ((0, 0), (1, -100)))
            part = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append({"loss": loss, "grad_norm": norm.item()})
    return steps


def main():
    torch.set_num_threads(1)
    all_chats = list(chats())
    examples = [example(messages) for messages in all_chats]
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in all_chats]
    (HERE / "masked/chats.jsonl").write_text("".join(lines))
    models = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager")
        models[name] = train(model.train(), examples)
    expected = {"transformers": transformers.__version__, "seq_len": SEQ_LEN, "batch": BATCH, "models": models}
    (HERE / "masked/expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
