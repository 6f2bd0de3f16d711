//! Benches of the runtime. Each prints ratios of things measured side by side in one run, since the machine's speed
//! drifts from one run to the next.
//!
//! ```text
//! cargo run --release -p pipewright-bench -- bound      # 1F1B on two ranks against what the schedule allows
//! cargo run --release -p pipewright-bench -- memory     # peak resident size with 8 and with 64 microbatches
//! cargo run --release -p pipewright-bench -- activations  # measured peaks of activations against the simulator's
//! cargo run --release -p pipewright-bench -- overhead   # time an action of stages that do nothing
//! cargo run --release -p pipewright-bench -- epilogue   # time after the program, on 2 to 128 ranks that do nothing
//! cargo run --release -p pipewright-bench -- checkpoints # what saving costs a step
//! cargo run --release -p pipewright-bench -- schedules  # each schedule against one rank, and against its simulation
//! cargo run --release -p pipewright-bench -- shards     # what a rank holds of sharded parameters
//! cargo run --release -p pipewright-bench --features mpi -- processes  # two processes against two threads
//! cargo run --release -p pipewright-bench -- peer       # against PyTorch; needs bench/peer/setup.sh
//! ```

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod activations;
mod bound;
mod checkpoints;
mod epilogue;
mod memory;
mod model;
mod overhead;
mod peer;
mod processes;
mod products;
mod schedules;
mod shards;
mod size;
mod statistics;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pipewright::memory::TrackingAllocator;

#[global_allocator]
static ALLOCATOR: TrackingAllocator<mimalloc::MiMalloc> = TrackingAllocator(mimalloc::MiMalloc);

/// Benches of the Pipewright runtime.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// 1F1B on two ranks against (m + p - 1) x the slowest stage's time a microbatch.
    Bound(bound::Options),
    /// Peak resident size of 1F1B and GPipe with 8 and with 64 microbatches.
    Memory(memory::Options),
    /// Measured peaks of activations against the simulator's, for each schedule.
    Activations(activations::Options),
    /// Time an action of stages that do nothing.
    Overhead(overhead::Options),
    /// Time after the program, on ranks that do nothing.
    Epilogue(epilogue::Options),
    /// What saving a checkpoint costs, against a step.
    Checkpoints(checkpoints::Options),
    /// Each schedule against twice one rank's speed, and against its own simulation.
    Schedules(schedules::Options),
    /// What a rank holds when parameters are sharded, against what it holds when they are not.
    Shards(shards::Options),
    /// Two processes over MPI against two threads, in turn.
    Processes(processes::Options),
    /// Throughput against PyTorch, in turn.
    Peer(peer::Options),
}

fn main() -> ExitCode {
    // As the command line does: freed memory stays with the process.
    // SAFETY: no other thread runs yet; 15 is `mi_option_purge_delay` of mimalloc's C interface.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
    let outcome: Result<(), Box<dyn Error>> = match Arguments::parse().bench {
        Bench::Bound(options) => bound::run(&options),
        Bench::Memory(options) => memory::run(&options),
        Bench::Activations(options) => activations::run(&options),
        Bench::Overhead(options) => overhead::run(&options),
        Bench::Epilogue(options) => epilogue::run(&options),
        Bench::Checkpoints(options) => checkpoints::run(&options),
        Bench::Schedules(options) => schedules::run(&options),
        Bench::Shards(options) => shards::run(&options),
        Bench::Processes(options) => processes::run(&options),
        Bench::Peer(options) => peer::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
