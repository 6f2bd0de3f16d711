"""Makes a folder for each of the smaller families beside this file: a tiny random model, token rows, what PyTorch trains,
and the greedy text of the untrained model.

The tests read the folders and never this file; it says where their numbers come from. To make all of them again, or some:

    pip install torch==2.15.0 transformers==5.23.0
    python make_family_references.py [NAME...]

The recipe is that of make_references.py, with 6 steps on batches of 4 rows of 24 tokens. Windows and original lengths are
shorter than the rows, so that they have an effect.
"""

import copy
import sys

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from make_references import NOTE, train, write

BATCH, SEQ_LEN, STEPS, VOCABULARY = 4, 24, 6, 48
PROMPT, NEW_TOKENS = 8, 16
BALANCE_SPEED = 0.05
GREEDY = (
    " `greedy`: the tokens after the first `prompt` ids of the first row, by the untrained model, without a cache."
)
SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2)
SIZES |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
# The sizes of GPT-2, which has other keys.
GPT2 = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32, initializer_range=0.2)
GPT2 |= dict(bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def rope(kind, **keys):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1000.0, **keys))


# The seeds of models with scores leave 1e-4 between the score of a chosen expert or group and the next one.
LATENT = dict(kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, num_key_value_heads=2)
LATENT |= dict(n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=4)
LATENT |= dict(first_k_dense_replace=1)

# Layers of linear attention around one of attention.
DELTA = dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
DELTA |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4)
# The norm of a head divides by small numbers where a query and a key are nearly orthogonal.
DELTA |= dict(linear_conv_kernel_dim=3, head_dim=8, rms_norm_eps=1e-3)

# Mamba-2 around an attention, with the factors of Granite.
MAMBA = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], num_key_value_heads=1)
MAMBA |= dict(mamba_n_heads=4, mamba_d_head=8, mamba_expand=2, mamba_n_groups=2, mamba_d_state=6, mamba_d_conv=3)
MAMBA |= dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=1.5)

