//! The configuration in the form of `config.json`, in the spelling of both generations of files. Absent keys
//! get transformers' defaults. Settings that change the results but are not implemented are errors.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use super::config::{BlockKind, Experts, NemotronHConfig};
use crate::error::ShapeError;
use crate::key_range::unknown_block;

/// The keys of `config.json` that affect the results.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    layers_block_type: Option<Vec<String>>,
    hybrid_override_pattern: Option<String>,
    layer_norm_epsilon: Option<f64>,
    norm_eps: Option<f64>,
    rms_norm_eps: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
    initializer_range: Option<f64>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    attention_head_dim: Option<usize>,
    intermediate_size: Option<usize>,
    #[serde(default)]
    mlp_bias: bool,
    mamba_num_heads: Option<usize>,
    mamba_head_dim: Option<usize>,
    n_groups: Option<usize>,
    ssm_state_size: Option<usize>,
    conv_kernel: Option<usize>,
    use_conv_bias: Option<bool>,
    #[serde(default)]
    use_bias: bool,
    time_step_limit: Option<[Number; 2]>,
    time_step_min: Option<f64>,
    time_step_max: Option<f64>,
    time_step_floor: Option<f64>,
    rescale_prenorm_residual: Option<bool>,
    n_routed_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    norm_topk_prob: Option<bool>,
    routed_scaling_factor: Option<f64>,
    moe_intermediate_size: Option<usize>,
    moe_shared_expert_intermediate_size: Option<usize>,
    n_shared_experts: Option<usize>,
    moe_latent_size: Option<usize>,
}

/// A number that may be infinite, which JSON cannot write.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Named {
        #[serde(rename = "__float__")]
        name: String,
    },
}

impl Number {
    fn value(&self) -> Result<f64, ShapeError> {
        match self {
            Self::Finite(number) => Ok(*number),
            Self::Named { name } => name.parse().map_err(|_| {
                let supported = "a number or {\"__float__\": \"Infinity\"}";
                ShapeError::not_supported("time_step_limit", name, supported)
            }),
        }
    }

    fn json(number: f64) -> Value {
        if number.is_finite() { json!(number) } else { json!({"__float__": "Infinity"}) }
    }
}

const NAMES: &str = "`mamba` (or `linear_attention`), `attention` (or `full_attention`), `mlp` and `moe`";
const LETTERS: &str = "M (Mamba-2), * (attention), - (feed-forward) and E (experts)";

impl BlockKind {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "linear_attention" | "mamba" => Some(Self::Mamba),
            "full_attention" | "attention" => Some(Self::Attention),
            "mlp" => Some(Self::Mlp),
            "moe" => Some(Self::Experts),
            _ => None,
        }
    }

    fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'M' => Some(Self::Mamba),
            '*' => Some(Self::Attention),
            '-' => Some(Self::Mlp),
            'E' => Some(Self::Experts),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Mamba => "linear_attention",
            Self::Attention => "full_attention",
            Self::Mlp => "mlp",
            Self::Experts => "moe",
        }
    }
}

fn listed_blocks(names: &[String]) -> Result<Vec<BlockKind>, ShapeError> {
    let block = |(index, name): (usize, &String)| {
        let unknown = || unknown_block("layers_block_type", index, name, NAMES);
        BlockKind::from_name(name).ok_or_else(unknown)
    };
    names.iter().enumerate().map(block).collect()
}

fn lettered_blocks(pattern: &str) -> Result<Vec<BlockKind>, ShapeError> {
    let block = |(index, letter): (usize, char)| {
        let unknown = || unknown_block("hybrid_override_pattern", index, &letter.to_string(), LETTERS);
        BlockKind::from_letter(letter).ok_or_else(unknown)
    };
    pattern.chars().enumerate().map(block).collect()
}

impl RawConfig {
    /// Returns the blocks of the list or of the pattern, which must agree if both are written. An error says
    /// which block is unknown.
    fn blocks(&self) -> Result<Vec<BlockKind>, ShapeError> {
        let listed = self.layers_block_type.as_deref().map(listed_blocks).transpose()?;
        let pattern = self.hybrid_override_pattern.as_deref();
        let lettered = pattern.map(lettered_blocks).transpose()?;
        match (listed, lettered) {
            (Some(listed), Some(lettered)) if listed != lettered => {
                let (pattern, supported) =
                    (pattern.unwrap_or_default(), "the same as in `layers_block_type`");
                Err(ShapeError::not_supported("hybrid_override_pattern", pattern, supported))
            }
            (listed, lettered) => listed.or(lettered).ok_or_else(|| {
                ShapeError::missing_field(
                    "`layers_block_type` (or `hybrid_override_pattern`): the kinds of the blocks",
                )
            }),
        }
    }

    fn refuse_unsupported(&self, blocks: &[BlockKind]) -> Result<(), ShapeError> {
        if !blocks.contains(&BlockKind::Experts) {
            return Ok(());
        }
        if let Some(shared) = self.n_shared_experts.filter(|shared| *shared != 1) {
            return Err(ShapeError::not_supported("n_shared_experts", &shared.to_string(), "1"));
        }
        if self.mlp_bias {
            let supported = "false, in a model with experts";
            return Err(ShapeError::not_supported("mlp_bias", "true", supported));
        }
        Ok(())
    }

