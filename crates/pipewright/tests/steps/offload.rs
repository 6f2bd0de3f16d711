//! The inputs of recomputed forwards leave memory and come back: what a launch refuses, what a step shows, and what is
//! left of it.

use std::path::Path;

use pipewright::batch::Batch;
use pipewright::failure::Cause;
use pipewright::offload::OffloadTo;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError, StepSummary};
use pipewright::transport::World;
use pipewright_schedule::{ActionKind, Rank, Recompute, ValidatedProgram};

use crate::support::{self, batch, config, offloaded, program, split};

const MICROBATCHES: u32 = 8;

fn launch(program: ValidatedProgram, config: &PipelineConfig) -> Result<Pipeline, PipelineError> {
    let stages = program.placement().stages();
    let world = World::local(program.ranks() * config.data_parallel);
    Pipeline::launch(program, world, config, move |stage| support::stage(stage, stages))
}

fn to_folder(folder: &Path, recompute: Recompute) -> PipelineConfig {
    PipelineConfig { recompute, offload: Some(OffloadTo::Folder(folder.to_owned())), ..config() }
}

fn step(pipeline: &mut Pipeline) -> Result<StepSummary, PipelineError> {
    let inputs = split(batch(1, MICROBATCHES), MICROBATCHES);
    let targets = split(batch(2, MICROBATCHES), MICROBATCHES);
    pipeline.step_batch(Batch::new(inputs, targets), 1e-2)
}

/// Checks that a launch of `program` is refused with a message that contains `message`.
fn refuse(program: ValidatedProgram, config: &PipelineConfig, message: &str) {
    let Err(error) = launch(program, config) else { panic!("{message}") };
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn only_inputs_that_are_kept_leave() {
    let folder = tempfile::tempdir().expect("a folder");
    let plain = || program("gpipe", 2, MICROBATCHES);
    let all = to_folder(folder.path(), Recompute::Stage);
    let moving = || offloaded(plain(), &all);
    refuse(moving(), &config(), "the program has 0OFFLOAD0, and no place is given to which it moves tensors");
    let none = to_folder(folder.path(), Recompute::None);
    refuse(
        plain(),
        &none,
        "`offload` moves the inputs that recomputed forwards keep, and no forward is recomputed",
    );
    let other = "1".parse().expect("a choice");
    refuse(
        moving(),
        &to_folder(folder.path(), other),
        "0OFFLOAD0 moves the inputs that a recomputed forward keeps",
    );
    let host = PipelineConfig { recompute: Recompute::Stage, offload: Some(OffloadTo::Host), ..config() };
    refuse(moving(), &host, "it computes on the processor, whose tensors are in the host's memory already");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let expected = format!("cannot be written to `{}`", file.display());
    refuse(moving(), &to_folder(&file, Recompute::Stage), &expected);
}

#[test]
fn a_step_shows_what_has_left_and_leaves_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let below = folder.path().join("a/b");
    let config = to_folder(&below, Recompute::Stage);
    let program = offloaded(program("gpipe", 2, MICROBATCHES), &config);
    let moved = |kind| {
        let row = program.row(Rank::new(0)).iter();
        row.filter(|action| action.kind() == kind).count()
    };
    assert_eq!([ActionKind::Offload, ActionKind::Reload].map(moved), [8, 8]);
    let mut pipeline = launch(program.clone(), &config).expect("it starts");
    for _ in 0..50 {
        let summary = step(&mut pipeline).expect("a step");
        let events = summary.timeline.events_of(Rank::new(0));
        let of = |kind| events.iter().filter(move |event| event.action.kind() == kind);
        assert_eq!([ActionKind::Offload, ActionKind::Reload].map(|kind| of(kind).count()), [8, 8]);
        for reload in of(ActionKind::Reload) {
            let is_backward = |kind| matches!(kind, ActionKind::Backward | ActionKind::InputBackward);
            let backward = events.iter().find(|event| {
                is_backward(event.action.kind()) && event.action.microbatch() == reload.action.microbatch()
            });
            assert!(backward.is_some_and(|backward| reload.end <= backward.start + 1e-6), "{events:?}");
        }
        assert_eq!(std::fs::read_dir(&below).expect("a folder").count(), 0);
    }
    drop(pipeline);
    assert_eq!(std::fs::read_dir(&below).expect("a folder").count(), 0);
}

#[test]
fn a_folder_that_is_lost_ends_the_step_and_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let below = folder.path().join("below");
    let config = to_folder(&below, Recompute::Stage);
    let program = offloaded(program("1f1b", 2, MICROBATCHES), &config);
    let mut pipeline = launch(program, &config).expect("it starts");
    std::fs::remove_dir(&below).expect("an empty folder");
    let Err(error) = step(&mut pipeline) else { panic!("no folder") };
    let message = error.to_string();
    let PipelineError::Step(error) = error else { panic!("{message}") };
    assert!(matches!(error.cause, Cause::Offload(_)), "{message}");
    assert!(
        message.contains("the inputs that stage 0 keeps of microbatch 1 cannot be written to `"),
        "{message}"
    );
    assert!(message.contains(&below.display().to_string()), "{message}");
    // The next step starts without what the failed one has left.
    std::fs::create_dir(&below).expect("the folder");
    step(&mut pipeline).expect("a step");
    assert_eq!(std::fs::read_dir(&below).expect("a folder").count(), 0);
}
