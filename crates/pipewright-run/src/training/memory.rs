//! Shows the memory that a run needs, and refuses a run that does not fit into the machine or its devices.

use std::fmt::Write;

use pipewright::device::{BackEnd, DeviceChoice, describe};
use pipewright::ids::WorldRank;
use pipewright_models::training_memory::{
    DeviceLoad, ExpertLoad, MemoryPlan, RunShape, Shortage, SmallRank, StreamedBytes, TrainingMemory,
    TrainingRun, device_loads,
};
use pipewright_models::{CutModel, ParameterSpec};
use pipewright_schedule::Placement;
use pipewright_schedule::bytes::bytes_text as bytes;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_schedule::sharding::Sharding;
use pipewright_schedule::words::counted;
use pipewright_system::machine_memory::machine_bytes;
use serde_json::{Value, json};

use crate::error::{ErrorKind, RunError};
use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;
use crate::training::model::compute_devices;
use crate::training::optimizer::state_rule;
use crate::training::prepare::RunParts;
use crate::training::state_copies::copy_bytes;

/// The largest number of ranks in the table. If there are more ranks, the table shows the ranks that need the
/// most memory.
pub(crate) const ROWS: usize = 16;

/// The copies that a rank holds in its update.
const OLD_STATE: &str = "copies of parameters and state (optimizer.post_validation, run.fingerprint_every)";

/// Plans the memory of a run whose stages have these parameters.
pub fn memory_plan(
    run: RunParts<'_>,
    model: &CutModel,
    stages: &[Vec<ParameterSpec>],
) -> Result<MemoryPlan, RunError> {
    let mesh = &run.settings.mesh;
    let training = training_run(run, model);
    let estimate = |training: &TrainingRun<'_>| {
        TrainingMemory::estimate(training, stages).map_err(|error| RunError::new(ErrorKind::Bug, error))
    };
    let memory = estimate(&training)?;
    let one_replica = if mesh.expert_parallel > 1 {
        let expert_load = ExpertLoad::OneReplica { replicas: mesh.expert_parallel };
        Some(estimate(&TrainingRun { expert_load, ..training })?)
    } else {
        None
    };
    let plan = plan_of(memory, run);
    Ok(match &one_replica {
        Some(memory) => plan.with_one_replica(memory),
        None => plan,
    })
}

/// Plans the memory of a run while its layers move: from stages with the parameters `before` to stages with the
/// parameters `after`, or without `after` while each rank makes all its stages again.
pub fn move_plan(
    run: RunParts<'_>,
    model: &CutModel,
    before: &[Vec<ParameterSpec>],
    after: Option<&[Vec<ParameterSpec>]>,
) -> MemoryPlan {
    plan_of(TrainingMemory::while_moving(&training_run(run, model), before, after), run)
}

fn training_run<'a>(run: RunParts<'a>, model: &'a CutModel) -> TrainingRun<'a> {
    let RunParts { settings, program, partition, .. } = run;
    let mesh = &settings.mesh;
    TrainingRun {
        model,
        program,
        partition,
        tokens: settings.data.seq_len as usize,
        rows: mesh.largest_microbatch(settings.pipeline.microbatch_size),
        recompute: &settings.pipeline.recompute,
        state: state_rule(settings),
        sharding: Sharding { shards: mesh.shards(), window: mesh.gathered_stages() },
        devices: compute_devices(settings),
        expert_ranks: mesh.expert_parallel,
        expert_load: ExpertLoad::Mean,
        tensor: settings.mesh.tensor_share(),
        post_validation: settings.optimizer.post_validation,
        delayed: settings.optimizer.delay > 0,
        fingerprints: settings.run.fingerprint_every > 0,
    }
}

/// Compares the memory of the ranks with the memory of this machine and its devices.
fn plan_of(memory: TrainingMemory, run: RunParts<'_>) -> MemoryPlan {
    let settings = run.settings;
    let shape = RunShape {
        replicas: settings.mesh.data_parallel,
        tensor_ranks: settings.mesh.tensor_parallel,
        is_local: settings.pipeline.transport == TransportChoice::Local,
    };
    let plan = MemoryPlan::new(memory, shape, machine_bytes()).with_copies(copy_bytes(run));
    let devices = &settings.run.devices;
    if devices.are_processor() {
        return plan;
    }
    let choices = all_ranks(settings).map(|rank| devices.choice_of(rank));
    plan.on_devices(choices, device_bytes)
}

/// Returns the memory that each rank has if the ranks of a device share it equally; of several devices, the
/// least. Processes may be on several machines, which are not known here, or all on this one. `None` if the
/// memory of a device is not known.
pub fn memory_of_rank(settings: &Settings) -> Option<u64> {
    share_of_rank(settings, true)
}

