//! Measures how much faster plans are in little memory if stages may recompute parts of their layers, than if
//! each stage recomputes all layers or none.
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

#[expect(dead_code, reason = "other reports and tests use the other instances")]
#[path = "../tests/plan/instances.rs"]
mod instances;

use std::error::Error;
use std::io::Write;

use instances::{Instance, Numbers};
use pipewright_schedule::plan::{PlanError, PlanReport, PlanRequest, plan};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count: u64 = arguments.first().map_or(Ok(100), |text| text.parse())?;
    let has = |word: &str| arguments.iter().skip(1).any(|text| text == word);
    let each = has("each");
    let effort = if has("quick") { PlanRequest::EFFORT / 10 } else { PlanRequest::EFFORT };
    let mut out = std::io::stdout().lock();
    let mut gains = Vec::new();
    let (mut only_in_part, mut never) = (0, 0);
    for seed in 0..count {
        let instance = instances::random(seed);
        let free = planned(&instance, None, true, effort)?;
        let need = free.plans[0].peak_bytes.iter().copied().max().unwrap_or(0);
        let need = if has("least") { least_need(&instance, need)? } else { need };
        let share = 0.5 + 0.4 * Numbers(seed ^ 0x11417).share();
        let memory = Some((need as f64 * share) as u64);
        let reports = [false, true].map(|in_part| planned(&instance, memory, in_part, effort));
        let fits = |report: &Result<PlanReport, PlanError>| match report {
            Err(PlanError::DoesNotFit { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
            Ok(_) => Ok(true),
        };
        let [whole, part] = match [fits(&reports[0])?, fits(&reports[1])?] {
            [true, true] => reports.map(|report| report.map(|report| report.plans[0].step_s)),
            [false, true] => {
                only_in_part += 1;
                continue;
            }
            _ => {
                never += 1;
                continue;
            }
        };
        let gain = whole? / part?;
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
        gains.push(gain);
    }
    gains.sort_by(f64::total_cmp);
    let mean = gains.iter().sum::<f64>() / gains.len().max(1) as f64;
    let at = |share: f64| {
        gains.get(((gains.len() as f64 * share) as usize).min(gains.len().saturating_sub(1))).copied()
    };
    writeln!(
        out,
        "{} random models in limited memory: {mean:.3} times as fast with parts of stages in the mean, {:.3} at least, {:.3} in \
         the median, {:.3} at most; {only_in_part} more fit with parts only, and {never} not at all",
        gains.len(),
        at(0.0).unwrap_or(0.0),
        at(0.5).unwrap_or(0.0),
        at(1.0).unwrap_or(0.0),
    )?;
    Ok(())
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
