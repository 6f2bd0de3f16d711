//! A step that is computed again one rank at a time: the bits of the step, in a time that grows with the number of its batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::pipeline::{PipelineConfig, ReplayedBatches, StepReplay};
use pipewright_schedule::{Action, StageIndex};

use crate::support::{brought, config, launch, program, stage};

const STAGES: u32 = 4;
const MICROBATCHES: u32 = 2;
const RATE: f64 = 1e-2;

/// Counts forwards.
#[derive(Default)]
struct Forwards(AtomicUsize);

impl ActionHook for Forwards {
    fn around(&self, _rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
        if matches!(action, Action::Forward { .. }) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        run();
    }
}

/// Takes a step of several batches, computes a stage of it again, and compares the bits. Returns the number of forwards that
/// the replay computed.
fn check(batches: u64, index: u32) -> usize {
    let config = PipelineConfig { fingerprint_every: 1, ..config() };
    let program = program("gpipe", STAGES, MICROBATCHES);
    let mut pipeline = launch(program.clone(), &config);
    for number in 1..batches {
        pipeline.accumulate(brought(number, MICROBATCHES)).expect("a batch");
    }
    let summary = pipeline.step_batch(brought(batches, MICROBATCHES), RATE).expect("a step");
    let expected = summary.fingerprint.expect("a fingerprint");

    let forwards = Arc::new(Forwards::default());
    let config = PipelineConfig { hook: Some(forwards.clone()), ..config };
    let batches = (1..=batches).map(|number| brought(number, MICROBATCHES)).collect();
    let step = ReplayedBatches { batches, learning_rate: RATE };
    let make = |index, _: &_| stage(index, STAGES);
    let mut replay = StepReplay::new(program, config, None, step, make);
    let found = replay.stage(StageIndex::new(index)).expect("a stage");
    assert_eq!(found.gradient_norm, summary.gradient_norm);
    assert!(found.fingerprint.parameters().next().is_some());
    assert!(found.fingerprint.parameters().all(|leaf| expected.parameters().any(|other| other == leaf)));
    forwards.0.load(Ordering::Relaxed)
}

#[test]
fn a_replay_has_the_bits_of_the_step() {
    for index in 0..STAGES {
        check(1, index);
        check(3, index);
    }
}

#[test]
fn the_work_grows_with_the_number_of_batches() {
    let [few, many] = [2, 16].map(|batches| check(batches, 1));
    assert!(many <= 8 * few, "{few} forwards of two batches, {many} of sixteen");
}
