//! Timelines of several processes whose clocks differ: the merged timeline has one clock.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use pipewright::pipeline::PipelineConfig;
use pipewright::transport::{ClockError, World};
use pipewright_schedule::{
    Action, Level, LowerConfig, ScheduleSpec, StageIndex, Timeline, generate, lower, validate,
};

use crate::linear::{launch, rows};
use crate::mpirun;

/// The error of each process's clock. The clock of the first process is the common one, whatever it shows.
const ERRORS: [ClockError; 4] = [
    ClockError { ahead: -100.0, drift: 0.0 },
    ClockError { ahead: 5.0, drift: 400e-6 },
    ClockError { ahead: -3.0, drift: -200e-6 },
    ClockError { ahead: 4000.0, drift: 0.0 },
];
const MICROBATCHES: u32 = 4;
const STEPS: u32 = 16;

/// Returns the number that the launcher gave this process, which is also MPI's.
pub(crate) fn own_rank() -> usize {
    let rank = std::env::var("OMPI_COMM_WORLD_RANK").or_else(|_| std::env::var("PMI_RANK"));
    rank.expect("a launcher started this process").parse().expect("a number")
}

pub(crate) fn compare_clocks() {
    let deadline = Duration::from_secs(20);
    let rank = own_rank();
    let world = World::mpi_with_clock_error(deadline, ERRORS[rank]).expect("mpirun started this process");
    let ranks = world.ranks();
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let program = lower(&generate("1f1b", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
    let program = validate(program.expect("it lowers"), Level::Comms).expect("it is sound");
    let mut pipeline = launch(program, world, PipelineConfig { deadline, ..PipelineConfig::default() });
    for step in 0..STEPS {
        // One process begins the step later than the others.
        if step % ranks == rank as u32 {
            thread::sleep(Duration::from_millis(150));
        }
        let summary = pipeline.step(rows(8), rows(8), 1e-3).expect("a step");
        if rank == 0 {
            check(&summary.timeline, ranks, step);
        } else {
            let events = summary.timeline.events();
            assert!(
                events.iter().all(|event| event.rank.index() == rank),
                "each process knows its own events"
            );
        }
    }
    if rank == 0 {
        mpirun::report(&format!("one clock for {ranks} processes"));
    }
}

/// Checks that no receive ends before its send begins.
fn check(timeline: &Timeline, ranks: u32, step: u32) {
    let skew = timeline.clock_skew().expect("the events come from several processes");
    assert!((0.0..1.0).contains(&skew.uncertainty), "{skew:?}");
    let starts: HashMap<Action, f64> =
        timeline.events().iter().map(|event| (event.action, event.start)).collect();
    let mut messages = 0;
    for event in timeline.events() {
        let send = match event.action {
            Action::RecvForward { stage, microbatch } => {
                Action::SendForward { stage: StageIndex::new(stage.get() - 1), microbatch }
            }
            Action::RecvBackward { stage, microbatch } => {
                Action::SendBackward { stage: StageIndex::new(stage.get() + 1), microbatch }
            }
            _ => continue,
        };
        messages += 1;
        let sent = starts[&send];
        // The times of two processes have an error each.
        let earliest = sent - 2.0 * skew.uncertainty;
        assert!(
            event.end >= earliest,
            "step {step}: {} ends at {} on rank {}, and {send} begins at {sent}: {skew:?}",
            event.action,
            event.end,
            event.rank
        );
    }
    assert_eq!(messages, 2 * (ranks - 1) * MICROBATCHES);
    // Times count from the start of the step in the first process. The others begin at most 0.15 s earlier,
    // or as much later as one machine with many processes delays them.
    assert!(timeline.start() > -1.0 && timeline.start() + timeline.makespan() < 10.0, "{timeline:?}");
    if step + 1 == STEPS {
        // In the two seconds of the test the second clock gains 0.8 ms; measurements are a second apart.
        assert!(skew.change > 300e-6, "{skew:?}");
    }
}
