//! Compares the memory that each rank of a run needs with the memory of the machine, or of its devices.
//!
//! Parameters, gradients and the optimizer's state are counted exactly. Activations are the peak of the schedule's
//! simulation, with the sizes in bytes that the model family gives for its layers. If the activations have their peak
//! before the first gradient exists, as in GPipe, the sum of the columns is a little more than a rank ever holds. The
//! plan counts the activations of ranks that compute a stage together as if each computed all of it. It does not include
//! the temporary tensors of an operation, messages in transit, data, and a checkpoint that is being written.
//! ARCHITECTURE.md has measurements.

use std::fmt::Write;

use pipewright::ids::WorldRank;
use pipewright::nn::TensorParallel;
use pipewright::tensor::Precision;
use pipewright_models::{CutModel, ModelConfig, ParameterSpec};
use pipewright_schedule::costs::{RecomputeSizes, StageSizes};
use pipewright_schedule::plan::TrainingState;
use pipewright_schedule::profile::Profile;
use pipewright_schedule::sharding::{Sharding, StateBytes};
use pipewright_schedule::simulate::{peak_memory, timed};
use pipewright_schedule::{Costs, ModelDesc, Rank, StageIndex, Timeline};
use serde_json::{Value, json};
use sysinfo::System;

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::bytes;
use crate::failure::{Exit, Failure};
use crate::training::device_memory::{DeviceLoad, device_loads, machine_bytes};
use crate::training::layer_sizes::{kept_bytes, layers_of, stage_sizes};
use crate::training::optimizer::state_bytes;
use crate::training::prepare::{Prepared, read_model};

/// The size of a parameter or of its gradient in bytes.
const NUMBER: u64 = 4;
/// The largest number of ranks in the table. If there are more ranks, the table shows those that need the most memory.
const ROWS: usize = 16;

/// The most memory that a rank holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RankMemory {
    parameters: u64,
    gradients: u64,
    optimizer: u64,
    activations: u64,
}

impl RankMemory {
    fn total(&self) -> u64 {
        let static_bytes = self.parameters.saturating_add(self.gradients).saturating_add(self.optimizer);
        static_bytes.saturating_add(self.activations)
    }
}

/// The memory that a run needs and the memory of the machine.
pub(crate) struct MemoryPlan {
    /// The ranks of one replica. All replicas need the same memory.
    ranks: Vec<RankMemory>,
    replicas: u32,
    /// The ranks that compute each stage together. All need the memory of the first.
    tensor_ranks: u32,
    /// Whether all ranks are in one process of this machine.
    is_local: bool,
    /// The devices, if not all ranks compute on the processor.
    devices: Vec<DeviceLoad>,
    /// The memory of this machine that the process may use, in bytes; `None` if the system does not report it.
    machine: Option<u64>,
}

impl MemoryPlan {
    /// Plans the memory of a run whose stages have these parameters.
    pub(crate) fn new(prepared: &Prepared, stages: &[Vec<ParameterSpec>], simulation: &Simulation) -> Self {
        let Prepared { settings, program, .. } = prepared;
        let sharding = Sharding { shards: settings.mesh.shards(), window: settings.mesh.unshard_window };
        let states: Vec<StateBytes> = stages.iter().map(|specs| state_of(settings, specs)).collect();
        let placement = program.placement();
        let of_rank = |rank: Rank| {
            let own = placement.stages_of(rank).iter().map(|stage| states[stage.index()]);
            held_always(&own.collect::<Vec<_>>(), sharding)
        };
        let mut ranks: Vec<RankMemory> = placement.all_ranks().map(of_rank).collect();
        let Simulation { timeline, sizes } = simulation;
        for (rank, peak) in ranks.iter_mut().zip(peak_memory(timeline, sizes)) {
            rank.activations = peak;
        }
        let is_local = settings.pipeline.transport == TransportChoice::Local;
        // The tensor ranks of a rank are consecutive, and so are the ranks of a replica.
        let tensor_ranks = settings.mesh.tensor_parallel as usize;
        let needs = |rank: WorldRank| ranks[rank.index() / tensor_ranks % ranks.len()].total();
        let devices =
            if settings.run.devices.are_processor() { Vec::new() } else { device_loads(settings, needs) };
        Self {
            ranks,
            replicas: settings.mesh.data_parallel,
            tensor_ranks: settings.mesh.tensor_parallel,
            is_local,
            devices,
            machine: machine_bytes(),
        }
    }

    /// Returns the memory of all ranks together.
    fn total(&self) -> u64 {
        let one_replica = self.ranks.iter().fold(0, |sum: u64, rank| sum.saturating_add(rank.total()));
        one_replica.saturating_mul(u64::from(self.replicas)).saturating_mul(u64::from(self.tensor_ranks))
    }