/// Returns the memory that a process has if it shares its device with no other rank; of several devices, the
/// least. [`memory_plan`] counts the same. `None` if the memory of a device is not known.
pub fn memory_of_process(settings: &Settings) -> Option<u64> {
    share_of_rank(settings, false)
}

fn share_of_rank(settings: &Settings, is_shared: bool) -> Option<u64> {
    let ranks = all_ranks(settings).map(|rank| (settings.run.devices.choice_of(rank), rank, 0));
    let loads = device_loads(ranks, is_shared, device_bytes).into_iter();
    loads.map(|load| Some(load.memory? / load.ranks.len().max(1) as u64)).min().flatten()
}

/// Returns the memory of a device in bytes, if its back end knows it.
pub(crate) fn device_bytes(device: DeviceChoice) -> Option<u64> {
    match device.back_end {
        BackEnd::Flex => machine_bytes(),
        _ => describe(device)?.memory,
    }
}

fn all_ranks(settings: &Settings) -> impl Iterator<Item = WorldRank> {
    (0..settings.mesh.ranks(settings.pipeline.ranks)).map(WorldRank::new)
}

/// Returns the numbers of [`table`] as JSON, for all ranks of a replica.
pub fn memory_json(plan: &MemoryPlan) -> Value {
    let ranks = plan.memory().ranks().iter().enumerate().map(|(rank, held)| {
        let mut json = held_json(held);
        json["rank"] = json!(rank);
        json["total"] = json!(held.total());
        json
    });
    let device = |load: &DeviceLoad| json!({ "device": load.device.to_string(), "memory": load.memory, "needed": load.needed() });
    let mut json = json!({
        "ranks": ranks.collect::<Vec<_>>(),
        "copies": plan.copies(),
        "shared": plan.shared(),
        "needed": plan.needed(),
        "machine": plan.machine(),
        "devices": plan.devices().iter().map(device).collect::<Vec<_>>(),
        "fits": plan.shortage().is_none(),
    });
    if let Some(needed) = plan.one_replica() {
        json["one_replica"] = json!(needed);
    }
    if let Some(StreamedBytes { window, step }) = plan.memory().streamed() {
        json["streamed"] = json!({ "window": window, "step": step, "seconds": plan.read_s() });
    }
    json
}

/// Returns what the ranks of a replica need while layers move, as JSON.
pub fn moves_json(plan: &MemoryPlan) -> Value {
    json!({
        "ranks": plan.memory().ranks().iter().map(HeldBytes::total).collect::<Vec<_>>(),
        "needed": plan.needed(),
        "fits": plan.shortage().is_none(),
    })
}

/// Returns what the ranks need while layers move, and whether they have it.
pub fn moves_in_words(plan: &MemoryPlan) -> String {
    let (rank, most) = plan.largest();
    let words = format!("while all its layers move, rank {rank} needs {}", bytes(most.total()));
    match shortage(plan) {
        None => words,
        Some(shortage) => format!("{words}; moves that do not fit are left out: {shortage}"),
    }
}

/// Returns the bytes of a rank or a stage as JSON.
pub fn held_json(held: &HeldBytes) -> Value {
    let mut json: Value = counted_parts(held).map(|(name, bytes)| (name, json!(bytes))).into_iter().collect();
    let further = [("undo", held.undo), ("temporary", held.temporary), ("apart", held.apart)];
    for (name, bytes) in further.into_iter().filter(|(_, bytes)| *bytes > 0) {
        json[name] = json!(bytes);
    }
    json
}

/// Returns the table of all stages.
pub fn stage_table(placement: &Placement, stages: &[HeldBytes]) -> String {
    let mut text = String::new();
    row(&mut text, "stages", "rank", &["parameters", "gradients", "optimizer", "activations"]);
    for (stage, held) in placement.all_stages().zip(stages) {
        let rank = placement.rank_of(stage).to_string();
        row(&mut text, &format!("stage {stage}"), &rank, &cells(held));
    }
    text
}

