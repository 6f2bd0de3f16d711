//! The description of a model as a list of layers with sizes and costs.

use pipewright_schedule::LayerDesc;
use pipewright_shapes::decoder::{DecoderConfig, MixtureConfig};
use pipewright_shapes::model::Latent;
use pipewright_shapes::vectors::QueryKeyNorm;

use super::form::{Activation, BlockForm, NormPlaces};
use crate::attention::AttentionSizes;
use crate::cost::{
    self, BIAS_PASSES, Cost, FLOAT, GATE_PASSES, HiddenKept, LOSS_PASSES, ModelSizes, NORM_PASSES,
};
use crate::delta;
use crate::experts::ExpertForm;
use crate::latent_attention::LatentForm;
use crate::mamba;

/// Returns the layers in order; see [`ModelFamily::describe`](crate::ModelFamily::describe).
pub(crate) fn describe(config: &DecoderConfig, form: &BlockForm<'_>, sizes: &ModelSizes) -> Vec<LayerDesc> {
    let ModelSizes { hidden, outputs, tokens, .. } = *sizes;
    let centring = cost::centring(hidden, form.norm(config));
    let norms = block_norms(config, form);
    // The norms before an attention and before a dense feed-forward layer. A layer normalisation, and a
    // norm before a mixture, whose experts keep rows of its result, are not computed again.
    let before = if form.norms == NormPlaces::After || form.norm(config).centres { 0 } else { hidden };
    let block = |index| {
        let (kinds, feed_forward) = match form.mixture_of(index) {
            Some(mixture) => {
                let routed = experts(config, mixture, tokens);
                let routed = routed + expert_parts(config, form, mixture);
                (["mixture", "linear_mixture", "mamba_mixture"], routed + shared_expert(form))
            }
            None => (["decoder", "linear", "mamba"], dense(config, form)),
        };
        let seen = form.layer(index).seen(tokens);
        let (delta, mamba, latent) = (form.delta_of(index), form.mamba_of(index), form.latent);
        let has_state = delta.is_some() || mamba.is_some();
        let attention = match (&delta, &mamba, latent) {
            (Some(delta), ..) => delta::cost(&delta.sizes),
            (None, Some(mamba), _) => mamba::cost(&mamba.sizes),
            (None, None, Some(latent)) => latent_attention(config, latent, form, seen),
            (None, None, None) => attention(config, form, seen),
        };
        let count = if form.mixture_of(index).is_some() { 1 } else { 2 };
        let again = Cost { norms: count * before, ..Cost::default() };
        let cost = attention + feed_forward + norms + again;
        let path = form.names.of(&format!("model.layers.{index}"));
        let kind = if mamba.is_some() { 2 } else { usize::from(has_state) };
        let layer = sizes.block(index, path, kinds[kind], cost);
        let keys_values = match (has_state, latent) {
            (true, _) => 0,
            (false, Some(latent)) => (config.num_attention_heads * (latent.head_dim() + latent.value)) as u64,
            (false, None) => 2 * (config.num_key_value_heads * config.head_dim()) as u64,
        };
        LayerDesc { keys_values_bytes: tokens * FLOAT * keys_values, ..layer }
    };
    let embedding = sizes.embedding(&form.names.of("model.embed_tokens"));
    // A token reads its vector and adds it, in both directions. The ids of the positions are kept.
    let positions = u64::from(form.position_table.is_some());
    let mut layers = vec![LayerDesc {
        weight: embedding.weight + positions * cost::ELEMENT * POSITION_PASSES * hidden,
        activation_bytes: embedding.activation_bytes + positions * tokens * cost::TOKEN_ID,
        ..embedding
    }];
    layers.extend((0..config.num_hidden_layers).map(block));
    // The tape also keeps the tanh of bounded logits.
    let cap = form.logit_cap.filter(|_| config.labels.is_empty());
    let bounded = Cost { kept: cap.map_or(0, |_| outputs), ..Cost::default() };
    layers.push(sizes.head(1, sizes.head_cost() + centring + bounded));
    layers
}

/// Returns the numbers of hidden states that a dense model keeps: its norms have them.
pub(crate) fn hidden_kept(config: &DecoderConfig, form: &BlockForm<'_>) -> HiddenKept {
    HiddenKept { block: block_norms(config, form).kept, head: hidden_norm(config, form).kept }
}

