//! The bytes that each stage of a run holds.
//!
//! Activations are the peak of the stage alone, in the simulation of the program. A rank with several stages may hold less
//! than their sum, because they have their peaks at different times: `memory.rs` has the bytes of ranks.

use std::fmt::Write;

use pipewright_models::ParameterSpec;
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::sharding::StateBytes;
use pipewright_schedule::simulate::memory_curve;
use pipewright_schedule::{Placement, StageIndex};
use serde::Serialize;

use crate::display::bytes;
use crate::training::memory::{Simulation, state_of};
use crate::training::prepare::Prepared;

/// The most bytes that a stage holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct StageMemory {
    parameters: u64,
    gradients: u64,
    optimizer: u64,
    activations: u64,
}

/// Returns the bytes of every stage. If parameters are sharded, a replica holds its part of them and of the optimizer's
/// state; the parameters of a stage that computes are whole. In half precision, the copy with which a stage computes counts
/// as parameters.
pub(crate) fn stage_memory(
    prepared: &Prepared,
    stages: &[Vec<ParameterSpec>],
    simulation: &Simulation,
) -> Vec<StageMemory> {
    let Simulation { timeline, sizes } = simulation;
    let (settings, placement) = (&prepared.settings, prepared.program.placement());
    let shards = u64::from(settings.mesh.shards());
    let of_stage = |(stage, specs): (StageIndex, &Vec<ParameterSpec>)| {
        let own =
            |other: StageIndex| if other == stage { sizes[other.index()] } else { StageSizes::default() };
        let only: Vec<StageSizes> = placement.all_stages().map(own).collect();
        let curve = memory_curve(timeline, placement.rank_of(stage), &only);
        let StateBytes { parameters: whole, copy, optimizer } = state_of(settings, specs);
        StageMemory {
            parameters: whole.div_ceil(shards).saturating_add(copy),
            gradients: whole,
            optimizer: optimizer.div_ceil(shards),
            activations: curve.iter().map(|step| step.held).max().unwrap_or(0),
        }
    };
    placement.all_stages().zip(stages).map(of_stage).collect()
}

/// Returns a table with a row for each stage.
pub(crate) fn stage_table(placement: &Placement, memory: &[StageMemory]) -> String {
    let mut text = String::new();
    let mut line = |what: &str, cells: [&str; 5]| {
        let [rank, parameters, gradients, optimizer, activations] = cells;
        writeln!(
            text,
            "{what:9} {rank:>4}  {parameters:>11}  {gradients:>11}  {optimizer:>11}  {activations:>11}"
        )
        .expect("a string takes all text");
    };
    line("stages", ["rank", "parameters", "gradients", "optimizer", "activations"]);
    for (stage, memory) in placement.all_stages().zip(memory) {
        let rank = placement.rank_of(stage).to_string();
        let StageMemory { parameters, gradients, optimizer, activations } = *memory;
        let cells = [parameters, gradients, optimizer, activations].map(bytes);
        let [parameters, gradients, optimizer, activations] = &cells;
        line(&format!("stage {stage}"), [&rank, parameters, gradients, optimizer, activations]);
    }
    text
}