FAMILIES = {
    "mistral-tiny": ("Mistral", 21, dict(sliding_window=5, head_dim=8) | rope("linear", factor=4.0)),
    "smollm3-tiny": (
        "SmolLM3",
        22,
        dict(no_rope_layer_interval=2, attention_bias=True, mlp_bias=True)
        | rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "granite-tiny": (
        "Granite",
        23,
        dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=1.5)
        | dict(max_position_embeddings=16)
        | rope("dynamic", factor=2.0),
    ),
    "phi3-tiny": (
        "Phi3",
        24,
        dict(sliding_window=9, original_max_position_embeddings=16, tie_word_embeddings=False)
        | dict(hidden_size=32, intermediate_size=28, num_attention_heads=4, num_key_value_heads=2)
        | rope(
            "longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.2, 1.5], long_factor=[1.5, 3.0, 4.0]
        ),
    ),
    "gemma2-tiny": (
        "Gemma2",
        25,
        dict(sliding_window=5, head_dim=8, query_pre_attn_scalar=12, attn_logit_softcapping=2.0)
        | dict(final_logit_softcapping=3.0, tie_word_embeddings=False)
        | rope("default"),
    ),
    "qwen2-moe-tiny": (
        "Qwen2Moe",
        27,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
        | dict(mlp_only_layers=[0])
        | rope("default"),
    ),
    "qwen2-window-tiny": (
        "Qwen2",
        29,
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1) | rope("default"),
    ),
    "qwen3-window-tiny": (
        "Qwen3",
        30,
        dict(use_sliding_window=True, sliding_window=4, head_dim=8, tie_word_embeddings=True)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
        | rope("default"),
    ),
    "mixtral-tiny": (
        "Mixtral",
        28,
        dict(num_local_experts=4, intermediate_size=8, sliding_window=9, router_aux_loss_coef=0.1) | rope("default"),
    ),
    "gemma3-tiny": (
        "Gemma3Text",
        31,
        dict(sliding_window=5, head_dim=8, query_pre_attn_scalar=12, tie_word_embeddings=False)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
        | dict(
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
                full_attention=dict(rope_type="linear", factor=4.0, rope_theta=1000.0),
            )
        ),
    ),
    "starcoder2-tiny": ("Starcoder2", 32, dict(sliding_window=9, tie_word_embeddings=False) | rope("default")),
    "deepseek-v2-tiny": (
        "DeepseekV2",
        36,
        LATENT
        | dict(q_lora_rank=None, n_group=3, topk_group=2, topk_method="group_limited_greedy")
        | dict(routed_scaling_factor=1.5)
        | rope("default"),
    ),
    "deepseek-v3-tiny": (
        "DeepseekV3",
        30,
        LATENT
        | dict(q_lora_rank=10, n_group=3, topk_group=2, attention_bias=True)
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.8),
    ),
    "olmo2-tiny": ("Olmo2", 26, dict(attention_bias=True) | rope("default")),
    "olmo3-tiny": (
        "Olmo3",
        48,
        dict(sliding_window=5, attention_bias=True)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
        | dict(
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
                full_attention=dict(
                    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1000.0
                ),
            )
        ),
    ),
    "ministral3-tiny": (
        "Ministral3",
        65,
        dict(sliding_window=9, head_dim=8)
        | rope(
            "yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.8, llama_4_scaling_beta=0.3
        ),
    ),
    "glm4-moe-tiny": (
        "Glm4Moe",
        55,
        dict(n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=4, head_dim=8)
        | dict(first_k_dense_replace=1, n_group=3, topk_group=2, routed_scaling_factor=1.5)
        | dict(attention_bias=True, use_qk_norm=True)
        | rope("default", partial_rotary_factor=0.5),
    ),
    "glm4-moe-plain-tiny": (
        "Glm4Moe",
        57,
        dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=8)
        | dict(first_k_dense_replace=0, norm_topk_prob=False)
        | rope("default", partial_rotary_factor=1.0),
    ),
    "qwen3-next-tiny": (
        "Qwen3Next",
        60,
        DELTA
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
        | dict(mlp_only_layers=[0], attention_bias=True)
        | rope("default", partial_rotary_factor=0.5),
    ),
    "qwen3-5-tiny": ("Qwen3_5Text", 77, DELTA | rope("default", partial_rotary_factor=0.5)),
    "qwen3-5-moe-tiny": (
        "Qwen3_5MoeText",
        62,
        DELTA
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
        | rope("default", partial_rotary_factor=0.5),
    ),
    "granite-hybrid-tiny": (
        "GraniteMoeHybrid",
        80,
        MAMBA | dict(num_local_experts=0, shared_intermediate_size=20, tie_word_embeddings=True) | rope("default"),
    ),
    "granite-hybrid-rope-tiny": (
        "GraniteMoeHybrid",
        81,
        MAMBA
        | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=12, shared_intermediate_size=20)
        | dict(position_embedding_type="rope", attention_bias=True, mamba_conv_bias=False)
        | rope("default"),
    ),
    "gpt2-tiny": ("GPT2", 40, {}),
    "gpt2-scaled-tiny": (
        "GPT2",
        41,
        dict(n_inner=24, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False),
    ),
    "gpt-oss-tiny": (
        "GptOss",
        42,
        dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=12, head_dim=8, sliding_window=5)
        | dict(swiglu_alpha=1.3, swiglu_limit=0.4, router_aux_loss_coef=0.1)
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
    ),
    "qwen2-moe-window-tiny": (
        "Qwen2Moe",
        43,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
        | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, norm_topk_prob=True)
        | rope("default"),
    ),
    "qwen3-moe-window-tiny": (
        "Qwen3Moe",
        44,
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8)
        | dict(use_sliding_window=True, sliding_window=5)
        | rope("default"),
    ),
    "smollm3-window-tiny": (
        "SmolLM3",
        45,
        dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5) | rope("default"),
    ),
    "deepseek-v2-greedy-tiny": (
        "DeepseekV2",
        46,
        LATENT | dict(q_lora_rank=10, topk_method="greedy", first_k_dense_replace=0) | rope("default"),
    ),
    "deepseek-v3-plain-tiny": (
        "DeepseekV3",
        47,
        LATENT
        | dict(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False)
        | dict(first_k_dense_replace=2)
        | rope("linear", factor=2.0),
    ),
}

