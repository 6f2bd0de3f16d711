"""Makes `expected.json` of `hybrid-min` and `hybrid-full` from their other files: hybrid models of all kinds of blocks,
trained with PyTorch in double precision. The models are written here from their formulas, without Pipewright.

    python make_hybrid_references.py hybrid-min hybrid-full
"""

import json
import sys
from math import floor
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import conv1d, cross_entropy, silu, softplus

FACTOR, MASK = 0x9E37_79B9_7F4A_7C15, 2**64 - 1
IGNORED = -100
NOTE = (
    "Tolerances are relative: `loss` for total, ce and mtp, `auxiliary` for the other losses. expected[m] has the curve "
    "for m microbatches: per step the mean over microbatches of each loss, without weights; `total`, their weighted sum, "
    "which is what the step minimises; and the global gradient norm before clipping. AdamW, betas 0.9 and 0.95, eps 1e-8, "
    "decoupled weight decay 0.1 on every parameter, zero where a parameter has no gradient; gradients times min(1, 1 / "
    "(norm + 1e-6)). Rows of tokens.jsonl and of side.safetensors in order, `batch` rows a step. Computed in f64 from the "
    "f32 weights. first_step, one microbatch: root mean square of the hidden states over valid positions and channels, "
    "after the embedding and after each block, and the gradient norm of each parameter before clipping."
)


class Tokens:
    """The tokens of some rows, or those of them that a block sees."""

    def __init__(self, documents, positions, valid, relations):
        self.documents, self.positions, self.valid, self.relations = documents, positions, valid, relations

    def choose(self, indices):
        """Returns the tokens with these indices, `[rows, chosen]`."""
        chosen = [x.gather(1, indices) for x in (self.documents, self.positions, self.valid)]
        relations = self.relations
        if relations is not None:
            rows = torch.arange(len(indices))[:, None, None]
            relations = relations.transpose(0, 1)[:, rows, indices[:, :, None], indices[:, None, :]].transpose(0, 1)
        return Tokens(*chosen, relations)


