//! `pipewright check`: checks everything that can be checked without training, and prints a summary of the run.

use std::collections::BTreeMap;
use std::fmt::Write;

use clap::{Args, ValueEnum};
use pipewright::train::Validation;
use pipewright_models::ParameterSpec;
use pipewright_schedule::words::counted;
use pipewright_schedule::{LayerDesc, StageIndex};

use crate::config::Settings;
use crate::display::say;
use crate::escape::escape_in_json;
use crate::failure::Failure;
use crate::output::{show, write};
use crate::planning::auto::{Chosen, choose_without_profile};
use crate::run_folder;
use crate::schedules::size::microbatches;
use crate::training::arguments::{RunArguments, load_settings};
use crate::training::check_json::report;
use crate::training::memory::{MemoryPlan, simulated};
use crate::training::optimizer::{require_elementwise, require_whole};
use crate::training::prepare::{Prepared, prepare};
use crate::training::stage_memory::{stage_memory, stage_table};

/// The arguments of `pipewright check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    #[command(flatten)]
    run: RunArguments,
    /// What to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A summary for people
    Text,
    /// The same as JSON, sizes in bytes
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &CheckArguments) -> Result<(), Failure> {
    let loaded = load_settings(arguments.run.config.as_deref(), &arguments.run.set)?;
    loaded.notes.iter().for_each(|note| say(note));
    let Chosen { loaded, sentences, files } =
        if loaded.is_auto() { choose_without_profile(loaded)? } else { Chosen::named(loaded) };
    let prepared = prepare(loaded)?;
    prepared.notes.iter().for_each(|note| say(note));
    run_folder::probe(&prepared.settings.run.out, &files).map_err(Failure::input)?;
    require_whole(&prepared.settings)?;
    let stages = outlines(&prepared)?;
    require_elementwise(&prepared.settings, &stages)?;
    let simulation = simulated(&prepared)?;
    let memory = MemoryPlan::new(&prepared, &stages, &simulation);
    let by_stage = stage_memory(&prepared, &stages, &simulation);
    match arguments.format {
        Format::Text => {
            let chosen: String = sentences.iter().map(|sentence| format!("{sentence}\n")).collect();
            let by_stage = stage_table(prepared.program.placement(), &by_stage);
            show(&(chosen + &summary(&prepared, &stages) + &by_stage + &memory.table()))?;
        }
        Format::Json => {
            let report = report(&prepared, &shared(&stages), &by_stage, &sentences, &memory);
            write(None, &escape_in_json(&format!("{report}\n")))?;
        }
    }
    memory.require_fit()
}

/// Returns the parameters of each stage, with the shapes of the first rank's shards.
fn outlines(prepared: &Prepared) -> Result<Vec<Vec<ParameterSpec>>, Failure> {
    let stages = prepared.program.placement().all_stages();
    let rank = prepared.settings.mesh.first_tensor_rank();
    let outline = |stage| prepared.model.outline(prepared.partition.range(stage), &rank);
    let outline = |stage| outline(stage).map_err(Failure::input);
    stages.map(outline).collect()
}

/// Returns the parameters that several stages hold, each with the list of its stages.
fn shared(stages: &[Vec<ParameterSpec>]) -> BTreeMap<&str, Vec<StageIndex>> {
    let mut holders: BTreeMap<&str, Vec<StageIndex>> = BTreeMap::new();
    for (stage, specs) in (0..).map(StageIndex::new).zip(stages) {
        for spec in specs {
            let stages = holders.entry(&spec.path).or_default();
            if stages.last() != Some(&stage) {
                stages.push(stage);
            }
        }
    }
    holders.retain(|_, stages| stages.len() > 1);
    holders
}

/// Returns the number of elements of a parameter, of all tensor ranks together.
fn elements_of(prepared: &Prepared, path: &str) -> usize {
    let whole = prepared.model.model().parameters().unwrap_or_default();
    let found = whole.iter().find(|spec| spec.path == path);
    found.map_or(0, |spec| spec.shape.iter().product())
}

/// Returns the numbers of stages as a list, such as `0, 1 and 2`.
fn listed(stages: &[StageIndex]) -> String {
    let mut numbers: Vec<String> = stages.iter().map(ToString::to_string).collect();
    let last = numbers.pop().unwrap_or_default();
    if numbers.is_empty() { last } else { format!("{} and {last}", numbers.join(", ")) }
}