/// Returns the table of the ranks that need the most memory, and lines about the memory of the machine or of
/// the devices.
pub fn table(plan: &MemoryPlan) -> String {
    let ranks = plan.memory().ranks();
    let mut shown: Vec<usize> = (0..ranks.len()).collect();
    shown.sort_by_key(|&rank| u64::MAX - ranks[rank].total());
    shown.truncate(ROWS);
    shown.sort_unstable();
    let mut text = String::new();
    row(&mut text, "memory", "rank", &["parameters", "gradients", "optimizer", "activations", "total"]);
    for &rank in &shown {
        let [parameters, gradients, optimizer, activations] = cells(&ranks[rank]);
        let total = bytes(ranks[rank].total());
        row(&mut text, "", &rank.to_string(), &[parameters, gradients, optimizer, activations, total]);
    }
    if shown.len() < ranks.len() {
        line(&mut text, "", &format!("these {ROWS} of {} ranks need the most", ranks.len()));
    }
    if ranks.iter().any(|held| held.apart > 0) {
        let words = "the parts have their most bytes at different times, so a total may be less than the sum of its row";
        line(&mut text, "", words);
    }
    line(
        &mut text,
        "",
        "a total includes the gradients inside a backward; messages of a step are not included",
    );
    let undo = ranks.iter().map(|held| held.undo).max().unwrap_or(0);
    if undo > 0 {
        let words =
            "in its update a rank holds, instead of activations, copies of parameters and state of at most";
        line(&mut text, "update", &format!("{words} {}", bytes(undo)));
    }
    if let Some(needed) = plan.one_replica() {
        let words = "if all tokens choose experts of one replica, a rank of it needs at most";
        line(&mut text, "experts", &format!("{words} {}", bytes(needed)));
    }
    if let Some(StreamedBytes { window, step }) = plan.memory().streamed() {
        let seconds = plan.read_s().map_or_else(String::new, |seconds| {
            format!(", which takes {seconds:.1} s of the disk's time, most of it while ranks compute")
        });
        let words = format!(
            "the base stays in its files: a rank has at most {} of it in memory, and a step reads {}{seconds}",
            bytes(window),
            bytes(step)
        );
        line(&mut text, "stream", &words);
    }
    if plan.shared() > 0 {
        let words = "the replicas hold the base of the adapters once, which takes";
        line(&mut text, "base", &format!("{words} {}", bytes(plan.shared())));
    }
    if plan.copies() > 0 {
        let subject = if plan.shape().is_local { "take" } else { "take, for each process," };
        line(
            &mut text,
            "copies",
            &format!("copies of the state in memory {subject} {}", bytes(plan.copies())),
        );
    }
    if plan.devices().is_empty() {
        line(&mut text, "machine", &machine_balance(plan));
    }
    for load in plan.devices() {
        line(&mut text, "device", &device_balance(load));
    }
    text
}

