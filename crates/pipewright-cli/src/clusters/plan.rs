//! `pipewright plan --cluster`: the request, the search, and what else is said about it.

use std::path::Path;
use std::time::Instant;

use pipewright_cluster::figure::Figure;
use pipewright_cluster::hf_config::Described;
use pipewright_cluster::layout::Precision;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::measured;
use pipewright_cluster::search::{Fixed, Found, Request, SearchError, Upgrade, search, upgrades};
use pipewright_cluster::toml_file::MAX_FILE;
use pipewright_system::bounded_file::read_text;

use crate::clusters::arguments::ClusterArguments;
use crate::clusters::machine::machine;
use crate::clusters::model::{self, PlannedModel};
use crate::failure::{Exit, Failure};

/// The options of `plan` that are not for clusters alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<'a> {
    /// The model, a folder or a configuration.
    pub(crate) config: Option<&'a Path>,
    /// All GPUs.
    pub(crate) ranks: Option<u32>,
    /// The most bytes of a rank.
    pub(crate) memory: Option<u64>,
    /// The replicas.
    pub(crate) data_parallel: Option<u32>,
    /// The ranks of a tensor group.
    pub(crate) tensor_parallel: Option<u32>,
}

/// A finished search and what people need to judge it.
#[derive(Debug)]
pub(crate) struct Planned {
    /// The request.
    pub(crate) request: Request,
    /// The plans.
    pub(crate) found: Found,
    /// The gain from more hardware.
    pub(crate) upgrades: Vec<Upgrade>,
    /// Seconds of the search, with that for more hardware.
    pub(crate) seconds: f64,
    /// The keys of the model's file that change nothing in the prediction, although they may change costs.
    pub(crate) ignored: Vec<String>,
    /// Assumptions about the model and the machine.
    pub(crate) assumed: Vec<String>,
    /// The parts of the prediction that are measured.
    pub(crate) measured: Vec<String>,
}

/// Makes the request of the arguments, and searches.
pub(crate) fn plan(
    cluster: &str,
    arguments: &ClusterArguments,
    shared: &Shared<'_>,
) -> Result<Planned, Failure> {
    let path = arguments.model.as_deref().or(shared.config).ok_or_else(|| {
        Failure::input("--cluster needs a model; name a config.json, its folder, or a configuration")
    })?;
    let PlannedModel { described, sequence, batch } = model::read(path)?;
    let machine = machine(cluster)?;
    let sequence = arguments.seq_len.or(sequence).ok_or_else(|| missing("--seq-len", "8192"))?;
    let batch = rows(arguments, sequence)?.or(batch).ok_or_else(|| missing("--global-batch", "1024"))?;
    let gpus = gpus(arguments, shared, &machine)?;
    let precision = precision(arguments, &machine)?;
    let Described { model, ignored, mut assumed } = described;
    assumed.extend(assumptions(&machine));
    let (machine, measured) = match &arguments.measured {
        Some(file) => with_measurements(file, &model, machine)?,
        None => (machine, Vec::new()),
    };
    let mut request = Request::new(model, machine, gpus, batch, sequence, precision);
    request.fixed = fixed(arguments, shared);
    request.memory = shared.memory.map(|bytes| bytes as f64);
    request.goal_tokens = arguments.goal;
    let start = Instant::now();
    let found = search(&request).map_err(refused)?;
    let upgrades = found.plans.first().map_or_else(Vec::new, |best| upgrades(&request, best));
    let seconds = start.elapsed().as_secs_f64();
    Ok(Planned { request, found, upgrades, seconds, ignored, assumed, measured })
}

fn missing(flag: &str, example: &str) -> Failure {
    Failure::input(format!("{flag} is missing; give it, such as {flag} {example}"))
}

/// A plan that does not fit is a check that failed. Anything else is wrong input.
fn refused(error: SearchError) -> Failure {
    match error {
        SearchError::Memory { .. } => Failure::new(Exit::CheckFailed, error),
        error => Failure::input(error),
    }
}

