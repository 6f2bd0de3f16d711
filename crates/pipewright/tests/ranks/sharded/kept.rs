//! Parameters that stay gathered between the batches of a step.

use pipewright::mesh::DataParallelMode::{self, Hybrid, Sharded};
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::{ActionKind, ValidatedProgram};

use super::modules::{ends, mixed};
use super::run::{Make, Parameters, batch_of, config_of, parameters, program};
use crate::support::{batch, stage};

/// How a pipeline is launched.
struct Case {
    make: Make,
    replicas: u32,
    mode: DataParallelMode,
    precision: Precision,
}

impl Case {
    fn launch(&self, program: ValidatedProgram, keep_gathered: bool) -> Pipeline {
        let (stages, world) = (program.placement().stages(), World::local(program.ranks() * self.replicas));
        let config = config_of(self.replicas, self.mode);
        let config = PipelineConfig { keep_gathered, precision: self.precision, ..config };
        let make = self.make;
        Pipeline::launch(program, world, &config, move |index| make(index, stages)).expect("it starts")
    }
}

const SHARDED: Case = Case { make: stage, replicas: 2, mode: Sharded, precision: Precision::F32 };

/// Returns how often stages were gathered in a batch, over all replicas.
fn gathers(summary: &StepSummary) -> usize {
    let events = summary.timeline.events().iter();
    events.filter(|event| event.action.kind() == ActionKind::Unshard).count()
}

/// Losses and norms of each batch and the losses of an evaluation in each step, the parameters after two steps, and
/// the number of gathers of each batch.
type Results = (Vec<(Vec<f64>, f64)>, Vec<Vec<f64>>, Parameters, Vec<usize>);

/// Takes two steps of three batches, and evaluates in the middle of each.
fn run(case: &Case, program: ValidatedProgram, keep_gathered: bool) -> Results {
    let microbatches = program.microbatches() * case.replicas;
    let mut pipeline = case.launch(program, keep_gathered);
    let (mut batches, mut evaluations) = (Vec::new(), Vec::new());
    for step in 0..2 {
        batches.push(pipeline.accumulate(batch_of(3 * step, microbatches)).expect("a batch"));
        let (inputs, targets) = (batch(90, microbatches), batch(190, microbatches));
        evaluations.push(pipeline.eval(inputs, Some(targets)).expect("an evaluation").losses);
        batches.push(pipeline.accumulate(batch_of(3 * step + 1, microbatches)).expect("a batch"));
        batches.push(pipeline.step_batch(batch_of(3 * step + 2, microbatches), 1e-2).expect("a step"));
    }
    let gathers = batches.iter().map(gathers).collect();
    let results = batches.into_iter().map(|summary| (summary.losses, summary.gradient_norm)).collect();
    (results, evaluations, parameters(&mut pipeline), gathers)
}

fn check(case: &Case, program: impl Fn() -> ValidatedProgram, what: &str) {
    let (results, evaluations, parameters, every_batch) = run(case, program(), false);
    let kept = run(case, program(), true);
    assert_eq!((&kept.0, &kept.1), (&results, &evaluations), "{what}: losses and norms");
    assert!(kept.2 == parameters, "{what}: parameters");
    let stages = (program().placement().stages() * case.replicas) as usize;
    assert_eq!(kept.3, [stages, 0, 0, stages, 0, 0], "{what}: each stage is gathered once in a step");
    assert!(every_batch.iter().all(|&gathers| gathers >= stages), "{what}: {every_batch:?}");
}

#[test]
fn parameters_are_gathered_once_in_a_step_and_results_have_the_same_bits() {
    check(&SHARDED, || program("1f1b", 2, None, 4, 3), "1f1b");
    check(&SHARDED, || program("gpipe", 1, None, 2, 1), "gpipe");
    for schedule in ["interleaved1f1b", "interleavedzerobubble"] {
        check(&SHARDED, || program(schedule, 2, Some(4), 4, 1), schedule);
    }
    for schedule in ["zbvzerobubble", "dualpipev"] {
        check(&SHARDED, || program(schedule, 2, None, 4, 1), schedule);
    }
    check(&Case { replicas: 3, ..SHARDED }, || program("1f1b", 2, None, 4, 1), "three replicas");
    let hybrid = Case { replicas: 4, mode: Hybrid { shards: 2 }, ..SHARDED };
    check(&hybrid, || program("1f1b", 2, None, 4, 1), "hybrid");
    check(&Case { make: mixed, ..SHARDED }, || program("interleaved1f1b", 2, Some(4), 4, 1), "mixed layers");
    check(&Case { make: ends, ..SHARDED }, || program("1f1b", 2, None, 4, 1), "shared parameters");
    let half = Case { precision: Precision::Bf16, ..SHARDED };
    check(&half, || program("zbvzerobubble", 2, None, 4, 1), "half precision");
}

#[test]
fn a_step_of_one_batch_gathers_as_the_program_says() {
    let gathers_of = |keep_gathered| {
        let mut pipeline = SHARDED.launch(program("interleaved1f1b", 2, Some(4), 4, 1), keep_gathered);
        let summary = pipeline.step_batch(batch_of(0, 8), 1e-2).expect("a step");
        gathers(&summary)
    };
    assert_eq!(gathers_of(true), gathers_of(false));
    assert!(gathers_of(true) > 16, "with a window of one, the eight stages come and go");
}

#[test]
fn parameters_that_are_read_or_a_batch_that_fails_drop_what_was_gathered() {
    let run = |keep_gathered| {
        let mut pipeline = SHARDED.launch(program("interleaved1f1b", 2, Some(2), 4, 1), keep_gathered);
        pipeline.accumulate(batch_of(0, 8)).expect("a batch");
        let before = parameters(&mut pipeline);
        let read = pipeline.accumulate(batch_of(1, 8)).expect("a batch");
        let norm = pipeline.step_batch(batch_of(2, 8), 1e-2).expect("a step").gradient_norm;
        pipeline.accumulate(batch_of(3, 8)).expect("a batch");
        let nan = batch(103, 8).mul_scalar(f32::NAN);
        pipeline.step(batch(3, 8), nan, 1e-2).expect_err("a loss is not a number");
        let after = parameters(&mut pipeline);
        let next = pipeline.step_batch(batch_of(4, 8), 1e-2).expect("the next step is clean").gradient_norm;
        (gathers(&read), (before, norm, after, next))
    };
    let ((kept, found), (every_batch, expected)) = (run(true), run(false));
    assert!(found == expected, "the same bits");
    assert_eq!(kept, 8, "reading has dropped them");
    assert!(every_batch >= 8, "{every_batch}");
}
