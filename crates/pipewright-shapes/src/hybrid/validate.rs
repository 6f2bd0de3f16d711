//! The validation of a configuration.

use super::config::HybridConfig;
use super::pattern::BlockKind;
use crate::error::ShapeError;
use crate::key_range::{above_zero, divisible, not_below_zero, require, rows, sizes, width};

/// The inputs about the structure of the text.
pub const STRUCTURES: [&str; 5] =
    ["structure_ids", "dep_levels", "ast_depth_ids", "sibling_index_ids", "node_type_ids"];

/// The keys of the sizes of [`STRUCTURES`].
const STRUCTURE_SIZES: [&str; STRUCTURES.len()] = [
    "structure_vocab_sizes.structure_ids",
    "structure_vocab_sizes.dep_levels",
    "structure_vocab_sizes.ast_depth_ids",
    "structure_vocab_sizes.sibling_index_ids",
    "structure_vocab_sizes.node_type_ids",
];

impl HybridConfig {
    /// Checks that the keys make a model.
    ///
    /// # Errors
    /// When a key is out of range or does not fit another; the error names the first.
    pub fn validate(&self) -> Result<(), ShapeError> {
        rows(&[("vocab_size", self.vocab_size)])?;
        sizes(&[("hidden_size", self.hidden_size)])?;
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
            sizes(&[("intermediate_size", self.intermediate_size)])?;
        }
        if self.has(BlockKind::Experts) {
            sizes(&[
                ("num_experts", self.num_experts),
                ("num_experts_per_tok", self.num_experts_per_tok),
                ("moe_intermediate_size", self.moe_intermediate_size),
                // A model without the expert that every token passes has 0 here.
                ("shared_expert_intermediate_size", self.shared_expert_intermediate_size.max(1)),
            ])?;
            width(("num_experts", self.num_experts), ("moe_intermediate_size", self.moe_intermediate_size))?;
            let chosen = self.num_experts_per_tok;
            require(chosen <= self.num_experts, "num_experts_per_tok", chosen, "at most `num_experts`")?;
        }
        Ok(())
    }

    fn validate_embedding(&self) -> Result<(), ShapeError> {
        for &order in &self.ngram_orders {
            require(order >= 2, "ngram_orders", order, "at least 2 each")?;
            let times = self.ngram_orders.iter().filter(|other| **other == order).count();
            require(times == 1, "ngram_orders", order, "in the list once")?;
        }
        let buckets = self.ngram_buckets;
        if !self.ngram_orders.is_empty() {
            rows(&[("ngram_buckets", buckets)])?;
        }
        // A model without such a table has 0 rows.
        rows(&[("platform_vocab_size", self.platform_vocab_size.max(1))])?;
        if self.num_relations > 0 {
            // The table has a number for each relation and head.
            sizes(&[
                ("num_relations", self.num_relations),
                ("num_attention_heads", self.num_attention_heads),
            ])?;
        }
        for (name, &count) in &self.structure_vocab_sizes {
            let index = STRUCTURES.iter().position(|known| known == name);
            let names = "one of structure_ids, dep_levels, ast_depth_ids, sibling_index_ids, node_type_ids";
            require(index.is_some(), "structure_vocab_sizes", name, names)?;
            index.map_or(Ok(()), |index| rows(&[(STRUCTURE_SIZES[index], count)]))?;
        }
        Ok(())
    }

    fn validate_lists(&self) -> Result<(), ShapeError> {
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
        require(holds, "mtp_block", letter, "A, M or D")?;
        let depth = self.mtp_depth;
        // Published models have one to four further predictions.
        require((1..=64).contains(&depth), "mtp_depth", depth, "from 1 to 64")
    }

    fn validate_attention(&self) -> Result<(), ShapeError> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        sizes(&[("num_attention_heads", heads), ("num_key_value_heads", kv_heads)])?;
        if self.head_dim.is_none() {
            divisible(("hidden_size", self.hidden_size), ("num_attention_heads", heads))?;
        }
        divisible(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = self.head_dim();
        let pairs = head_dim > 0 && head_dim.is_multiple_of(2);
        require(pairs, "head_dim", head_dim, "even and at least 2")?;
        width(("head_dim", head_dim), ("num_attention_heads", heads))
    }

    fn validate_mamba(&self) -> Result<(), ShapeError> {
        sizes(&[
            ("mamba_num_heads", self.mamba_num_heads),
            ("mamba_head_dim", self.mamba_head_dim),
            ("ssm_state_size", self.ssm_state_size),
            ("n_groups", self.n_groups),
            ("conv_kernel", self.conv_kernel),
        ])?;
        width(("mamba_head_dim", self.mamba_head_dim), ("mamba_num_heads", self.mamba_num_heads))?;
        width(("ssm_state_size", self.ssm_state_size), ("n_groups", self.n_groups))?;
        divisible(("mamba_num_heads", self.mamba_num_heads), ("n_groups", self.n_groups))
    }
}