/// Returns the rows of a step, if they are given as rows or as tokens.
fn rows(arguments: &ClusterArguments, sequence: u32) -> Result<Option<u32>, Failure> {
    let Some(tokens) = arguments.batch_tokens else { return Ok(arguments.global_batch) };
    let rows = tokens / f64::from(sequence.max(1));
    if rows.fract() == 0.0 && (1.0..=f64::from(u32::MAX)).contains(&rows) {
        return Ok(Some(rows as u32));
    }
    let near = rows.round().max(1.0) * f64::from(sequence);
    Err(Failure::input(format!(
        "--batch-tokens {tokens} is not a whole number of rows of {sequence} tokens; use --batch-tokens {near}"
    )))
}

fn gpus(arguments: &ClusterArguments, shared: &Shared<'_>, machine: &Machine) -> Result<u32, Failure> {
    let per_node = machine.gpus_per_node;
    match (arguments.nodes, shared.ranks) {
        (Some(nodes), _) => nodes.checked_mul(per_node).ok_or_else(|| {
            Failure::input(format!(
                "--nodes {nodes}: there are too many GPUs; use at most {}",
                u32::MAX / per_node
            ))
        }),
        (None, Some(ranks)) => Ok(ranks),
        (None, None) => Err(missing("--nodes", "16")),
    }
}

fn precision(arguments: &ClusterArguments, machine: &Machine) -> Result<Precision, Failure> {
    let precision = arguments.precision.map_or(Precision::Half, Precision::from);
    if precision == Precision::Fp8 && machine.fp8.is_none() {
        let name = &machine.name;
        return Err(Failure::input(format!(
            "--precision fp8: {name} has no rate for FP8; use bf16, or a cluster file with fp8_tflops"
        )));
    }
    Ok(precision)
}

/// Returns the fixed parts of a plan.
fn fixed(arguments: &ClusterArguments, shared: &Shared<'_>) -> Fixed {
    let given = &arguments.fixed;
    Fixed {
        tensor: shared.tensor_parallel,
        pipeline: given.pipeline_parallel,
        context: given.context_parallel,
        data: shared.data_parallel,
        expert: given.expert_parallel,
        chunks: given.stages_per_rank,
        microbatch: given.microbatch_size,
        schedule: given.schedule.clone(),
        recompute: given.recompute.map(Into::into),
        sharding: given.sharding.map(Into::into),
        sequence_parallel: None,
    }
}

/// Returns the machine with the measurements of a file, and which they are.
fn with_measurements(
    file: &Path,
    model: &pipewright_cluster::model::Model,
    machine: Machine,
) -> Result<(Machine, Vec<String>), Failure> {
    let shown = file.display();
    let text = read_text(file, MAX_FILE as u64)
        .map_err(|error| Failure::input(format!("{shown}: cannot read the measurements: {error}")))?;
    let measured = measured::read(&text).map_err(|error| {
        let place = error.place;
        Failure::input(format!("{shown}:{}:{}: {}", place.line, place.column, error.kind))
    })?;
    let changed = measured.machine(model, &machine).map_err(|error| {
        Failure::input(format!("{shown}: {}", pipewright_schedule::error_text::with_causes(&error)))
    })?;
    let sentences = measured.sentences(&machine, &changed);
    Ok((changed, sentences))
}

/// Returns the figures of a machine that are not published, with what is assumed, and where the constants come
/// from.
fn assumptions(machine: &Machine) -> Vec<String> {
    let keys = Figure::ALL.iter().map(|figure| figure.measure.key).chain(["node_switch"]);
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for key in keys {
        let Some(assumption) = machine.source_of(key).strip_prefix("assumed: ") else { continue };
        match groups.iter_mut().find(|(known, _)| *known == assumption) {
            Some((_, keys)) => keys.push(key),
            None => groups.push((assumption, vec![key])),
        }
    }
    let group = |(assumption, keys): &(&str, Vec<&str>)| format!("{}: {assumption}", keys.join(", "));
    let mut assumed: Vec<String> = groups.iter().map(group).collect();
    let constants = machine.source_of("constants");
    assumed.push(format!("shares that programs reach: {}", constants.trim_start_matches("assumed: ")));
    assumed
}
