//! Measures how much faster plans are in little memory if stages may recompute parts of their layers, their first
//! layers, or some microbatches, than if each stage recomputes all layers or none.
//!
//! ```text
//! cargo run --release -p pipewright-schedule --example recompute            # 100 random models
//! cargo run --release -p pipewright-schedule --example recompute -- 20 each # 20 of them, each on a line
//! cargo run --release -p pipewright-schedule --example recompute -- 20 quick # with a tenth of the search's work
//! cargo run --release -p pipewright-schedule --example recompute -- 20 least # where each plan must recompute
//! ```
//!
//! The need of a model is the peak of the rank with the most memory in the fastest plan without a limit. The
//! limit is a random share of it, from 0.5 to 0.9. Other schedules often fit into it without recomputation.
//! With `least`, the need is the least memory in which a named schedule fits without recomputation. If no plan
//! with whole stages fits, the model counts as such, and not for the mean.
//!
//! Two figures say how much any way to recompute could gain. One is the ratio to the proved bound of the limited
//! memory. The other is the ratio to the fastest plan without a limit, which nothing that saves memory makes
//! faster.
//!
//! The parts of the layers have the shares of decoder blocks with SwiGLU and random widths, in half precision on
//! a device that computes 400 TFLOP/s and moves 2.5 TB/s.

#[expect(dead_code, reason = "other reports and tests use the other instances")]
#[path = "../tests/plan/instances.rs"]
mod instances;

use std::error::Error;
use std::io::Write;

use instances::{Instance, Numbers};
use pipewright_schedule::plan::{PlanError, PlanReport, PlanRequest, plan};
use pipewright_schedule::profile::PartProfile;
use pipewright_schedule::recompute::LayerPart;

/// The device of the parts.
const FLOPS_PER_S: f64 = 400e12;
const BYTES_PER_S: f64 = 2.5e12;
/// The bytes of a number in half precision.
const NUMBER: f64 = 2.0;

