//! The validation of a configuration.

use super::config::HybridConfig;
use super::pattern::BlockKind;
use super::side_inputs::STRUCTURES;
use crate::error::ConfigError;

impl HybridConfig {
    /// Checks that the keys make a model.
    ///
    /// # Errors
    /// When a key is out of range or does not fit another; the error names the first.
    pub fn validate(&self) -> Result<(), ConfigError> {
        positive(&[("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size)])?;
        above_zero(&[("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)])?;
        not_below_zero(&[
            ("initializer_range", self.initializer_range),
            ("moe_aux_loss_weight", self.moe_aux_loss_weight),
            ("moe_router_z_loss_weight", self.moe_router_z_loss_weight),
            ("mod_aux_loss_weight", self.mod_aux_loss_weight),
            ("mtp_loss_weight", self.mtp_loss_weight),
        ])?;
        if let Some(bos) = self.bos_token_id {
            require(bos < self.vocab_size, "bos_token_id", bos, "below `vocab_size`")?;
        }
        self.validate_embedding()?;
        self.validate_lists()?;
        if self.has(BlockKind::Attention) {
            self.validate_attention()?;
        }
        if self.has(BlockKind::Mamba) {
            self.validate_mamba()?;
        }
        if self.has(BlockKind::Dense) {
            positive(&[("intermediate_size", self.intermediate_size)])?;
        }
        if self.has(BlockKind::Experts) {
            positive(&[
                ("num_experts", self.num_experts),
                ("num_experts_per_tok", self.num_experts_per_tok),
                ("moe_intermediate_size", self.moe_intermediate_size),
            ])?;
            let chosen = self.num_experts_per_tok;
            require(chosen <= self.num_experts, "num_experts_per_tok", chosen, "at most `num_experts`")?;
        }
        Ok(())
    }

    fn validate_embedding(&self) -> Result<(), ConfigError> {
        for &order in &self.ngram_orders {
            require(order >= 2, "ngram_orders", order, "at least 2 each")?;
            let times = self.ngram_orders.iter().filter(|other| **other == order).count();
            require(times == 1, "ngram_orders", order, "in the list once")?;
        }
        let buckets = self.ngram_buckets;
        require(self.ngram_orders.is_empty() || buckets > 0, "ngram_buckets", buckets, "at least 1")?;
        for (name, &rows) in &self.structure_vocab_sizes {
            let known = STRUCTURES.contains(&name.as_str());
            let names = "one of structure_ids, dep_levels, ast_depth_ids, sibling_index_ids, node_type_ids";
            require(known, "structure_vocab_sizes", name, names)?;
            require(rows > 0, "structure_vocab_sizes", format!("{name}: {rows}"), "at least 1 each")?;
        }
        Ok(())
    }

    fn validate_lists(&self) -> Result<(), ConfigError> {
        let blocks = self.blocks().len();
        let windows = self.window_sizes.len();
        require(
            windows == 0 || windows == blocks,
            "window_sizes",
            windows,
            "empty, or one number for each block",
        )?;
        for &index in &self.nope_layers {
            let is_attention = self.blocks().get(index) == Some(&BlockKind::Attention);
            require(is_attention, "nope_layers", index, "places of attention blocks")?;
        }
        for &index in &self.mod_layers {
            require(index < blocks, "mod_layers", index, "places of blocks")?;
            let times = self.mod_layers.iter().filter(|other| **other == index).count();
            require(times == 1, "mod_layers", index, "in the list once")?;
        }
        let share = self.mod_capacity_factor;
        require(share > 0.0 && share <= 1.0, "mod_capacity_factor", share, "above 0 and at most 1")?;
        let letter = &self.mtp_block;
        let holds = matches!(letter.as_str(), "A" | "M" | "D" | "-");
        require(holds, "mtp_block", letter, "A, M or D")
    }

    fn validate_attention(&self) -> Result<(), ConfigError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        positive(&[("num_attention_heads", heads), ("num_key_value_heads", kv_heads)])?;
        if self.head_dim.is_none() {
            divisible(("hidden_size", self.hidden_size), ("num_attention_heads", heads))?;
        }
        divisible(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = self.head_dim();
        require(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim", head_dim, "even and at least 2")
    }

    fn validate_mamba(&self) -> Result<(), ConfigError> {
        positive(&[
            ("mamba_num_heads", self.mamba_num_heads),
            ("mamba_head_dim", self.mamba_head_dim),
            ("ssm_state_size", self.ssm_state_size),
            ("n_groups", self.n_groups),
            ("conv_kernel", self.conv_kernel),
        ])?;
        divisible(("mamba_num_heads", self.mamba_num_heads), ("n_groups", self.n_groups))
    }
}

fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    sizes.iter().try_for_each(|&(key, value)| require(value > 0, key, value, "at least 1"))
}

fn above_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| require(value.is_finite() && value > 0.0, key, value, "positive"))
}

fn not_below_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| {
        require(value.is_finite() && value >= 0.0, key, value, "zero or positive")
    })
}

fn require(
    holds: bool,
    key: &'static str,
    value: impl ToString,
    range: &'static str,
) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::OutOfRange { key, value: value.to_string(), range }) }
}

fn divisible(
    (key, value): (&'static str, usize),
    (by, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::NotDivisible { key, value, by, divisor })
}
