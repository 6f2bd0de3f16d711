//! Families whose models have the form of [`decoder`](crate::decoder): each says only in what its blocks
//! differ.

use std::fmt::Debug;

use pipewright_schedule::LayerDesc;
use pipewright_shapes::ShapeError;
use pipewright_shapes::family::Family;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::attention::{Attention, AttentionSizes, InputNorms};
use crate::block::{Attends, Block, Branch, Mixer};
use crate::cost::{HiddenKept, ModelSizes};
use crate::decoder::{
    self, BlockAttentions, BlockForm, DecoderConfig, FeedForward, LayerWindows, MixtureConfig, NormPlaces,
    QueryKeyNorm,
};
use crate::delta::{self, GatedDelta};
use crate::embedding_layer::EmbeddingLayer;
use crate::error::ModelError;
use crate::family::{Composition, family_json};
use crate::head_form::HeadForm;
use crate::init::SeededInit;
use crate::latent_attention::LatentAttention;
use crate::mamba::{self, MambaMixer};
use crate::parameter::{Builder, ParameterSource, ParameterSpec};
use crate::stage::StageLayer;

/// The path of the table of positions.
const POSITION_TABLE: &str = "model.embed_positions";

/// Why a model with linear attention cannot run slices of microbatches.
const NO_SLICES_OF_STATES: &str = "its linear attention does not pass its state from slice to slice";

/// A family of decoder-only models. [`From`] returns the family's model of some sizes, with its usual values
/// for everything else.
pub(crate) trait DecoderFamily:
    From<DecoderConfig> + Clone + Debug + Send + Sync + Serialize + DeserializeOwned + 'static
{
    /// The row of the family in the tables.
    const ROW: Family;
    /// The key that names the activation in files, and its only value.
    const ACTIVATION: (&'static str, &'static str) = ("hidden_act", "silu");
    /// Whether a part of a head's elements may be rotated.
    const ROTATES_PARTS: bool = false;

    /// Returns the sizes and constants.
    fn decoder(&self) -> &DecoderConfig;

    /// Returns the form of the model.
    fn form(&self) -> BlockForm<'_>;

    /// Returns the windows of the model by the keys of Qwen2, in a family that has these keys.
    fn windows(&self) -> Option<&LayerWindows> {
        None
    }

    /// Returns the standard deviation of a parameter's initial values, by its path.
    fn deviation_of(&self, _parameter: &str) -> f64 {
        self.decoder().initializer_range
    }

    /// Checks the values that the family has in addition to [`DecoderConfig`].
    ///
    /// # Errors
    /// When a value is out of range.
    fn check_own(&self) -> Result<(), ShapeError> {
        Ok(())
    }
}

impl<F: DecoderFamily> Composition for F {
    const FAMILY: Family = F::ROW;

    fn of_sizes(sizes: DecoderConfig) -> Self {
        sizes.into()
    }

    fn to_json(&self) -> Value {
        let mut json = family_json(self);
        let (key, activation) = F::ACTIVATION;
        json[key] = activation.into();
        if F::ROTATES_PARTS {
            // Readers do not assume 1 for all families.
            json["rope_parameters"]["partial_rotary_factor"] = self.decoder().partial_rotary_factor.into();
        }
        if let Some(keys) = json.as_object_mut() {
            for (in_files, name) in F::ROW.renamed {
                if let Some(value) = keys.remove(*name) {
                    keys.insert((*in_files).to_owned(), value);
                }
            }
        }
        json
    }

    fn check(&self) -> Result<(), ShapeError> {
        let (key, share) = ("partial_rotary_factor", self.decoder().partial_rotary_factor);
        if share != 1.0 && !F::ROTATES_PARTS {
            return Err(ShapeError::not_supported(key, &share.to_string(), "1"));
        }
        self.check_own()
    }

    fn check_all(&self) -> Result<(), ShapeError> {
        self.check()?;
        self.form().mixture.map_or(Ok(()), MixtureConfig::validate)?;
        self.decoder().validate()
    }

