//! Benches of the runtime. Each prints ratios of times measured in the same run, because the speed of a
//! machine changes between runs.
//!
//! ```text
//! cargo run --release -p pipewright-bench -- bound      # 1F1B on two ranks against the bound of the schedule
//! cargo run --release -p pipewright-bench -- memory     # peak resident size with 8 and with 64 microbatches
//! cargo run --release -p pipewright-bench -- activations  # measured peaks of activations against the simulation
//! cargo run --release -p pipewright-bench -- overhead   # time per action with stages that do nothing
//! cargo run --release -p pipewright-bench -- epilogue   # time after the program, on 2 to 128 ranks that do nothing
//! cargo run --release -p pipewright-bench -- gaps       # the time between two steps, with its parts
//! cargo run --release -p pipewright-bench -- checkpoints # the cost of saving, against a step
//! cargo run --release -p pipewright-bench --features mpi -- copies  # steps with copies in memory against steps without
//! cargo run --release -p pipewright-bench -- engine     # the schedule engine's time per action
//! cargo run --release -p pipewright-bench -- schedules  # each schedule against one rank, and against its simulation
//! cargo run --release -p pipewright-bench -- predict    # predictions of a profile against runs that it has not seen
//! cargo run --release -p pipewright-bench -- experts    # a mixture of experts against a dense layer of the same work
//! cargo run --release -p pipewright-bench --features mpi -- exchange  # the hidden part of the exchange of experts
//! cargo run --release -p pipewright-bench -- prompts    # prompts of latent attention in heads and in latents
//! cargo run --release -p pipewright-bench -- products   # the products of a layer against the rate of the instructions
//! cargo run --release -p pipewright-bench -- bandwidth  # norms, activations and the loss against the rate of memory
//! cargo run --release -p pipewright-bench -- scan       # Mamba-2's scan in chunks against its recurrence
//! cargo run --release -p pipewright-bench -- shards     # memory of a rank with sharded parameters
//! cargo run --release -p pipewright-bench -- verification  # steps with the checksums of `run.verify` against steps without
//! cargo run --release -p pipewright-bench --features mpi -- processes  # two processes against two threads
//! cargo run --release -p pipewright-bench --features mpi -- ping-pong  # messages over MPI, with and without posted receives
//! cargo run --release -p pipewright-bench -- hybrid     # a hybrid model on two ranks, cut by its costs
//! cargo run --release -p pipewright-bench -- ends       # a hybrid with a heavy head and further predictions, by its plan
//! cargo run --release -p pipewright-bench -- peer       # against PyTorch; needs bench/peer/setup.sh
//! cargo run --release -p pipewright-bench -- precision --peer  # f32, bfloat16, and PyTorch; needs setup.sh
//! cargo run --release -p pipewright-bench -- families   # Nemotron-H and Qwen3-MoE against transformers; needs bench/peer/setup.sh
//! cargo run --release -p pipewright-bench -- adapters   # adapters against the whole model; with --peer PEFT too; needs setup.sh
//! cargo run --release -p pipewright-bench --features tokenizers -- tokenizing  # tokenize against the tokenizers library
//! cargo run --release -p pipewright-bench -- corpus     # ids in a file of 4 GiB against ids in memory
//! cargo run --release -p pipewright-bench -- published runs.toml  # predictions for clusters against published runs
//! ```

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

