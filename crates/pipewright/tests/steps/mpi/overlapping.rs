//! Delayed batches of processes that overlap.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::tensor::Tensor;
use pipewright::loss_scale::LossScaling;
use pipewright::optimizer::ParameterGradient;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::batches::{MICROBATCHES, RATE, StepResult, numbered, parameters, result_of};
use super::support::{self, Mlp, config};
use super::{Process, STEPS, Watch, of_threads, wait_until};

/// Launches two ranks whose batches overlap. A rank contributes to the norm of a batch only when its process has begun the
/// next two of `last` batches. Rank 1 panics before it contributes to the norm of batch `ends`, from 0, or in the second
/// forward of batch `computes`.
fn launch(last: u64, ends: Option<u64>, computes: Option<u64>) -> Process {
    launch_with(PipelineConfig { delayed: true, ..config() }, last, ends, computes)
}

fn launch_with(config: PipelineConfig, last: u64, ends: Option<u64>, computes: Option<u64>) -> Process {
    const GRADIENTS: u64 = 2 * support::LAYERS as u64 / 2;
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let rank = world.own_ranks().next().expect("a process has a rank").get();
    let watch = Arc::new(Watch { last, ..Watch::default() });
    let (begun, calls) = (watch.clone(), AtomicU64::new(0));
    let hook = move |_: &mut ParameterGradient<'_>| {
        let batch = calls.fetch_add(1, Ordering::SeqCst) / GRADIENTS;
        wait_until(|| begun.begun.load(Ordering::SeqCst) >= last.min(batch + 3));
        if rank == 1 && begun.runs.load(Ordering::SeqCst) == 0 && Some(batch) == ends {
            // The ranks have begun the next batch by then.
            std::thread::sleep(Duration::from_secs(1));
            begun.runs.store(1, Ordering::SeqCst);
            panic!("it has to fail");
        }
    };
    let forwards = Arc::new(AtomicU64::new(0));
    let loss = move |output: Tensor<2>, target: Tensor<2>| {
        let forward = forwards.fetch_add(1, Ordering::SeqCst);
        let fails = computes.map(|batch| batch * u64::from(MICROBATCHES) + 1);
        assert!(Some(forward) != fails, "it has to fail");
        support::loss(output, target)
    };
    let make = move |index: StageIndex| {
        let layers = Mlp::of_stage(index, 2);
        let made = if index.get() == 1 { Stage::with_loss(layers, loss.clone()) } else { Stage::new(layers) };
        Ok::<_, Infallible>(made)
    };
    let with_hook = PipelineConfig { gradient_hook: Some(Arc::new(hook)), ..config.clone() };
    let program = support::program_of_trained("1f1b", MICROBATCHES, &[true; 2]);
    let pipeline = Pipeline::launch(program, world, &with_hook, make);
    Process { pipeline: pipeline.expect("it starts"), config, watch, rank }
}

/// Delayed batches of processes have the bits of threads that take each batch alone. The gradient norm of each batch says that
/// both processes have the batch two after it, so all overlap but the first two.
pub(crate) fn all() {
    overlapping(launch(STEPS, None, None), STEPS);
}

/// Each process finds out by itself which updates were skipped.
pub(crate) fn in_f16() {
    const SCALED: u64 = 24;
    let loss_scaling = LossScaling { initial: f64::from(1 << 18), interval: 2 };
    let config = PipelineConfig { delayed: true, precision: Precision::F16, loss_scaling, ..config() };
    let results = overlapping(launch_with(config, SCALED, None, None), SCALED);
    let skipped: Vec<bool> = results.iter().map(|(.., skipped)| *skipped).collect();
    assert!(skipped.windows(2).any(|pair| pair == [false, true]), "{skipped:?}");
}

