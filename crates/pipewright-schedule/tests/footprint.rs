//! Compares the estimates of memory with the memory that schedules need, from their generation to their
//! simulation.

use std::hint::black_box;

use peak_alloc::PeakAlloc;
use pipewright_schedule::footprint::{Use, most_bytes};
use pipewright_schedule::generate::{catalogue, generate, most_cells};
use pipewright_schedule::simulate::{logical, timed};
use pipewright_schedule::{Costs, Level, LowerConfig, ScheduleSpec, csv, lower, validate};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The bytes that a schedule needs whatever its size is, and the bytes of each of its stages.
const FIXED: usize = 32 << 10;
const OF_STAGE: usize = 2 << 10;

/// Returns the largest number of bytes that some work allocates at once.
fn peak(work: impl FnOnce()) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    work();
    ALLOCATOR.peak_usage().saturating_sub(before)
}

/// Makes as much of a schedule as `work` says.
fn make(name: &str, spec: &ScheduleSpec, work: Use) {
    let schedule = generate(name, spec).expect("a size that was checked");
    if work == Use::Generate {
        black_box(csv::print_schedule(&schedule));
        return;
    }
    let level = if work == Use::Lower { Level::Full } else { Level::Comms };
    let program = lower(&schedule, &LowerConfig::from(level)).expect("a sound schedule");
    if work == Use::Lower {
        black_box(csv::print_program(&program));
        validate(program, level).expect("a sound program");
        return;
    }
    let program = validate(program, level).expect("a sound program").into_program();
    let run = timed(&program, &Costs::default()).expect("a sound program ends");
    let steps = logical(&program).expect("a sound program ends").steps();
    black_box((run, steps));
}

/// Compares an estimate with the measurement. Returns how many times as large it is.
fn check(name: &str, spec: &ScheduleSpec, work: Use) -> Option<f64> {
    let cells = most_cells(name, spec).ok()?;
    let most = most_bytes(cells, work);
    let used = peak(|| make(name, spec, work));
    let stages = spec.ranks as usize * spec.stages_per_rank.unwrap_or(2) as usize;
    assert!(
        used <= most as usize + FIXED + OF_STAGE * stages,
        "{name} {spec:?} {work:?}: {used} bytes of {most} for {cells} cells"
    );
    Some(most as f64 / used as f64)
}

/// One test alone, because the peak covers all threads.
#[test]
fn estimates_are_upper_bounds_and_not_far_above() {
    let mut runner = TestRunner::new(Config::with_cases(1200));
    let sizes = (0..catalogue().len(), 1..9u32, prop::option::of(1..4u32), 1..40u32);
    let compared = runner.run(&sizes, |(at, ranks, stages_per_rank, microbatches)| {
        let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        for work in [Use::Generate, Use::Lower, Use::Simulate] {
            check(catalogue()[at].name, &spec, work);
        }
        Ok(())
    });
    compared.expect("all estimates are upper bounds");
    for generator in catalogue() {
        let spec = ScheduleSpec { ranks: 8, microbatches: 256, ..ScheduleSpec::default() };
        let ratio = check(generator.name, &spec, Use::Simulate).expect("a size that every schedule has");
        assert!(ratio < 5.0, "{}: the estimate is {ratio} times what is needed", generator.name);
    }
}
