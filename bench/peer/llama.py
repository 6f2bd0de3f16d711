"""The bench model in plain PyTorch: a Llama-family transformer that can be cut into pipeline stages.

Parameter names, layouts and arithmetic are those of Hugging Face's Llama: RMSNorm before each half of a
block, rotary embeddings in the half-rotation layout, grouped-query causal attention, SwiGLU, no biases.
Not here: training, data, and anything that has to do with processes (`pipeline.py`).
"""

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; the fields mean what they mean in Hugging Face's `config.json`."""

    vocab_size: int = 256
    hidden_size: int = 512
    intermediate_size: int = 1376
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class LlamaStage(nn.Module):
    """One stage: a run of blocks, with the embedding on the first stage and norm and head on the last.

    Maps token ids `[rows, seq_len]` (first stage) or hidden states `[rows, seq_len, hidden]` to hidden
    states, or, on the last stage, to logits `[rows, seq_len, vocab]`.
    """

    def __init__(self, config: LlamaConfig, seq_len: int, stage: int, stages: int):
        super().__init__()
        first = stage * config.num_hidden_layers // stages
        end = (stage + 1) * config.num_hidden_layers // stages
        is_first, is_last = stage == 0, stage == stages - 1
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = nn.Embedding(vocab, hidden) if is_first else None
        self.layers = nn.ModuleDict({str(layer): LlamaBlock(config) for layer in range(first, end)})
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps) if is_last else None
        self.lm_head = nn.Linear(hidden, vocab, bias=False) if is_last else None
        cos, sin = rope_tables(config, seq_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


class LlamaBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGlu(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions; key/value heads may be fewer than query heads."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, seq_len, _ = x.shape
        heads = (rows, seq_len, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).reshape(rows, seq_len, -1))


class SwiGlu(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_tables(config: LlamaConfig, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[seq_len, head_dim]`, each frequency once for either half of the head."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `[rows, heads, seq_len, head_dim]` by position; dimension `i` pairs with `i + head_dim / 2`."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def initialise(stage: LlamaStage, seed: int) -> None:
    """Draws every matrix from a normal distribution that depends on `seed` and its path, never on the cut.

    The gains of the norms stay at one.
    """
    for path, parameter in stage.named_parameters():
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(path.encode()))
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
