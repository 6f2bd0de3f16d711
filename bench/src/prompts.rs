//! Measures the first tokens of a text of a model with latent attention: computed with the keys and values of
//! all heads, as `generate` does, against attention to the latents, as for later tokens. Both are measured in
//! turn, for the same number of tokens. A row whose first token is known computes the others in the latents.
//!
//! With `--known`, the tokens are a later turn of a chat: the turn in the latents of the text before it,
//! against the whole text.

use burn::tensor::Device;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::generation_stage::StageRow;
use pipewright_models::{ModelConfig, ModelFamily};
use serde_json::json;

use crate::harness::{Outcome, compare, seconds};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of the text before, which the row in latents knows.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    known: u32,
    /// Heads.
    #[arg(long, default_value_t = 16)]
    heads: usize,
    /// Blocks.
    #[arg(long, default_value_t = 2)]
    blocks: usize,
    /// Rounds that count.
    #[arg(long, default_value_t = 10)]
    rounds: usize,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { tokens, known, heads, blocks, rounds } = options;
    // The published models have these widths of a head and of the latents.
    let keys = json!({
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": null,
        "first_k_dense_replace": blocks, "n_routed_experts": 2, "num_experts_per_tok": 1
    });
    let sizes =
        DecoderConfig { hidden_size: 1024, num_hidden_layers: blocks, ..DecoderConfig::new(256, heads) };
    let keys = keys.as_object().ok_or("a table")?.clone();
    let ModelConfig::DeepseekV2(model) = ModelConfig::of_sizes("deepseek_v2", sizes, keys)? else {
        return Err("the model is of another family".into());
    };
    let stage = model.init_stage(0..model.layers(), 1, Device::flex())?;
    let ids: Vec<u32> = (0..known + tokens).map(|token| token % 256 * 31 % 256).collect();
    let (first, prompt) = ids.split_at(known as usize);
    let mut in_heads = || -> Outcome<f64> {
        let mut row = StageRow::new(&stage, true);
        seconds(|| Ok(row.append(if known == 1 { prompt } else { &ids })?.last_logits()?))
    };
    let mut in_latents = || -> Outcome<f64> {
        let mut row = StageRow::new(&stage, true);
        // The known tokens are not measured.
        row.append(first)?.last_logits()?;
        seconds(|| Ok(row.append(prompt)?.last_logits()?))
    };
    println!("a prompt of {tokens} tokens after {known}, {heads} heads, {blocks} blocks of latent attention");
    compare(rounds, ["in latents", "in heads"], [&mut in_latents, &mut in_heads])
}
