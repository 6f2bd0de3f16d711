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

mod harness;
mod model;
mod pairs;
mod peer_process;
mod predicted_run;
mod products;
mod family_models;

mod bound;
mod memory;
mod activations;
mod epilogue;
mod overhead;
mod gaps;
mod checkpoints;
mod copies;
mod engine;
mod schedules;
mod predict;
mod experts;
mod exchange;
mod prompts;
mod product_rates;
mod bandwidth;
mod scan;
mod shards;
mod verification;
mod processes;
mod ping_pong;
mod hybrid;
mod ends;
mod peer;
mod precision;
mod families;
mod adapters;
#[cfg(feature = "tokenizers")]
mod tokenizing;
mod corpus;
mod published;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use harness::Outcome;
use pipewright::memory::TrackingAllocator;

#[global_allocator]
static ALLOCATOR: TrackingAllocator<mimalloc::MiMalloc> = TrackingAllocator(mimalloc::MiMalloc);

/// Benches of the Pipewright runtime.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

/// Lists the benches: the name of each, and its module with `Options` and `run`.
macro_rules! benches {
    ($($(#[$about:meta])* $name:ident: $module:ident $(in $feature:literal)?,)+) => {
        #[derive(Subcommand)]
        enum Bench {
            $($(#[$about])* $(#[cfg(feature = $feature)])? $name($module::Options),)+
        }

        impl Bench {
            fn run(&self) -> Outcome {
                match self {
                    $($(#[cfg(feature = $feature)])? Self::$name(options) => $module::run(options),)+
                }
            }
        }
    };
}

benches! {
    /// 1F1B on two ranks against (m + p - 1) x the slowest stage's time a microbatch.
    Bound: bound,
    /// Peak resident size of 1F1B and GPipe with 8 and with 64 microbatches.
    Memory: memory,
    /// Measured peaks of activations against the simulation, for each schedule.
    Activations: activations,
    /// Time per action with stages that do nothing.
    Overhead: overhead,
    /// Time after the program, on ranks that do nothing.
    Epilogue: epilogue,
    /// The time between two steps, with its parts.
    Gaps: gaps,
    /// The cost of saving a checkpoint, against a step.
    Checkpoints: checkpoints,
    /// Steps with copies of the state in memory against steps without, in turn.
    Copies: copies,
    /// The time to generate, lower, validate and simulate a schedule.
    Engine: engine,
    /// Each schedule against twice one rank's speed, and against its own simulation.
    Schedules: schedules,
    /// Step times, busy times and memory that a profile predicts, against measured ones.
    Predict: predict,
    /// A mixture of experts against the dense layer with the same operations.
    Experts: experts,
    /// The exchange of experts under DualPipeV in two processes, with overlaps by turns and taken apart.
    Exchange: exchange,
    /// A prompt of a model with latent attention, with the keys and values of all heads and in the latents.
    Prompts: prompts,
    /// The matrix products of a layer, against the highest rate of their instructions.
    Products: product_rates,
    /// The operations of a layer other than products, against the rate of memory.
    Bandwidth: bandwidth,
    /// Mamba-2's scan in chunks, against its recurrence token by token.
    Scan: scan,
    /// The memory of a rank with sharded parameters, against replicated ones.
    Shards: shards,
    /// Steps with the checksums of `run.verify` against steps without, in turn.
    Verification: verification,
    /// Two processes over MPI against two threads, in turn.
    Processes: processes,
    /// Messages between two processes over MPI, with and without receives that are posted for them.
    PingPong: ping_pong,
    /// A hybrid model on two ranks, cut by its costs, against half of the work of one rank.
    Hybrid: hybrid,
    /// A hybrid model with a heavy head and further predictions, by its plan, against the bound of all plans.
    Ends: ends,
    /// Throughput against PyTorch, in turn.
    Peer: peer,
    /// Throughput in f32 and in bfloat16, in turn, and with `--peer` PyTorch's.
    Precision: precision,
    /// Throughput of Nemotron-H and Qwen3-MoE in f32 and in bfloat16 against PyTorch with transformers, step
    /// by step in turn.
    Families: families,
    /// A step that trains adapters against a step of the whole model, and with `--peer` against PEFT, in
    /// turn.
    Adapters: adapters,
    /// The rate of `pipewright tokenize` against the tokenizers library's own, in turn.
    Tokenizing: tokenizing in "tokenizers",
    /// Training on ids in a large file against ids in memory, in turn, and the memory for the data.
    Corpus: corpus,
    /// Predicted steps on clusters against published ones.
    Published: published,
}

fn main() -> ExitCode {
    // As in the command line, freed memory stays with the process. SAFETY: no other thread runs yet; 15 is
    // `mi_option_purge_delay` of mimalloc's C interface.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
    match Arguments::parse().bench.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
