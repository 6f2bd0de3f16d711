//! The layers of a profile, scaled to the microbatches of a plan, with sums over the layers before each one.

use std::ops::Range;

use crate::profile::{LinkProfile, Profile};

/// The costs of one layer for one microbatch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    pub(super) forward: f64,
    pub(super) input: f64,
    pub(super) weight: f64,
    pub(super) recompute: f64,
    pub(super) optimizer: f64,
    pub(super) output: u64,
    pub(super) parameters: u64,
    pub(super) activation: u64,
    pub(super) stash: u64,
    pub(super) temporary: u64,
}

/// All layers of a model, for one size of microbatch.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    pub(super) list: Vec<Layer>,
    pub(super) link: LinkProfile,
    forward: Vec<f64>,
    input: Vec<f64>,
    work: Vec<f64>,
}

impl Layers {
    /// Scales `profile` to microbatches of `rows` rows. Times and sizes grow with the rows, except for the optimizer
    /// and the parameters.
    pub(super) fn of(profile: &Profile, rows: u32) -> Self {
        let scale = f64::from(rows) / f64::from(profile.rows);
        let bytes = |bytes: u64| {
            let scaled = u128::from(bytes) * u128::from(rows) / u128::from(profile.rows);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let layer = |layer: &crate::profile::LayerProfile| Layer {
            forward: layer.forward_s * scale,
            input: layer.input_backward_s * scale,
            weight: layer.weight_backward_s * scale,
            recompute: layer.recompute_s.unwrap_or(layer.forward_s) * scale,
            optimizer: layer.optimizer_s,
            output: bytes(layer.output_bytes),
            parameters: layer.parameter_bytes,
            activation: bytes(layer.activation_bytes),
            stash: bytes(layer.stash_bytes()),
            temporary: bytes(layer.temporary_bytes),
        };
        let list: Vec<Layer> = profile.each_layer().map(layer).collect();
        let forward = sums(&list, |layer| layer.forward);
        let input = sums(&list, |layer| layer.input);
        let work = sums(&list, |layer| layer.forward + layer.input + layer.weight);
        Self { list, link: profile.link, forward, input, work }
    }

    /// Returns the number of layers.
    pub(super) fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns the time of `F` over a range of layers.
    pub(super) fn forward(&self, range: Range<usize>) -> f64 {
        self.forward[range.end] - self.forward[range.start]
    }

    /// Returns the time of `I` over a range of layers.
    pub(super) fn input(&self, range: Range<usize>) -> f64 {
        self.input[range.end] - self.input[range.start]
    }

    /// Returns the time of `F`, `I` and `W` over a range of layers.
    pub(super) fn work(&self, range: Range<usize>) -> f64 {
        self.work[range.end] - self.work[range.start]
    }

    /// Returns the shortest time of a message between any two neighbouring layers.
    pub(super) fn shortest_hop(&self) -> f64 {
        let inner = &self.list[..self.count().saturating_sub(1)];
        let smallest = inner.iter().map(|layer| layer.output).min().unwrap_or(0);
        self.link.latency_s + smallest as f64 / self.link.bytes_per_s
    }
}

fn sums(layers: &[Layer], of: impl Fn(&Layer) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0];
    for layer in layers {
        sums.push(sums[sums.len() - 1] + of(layer));
    }
    sums
}