/// Returns the kinds of these layers in the order of their first layer, with the number of layers of each kind.
fn kinds(layers: &[LayerDesc]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for layer in layers {
        match counts.iter_mut().find(|(kind, _)| *kind == layer.kind) {
            Some((_, count)) => *count += 1,
            None => counts.push((&layer.kind, 1)),
        }
    }
    counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

/// Returns how the validation data is used.
fn evaluations(validation: &Validation, settings: &Settings) -> String {
    let run = &settings.run;
    let (rows, batches) = (validation.rows().rows(), validation.batches());
    let ends = match run.patience {
        0 => String::new(),
        patience => format!(", until {patience} in a row find no lower loss"),
    };
    match run.eval_every {
        0 => format!("{rows} rows of validation data, never: `run.eval_every` is 0"),
        every => format!(
            "every {every} steps on {batches} batches of {} rows, from {rows} rows of validation data{ends}",
            settings.pipeline.rows()
        ),
    }
}

fn summary(prepared: &Prepared, stages: &[Vec<ParameterSpec>]) -> String {
    let Prepared { settings, layers, program, partition, rows, validation, .. } = prepared;
    let mut text = String::new();
    let mut line = |what: &str, words: String| {
        writeln!(text, "{what:9} {words}").expect("a string takes all text");
    };
    let parameters = |range: std::ops::Range<usize>| -> u64 {
        layers.layers[range].iter().map(|layer| layer.parameters).fold(0, u64::saturating_add)
    };
    let count = layers.layers.len();
    line("model", format!("{}, {}", counted(count, "layer"), counted(parameters(0..count), "parameter")));
    let placement = program.placement();
    for (stage, range) in placement.all_stages().zip(partition.ranges()) {
        let (rank, first, last) = (placement.rank_of(stage), range.start, range.end - 1);
        let (kinds, parameters) = (kinds(&layers.layers[range.clone()]), parameters(range));
        let words = format!(
            "on rank {rank}: layers {first} to {last} ({kinds}), {}",
            counted(parameters, "parameter")
        );
        line(&format!("stage {stage}"), words);
    }
    for (path, stages) in shared(stages) {
        line("shared", format!("{path}: one parameter, with a copy in each of stages {}", listed(&stages)));
        line("shared", format!("{path}: {} numbers in each copy", elements_of(prepared, path)));
    }
    let (ranks, microbatches) = (program.ranks(), microbatches(program.microbatches(), program.slices()));
    let schedule = &settings.pipeline.schedule;
    line("schedule", format!("{schedule}: {}, {microbatches}, proved sound", counted(ranks, "rank")));
    let tensor_ranks = settings.mesh.tensor_parallel;
    if tensor_ranks > 1 {
        let all = match settings.mesh.data_parallel {
            1 => format!(", {} ranks in all", settings.mesh.ranks(ranks)),
            _ => String::new(),
        };
        line("mesh", format!("{tensor_ranks} tensor ranks compute each stage together{all}"));
    }
    if settings.mesh.data_parallel > 1 {
        let replicas = settings.mesh.data_parallel;
        let shards = settings.mesh.shards();
        let holds = match shards {
            1 => "each holds all parameters".to_owned(),
            _ => format!("each holds 1/{shards} of the parameters and of the optimizer's state"),
        };
        let groups = match replicas / shards.max(1) {
            groups if shards > 1 && groups > 1 => format!(" in {groups} groups of {shards}"),
            _ => String::new(),
        };
        let all = settings.mesh.ranks(ranks);
        line("mesh", format!("{replicas} replicas{groups}, {all} ranks in all; {holds}"));
    }
    let batches = settings.run.accumulate.get() as usize;
    let (needed, tokens) = (settings.pipeline.rows() * batches, rows.tokens());
    let per_epoch = rows.rows() / needed;
    let in_batches = if batches > 1 { format!(", in {batches} batches") } else { String::new() };
    line(
        "data",
        format!(
            "{tokens} tokens, {}, {} of {}{in_batches} an epoch",
            counted(rows.rows(), "row"),
            counted(per_epoch, "step"),
            counted(needed, "row")
        ),
    );
    if let Some(validation) = validation {
        line("evaluate", evaluations(validation, settings));
    }
    line(
        "run",
        format!("{}, results in {}", counted(settings.run.steps, "step"), settings.run.out.display()),
    );
    text
}