/// The times of plans with whole stages, as multiples of others.
#[derive(Default)]
struct Ratios {
    /// To plans that may recompute parts of stages.
    gains: Vec<f64>,
    /// To the bound of all plans in the limited memory.
    to_bounds: Vec<f64>,
    /// To the fastest plans without a limit.
    to_unlimited: Vec<f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count: u64 = arguments.first().map_or(Ok(100), |text| text.parse())?;
    let has = |word: &str| arguments.iter().skip(1).any(|text| text == word);
    let each = has("each");
    let effort = if has("quick") { PlanRequest::EFFORT / 10 } else { PlanRequest::EFFORT };
    let mut out = std::io::stdout().lock();
    let mut ratios = Ratios::default();
    let (mut only_in_part, mut never) = (0, 0);
    for seed in 0..count {
        let instance = with_parts(instances::random(seed), seed);
        let free = planned(&instance, None, true, effort)?;
        let need = free.plans[0].peak_bytes.iter().copied().max().unwrap_or(0);
        let need = if has("least") { least_need(&instance, need)? } else { need };
        let share = 0.5 + 0.4 * Numbers(seed ^ 0x11417).share();
        let memory = Some((need as f64 * share) as u64);
        let whole = fitting(planned(&instance, memory, false, effort))?;
        let part = fitting(planned(&instance, memory, true, effort))?;
        let (whole, part) = match (whole, part) {
            (Some(whole), Some(part)) => (whole.plans[0].step_s, part),
            (None, Some(_)) => {
                only_in_part += 1;
                continue;
            }
            (_, None) => {
                never += 1;
                continue;
            }
        };
        let gain = whole / part.plans[0].step_s;
        if each {
            writeln!(
                out,
                "{seed:3} {:7} {:3} layers {:2} ranks {:2} microbatches, {share:.2} of the need: {gain:.3} times as fast",
                instance.what,
                instance.profile.layers.len(),
                instance.ranks,
                instance.microbatches,
            )?;
        }
        ratios.gains.push(gain);
        ratios.to_bounds.push(whole / part.lower_bound_s);
        ratios.to_unlimited.push(whole / free.plans[0].step_s);
    }
    let Ratios { mut gains, to_bounds, to_unlimited } = ratios;
    gains.sort_by(f64::total_cmp);
    let at = |share: f64| {
        gains.get(((gains.len() as f64 * share) as usize).min(gains.len().saturating_sub(1))).copied()
    };
    writeln!(
        out,
        "{} random models in limited memory: {:.3} times as fast with parts of stages in the mean, {:.3} at least, {:.3} in \
         the median, {:.3} at most; {only_in_part} more fit with parts only, and {never} not at all",
        gains.len(),
        mean(&gains),
        at(0.0).unwrap_or(0.0),
        at(0.5).unwrap_or(0.0),
        at(1.0).unwrap_or(0.0),
    )?;
    writeln!(
        out,
        "no way to recompute is more than {:.3} times as fast in the mean by the bounds, and the fastest plans without a \
         limit are {:.3} times as fast",
        mean(&to_bounds),
        mean(&to_unlimited),
    )?;
    Ok(())
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Returns the plans, if any fits into the memory.
fn fitting(report: Result<PlanReport, PlanError>) -> Result<Option<PlanReport>, PlanError> {
    match report {
        Err(PlanError::DoesNotFit { .. }) => Ok(None),
        report => report.map(Some),
    }
}

/// Returns the least memory in which a named schedule fits without recomputation, out of at most `most` bytes,
/// within a hundredth.
fn least_need(instance: &Instance, most: u64) -> Result<u64, PlanError> {
    // A plan recomputes only if no other one fits.
    let mut profile = instance.profile.clone();
    profile.layers.iter_mut().for_each(|layer| layer.recompute_s = Some(1e3));
    let expensive = Instance { profile, ..*instance };
    let (mut too_little, mut enough) = (0, most);
    while enough - too_little > most / 100 {
        let middle = too_little.midpoint(enough);
        match planned(&expensive, Some(middle), false, 0) {
            Ok(report) if !report.plans[0].recomputes() => enough = middle,
            Ok(_) | Err(PlanError::DoesNotFit { .. }) => too_little = middle,
            Err(error) => return Err(error),
        }
    }
    Ok(enough)
}

fn planned(
    instance: &Instance,
    memory: Option<u64>,
    partial_recompute: bool,
    effort: u64,
) -> Result<PlanReport, PlanError> {
    let request = PlanRequest {
        ranks: instance.ranks,
        microbatches: instance.microbatches,
        data_parallel: Some(1),
        memory,
        partial_recompute,
        effort,
        ..PlanRequest::default()
    };
    plan(&instance.profile, &request, &mut || true)
}

/// Adds the parts of layers that a backward may compute again.
fn with_parts(instance: Instance, seed: u64) -> Instance {
    let mut numbers = Numbers(seed ^ 0x9a27);
    let hidden = 2048.0 + 6144.0 * numbers.share();
    // The widths of the feed-forward layer and of the keys, in widths of the hidden states.
    let inner = 2.7 + 1.3 * numbers.share();
    let keys = 0.125 + 0.875 * numbers.share();
    // The inputs and results of two norms, queries, keys, values and what they attend to; gate, up and the
    // result of the activation.
    let kept = 4.0 + 2.0 + 2.0 * keys + 3.0 * inner;
    let forward_s = 2.0 * hidden * hidden * (2.0 + 2.0 * keys + 3.0 * inner) / FLOPS_PER_S;
    let moving = |numbers: f64| numbers * hidden * NUMBER / BYTES_PER_S / forward_s;
    // The share of the activations, and the time as a share of the forward.
    let norms = (2.0 / kept, moving(2.0 * 2.0));
    let feed_forward = (inner / kept, moving(3.0 * inner));
    let mut profile = instance.profile.clone();
    for layer in &mut profile.layers {
        for (part, (share, time)) in [(LayerPart::Norms, norms), (LayerPart::FeedForward, feed_forward)] {
            let bytes = (layer.activation_bytes as f64 * share) as u64;
            layer.set_part(part, PartProfile { bytes, recompute_s: layer.forward_s * time });
        }
    }
    Instance { profile, ..instance }
}
