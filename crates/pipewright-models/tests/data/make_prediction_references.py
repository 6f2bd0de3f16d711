"""Makes `hybrid-predictions`: a hybrid model of attention and feed-forward blocks with a tied head and two further
predictions, trained with PyTorch in double precision. The model is written here from its formulas, without Pipewright.

    python make_prediction_references.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, silu

FOLDER = Path(__file__).parent / "hybrid-predictions"
BATCH, TOKENS, STEPS, RATE = 4, 12, 6, 3e-3
CONFIG = {
    "model_type": "hybrid",
    "architectures": ["HybridForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 24,
    "pattern": "AD",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "intermediate_size": 32,
    "mtp_loss_weight": 0.3,
    "mtp_block": "A",
    "mtp_depth": 2,
}
VOCABULARY, WIDTH, INNER = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"]
HEADS, KEY_HEADS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
HEAD = WIDTH // HEADS


def prefix(depth):
    return "mtp" if depth == 1 else f"mtp_{depth}"


def initial():
    """Returns the parameters by name, in single precision."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}

    def block(path, kind):
        shapes[f"{path}.norm.weight"] = (WIDTH,)
        if kind == "A":
            for name, size in [("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)]:
                shapes[f"{path}.mixer.{name}_proj.weight"] = (size * HEAD, WIDTH)
            shapes[f"{path}.mixer.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        else:
            shapes[f"{path}.mixer.gate_proj.weight"] = (INNER, WIDTH)
            shapes[f"{path}.mixer.up_proj.weight"] = (INNER, WIDTH)
            shapes[f"{path}.mixer.down_proj.weight"] = (WIDTH, INNER)

    for index, kind in enumerate(CONFIG["pattern"]):
        block(f"model.layers.{index}", kind)
    for depth in range(1, CONFIG["mtp_depth"] + 1):
        path = prefix(depth)
        for name in ["hidden_norm", "embed_norm", "norm"]:
            shapes[f"{path}.{name}.weight"] = (WIDTH,)
        shapes[f"{path}.proj.weight"] = (WIDTH, 2 * WIDTH)
        block(f"{path}.block", CONFIG["mtp_block"])

    def values(name, shape):
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.1 * noise if name.endswith("norm.weight") else 0.15 * noise

    return {name: values(name, shape) for name, shape in shapes.items()}


def norm(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])


def rotate(x):
    """Turns pairs of channels by their positions. Shape: `[rows, heads, tokens, head]`."""
    half = HEAD // 2
    frequencies = CONFIG["rope_theta"] ** (-2 * torch.arange(half, dtype=torch.float64) / HEAD)
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def mix(parameters, path, kind, x, ids):
    def linear(name, x):
        return x @ parameters[f"{path}.mixer.{name}_proj.weight"].T

    if kind == "D":
        return linear("down", silu(linear("gate", x)) * linear("up", x))
    rows, tokens, _ = x.shape

    def heads(name, count):
        return linear(name, x).view(rows, tokens, count, HEAD).transpose(1, 2)

    q, k, v = rotate(heads("q", HEADS)), rotate(heads("k", KEY_HEADS)), heads("v", KEY_HEADS)
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    documents = (ids == CONFIG["bos_token_id"]).cumsum(1)
    sees = (documents[:, :, None] == documents[:, None, :]) & torch.ones(tokens, tokens).tril().bool()
    scores = (q @ k.transpose(2, 3) / HEAD**0.5).masked_fill(~sees[:, None], -torch.inf)
    return linear("o", (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, tokens, -1))


def block(parameters, path, kind, x, ids):
    return x + mix(parameters, path, kind, norm(x, parameters[f"{path}.norm.weight"]), ids)


def losses(parameters, rows):
    """Returns the mean loss of the next token, and that of each further prediction."""
    ids, table = rows[:, :-1], parameters["model.embed_tokens.weight"]
    documents = (rows == CONFIG["bos_token_id"]).cumsum(1)

    def loss(x, path, ahead):
        logits = norm(x, parameters[f"{path}.weight"]) @ table.T
        logits, targets = logits[:, : TOKENS - ahead], rows[:, 1 + ahead :]
        if ahead > 0:
            # A further prediction is of a token of the same document.
            targets = targets.masked_fill(documents[:, : TOKENS - ahead] != documents[:, 1 + ahead :], -100)
        return cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))

    x = table[ids]
    for index, kind in enumerate(CONFIG["pattern"]):
        x = block(parameters, f"model.layers.{index}", kind, x, ids)
    next_token, further = loss(x, "model.norm", 0), []
    for depth in range(1, CONFIG["mtp_depth"] + 1):
        path = prefix(depth)
        # What follows the end of a row or document counts in no loss.
        ahead = torch.cat([ids[:, depth:], ids[:, -1:].expand(-1, depth)], 1)
        hidden = norm(x, parameters[f"{path}.hidden_norm.weight"])
        embedded = norm(table[ahead], parameters[f"{path}.embed_norm.weight"])
        x = torch.cat([hidden, embedded], -1) @ parameters[f"{path}.proj.weight"].T
        x = block(parameters, f"{path}.block", CONFIG["mtp_block"], x, ids)
        further.append(loss(x, f"{path}.norm", depth))
    return next_token, further


def train(start, rows, microbatches):
    """Returns the losses of each step, means over microbatches, and the gradient norms of the first one."""
    parameters = {name: value.double().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps, grad_norms = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        sums = {"total": 0.0, "ce": 0.0, "mtp": 0.0}
        for part in rows[step * BATCH : (step + 1) * BATCH].chunk(microbatches):
            ce, further = losses(parameters, part)
            mtp = torch.stack(further).mean()
            total = ce + CONFIG["mtp_loss_weight"] * mtp
            (total / microbatches).backward()
            for name, loss in (("total", total), ("ce", ce), ("mtp", mtp)):
                sums[name] += loss.item() / microbatches
        if step == 0:
            grad_norms = {name: value.grad.norm().item() for name, value in parameters.items()}
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        zero = {"moe_aux": 0.0, "moe_z": 0.0, "mod_aux": 0.0}
        steps.append(sums | {"grad_norm": grad_norm.item()} | zero)
    return steps, grad_norms


def main():
    FOLDER.mkdir(exist_ok=True)
    start = initial()
    save_file(start, FOLDER / "model.safetensors")
    generator = torch.Generator().manual_seed(12)
    rows = torch.randint(0, VOCABULARY, (STEPS * BATCH, TOKENS + 1), generator=generator)
    rows[:, 5] = CONFIG["bos_token_id"]
    (FOLDER / "tokens.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows.tolist()))
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")

    curves, grad_norms = {}, {}
    for microbatches in (1, 2, 4):
        curves[str(microbatches)], grad_norms[microbatches] = train(start, rows, microbatches)
    expected = {
        "batch": BATCH,
        "seq_len": TOKENS,
        "steps": STEPS,
        "learning_rate": RATE,
        "tolerance": {"loss": 2e-6, "auxiliary": 2e-6, "grad_norm": 2e-5},
        "expected": curves,
        "first_step": {"hidden_rms": {}, "grad_norms": grad_norms[1]},
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print([(round(step["ce"], 4), round(step["mtp"], 4), round(step["grad_norm"], 3)) for step in curves["1"]])


main()