fn overlapping(mut process: Process, steps: u64) -> Vec<StepResult> {
    let (mut results, mut overlaps, mut begun) = (Vec::new(), Vec::new(), 0);
    for number in 0..steps {
        while begun < steps.min(number + 3) {
            process.begin(begun);
            begun += 1;
        }
        let summary = process.pipeline.finish().expect("a step");
        overlaps.push(summary.overlaps);
        results.push(result_of(&summary));
    }
    assert_eq!(process.pipeline.comparisons(), 1, "messages before the first step only");
    assert_eq!(overlaps, (0..steps).map(|number| number > 1).collect::<Vec<_>>(), "rank {}", process.rank);
    let (expected, mut threads) = of_threads(2, &process.config, steps);
    assert_eq!(results, expected, "rank {}", process.rank);
    let (all, own) = (parameters(&mut threads), parameters(&mut process.pipeline));
    assert!(!own.is_empty() && own.iter().all(|one| all.contains(one)), "rank {} differs", process.rank);
    process.report("batches that overlap");
    results
}

/// One process begins a batch two ahead, and the other one begins each only when the one before has ended. No batch overlaps,
/// and the numbers of both processes stay the same.
pub(crate) fn only_one() {
    let mut process = launch(STEPS, None, None);
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    let (mut results, mut begun) = (Vec::new(), 0);
    for number in 0..STEPS {
        let ahead = if process.rank == 0 { 3 } else { 1 };
        while begun < STEPS.min(number + ahead) {
            process.begin(begun);
            begun += 1;
        }
        let summary = process.pipeline.finish().expect("a step");
        assert!(!summary.overlaps, "rank {}, batch {number}", process.rank);
        results.push(result_of(&summary));
    }
    assert_eq!(results, of_threads(2, &process.config, STEPS).0, "rank {}", process.rank);
    process.report("batches that one process begins early");
}

/// Rank 1 fails in a batch that overlaps with others. Those before it have their results, and those after it are dropped. The
/// processes take them again.
pub(crate) fn fails(ends: Option<u64>, computes: Option<u64>) {
    let mut process = launch(STEPS, ends, computes);
    let (expected, _) = of_threads(2, &process.config, STEPS);
    let failing = ends.or(computes).expect("a batch");
    (0..3).for_each(|number| process.begin(number));
    for number in 0..failing {
        assert_eq!(process.finish().expect("it has not failed"), expected[number as usize], "batch {number}");
        process.begin(number + 3);
    }
    take_again(&mut process, failing, expected);
    process.report(&format!("a failure of batch {failing} among batches that overlap"));
}

/// Rank 1 fails in the second batch. Both processes have begun the third one, and only the other one has begun the fourth one.
/// The numbers of both processes are the same afterwards.
pub(crate) fn fails_with_next_of_one() {
    let mut process = launch(STEPS, Some(1), None);
    let (expected, _) = of_threads(2, &process.config, STEPS);
    (0..3).for_each(|number| process.begin(number));
    assert_eq!(process.finish().expect("it has not failed"), expected[0]);
    if process.rank == 0 {
        process.begin(3);
    }
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    take_again(&mut process, 1, expected);
    process.report("a failure among batches that one process begins early");
}

/// Finishes the failed batch `failing`, and takes it and those after it again.
fn take_again(process: &mut Process, failing: u64, expected: Vec<StepResult>) {
    let error = process.finish().expect_err("rank 1 panics").to_string();
    let step = failing + 1;
    assert!(
        error.starts_with(&format!("step {step}: rank 1")) && error.contains("it has to fail"),
        "{error}"
    );
    assert!(!process.pipeline.has_begun(), "the next ones are dropped");
    process.watch.begun.fetch_add(100, Ordering::SeqCst);
    let results = (failing..STEPS).map(|number| {
        let summary = process.pipeline.step_batch(numbered(number, &process.config), RATE).expect("a step");
        result_of(&summary)
    });
    let figures = |(_, losses, norm, ..): StepResult| (losses, norm);
    let results: Vec<_> = results.map(figures).collect();
    let expected: Vec<_> = expected.into_iter().skip(failing as usize).map(figures).collect();
    assert_eq!(results, expected, "rank {}", process.rank);
}
