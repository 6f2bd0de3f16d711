//! `pipewright plan`: searches the best plan for a profile, and writes its configuration; or searches the
//! best plan for a cluster.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use pipewright_schedule::bytes::parse_bytes;
use pipewright_schedule::emit::Release;
use pipewright_schedule::plan::{PlanError, PlanRequest, System, TrainingState, plan};
use pipewright_schedule::profile::{EMBEDDING, EMBEDDING_PART, Profile};
use pipewright_system::profile_file;
use pipewright_system::schedule_memory::check_plan;

use crate::argument_values::parse_time;
use crate::clusters::arguments::{ClusterArguments, one_of};
use crate::clusters::machine::NamedMachines;
use crate::clusters::request::PlanOptions;
use crate::clusters::{judged, plan as cluster_plan, plan_json as cluster_json, plan_text};
use crate::configurations::{Configurations, FixedRanks, PlannedRun};
use crate::failure::Failure;
use crate::numbers::bytes;
use crate::output;
use crate::plans::checked::{Check, Checked};
use crate::plans::config::write_plan;
use crate::plans::delayed::DelayedPlans;
use crate::plans::emitted::{Emitted, SYSTEMS, Target, system_name};
use crate::plans::plan_json::{json, plan_json};
use crate::plans::print::{refused, text, title_of};
use crate::screen::say;

/// The arguments of `pipewright plan`.
#[derive(Debug, Args)]
pub struct PlanArguments {
    /// The configuration to plan; without it, the profile alone is planned. With --cluster, also a config.json
    /// or its folder
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Override a key of the configuration with a TOML value
    #[arg(long, value_name = "section.key=value")]
    set: Vec<String>,
    /// The costs of layers and links, from a file that `profile` wrote or that is written by hand; by
    /// default, estimates for the model of the configuration
    #[arg(long, value_name = "PROFILE.toml")]
    profile: Option<PathBuf>,
    /// The number of ranks, over all replicas; by default, as in the configuration
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// The number of microbatches of a step, over all replicas; by default, as in the configuration
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    /// The number of replicas; by default, it is searched
    #[arg(long, value_name = "D")]
    data_parallel: Option<u32>,
    /// The number of tensor-parallel ranks of each stage; by default, it is searched if the profile has a
    /// [node], or for a cluster
    #[arg(long, value_name = "T")]
    tensor_parallel: Option<u32>,
    /// The numbers of parts into which the plan may cut the head along the vocabulary, such as 1,4,8; by
    /// default, the number that the profile or the configuration has, and for a whole head that can be cut
    /// also one and two for each rank
    #[arg(long, value_name = "K,..", value_delimiter = ',')]
    head_parts: Vec<u32>,
    /// The memory of a rank, such as 16GiB; by default, as in the profile, or any amount. For a cluster, that
    /// of the machine without what a driver and an allocator need
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// The longest search; by default, 20s. The search for a cluster has a fixed amount of work instead
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    time_limit: Option<Duration>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    /// The configuration to write for the best plan
    #[arg(short, long, value_name = "CONFIG.toml")]
    output: Option<PathBuf>,
    /// Write the files with which another system executes the best plan, or the best that it can run
    #[arg(long, value_name = "SYSTEM", value_parser = one_of(&SYSTEMS, system_name))]
    emit: Option<(System, Release)>,
    /// With --emit, the folder of the files; by default, one with the name of the system
    #[arg(long, value_name = "DIR", requires = "emit")]
    emit_dir: Option<PathBuf>,
    /// Predict the plan in a file of another system, and compare it with the best plan for the same ranks and
    /// batch: options of torchtitan or Megatron, or DeepSpeed's JSON. With --cluster also a script of Megatron,
    /// torchtitan's TOML, and YAML of Megatron-Bridge or NeMo
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "emit", "output", "microbatches", "data_parallel", "tensor_parallel", "stack", "batch_tokens", "goal",
        "FixedArguments", "FailureArguments",
    ])]
    check: Option<PathBuf>,
    /// Also predict each plan with weights that are delayed by one update (optimizer.delay = 1), and name the faster of the
    /// two. It is another training, with other losses
    #[arg(long, conflicts_with_all = ["check", "emit"])]
    allow_delay: bool,
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// The longest search if no other limit is given.
const TIME_LIMIT: Duration = Duration::from_secs(20);

