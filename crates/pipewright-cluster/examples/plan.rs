//! Searches for plans and prints them, with the gain from more hardware:
//! `cargo run --release --example plan -- CONFIG.json h100 16384 2048 8192 15.6e12`, which are the machine, the GPUs, the
//! rows of a step, the tokens of a row and the tokens of the training. Without arguments, the model is Llama 3.1 405B.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use pipewright_cluster::catalogue;
use pipewright_cluster::layout::Precision;
use pipewright_cluster::search::{ClusterPlan, Request, search, upgrades};
use pipewright_document::GIB;
use pipewright_shapes::reader;

const LLAMA: &str = include_str!("../tests/cluster/llama_405b.json");

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument =
        |index: usize, usual: &str| arguments.get(index).cloned().unwrap_or_else(|| usual.to_owned());
    let config = match arguments.first() {
        Some(path) => std::fs::read_to_string(path)?,
        None => LLAMA.to_owned(),
    };
    let machine = catalogue::by_name(&argument(1, "h100"))?;
    let (gpus, batch) = (argument(2, "16384").parse()?, argument(3, "2048").parse()?);
    let sequence = argument(4, "8192").parse()?;
    let model = reader::read(&config)?.model;
    let mut request = Request::new(model, machine, gpus, batch, sequence, Precision::Half);
    request.goal_tokens = Some(argument(5, "15.6e12").parse()?);
    let found = search(&request)?;
    println!(
        "{} layouts estimated, {} simulated; no step is shorter than {:.2} s",
        found.estimated, found.simulated, found.lower_bound_s
    );
    found.plans.iter().for_each(print);
    for upgrade in upgrades(&request, found.fastest()) {
        let gain = upgrade.gain.map(|gain| format!("{:.2} times as fast", gain.speedup));
        println!("{}: {}", upgrade.change.name(), gain.unwrap_or_else(|error| format!("no plan: {error}")));
    }
    Ok(())
}

fn print(plan: &ClusterPlan) {
    let layout = &plan.layout;
    println!(
        "{:.2} s, MFU {:.1}%, {:.0} tokens/s per GPU, {:.1} GiB: tp {} pp {} dp {} cp {} ep {}, {} with {} chunks, mbs {}, {:?}, {:?}, {:?}",
        plan.prediction.seconds,
        plan.mfu * 100.0,
        plan.prediction.tokens_per_gpu,
        plan.prediction.peak_memory() / GIB,
        layout.tensor,
        layout.pipeline,
        layout.data(),
        layout.context,
        layout.expert,
        layout.schedule_name(),
        layout.chunks,
        layout.microbatch,
        layout.recompute,
        layout.sharding,
        layout.cut,
    );
    let shares = plan.shares.named().map(|(name, share)| format!("{name} {:.1}%", share * 100.0));
    println!("  {}; {:.1}% above the bound", shares.join(", "), plan.gap * 100.0);
    if let Some(goal) = plan.goal {
        let energy = goal.kilowatt_hours.map_or_else(String::new, |energy| format!(", {energy:.2e} kWh"));
        println!("  {:.1} days, {:.2e} GPU hours{energy}", goal.days, goal.gpu_hours);
    }
}
