//! `pipewright plan --cluster`: the request, the search, and what else is said about it.

use std::path::Path;
use std::time::Instant;

use pipewright_cluster::emit::emit;
use pipewright_cluster::implementation::Implementation;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::measured;
use pipewright_cluster::search::{
    ClusterPlan, ClusterReport, Request, SearchError, SearchErrorKind, Upgrade, search, upgrades,
};
use pipewright_cluster::systems;
use pipewright_schedule::plan::System;
use pipewright_shapes::model::Model;
use pipewright_shapes::reader::Described;

use crate::clusters::failures::ExpectedFaults;
use crate::clusters::machine::{machine, read_toml};
use crate::clusters::model;
use crate::clusters::request::{PlanOptions, Sizes};
use crate::configurations::PlannedModel;
use crate::failure::{Exit, Failure};
use crate::plans::emitted::{Emitted, Target};

/// A finished search and what people need to judge it.
#[derive(Debug)]
pub(crate) struct Planned {
    /// The request.
    pub(crate) request: Request,
    /// The plans.
    pub(crate) found: ClusterReport,
    /// The gain from more hardware.
    pub(crate) upgrades: Vec<Upgrade>,
    /// The plan that another system executes, with its files, if they are asked for.
    pub(crate) emitted: Option<Emitted<ClusterPlan>>,
    /// The failures of the GPUs, if their rate is known.
    pub(crate) faults: Option<ExpectedFaults>,
    /// Seconds of the search, with that for more hardware.
    pub(crate) seconds: f64,
    /// Assumptions about the model and the machine.
    pub(crate) assumed: Vec<String>,
    /// The parts of the prediction that are measured.
    pub(crate) measured: Vec<String>,
}

/// The model and the machine of the options, and what is said about them.
pub(super) struct PlannedFor {
    pub(super) model: Model,
    pub(super) machine: Machine,
    /// The tokens of a row, from the options or the configuration.
    pub(super) sequence: Option<u32>,
    /// The rows of a step, from the options or the configuration.
    pub(super) batch: Option<u32>,
    pub(super) assumed: Vec<String>,
    pub(super) measured: Vec<String>,
}

/// Reads the model and the machine of the options.
pub(super) fn planned_for(options: &PlanOptions<'_>) -> Result<PlannedFor, Failure> {
    let PlannedModel { described, sequence, batch, adapters } =
        model::read(options.path(), options.set, options.configurations)?;
    let machine = machine(options.machines.first)?;
    let Described { model, mut assumed } = described;
    let (machine, measured) = match &options.cluster.measured {
        Some(file) => with_measurements(file, &model, machine, options.cluster.implementation())?,
        None => (machine, Vec::new()),
    };
    // Blocks are measured with all of their parameters trained.
    let model = match adapters {
        Some(adapters) => adapters.on(model)?,
        None => model,
    };
    assumed.extend(assumptions(&machine, !options.machines.further.is_empty()));
    let (sequence, batch) = (options.cluster.seq_len.or(sequence), options.cluster.global_batch.or(batch));
    Ok(PlannedFor { model, machine, sequence, batch, assumed, measured })
}

/// Makes the request of the options, and searches.
pub(crate) fn plan(options: &PlanOptions<'_>) -> Result<Planned, Failure> {
    options.check()?;
    let PlannedFor { model, machine, sequence, batch, mut assumed, mut measured } = planned_for(options)?;
    let Sizes { gpus, batch, sequence } = options.sizes(&machine, sequence, batch)?;
    let precision = options.precision(&machine)?;
    let mut request = Request::new(model, machine, gpus, batch, sequence, precision);
    options.add_machines(&mut request)?;
    assumed.extend(request.further.iter().flat_map(|kind| assumptions(&kind.machine, true)));
    let faults = options.cluster.failures.faults(&request)?;
    request.implementation = options.cluster.implementation();
    request.fixed = options.fixed();
    request.memory = options.memory.map(|bytes| bytes as f64);
    request.names = options.names();
    request.goal_tokens = options.cluster.goal.map(|tokens| tokens as f64);
    let start = Instant::now();
    let found = search(&request).map_err(refused)?;
    measured.extend(found.plans.first().map_or_else(Vec::new, |best| unused(&request, best)));
    let emitted =
        options.target.zip(found.plans.first()).map(|(target, best)| emitted(&request, best, target));
    let emitted = emitted.transpose()?;
    let upgrades = upgrades(&request, found.fastest());
    let seconds = start.elapsed().as_secs_f64();
    Ok(Planned { request, found, upgrades, emitted, faults, seconds, assumed, measured })
}

