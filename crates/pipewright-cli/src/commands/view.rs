//! `pipewright view`: a page that compares predicted and measured timelines and explains them.

mod recorded_run;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use pipewright_document::nearest;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::output::{PageOutput, page_of};
use pipewright_planning::schedules::delayed::DelayedRun;
use pipewright_planning::schedules::drawing::{check_exchanges, check_size};
use pipewright_planning::schedules::size::{ScheduleSize, is_file_name};
use pipewright_planning::schedules::timed_program::{EngineTimes, Source, TimedProgram};
use pipewright_planning::schedules::transport::TransportArguments;
use pipewright_run::run_folder::VIEW;
use pipewright_schedule::communicator::{Communicator, judge};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::find;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::{PictureSettings, View, view, with_whole_overlaps};
use pipewright_schedule::simulate::{SimulateError, TimedRun, timed, timed_on};
use pipewright_schedule::{
    Costs, GenerateError, GenerateErrorKind, LowerConfig, Program, ScheduleSpec, ValidatedProgram,
};
use pipewright_system::schedule_file::has_ending;
use recorded_run::RecordedRun;

use crate::schedules::other_sizes::other_sizes;

/// The folder in which runs are by default.
const RUNS: &str = "runs";

/// The arguments of `pipewright view`.
#[derive(Debug, Args)]
pub(crate) struct ViewArguments {
    /// The folder of a run, the file of a schedule, or the name of a schedule
    #[arg(value_name = "RUN_DIR|FILE|NAME")]
    target: PathBuf,
    #[command(flatten)]
    size: ScheduleSize,
    /// The costs of actions in any one unit, for a schedule; a run has measured its own
    #[arg(long, value_name = "F=1,I=1,W=1,hop=0.1")]
    cost: Option<Costs>,
    /// By how many updates the parameters of a schedule are delayed: with 1, batches overlap, and the page shows three of them
    #[arg(long, value_name = "0|1", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    delay: u32,
    #[command(flatten)]
    transport: TransportArguments,
    /// Show the memory of each rank at first, even if there is little room
    #[arg(long)]
    memory_lane: bool,
    #[command(flatten)]
    output: PageOutput,
}

/// Runs the command.
pub(crate) fn run(arguments: &ViewArguments) -> Result<(), Failure> {
    let target = &arguments.target;
    if target.is_dir() {
        return arguments.output.write(&run_page(arguments)?, || target.join(VIEW));
    }
    let name = target.file_stem().unwrap_or_default().to_string_lossy();
    arguments.output.write(&schedule_page(arguments)?, || page_of(&name, "html"))
}

/// Makes the page of a run: the recorded steps, and the prediction of their program at their median costs.
fn run_page(arguments: &ViewArguments) -> Result<String, Failure> {
    let flag = arguments.size.any_flag().or(arguments.cost.as_ref().map(|_| "--cost"));
    let flag = flag.or(arguments.size.slices().map(|_| "--slices"));
    let flag = flag.or((arguments.delay > 0).then_some("--delay"));
    if let Some(flag) = flag {
        return Err(Failure::input(format!("{flag} is for schedules, and a run has its own; leave it out")));
    }
    let run = RecordedRun::read(&arguments.target)?;
    check_size(&run.program)?;
    let name = arguments.target.display().to_string();
    let communicator = arguments.transport.single_at("a page", &run.costs, &run.program)?;
    let predicted = simulated(&name, &run.program, &run.costs, communicator.as_ref())?;
    let other_programs = sound_on(communicator.as_ref(), run.other_programs);
    Ok(view(&View {
        settings: PictureSettings {
            title: &run.title,
            sizes: &run.sizes,
            memory_lane: arguments.memory_lane,
            ..PictureSettings::default()
        },
        predicted: predicted.timeline(),
        program: &run.program,
        costs: &run.costs,
        steps: &run.steps,
        left_out: run.left_out,
        whole_step: run.whole_step,
        other_programs: &other_programs,
        reads_base: run.reads_base,
    }))
}

