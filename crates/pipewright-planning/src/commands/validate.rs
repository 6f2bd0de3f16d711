//! `pipewright validate`: proves that a schedule from a file is sound, or lists all its violations.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pipewright_schedule::csv::{CsvError, parse_program, parse_rows};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::validate::check_pytorch_loader;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Level, Program, Slices, ValidatedProgram, Violations, picture, validate};
use pipewright_system::schedule_file::{locate, read, slice_hint};
use pipewright_system::schedule_memory::check_text;
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::output;
use crate::schedules::drawing::check_size;
use crate::schedules::size::slices;
use crate::schedules::transport::TransportArguments;
use crate::schedules::verdicts::Verdicts;

/// The arguments of `pipewright validate`.
#[derive(Debug, Args)]
pub struct ValidateArguments {
    /// The schedule: one row per rank; or - for standard input
    #[arg(value_name = "FILE.csv")]
    file: PathBuf,
    /// The level of the file: compute, comms or full; by default, full if it sends or receives and every
    /// stage gathers its parameters and reduces its gradients, comms if it only sends or receives, else
    /// compute
    #[arg(long)]
    level: Option<Level>,
    /// The number of slices of each microbatch, if the actions number slices; by default, microbatches are
    /// whole
    #[arg(long, value_name = "K", value_parser = slices, default_value = "1")]
    slices: Slices,
    /// Also check that a loader of another system takes the file
    #[arg(long, value_enum)]
    loader: Option<Loader>,
    #[command(flatten)]
    transport: TransportArguments,
    /// How to print violations and verdicts
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Loader {
    /// `_load_csv` of PyTorch 2.15
    Pytorch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One line for each violation
    Text,
    /// A table of the schedule with an exclamation mark at each violation, then the same lines
    Grid,
    /// An object: the violations, or with `--transport` the verdict of each transport
    Json,
}

/// Runs the command.
pub(crate) fn run(arguments: &ValidateArguments) -> Result<(), Failure> {
    let file = &arguments.file;
    let text = read(file).map_err(Failure::input)?;
    check_text(&text, Use::Lower)?;
    let program = match parse_program(&text) {
        Ok(program) => program,
        Err(error @ CsvError { at: Some(_), .. }) => return Err(Failure::input(locate(file, &error))),
        // The cells are valid actions, but together they are not a program, so the schedule is unsound.
        Err(error @ CsvError { at: None, .. }) => {
            if arguments.format == Format::Json {
                let violations = [json!({ "text": error.to_string() })];
                show_json(&json!({ "sound": false, "violations": violations, "omitted": 0 }))?;
            } else {
                output::show(&format!("{error}\n"))?;
            }
            return Err(unsound(file, 1));
        }
    };
    if arguments.transport.is_given() && arguments.loader.is_some() {
        return Err(Failure::input(
            "--loader and --transport have verdicts of their own; leave one of them out",
        ));
    }
    let uneven = |error| Failure::input(format!("{}: {error}", file.display()));
    let program = program.with_slices(arguments.slices).map_err(uneven)?;
    let level = arguments.level.unwrap_or_else(|| program.level());
    if arguments.transport.is_given() && arguments.format == Format::Grid {
        return Err(Failure::input(
            "--format grid marks violations, and --transport prints verdicts; leave one of them out",
        ));
    }
    if arguments.transport.is_given() && level == Level::Compute && program.communicates() {
        return Err(Failure::input(
            "--level compute leaves out the messages, which --transport judges; leave --level out",
        ));
    }
    if arguments.transport.is_given() && level == Level::Compute {
        let name = file.display();
        let advice = format!("run `pipewright lower {name} --pass send-recv` first");
        return Err(Failure::input(format!(
            "{name}: the schedule has no messages, which a transport could order; {advice}"
        )));
    }
    if !arguments.transport.is_given() {
        return prove(arguments, program, level, &text);
    }
    match Verdicts::of(&program, level, &arguments.transport.communicators()) {
        Ok(verdicts) => show_verdicts(arguments, &verdicts),
        Err(violations) => refuse(arguments, &violations),
    }
}

/// Proves `program` sound for messages whose both ends block, and checks that the loader takes its `text`.
fn prove(arguments: &ValidateArguments, program: Program, level: Level, text: &str) -> Result<(), Failure> {
    let program = match validate(program, level) {
        Ok(program) => program,
        Err(violations) => return refuse(arguments, &violations),
    };
    let loaded = match arguments.loader {
        None => None,
        Some(Loader::Pytorch) => {
            let rows = parse_rows(text).map_err(|error| Failure::input(locate(&arguments.file, &error)))?;
            Some(check_pytorch_loader(program.as_program(), &rows))
        }
    };
    if arguments.format == Format::Json {
        let mut json = sound_json(&program);
        if let Some(loaded) = &loaded {
            json["loader"] = match loaded {
                Ok(format) => json!({ "format": format.name() }),
                Err(refused) => json!({ "format": null, "refused": listed_json(refused) }),
            };
        }
        show_json(&json)?;
    }
    match loaded {
        Some(Err(refused)) => {
            if arguments.format != Format::Json {
                show_violations(arguments, &refused)?;
            }
            let (name, reasons) = (arguments.file.display(), counted(refused.listed().len(), "reason"));
            let sentence =
                format!("{name}: the schedule is sound, and PyTorch does not load it, for {reasons}");
            Err(Failure::new(Exit::CheckFailed, sentence))
        }
        _ if arguments.format == Format::Json => Ok(()),
        Some(Ok(format)) => {
            let words = format!("PyTorch 2.15 loads it with `_load_csv(file, \"{}\")`\n", format.name());
            output::show(&(summary(&arguments.file, &program) + &words))
        }
        None => output::show(&summary(&arguments.file, &program)),
    }
}

fn show_verdicts(arguments: &ValidateArguments, verdicts: &Verdicts) -> Result<(), Failure> {
    if arguments.format == Format::Json {
        show_json(&verdicts.json())?;
    } else {
        output::show(&verdicts.text())?;
    }
    if verdicts.are_sound() {
        return Ok(());
    }
    let (name, faults) = (arguments.file.display(), verdicts.faults());
    Err(Failure::new(
        Exit::CheckFailed,
        format!("{name}: the schedule is not sound on every transport: {faults}"),
    ))
}

fn refuse(arguments: &ValidateArguments, violations: &Violations) -> Result<(), Failure> {
    show_violations(arguments, violations)?;
    Err(unsound(&arguments.file, violations.listed().len() as u64 + violations.omitted()))
}

fn show_violations(arguments: &ValidateArguments, violations: &Violations) -> Result<(), Failure> {
    match arguments.format {
        Format::Text => output::show(&lines(violations)),
        Format::Grid => output::show(&(grid(violations)? + &lines(violations))),
        Format::Json => show_json(&violations_json(violations)),
    }
}

fn show_json(value: &Value) -> Result<(), Failure> {
    output::show(&format!("{value}\n"))
}

fn sound_json(program: &ValidatedProgram) -> Value {
    json!({
        "sound": true, "level": program.level().to_string(), "ranks": program.ranks(),
        "stages": program.placement().stages(), "slices": program.slices().get(),
        "microbatches": program.microbatches() / program.slices().get(), "violations": [],
    })
}

fn violations_json(violations: &Violations) -> Value {
    json!({ "sound": false, "violations": listed_json(violations), "omitted": violations.omitted() })
}

fn listed_json(violations: &Violations) -> Vec<Value> {
    let listed = violations.listed().iter().map(|violation| {
        json!({ "rank": violation.rank.get(), "position": violation.position, "text": violation.problem })
    });
    listed.collect()
}

fn unsound(file: &Path, violations: u64) -> Failure {
    let (name, violations) = (file.display(), counted(violations, "violation"));
    Failure::new(Exit::CheckFailed, format!("{name}: the schedule is unsound, {violations}"))
}

fn grid(violations: &Violations) -> Result<String, Failure> {
    let program = violations.program();
    check_size(program)?;
    let marked: Vec<_> = violations.listed().iter().map(|it| (it.rank, it.position)).collect();
    Ok(picture::grid(program.rows().iter().map(|row| row.iter().copied().map(Some)), &marked))
}

fn lines(violations: &Violations) -> String {
    let mut text = String::new();
    for violation in violations.listed() {
        writeln!(text, "{violation}").expect("a string takes all text");
    }
    if violations.omitted() > 0 {
        writeln!(text, "and {} more", violations.omitted()).expect("a string takes all text");
    }
    text
}

fn summary(file: &Path, program: &ValidatedProgram) -> String {
    let hint = slice_hint(program.as_program()).map_or_else(String::new, |hint| hint + "\n");
    format!(
        "{}: sound at level {}: {}, {}, {}\n{hint}",
        file.display(),
        program.level(),
        counted(program.ranks(), "rank"),
        counted(program.placement().stages(), "stage"),
        picture::microbatches_in_words(program.microbatches(), program.slices())
    )
}