    /// Returns the rank that needs the most memory.
    fn largest(&self) -> (usize, RankMemory) {
        let ranks = self.ranks.iter().copied().enumerate();
        ranks.max_by_key(|(index, rank)| (rank.total(), usize::MAX - index)).unwrap_or_default()
    }

    /// Returns the same numbers as [`Self::table`] as JSON, for all ranks of a replica.
    pub(crate) fn json(&self) -> Value {
        let ranks = self.ranks.iter().enumerate();
        let ranks = ranks.map(|(rank, held)| {
            json!({
                "rank": rank,
                "parameters": held.parameters,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "activations": held.activations,
                "total": held.total(),
            })
        });
        json!({
            "ranks": ranks.collect::<Vec<_>>(),
            "needed": if self.is_local { self.total() } else { self.largest().1.total() },
            "machine": self.machine,
            "devices": self.devices.iter().map(DeviceLoad::json).collect::<Vec<_>>(),
            "fits": self.require_fit().is_ok(),
        })
    }

    /// Returns the table, and a line about the memory of the machine.
    pub(crate) fn table(&self) -> String {
        let mut shown: Vec<usize> = (0..self.ranks.len()).collect();
        shown.sort_by_key(|&rank| u64::MAX - self.ranks[rank].total());
        shown.truncate(ROWS);
        shown.sort_unstable();
        let mut text = String::new();
        let mut line = |what: &str, cells: [&str; 6]| {
            let [rank, parameters, gradients, optimizer, activations, total] = cells;
            let columns = format!(
                "{what:9} {rank:>4}  {parameters:>11}  {gradients:>11}  {optimizer:>11}  {activations:>11}  {total:>11}"
            );
            writeln!(text, "{columns}").expect("a string takes all text");
        };
        line("memory", ["rank", "parameters", "gradients", "optimizer", "activations", "in all"]);
        for &rank in &shown {
            let held = &self.ranks[rank];
            let cells =
                [held.parameters, held.gradients, held.optimizer, held.activations, held.total()].map(bytes);
            let [parameters, gradients, optimizer, activations, total] = &cells;
            line("", [&rank.to_string(), parameters, gradients, optimizer, activations, total]);
        }
        if shown.len() < self.ranks.len() {
            writeln!(text, "{:9} these {ROWS} of {} ranks need the most", "", self.ranks.len())
                .expect("a string takes all text");
        }
        writeln!(text, "{:9} temporary tensors and messages of a step come on top", "")
            .expect("a string takes all text");
        if self.devices.is_empty() {
            line_of(&mut text, "machine", &self.balance());
        }
        for load in &self.devices {
            line_of(&mut text, "device", &load.balance());
        }
        text
    }

    fn balance(&self) -> String {
        let has = self
            .machine
            .map_or("an unknown amount of memory".to_owned(), |has| format!("{} of memory", bytes(has)));
        let needed = if self.is_local {
            let each =
                if self.replicas > 1 { format!(" of {} replicas", self.replicas) } else { String::new() };
            format!("all ranks{each} together need {}", bytes(self.total()))
        } else {
            format!("each process needs at most {}", bytes(self.largest().1.total()))
        };
        format!("{has} on this one; {needed}")
    }

    /// Fails with [`Exit::CheckFailed`] if the run needs more memory than the machine has. If the run has several
    /// processes, they may run on other machines, so each process alone must fit into this machine.
    pub(crate) fn require_fit(&self) -> Result<(), Failure> {
        if !self.devices.is_empty() {
            return self.devices.iter().try_for_each(DeviceLoad::require_fit);
        }
        let Some(has) = self.machine else { return Ok(()) };
        let (rank, most) = self.largest();
        let (needs, who) = if self.is_local {
            (self.total(), "its ranks together need")
        } else {
            (most.total(), "one process needs")
        };
        if needs <= has {
            return Ok(());
        }
        let parts = [
            (most.parameters, "parameters"),
            (most.gradients, "gradients"),
            (most.optimizer, "optimizer state"),
            (most.activations, "activations"),
        ];
        let (part, name) = parts.into_iter().max_by_key(|(part, _)| *part).unwrap_or_default();
        let advice = match name {
            "activations" => {
                "use fewer or shorter rows a microbatch, a schedule that holds fewer microbatches, or \
                 pipeline.recompute=stage"
            }
            _ => {
                "use a smaller model, or spread it over more machines with more pipeline.ranks and \
                 pipeline.transport=mpi, or over replicas with mesh.data_parallel_mode=sharded"
            }
        };
        Err(Failure::new(
            Exit::CheckFailed,
            format!(
                "the run does not fit into memory: {who} {}, and this machine has {}, which is {} too little; rank \
                 {rank} needs the most, {}, including {} of {name}; {advice}",
                bytes(needs),
                bytes(has),
                bytes(needs - has),
                bytes(most.total()),
                bytes(part)
            ),
        ))
    }
}