#[cfg(test)]
mod parsed;
mod model;
mod peer_process;
mod products;
mod product_rates;
mod statistics;
mod pairs;
mod precision_figures;
mod predicted_run;
mod processes;
mod activations;
mod adapters;
mod bandwidth;
mod bound;
mod checkpoints;
mod copies;
mod corpus;
mod engine;
mod epilogue;
mod experts;
mod family_models;
mod exchange;
mod families;
mod gaps;
mod hybrid;
mod memory;
mod overhead;
mod peer;
mod ping_pong;
mod precision;
mod predict;
mod prompts;
mod ends;
mod published;
mod scan;
mod schedules;
mod shards;
mod verification;
#[cfg(feature = "tokenizers")]
mod tokenizing;

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
    /// Measured peaks of activations against the simulation, for each schedule.
    Activations(activations::Options),
    /// Time per action with stages that do nothing.
    Overhead(overhead::Options),
    /// Time after the program, on ranks that do nothing.
    Epilogue(epilogue::Options),
    /// The time between two steps, with its parts.
    Gaps(gaps::Options),
    /// The cost of saving a checkpoint, against a step.
    Checkpoints(checkpoints::Options),
    /// Steps with copies of the state in memory against steps without, in turn.
    Copies(copies::Options),
    /// The time to generate, lower, validate and simulate a schedule.
    Engine(engine::Options),
    /// Each schedule against twice one rank's speed, and against its own simulation.
    Schedules(schedules::Options),
    /// Step times, busy times and memory that a profile predicts, against measured ones.
    Predict(predict::Options),
    /// A mixture of experts against the dense layer with the same operations.
    Experts(experts::Options),
    /// The exchange of experts under DualPipeV in two processes, with overlaps by turns and taken apart.
    Exchange(exchange::Options),
    /// A prompt of a model with latent attention, with the keys and values of all heads and in the latents.
    Prompts(prompts::Options),
    /// The matrix products of a layer, against the highest rate of their instructions.
    Products(product_rates::Options),
    /// The operations of a layer other than products, against the rate of memory.
    Bandwidth(bandwidth::Options),
    /// Mamba-2's scan in chunks, against its recurrence token by token.
    Scan(scan::Options),
    /// The memory of a rank with sharded parameters, against replicated ones.
    Shards(shards::Options),
    /// Steps with the checksums of `run.verify` against steps without, in turn.
    Verification(verification::Options),
    /// Two processes over MPI against two threads, in turn.
    Processes(processes::Options),
    /// Messages between two processes over MPI, with and without receives that are posted for them.
    PingPong(ping_pong::Options),
    /// A hybrid model on two ranks, cut by its costs, against half of the work of one rank.
    Hybrid(hybrid::Options),
    /// A hybrid model with a heavy head and further predictions, by its plan, against the bound of all plans.
    Ends(ends::Options),
    /// Throughput against PyTorch, in turn.
    Peer(peer::Options),
    /// Throughput in f32 and in bfloat16, in turn, and with `--peer` PyTorch's.
    Precision(precision::Options),
    /// Throughput of Nemotron-H and Qwen3-MoE in f32 and in bfloat16 against PyTorch with transformers, step
    /// by step in turn.
    Families(families::Options),
    /// A step that trains adapters against a step of the whole model, and with `--peer` against PEFT, in
    /// turn.
    Adapters(adapters::Options),
    /// The rate of `pipewright tokenize` against the tokenizers library's own, in turn.
    #[cfg(feature = "tokenizers")]
    Tokenizing(tokenizing::Options),
    /// Training on ids in a large file against ids in memory, in turn, and the memory for the data.
    Corpus(corpus::Options),
    /// Predicted steps on clusters against published ones.
    Published(published::Options),
}

fn main() -> ExitCode {
    // As in the command line, freed memory stays with the process. SAFETY: no other thread runs yet; 15 is
    // `mi_option_purge_delay` of mimalloc's C interface.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
    let outcome: Result<(), Box<dyn Error>> = match Arguments::parse().bench {
        Bench::Bound(options) => bound::run(&options),
        Bench::Memory(options) => memory::run(&options),
        Bench::Activations(options) => activations::run(&options),
        Bench::Overhead(options) => overhead::run(&options),
        Bench::Epilogue(options) => epilogue::run(&options),
        Bench::Gaps(options) => gaps::run(&options),
        Bench::Checkpoints(options) => checkpoints::run(&options),
        Bench::Copies(options) => copies::run(&options),
        Bench::Engine(options) => engine::run(&options),
        Bench::Schedules(options) => schedules::run(&options),
        Bench::Predict(options) => predict::run(&options),
        Bench::Experts(options) => experts::run(&options),
        Bench::Exchange(options) => exchange::run(&options),
        Bench::Prompts(options) => prompts::run(&options),
        Bench::Products(options) => product_rates::run(&options),
        Bench::Bandwidth(options) => bandwidth::run(&options),
        Bench::Scan(options) => scan::run(&options),
        Bench::Shards(options) => shards::run(&options),
        Bench::Verification(options) => verification::run(&options),
        Bench::Processes(options) => processes::run(&options),
        Bench::PingPong(options) => ping_pong::run(&options),
        Bench::Hybrid(options) => hybrid::run(&options),
        Bench::Ends(options) => ends::run(&options),
        Bench::Peer(options) => peer::run(&options),
        Bench::Precision(options) => precision::run(&options),
        Bench::Families(options) => families::run(&options),
        Bench::Adapters(options) => adapters::run(&options),
        #[cfg(feature = "tokenizers")]
        Bench::Tokenizing(options) => tokenizing::run(&options),
        Bench::Corpus(options) => corpus::run(&options),
        Bench::Published(options) => published::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
