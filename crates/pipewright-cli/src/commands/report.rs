//! `pipewright report`: one page, or a table of figures, about one or more runs.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use pipewright_document::text::quoted;
use pipewright_planning::argument_values::parse_time;
use pipewright_planning::failure::Failure;
use pipewright_planning::output::{PageOutput, replace_file};
use pipewright_run::run_folder::{REPORT, VIEW};
use pipewright_run::run_record::{config_text, events, metrics, read_timeline, require_run, timeline_files};
use pipewright_run::run_report::{self, RunLinks, RunSource, page};

/// The file of a page about several runs, if no other one is named.
const PAGE_OF_SEVERAL: &str = "pipewright-report.html";

/// The arguments of `pipewright report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// The folders of the runs
    #[arg(value_name = "RUN_DIR", required = true)]
    runs: Vec<PathBuf>,
    /// The format of the output: the page, or the figures of each run with the settings that differ
    #[arg(long, value_enum, default_value_t = Format::Html)]
    format: Format,
    /// Write the page again whenever the runs have new steps, until they have all their steps; the page loads
    /// itself again at this interval
    #[arg(long, value_name = "TIME", value_parser = parse_interval, num_args = 0..=1, require_equals = true,
        default_missing_value = "5s")]
    follow: Option<Duration>,
    #[command(flatten)]
    output: PageOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Html,
    Json,
    Csv,
}

/// Runs the command.
pub(crate) fn run(arguments: &ReportArguments) -> Result<(), Failure> {
    let figures: fn(&[RunSource]) -> String = match arguments.format {
        Format::Html => return write_page(arguments),
        Format::Json => |runs| format!("{:#}\n", run_report::json(runs)),
        Format::Csv => run_report::csv,
    };
    if arguments.follow.is_some() || arguments.output.is_opened() {
        let flag = if arguments.follow.is_some() { "--follow" } else { "--open" };
        return Err(Failure::input(format!("{flag} needs a page; leave out --format")));
    }
    let runs = arguments.runs.iter().map(|run| source(run, Path::new(""))).collect::<Result<Vec<_>, _>>()?;
    arguments.output.write_to(arguments.output.file(None, PathBuf::new)?.as_deref(), &figures(&runs))
}

fn write_page(arguments: &ReportArguments) -> Result<(), Failure> {
    let unnamed = || match arguments.runs.as_slice() {
        [run] => run.join(REPORT),
        _ => PAGE_OF_SEVERAL.into(),
    };
    let flag = arguments.follow.map(|_| "--follow");
    let file = arguments.output.file(flag, unnamed)?;
    let place = file.as_deref().and_then(Path::parent).map(Path::to_owned).unwrap_or_default();
    let read = || arguments.runs.iter().map(|run| source(run, &place)).collect::<Result<Vec<_>, _>>();
    let runs = read()?;
    let interval = arguments.follow.filter(|_| !runs.iter().all(RunSource::is_complete));
    let text = page(&runs, interval);
    arguments.output.write_to(file.as_deref(), &text)?;
    match interval.zip(file) {
        Some((interval, file)) => follow(&file, text, interval, read),
        None => Ok(()),
    }
}

/// Writes the page again whenever it has changed, until the runs are complete.
fn follow(
    file: &Path,
    mut written: String,
    interval: Duration,
    read: impl Fn() -> Result<Vec<RunSource>, Failure>,
) -> Result<(), Failure> {
    loop {
        std::thread::sleep(interval);
        // A run that is being written may have a file that ends in the middle; the page stays until the next
        // look.
        let Ok(runs) = read() else { continue };
        let is_complete = runs.iter().all(RunSource::is_complete);
        let text = page(&runs, Some(interval).filter(|_| !is_complete));
        if text != written {
            replace_file(file, &text)?;
            written = text;
        }
        if is_complete {
            return Ok(());
        }
    }
}

/// Reads the time between two versions of the page.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_time(text)?;
    if interval < Duration::from_millis(100) {
        return Err("write at least 100ms".to_owned());
    }
    Ok(interval)
}

/// Reads a run. Links are relative to `place`, the folder of the page.
fn source(run: &Path, place: &Path) -> Result<RunSource, Failure> {
    require_run(run)?;
    let files = timeline_files(run)?;
    let timeline = files.last().map(|(_, path)| read_timeline(path)).transpose()?;
    let view = run.join(VIEW);
    let links = RunLinks {
        view: view.is_file().then(|| link(place, &view)),
        timelines: files.iter().map(|(step, path)| (*step, link(place, path))).collect(),
        command: format!(
            "pipewright view {} -o {}",
            quoted(&run.to_string_lossy()),
            quoted(&view.to_string_lossy())
        ),
    };
    Ok(RunSource {
        name: run.display().to_string(),
        steps: metrics(run)?,
        events: events(run)?,
        config: config_text(run)?,
        timeline,
        links,
    })
}

/// Returns the absolute path without `..`: a browser resolves a link in the same way, by its names alone.
fn absolute(path: &Path) -> std::io::Result<PathBuf> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let mut resolved = PathBuf::new();
    for part in std::path::absolute(path)?.components() {
        match part {
            Component::ParentDir => {
                resolved.pop();
            }
            part => resolved.push(part),
        }
    }
    Ok(resolved)
}

/// Returns the address of a file as seen from a folder.
fn link(place: &Path, file: &Path) -> String {
    let (Ok(place), Ok(file)) = (absolute(place), absolute(file)) else { return file.display().to_string() };
    let [place, file] = [&place, &file].map(|path| path.components().collect::<Vec<Component<'_>>>());
    let shared = place.iter().zip(&file).take_while(|(one, other)| one == other).count();
    let up = std::iter::repeat_n("..".to_owned(), place.len() - shared);
    let down = file[shared..].iter().map(|part| encoded(&part.as_os_str().to_string_lossy()));
    up.chain(down).collect::<Vec<String>>().join("/")
}

/// Encodes a part of a path for an address.
fn encoded(part: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    part.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_relative_to_the_page() {
        let check = |place: &str, file: &str, expected: &str| {
            assert_eq!(link(Path::new(place), Path::new(file)), expected);
        };
        check("/a/b", "/a/b/runs/x y/timeline.json", "runs/x%20y/timeline.json");
        check("/a/pages", "/a/runs/t.json", "../runs/t.json");
        check("", "runs/t.json", "runs/t.json");
        check("/a/b/..", "/a/runs/t.json", "runs/t.json");
        check("/a/b/../../c", "/a/b/../runs/t.json", "../a/runs/t.json");
    }
}