/// Returns the costs of the norms of the hidden states in a block.
fn block_norms(config: &DecoderConfig, form: &BlockForm<'_>) -> Cost {
    let norm = hidden_norm(config, form);
    let pair = norm + norm;
    // The result of a norm after a part is added to the hidden states, and nothing keeps it.
    let after = Cost { kept: norm.kept - config.hidden_size as u64, ..norm };
    if form.norms == NormPlaces::Both { pair + after + after } else { pair }
}

fn hidden_norm(config: &DecoderConfig, form: &BlockForm<'_>) -> Cost {
    let hidden = config.hidden_size as u64;
    cost::norm(hidden) + cost::centring(hidden, form.norm(config))
}

/// Element-wise passes of the vectors of positions: they are copied, added, and their gradients are summed.
const POSITION_PASSES: u64 = 8;

/// Element-wise passes of an expert's rows: they are gathered and summed in both directions, and weighted.
const ROW_PASSES: u64 = 10;
/// Element-wise passes of an expert's matrices in a microbatch: the products read them in both directions and
/// add to their gradients. A dense layer has so many rows for each matrix that this does not matter.
const MATRIX_PASSES: u64 = 4;

/// Returns the costs of the attention with its biases and the normalisation of heads, if a token sees half of
/// `seen` keys on average.
fn attention(config: &DecoderConfig, form: &BlockForm<'_>, seen: u64) -> Cost {
    let sizes = AttentionSizes::from(config);
    let (queries, keys) = (sizes.shape().query_width(), sizes.shape().key_width());
    let inputs = if form.bias.inputs { queries + 2 * keys } else { 0 };
    let biases = inputs + if form.bias.output { sizes.hidden as u64 } else { 0 };
    let normalised = if form.head_norms == QueryKeyNorm::None { 0 } else { queries + keys };
    let further = Cost {
        elements: BIAS_PASSES * biases + NORM_PASSES * normalised,
        ..Cost::keeping(sizes.shape().norms_kept(form.head_norms))
    };
    // The sigmoid of the gate, and what it multiplies.
    let gated = if form.has_output_gate { queries } else { 0 };
    let gate = Cost { elements: GATE_PASSES * gated, kept: 2 * gated, ..Cost::default() };
    cost::attention(sizes, seen) + further + gate
}

/// Element-wise passes of the queries, keys and values of a latent attention: their heads are taken apart and
/// put together in both directions.
const HEAD_PASSES: u64 = 8;

/// Returns the costs of a latent attention, if a token sees half of `seen` keys on average.
fn latent_attention(config: &DecoderConfig, latent: LatentForm, form: &BlockForm<'_>, seen: u64) -> Cost {
    let [hidden, heads] = [config.hidden_size, config.num_attention_heads].map(|size| size as u64);
    let [key_rank, rotated, unrotated, value] =
        [latent.key_rank, latent.rotated, latent.unrotated, latent.value].map(|size| size as u64);
    let (queries, values) = (heads * (rotated + unrotated), heads * value);
    let query_rank = latent.query_rank.map(|rank| rank as u64);
    let attention = Latent {
        heads,
        query_rank,
        key_value_rank: key_rank,
        plain_size: unrotated,
        rotary_size: rotated,
        value_size: value,
        gate: 0,
        indexer: None,
    };
    let of_latents = query_rank.unwrap_or(0) + key_rank + rotated;
    let inputs = if form.bias.inputs { of_latents } else { 0 };
    let biases = inputs + if form.bias.output { hidden } else { 0 };
    let products = Cost {
        mixing: 3 * seen * (queries + values),
        elements: BIAS_PASSES * biases + HEAD_PASSES * (2 * queries + values),
        ..Cost::keeping(attention.kept())
    };
    let norm = cost::norm_of_products;
    products + norm(key_rank) + query_rank.map_or_else(Cost::default, norm)
}

