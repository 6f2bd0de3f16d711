//! Costs that were not measured: estimates from the operations and bytes of a model and the peak rates of a
//! device.
//!
//! **Model.** A matrix with `p` parameters takes `2 p` operations per token in each of `F`, `I` and `W`. A
//! third of all other operations, such as the scores of attention, is in `F` and the rest in `I`. A
//! computation lasts as long as its operations at the peak rate of the arithmetic, or its bytes at the peak
//! rate of the memory, whichever is longer. The optimizer reads a parameter, its gradient and two moments,
//! and writes all but the gradient.
//!
//! A frozen layer has no `W`, and the layers before the first trained one have no `I` either. The matrices of
//! adapters take part in `F`, `I` and `W` like other matrices, and only they have `W` and the optimizer.
//!
//! An estimate assumes that the device reaches its peaks, so its times are too short. Plans depend on the
//! ratios of times, which are more accurate. If some times were measured, [`fill`] therefore multiplies the
//! estimates of the others by the ratio of what was measured to its estimate.
//!
//! ```
//! use pipewright_schedule::analytic::{PeakRates, Workload, estimate};
//! use pipewright_schedule::profile::LinkProfile;
//! use pipewright_schedule::{LayerDesc, ModelDesc};
//! let layer = LayerDesc {
//!     path: "layers.0".into(),
//!     kind: "block".into(),
//!     parameters: 1_000_000,
//!     weight: 6_000_000,
//!     activation_bytes: 0,
//!     output_bytes: 0,
//!     keys_values_bytes: 0,
//!     norms_bytes: 0,
//!     feed_forward_bytes: 0,
//!     products: 0,
//!     mixing: 0,
//!     copied: 0,
//!     device_activation_bytes: None,
//!     trained: None,
//! };
//! let model = ModelDesc { layers: vec![layer] };
//! let rates = PeakRates { flops_per_s: 1e12, bytes_per_s: 1e12 };
//! let profile = estimate(&Workload { model: &model, tokens: 1000, rows: 1 }, rates, LinkProfile::new(0.0, 1e9));
//! assert_eq!(profile.layers[0].forward_s, 2e-3);
//! assert!(profile.assumed.contains(&"block.forward_s".to_owned()));
//! ```

mod rates;

use crate::model::{LayerDesc, ModelDesc};
use crate::profile::{LayerProfile, LinkProfile, PartProfile, Profile};
use crate::recompute::LayerPart;

pub use rates::{Connection, PeakRates};

/// The bytes of a parameter.
const NUMBER: f64 = 4.0;
/// The bytes that the optimizer reads and writes for each parameter.
const OPTIMIZER_TRAFFIC: f64 = 28.0;

/// The work of a step.
#[derive(Debug, Clone, Copy)]
pub struct Workload<'a> {
    /// The model.
    pub model: &'a ModelDesc,
    /// The tokens of a row.
    pub tokens: u32,
    /// The rows of a microbatch.
    pub rows: u32,
}

/// A figure of a layer in a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Figure {
    /// [`LayerProfile::forward_s`].
    Forward,
    /// [`LayerProfile::input_backward_s`].
    InputBackward,
    /// [`LayerProfile::weight_backward_s`].
    WeightBackward,
    /// [`LayerProfile::optimizer_s`].
    Optimizer,
    /// [`LayerProfile::output_bytes`].
    Output,
    /// [`LayerProfile::parameter_bytes`], and with it [`LayerProfile::trained_bytes`].
    Parameters,
    /// [`LayerProfile::activation_bytes`].
    Activation,
    /// The costs of a part: [`LayerProfile::norms_s`] with [`LayerProfile::norms_bytes`], or the same of the
    /// feed-forward layer.
    Part(LayerPart),
}

impl Figure {
    /// All figures that an estimate has.
    pub const ALL: [Self; 9] = [
        Self::Forward,
        Self::InputBackward,
        Self::WeightBackward,
        Self::Optimizer,
        Self::Output,
        Self::Parameters,
        Self::Activation,
        Self::Part(LayerPart::Norms),
        Self::Part(LayerPart::FeedForward),
    ];

