//! Evaluations with another schedule or number of microbatches than steps, over the same stages.

use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright::mesh::DataParallelMode::{Replicated, Sharded};
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig};
use pipewright::tensor::unpack;
use pipewright::transport::World;
use pipewright_schedule::csv::parse_schedule;

use crate::support::{LAYERS, Mlp, Step, batch, config, loss, optimizer, program, stage};

const MICROBATCHES: u32 = 8;

fn builder(schedule: &str) -> PipelineBuilder {
    Pipeline::builder(Layers::new(LAYERS, |layer| Mlp::new(layer, 1)))
        .ranks(2)
        .schedule(schedule)
        .microbatches(MICROBATCHES)
        .loss(loss)
        .optimizer(optimizer())
}

/// The losses and the outputs of an evaluation.
type Evaluated = (Vec<f64>, Vec<f32>);

/// Returns two steps with an evaluation after each, and the losses and outputs of the evaluations.
fn run(builder: PipelineBuilder) -> (Vec<Step>, Vec<Evaluated>) {
    let mut pipeline = builder.launch().expect("it starts");
    let (mut steps, mut evaluations) = (Vec::new(), Vec::new());
    for step in 0..2 {
        let (inputs, targets) = (batch(step, MICROBATCHES), batch(100 + step, MICROBATCHES));
        let summary = pipeline.step(inputs.clone(), targets.clone(), 1e-2).expect("a step");
        steps.push((summary.losses, summary.gradient_norm));
        let summary = pipeline.eval(inputs, Some(targets)).expect("an evaluation");
        assert_eq!(summary.losses.len(), pipeline.eval_microbatches() as usize);
        let outputs =
            summary.outputs.into_iter().map(|values| unpack::<Tensor<2>>(values).expect("a matrix"));
        let outputs = Tensor::cat(outputs.collect(), 0).into_data().iter::<f32>().collect();
        evaluations.push((summary.losses, outputs));
    }
    (steps, evaluations)
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

/// Checks that steps are those without an evaluation of its own, and that its outputs and its loss are the
/// same numbers.
fn check(
    of: impl Fn() -> PipelineBuilder,
    evaluation: impl Fn(PipelineBuilder) -> PipelineBuilder,
    what: &str,
) {
    let ((steps, plain), (found, other)) = (run(of()), run(evaluation(of())));
    assert_eq!(found, steps, "{what}: steps");
    for ((losses, outputs), (other_losses, other_outputs)) in plain.iter().zip(&other) {
        assert!((mean(losses) - mean(other_losses)).abs() < 1e-6, "{what}: {losses:?} {other_losses:?}");
        assert_eq!(outputs.len(), other_outputs.len(), "{what}");
        let differs = |(one, other): (&f32, &f32)| (one - other).abs() > 1e-6;
        assert!(!outputs.iter().zip(other_outputs).any(differs), "{what}: outputs");
    }
}

#[test]
fn evaluations_have_a_schedule_of_their_own() {
    for microbatches in [2, 12, 24] {
        check(
            || builder("1f1b"),
            |builder| builder.eval_microbatches(microbatches),
            &microbatches.to_string(),
        );
    }
    check(|| builder("1f1b"), |builder| builder.eval_schedule("gpipe"), "gpipe");
    check(|| builder("zb-h1"), |builder| builder.eval_schedule("forwardonly").eval_microbatches(3), "zb-h1");
    check(|| builder("zbvzerobubble"), |builder| builder.eval_schedule("v-half").eval_microbatches(4), "a V");
    let interleaved = || builder("interleaved1f1b").stages_per_rank(2);
    check(interleaved, |builder| builder.eval_schedule("loopedbfs").eval_microbatches(4), "interleaved");
    let own = || parse_schedule("0F0,0F1\n1F0,1F1\n").expect("a schedule");
    check(|| builder("1f1b"), |builder| builder.eval_schedule(own()), "a schedule of one's own");
}

#[test]
fn replicas_share_the_microbatches_of_an_evaluation() {
    for mode in [Replicated, Sharded] {
        let replicas = || builder("1f1b").data_parallel(2).data_parallel_mode(mode);
        for microbatches in [4, 12] {
            check(replicas, |builder| builder.eval_microbatches(microbatches), &format!("{mode:?}"));
        }
        check(
            replicas,
            |builder| builder.eval_schedule("gpipe").eval_microbatches(6),
            &format!("{mode:?}, gpipe"),
        );
    }
}

#[test]
fn a_forward_only_pipeline_takes_other_microbatches() {
    let forward = || Pipeline::builder(Layers::new(LAYERS, |layer| Mlp::new(layer, 1))).ranks(2);
    let mut pipeline =
        forward().schedule("forwardonly").microbatches(4).eval_microbatches(6).launch().expect("it starts");
    let summary = pipeline.eval(batch(0, 4), None::<Tensor<2>>).expect("an evaluation");
    assert_eq!((summary.outputs.len(), pipeline.microbatches(), pipeline.eval_microbatches()), (6, 4, 6));
}

#[test]
fn other_programs_are_refused() {
    let refused = |builder: PipelineBuilder, expected: &str| {
        let error = builder.launch().map(drop).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    };
    let placement = "the program of evaluations places its stages on other ranks than the program";
    refused(builder("interleaved1f1b").stages_per_rank(2).eval_schedule("zbvzerobubble"), placement);
    let uneven = "3 microbatches cannot be shared equally by 2 replicas";
    refused(builder("1f1b").data_parallel(2).eval_microbatches(3), uneven);
    let own = parse_schedule("0F0,0F1\n1F0,1F1\n").expect("a schedule");
    let size = "the schedule has 2 eval_microbatches, and the builder was asked for 3";
    refused(builder("1f1b").eval_schedule(own).eval_microbatches(3), size);
    let slices = "the program of evaluations cuts microbatches into 2 slices, and the program into 1";
    refused(builder("1f1b").eval_schedule("seq1f1b"), slices);
    let mut wrong = builder("1f1b").eval_microbatches(4).launch().expect("it starts");
    let batch_of = |count| pipewright::batch::Batch::split(batch(0, 8), batch(1, 8), count).expect("a batch");
    let error = wrong.eval_batch(batch_of(8)).map(drop).expect_err("the evaluation has 4");
    assert!(error.to_string().contains('4'), "{error}");
    wrong.step_batch(batch_of(8), 1e-2).expect("a step has 8");
}

#[test]
fn a_configuration_may_have_a_program_of_evaluations() {
    let launch = |evaluation| {
        let config = PipelineConfig { evaluation: Some(Arc::new(evaluation)), ..config() };
        Pipeline::launch(program("1f1b", 2, 4), World::local(2), &config, |index| stage(index, 2))
    };
    let mut pipeline = launch(program("gpipe", 2, 2)).expect("it starts");
    assert_eq!(pipeline.eval(batch(0, 4), Some(batch(1, 4))).expect("an evaluation").losses.len(), 2);
    let refused = launch(program("1f1b", 4, 4)).err().expect("it has four ranks");
    assert!(refused.to_string().contains("places its stages on other ranks"), "{refused}");
}