    /// Returns the number that the norms add. transformers ignores the other two names of it, and reads files
    /// without `layer_norm_epsilon` as if it were 1e-5.
    fn epsilon(&self) -> Result<f64, ShapeError> {
        let epsilon = self.layer_norm_epsilon.unwrap_or(1e-5);
        let others = [("norm_eps", self.norm_eps), ("rms_norm_eps", self.rms_norm_eps)];
        match others.into_iter().find(|(_, other)| other.is_some_and(|other| other != epsilon)) {
            Some((key, other)) => Err(ShapeError::not_supported(
                key,
                &other.unwrap_or_default().to_string(),
                "the same as `layer_norm_epsilon`, which is 1e-5 in a file without it,",
            )),
            None => Ok(epsilon),
        }
    }

    fn experts(&self) -> Result<Experts, ShapeError> {
        let required = |key: &str, size: Option<usize>| {
            let missing = || format!("`{key}`, which a model with blocks of experts needs");
            size.ok_or_else(|| ShapeError::missing_field(&missing()))
        };
        let shared = "moe_shared_expert_intermediate_size";
        Ok(Experts {
            n_routed_experts: required("n_routed_experts", self.n_routed_experts)?,
            num_experts_per_tok: self.num_experts_per_tok.unwrap_or(2),
            n_group: self.n_group.unwrap_or(1),
            topk_group: self.topk_group.unwrap_or(1),
            norm_topk_prob: self.norm_topk_prob.unwrap_or(true),
            routed_scaling_factor: self.routed_scaling_factor.unwrap_or(1.0),
            moe_intermediate_size: required("moe_intermediate_size", self.moe_intermediate_size)?,
            moe_shared_expert_intermediate_size: required(shared, self.moe_shared_expert_intermediate_size)?,
            moe_latent_size: self.moe_latent_size,
        })
    }
}

impl TryFrom<RawConfig> for NemotronHConfig {
    type Error = ShapeError;

    fn try_from(raw: RawConfig) -> Result<Self, ShapeError> {
        let blocks = raw.blocks()?;
        raw.refuse_unsupported(&blocks)?;
        let has_experts = blocks.contains(&BlockKind::Experts);
        let limits = match &raw.time_step_limit {
            Some([low, high]) => (low.value()?, high.value()?),
            None => (0.0, f64::INFINITY),
        };
        let heads = raw.num_attention_heads.unwrap_or(32);
        let config = Self {
            experts: has_experts.then(|| raw.experts()).transpose()?,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            blocks,
            layer_norm_epsilon: raw.epsilon()?,
            tie_word_embeddings: raw.tie_word_embeddings,
            initializer_range: raw.initializer_range.unwrap_or(0.02),
            num_attention_heads: heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(8),
            head_dim: raw.head_dim.or(raw.attention_head_dim).unwrap_or(128),
            intermediate_size: raw.intermediate_size.unwrap_or(21504),
            mlp_bias: raw.mlp_bias,
            mamba_num_heads: raw.mamba_num_heads.unwrap_or(128),
            mamba_head_dim: raw.mamba_head_dim.unwrap_or(64),
            n_groups: raw.n_groups.unwrap_or(8),
            ssm_state_size: raw.ssm_state_size.unwrap_or(128),
            conv_kernel: raw.conv_kernel.unwrap_or(4),
            use_conv_bias: raw.use_conv_bias.unwrap_or(true),
            use_bias: raw.use_bias,
            time_step_limit: limits,
            time_step_range: (raw.time_step_min.unwrap_or(0.001), raw.time_step_max.unwrap_or(0.1)),
            time_step_floor: raw.time_step_floor.unwrap_or(1e-4),
            rescale_prenorm_residual: raw.rescale_prenorm_residual.unwrap_or(true),
        };
        config.validate()?;
        Ok(config)
    }
}

impl<'de> Deserialize<'de> for NemotronHConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        RawConfig::deserialize(deserializer)?.try_into().map_err(D::Error::custom)
    }
}

impl Serialize for NemotronHConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (low, high) = self.time_step_limit;
        let mut json = json!({
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "layers_block_type": self.blocks.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "mlp_bias": self.mlp_bias,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "mamba_num_heads": self.mamba_num_heads,
            "mamba_head_dim": self.mamba_head_dim,
            "n_groups": self.n_groups,
            "ssm_state_size": self.ssm_state_size,
            "conv_kernel": self.conv_kernel,
            "use_conv_bias": self.use_conv_bias,
            "use_bias": self.use_bias,
            "time_step_limit": [Number::json(low), Number::json(high)],
            "time_step_min": self.time_step_range.0,
            "time_step_max": self.time_step_range.1,
            "time_step_floor": self.time_step_floor,
            "rescale_prenorm_residual": self.rescale_prenorm_residual,
        });
        if let Some(experts) = &self.experts {
            let further = json!({
                "n_routed_experts": experts.n_routed_experts,
                "num_experts_per_tok": experts.num_experts_per_tok,
                "n_group": experts.n_group,
                "topk_group": experts.topk_group,
                "norm_topk_prob": experts.norm_topk_prob,
                "routed_scaling_factor": experts.routed_scaling_factor,
                "moe_intermediate_size": experts.moe_intermediate_size,
                "moe_shared_expert_intermediate_size": experts.moe_shared_expert_intermediate_size,
                "n_shared_experts": 1,
            });
            let (Value::Object(json), Value::Object(further)) = (&mut json, further) else {
                unreachable!("both are objects")
            };
            json.extend(further);
            json.extend(experts.moe_latent_size.map(|width| ("moe_latent_size".to_owned(), width.into())));
        }
        json.serialize(serializer)
    }
}
