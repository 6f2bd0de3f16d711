//! A profile whose head is cut into another number of parts along the vocabulary, each a layer of its own.
//!
//! A part adds its share of the vocabulary to running statistics of the loss, and sends the hidden states on
//! with them. From the figures of the whole head, a part of `k` has
//!
//! - a `k`-th of its times, its parameters, their optimizer's state, and what its operations hold only while
//!   they run;
//! - of the activations, and of what `W` needs of them, the normalised hidden states as a whole, a `k`-th of
//!   the rest, and [`KEPT`] bytes per token; the first part also has the hidden states before the norm, as
//!   the head has;
//! - an output of the size of the hidden states and [`STATISTICS`] bytes per token. The last part has the
//!   output of the head.
//!
//! Parts in one stage, or in stages that follow each other on a rank, hold the same normalised hidden states,
//! which count once ([`shared_bytes`]).
//!
//! If the last layers of a profile are measured parts ([`HEAD_PART`]), the figures of the whole head are
//! their sums, and the number of parts that was measured keeps its figures.

use std::borrow::Cow;

use crate::profile::{HEAD_PART, LayerProfile, Profile};

/// The bytes of the statistics of a token: the largest logit so far, and the sum of exponentials.
const STATISTICS: u64 = 8;
/// The bytes of a token that a part keeps besides: the statistics before and after it, the id of the target,
/// and its place.
const KEPT: u64 = 32;

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
    let common = Common::of(profile, layers.last());
    let head = common.joined(&head);
    match parts {
        1 => layers.push(head),
        _ => layers.extend(common.parts(&head, parts)),
    }
    Cow::Owned(Profile { layers, ..profile.clone() })
}

/// Returns for each layer of a profile the bytes that it keeps and that the layer before it also keeps, if
/// both are in one stage: for all parts of a head but the first one, the normalised hidden states.
pub(super) fn shared_bytes(profile: &Profile) -> impl Iterator<Item = u64> {
    let (mut hidden, mut follows) = (0, false);
    profile.each_layer().map(move |layer| {
        let is_part = layer.kind == HEAD_PART;
        if !is_part {
            hidden = layer.output_bytes;
        }
        let shared = if is_part && follows { hidden } else { 0 };
        follows = is_part;
        shared
    })
}

/// Removes the head from the layers, and returns it: its parts, or one layer.
fn take_head(layers: &mut Vec<LayerProfile>) -> Option<Vec<LayerProfile>> {
    let first = layers.iter().rposition(|layer| layer.kind != HEAD_PART).map_or(0, |before| before + 1);
    if first < layers.len() {
        return Some(layers.split_off(first));
    }
    let last = layers.last_mut()?;
    let head = LayerProfile { count: 1, ..last.clone() };
    last.count -= 1;
    layers.retain(|layer| layer.count > 0);
    Some(vec![head])
}

/// The bytes that a head and its parts have in common.
struct Common {
    /// The hidden states.
    hidden: u64,
    /// The statistics that a part sends.
    statistics: u64,
    /// The bytes that a part keeps besides the hidden states and logits.
    kept: u64,
}

impl Common {
    /// Takes the sizes from a profile. `before` is the layer before the head.
    fn of(profile: &Profile, before: Option<&LayerProfile>) -> Self {
        let tokens = u64::from(profile.tokens.unwrap_or(0)).saturating_mul(u64::from(profile.rows));
        Self {
            hidden: before.map_or(0, |before| before.output_bytes),
            statistics: tokens.saturating_mul(STATISTICS),
            kept: tokens.saturating_mul(KEPT),
        }
    }

