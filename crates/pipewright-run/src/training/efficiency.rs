//! The rate of computation that a run reaches, its share of the peak of the devices, and what the run counts.

use std::collections::HashMap;
use std::thread::available_parallelism;

use pipewright::device::{DeviceChoice, describe, thread_peak};
use pipewright::ids::WorldRank;
use pipewright::tensor::Precision;
use pipewright::train::Metrics;
use pipewright_schedule::analytic::PeakRates;

use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;
use crate::training::prepare::Prepared;

/// The computation of a run per token, and the most that its devices compute.
#[derive(Clone, Debug)]
pub(crate) struct Efficiency {
    /// What the model counts.
    unit: String,
    /// Floating-point operations of the model's matrix products per token; 0 if they are not known.
    operations_per_token: f64,
    /// Floating-point operations per second of the devices of all ranks.
    peak: Option<f64>,
}

impl Efficiency {
    /// Returns the efficiency of a prepared run. Measures the processor's peak, which takes 5 ms.
    pub(crate) fn of(prepared: &Prepared) -> Self {
        let Prepared { settings, program, .. } = prepared;
        let products: u64 = prepared.layers.layers.iter().map(|layer| layer.products).sum();
        Self {
            unit: prepared.model.unit().to_owned(),
            operations_per_token: products as f64 / settings.data.seq_len as f64,
            peak: peak(settings, settings.mesh.ranks(program.ranks())),
        }
    }

    /// Writes the rate, the share of the peak, and what the model counts into the metrics of a step.
    pub(crate) fn observe(&self, metrics: &mut Metrics) {
        metrics.set_counted(&self.unit);
        let rate = self.operations_per_token * metrics.tokens_per_second;
        let is_known = self.operations_per_token > 0.0 && rate.is_finite();
        metrics.model_tflops = is_known.then_some(rate / 1e12);
        metrics.mfu = self.peak.filter(|_| is_known).map(|peak| rate / peak);
    }
}

/// Returns the peak rate of the devices of `ranks` ranks, in floating-point operations per second.
fn peak(settings: &Settings, ranks: u32) -> Option<f64> {
    let (precision, devices) = (settings.run.precision, &settings.run.devices);
    // Ranks of one machine share its devices and cores. The ranks of several processes are expected to share
    // none.
    let is_shared = settings.pipeline.transport == TransportChoice::Local;
    if devices.are_processor() {
        let threads = settings.pipeline.threads_per_rank.sum((0..ranks).map(WorldRank::new));
        let cores = available_parallelism().map_or(threads, usize::from);
        let computing = if is_shared { threads.min(cores) } else { threads };
        return thread_peak(precision == Precision::Bf16).map(|peak| peak * computing as f64);
    }
    let mut shares: HashMap<DeviceChoice, u32> = HashMap::new();
    for rank in 0..ranks {
        *shares.entry(devices.choice_of(WorldRank::new(rank)).resolved()).or_default() += 1;
    }
    let is_half = precision != Precision::F32;
    let peak = |(choice, ranks): (DeviceChoice, u32)| {
        let one = PeakRates::data_sheet(&describe(choice)?.name, is_half)?;
        Some(one * f64::from(if is_shared { 1 } else { ranks }))
    };
    shares.into_iter().map(peak).sum()
}