    /// Returns the key in a profile.
    pub fn key(self) -> &'static str {
        match self {
            Self::Forward => "forward_s",
            Self::InputBackward => "input_backward_s",
            Self::WeightBackward => "weight_backward_s",
            Self::Optimizer => "optimizer_s",
            Self::Output => "output_bytes",
            Self::Parameters => "parameter_bytes",
            Self::Activation => "activation_bytes",
            Self::Part(part) => part.profile_keys()[1],
        }
    }

    /// Returns the time of the figure in a layer, if it is the time of a computation.
    fn seconds(self, layer: &LayerProfile) -> Option<f64> {
        match self {
            Self::Forward => Some(layer.forward_s),
            Self::InputBackward => Some(layer.input_backward_s),
            Self::WeightBackward => Some(layer.weight_backward_s),
            Self::Optimizer | Self::Output | Self::Parameters | Self::Activation | Self::Part(_) => None,
        }
    }

    /// Copies the figure from one layer to another; times of computations are multiplied by `scale`.
    fn copy(self, from: &LayerProfile, to: &mut LayerProfile, scale: f64) {
        match self {
            Self::Forward => to.forward_s = from.forward_s * scale,
            Self::InputBackward => to.input_backward_s = from.input_backward_s * scale,
            Self::WeightBackward => to.weight_backward_s = from.weight_backward_s * scale,
            Self::Optimizer => to.optimizer_s = from.optimizer_s,
            Self::Output => to.output_bytes = from.output_bytes,
            Self::Parameters => {
                (to.parameter_bytes, to.trained_bytes) = (from.parameter_bytes, from.trained_bytes);
            }
            Self::Activation => to.activation_bytes = from.activation_bytes,
            Self::Part(part) => {
                // Measured activations may be smaller than the model says.
                let others = LayerPart::ALL.into_iter().filter(|other| *other != part);
                let others = others.map(|other| to.part(other).bytes).fold(0, u64::saturating_add);
                let PartProfile { bytes, recompute_s } = from.part(part);
                let bytes = bytes.min(to.activation_bytes.saturating_sub(others));
                to.set_part(part, PartProfile { bytes, recompute_s });
            }
        }
    }
}

/// A figure that a profile lacks: the index of the `[[layers]]` section, and the figure.
pub type Missing = (usize, Figure);

/// The passes over the result of a part of a layer: the part reads one or two tensors of its size and writes
/// it.
const PART_PASSES: f64 = 3.0;

/// Returns a profile in which everything is estimated.
pub fn estimate(workload: &Workload<'_>, rates: PeakRates, link: LinkProfile) -> Profile {
    let layers = workload.model.runs().into_iter().map(|run| LayerProfile {
        count: u32::try_from(run.len()).unwrap_or(u32::MAX),
        ..estimated_layer(run.start, workload, rates)
    });
    let mut profile = Profile {
        rows: workload.rows,
        tokens: Some(workload.tokens),
        link,
        layers: layers.collect(),
        ..Profile::default()
    };
    assume_link(&mut profile);
    for index in 0..profile.layers.len() {
        Figure::ALL.into_iter().for_each(|figure| assume(&mut profile, index, figure));
    }
    profile
}

/// Replaces the missing figures of a profile by estimates, in their order, and adds them to what the profile
/// assumes. Parts come after the activations of their layer, because they are at most as large. The profile
/// has the layers of the workload's model. Estimates are for the rows of the profile, which may differ from
/// the workload's.
pub fn fill(profile: &mut Profile, missing: &[Missing], workload: &Workload<'_>, rates: PeakRates) {
    let workload = &Workload { rows: profile.rows, ..*workload };
    profile.tokens = Some(workload.tokens);
    let mut first = 0;
    let estimates: Vec<LayerProfile> = profile
        .layers
        .iter()
        .map(|layer| {
            let index = first.min(workload.model.layers.len().saturating_sub(1));
            first += layer.count as usize;
            if workload.model.layers.is_empty() {
                return LayerProfile::default();
            }
            estimated_layer(index, workload, rates)
        })
        .collect();
    let scale = measured_over_estimated(profile, &estimates, missing);
    for &(index, figure) in missing {
        figure.copy(&estimates[index], &mut profile.layers[index], scale);
        assume(profile, index, figure);
    }
}

/// Adds the link to what a profile assumes.
pub fn assume_link(profile: &mut Profile) {
    profile.assumed.extend(["link.latency_s", "link.bytes_per_s"].map(str::to_owned));
}

