//! The bytes that each stage of a run holds.
//!
//! Activations are the peak of the stage alone, in the simulation of the program. A rank with several stages may hold less
//! than their sum, because they have their peaks at different times: `memory.rs` has the bytes of ranks.

use std::fmt::Write;

use pipewright_models::ParameterSpec;
use pipewright_schedule::StageIndex;
use pipewright_schedule::costs::StageSizes;
use pipewright_schedule::sharding::StateBytes;
use pipewright_schedule::simulate::memory_curve;

use crate::commands::memory::{Simulation, state_of};
use crate::commands::prepare::Prepared;
use crate::display::bytes;

/// Returns a table with a row for each stage. If parameters are sharded, a replica holds its part of them and of the
/// optimizer's state; the parameters of a stage that computes are whole. In half precision, the copy with which a stage
/// computes counts as parameters.
pub(super) fn stage_table(
    prepared: &Prepared,
    stages: &[Vec<ParameterSpec>],
    simulation: &Simulation,
) -> String {
    let Simulation { timeline, sizes } = simulation;
    let (settings, placement) = (&prepared.settings, prepared.program.placement());
    let shards = u64::from(settings.mesh.shards());
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
    for (stage, specs) in placement.all_stages().zip(stages) {
        let rank = placement.rank_of(stage);
        let own =
            |other: StageIndex| if other == stage { sizes[other.index()] } else { StageSizes::default() };
        let only: Vec<StageSizes> = placement.all_stages().map(own).collect();
        let peak = memory_curve(timeline, rank, &only).iter().map(|step| step.held).max().unwrap_or(0);
        let StateBytes { parameters: whole, copy, optimizer } = state_of(settings, specs);
        let cells =
            [whole.div_ceil(shards).saturating_add(copy), whole, optimizer.div_ceil(shards), peak].map(bytes);
        let [parameters, gradients, optimizer, activations] = &cells;
        line(&format!("stage {stage}"), [&rank.to_string(), parameters, gradients, optimizer, activations]);
    }
    text
}
