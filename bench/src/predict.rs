//! Compares what a profile predicts with runs that the profile has not seen.
//!
//! The bench trains the bench model under sixteen configurations, and measures its layers with as many ranks
//! at the same time. The steps of a run and of the measurement alternate, because the speed of a machine
//! changes within seconds. For each configuration the bench prints the measured step time, busy times of the
//! ranks, and peaks of memory, and the prediction divided by the measured figure. The memory consists of
//! activations, gradients, and the tensors of an operation while it runs.
//!
//! `--head` compares the plan for a model whose head is as heavy as four layers with an even cut under 1F1B:
//! the gain that is predicted, and the gain in runs that alternate.

use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{CutModel, ModelConfig};
use pipewright_schedule::plan::{PlanRequest, plan};
use pipewright_schedule::{Method, ScheduleSpec, generate};

use crate::harness::{Outcome, Spread};
use crate::model::{INTERMEDIATE, WIDTH, config};
use crate::predicted_run::{InTurn, Run, RunFigures, in_turn, link};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Steps of each configuration that count.
    #[arg(long, default_value_t = 21)]
    steps: usize,
    /// The model with a heavy head only.
    #[arg(long)]
    head: bool,
    /// The hidden size of the model with a heavy head.
    #[arg(long, default_value_t = WIDTH, requires = "head")]
    width: usize,
}

/// Schedule, ranks, stages of a rank, microbatches of a replica, replicas.
const CONFIGURATIONS: [(&str, u32, u32, u32, u32); 16] = [
    ("gpipe", 1, 1, 4, 1),
    ("1f1b", 1, 1, 8, 1),
    ("gpipe", 2, 1, 4, 1),
    ("gpipe", 2, 1, 8, 1),
    ("1f1b", 2, 1, 4, 1),
    ("1f1b", 2, 1, 8, 1),
    ("1f1b", 2, 1, 16, 1),
    ("zb-h1", 2, 1, 8, 1),
    ("interleaved1f1b", 2, 2, 4, 1),
    ("interleaved1f1b", 2, 2, 8, 1),
    ("loopedbfs", 2, 2, 8, 1),
    ("zbvzerobubble", 2, 2, 8, 1),
    ("dualpipev", 2, 2, 8, 1),
    ("v-half", 2, 2, 8, 1),
    ("gpipe", 1, 1, 2, 2),
    ("1f1b", 1, 1, 4, 2),
];

pub(crate) fn run(options: &Options) -> Outcome {
    if options.head {
        return heavy_head(options);
    }
    let model = CutModel::from(ModelConfig::Llama(config()));
    let link = link()?;
    let mut errors: [Vec<f64>; 3] = Default::default();
    for (name, ranks, stages_per_rank, microbatches, replicas) in CONFIGURATIONS {
        let spec = ScheduleSpec {
            ranks,
            stages_per_rank: Some(stages_per_rank),
            microbatches,
            ..ScheduleSpec::default()
        };
        let run = Run::by_weight(&model, generate(name, &spec)?, replicas)?;
        let InTurn { profile, taken } = in_turn(&model, link, ranks * replicas, &[&run], options.steps)?;
        let (predicted, measured) = (run.predicted(&model, &profile)?, run.measured(&model, &taken[0]));
        let title =
            format!("{name}, {replicas} x {ranks} ranks x {stages_per_rank}, {microbatches} microbatches");
        println!("{title}: {}", compared(&predicted, &measured));
        errors[0].push((predicted.step / measured.step - 1.0).abs());
        let ratios = |one: &[f64], other: &[f64]| -> Vec<f64> {
            one.iter().zip(other).map(|(one, other)| (one / other - 1.0).abs()).collect()
        };
        errors[1].extend(ratios(&predicted.busy, &measured.busy));
        errors[2].extend(ratios(&predicted.activations, &measured.activations));
    }
    for (what, errors) in
        ["step time", "busy time", "peak of activations and gradients"].into_iter().zip(errors)
    {
        let most = errors.iter().copied().fold(0.0, f64::max);
        println!(
            "{what}: off by {:.1}% in the median, {:.1}% at most",
            Spread::new(errors).median() * 100.0,
            most * 100.0
        );
    }
    Ok(())
}

/// Returns the measured figures, each with the ratio of the prediction to it.
fn compared(predicted: &RunFigures, measured: &RunFigures) -> String {
    let ratios = |predicted: &[f64], measured: &[f64]| {
        let ratios = predicted
            .iter()
            .zip(measured)
            .map(|(predicted, measured)| format!("{:.3}", predicted / measured));
        ratios.collect::<Vec<_>>().join(" ")
    };
    format!(
        "{:.1} ms, predicted {:.3}; busy {}; activations {}",
        measured.step * 1e3,
        predicted.step / measured.step,
        ratios(&predicted.busy, &measured.busy),
        ratios(&predicted.activations, &measured.activations)
    )
}

/// Compares the plan for a model with a heavy head with an even cut under 1F1B.
fn heavy_head(options: &Options) -> Outcome {
    const MICROBATCHES: u32 = 8;
    let hidden_size = options.width;
    let intermediate_size = hidden_size * INTERMEDIATE / WIDTH;
    // A layer has four square matrices and three of hidden x intermediate size, the head one of hidden size x
    // vocabulary.
    let vocab_size = 4 * (4 * hidden_size + 3 * intermediate_size);
    let decoder = DecoderConfig { hidden_size, intermediate_size, vocab_size, ..config().decoder };
    let model = CutModel::from(ModelConfig::Llama(decoder.into()));
    let link = link()?;
    let InTurn { profile, .. } = in_turn(&model, link, 2, &[], options.steps)?;
    let request = PlanRequest {
        ranks: 2,
        microbatches: MICROBATCHES,
        data_parallel: Some(1),
        larger_microbatches: false,
        ..PlanRequest::default()
    };
    let report = plan(&profile, &request, &mut || true)?;
    let best = &report.plans[0];
    println!(
        "plan: {}, first layers {:?}, within {:.1}% of the best possible",
        best.name,
        best.boundaries,
        report.gap() * 100.0
    );
    let planned = Run::of_plan(best);
    let spec = ScheduleSpec { ranks: 2, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let even = Run::cut_by(&model, generate("1f1b", &spec)?, 1, &Method::Even)?;
    let runs = [&even, &planned];
    let InTurn { profile, taken } = in_turn(&model, link, 2, &runs, options.steps)?;
    for ((name, run), taken) in ["even 1F1B", "planned"].into_iter().zip(runs).zip(&taken) {
        let (predicted, measured) = (run.predicted(&model, &profile)?, run.measured(&model, taken));
        println!("{name}: {}", compared(&predicted, &measured));
    }
    let predicted = even.predicted(&model, &profile)?.step / planned.predicted(&model, &profile)?.step;
    let gains = taken[0].iter().zip(&taken[1]);
    let gains = gains.map(|(even, planned)| even.wall.as_secs_f64() / planned.wall.as_secs_f64());
    println!("gain: predicted {predicted:.3}, measured {}", Spread::new(gains.collect()));
    Ok(())
}
