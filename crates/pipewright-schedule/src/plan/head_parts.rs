//! A profile whose head is cut into another number of parts along the vocabulary, each a layer of its own.
//!
//! A part adds its share of the vocabulary to running statistics of the loss, and sends the hidden states on with them.
//! From the figures of the whole head, a part of `k` has
//!
//! - a `k`-th of its times, its parameters, and what its operations hold only while they run;
//! - of the activations, and of what `W` needs of them, the hidden states as a whole and a `k`-th of the rest;
//! - an output of the size of the hidden states and [`STATISTICS`] bytes a token. The last part has the output of the head.
//!
//! If the last layers of a profile are measured parts ([`HEAD_PART`]), the figures of the whole head are their sums, and
//! the number of parts that was measured keeps its figures.

use std::borrow::Cow;

use crate::profile::{HEAD_PART, LayerProfile, Profile};

/// The bytes of the statistics of a token: the largest logit so far, and the sum of exponentials.
const STATISTICS: u64 = 8;

/// Returns the number of parts of the head in a profile.
pub(super) fn parts_of(profile: &Profile) -> u32 {
    let parts = profile.layers.iter().rev().take_while(|layer| layer.kind == HEAD_PART);
    parts.fold(0u32, |sum, layer| sum.saturating_add(layer.count)).max(1)
}

/// Returns the profile with its head in `parts` parts; `None` for as many as it has.
///
/// ```
/// use pipewright_schedule::plan::with_head_parts;
/// use pipewright_schedule::profile::{LayerProfile, Profile};
/// let head = LayerProfile { kind: "head".into(), forward_s: 4e-3, ..LayerProfile::default() };
/// let profile = Profile { layers: vec![LayerProfile::default(), head], ..Profile::default() };
/// let cut = with_head_parts(&profile, Some(4));
/// let times: Vec<f64> = cut.each_layer().map(|layer| layer.forward_s).collect();
/// assert_eq!(times, [0.0, 1e-3, 1e-3, 1e-3, 1e-3]);
/// ```
pub fn with_head_parts(profile: &Profile, parts: Option<u32>) -> Cow<'_, Profile> {
    let Some(parts) = parts.filter(|&parts| parts > 0 && parts != parts_of(profile)) else {
        return Cow::Borrowed(profile);
    };
    let mut layers = profile.layers.clone();
    let Some(head) = take_head(&mut layers) else { return Cow::Borrowed(profile) };
    let hidden = layers.last().map_or(0, |before| before.output_bytes);
    let tokens = u64::from(profile.tokens.unwrap_or(0)).saturating_mul(u64::from(profile.rows));
    let message = hidden.saturating_add(tokens.saturating_mul(STATISTICS));
    let part = part_of(&head, parts, hidden);
    if parts > 1 {
        layers.push(LayerProfile { count: parts - 1, output_bytes: message, ..part.clone() });
    }
    layers.push(LayerProfile { count: 1, ..part });
    Cow::Owned(Profile { layers, ..profile.clone() })
}

/// Removes the head from the layers, and returns it as one layer.
fn take_head(layers: &mut Vec<LayerProfile>) -> Option<LayerProfile> {
    let first = layers.iter().rposition(|layer| layer.kind != HEAD_PART).map_or(0, |before| before + 1);
    if first == layers.len() {
        let last = layers.last_mut()?;
        let head = LayerProfile { count: 1, ..last.clone() };
        last.count -= 1;
        layers.retain(|layer| layer.count > 0);
        return Some(head);
    }
    let parts = layers.split_off(first);
    let hidden = layers.last().map_or(0, |before| before.output_bytes);
    Some(joined(&parts, hidden))
}

/// Returns the head with these parts, which all keep their input of the size `hidden`.
fn joined(parts: &[LayerProfile], hidden: u64) -> LayerProfile {
    let seconds =
        |of: &dyn Fn(&LayerProfile) -> f64| parts.iter().map(|it| of(it) * f64::from(it.count)).sum();
    let bytes = |of: &dyn Fn(&LayerProfile) -> u64| {
        parts.iter().fold(0u64, |sum, it| sum.saturating_add(of(it).saturating_mul(u64::from(it.count))))
    };
    let beyond = |all: u64| all.saturating_sub(hidden);
    LayerProfile {
        kind: "head".to_owned(),
        count: 1,
        forward_s: seconds(&|part| part.forward_s),
        input_backward_s: seconds(&|part| part.input_backward_s),
        weight_backward_s: seconds(&|part| part.weight_backward_s),
        recompute_s: Some(seconds(&|part| part.recompute_s.unwrap_or(part.forward_s))),
        optimizer_s: seconds(&|part| part.optimizer_s),
        output_bytes: parts.last().map_or(0, |part| part.output_bytes),
        parameter_bytes: bytes(&|part| part.parameter_bytes),
        activation_bytes: hidden.saturating_add(bytes(&|part| beyond(part.activation_bytes))),
        weight_activation_bytes: Some(hidden.saturating_add(bytes(&|part| beyond(part.stash_bytes())))),
        temporary_bytes: bytes(&|part| part.temporary_bytes),
        tensor_sums: parts.iter().filter_map(|part| part.tensor_sums).max(),
    }
}

/// Returns one of the parts of a head.
fn part_of(head: &LayerProfile, parts: u32, hidden: u64) -> LayerProfile {
    if parts == 1 {
        return head.clone();
    }
    let (share, divisor) = (1.0 / f64::from(parts), u64::from(parts));
    let kept = |all: u64| {
        let whole = hidden.min(all);
        whole + (all - whole).div_ceil(divisor)
    };
    LayerProfile {
        kind: HEAD_PART.to_owned(),
        count: 1,
        forward_s: head.forward_s * share,
        input_backward_s: head.input_backward_s * share,
        weight_backward_s: head.weight_backward_s * share,
        recompute_s: head.recompute_s.map(|seconds| seconds * share),
        optimizer_s: head.optimizer_s * share,
        output_bytes: head.output_bytes,
        parameter_bytes: head.parameter_bytes.div_ceil(divisor),
        activation_bytes: kept(head.activation_bytes),
        weight_activation_bytes: Some(kept(head.stash_bytes())),
        temporary_bytes: head.temporary_bytes.div_ceil(divisor),
        tensor_sums: head.tensor_sums,
    }
}
