//! The settings of a mixture of experts, and the layers that have one.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::error::ShapeError;
use crate::key_range::{not_below_zero, require, sizes};

/// The experts of a model; they have the names of Hugging Face's `config.json`.
///
/// Deserialising accepts both names of the number of experts, fills in Hugging Face's defaults, and
/// validates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct MixtureConfig {
    /// The experts of a layer.
    #[serde(default = "num_experts")]
    pub num_experts: usize,
    /// The experts that are chosen for each token.
    #[serde(default = "num_experts_per_tok")]
    pub num_experts_per_tok: usize,
    /// Inner width of an expert.
    #[serde(default = "moe_intermediate_size")]
    pub moe_intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    #[serde(default)]
    pub norm_topk_prob: bool,
    /// Layers whose number, counted from 1, is a multiple of this have experts.
    #[serde(default = "decoder_sparse_step")]
    pub decoder_sparse_step: usize,
    /// Layers, counted from 0, that have no experts whatever their number.
    #[serde(default)]
    pub mlp_only_layers: Vec<usize>,
    /// The weight of the router's balance loss.
    #[serde(default = "router_aux_loss_coef")]
    pub router_aux_loss_coef: f64,
    /// Whether the balance loss is part of the training loss.
    #[serde(default)]
    pub output_router_logits: bool,
}

/// The largest number of experts. A larger one is a mistake, and products with other sizes could overflow.
const MOST_EXPERTS: usize = 1 << 14;

impl MixtureConfig {
    /// Makes the configuration of a model with eight experts in every layer. Each token goes through two of
    /// them, and two experts together are as wide as a dense layer of `intermediate_size`.
    pub fn of_width(intermediate_size: usize) -> Self {
        Self {
            num_experts: 8,
            num_experts_per_tok: 2,
            moe_intermediate_size: intermediate_size.div_ceil(2),
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            router_aux_loss_coef: COEFFICIENT,
            output_router_logits: false,
        }
    }

    /// Returns these experts for a family whose layers all have experts of the width `intermediate_size`, and
    /// which divides the weights of a token's experts by their sum.
    pub fn with_equal_layers(self, intermediate_size: usize) -> Self {
        Self {
            moe_intermediate_size: intermediate_size,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            ..self
        }
    }

    /// Returns the keys of a family whose layers all have experts of the width `intermediate_size`, by the
    /// names that it has in files.
    pub fn of_equal_layers(&self) -> Value {
        json!({
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "router_aux_loss_coef": self.router_aux_loss_coef,
            "output_router_logits": self.output_router_logits,
        })
    }

    /// Returns whether layer `index`, counted from 0, has experts.
    pub fn is_sparse(&self, index: usize) -> bool {
        !self.mlp_only_layers.contains(&index) && (index + 1).is_multiple_of(self.decoder_sparse_step.max(1))
    }

    /// Checks that the sizes make a mixture.
    ///
    /// # Errors
    /// When a key is out of range; the error names the first.
    pub fn validate(&self) -> Result<(), ShapeError> {
        self.validate_as("num_experts")
    }

    /// Validates with `experts` as the name of the number of experts.
    pub fn validate_as(&self, experts: &'static str) -> Result<(), ShapeError> {
        let count = self.num_experts;
        require((1..=MOST_EXPERTS).contains(&count), experts, count, "from 1 to 16384")?;
        let chosen = self.num_experts_per_tok;
        let is_choice = (1..=count).contains(&chosen);
        require(is_choice, "num_experts_per_tok", chosen, "from 1 to the number of experts")?;
        sizes(&[("moe_intermediate_size", self.moe_intermediate_size)])?;
        let step = self.decoder_sparse_step;
        require(step > 0, "decoder_sparse_step", step, "at least 1")?;
        not_below_zero(&[("router_aux_loss_coef", self.router_aux_loss_coef)])
    }
}

/// Hugging Face's default of `router_aux_loss_coef`.
const COEFFICIENT: f64 = 0.001;

/// Hugging Face's default of `num_experts`.
fn num_experts() -> usize {
    128
}

fn num_experts_per_tok() -> usize {
    8
}

