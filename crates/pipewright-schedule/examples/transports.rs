//! Prints the time of a step on each transport, and how long the verdict and the simulation take:
//! `cargo run --release -p pipewright-schedule --example transports -- zbvzerobubble 8 32`.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::error::Error;
use std::time::Instant;

use pipewright_schedule::communicator::{Communicator, Streams, judge};
use pipewright_schedule::simulate::timed_on;
use pipewright_schedule::{Costs, Level, LowerConfig, ScheduleSpec, generate, lower};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, ranks, microbatches] = arguments.as_slice() else {
        return Err("name a schedule, its ranks and its microbatches".into());
    };
    let spec = ScheduleSpec {
        ranks: ranks.parse()?,
        microbatches: microbatches.parse()?,
        ..ScheduleSpec::default()
    };
    let program = lower(&generate(name, &spec)?, &LowerConfig::from(Level::Comms))?;
    let actions: usize = program.rows().iter().map(Vec::len).sum();
    let costs: Costs = "hop=0.2".parse()?;
    println!("{actions} actions");
    for streams in Streams::ALL {
        let communicator = Communicator { streams, ..Communicator::default() };
        let start = Instant::now();
        let verdict = judge(&program, Level::Comms, &communicator)?;
        let judged = start.elapsed();
        let run = timed_on(&program, &costs, &communicator)?;
        let both = start.elapsed();
        let (makespan, word) = (run.timeline().makespan(), verdict.word());
        let simulated = both - judged;
        println!(
            "{streams}: {word}, {makespan} units; judged in {judged:.2?}, judged again and simulated in {simulated:.2?}"
        );
    }
    Ok(())
}
