//! The attentions of a model's blocks, for sequences of any length.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Device;
use pipewright::nn::{AttentionForm, CausalAttention, RotaryPositions, rotary_frequencies};
use pipewright_shapes::decoder::{DecoderConfig, RopeScaling};

use super::form::{BlockForm, LayerForm, QueryGrowth};
use super::positions::positions;

/// The attentions of all blocks. Blocks with the same form share one, whose tables are kept for the latest
/// sequence length and positions. A run usually has one length.
#[derive(Debug, Clone)]
pub(crate) struct BlockAttentions {
    /// With the width of the rotated elements, in a model whose attention has latents.
    config: DecoderConfig,
    /// The width of a head of queries and keys.
    head_dim: usize,
    /// The width of a head of queries and keys in a cache, which has latents if the attention has them.
    cached_dim: usize,
    /// The factor of the scores.
    scale: f64,
    /// The bound of the scores.
    cap: Option<f64>,
    growth: Option<QueryGrowth>,
    /// The form of each block.
    layers: Vec<LayerForm>,
    latest: Arc<Mutex<Vec<Cached>>>,
}

#[derive(Debug)]
struct Cached {
    layer: LayerForm,
    device: Device,
    positions: RotaryPositions,
    attention: Arc<CausalAttention>,
}

impl Default for BlockAttentions {
    /// Returns the attentions of a model without blocks of causal attention.
    fn default() -> Self {
        Self::new(&DecoderConfig::new(1, 1), &BlockForm::default())
    }
}

impl BlockAttentions {
    pub(crate) fn new(config: &DecoderConfig, form: &BlockForm<'_>) -> Self {
        let mut config = config.clone();
        let [mut head_dim, mut cached_dim] = [config.head_dim(); 2];
        if let Some(latent) = form.latent {
            (head_dim, cached_dim) = (latent.head_dim(), latent.latent_dim());
            config.head_dim = Some(latent.rotated);
        }
        let scale = form.factors.scores.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
        let layers = (0..config.num_hidden_layers).map(|index| form.layer(index)).collect();
        let (cap, growth) = (form.score_cap, form.query_growth);
        Self { config, head_dim, cached_dim, scale, cap, growth, layers, latest: Arc::default() }
    }

    /// Returns the positions of sequences of this length in the blocks that have the model's positions.
    pub(crate) fn positions(&self, sequence: usize) -> RotaryPositions {
        positions(&self.config, sequence)
    }

    /// Returns the form of a block's attention, if these are the positions of the model.
    fn form(&self, block: usize, positions: &RotaryPositions) -> AttentionForm {
        let layer = self.layers[block];
        let usual = AttentionForm::without_positions(self.head_dim);
        let positions = match layer.theta {
            _ if !layer.has_positions => usual.positions,
            None => positions.clone(),
            Some(theta) => {
                let frequencies = rotary_frequencies(self.config.rotary_width(), theta).into();
                RotaryPositions { frequencies, factor: 1.0 }
            }
        };
        let scale = self.scale / layer.score_divisor;
        AttentionForm { positions, scale, window: layer.window, cap: self.cap, ..usual }
    }

    /// Returns the form of a block's attention with a cache.
    pub(crate) fn cached_form(&self, block: usize, positions: &RotaryPositions) -> AttentionForm {
        AttentionForm { head_dim: self.cached_dim, ..self.form(block, positions) }
    }

    /// Returns the factor of the queries of each token, unless all are 1.
    pub(crate) fn query_factors(&self, positions: impl FnOnce() -> Vec<u32>) -> Option<Vec<f32>> {
        let growth = self.growth?;
        let factors: Vec<f32> = positions().into_iter().map(|position| growth.factor(position)).collect();
        factors.iter().any(|&factor| factor != 1.0).then_some(factors)
    }

    /// Returns whether the positions depend on the length of the sequence.
    pub(crate) fn depend_on_length(&self) -> bool {
        self.config.rope_scaling.as_ref().is_some_and(RopeScaling::depends_on_length)
    }

    /// Returns a block's attention over sequences of this length, with these positions.
    pub(crate) fn get(
        &self,
        block: usize,
        sequence: usize,
        positions: &RotaryPositions,
        device: &Device,
    ) -> Arc<CausalAttention> {
        // A panic under the lock cannot leave a partial entry, because entries are added as a whole.
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.retain(|cached| {
            let has_length = cached.attention.sequence() == sequence;
            has_length && &cached.device == device && &cached.positions == positions
        });
        let layer = self.layers[block];
        if let Some(cached) = latest.iter().find(|cached| cached.layer == layer) {
            return Arc::clone(&cached.attention);
        }
        let form = self.form(block, positions);
        let attention = Arc::new(CausalAttention::of(sequence, form, device));
        let (device, positions) = (device.clone(), positions.clone());
        latest.push(Cached { layer, device, positions, attention: Arc::clone(&attention) });
        attention
    }

    /// Returns a block's attention for a microbatch. `make` makes it for the first block of its form.
    pub(crate) fn of_microbatch(
        &self,
        block: usize,
        made: &mut MicrobatchAttentions,
        make: impl FnOnce() -> Arc<CausalAttention>,
    ) -> Arc<CausalAttention> {
        let layer = self.layers[block];
        if let Some((_, attention)) = made.0.iter().find(|(form, _)| *form == layer) {
            return Arc::clone(attention);
        }
        let attention = make();
        made.0.push((layer, Arc::clone(&attention)));
        attention
    }
}

/// The attentions of a stage for a microbatch, one for each form of its blocks.
#[derive(Debug, Default)]
pub(crate) struct MicrobatchAttentions(Vec<(LayerForm, Arc<CausalAttention>)>);
