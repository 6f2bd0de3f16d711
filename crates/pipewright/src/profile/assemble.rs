//! Makes a profile from measured figures.

use pipewright_schedule::analytic::{Figure, PeakRates, Workload, assume_link, fill};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, PartProfile, Profile};
use pipewright_schedule::recompute::LayerPart;

use super::measured::{KindFigures, Measured};
use super::sample::PARAMETER_BYTES;

impl Measured {
    /// Returns the profile of a model from measurements of these layers. If there is no measured link,
    /// `assumed_link` is used; memory that was not measured is estimated. The sizes of the parts of layers that a
    /// backward may compute again follow from the model.
    ///
    /// # Panics
    /// When a layer of the model is of a kind that was not measured.
    pub fn profile(
        &self,
        workload: &Workload<'_>,
        link: Option<LinkProfile>,
        assumed_link: LinkProfile,
        rates: PeakRates,
    ) -> Profile {
        let model = workload.model;
        let mut missing = Vec::new();
        let layers = model.runs().into_iter().enumerate().map(|(index, run)| {
            let first = &model.layers[run.start];
            let kind = self.kinds.iter().find(|kind| model.layers[kind.layer].is_like(first));
            let kind = kind.expect("a layer of each kind is measured");
            if kind.activation_bytes.is_none() {
                missing.push((index, Figure::Activation));
            }
            let mut layer = LayerProfile {
                kind: first.kind.clone(),
                count: u32::try_from(run.len()).unwrap_or(u32::MAX),
                output_bytes: first.output_bytes.saturating_mul(u64::from(self.rows)),
                parameter_bytes: first.all_parameters().saturating_mul(PARAMETER_BYTES),
                trained_bytes: first.trained.map(|trained| trained.saturating_mul(PARAMETER_BYTES)),
                ..measured_layer(kind)
            };
            // Measured activations may be smaller than the model says.
            let mut kept = kind.activation_bytes.unwrap_or(u64::MAX);
            for part in LayerPart::ALL {
                let Some(time) = kind.part(part) else {
                    missing.push((index, Figure::Part(part)));
                    continue;
                };
                let bytes = part.bytes_of(first).saturating_mul(u64::from(self.rows)).min(kept);
                kept -= bytes;
                let recompute_s = if bytes > 0 { time.median } else { 0.0 };
                layer.set_part(part, PartProfile { bytes, recompute_s });
            }
            layer
        });
        let layers = layers.collect();
        let is_measured = link.is_some();
        let link =
            LinkProfile { reduce_bytes_per_s: self.reduce_bytes_per_s, ..link.unwrap_or(assumed_link) };
        let [stage_bytes, rank_bytes] = [self.stage_bytes, self.rank_bytes].map(Option::unwrap_or_default);
        let mut profile =
            Profile { rows: self.rows, stage_bytes, rank_bytes, link, layers, ..Profile::default() };
        if !is_measured {
            assume_link(&mut profile);
        }
        fill(&mut profile, &missing, workload, rates);
        profile
    }
}

fn measured_layer(kind: &KindFigures) -> LayerProfile {
    LayerProfile {
        forward_s: kind.forward.median,
        input_backward_s: kind.input_backward.median,
        weight_backward_s: kind.weight_backward.median,
        recompute_s: kind.recompute.map(|spread| spread.median),
        optimizer_s: kind.optimizer_s,
        activation_bytes: kind.activation_bytes.unwrap_or(0),
        weight_activation_bytes: kind.weight_activation_bytes,
        temporary_bytes: kind.temporary_bytes.unwrap_or(0),
        ..LayerProfile::default()
    }
}