fn line_of(text: &mut String, what: &str, words: &str) {
    writeln!(text, "{what:9} {words}").expect("a string takes all text");
}

/// Returns the memory of a rank with these stages, without activations. Gradients are whole until a stage's last
/// microbatch, so sharding does not lower their peak. The copy of half precision counts as parameters.
fn held_always(stages: &[StateBytes], sharding: Sharding) -> RankMemory {
    let held = sharding.held(stages.iter().copied());
    RankMemory {
        parameters: held.parameters.saturating_add(held.copy),
        gradients: stages.iter().map(|stage| stage.parameters).fold(0, u64::saturating_add),
        optimizer: held.optimizer,
        activations: 0,
    }
}

/// Returns what training needs for these parameters, without their gradients.
pub(crate) fn state_of(settings: &Settings, specs: &[ParameterSpec]) -> StateBytes {
    let state = |spec: &ParameterSpec| state_bytes(&settings.optimizer, spec);
    let numbers = numbers_of(specs);
    StateBytes {
        parameters: numbers.saturating_mul(NUMBER),
        copy: copy_bytes(numbers, settings.run.precision),
        optimizer: specs.iter().map(state).fold(0, u64::saturating_add),
    }
}

/// Returns the bytes of the copy of these parameters with which a stage computes in half precision.
fn copy_bytes(parameters: u64, precision: Precision) -> u64 {
    match precision {
        Precision::F32 => 0,
        half => parameters.saturating_mul(half.bytes()),
    }
}

/// Returns what ranks hold for each byte of parameters, for a plan.
pub(crate) fn training_state(settings: &Settings, model: &ModelConfig) -> Result<TrainingState, Failure> {
    let specs = model.parameters().map_err(Failure::input)?;
    let whole = state_of(settings, &specs);
    let share = |bytes: u64| bytes as f64 / whole.parameters.max(1) as f64;
    Ok(TrainingState {
        optimizer: share(whole.optimizer),
        copy: share(whole.copy),
        groups: settings.mesh.shard_groups(),
        window: settings.mesh.unshard_window,
    })
}

/// Returns what training needs for the parameters of each layer, without their gradients.
pub(crate) fn layer_states(settings: &Settings, model: &CutModel) -> Result<Vec<StateBytes>, Failure> {
    // The sequence length affects only costs.
    let layers = 0..model.describe(1).layers.len();
    let of_layer = |layer| {
        let specs = model.outline(layer..layer + 1, &TensorParallel::default());
        Ok(state_of(settings, &specs.map_err(Failure::input)?))
    };
    layers.map(of_layer).collect()
}

/// Returns a profile whose layers have the optimizer's state of a run. A profile with another number of layers keeps
/// none, and a plan then counts the share of the parameters that the whole model needs.
pub(crate) fn with_optimizer_state(mut profile: Profile, settings: &Settings) -> Result<Profile, Failure> {
    let states = layer_states(settings, &read_model(settings)?)?;
    if profile.layer_count() == states.len() as u64 {
        let mut first = 0;
        for layer in &mut profile.layers {
            layer.optimizer_bytes = states.get(first).map(|state| state.optimizer);
            first += layer.count as usize;
        }
    }
    Ok(profile)
}

/// Returns the number of elements in these parameters.
fn numbers_of(specs: &[ParameterSpec]) -> u64 {
    let numbers = |spec: &ParameterSpec| {
        spec.shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
    };
    specs.iter().map(numbers).fold(0, u64::saturating_add)
}

/// A simulation of the program.
pub(crate) struct Simulation {
    pub(crate) timeline: Timeline,
    /// The sizes of each stage's activations in bytes.
    pub(crate) sizes: Vec<StageSizes>,
}