impl PlanArguments {
    /// Returns the longest search.
    fn time_limit(&self) -> Duration {
        self.time_limit.unwrap_or(TIME_LIMIT)
    }

    /// Returns the numbers of ranks that are fixed.
    fn fixed(&self) -> FixedRanks {
        FixedRanks { data_parallel: self.data_parallel, tensor_parallel: self.tensor_parallel }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// The best plans, and why other schedules lost
    Text,
    /// The best plans, the lower bound and the gap
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &PlanArguments, configurations: &dyn Configurations) -> Result<(), Failure> {
    if let Some(cluster) = &arguments.cluster.cluster {
        return plan_for_cluster(arguments, cluster, configurations);
    }
    if let Some(model) = arguments.config.as_deref().filter(|path| is_model(path)) {
        return Err(Failure::input(format!(
            "{path}: this is a model and not a configuration; name the cluster to plan it for, such as `pipewright plan \
             {path} --cluster h100 --nodes 16 --global-batch 1024 --seq-len 8192`",
            path = model.display()
        )));
    }
    let has_config = arguments.config.is_some() || !arguments.set.is_empty();
    let config = arguments.config.as_deref();
    let run =
        has_config.then(|| configurations.run(config, &arguments.set, arguments.fixed())).transpose()?;
    let run = run.as_deref();
    let profile = profile(arguments, run)?;
    refuse_for_others(arguments, &profile)?;
    if let Some(file) = &arguments.check {
        return check(arguments, file, &profile, run);
    }
    let request = request(arguments, &profile, run)?;
    check_plan(&request)?;
    let precision = run.map(PlannedRun::precision);
    let target = target(arguments, precision)?;
    let start = Instant::now();
    let mut keep_going = || start.elapsed() < arguments.time_limit();
    let report = plan(&profile, &request, &mut keep_going).map_err(|error| {
        whole_embedding_note(&error, &profile).iter().for_each(|note| say(note));
        refused(error)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    if let Some(output) = &arguments.output {
        let best = report.plans.first().ok_or_else(|| Failure::input("there is no plan to write"))?;
        write_plan(output, best, run.map(|run| run.base(best)), &profile)?;
    }
    let emitted = target.map(|target| {
        let start = Instant::now();
        let mut keep_going = || start.elapsed() < arguments.time_limit();
        Emitted::of(&report, &profile, &request, &target, &mut keep_going)
    });
    let emitted = emitted.transpose()?;
    if let Some(emitted) = &emitted {
        emitted.write()?;
    }
    let delayed = arguments.allow_delay.then(|| DelayedPlans::of(&report, &profile, &request));
    let replicas = report.plans.first().map(|best| best.mesh.data);
    let note = run.zip(replicas).and_then(|(run, replicas)| run.note_on_groups(replicas));
    let printed = match arguments.format {
        Format::Text => {
            let plan = text(&report, &request, seconds, &profile, note.as_deref());
            let files = emitted.as_ref().map(|emitted| {
                let plan = &emitted.plan;
                emitted.text(&title_of(plan), plan.step_s, &plan.boundaries)
            });
            plan + &files.unwrap_or_default()
                + &delayed.map(|delayed| delayed.text(&report)).unwrap_or_default()
        }
        Format::Json => {
            let emit = emitted.as_ref().map(|emitted| emitted.json(plan_json(&emitted.plan)));
            json(&report, seconds, &profile.assumed, note.as_deref(), (emit, delayed))
        }
    };
    output::write(None, &printed)
}

/// Returns where the files of another system are written, if they are asked for. `precision` is the precision of the run.
fn target(arguments: &PlanArguments, precision: Option<String>) -> Result<Option<Target<'_>>, Failure> {
    let Some((system, release)) = arguments.emit else { return Ok(None) };
    let target = Target { system, release, folder: arguments.emit_dir.as_deref(), precision };
    target.check()?;
    Ok(Some(target))
}

/// Plans a model for a cluster that is not at hand.
fn plan_for_cluster(
    arguments: &PlanArguments,
    cluster: &str,
    configurations: &dyn Configurations,
) -> Result<(), Failure> {
    refuse_options_without_effect(arguments)?;
    let target = target(arguments, None)?;
    let options = PlanOptions {
        machines: &NamedMachines::parse(cluster)?,
        cluster: &arguments.cluster,
        config: arguments.config.as_deref(),
        set: &arguments.set,
        ranks: arguments.ranks,
        memory: arguments.memory,
        data_parallel: arguments.data_parallel,
        tensor_parallel: arguments.tensor_parallel,
        target: target.as_ref(),
        configurations,
    };
    if let Some(file) = &arguments.check {
        let judged = judged::read(&options, file)?;
        match arguments.format {
            Format::Text => output::show(&judged.text())?,
            Format::Json => output::write(None, &judged.json())?,
        }
        return judged.finish();
    }
    let planned = cluster_plan::plan(&options)?;
    if let Some(emitted) = &planned.emitted {
        emitted.write()?;
    }
    match arguments.format {
        Format::Text => output::show(&plan_text::text(&planned)),
        Format::Json => output::write(None, &cluster_json::json(&planned)),
    }
}

/// Refuses options that a plan for a cluster does not have.
fn refuse_options_without_effect(arguments: &PlanArguments) -> Result<(), Failure> {
    let options = [
        ("--profile", arguments.profile.is_some(), "give measurements with --measured"),
        ("--microbatches", arguments.microbatches.is_some(), "use --global-batch and --microbatch-size"),
        ("--head-parts", !arguments.head_parts.is_empty(), "leave it out, because the head is not cut"),
        (
            "--time-limit",
            arguments.time_limit.is_some(),
            "leave it out, because the search has a fixed amount of work",
        ),
        ("--allow-delay", arguments.allow_delay, "leave it out"),
        ("--output", arguments.output.is_some(), "keep the plans with `--format json > FILE`"),
    ];
    match options.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((flag, _, advice)) => {
            Err(Failure::input(format!("{flag} has no effect on a plan for a cluster; {advice}")))
        }
        None => Ok(()),
    }
}

/// Refuses plans of other systems for a profile with frozen layers, whose backwards these systems run, and for an
/// embedding in parts, which they do not have.
fn refuse_for_others(arguments: &PlanArguments, profile: &Profile) -> Result<(), Failure> {
    let flags = [("--emit", arguments.emit.is_some()), ("--check", arguments.check.is_some())];
    let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    if profile.layers.iter().any(|layer| !layer.is_trained()) {
        return Err(Failure::input(format!(
            "{flag}: the profile has frozen layers (`trained_bytes = 0`), and a plan leaves out their weight gradients, \
             which other systems compute: leave {flag} out, or give a profile without frozen layers"
        )));
    }
    if profile.layers.iter().any(|layer| layer.kind == EMBEDDING_PART) {
        return Err(Failure::input(format!(
            "{flag}: the embedding is in parts (`pipeline.embedding_parts`), which other systems do not have: leave {flag} \
             out, or set pipeline.embedding_parts to 1"
        )));
    }
    Ok(())
}

/// Returns whether a path is a `config.json` or a folder.
fn is_model(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|extension| extension == "json")
}