/// Says which measured products the best plan does not use.
fn unused(request: &Request, best: &ClusterPlan) -> Vec<String> {
    let products = measured::unused_products(&request.setting(&best.layout)).into_iter();
    products.map(|product| format!("the best plan does not use {product}")).collect()
}

/// Returns the machine with the measurements of a file, and which they are.
fn with_measurements(
    file: &Path,
    model: &Model,
    machine: Machine,
    stack: Implementation,
) -> Result<(Machine, Vec<String>), Failure> {
    let advice = "name a file of measurements, as the book describes it (docs/cluster-plans.md)";
    let measured = read_toml(file, "the measurements", advice, measured::read)?;
    let changed = measured.machine(model, &machine);
    let changed = changed.map_err(|error| Failure::input(format!("{}: {error}", file.display())))?;
    let sentences = measured.sentences(model, &machine, &changed, stack);
    Ok((changed, sentences))
}

/// Returns the figures of a machine that are not published, with what is assumed, the machine that has the
/// figures that a file does not give, and where the constants come from.
/// With `is_named`, each sentence begins with the machine's name.
fn assumptions(machine: &Machine, is_named: bool) -> Vec<String> {
    const ASSUMED: &str = "assumed: ";
    let group = |(source, keys): (&str, Vec<&str>)| {
        let keys: Vec<&str> = keys.into_iter().filter(|key| *key != "constants").collect();
        let assumption = source.strip_prefix(ASSUMED).filter(|_| !keys.is_empty())?;
        Some(format!("{}: {assumption}", keys.join(", ")))
    };
    let mut assumed: Vec<String> = machine.keys_by_source().into_iter().filter_map(group).collect();
    if let Some(known) = &machine.based_on {
        assumed.push(format!("figures that the file does not give: from {known}"));
    }
    let constants = machine.source_of("constants");
    assumed.push(format!("shares that programs reach: {}", constants.trim_start_matches(ASSUMED)));
    if is_named {
        assumed.iter_mut().for_each(|sentence| *sentence = format!("{}: {sentence}", machine.name));
    }
    assumed
}

/// Makes the files for the best plan of a search. If the system cannot run it, searches the best one that
/// it can run.
fn emitted(
    request: &Request,
    best: &ClusterPlan,
    target: &Target<'_>,
) -> Result<Emitted<ClusterPlan>, Failure> {
    let system = target.system;
    refuse_frozen_blocks(system, request)?;
    let other = |refusal: &str| {
        let request = Request { system: Some(system), plans: 1, ..request.clone() };
        let found = search(&request).map_err(|error| {
            let among = match error.kind {
                SearchErrorKind::System => String::new(),
                _ => format!("among the plans that {system} runs:\n"),
            };
            refused(error).below(format!("{system} cannot run the best plan: {refusal}\n{among}"))
        })?;
        found.plans.into_iter().next().ok_or_else(|| Failure::input("there is no plan to write"))
    };
    let emit =
        |plan: &ClusterPlan| emit(system, target.release, request, plan, &target.folder().to_string_lossy());
    let refusal = systems::refusal(system, &best.layout, &request.model);
    Emitted::new(best, target, refusal, other, emit, |plan| plan.prediction.seconds)
}

/// Refuses plans for models with frozen blocks: other systems run the backwards that are left out here.
fn refuse_frozen_blocks(system: System, request: &Request) -> Result<(), Failure> {
    if !request.model.is_adapted() {
        return Ok(());
    }
    Err(Failure::input(format!(
        "--emit {}: the configuration has an [adapter], and a plan leaves out the weight gradients of frozen layers, \
         which {system} computes: leave --emit out, or set adapter.kind = \"none\"",
        system.name()
    )))
}

/// Returns the failure of a search. A plan that does not fit is a check that failed. Anything else is wrong
/// input.
fn refused(error: SearchError) -> Failure {
    let exit = match error.kind {
        SearchErrorKind::Memory(_) => Exit::CheckFailed,
        SearchErrorKind::Request | SearchErrorKind::System => Exit::WrongInput,
    };
    Failure::new(exit, error)
}