fn dense(config: &DecoderConfig, form: &BlockForm<'_>) -> Cost {
    let (hidden, inner) = (config.hidden_size as u64, config.intermediate_size as u64);
    let (layer, outputs, result) = if form.has_no_gate {
        (cost::ungated(inner), inner, 0)
    } else {
        // The result of the activation, which is multiplied by up.
        (cost::gated(inner), 2 * inner, inner)
    };
    let biases = if form.mlp_bias { outputs + hidden } else { 0 };
    // With a gate, the result of GELU is multiplied. On other devices, the composition of GELU keeps the tanh and the sum with 1.
    let is_gelu = form.activation == Activation::GeluTanh;
    let (kept, kept_on_devices) = if is_gelu { (result, 2 * inner as i64) } else { (0, 0) };
    // Only SwiGLU is computed again.
    let feed_forward = if is_gelu { 0 } else { layer.feed_forward };
    let layer = Cost { feed_forward, ..layer };
    layer + Cost { elements: BIAS_PASSES * biases, kept, kept_on_devices, ..Cost::default() }
}

/// Returns the costs of a mixture. A token meets the router and the experts that it chose; the matrices of
/// all experts that any token chose are moved once for the whole microbatch.
fn experts(config: &DecoderConfig, mixture: &MixtureConfig, tokens: u64) -> Cost {
    let (hidden, inner) = (config.hidden_size as u64, mixture.moe_intermediate_size as u64);
    let (experts, chosen) = (mixture.num_experts as u64, mixture.num_experts_per_tok as u64);
    let met = experts.min(tokens.saturating_mul(chosen));
    let moved = MATRIX_PASSES * met * 3 * hidden * inner / tokens.max(1);
    let element_wise = GATE_PASSES * chosen * inner + ROW_PASSES * chosen * hidden + LOSS_PASSES * experts;
    Cost {
        elements: element_wise + moved,
        // The probabilities; and of each chosen expert also its weight, and its number twice.
        kept: experts + chosen * (cost::gated(inner).kept + 1 + 2 * NUMBER),
        ..Cost::default()
    }
}

/// Returns the costs of the biases of a router and its experts, and what devices keep for the experts.
fn expert_parts(config: &DecoderConfig, form: &BlockForm<'_>, mixture: &MixtureConfig) -> Cost {
    let ExpertForm { has_bias, .. } = form.experts;
    let (hidden, inner) = (config.hidden_size as u64, mixture.moe_intermediate_size as u64);
    let (experts, chosen) = (mixture.num_experts as u64, mixture.num_experts_per_tok as u64);
    let bias = if has_bias { 2 * inner + hidden } else { 0 };
    let router = if has_bias { experts } else { 0 };
    Cost {
        elements: BIAS_PASSES * (chosen * bias + router),
        kept_on_devices: cost::mixture_on_devices(chosen, hidden),
        ..Cost::default()
    }
}

/// Returns the costs of the expert that every token goes through, with its gate.
fn shared_expert(form: &BlockForm<'_>) -> Cost {
    let gate = Cost { kept: 1, ..Cost::default() };
    form.shared_expert.map_or_else(Cost::default, |shared| {
        let expert = cost::gated(shared.inner as u64);
        if shared.has_gate { expert + gate } else { expert }
    })
}

/// The size of an expert's number, in floats.
const NUMBER: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(form: &BlockForm<'_>) -> Vec<LayerDesc> {
        let config = DecoderConfig::new(256, 4);
        let hidden = config.hidden_size as u64;
        let sizes = ModelSizes {
            hidden,
            vocabulary: 256,
            outputs: 256,
            head: "lm_head",
            is_tied: false,
            tokens: 5,
            counts: Vec::new(),
        };
        describe(&config, form, &sizes)
    }

    #[test]
    fn the_norms_of_latents_may_be_computed_again() {
        let norms = |latent| {
            let form = BlockForm { latent, ..BlockForm::default() };
            layers(&form)[1].norms_bytes
        };
        let latent = LatentForm {
            query_rank: Some(24),
            key_rank: 16,
            rotated: 8,
            unrotated: 8,
            value: 8,
            is_interleaved: false,
        };
        // 5 tokens in single precision.
        assert_eq!(norms(Some(latent)) - norms(None), 5 * (24 + 16) * 4);
        assert_eq!(norms(Some(LatentForm { query_rank: None, ..latent })) - norms(None), 5 * 16 * 4);
    }

    #[test]
    fn bounded_logits_are_kept_twice() {
        let kept = |logit_cap| {
            let form = BlockForm { logit_cap, ..BlockForm::default() };
            layers(&form).last().map_or(0, |head| head.activation_bytes)
        };
        // 5 tokens and 256 ids in single precision.
        assert_eq!(kept(Some(30.0)) - kept(None), 5 * 256 * 4);
    }
}