/// Checks a plan of another system.
fn check(
    arguments: &PlanArguments,
    file: &Path,
    profile: &Profile,
    run: Option<&dyn PlannedRun>,
) -> Result<(), Failure> {
    let memory_of = |ranks| arguments.memory.or_else(|| profile.memory_of_rank(ranks));
    let head_parts_of = |ranks| head_parts(arguments, profile, run, ranks);
    let checked = Checked::of(Check {
        file,
        profile,
        ranks: arguments.ranks,
        memory_of: &memory_of,
        state: training_state_of(run)?,
        head_parts_of: &head_parts_of,
        time_limit: arguments.time_limit(),
    })?;
    let printed = match arguments.format {
        Format::Text => checked.text(),
        Format::Json => checked.json(),
    };
    output::write(None, &printed)?;
    checked.finish()
}

fn training_state_of(run: Option<&dyn PlannedRun>) -> Result<TrainingState, Failure> {
    run.map_or(Ok(TrainingState::default()), PlannedRun::training_state)
}

fn request(
    arguments: &PlanArguments,
    profile: &Profile,
    run: Option<&dyn PlannedRun>,
) -> Result<PlanRequest, Failure> {
    let missing = |flag: &str| {
        Failure::input(format!(
            "{flag} is missing; give it, or a configuration, such as --ranks 4 --microbatches 16"
        ))
    };
    let ranks = arguments.ranks.or(run.map(PlannedRun::ranks)).ok_or_else(|| missing("--ranks"))?;
    let microbatches = arguments.microbatches.or(run.map(PlannedRun::microbatches));
    let memory = arguments.memory.or(profile.memory_of_rank(ranks));
    let state = training_state_of(run)?;
    let replicas = run.and_then(PlannedRun::replicas_with_experts);
    Ok(PlanRequest {
        ranks,
        microbatches: microbatches.ok_or_else(|| missing("--microbatches"))?,
        microbatch_rows: run.map_or(profile.rows, PlannedRun::microbatch_rows),
        memory,
        state,
        data_parallel: arguments.data_parallel.or(replicas),
        tensor_parallel: arguments.tensor_parallel.or(replicas.map(|_| 1)),
        head_parts: head_parts(arguments, profile, run, ranks),
        always_streams: run.is_some_and(PlannedRun::always_streams),
        ..PlanRequest::default()
    })
}