    /// Returns the head with these parts, or the head itself.
    fn joined(&self, parts: &[LayerProfile]) -> LayerProfile {
        if let [head] = parts
            && head.kind != HEAD_PART
        {
            return head.clone();
        }
        let seconds =
            |of: &dyn Fn(&LayerProfile) -> f64| parts.iter().map(|it| of(it) * f64::from(it.count)).sum();
        let bytes = |of: &dyn Fn(&LayerProfile) -> u64| {
            parts.iter().fold(0u64, |sum, it| sum.saturating_add(of(it).saturating_mul(u64::from(it.count))))
        };
        let if_all = |of: fn(&LayerProfile) -> Option<u64>| {
            parts.iter().all(|part| of(part).is_some()).then(|| bytes(&|part| of(part).unwrap_or(0)))
        };
        let beyond = |all: u64| all.saturating_sub(self.hidden).saturating_sub(self.kept);
        LayerProfile {
            kind: "head".to_owned(),
            forward_s: seconds(&|part| part.forward_s),
            input_backward_s: seconds(&|part| part.input_backward_s),
            weight_backward_s: seconds(&|part| part.weight_backward_s),
            backward_s: parts
                .iter()
                .any(|part| part.backward_s.is_some())
                .then(|| seconds(&LayerProfile::whole_backward_s)),
            recompute_s: Some(seconds(&|part| part.recompute_s.unwrap_or(part.forward_s))),
            exchange_s: seconds(&|part| part.exchange_s),
            optimizer_s: seconds(&|part| part.optimizer_s),
            output_bytes: parts.last().map_or(0, |part| part.output_bytes),
            parameter_bytes: bytes(&|part| part.parameter_bytes),
            trained_bytes: parts
                .iter()
                .any(|part| part.trained_bytes.is_some())
                .then(|| bytes(&LayerProfile::gradient_bytes)),
            activation_bytes: self.hidden.saturating_add(bytes(&|part| beyond(part.activation_bytes))),
            weight_activation_bytes: Some(
                self.hidden.saturating_add(bytes(&|part| beyond(part.stash_bytes()))),
            ),
            temporary_bytes: bytes(&|part| part.temporary_bytes),
            tensor_sums: parts.iter().filter_map(|part| part.tensor_sums).max(),
            optimizer_bytes: if_all(|part| part.optimizer_bytes),
            held_bytes: if_all(|part| part.held_bytes),
            streamed_bytes: bytes(&|part| part.streamed_bytes),
            read_whole_bytes: [0, 1].map(|index| bytes(&|part| part.read_whole_bytes[index])),
            unstreamed_bytes: bytes(&|part| part.unstreamed_bytes),
            copy_bytes: if_all(|part| part.copy_bytes),
            ..LayerProfile::default()
        }
    }

    /// Returns `parts` parts of a head, at least two.
    fn parts(&self, head: &LayerProfile, parts: u32) -> Vec<LayerProfile> {
        let (share, divisor) = (1.0 / f64::from(parts), u64::from(parts));
        // A part keeps the normalised hidden states, and its share of what the head keeps besides `whole`.
        let kept = |all: u64, whole: u64| {
            let rest = all.saturating_sub(whole).div_ceil(divisor);
            self.hidden.saturating_add(rest).saturating_add(self.kept)
        };
        let last = LayerProfile {
            kind: HEAD_PART.to_owned(),
            forward_s: head.forward_s * share,
            input_backward_s: head.input_backward_s * share,
            weight_backward_s: head.weight_backward_s * share,
            backward_s: head.backward_s.map(|seconds| seconds * share),
            recompute_s: head.recompute_s.map(|seconds| seconds * share),
            optimizer_s: head.optimizer_s * share,
            output_bytes: head.output_bytes,
            parameter_bytes: head.parameter_bytes.div_ceil(divisor),
            trained_bytes: head.trained_bytes.map(|bytes| bytes.div_ceil(divisor)),
            activation_bytes: kept(head.activation_bytes, self.hidden.saturating_mul(2)),
            weight_activation_bytes: Some(kept(head.stash_bytes(), self.hidden)),
            temporary_bytes: head.temporary_bytes.div_ceil(divisor),
            tensor_sums: head.tensor_sums,
            optimizer_bytes: head.optimizer_bytes.map(|bytes| bytes.div_ceil(divisor)),
            held_bytes: head.held_bytes.map(|bytes| bytes.div_ceil(divisor)),
            streamed_bytes: head.streamed_bytes.div_ceil(divisor),
            read_whole_bytes: head.read_whole_bytes.map(|bytes| bytes.div_ceil(divisor)),
            unstreamed_bytes: head.unstreamed_bytes.div_ceil(divisor),
            copy_bytes: head.copy_bytes.map(|bytes| bytes.div_ceil(divisor)),
            // Parts share the normalised hidden states, so none of them computes norms again.
            ..LayerProfile::default()
        };
        let inner =
            LayerProfile { output_bytes: self.hidden.saturating_add(self.statistics), ..last.clone() };
        let activation_bytes = inner.activation_bytes.saturating_add(self.hidden);
        let first = LayerProfile { activation_bytes, ..inner.clone() };
        let all = [first, LayerProfile { count: parts - 2, ..inner }, last];
        all.into_iter().filter(|part| part.count > 0).collect()
    }
}