    fn describe(&self, sizes: &ModelSizes) -> Vec<LayerDesc> {
        decoder::describe(self.decoder(), &self.form(), sizes)
    }

    fn inner_layers(&self) -> usize {
        self.decoder().num_hidden_layers
    }

    fn head(&self) -> HeadForm {
        let (decoder, form) = (self.decoder(), self.form());
        let head = HeadForm {
            names: form.names,
            factor: form.factors.logits,
            cap: form.logit_cap,
            ..HeadForm::new(
                ["model.norm", "model.embed_tokens"],
                form.norm(decoder),
                [decoder.vocab_size, decoder.hidden_size],
                decoder.tie_word_embeddings,
            )
        };
        if decoder.labels.is_empty() { head } else { head.of_labels(decoder.labels.len()) }
    }

    fn labels(&self) -> &[String] {
        &self.decoder().labels
    }

    fn initial(&self, seed: u64) -> Box<dyn ParameterSource + '_> {
        Box::new(Initial { family: self, seed })
    }

    fn longest(&self) -> Option<usize> {
        self.decoder().max_position_embeddings
    }

    fn has_unused_window(&self) -> bool {
        let has_window = self.windows().is_some_and(|windows| windows.sliding_window.is_some());
        has_window && self.form().layers.iter().all(|layer| layer.window.is_none())
    }

    fn positions(&self) -> Option<usize> {
        self.form().position_table
    }

    /// Returns a reason if the model classifies sequences, whose accuracy is that of whole rows, if layers have a state, or if
    /// the balance loss of routers is part of the loss: it depends on all tokens of a microbatch together.
    fn refuses_slices(&self) -> Option<String> {
        let form = self.form();
        if !self.decoder().labels.is_empty() {
            return Some("its labels are of whole rows".to_owned());
        }
        if form.delta.is_some() {
            return Some(NO_SLICES_OF_STATES.to_owned());
        }
        if (0..self.inner_layers()).any(|index| form.mamba_of(index).is_some()) {
            return Some(mamba::NO_SLICES.to_owned());
        }
        form.mixture.filter(|mixture| mixture.output_router_logits)?;
        let layer = (0..self.inner_layers()).find(|&index| form.mixture_of(index).is_some())?;
        let path = form.names.of(&format!("model.layers.{layer}.mlp.gate"));
        Some(format!(
            "the balance loss of the router `{path}` depends on whole microbatches, so set `output_router_logits = false` \
             to train without it"
        ))
    }

    fn hidden_kept(&self) -> Option<HiddenKept> {
        let form = self.form();
        let has_states = form.delta.is_some() || form.mamba.is_some();
        let is_dense = form.mixture.is_none() && form.latent.is_none() && !has_states;
        is_dense.then(|| decoder::hidden_kept(self.decoder(), &form))
    }

    fn refuses_shares(&self) -> Option<String> {
        let form = self.form();
        let reason = if form.mixture.is_some() {
            "the routers of its mixtures need all tokens on every rank"
        } else if form.latent.is_some() {
            "the latents of its attentions are computed for all tokens on every rank"
        } else if form.delta.is_some() {
            "its linear attention is computed for all tokens on every rank"
        } else if form.mamba.is_some() {
            "its Mamba layers are computed for all tokens on every rank"
        } else if !self.decoder().labels.is_empty() {
            "its head of labels needs all tokens on every rank"
        } else {
            return None;
        };
        Some(reason.to_owned())
    }

    fn inputs_first(&self) -> bool {
        self.form().inputs_first
    }

    fn attentions(&self) -> BlockAttentions {
        BlockAttentions::new(self.decoder(), &self.form())
    }

    fn add_embeddings(
        &self,
        layer: &mut EmbeddingLayer,
        builder: &mut Builder<'_>,
    ) -> Result<(), ModelError> {
        let form = self.form();
        layer.factor = form.factors.embedding;
        let width = self.decoder().hidden_size;
        let table = form.position_table.map(|positions| builder.embedding(POSITION_TABLE, positions, width));
        layer.positions = table.transpose()?;
        Ok(())
    }

    /// Builds a block of an attention and a feed-forward layer.
    fn build_inner(&self, index: usize, builder: &mut Builder<'_>) -> Result<StageLayer, ModelError> {
        let (config, form) = (self.decoder(), self.form());
        let (path, residual) = (format!("model.layers.{index}"), form.factors.residual);
        let norm = |builder: &mut Builder<'_>, has_norm: bool, name: &str| {
            let mut build =
                || builder.form_norm(&format!("{path}.{name}"), config.hidden_size, form.norm(config));
            has_norm.then(&mut build).transpose()
        };
        let [is_before, is_after, is_both] =
            [NormPlaces::Before, NormPlaces::After, NormPlaces::Both].map(|places| form.norms == places);
        let before = norm(builder, !is_after, "input_layernorm")?;
        let mixer = if let Some(delta) = form.delta_of(index) {
            let (sizes, path) = ((config.hidden_size, config.rms_norm_eps), format!("{path}.linear_attn"));
            Mixer::Delta(GatedDelta::build(delta, sizes, &path, builder)?)
        } else if let Some(mamba) = form.mamba_of(index) {
            // Every rank computes the whole mixer.
            Mixer::Mamba(MambaMixer::build(mamba, config.hidden_size, &format!("{path}.mamba"), builder)?)
        } else {
            attention(config, &form, &format!("{path}.self_attn"), builder)?
        };
        let between = norm(builder, true, "post_attention_layernorm")?;
        let before_mlp = norm(builder, is_both, "pre_feedforward_layernorm")?;
        let mlp = FeedForward::build(config, &form, index, &format!("{path}.mlp"), builder)?;
        let after = norm(builder, !is_before, "post_feedforward_layernorm")?;
        // The only norm between them is before the feed-forward layer if none is after it.
        let (after_attention, before_mlp) = if is_before { (None, between) } else { (between, before_mlp) };
        let attends = Attends::Causal { block: index, head_dim: config.head_dim() };
        let attention = Branch {
            norm_after: after_attention,
            path: builder.named(&format!("{path}.self_attn")).into(),
            factor: residual,
            ..Branch::new(before, mixer, attends.clone())
        };
        let mlp = Branch {
            norm_after: after,
            path: builder.named(&format!("{path}.mlp")).into(),
            factor: residual,
            ..Branch::new(before_mlp, Mixer::FeedForward(mlp), attends)
        };
        Ok(StageLayer::Block(Block { branches: vec![attention, mlp] }))
    }
}