# The classes of models that are not named after their configurations.
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Qwen3_5Text": "Qwen3_5ForCausalLM"}
CLASSES |= {"Qwen3_5MoeText": "Qwen3_5MoeForCausalLM"}
# The families whose routers have a balance loss that is checked.
WITH_BALANCE = ["Mixtral", "GptOss"]


def token_rows(generator):
    """Rows that repeat a few phrases, so that there is something to learn."""
    phrases = [torch.randint(0, VOCABULARY, (11,), generator=generator).tolist() for _ in range(4)]
    rows = []
    for _ in range(BATCH * STEPS):
        row = []
        while len(row) < SEQ_LEN + 12:
            row += phrases[torch.randint(0, len(phrases), (1,), generator=generator).item()]
        start = torch.randint(0, 11, (1,), generator=generator).item()
        rows.append(row[start : start + SEQ_LEN + 1])
    return rows


def greedy(model, tokens):
    """The most likely tokens, and the smallest difference between the two largest logits of a step."""
    tokens, gap = list(tokens), float("inf")
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            gap = min(gap, (best.values[0] - best.values[1]).item())
            tokens.append(best.indices[0].item())
    return tokens[PROMPT:], gap


def train_balanced(model, rows, microbatches):
    """The steps of a training with the balance loss of docs/models.md: the mean over microbatches and layers of transformers'
    function of one layer's routers."""
    config = model.config
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for start in range(0, len(rows), BATCH):
        entropy = balance = 0
        for rows_of_one in torch.tensor(rows[start : start + BATCH]).chunk(microbatches):
            output = model(input_ids=rows_of_one[:, :-1], output_router_logits=True)
            targets = rows_of_one[:, 1:].flatten()
            entropy += torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets) / microbatches
            of_layers = [
                load_balancing_loss_func((logits,), config.num_local_experts, config.num_experts_per_tok)
                for logits in output.router_logits
            ]
            balance += sum(of_layers) / len(of_layers) / microbatches
        loss = entropy + config.router_aux_loss_coef * balance
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append({"loss": loss.item(), "ce": entropy.item(), "aux": balance.item(), "grad_norm": norm.item()})
    return steps


BALANCED = (
    " `expected_aux`: with the balance loss of the routers per layer and microbatch, by the number of microbatches."
)


def balance(model, rows):
    """The steps of a training in which the corrections of routers follow the loads, as in the paper of DeepSeek V3."""
    model = copy.deepcopy(model)
    loads = {}

    def count(router, _, outputs):
        loads[router] = outputs[2].flatten().bincount(minlength=router.num_experts).float()

    routers = [router for router in model.modules() if hasattr(router, "e_score_correction_bias")]
    handles = [router.register_forward_hook(count) for router in routers]

    def after_step():
        for router, load in loads.items():
            router.e_score_correction_bias += BALANCE_SPEED * torch.sign(load.mean() - load)

    steps, _ = train(model, rows, BATCH, after_step)
    [handle.remove() for handle in handles]
    return dict(balance_speed=BALANCE_SPEED, balanced=steps) if routers else {}


def make(name):
    family, seed, keys = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(GPT2 if family == "GPT2" else SIZES) | keys)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))._from_config(config, attn_implementation="eager")
    # Biases start as zeros and factors as ones, and a reader that drops them would go unnoticed.
    for path, parameter in model.named_parameters():
        if parameter.dim() == 1 or path.endswith("_bias"):
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    rows = token_rows(torch.Generator().manual_seed(seed))
    text, gap = greedy(model, rows[0][:PROMPT])
    print(f"{name}: the closest choice of the greedy text is {gap:.1e}", file=sys.stderr)
    further, note = dict(prompt=PROMPT, greedy=text) | balance(model, rows), NOTE + GREEDY
    if family in WITH_BALANCE:
        further["expected_aux"] = {count: train_balanced(copy.deepcopy(model), rows, count) for count in (2, 4)}
        note += BALANCED
    write(name, seed, model, rows, BATCH, note, **further)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FAMILIES:
        make(name)