/// Returns the parts of the head that a plan for `ranks` tries: the given numbers, or the numbers that the
/// configuration's model can have.
fn head_parts(
    arguments: &PlanArguments,
    profile: &Profile,
    run: Option<&dyn PlannedRun>,
    ranks: u32,
) -> Vec<u32> {
    match run.filter(|_| arguments.head_parts.is_empty()) {
        Some(run) => run.head_parts(profile, ranks),
        None => arguments.head_parts.clone(),
    }
}

/// Returns advice if no plan fits because no rank can hold the whole embedding.
fn whole_embedding_note(error: &PlanError, profile: &Profile) -> Option<String> {
    let PlanError::DoesNotFit { shortage, .. } = error else { return None };
    let embedding = profile.layers.first().filter(|layer| layer.kind == EMBEDDING)?;
    let state = embedding.optimizer_bytes.unwrap_or(0);
    let needed = embedding.parameter_bytes.saturating_add(embedding.gradient_bytes()).saturating_add(state);
    (needed > shortage.memory).then(|| {
        format!(
            "note: the embedding alone needs {}, and a rank has {}: cut it along the vocabulary (`pipeline.embedding_parts`; \
             with a tied head, `pipeline.head_parts` too)",
            bytes(needed),
            bytes(shortage.memory)
        )
    })
}

/// Returns the profile to plan for: of the run, or of the file alone.
fn profile(arguments: &PlanArguments, run: Option<&dyn PlannedRun>) -> Result<Profile, Failure> {
    match (run, &arguments.profile) {
        (Some(run), file) => run.profile(file.as_deref()),
        (None, Some(file)) => Ok(profile_file::read(file)?),
        (None, None) => Err(Failure::input(
            "--profile is missing; write the costs of layers and links to a file, measure them with `pipewright \
             profile`, or give a configuration, whose costs are then estimated",
        )),
    }
}