class Model:
    def __init__(self, config, parameters):
        self.config, self.parameters = config, parameters
        self.heads, self.head = config["num_attention_heads"], config["head_dim"]
        self.epsilon = config.get("rms_norm_eps", 1e-6)
        self.blocks = config["pattern"].replace("|", "")
        self.auxiliary, self.rms = {}, {}

    def weight(self, path):
        return self.parameters[f"{path}.weight"]

    def linear(self, path, x):
        return x @ self.weight(path).T

    def norm(self, path, x):
        return self.weight(path) * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon)

    def gated(self, path, x):
        gate, up = self.linear(f"{path}.gate_proj", x), self.linear(f"{path}.up_proj", x)
        return self.linear(f"{path}.down_proj", silu(gate) * up)

    def add_loss(self, name, loss, share):
        self.auxiliary[name] = self.auxiliary.get(name, 0.0) + loss * share

    def attention(self, path, x, tokens, theta, window, relates):
        rows, count, _ = x.shape
        half = self.head // 2

        def heads(name):
            y = self.linear(f"{path}.{name}_proj", x).view(rows, count, -1, self.head).transpose(1, 2)
            return y.repeat_interleave(self.heads // y.shape[1], 1)

        def rotate(x):
            if theta is None:
                return x
            frequencies = theta ** (-2 * torch.arange(half, dtype=torch.float64) / self.head)
            angles = tokens.positions[:, None, :, None] * frequencies
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

        scores = rotate(heads("q")) @ rotate(heads("k")).transpose(2, 3) / self.head**0.5
        if relates and tokens.relations is not None:
            table = self.weight("model.relation_bias")
            scores = scores + torch.einsum("brqk,rh->bhqk", tokens.relations.double(), table)
        sees = tokens.documents[:, :, None] == tokens.documents[:, None, :]
        sees = sees & torch.ones(count, count).tril().bool()
        if window:
            sees = sees & (tokens.positions[:, :, None] - tokens.positions[:, None, :] < window)
        scores = scores.masked_fill(~sees[:, None], -torch.inf)
        return self.linear(f"{path}.o_proj", (scores.softmax(-1) @ heads("v")).transpose(1, 2).reshape(rows, count, -1))

    def mamba(self, path, x, tokens):
        config = self.config
        heads, size, state = config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"]
        groups, taps = config.get("n_groups", 1), config.get("conv_kernel", 4)
        width, (rows, count, _) = heads * size, x.shape
        z, v, raw = self.linear(f"{path}.in_proj", x).split([width, width + 2 * groups * state, heads], -1)
        kernel, bias = self.weight(f"{path}.conv1d"), self.parameters[f"{path}.conv1d.bias"]
        steps = softplus(raw + self.parameters[f"{path}.dt_bias"])
        rates, skip = -self.parameters[f"{path}.A_log"].exp(), self.parameters[f"{path}.D"]
        results = []
        for row in range(rows):
            # Each document is a text of its own.
            bounds = [0, *(1 + t for t in range(count - 1) if tokens.documents[row, t] != tokens.documents[row, t + 1]), count]
            outputs = []
            for start, end in zip(bounds, bounds[1:]):
                u = torch.cat([v.new_zeros(taps - 1, v.shape[-1]), v[row, start:end]]).T[None]
                u = silu(conv1d(u, kernel, bias, groups=v.shape[-1]))[0].T
                a, b, c = u.split([width, groups * state, groups * state], -1)
                a = a.view(-1, heads, size)
                b, c = (y.view(-1, groups, state).repeat_interleave(heads // groups, 1) for y in (b, c))
                held = v.new_zeros(heads, size, state)
                for t in range(end - start):
                    step = steps[row, start + t]
                    held = held * (step * rates).exp()[:, None, None] + (step[:, None] * a[t])[:, :, None] * b[t][:, None, :]
                    outputs.append(((held * c[t][:, None, :]).sum(-1) + skip[:, None] * a[t]).reshape(width))
            results.append(torch.stack(outputs))
        y = (torch.stack(results) * silu(z)).view(rows, count, groups, width // groups)
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + self.epsilon)
        return self.linear(f"{path}.out_proj", y.view(rows, count, width) * self.weight(f"{path}.norm"))

    def experts(self, path, x, tokens):
        config, share = self.config, 1 / self.blocks.count("E")
        count, best = config["num_experts"], config["num_experts_per_tok"]
        logits = self.linear(f"{path}.router", x)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(best, -1)
        if config.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        valid = tokens.valid
        loads = torch.bincount(chosen[valid].flatten(), minlength=count).double() * count / valid.sum()
        self.add_loss("moe_aux", (probabilities[valid] * loads).sum(-1).mean(), share)
        self.add_loss("moe_z", logits[valid].logsumexp(-1).square().mean(), share)
        y = 0
        for expert in range(count):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            y = y + weight * self.gated(f"{path}.experts.{expert}", x)
        if config.get("shared_expert_intermediate_size"):
            y = y + self.gated(f"{path}.shared_expert", x)
        return y

    def branch(self, path, kind, x, tokens, attention):
        x, path = self.norm(f"{path}.norm", x), f"{path}.mixer"
        match kind:
            case "A":
                return self.attention(path, x, tokens, *attention)
            case "M":
                return self.mamba(path, x, tokens)
            case "E":
                return self.experts(path, x, tokens)
            case _:
                return self.gated(path, x)

    def block(self, index, x, tokens):
        config, path, kind = self.config, f"model.layers.{index}", self.blocks[index]
        theta = None if index in config.get("nope_layers", []) else config["rope_theta"]
        windows = config.get("window_sizes", [])
        attention = (theta, windows[index] if index < len(windows) else 0, True)
        if index not in config.get("mod_layers", []):
            return x + self.branch(path, kind, x, tokens, attention)
        rows, count, width = x.shape
        scores = self.linear(f"{path}.mod_router", x)[..., 0]
        length = max(floor(config["mod_capacity_factor"] * count), 1)
        ranked = scores.detach().masked_fill(~tokens.valid, -torch.inf)
        indices = ranked.sort(descending=True, stable=True).indices[:, :length].sort().values
        was_chosen = torch.zeros_like(scores).scatter(1, indices, 1.0)
        loss = (softplus(scores) - scores * was_chosen)[tokens.valid].mean()
        self.add_loss("mod_aux", loss, 1 / len(config["mod_layers"]))
        wide = indices[..., None].expand(-1, -1, width)
        mixed = self.branch(path, kind, x.gather(1, wide), tokens.choose(indices), attention)
        gates = scores.gather(1, indices).sigmoid()[..., None]
        return x.scatter_add(1, wide, gates * mixed)

    def embed(self, ids, tokens, side):
        config, x = self.config, self.weight("model.embed_tokens")[ids]
        if config.get("embed_scale"):
            x = x * config["hidden_size"] ** 0.5
        for order in config.get("ngram_orders", []):
            table, rows = self.weight(f"model.ngram.{order}"), []
            for row, documents in zip(ids.tolist(), tokens.documents.tolist()):
                for t in range(len(row)):
                    hashed, power = 0, 1
                    for back in range(min(order, t + 1)):
                        if documents[t - back] != documents[t]:
                            break
                        hashed, power = (hashed + (row[t - back] + 1) * power) & MASK, power * FACTOR & MASK
                    rows.append(hashed % config["ngram_buckets"])
            x = x + table[torch.tensor(rows).view(ids.shape)]
        for name in config.get("structure_vocab_sizes", {}):
            x = x + self.weight(f"model.structure.{name}")[side[name]]
        if config.get("platform_vocab_size"):
            x = x + self.weight("model.platform")[side["platform_ids"]][:, None]
        if config.get("embed_norm") == "dyt":
            path = "model.embed_norm"
            x = (x * self.parameters[f"{path}.alpha"]).tanh() * self.weight(path) + self.parameters[f"{path}.bias"]
        return x

    def note_rms(self, name, x, tokens):
        self.rms[name] = x[tokens.valid].square().mean().sqrt().item()

    def losses(self, rows, side):
        """Returns the losses of a microbatch by name."""
        config, ids, targets = self.config, rows[:, :-1], rows[:, 1:]
        count = ids.shape[1]
        # The document of each id of a row, its last target included.
        of_all = (rows == config["bos_token_id"]).cumsum(1)
        positions = torch.arange(count).expand_as(ids)
        valid = torch.ones_like(ids, dtype=torch.bool)
        if "row_valid_token_counts" in side:
            valid = positions < side["row_valid_token_counts"][:, None]
        tokens = Tokens(of_all[:, :-1], positions, valid, side.get("chunk_relation_mask"))
        targets = targets.masked_fill(~valid, IGNORED)
        self.auxiliary, self.rms = {}, {}

        def loss(x, path, targets):
            logits = self.linear("lm_head", self.norm(path, x))
            return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        x = self.embed(ids, tokens, side)
        self.note_rms("embed", x, tokens)
        for index in range(len(self.blocks)):
            x = self.block(index, x, tokens)
            self.note_rms(f"layers.{index}", x, tokens)
        losses = {"ce": loss(x, "model.norm", targets), "mtp": torch.zeros((), dtype=torch.float64)}
        if config.get("mtp_loss_weight"):
            # The prediction is of the token after the next one, if it is of the same document.
            ahead = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
            after = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], 1)
            after[:, :-1] = after[:, :-1].masked_fill(of_all[:, :-2] != of_all[:, 2:], IGNORED)
            hidden, embedded = self.norm("mtp.hidden_norm", x), self.weight("model.embed_tokens")[ahead]
            x = self.linear("mtp.proj", torch.cat([hidden, self.norm("mtp.embed_norm", embedded)], -1))
            attention = (config["rope_theta"], 0, False)
            x = x + self.branch("mtp.block", config["mtp_block"], x, tokens, attention)
            losses["mtp"] = loss(x, "mtp.norm", after)
        return losses | self.auxiliary


WEIGHTS = {
    "mtp": "mtp_loss_weight",
    "moe_aux": "moe_aux_loss_weight",
    "moe_z": "moe_router_z_loss_weight",
    "mod_aux": "mod_aux_loss_weight",
}


def train(folder, old, microbatches):
    """Returns the losses of each step, and the figures of the first one."""
    config = json.loads((folder / "config.json").read_text())
    rows = torch.tensor([json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()])
    side = load_file(folder / "side.safetensors") if (folder / "side.safetensors").exists() else {}
    parameters = {
        name: value.double().requires_grad_() for name, value in load_file(folder / "model.safetensors").items()
    }
    model, batch = Model(config, parameters), old["batch"]
    optimizer = torch.optim.AdamW(parameters.values(), old["learning_rate"], (0.9, 0.95), 1e-8, 0.1)
    steps, first = [], {}
    for step in range(old["steps"]):
        sums = dict.fromkeys(["total", "ce", "moe_aux", "moe_z", "mod_aux", "mtp"], 0.0)
        for value in parameters.values():
            value.grad = torch.zeros_like(value)
        size = batch // microbatches
        for start in range(step * batch, (step + 1) * batch, size):
            part = slice(start, start + size)
            losses = model.losses(rows[part], {name: value[part] for name, value in side.items()})
            total = losses["ce"] + sum(config.get(WEIGHTS[name], 0.0) * x for name, x in losses.items() if name != "ce")
            (total / microbatches).backward()
            for name, loss in (losses | {"total": total}).items():
                sums[name] += loss.item() / microbatches
        if step == 0:
            norms = {name: parameters[name].grad.norm().item() for name in old["first_step"]["grad_norms"]}
            first = {"hidden_rms": model.rms, "grad_norms": norms}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        steps.append(sums | {"grad_norm": norm.item()})
    return steps, first


def main():
    for name in sys.argv[1:]:
        folder = Path(__file__).parent / name
        old = json.loads((folder / "expected.json").read_text())
        expected = {str(count): train(folder, old, count) for count in (1, 2, 4)}
        kept = {key: old[key] for key in ("batch", "seq_len", "steps", "learning_rate", "tolerance")}
        curves = {count: steps for count, (steps, _) in expected.items()}
        made = {"note": NOTE, **kept, "expected": curves, "first_step": expected["1"][1]}
        (folder / "expected.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