fn moe_intermediate_size() -> usize {
    768
}

fn decoder_sparse_step() -> usize {
    1
}

fn router_aux_loss_coef() -> f64 {
    COEFFICIENT
}

impl<'de> Deserialize<'de> for MixtureConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The name up to version 4 of transformers, and in most published models, and the name that version 5 writes.
        let (older, newer) = ("num_experts", "num_local_experts");
        let mut keys = Map::deserialize(deserializer)?;
        keys.retain(|_, value| !value.is_null());
        let mut name = older;
        if let Some(count) = keys.remove(newer) {
            if keys.get(older).is_some_and(|other| *other != count) {
                require(false, newer, &count, "the same as `num_experts`").map_err(D::Error::custom)?;
            }
            keys.insert(older.to_owned(), count);
            name = newer;
        }
        let config = Self::deserialize(Value::Object(keys)).map_err(D::Error::custom)?;
        config.validate_as(name).map_err(D::Error::custom)?;
        Ok(config)
    }
}

impl Serialize for MixtureConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: Value) -> Result<MixtureConfig, String> {
        serde_json::from_value(json).map_err(|error| error.to_string())
    }

    fn check_refused(json: Value, message: &str) {
        assert_eq!(parse(json), Err(message.to_owned()));
    }

    #[test]
    fn both_names_of_the_number_of_experts_are_read() {
        let experts = |json| parse(json).map(|config| config.num_experts);
        assert_eq!(experts(json!({"num_experts": 16})), Ok(16));
        assert_eq!(experts(json!({"num_local_experts": 32})), Ok(32));
        assert_eq!(experts(json!({"num_experts": 9, "num_local_experts": 9})), Ok(9));
        assert_eq!(experts(json!({})), Ok(128));
        check_refused(
            json!({"num_experts": 16, "num_local_experts": 8}),
            "`num_local_experts = 8` is out of range: it must be the same as `num_experts`",
        );
    }

    #[test]
    fn what_is_written_is_read() {
        let config = MixtureConfig {
            mlp_only_layers: vec![0, 3],
            decoder_sparse_step: 2,
            output_router_logits: true,
            ..MixtureConfig::of_width(9)
        };
        let written = serde_json::to_value(&config).expect("plain data");
        assert_eq!(parse(written), Ok(config));
    }

    #[test]
    fn layers_are_sparse_by_their_number() {
        let sparse = |step, dense: &[usize]| {
            let config = MixtureConfig {
                decoder_sparse_step: step,
                mlp_only_layers: dense.to_vec(),
                ..MixtureConfig::of_width(8)
            };
            (0..6).filter(|&layer| config.is_sparse(layer)).collect::<Vec<_>>()
        };
        assert_eq!(sparse(1, &[]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(sparse(2, &[]), [1, 3, 5]);
        assert_eq!(sparse(2, &[3, 4]), [1, 5]);
        assert!(sparse(7, &[]).is_empty());
    }

    #[test]
    fn sizes_that_make_no_mixture_name_their_key() {
        check_refused(
            json!({"num_experts": 0}),
            "`num_experts = 0` is out of range: it must be from 1 to 16384",
        );
        check_refused(
            json!({"num_local_experts": 0}),
            "`num_local_experts = 0` is out of range: it must be from 1 to 16384",
        );
        let choices = |count| json!({"num_experts": 4, "num_experts_per_tok": count});
        let range = "is out of range: it must be from 1 to the number of experts";
        check_refused(choices(5), &format!("`num_experts_per_tok = 5` {range}"));
        check_refused(choices(0), &format!("`num_experts_per_tok = 0` {range}"));
        check_refused(
            json!({"moe_intermediate_size": 0}),
            "`moe_intermediate_size = 0` is out of range: it must be at least 1",
        );
        check_refused(
            json!({"decoder_sparse_step": 0}),
            "`decoder_sparse_step = 0` is out of range: it must be at least 1",
        );
        check_refused(
            json!({"router_aux_loss_coef": -0.1}),
            "`router_aux_loss_coef = -0.1` is out of range: it must be zero or positive",
        );
    }
}