/// The initial parameters of a model.
struct Initial<'a, F> {
    family: &'a F,
    seed: u64,
}

impl<F: DecoderFamily> ParameterSource for Initial<'_, F> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        let form = self.family.form();
        let own = match form.mamba {
            Some(mamba) => mamba::initial(self.seed, &mamba, spec),
            None => form.delta.and_then(|_| delta::initial(self.seed, spec)),
        };
        let deviation = self.family.deviation_of(&spec.path);
        own.map_or_else(|| SeededInit { seed: self.seed, deviation }.parameter(spec), Ok)
    }
}

/// Builds the attention of a block.
fn attention(
    config: &DecoderConfig,
    form: &BlockForm<'_>,
    path: &str,
    builder: &mut Builder<'_>,
) -> Result<Mixer, ModelError> {
    let sizes = AttentionSizes::from(config);
    if let Some(latent) = form.latent {
        return LatentAttention::build(sizes, latent, form.bias, path, builder).map(Mixer::Latent);
    }
    if form.joins_projections {
        return Attention::build_joined(sizes, form.bias, path, builder).map(Mixer::Attention);
    }
    let joins_heads = form.head_norms == QueryKeyNorm::All;
    let norms = InputNorms { form: form.norm(config), joins_heads };
    let norms = (form.head_norms != QueryKeyNorm::None).then_some(norms);
    let attention = Attention::build(sizes, form.bias, norms, form.has_output_gate, path, builder)?;
    let attention = if form.has_sinks { attention.with_sinks(sizes, path, builder)? } else { attention };
    Ok(Mixer::Attention(attention))
}
