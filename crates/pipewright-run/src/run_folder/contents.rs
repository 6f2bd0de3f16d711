//! The files that runs write into their folder, by name. All other files there belong to the user, and would be moved
//! together with a run that is moved aside.
//!
//! ```text
//! metrics.jsonl, fingerprints.jsonl, config.toml, pipewright-run.json, timeline.json, view.html, report.html, plan.csv, ...
//! checkpoints/    step-00000040/    manifest.json, rank-0000.safetensors
//! timelines/      step-00000040.json
//! model/          config.json, tokenizer.json, ...
//! ```

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use pipewright::bounded_file::open_regular;
use pipewright::checkpoint::{MANIFEST, is_rank_file};
use pipewright_models::hf::is_origin_file;
use serde_json::Value;

use crate::fault;
use crate::recovery::RECORDS;
use crate::run_folder::paths::{
    CHECKPOINTS, CONFIG, COPIES, FINGERPRINTS, METRICS, MODEL, OVERVIEW, PLAN, PROFILE, REFERENCE, REPORT,
    TIMELINE, TIMELINES, VIEW,
};

/// The most bytes of the first line of metrics that are read.
const LONGEST_LINE: u64 = 1 << 20;

/// The type of a path that a run writes. A link under such a name does not count as a file of the user, because the files
/// behind it are not moved with the folder.
enum Written {
    File,
    /// A folder, and the types of the paths in it.
    Folder(fn(&str) -> Option<Written>),
}

/// Returns the paths in a run's folder that no run has written, relative to the folder, in their order. A folder ends
/// with `/`, and its content is not read.
///
/// # Errors
/// When a folder cannot be read.
pub(super) fn foreign_paths(run: &Path) -> io::Result<Vec<String>> {
    let mut paths = Vec::new();
    add_foreign(run, "", of_run, &mut paths)?;
    let metrics = run.join(METRICS);
    if fs::symlink_metadata(&metrics).is_ok_and(|found| found.is_file()) && !are_metrics(&metrics) {
        paths.push(METRICS.to_owned());
    }
    paths.sort_unstable();
    Ok(paths)
}

/// Adds the paths in a folder that no run writes, or that have another type. `written` returns the type of a name.
fn add_foreign(
    folder: &Path,
    prefix: &str,
    written: fn(&str) -> Option<Written>,
    paths: &mut Vec<String>,
) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (name, found) = (entry.file_name().to_string_lossy().into_owned(), entry.file_type()?);
        match written(&name) {
            Some(Written::Folder(inside)) if found.is_dir() => {
                add_foreign(&entry.path(), &format!("{prefix}{name}/"), inside, paths)?;
            }
            Some(Written::File) if !found.is_dir() => {}
            Some(Written::Folder(_)) if found.is_symlink() => {}
            _ => paths.push(format!("{prefix}{name}{}", if found.is_dir() { "/" } else { "" })),
        }
    }
    Ok(())
}

/// Returns the type of a path in a run's folder, if a run writes it.
fn of_run(name: &str) -> Option<Written> {
    // A folder that was moved aside has a number.
    let unnumbered = name.rsplit_once('.').filter(|(_, number)| is_number(number));
    match unnumbered.map_or(name, |(name, _)| name) {
        CHECKPOINTS => return Some(Written::Folder(of_checkpoints)),
        TIMELINES => return Some(Written::Folder(of_timelines)),
        MODEL if name == MODEL => return Some(Written::Folder(of_model)),
        _ => {}
    }
    let plain = without_draft(name);
    let is_named = [CONFIG, METRICS, FINGERPRINTS, OVERVIEW, TIMELINE, VIEW, REPORT, COPIES, PLAN, REFERENCE]
        .contains(&plain)
        || RECORDS.contains(&plain)
        || fault::is_record(plain);
    let is_numbered = is_between(plain, "metrics.", ".jsonl", is_number)
        || is_between(plain, "fingerprints.", ".jsonl", is_number)
        || is_between(plain, "failed-step-", ".html", is_number)
        || is_between(plain, "plan-", ".csv", |sizes| sizes.split('x').all(is_number));
    let is_hash = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_unique = (plain.starts_with("events.out.tfevents.") && plain.contains(".pipewright."))
        || is_between(plain, PROFILE[0], PROFILE[1], is_hash)
        // Files that exist for a moment, and files that a network file system keeps while they are open.
        || [".pipewright-", ".nfs"].iter().any(|prefix| plain.starts_with(prefix))
        || is_between(plain, "offload-", ".tmp", |_| true);
    (is_named || is_numbered || is_unique).then_some(Written::File)
}

fn of_checkpoints(name: &str) -> Option<Written> {
    const PREFIXES: [&str; 4] = ["step-", ".saving-", ".removing-step-", ".removing-.saving-"];
    match name {
        "lock" | "best" | ".linking-best" => Some(Written::File),
        _ if PREFIXES.iter().any(|prefix| is_between(name, prefix, "", is_number)) => {
            Some(Written::Folder(of_checkpoint))
        }
        _ => None,
    }
}

fn of_checkpoint(name: &str) -> Option<Written> {
    let plain = without_draft(name);
    (is_rank_file(plain) || plain == MANIFEST).then_some(Written::File)
}

fn of_timelines(name: &str) -> Option<Written> {
    is_between(without_draft(name), "step-", ".json", is_number).then_some(Written::File)
}

fn of_model(name: &str) -> Option<Written> {
    is_origin_file(name).then_some(Written::File)
}

/// Returns the name that a file gets when it is complete.
fn without_draft(name: &str) -> &str {
    let hidden = name.strip_prefix('.').filter(|name| [CONFIG, COPIES].contains(name));
    let marked = || [".draft", ".part"].iter().find_map(|ending| name.strip_suffix(ending));
    hidden.or_else(marked).unwrap_or(name)
}

/// Returns whether a name has a beginning and an ending, and `is_right` accepts the part between them.
fn is_between(name: &str, beginning: &str, ending: &str, is_right: impl Fn(&str) -> bool) -> bool {
    name.strip_prefix(beginning).and_then(|rest| rest.strip_suffix(ending)).is_some_and(is_right)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether a file has the metrics of a run. Another program may have a file of the same name. The first line may
/// not be complete.
fn are_metrics(file: &Path) -> bool {
    let mut first = String::new();
    let read =
        open_regular(file).and_then(|file| BufReader::new(file.take(LONGEST_LINE)).read_line(&mut first));
    let is_cut = !first.ends_with('\n') && (first.len() as u64) < LONGEST_LINE;
    let is_line = |line: &Value| line.get("step").or(line.get("event")).is_some();
    read.is_ok() && (is_cut || serde_json::from_str(&first).is_ok_and(|line| is_line(&line)))
}