/// Returns the parts that tables show.
fn counted_parts(held: &HeldBytes) -> [(&'static str, u64); 4] {
    let [parameters, gradients, optimizer, activations, ..] = held.named();
    [parameters, gradients, optimizer, activations]
}

fn cells(held: &HeldBytes) -> [String; 4] {
    counted_parts(held).map(|(_, held)| bytes(held))
}

pub(crate) fn row(text: &mut String, what: &str, rank: &str, cells: &[impl AsRef<str>]) {
    write!(text, "{what:9} {rank:>4}").expect("a string takes all text");
    for cell in cells {
        write!(text, "  {:>11}", cell.as_ref()).expect("a string takes all text");
    }
    text.push('\n');
}

/// Adds a line of a summary.
pub fn line(text: &mut String, what: &str, words: &str) {
    writeln!(text, "{what:9} {words}").expect("a string takes all text");
}

/// Returns what the machine has and what the run needs.
fn machine_balance(plan: &MemoryPlan) -> String {
    let has = plan
        .machine()
        .map_or("an unknown amount of memory".to_owned(), |has| format!("{} of memory", bytes(has)));
    let RunShape { replicas, is_local, .. } = plan.shape();
    let needed = bytes(plan.needed());
    let needed = if is_local {
        let replicas = if replicas > 1 { format!(" of {replicas} replicas") } else { String::new() };
        format!("all ranks{replicas} together need {needed}")
    } else {
        format!("each process needs at most {needed}")
    };
    format!("{has} on this one; {needed}")
}

/// Returns what a device has and what its ranks need.
fn device_balance(load: &DeviceLoad) -> String {
    let has = match load.memory {
        Some(memory) => format!("{} of memory", bytes(memory)),
        None => "an amount of memory that its back end does not know".to_owned(),
    };
    let subject = match &load.ranks[..] {
        [(rank, _)] => format!("rank {rank} needs"),
        ranks => format!("its {} together need", counted(ranks.len(), "rank")),
    };
    format!("`{}` has {has}; {subject} {}", load.device, bytes(load.needed()))
}

/// Fails with [`ErrorKind::CheckFailed`] if the run needs more memory than the machine, one of its devices or one of its
/// ranks has. A base that streams and still does not fit is wrong input: no other form of the run needs less memory.
pub fn require_fit(plan: &MemoryPlan) -> Result<(), RunError> {
    let Some(shortage) = shortage(plan) else { return Ok(()) };
    let sentence = format!("the run does not fit into memory: {shortage}");
    match plan.memory().streamed() {
        Some(_) => Err(RunError::input(sentence)),
        None => Err(RunError::new(ErrorKind::CheckFailed, sentence)),
    }
}

/// Fails with [`ErrorKind::CheckFailed`] if a run whose layers move ([`move_plan`]) needs more memory meanwhile.
pub fn require_move_fits(plan: &MemoryPlan) -> Result<(), RunError> {
    let Some(shortage) = shortage(plan) else { return Ok(()) };
    let sentence = format!("a rank holds the stages that change several times while they move: {shortage}");
    Err(RunError::new(ErrorKind::CheckFailed, sentence))
}

/// Returns what is too small, and what to do; `None` if the run fits.
fn shortage(plan: &MemoryPlan) -> Option<String> {
    Some(match plan.shortage()? {
        Shortage::Ranks(ranks) => rank_shortage(&ranks),
        Shortage::Machine { needed, available } => machine_shortage(plan, needed, available),
        Shortage::Copies { needed, available } => format!(
            "the copies in memory (run.copy_every) need {}, and this machine has {}; set run.copy_every=0",
            bytes(needed),
            bytes(available)
        ),
        Shortage::Device { load, missing } => device_shortage(load, missing),
    })
}

fn rank_shortage(ranks: &[SmallRank]) -> String {
    let lack = |&SmallRank { rank, needed, available }: &SmallRank| {
        let missing = bytes(needed - available);
        format!(
            "rank {rank} needs {} and has {}, which is {missing} too little",
            bytes(needed),
            bytes(available)
        )
    };
    let lacks: Vec<String> = ranks.iter().map(lack).collect();
    format!(
        "{}; give it fewer layers with pipeline.boundaries or a new plan (`pipewright plan --profile`), pipeline.recompute \
         for its stages, or fewer rows per microbatch",
        lacks.join("; ")
    )
}

fn machine_shortage(plan: &MemoryPlan, needed: u64, available: u64) -> String {
    let (rank, most) = plan.largest();
    let subject = if plan.shape().is_local { "its ranks together need" } else { "one process needs" };
    let parts = [
        (most.parameters, "parameters"),
        (most.gradients, "gradients"),
        (most.optimizer, "optimizer state"),
        (most.activations, "activations"),
        (if most.undo > most.activations { most.undo } else { 0 }, OLD_STATE),
    ];
    let (part, name) = parts.into_iter().max_by_key(|(part, _)| *part).unwrap_or_default();
    let advice = match name {
        "activations" => {
            "use fewer or shorter rows per microbatch, a schedule that holds fewer microbatches, or \
             pipeline.recompute for more layers or stages"
        }
        OLD_STATE => "set optimizer.post_validation=false and run.fingerprint_every=0",
        "parameters" if plan.memory().streamed().is_some() => {
            "read fewer layers at once, with more pipeline.stages_per_rank up to one layer per stage and \
             model.stream_window=1"
        }
        "parameters" if plan.shared() > 0 => {
            "leave the base in its files with model.stream=true and a stage per layer (pipeline.schedule=looped-bfs, \
             pipeline.stages_per_rank), or spread it over more machines with more pipeline.ranks and pipeline.transport=mpi"
        }
        _ => {
            "use a smaller model, or spread it over more machines with more pipeline.ranks and \
             pipeline.transport=mpi, or over replicas with mesh.data_parallel_mode=sharded"
        }
    };
    let copies = match plan.copies() {
        0 => String::new(),
        copies => format!(" with {} of copies in memory (run.copy_every)", bytes(copies)),
    };
    format!(
        "{subject} {}{copies}, and this machine has {}, which is {} too little; rank {rank} needs the most, {}, including {} of \
         {name}; {advice}",
        bytes(needed),
        bytes(available),
        bytes(needed - available),
        bytes(most.total()),
        bytes(part)
    )
}

fn device_shortage(load: &DeviceLoad, missing: u64) -> String {
    let most = load.largest().filter(|_| load.ranks.len() > 1);
    let most = most.map_or_else(String::new, |(rank, needed)| {
        format!("; rank {rank} needs the most, {}", bytes(needed))
    });
    format!(
        "{}, which is {} too little{most}; use more devices with more pipeline.ranks and run.devices, \
         mesh.data_parallel_mode=sharded, pipeline.recompute for more layers or stages, fewer rows per microbatch, or a smaller model",
        device_balance(load),
        bytes(missing)
    )
}

#[cfg(test)]
mod tests;
