//! The Nemotron-H and the Qwen3-MoE that are compared with PyTorch and transformers.

use std::path::Path;

use pipewright_models::decoder::{DecoderConfig, MixtureConfig};
use pipewright_models::nemotron_h::{BlockKind, NemotronHConfig};
use pipewright_models::qwen3_moe::Qwen3MoeConfig;
use pipewright_models::{ModelConfig, ModelError, ModelFamily};

use crate::harness::Outcome;
use crate::model::{HEADS, LAYERS, VOCABULARY, WIDTH, write};

/// A family that both sides have.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Family {
    NemotronH,
    Qwen3Moe,
}

impl Family {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NemotronH => "nemotron_h",
            Self::Qwen3Moe => "qwen3_moe",
        }
    }

    pub(crate) fn config(self) -> ModelConfig {
        match self {
            Self::NemotronH => ModelConfig::NemotronH(nemotron_h()),
            Self::Qwen3Moe => ModelConfig::Qwen3Moe(qwen3_moe()),
        }
    }

    /// Writes the model with random parameters into `folder`.
    pub(crate) fn write(self, folder: &Path) -> Result<ModelConfig, ModelError> {
        match self {
            Self::NemotronH => write(&nemotron_h(), folder)?,
            Self::Qwen3Moe => write(&qwen3_moe(), folder)?,
        }
        Ok(self.config())
    }
}

/// A Nemotron-H of 14 blocks: Mamba-2 and feed-forward layers in turn, and two of attention.
fn nemotron_h() -> NemotronHConfig {
    use BlockKind::{Attention, Mamba, Mlp};
    let half = [Mamba, Mlp, Mamba, Mlp, Mamba, Attention, Mlp];
    let sizes = DecoderConfig {
        hidden_size: WIDTH,
        intermediate_size: 4 * WIDTH,
        num_key_value_heads: HEADS / 2,
        ..DecoderConfig::new(VOCABULARY, HEADS)
    };
    let config = NemotronHConfig::of_sizes(sizes);
    NemotronHConfig {
        blocks: [half, half].concat(),
        mamba_num_heads: 16,
        mamba_head_dim: 64,
        n_groups: 2,
        ssm_state_size: 128,
        // transformers limits the steps by `time_step_min`.
        time_step_limit: (config.time_step_range.0, f64::INFINITY),
        ..config
    }
}

/// A Qwen3-MoE of 8 layers, each with 8 experts. A token meets 2 of them.
pub(crate) fn qwen3_moe() -> Qwen3MoeConfig {
    let sizes = DecoderConfig {
        hidden_size: WIDTH,
        num_hidden_layers: LAYERS,
        num_key_value_heads: HEADS / 2,
        ..DecoderConfig::new(VOCABULARY, HEADS)
    };
    let mixture = MixtureConfig::of_width(3 * WIDTH);
    Qwen3MoeConfig { mixture, ..Qwen3MoeConfig::from(sizes) }
}

/// Returns the numbers of the parameters that a token meets, and of all.
pub(crate) fn parameters(model: &ModelConfig) -> Outcome<[usize; 2]> {
    let specs = model.parameters()?;
    let sizes = specs.iter().map(|spec| (spec.path.as_str(), spec.shape.iter().product()));
    let (chosen, experts) = match model {
        ModelConfig::Qwen3Moe(config) => (config.mixture.num_experts_per_tok, config.mixture.num_experts),
        _ => (1, 1),
    };
    Ok(count(sizes, chosen, experts))
}

/// Like [`parameters`], but for parameters with these paths and sizes, if a token meets `chosen` of
/// `experts`.
fn count<'a>(sizes: impl Iterator<Item = (&'a str, usize)>, chosen: usize, experts: usize) -> [usize; 2] {
    let (mut routed, mut others) = (0, 0);
    for (path, size) in sizes {
        *if path.contains(".experts.") { &mut routed } else { &mut others } += size;
    }
    [others + routed / experts * chosen, others + routed]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_has_about_25_million_active_parameters() {
        for family in [Family::NemotronH, Family::Qwen3Moe] {
            let [active, all] = parameters(&family.config()).expect("the sizes make a model");
            assert!((24_500_000..26_500_000).contains(&active), "{family:?}: {active}");
            assert_eq!(active < all, matches!(family, Family::Qwen3Moe), "{family:?}: {all}");
        }
    }

    #[test]
    fn of_routed_experts_those_that_a_token_meets_are_active() {
        let sizes = [("mlp.experts.0.up", 10), ("mlp.experts.1.up", 10), ("mlp.gate", 3), ("norm", 2)];
        assert_eq!(count(sizes.into_iter(), 1, 2), [15, 25]);
        assert_eq!(count(sizes.into_iter(), 2, 2), [25, 25]);
    }
}
