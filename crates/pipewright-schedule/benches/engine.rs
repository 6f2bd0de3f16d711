//! Measures the engine: generation, lowering, validation and simulation of a schedule, each alone and all together.
//!
//! `cargo bench -p pipewright-schedule` runs it. `planning` has the reference size: 64 ranks with 2 chunks each and 256
//! microbatches. `scale` gives the throughput in actions at sizes up to 500 times larger; the last takes one and a half
//! gigabytes of memory and a minute.
//!
//! The allocator is the one of the command line, which puts large tables on huge pages. The system's allocator returns
//! memory after each iteration, so the bench would measure how fast the machine clears pages.

use std::hint::black_box;

use criterion::{
    BatchSize, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main,
};
use pipewright_schedule::simulate::{logical, timed};
use pipewright_schedule::{
    Costs, Level, LowerConfig, Program, Schedule, ScheduleSpec, generate, lower, validate,
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn schedule(ranks: u32, chunks: u32, microbatches: u32) -> Schedule {
    let spec = ScheduleSpec { ranks, stages_per_rank: Some(chunks), microbatches, ..ScheduleSpec::default() };
    generate("interleaved1f1b", &spec).expect("a size that the schedule has")
}

fn lowered(schedule: &Schedule) -> Program {
    lower(schedule, &LowerConfig::from(Level::Comms)).expect("a sound schedule")
}

fn actions(program: &Program) -> u64 {
    program.rows().iter().map(|row| row.len() as u64).sum()
}

fn planning(criterion: &mut Criterion) {
    let (ranks, chunks, microbatches) = (64, 2, 256);
    let made = schedule(ranks, chunks, microbatches);
    let program = lowered(&made);
    let mut group = criterion.benchmark_group("planning");
    group.throughput(Throughput::Elements(actions(&program)));
    group.bench_function("generate", |bench| bench.iter(|| schedule(ranks, chunks, microbatches)));
    group.bench_function("lower", |bench| bench.iter(|| lowered(black_box(&made))));
    group.bench_function("validate", |bench| {
        bench.iter_batched(
            || program.clone(),
            |program| validate(program, Level::Comms),
            BatchSize::LargeInput,
        );
    });
    group.bench_function("simulate, logical", |bench| {
        bench.iter(|| logical(black_box(&program)).map(|run| run.steps()));
    });
    let costs = Costs::default();
    group.bench_function("simulate, timed", |bench| bench.iter(|| timed(black_box(&program), &costs)));
    group.bench_function("generate, lower, validate, simulate", |bench| {
        bench.iter(|| {
            let program = lowered(&schedule(ranks, chunks, microbatches));
            let program = validate(program, Level::Comms).expect("a sound program");
            logical(program.as_program()).map(|run| run.steps())
        });
    });
    group.finish();
}

fn scale(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scale");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for (ranks, chunks, microbatches) in [(16, 2, 64), (64, 2, 256), (256, 2, 1024), (1024, 4, 4096)] {
        let size = actions(&lowered(&schedule(ranks, chunks, microbatches)));
        group.throughput(Throughput::Elements(size));
        group.bench_function(
            BenchmarkId::from_parameter(format!("{ranks}x{chunks}x{microbatches}")),
            |bench| {
                bench.iter(|| validate(lowered(&schedule(ranks, chunks, microbatches)), Level::Comms));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, planning, scale);
criterion_main!(benches);
