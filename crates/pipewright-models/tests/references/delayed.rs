//! Training with parameters that are delayed by one update, compared with PyTorch (`data/delayed`): each batch is
//! computed at the parameters before the last update, under every cut and schedule with the same bits.

use std::fs::read_to_string;
use std::sync::Arc;
use std::time::Duration;

use burn::optim::SgdConfig;
use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter};
use pipewright::pipeline::PipelineConfig;
use pipewright::train::Trainer;
use pipewright_schedule::ScheduleSpec;
use serde::Deserialize;
use serde_json::Map;

use crate::pipelined_run::{train_steps, trainer};
use crate::reference::{Reference, Step, Within, folder};

const SCHEDULES: [(&str, u32); 8] = [
    ("gpipe", 1),
    ("1f1b", 2),
    ("1f1b", 4),
    ("gpipe", 2),
    ("zb-h1", 2),
    ("zbvzerobubble", 2),
    ("interleaved1f1b", 2),
    ("dualpipev", 2),
];

#[derive(Deserialize)]
struct Delayed {
    expected: Vec<Step>,
}

/// Returns the reference of an optimizer, with the configuration of its runs.
fn reference(optimizer: &str) -> (Reference, PipelineConfig) {
    let mut reference = Reference::load("llama-tiny");
    let text = read_to_string(folder("delayed").join(format!("llama-tiny-{optimizer}.json")));
    let delayed: Delayed = serde_json::from_str(&text.expect("the file can be read")).expect("it is JSON");
    reference.expected.steps = delayed.expected;
    let sgd = (optimizer == "sgd").then(|| SgdConfig::new().init());
    if sgd.is_some() {
        reference.expected.lr = 0.05;
    }
    (reference, PipelineConfig { delayed: true, optimizer: sgd, ..PipelineConfig::default() })
}

/// Takes so many steps. Each begins during the one before it if it can.
fn take_steps(trainer: &mut Trainer, count: usize) -> Vec<Step> {
    let step = |index| {
        let taken = if index + 1 < count { trainer.step_ahead() } else { trainer.step() };
        let (metrics, _) = taken.expect("a step");
        Step { loss: metrics.loss, grad_norm: metrics.grad_norm, balance: None }
    };
    (0..count).map(step).collect()
}

fn check(optimizer: &str) {
    let (reference, config) = reference(optimizer);
    let expected = &reference.expected.steps;
    let one_rank = train_steps(&reference, "gpipe", 1, 4, &config, expected.len());
    Reference::assert_within(&one_rank, expected, Within { loss: 5e-6, grad_norm: 5e-5 });
    for (schedule, ranks) in SCHEDULES {
        let alone = train_steps(&reference, schedule, ranks, 4, &config, expected.len());
        assert_eq!(alone, one_rank, "{schedule} on {ranks} ranks, drained");
        let spec = ScheduleSpec { ranks, microbatches: 4, ..ScheduleSpec::default() };
        let (mut trainer, _) = trainer(&reference, schedule, spec, &config);
        let run = take_steps(&mut trainer, expected.len());
        assert_eq!(run, one_rank, "{schedule} on {ranks} ranks");
    }
}

#[test]
fn adamw_retraces_the_delayed_reference() {
    check("adamw");
}

#[test]
fn sgd_retraces_the_delayed_reference() {
    check("sgd");
}

/// A run that resumes from a checkpoint has the bits of the run that continues, under another cut too: both versions of
/// the parameters are state. A checkpoint of a run without delay has one, with which both begin.
#[test]
fn both_versions_are_state() {
    const BEFORE: usize = 5;
    let (reference, config) = reference("adamw");
    let trainer = |schedule: &str, ranks, config: &PipelineConfig| {
        let spec = ScheduleSpec { ranks, microbatches: 4, ..ScheduleSpec::default() };
        trainer(&reference, schedule, spec, config).0
    };
    let steps = |trainer: &mut Trainer, count| -> Vec<f64> {
        take_steps(trainer, count).into_iter().map(|step| step.loss).collect()
    };
    let scratch = tempfile::tempdir().expect("a folder");
    let resumed = |first: &mut Trainer, name: &str, schedule: &str, ranks, config: &PipelineConfig| {
        let folder = CheckpointFolder::own(&scratch.path().join(name)).expect("no other process owns it");
        let mut writer = CheckpointWriter::start(folder, 1, 2, Duration::from_secs(60)).expect("a thread");
        let state = first.state(Map::new()).expect("a state");
        writer.save(state).and_then(|_| writer.wait()).expect("it is saved");
        let mut second = trainer(schedule, ranks, config);
        let checkpoint = CheckpointFolder::newest(&scratch.path().join(name)).expect("a checkpoint");
        second.resume(&Arc::new(checkpoint)).expect("it fits");
        second
    };
    let mut first = trainer("1f1b", 2, &config);
    steps(&mut first, BEFORE);
    let mut second = resumed(&mut first, "delayed", "interleaved1f1b", 2, &config);
    let mut alone = resumed(&mut first, "alone", "gpipe", 1, &config);
    let rest = steps(&mut first, 3);
    assert_eq!(steps(&mut second, 3), rest);
    assert_eq!(steps(&mut alone, 3), rest);

    let synchronous = PipelineConfig { delayed: false, ..config.clone() };
    let mut before = trainer("1f1b", 2, &synchronous);
    steps(&mut before, BEFORE);
    let mut after = resumed(&mut before, "synchronous", "1f1b", 2, &config);
    let [expected, next] = steps(&mut before, 2)[..] else { unreachable!("two steps") };
    let [found, delayed] = steps(&mut after, 2)[..] else { unreachable!("two steps") };
    assert_eq!(found, expected, "both versions are equal at first");
    assert_ne!(delayed, next, "the second step reads the same version");
}
