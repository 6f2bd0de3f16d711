//! Compares measured peaks of activations with the simulated peaks, for each rank.
//!
//! The bench first measures the memory of each stage. GPipe with one stage per rank holds the activations of
//! all microbatches at once, so its peak grows by one activation for each further microbatch. A run of one
//! microbatch after the other holds one activation, besides parameters, gradients and optimizer state (16
//! bytes per parameter) and the temporary memory of an operation. The peak of a schedule minus those
//! (temporary memory once for each rank) is its measured peak of activations. The prediction comes from the
//! simulation with the measured sizes, in which an activation is held from `F` until its last backward ends.
//! GPipe stays below the prediction, because it has no gradients yet at its peak.
//!
//! With `--recompute stage`, a forward keeps its inputs only, and its backward computes it again. The bench
//! then also measures the time of a step, alternately with and without recomputation, and fails if their
//! losses or gradient norms have different bits.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use pipewright::pipeline::StepSummary;
use pipewright::transport::World;
use pipewright_schedule::costs::{RecomputeSizes, StageSizes};
use pipewright_schedule::simulate::summarize;
use pipewright_schedule::{Costs, Recompute, StageIndex};

use crate::harness::{Outcome, Spread};
use crate::model::{Bench, Setup, Size, input_bytes, parameters};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    size: Size,
    /// The schedules.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "gpipe,1f1b,zb-h1,zb-h2,interleaved1f1b,zbvzerobubble,dualpipev,v-half,v-min"
    )]
    schedules: Vec<String>,
    /// The stages that compute their forward again: none, stage, or a list of stages without layers, such as
    /// 0,1:keep=2.
    #[arg(long, default_value = "none")]
    recompute: Recompute,
}

/// Bytes of one parameter with its gradient and both moments.
const STATIC: f64 = 16.0;
/// Pairs of steps whose times are compared.
const PAIRS: usize = 7;
const MIB: f64 = (1 << 20) as f64;

/// The memory of one stage, in bytes.
#[derive(Clone, Copy)]
struct StageBytes {
    /// Parameters, gradients, optimizer state.
    fixed: f64,
    /// Temporary memory while an operation runs.
    passing: f64,
    /// One microbatch's activations.
    activation: f64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    if let Some(stage) = options.recompute.in_part().next() {
        let reason = "the bench measures stages as a whole, not their first layers";
        return Err(
            format!("--recompute names layers of stage {stage}; {reason}; leave out `:layers`").into()
        );
    }
    let mut measured: BTreeMap<u32, Vec<StageBytes>> = BTreeMap::new();
    for schedule in &options.schedules {
        let plain = Setup::new(schedule, options.size.ranks, options.size.microbatches);
        let setup = Setup { recompute: &options.recompute, ..plain };
        let mut bench = Bench::over(World::local(plain.ranks), &setup)?;
        let placement = bench.program().placement().clone();
        let count = placement.stages();
        let stages = match measured.entry(count) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(measure_stages(count)?),
        };
        let inputs = input_bytes(count)?;
        let size = |(stage, kept): (&StageBytes, u64)| {
            let activation = stage.activation as u64;
            let recompute = Some(RecomputeSizes { kept, recomputed: activation.saturating_sub(kept) });
            StageSizes { activation, stash: activation, recompute, ..StageSizes::default() }
        };
        let sizes = stages.iter().zip(inputs).map(size).collect();
        let costs = Costs { sizes, recompute: options.recompute.clone(), ..Costs::default() };
        let predicted = summarize(bench.program().as_program(), &costs)?.peak_bytes.unwrap_or_default();
        let report = bench.steps(2, 1)?.pop().ok_or("a step was taken")?;
        for rank in placement.all_ranks() {
            let own = |stage: &StageIndex| stages[stage.index()];
            let own: Vec<StageBytes> = placement.stages_of(rank).iter().map(own).collect();
            let fixed: f64 = own.iter().map(|stage| stage.fixed).sum();
            let passing = own.iter().map(|stage| stage.passing).fold(0.0, f64::max);
            let measured = report.peak_bytes[rank.index()] as f64 - fixed - passing;
            let predicted = predicted[rank.index()] as f64;
            println!(
                "{schedule}, rank {rank}: {:.1} MiB of activations, {:.1} predicted: {:.3}",
                measured / MIB,
                predicted / MIB,
                measured / predicted
            );
        }
        if options.recompute != Recompute::None {
            compare(&plain, &mut bench)?;
        }
    }
    Ok(())
}

/// Prints the time of a step with recomputation, divided by the time without. Steps of both alternate. They
/// are the same steps of the same training, so their results have the same bits.
fn compare(plain: &Setup<'_>, bench: &mut Bench) -> Outcome {
    let mut without = Bench::over(World::local(plain.ranks), plain)?;
    without.steps(2, 1)?;
    let mut ratios = Vec::new();
    for _ in 0..PAIRS {
        let (with, without) = (bench.step()?, without.step()?);
        if bits(&with) != bits(&without) {
            return Err(
                format!("{}: recomputation changed the bits of step {}", plain.schedule, with.step).into()
            );
        }
        ratios.push(with.wall.as_secs_f64() / without.wall.as_secs_f64());
    }
    println!(
        "{}: a step takes {:.3} of the time without recomputation, and has the same bits",
        plain.schedule,
        Spread::new(ratios).median()
    );
    Ok(())
}

/// Returns the bits of a step's losses and gradient norm.
fn bits(step: &StepSummary) -> Vec<u64> {
    step.losses.iter().chain([&step.gradient_norm]).map(|number| number.to_bits()).collect()
}

/// Measures the memory of each of `stages` stages.
fn measure_stages(stages: u32) -> Outcome<Vec<StageBytes>> {
    let few = peaks("gpipe", stages, stages)?;
    let many = peaks("gpipe", stages, 3 * stages)?;
    let row = |stage| (0..3).map(move |microbatch| format!("{stage}F{microbatch},{stage}B{microbatch}"));
    let one_by_one: String =
        (0..stages).map(|stage| row(stage).collect::<Vec<_>>().join(",") + "\n").collect();
    let single = peaks(&one_by_one, stages, 3)?;
    let bytes_of = |stage: usize, parameters: u64| {
        let activation = (many[stage] - few[stage]) / f64::from(2 * stages);
        let fixed = STATIC * parameters as f64;
        StageBytes { fixed, passing: single[stage] - fixed - activation, activation }
    };
    let parameters = parameters(stages)?.into_iter().enumerate();
    Ok(parameters.map(|(stage, parameters)| bytes_of(stage, parameters)).collect())
}

/// Measures the peak bytes of each rank, with one stage per rank.
fn peaks(schedule: &str, ranks: u32, microbatches: u32) -> Outcome<Vec<f64>> {
    let reports = Bench::new(schedule, ranks, microbatches)?.steps(2, 2)?;
    let peak_of = |rank| {
        let peaks = reports.iter().map(|report| report.peak_bytes[rank] as f64).collect();
        Spread::new(peaks).median()
    };
    Ok((0..ranks as usize).map(peak_of).collect())
}