fn assume(profile: &mut Profile, index: usize, figure: Figure) {
    let layer = &profile.layers[index];
    if let Figure::Part(part) = figure
        && layer.part(part).bytes == 0
    {
        return;
    }
    let name = format!("{}.{}", layer.kind, figure.key());
    if !profile.assumed.contains(&name) {
        profile.assumed.push(name);
    }
}

/// Returns the ratio of the measured times to their estimates; 1 if no time was measured.
fn measured_over_estimated(profile: &Profile, estimates: &[LayerProfile], missing: &[Missing]) -> f64 {
    let (mut measured, mut estimated) = (0.0, 0.0);
    for (index, (layer, estimate)) in profile.layers.iter().zip(estimates).enumerate() {
        for figure in Figure::ALL.into_iter().filter(|&figure| !missing.contains(&(index, figure))) {
            // A frozen layer does not have all times. Those that a profile has for it are ignored.
            if let (Some(found), Some(expected)) = (figure.seconds(layer), figure.seconds(estimate))
                && expected > 0.0
            {
                measured += found * f64::from(layer.count);
                estimated += expected * f64::from(layer.count);
            }
        }
    }
    if measured > 0.0 && estimated > 0.0 { measured / estimated } else { 1.0 }
}

/// Returns the estimate of the layer with this index.
fn estimated_layer(index: usize, workload: &Workload<'_>, rates: PeakRates) -> LayerProfile {
    let layers = &workload.model.layers;
    let layer = &layers[index];
    let has_backward = layers[..=index].iter().any(LayerDesc::is_trained);
    let rows = f64::from(workload.rows);
    let tokens = f64::from(workload.tokens) * rows;
    let parameters = layer.parameters as f64;
    let weight = whole_weight(layer, workload.tokens, has_backward);
    // Adapters are matrices of their own. Without them, all matrices are trained.
    let adapters = layer.trained.map_or(0.0, |trained| trained as f64);
    let matrices = if weight >= 6.0 * parameters { 6.0 * parameters } else { weight };
    let others = weight - matrices;
    // A table or an expert that only some tokens use is read in part.
    let read = NUMBER * parameters.min(weight * tokens / 6.0);
    let (kept, output) = (layer.activation_bytes as f64 * rows, layer.output_bytes as f64 * rows);
    let seconds = |operations: f64, bytes: f64| {
        (operations * tokens / rates.flops_per_s).max(bytes / rates.bytes_per_s)
    };
    let bytes = |of_row: u64| of_row.saturating_mul(u64::from(workload.rows));
    let (trained, trained_matrices, trained_read) = match layer.trained {
        None => (parameters, matrices, read),
        Some(_) => (adapters, 6.0 * adapters, NUMBER * adapters),
    };
    let if_so = |is_so: bool, seconds: f64| if is_so { seconds } else { 0.0 };
    let read = read + NUMBER * adapters;
    let of_adapters = 6.0 * adapters;
    let mut estimate = LayerProfile {
        kind: layer.kind.clone(),
        forward_s: seconds((matrices + of_adapters + others) / 3.0, read + kept + output),
        input_backward_s: if_so(
            has_backward,
            seconds((matrices + of_adapters + 2.0 * others) / 3.0, read + kept + 2.0 * output),
        ),
        weight_backward_s: if_so(
            layer.is_trained(),
            seconds(trained_matrices / 3.0, 2.0 * trained_read + output),
        ),
        optimizer_s: OPTIMIZER_TRAFFIC * trained / rates.bytes_per_s,
        output_bytes: bytes(layer.output_bytes),
        parameter_bytes: layer.all_parameters().saturating_mul(NUMBER as u64),
        trained_bytes: layer.trained.map(|trained| trained.saturating_mul(NUMBER as u64)),
        activation_bytes: bytes(layer.activation_bytes),
        ..LayerProfile::default()
    };
    for part in LayerPart::ALL {
        let bytes = bytes(part.bytes_of(layer));
        let recompute_s = PART_PASSES * bytes as f64 / rates.bytes_per_s;
        estimate.set_part(part, PartProfile { bytes, recompute_s });
    }
    estimate
}

