//! Sharded data parallelism: replicas that hold shards train to the same bits as replicas that hold whole
//! parameters.

mod functions;
mod groups;
mod kept;
pub(crate) mod modules;
mod run;

use burn::module::ParamGroup;
use burn::optim::MuonConfig;
use modules::{ends, mixed};
use pipewright::mesh::DataParallelMode::{Hybrid, Replicated, Sharded};
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, SeededPipeline};
use pipewright::transport::World;
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, ValidatedProgram, generate, lower, validate};
use run::{
    batch_of, check_interleavings, check_resume, check_with, config_of, launch_with, parameters, program,
    saved, train,
};

use crate::support::{self, batch, stage};

fn check(schedule: &str, ranks: u32, microbatches: u32, replicas: u32, window: u32) {
    let what = format!("{schedule}, {ranks} ranks, {replicas} replicas, window {window}");
    check_with(stage, || program(schedule, ranks, None, microbatches, window), replicas, &what);
}

#[test]
fn sharded_replicas_train_to_the_bits_of_whole_ones() {
    check("1f1b", 1, 4, 2, 3);
    check("1f1b", 2, 4, 2, 3);
    check("gpipe", 2, 2, 4, 3);
    check("1f1b", 4, 4, 3, 3);
    // More replicas than rows of any parameter.
    check("1f1b", 1, 1, 8, 3);
}

#[test]
fn every_schedule_takes_parts() {
    for generator in catalogue().iter().filter(|generator| generator.trains) {
        for window in [1, 3] {
            check(generator.name, 2, 4, 2, window);
        }
    }
}

#[test]
fn parameters_come_and_go_while_microbatches_are_in_flight() {
    // With four stages per rank and a window of one, every change of stage gathers again.
    for schedule in ["interleaved1f1b", "loopedbfs", "interleavedzerobubble"] {
        let program = || program(schedule, 2, Some(4), 4, 1);
        check_with(stage, program, 2, schedule);
    }
}

#[test]
fn layers_of_every_kind_are_sharded() {
    check_with(mixed, || program("1f1b", 2, None, 4, 3), 2, "mixed layers");
    check_with(mixed, || program("interleaved1f1b", 2, Some(4), 4, 1), 2, "mixed layers that come and go");
    check_with(mixed, || program("zbvzerobubble", 2, None, 4, 1), 3, "mixed layers, split backward");
}

#[test]
fn tied_parameters_are_sharded() {
    check_with(ends, || program("1f1b", 2, None, 4, 3), 2, "tied");
    check_with(ends, || program("1f1b", 3, None, 4, 3), 3, "tied, a stage between");
    check_with(ends, || program("zbvzerobubble", 2, None, 4, 1), 2, "tied on one rank");
}

#[test]
fn every_interleaving_gives_the_same_bits() {
    let launch = |seed| {
        let program = program("interleavedzerobubble", 2, Some(3), 4, 1);
        let stages = program.placement().stages();
        let make = move |index| mixed(index, stages);
        SeededPipeline::new(program, &config_of(2, Sharded), seed, make).expect("it starts")
    };
    check_interleavings(launch, 8, 50);
}

#[test]
fn a_lost_message_is_reported_and_the_next_step_is_clean() {
    let mut lost = 0;
    let microbatches = 4;
    for nth in 0.. {
        let program = program("1f1b", 2, None, microbatches / 2, 1);
        let mut pipeline = SeededPipeline::new(program, &config_of(2, Sharded), nth, |index| stage(index, 2))
            .expect("it starts");
        let expected = pipeline.step_batch(batch_of(0, microbatches), 0.0).expect("a step").losses;
        pipeline.lose_message(nth as usize);
        if pipeline.step_batch(batch_of(1, microbatches), 0.0).is_ok() {
            break;
        }
        lost += 1;
        let found = pipeline.step_batch(batch_of(0, microbatches), 0.0);
        assert!(
            matches!(&found, Err(PipelineError::Diverged { .. }))
                || found.expect("a clean step").losses == expected
        );
    }
    assert!(lost > 20, "{lost} messages were lost");
}