/// Simulates the program.
pub(crate) fn simulated(prepared: &Prepared) -> Result<Simulation, Failure> {
    let Prepared { settings, program, partition, .. } = prepared;
    let layers = layers_of(settings, &prepared.model);
    let size = |stage: StageIndex| StageSizes {
        recompute: Some(recompute_sizes(prepared, &layers, stage)),
        ..stage_sizes(&layers.layers[partition.range(stage)], settings.pipeline.microbatch_size)
    };
    // A rank runs its actions in the order of its row for any costs, so unit costs give the same peaks.
    let costs = Costs {
        sizes: program.placement().all_stages().map(size).collect(),
        recompute: settings.pipeline.recompute.clone(),
        ..Costs::default()
    };
    let run = timed(program.as_program(), &costs).map_err(|error| Failure::new(Exit::Bug, error))?;
    Ok(Simulation { timeline: run.timeline().clone(), sizes: costs.sizes })
}

/// Returns the bytes of a microbatch that a stage keeps if it is recomputed, and those that its backward then holds.
fn recompute_sizes(prepared: &Prepared, layers: &ModelDesc, stage: StageIndex) -> RecomputeSizes {
    let settings = &prepared.settings.pipeline;
    let rows = u64::from(settings.microbatch_size);
    // The first layer's inputs are token ids, which its activations include.
    let input = |layer: usize| layer.checked_sub(1).map_or(0, |before| layers.layers[before].output_bytes);
    let range = prepared.partition.range(stage);
    let own = &layers.layers[range.clone()];
    let (kept, recomputed) = if settings.recompute.is_by_block() {
        let largest = own.iter().map(|layer| layer.activation_bytes).max();
        (range.map(input).fold(0, u64::saturating_add), largest.unwrap_or(0))
    } else {
        (input(range.start), kept_bytes(own))
    };
    RecomputeSizes { kept: kept.saturating_mul(rows), recomputed: recomputed.saturating_mul(rows) }
}

/// Returns the bytes that this process can have: the memory that it may use, and the machine's swap space.
pub(crate) fn most_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    Some(machine_bytes()?.saturating_add(system.total_swap()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(total: u64) -> RankMemory {
        RankMemory { parameters: total, ..RankMemory::default() }
    }

    #[test]
    fn replicas_that_share_hold_their_part_and_what_is_gathered() {
        let whole = RankMemory { parameters: 240, gradients: 240, optimizer: 480, activations: 0 };
        let held_in = |numbers: Vec<u64>, shards, window, precision| {
            let adamw = |numbers: u64| StateBytes {
                parameters: NUMBER * numbers,
                copy: copy_bytes(numbers, precision),
                optimizer: 8 * numbers,
            };
            let stages: Vec<StateBytes> = numbers.into_iter().map(adamw).collect();
            held_always(&stages, Sharding { shards, window })
        };
        let held_always = |shards, window| held_in(vec![10, 30, 20], shards, window, Precision::F32);
        assert_eq!(held_always(1, 1), whole);
        let parts = RankMemory { parameters: 4 * (15 + 30), gradients: 240, optimizer: 120, activations: 0 };
        assert_eq!(held_always(4, 1), parts);
        assert_eq!(held_always(4, 9).parameters, 4 * (15 + 60));
        // With the rounded copy of the parameters that compute.
        let in_half = |shards| held_in(vec![10, 30, 20], shards, 1, Precision::Bf16).parameters;
        assert_eq!(in_half(1), (4 + 2) * 60);
        assert_eq!(in_half(4), 4 * (15 + 30) + 2 * 30);
    }

    #[test]
    fn threads_of_one_machine_add_up_and_processes_do_not() {
        let plan = |is_local, replicas| MemoryPlan {
            ranks: vec![rank(40), rank(50)],
            replicas,
            tensor_ranks: 1,
            is_local,
            devices: Vec::new(),
            machine: Some(100),
        };
        assert!(plan(true, 1).require_fit().is_ok());
        assert!(plan(false, 2).require_fit().is_ok());
        let failure = plan(true, 2).require_fit().expect_err("180 bytes in 100");
        assert_eq!(failure.exit, Exit::CheckFailed);
        let words = failure.text();
        assert!(
            words.contains("need 180 B, and this machine has 100 B, which is 80 B too little; rank 1"),
            "{words}"
        );
        assert!(MemoryPlan { machine: Some(49), ..plan(false, 1) }.require_fit().is_err());
        assert!(MemoryPlan { machine: None, ..plan(true, 2) }.require_fit().is_ok());
    }

    #[test]
    fn of_many_ranks_those_that_need_the_most_are_shown() {
        let ranks = (0..100).map(rank).collect();
        let plan = MemoryPlan {
            ranks,
            replicas: 1,
            tensor_ranks: 1,
            is_local: true,
            devices: Vec::new(),
            machine: Some(1 << 20),
        };
        let table = plan.table();
        assert!(table.contains("  99  ") && !table.contains("  83  "), "{table}");
        assert!(table.contains("these 16 of 100 ranks need the most"), "{table}");
    }
}
