//! `pipewright compare`: the figures of several schedules side by side, and a page with their pictures on one
//! scale.
//!
//! The schedules have equal numbers of ranks and microbatches, and train the same model. So a cost is for the
//! whole share of the model that a rank has, and a stage of a schedule with several stages on a rank has its
//! part of it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_schedule::comparison::{Compared, Figures, json, page, text};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::{Generator, Setting, find, generate_at};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::TimeUnit;
use pipewright_schedule::simulate::{Summary, logical, timed};
use pipewright_schedule::{Costs, LowerConfig, Recompute, Schedule, ScheduleSpec};
use pipewright_system::profile_file;
use pipewright_system::schedule_memory::check_named;

use crate::argument_values::Hinted;
use crate::failure::{Exit, Failure};
use crate::output::{PageOutput, page_of};
use crate::plans::prediction::ProfileArguments;
use crate::schedules::drawing::check_cells;
use crate::schedules::size::{ScheduleSize, is_file_name};
use crate::schedules::timed_program::{EngineTimes, Source, refused};

/// The arguments of `pipewright compare`.
#[derive(Debug, Args)]
pub struct CompareArguments {
    /// The schedules, without regard to case
    #[arg(required = true, value_name = "NAME", value_parser = Hinted::schedules(), hide_possible_values = true)]
    names: Vec<String>,
    #[command(flatten)]
    size: ScheduleSize,
    /// The costs of actions for all layers of a rank, in any one unit; a stage of a schedule with several
    /// stages on a rank has its part. F=1:1:2 gives each stage its own cost, for schedules with that many
    /// stages
    #[arg(long, value_name = "F=1,I=1,W=1,hop=0.1", conflicts_with = "profile")]
    cost: Option<Costs>,
    /// The costs of layers and links, from a file that `profile` wrote or that is written by hand; each
    /// schedule has its best partition
    #[arg(long, value_name = "PROFILE.toml")]
    profile: Option<PathBuf>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    output: PageOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table
    Text,
    /// The same figures as JSON
    Json,
    /// A page with the table and a picture of each schedule, all on one scale
    Html,
}

/// Runs the command.
pub(crate) fn run(arguments: &CompareArguments) -> Result<(), Failure> {
    if arguments.output.is_opened() && arguments.format != Format::Html {
        return Err(Failure::input("--open is for pages; add --format html"));
    }
    let specs = specs(arguments)?;
    if let Some(file) = &arguments.profile {
        // A mistake in the profile is not the schedules' fault.
        profile_file::read(file)?;
    }
    let compared: Vec<Compared> =
        specs.into_iter().map(|(name, spec)| compared(name, spec, arguments)).collect();
    if compared.iter().all(|it| it.outcome.is_err()) {
        let reasons =
            compared.iter().filter_map(|it| Some(format!("{}: {}", it.name, it.outcome.as_ref().err()?)));
        let reasons = reasons.collect::<Vec<_>>().join("\n");
        return Err(Failure::input(format!("no schedule of the list has this size\n{reasons}")));
    }
    let unit = if arguments.profile.is_some() { TimeUnit::Seconds } else { TimeUnit::Costs };
    let text = match arguments.format {
        Format::Text => text(&compared, unit),
        Format::Json => json(&compared),
        Format::Html => {
            let timelines = compared.iter().filter_map(|it| Some(&it.outcome.as_ref().ok()?.timeline));
            check_cells(timelines.map(|timeline| timeline.events().len() as u64).sum())?;
            page(&compared, unit)
        }
    };
    arguments.output.write(&text, || page_of("comparison", "html"))
}

/// Returns the schedules with their sizes, and refuses sizes that do not fit into memory. Each schedule has
/// the settings that it knows; every setting must belong to one of them.
fn specs(arguments: &CompareArguments) -> Result<Vec<(&'static str, ScheduleSpec)>, Failure> {
    let mut generators = Vec::new();
    for name in &arguments.names {
        if is_file_name(name) {
            return Err(Failure::input(format!(
                "{name}: this command compares schedules by name; for a file use `pipewright simulate --csv`"
            )));
        }
        generators.push(find(name).map_err(Failure::input)?);
    }
    let given = arguments.size.spec(generators[0].name, None)?;
    let is_known = |setting: &Setting| generators.iter().any(|it| it.settings.contains(setting));
    if let Some(setting) = Setting::ALL.into_iter().find(|it| given.gives(*it) && !is_known(it)) {
        return Err(Failure::input(format!(
            "no schedule of the list has the setting `{setting}`; leave it out"
        )));
    }
    let spec = |generator: &Generator| {
        let mut spec = arguments.size.spec(generator.name, arguments.cost.as_ref())?;
        spec.keep_only(generator.settings);
        check_named(generator.name, &spec, Use::Simulate)?;
        Ok((generator.name, spec))
    };
    generators.into_iter().map(spec).collect()
}

/// Predicts a schedule.
fn compared(name: &'static str, spec: ScheduleSpec, arguments: &CompareArguments) -> Compared {
    let figures = match &arguments.profile {
        Some(file) => profiled(name, spec, file.clone()),
        None => costed(name, spec, arguments.cost.clone().unwrap_or_default()),
    };
    Compared { name: name.to_owned(), outcome: figures.map_err(|failure| failure.text()) }
}

/// Predicts a schedule at the costs of a profile.
fn profiled(name: &str, spec: ScheduleSpec, file: PathBuf) -> Result<Figures, Failure> {
    let source = Source::Named(name.to_owned(), Box::new(spec.clone()));
    let arguments = ProfileArguments::of(file);
    let predicted =
        arguments.predict(source, &Recompute::None, Use::Simulate, &mut EngineTimes::default())?;
    let program = predicted.prediction.program.as_program();
    Ok(Figures::of(predicted.summary, program, &predicted.schedule, predicted.prediction.run.timeline()))
}

/// Predicts a schedule at costs of a rank's share of the model.
fn costed(name: &str, spec: ScheduleSpec, costs: Costs) -> Result<Figures, Failure> {
    let shared = |schedule: &Schedule| costs.shared(schedule.placement().stages_per_rank());
    let schedule = generate_at(name, spec, shared).map_err(Failure::input)?;
    let costs = shared(&schedule);
    let source = ProgramSource::Schedule(schedule.clone());
    let program =
        EngineTimes::default().prove(name, source, &LowerConfig::training_at(&costs))?.into_program();
    let run = timed(&program, &costs).map_err(refused)?;
    let steps = logical(&program).map_err(|error| Failure::new(Exit::Bug, error))?.steps();
    Ok(Figures::of(Summary::of(&run, steps, &costs), &program, &schedule, run.timeline()))
}