#[test]
fn several_steps_evaluation_and_a_bad_loss() {
    let run = |replicas, mode| {
        let program = program("interleaved1f1b", 2, Some(2), 4, 1);
        let microbatches = 4 * replicas;
        let batch = |seed| batch(seed, microbatches);
        let mut pipeline = launch_with(program, replicas, mode, stage);
        for step in 0..2 {
            pipeline.accumulate(batch_of(step, microbatches)).expect("a step");
        }
        let report = pipeline.step(batch(2), batch(102), 1e-2).expect("a step");
        let evaluated = pipeline.eval(batch(3), Some(batch(103))).expect("an evaluation");
        let before = parameters(&mut pipeline);
        let nan = batch(103).mul_scalar(f32::NAN);
        pipeline.step(batch(3), nan, 1e-2).expect_err("a loss is not a number");
        assert!(before == parameters(&mut pipeline), "a step that failed changes nothing");
        let next = pipeline.step(batch(4), batch(104), 1e-2).expect("the next step is clean");
        (report.losses, report.gradient_norm, evaluated.losses, next.losses, next.gradient_norm)
    };
    assert_eq!(run(2, Sharded), run(2, Replicated));
    assert_eq!(run(6, Hybrid { shards: 2 }), run(6, Replicated));
}

#[test]
fn running_statistics_are_kept_through_evaluation_and_checkpoints() {
    let run = |mode| {
        let mut pipeline = launch_with(program("1f1b", 2, None, 4, 1), 2, mode, mixed);
        train(&mut pipeline, 0..2, 8);
        let evaluated = pipeline.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        let (steps, _) = train(&mut pipeline, 2..4, 8);
        let again = pipeline.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        let (_folder, checkpoint) = saved(&mut pipeline, 4);
        let mut resumed = launch_with(program("1f1b", 2, None, 8, 1), 1, Replicated, mixed);
        resumed.restore(&checkpoint).expect("it is restored");
        let after = resumed.eval(batch(9, 8), Some(batch(109, 8))).expect("an evaluation").losses;
        (evaluated, steps, again, after)
    };
    assert_eq!(run(Sharded), run(Replicated));
}

#[test]
fn parameters_may_be_looked_at_while_gradients_wait() {
    let run = |looks: bool| {
        let mut pipeline = launch_with(program("1f1b", 2, None, 4, 1), 2, Sharded, stage);
        pipeline.accumulate(batch_of(0, 8)).expect("a step");
        if looks {
            parameters(&mut pipeline);
        }
        let report = pipeline.step_batch(batch_of(1, 8), 1e-2).expect("a step");
        (report.losses, report.gradient_norm, parameters(&mut pipeline))
    };
    assert!(run(true) == run(false));
}

#[test]
fn a_sharded_checkpoint_resumes_under_any_mesh() {
    check_resume((Sharded, 2), (Sharded, 2));
    check_resume((Sharded, 2), (Replicated, 1));
    check_resume((Replicated, 2), (Sharded, 3));
    check_resume((Sharded, 4), (Sharded, 3));
    check_resume((Sharded, 6), (Sharded, 2));
}

fn refusal(program: ValidatedProgram, config: &PipelineConfig) -> PipelineError {
    let launched = Pipeline::launch(program, World::local(4), config, |index| stage(index, 2));
    launched.err().expect("it is refused")
}

#[test]
fn optimizers_that_cannot_be_sharded_are_refused() {
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let lowered = lower(&generate("1f1b", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
    let never = validate(lowered.expect("it lowers"), Level::Comms).expect("it is sound");
    let error = refusal(never, &config_of(2, Sharded));
    assert!(error.to_string().contains("a program at level `comms` never gathers them"), "{error}");
    // The optimizer of a single parameter group is enough.
    let matrices = ParamGroup::from_predicate("weight");
    let optimizer = support::optimizer().with_group(matrices, MuonConfig::new().build(), None);
    let config = PipelineConfig { optimizer: Some(optimizer), ..config_of(2, Sharded) };
    let error = refusal(program("1f1b", 2, None, 4, 3), &config).to_string();
    assert!(error.contains("of `layers.") && error.contains("weight` depends on other elements"), "{error}");
}