/// Returns the weight that a layer has if all its matrices are trained. The weight of a layer whose matrices
/// are frozen lacks a gradient of each product with a matrix, a third of these products; before the first
/// trained layer, it is a third of the whole.
fn whole_weight(layer: &LayerDesc, tokens: u32, has_backward: bool) -> f64 {
    let weight = layer.weight as f64;
    match layer.trained {
        None => weight,
        Some(_) if has_backward => {
            weight + (layer.products.saturating_sub(layer.mixing) / 2) as f64 / f64::from(tokens.max(1))
        }
        Some(_) => 3.0 * weight,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(kind: &str, parameters: u64, weight: u64) -> LayerDesc {
        LayerDesc {
            path: String::new(),
            kind: kind.into(),
            parameters,
            weight,
            activation_bytes: 4_000,
            output_bytes: 1_000,
            keys_values_bytes: 0,
            norms_bytes: 0,
            feed_forward_bytes: 0,
            products: 0,
            mixing: 0,
            copied: 0,
            device_activation_bytes: None,
            trained: None,
        }
    }

    const RATES: PeakRates = PeakRates { flops_per_s: 1e9, bytes_per_s: 1e9 };

    #[test]
    fn operations_are_divided_among_the_computations() {
        let model = ModelDesc { layers: vec![layer("a", 1_000, 9_000)] };
        let workload = Workload { model: &model, tokens: 1_000, rows: 2 };
        let profile = estimate(&workload, RATES, LinkProfile::new(0.0, 1e9));
        let found = &profile.layers[0];
        // 2,000 tokens with 2,000 operations of matrices each, and 3,000 others: a third forwards, two thirds
        // backwards.
        let seconds = [found.forward_s, found.input_backward_s, found.weight_backward_s];
        assert_eq!(seconds.map(|seconds| (seconds * 1e6).round()), [6_000.0, 8_000.0, 4_000.0]);
        assert_eq!(
            (found.activation_bytes, found.output_bytes, found.parameter_bytes),
            (8_000, 2_000, 4_000)
        );
        assert_eq!(profile.rows, 2);
    }

    #[test]
    fn frozen_layers_lack_what_nothing_needs() {
        let whole = layer("a", 1_000, 9_000);
        // As models describe it: of products of 6,000 with matrices, 2,000 are gradients that nothing needs.
        let of = |weight, products, trained| LayerDesc { weight, products, trained, ..whole.clone() };
        let layers = vec![
            of(3_000, 2_000_000, Some(0)),
            of(7_000, 4_000_000, Some(100)),
            of(7_000, 4_000_000, Some(0)),
        ];
        let estimate = |layers| {
            let model = ModelDesc { layers };
            estimate(&Workload { model: &model, tokens: 1_000, rows: 1 }, RATES, LinkProfile::new(0.0, 1e9))
        };
        let all = &estimate(vec![whole.clone()]).layers[0];
        let [below, adapted, above] = &estimate(layers).layers[..] else { panic!("three layers") };
        let times = |layer: &LayerProfile| {
            [layer.forward_s, layer.input_backward_s, layer.weight_backward_s]
                .map(|time| (time * 1e6).round())
        };
        let [forward, input, _] = times(all);
        assert_eq!(times(below), [forward, 0.0, 0.0]);
        // 100 parameters with 2 operations for each of 1,000 tokens.
        assert_eq!(times(adapted), [forward + 200.0, input + 200.0, 200.0]);
        assert_eq!(times(above), [forward, input, 0.0]);
        let bytes = |layer: &LayerProfile| (layer.parameter_bytes, layer.trained_bytes);
        assert_eq!([all, below, adapted].map(bytes), [(4_000, None), (4_000, Some(0)), (4_400, Some(400))]);
        assert_eq!((below.optimizer_s, adapted.optimizer_s), (0.0, all.optimizer_s / 10.0));
    }

    #[test]
    fn a_table_is_bound_by_its_bytes_and_not_read_as_a_whole() {
        let model = ModelDesc { layers: vec![layer("table", 1_000_000_000, 6)] };
        let workload = Workload { model: &model, tokens: 1_000, rows: 1 };
        let found = &estimate(&workload, RATES, LinkProfile::new(0.0, 1e9)).layers[0];
        assert_eq!((found.forward_s * 1e9).round(), 4_000.0 + 4_000.0 + 1_000.0);
    }

    #[test]
    fn what_is_missing_follows_what_was_measured() {
        let model = ModelDesc { layers: vec![layer("a", 1_000, 6_000), layer("b", 2_000, 12_000)] };
        let workload = Workload { model: &model, tokens: 1_000, rows: 1 };
        let mut profile = estimate(&workload, RATES, LinkProfile::new(0.0, 1e9));
        let expected = profile.clone();
        profile.assumed.clear();
        // The first layer took three times as long as estimated, and the second one was not measured.
        let first = &mut profile.layers[0];
        for seconds in [&mut first.forward_s, &mut first.input_backward_s, &mut first.weight_backward_s] {
            *seconds *= 3.0;
        }
        profile.layers[1].forward_s = 0.0;
        profile.layers[1].activation_bytes = 0;
        let missing = [Figure::Forward, Figure::InputBackward, Figure::WeightBackward, Figure::Activation];
        fill(&mut profile, &missing.map(|figure| (1, figure)), &workload, RATES);
        let (found, estimate) = (&profile.layers[1], &expected.layers[1]);
        assert!((found.forward_s / estimate.forward_s - 3.0).abs() < 1e-9, "{}", found.forward_s);
        assert_eq!(found.activation_bytes, estimate.activation_bytes);
        let assumed = ["b.forward_s", "b.input_backward_s", "b.weight_backward_s", "b.activation_bytes"];
        assert_eq!(profile.assumed, assumed);
    }

    #[test]
    fn parts_are_estimated_within_the_activations() {
        let with_parts =
            LayerDesc { norms_bytes: 1_000, feed_forward_bytes: 2_000, ..layer("a", 1_000, 6_000) };
        let model = ModelDesc { layers: vec![with_parts, layer("b", 1_000, 6_000)] };
        let workload = Workload { model: &model, tokens: 1_000, rows: 2 };
        let estimated = estimate(&workload, RATES, LinkProfile::new(0.0, 1e9));
        let parts = |layer: &LayerProfile| LayerPart::ALL.map(|part| layer.part(part));
        let part = |bytes, recompute_s| PartProfile { bytes, recompute_s };
        // The memory moves each tensor three times.
        assert_eq!(parts(&estimated.layers[0]), [part(2_000, 6e-6), part(4_000, 12e-6)]);
        assert_eq!(parts(&estimated.layers[1]), [PartProfile::default(); 2]);
        let is_part = |name: &&String| name.contains("norms") || name.contains("feed_forward");
        let assumed: Vec<&String> = estimated.assumed.iter().filter(is_part).collect();
        assert_eq!(assumed, ["a.norms_s", "a.feed_forward_s"]);
        // A layer that keeps less than the model says.
        let mut measured = Profile { assumed: Vec::new(), ..estimated };
        measured.layers[0] = LayerProfile { activation_bytes: 5_000, ..measured.layers[1].clone() };
        let missing = LayerPart::ALL.map(|part| (0, Figure::Part(part)));
        fill(&mut measured, &missing, &workload, RATES);
        assert_eq!(parts(&measured.layers[0]).map(|part| part.bytes), [2_000, 3_000]);
        assert_eq!(measured.problems(), []);
    }

    #[test]
    fn times_that_a_frozen_layer_does_not_have_scale_nothing() {
        let of = |kind, trained| LayerDesc { trained, ..layer(kind, 1_000, 6_000) };
        let model = ModelDesc { layers: vec![of("below", Some(0)), of("adapted", Some(100))] };
        let workload = Workload { model: &model, tokens: 1_000, rows: 1 };
        let mut profile = estimate(&workload, RATES, LinkProfile::new(0.0, 1e9));
        let expected = profile.layers[1].clone();
        (profile.layers[0].input_backward_s, profile.layers[0].weight_backward_s) = (1.0, 1.0);
        let missing = [(1, Figure::InputBackward), (1, Figure::WeightBackward)];
        fill(&mut profile, &missing, &workload, RATES);
        assert_eq!(profile.layers[1], expected);
    }

    #[test]
    fn estimates_are_for_the_rows_of_the_profile() {
        let model = ModelDesc { layers: vec![layer("a", 1_000, 6_000)] };
        let one = Workload { model: &model, tokens: 1_000, rows: 1 };
        let expected = estimate(&one, RATES, LinkProfile::new(0.0, 1e9));
        let mut profile = Profile { assumed: Vec::new(), ..expected.clone() };
        profile.layers[0].forward_s = 0.0;
        profile.layers[0].activation_bytes = 0;
        let missing = [(0, Figure::Forward), (0, Figure::Activation)];
        fill(&mut profile, &missing, &Workload { rows: 4, ..one }, RATES);
        assert_eq!(profile.layers, expected.layers);
    }
}