/// Makes the page of a schedule, which has not run.
fn schedule_page(arguments: &ViewArguments) -> Result<String, Failure> {
    let communicator = arguments.transport.single("a page")?;
    let costs = arguments.cost.clone().unwrap_or_default();
    let passes = LowerConfig::training_at(&costs);
    let source = source(arguments)?;
    let timed_program = match communicator {
        Some(_) if arguments.delay > 0 => {
            return Err(Failure::input(
                "--delay 1 does not work with --transport, which simulates one batch; leave one out",
            ));
        }
        None if arguments.delay > 0 => {
            let (name, mut times) = (source.name(), EngineTimes::default());
            let schedule = source.read(Use::Simulate, &mut times)?.computation().map_err(Failure::input)?;
            DelayedRun::of(name, &schedule, (&costs, &passes), times)?.drawn()?.0
        }
        None => TimedProgram::of(source, &passes)?,
        Some(_) => {
            let (name, mut times) = (source.name(), EngineTimes::default());
            let source = source.read(Use::Simulate, &mut times)?;
            TimedProgram::unproved(name, source, &passes, times)?
        }
    };
    check_size(&timed_program.program)?;
    let predicted = simulated(&timed_program.name, &timed_program.program, &costs, communicator.as_ref())?;
    check_exchanges(predicted.timeline())?;
    let other_programs = match arguments.target.to_str() {
        Some(name) if !is_file_name(name) && arguments.delay == 0 => {
            let spec = arguments.size.spec(name, arguments.cost.as_ref())?;
            other_sizes(&timed_program.program, |microbatches| {
                let spec = ScheduleSpec { microbatches, ..spec.clone() };
                let source = ProgramSource::Named(name.to_owned(), Box::new(spec));
                source.program(&passes).ok().map(ValidatedProgram::into_program)
            })
        }
        _ => Vec::new(),
    };
    let other_programs = sound_on(communicator.as_ref(), other_programs);
    // Halves that alternate are one cell.
    let timeline = if costs.has_exchanges() {
        with_whole_overlaps(predicted.timeline(), &timed_program.program)
    } else {
        predicted.timeline().clone()
    };
    Ok(view(&View {
        settings: PictureSettings {
            title: &timed_program.title(),
            memory_lane: arguments.memory_lane,
            unit: timed_program.unit,
            ..PictureSettings::default()
        },
        predicted: &timeline,
        program: &timed_program.program,
        costs: &costs,
        steps: &[],
        left_out: 0,
        whole_step: None,
        other_programs: &other_programs,
        reads_base: false,
    }))
}

/// Simulates a program that is called `name` on a communicator, or with the links of `train`.
fn simulated(
    name: &str,
    program: &Program,
    costs: &Costs,
    communicator: Option<&Communicator>,
) -> Result<TimedRun, Failure> {
    let Some(communicator) = communicator else {
        return timed(program, costs).map_err(Failure::input);
    };
    timed_on(program, costs, communicator).map_err(|error| match error {
        SimulateError::Costs(error) => Failure::input(error),
        error => Failure::new(Exit::CheckFailed, format!("{name}: {error}")),
    })
}

/// Returns the programs that are sound on the communicator of the page.
fn sound_on(communicator: Option<&Communicator>, mut programs: Vec<Program>) -> Vec<Program> {
    if let Some(communicator) = communicator {
        programs.retain(|program| {
            judge(program, program.level(), communicator).is_ok_and(|verdict| verdict.is_sound())
        });
    }
    programs
}

/// Returns the schedule that the arguments name.
fn source(arguments: &ViewArguments) -> Result<Source, Failure> {
    let target = &arguments.target;
    let name = target.to_str().unwrap_or_default();
    if is_file_name(name) {
        return match arguments.size.any_flag() {
            Some(flag) => Err(Failure::input(format!("{flag} follows from the file {name}; leave it out"))),
            None => Ok(Source::File(target.clone(), arguments.size.slices().unwrap_or_default())),
        };
    }
    if target.components().count() != 1 || target.exists() {
        let advice = match near_entries(target).as_slice() {
            [] => "name the folder of a run, the file of a schedule, or a schedule".to_owned(),
            near => format!("did you mean {}?", near.join(" or ")),
        };
        return Err(Failure::input(format!("{}: not a folder; {advice}", target.display())));
    }
    if let Err(error) = find(name) {
        return Err(Failure::input(neither(target, &error)));
    }
    let spec = arguments.size.spec(name, arguments.cost.as_ref())?;
    Ok(Source::Named(name.to_owned(), Box::new(spec)))
}

/// Returns the sentence about a target that is not a folder, a file or a schedule, with the nearest names.
fn neither(target: &Path, unknown: &GenerateError) -> String {
    let mut near = near_entries(target);
    near.extend(near_entries(&Path::new(RUNS).join(target)));
    if let GenerateErrorKind::UnknownSchedule { suggestion: Some(name), .. } = unknown.kind {
        near.push(format!("`{name}`"));
    }
    let advice = match near.as_slice() {
        [] => "check the path, or see the schedules with `pipewright schedule --list`".to_owned(),
        near => format!("did you mean {}?", near.join(" or ")),
    };
    format!("{}: neither the folder of a run, nor a file, nor a schedule; {advice}", target.display())
}

/// Returns the folder or schedule's file in the same folder whose name is nearest to the name of `target`.
fn near_entries(target: &Path) -> Vec<String> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    let entries = fs::read_dir(folder.unwrap_or(Path::new("."))).into_iter().flatten().flatten();
    let is_candidate = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        entry.path().is_dir() || has_ending(Path::new(&name))
    };
    let names: Vec<String> =
        entries.filter(is_candidate).filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let sought = target.file_name().and_then(|name| name.to_str());
    let found = sought.and_then(|sought| nearest(sought, names.iter().map(String::as_str)));
    found.map(|name| format!("`{}`", target.with_file_name(name).display())).into_iter().collect()
}
