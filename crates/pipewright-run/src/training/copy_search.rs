//! Finds the newest copy of a run's state in the memories of its hosts, and brings the files that a host lacks
//! there.
//!
//! All processes take the same steps, and the leader decides. Each host says which files it holds. If every
//! file of a copy is on some host, the copy is tried, the newest first: the processes of a host compare its
//! files with their hashes, each host gets the files that it lacks from a host that has them, makes a
//! checkpoint of them, and opens it. If one of these steps fails on a host, the next copy is tried.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CopyExchange, CopyFolder, CopyPart, GatheredCopy,
};
use pipewright::ids::WorldRank;
use pipewright_schedule::error_text::with_causes as sentence;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::observer::Observer;
use crate::recovery::StateSource;
use crate::run_folder::checkpoints_of;
use crate::training::checkpoint_path::RunPath;
use crate::training::copies_link::{Link, Origin, read_link};
use crate::training::copy_hosts::CopyHosts;
use crate::training::evaluations::lowest_step;
use crate::training::process_group::ProcessGroup;

/// The slowest reading of a copy that processes wait for, in bytes per second.
const SLOWEST_READING: u64 = 100_000_000;

/// The slowest sending of a copy that processes wait for, in bytes per second.
const SLOWEST_SENDING: u64 = 100_000_000;

/// A copy from which a run resumes, which this process has verified.
pub(crate) struct FoundCopy {
    pub(crate) copy: Checkpoint,
    /// The copies that the run continues.
    pub(crate) origin: Origin,
    /// Whose memory had its files.
    pub(crate) source: StateSource,
    /// The time that finding, sending and reading it took.
    pub(crate) took: Duration,
}

/// The search that the leader begins.
#[derive(Debug, Serialize, Deserialize)]
struct Search {
    link: Link,
    /// The steps of the checkpoints on the disk.
    saved: Vec<u64>,
    /// The number of steps of the run.
    steps: u64,
}

impl Search {
    fn of(run: &Path, steps: u64) -> Option<Self> {
        // The reading of the checkpoints reports the error again.
        let saved = CheckpointFolder::list(&checkpoints_of(run)).ok()?;
        let saved = saved.into_iter().map(|(step, _)| step).collect();
        Some(Self { link: read_link(run)?, saved, steps })
    }

    /// Returns the parts on this host of copies that are newer than the disk's checkpoints and belong to the
    /// run.
    fn parts(&self, observer: &dyn Observer) -> Vec<CopyPart> {
        let held = CopyFolder::find(&self.link.copies).and_then(|folder| folder.parts());
        if let Err(error @ CheckpointError::NotPrivate(_)) = &held {
            observer.note(&format!(
                "warning: the copies of the state in memory are not used: {}",
                sentence(error)
            ));
        }
        let mut parts = held.unwrap_or_default();
        let newest = self.saved.last().copied().unwrap_or(0);
        parts.retain(|part| {
            (newest + 1..self.steps).contains(&part.step()) && self.link.accepts(part.series(), part.step())
        });
        parts
    }

    /// Returns the copies that the hosts hold together, the newest first. The checkpoint of the lowest
    /// validation loss may not have been complete.
    fn complete(&self, hosts: &CopyHosts, held: &[(WorldRank, String)]) -> Vec<GatheredCopy> {
        let mut parts = vec![Vec::new(); hosts.count()];
        for (rank, text) in held {
            parts[hosts.host_of(*rank)].extend(from_json::<Vec<CopyPart>>(text).unwrap_or_default());
        }
        let has_best = |copy: &GatheredCopy| {
            lowest_step(&copy.manifest().description).is_none_or(|best| self.saved.contains(&best))
        };
        GatheredCopy::gather(&parts).into_iter().filter(has_best).collect()
    }
}

/// Returns the newest copy of a run that is newer than its checkpoints; `None` if there is none, or if the
/// path names a checkpoint. All processes call it, and the first one decides. `steps` is the number of steps
/// of the run.
///
/// # Errors
/// Fails if the processes do not reach each other.
pub(crate) fn newest(
    processes: &mut ProcessGroup,
    path: &RunPath,
    steps: Option<u64>,
) -> Result<Option<FoundCopy>, RunError> {
    let began = Instant::now();
    let decides = processes.is_leader() && path.checkpoint.is_none();
    let own = steps.filter(|_| decides).and_then(|steps| Search::of(&path.run, steps));
    let Some(search) = processes.share_value(&own)? else { return Ok(None) };
    let hosts = CopyHosts::find(processes, &search.link.copies)?;
    // JSON, because the descriptions of copies have values of any type.
    let own = if hosts.is_first() { json(&search.parts(&**processes.observer())) } else { String::new() };
    let complete = |held: &[(WorldRank, String)]| json(&search.complete(&hosts, held));
    let copies = processes.combine(&own, complete, Duration::ZERO)?;
    for copy in from_json::<Vec<GatheredCopy>>(&copies).unwrap_or_default() {
        let step = copy.step();
        match obtain(processes, &hosts, &search.link.copies, &copy)? {
            Ok((found, source)) => {
                let (took, series) = (began.elapsed(), copy.series().to_owned());
                return Ok(Some(FoundCopy { copy: found, origin: Origin { series, step }, source, took }));
            }
            Err(reason) => processes.note(&format!(
                "the copy of step {step} in memory cannot be used, so the run uses an earlier state: {reason}"
            )),
        }
    }
    Ok(None)
}

/// The state of the files of a process's host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Check {
    /// The files that are damaged, with the reasons.
    damaged: Vec<(usize, String)>,
    /// Why the host cannot have the copy.
    failed: Option<String>,
}

/// A file that one process sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Transfer {
    file: usize,
    from: WorldRank,
    to: WorldRank,
}

/// How all hosts get all files of a copy.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Plan {
    transfers: Vec<Transfer>,
    /// Whether the host that wrote a file does not have it any more, so that its neighbour's copy is used.
    uses_neighbour: bool,
}

impl Plan {
    /// Returns the most bytes that one process sends or receives.
    fn most_bytes(&self, copy: &GatheredCopy) -> u64 {
        let files = &copy.manifest().files;
        // The bytes that each process sends (`true`) and receives (`false`).
        let mut moved: HashMap<(WorldRank, bool), u64> = HashMap::new();
        for transfer in &self.transfers {
            for end in [(transfer.from, true), (transfer.to, false)] {
                let sum = moved.entry(end).or_default();
                *sum = sum.saturating_add(files[transfer.file].bytes);
            }
        }
        moved.into_values().max().unwrap_or(0)
    }
}

/// Verifies a copy and brings all of it to each host. The inner error is the reason why the copy cannot be
/// used, which is the same in all processes.
///
/// # Errors
/// Fails if the processes do not reach each other.
fn obtain(
    processes: &mut ProcessGroup,
    hosts: &CopyHosts,
    copies: &Path,
    copy: &GatheredCopy,
) -> Result<Result<(Checkpoint, StateSource), String>, RunError> {
    let work = Duration::from_secs(copy.bytes() / SLOWEST_READING);
    let folder = CopyFolder::create(copies);
    let check = check(hosts, &folder, copy);
    let planned = processes.combine(&check, |checks| plan(copy, hosts, checks), work)?;
    let (plan, folder) = match (planned, folder) {
        (Ok(plan), Ok(folder)) => (plan, folder),
        (Err(reason), _) => return Ok(Err(reason)),
        // The plan fails if a process has no folder.
        (Ok(_), Err(error)) => return Ok(Err(sentence(&error))),
    };
    let exchange = exchange(processes, &folder, &plan);
    let sending = Duration::from_secs(plan.most_bytes(copy) / SLOWEST_SENDING);
    let exchange = match all_of(processes, exchange, Duration::ZERO)? {
        // A sender that is too slow fails before the other processes stop waiting for it, so that all
        // processes try the next state.
        Ok(exchange) => {
            let end = Instant::now() + processes.deadline() + sending;
            exchange.map(|exchange| exchange.until(end))
        }
        Err(reason) => return Ok(Err(reason)),
    };
    let own = processes.rank();
    let sent = exchange.as_ref().map_or(Ok(()), |exchange| send(exchange, own, copy, &plan.transfers));
    let sent = all_of(processes, sent, sending)?;
    // All processes have what was sent to them.
    drop(exchange);
    if let Err(reason) = sent {
        return Ok(Err(reason));
    }
    // The other processes of a host wait until the first one has done it.
    let assembled = if hosts.is_first() { folder.assemble(copy) } else { Ok(()) };
    if let Err(reason) = all_of(processes, assembled, Duration::ZERO)? {
        return Ok(Err(reason));
    }
    let opened = Checkpoint::open(&folder.committed(copy.step()));
    let source = if plan.uses_neighbour { StateSource::Neighbour } else { StateSource::Memory };
    Ok(all_of(processes, opened, work)?.map(|opened| (opened, source)))
}

/// Returns the result of work that every process has done by itself, for as long as `work`. If it failed in
/// one of them, the inner error is the reason of the first one, which is the same in all processes.
fn all_of<T>(
    processes: &mut ProcessGroup,
    done: Result<T, CheckpointError>,
    work: Duration,
) -> Result<Result<T, String>, RunError> {
    let own = done.as_ref().err().map(|error| sentence(error));
    let first =
        |reasons: &[(WorldRank, Option<String>)]| reasons.iter().find_map(|(_, reason)| reason.clone());
    Ok(match processes.combine(&own, first, work)? {
        Some(reason) => Err(reason),
        None => done.map_err(|error| sentence(&error)),
    })
}

/// Compares this process's share of its host's files with their hashes.
fn check(hosts: &CopyHosts, folder: &Result<CopyFolder, CheckpointError>, copy: &GatheredCopy) -> Check {
    let failed = |error: &CheckpointError| Check { failed: Some(sentence(error)), ..Check::default() };
    let folder = match folder {
        Ok(folder) => folder,
        Err(error) => return failed(error),
    };
    let own = hosts.own();
    if hosts.is_first()
        && let Err(error) = folder.make_room(copy)
    {
        return failed(&error);
    }
    let mut check = Check::default();
    for (index, (file, holders)) in copy.files().enumerate() {
        let is_here = holders.iter().any(|holder| holder.machine == own);
        if is_here
            && hosts.process_on(own, index) == hosts.rank()
            && let Err(error) = folder.check_file(copy.step(), file)
        {
            check.damaged.push((index, sentence(&error)));
        }
    }
    check
}

/// Plans how each host gets the files that it lacks: from the host that wrote a file, if it has the file, and
/// otherwise from another one.
fn plan(copy: &GatheredCopy, hosts: &CopyHosts, checks: &[(WorldRank, Check)]) -> Result<Plan, String> {
    if let Some(reason) = checks.iter().find_map(|(_, check)| check.failed.clone()) {
        return Err(reason);
    }
    let damaged: BTreeSet<(usize, usize)> = checks
        .iter()
        .flat_map(|(rank, check)| check.damaged.iter().map(|(file, _)| (hosts.host_of(*rank), *file)))
        .collect();
    let (mut transfers, mut uses_neighbour) = (Vec::new(), false);
    for (file, (_, holders)) in copy.files().enumerate() {
        let whole: Vec<_> =
            holders.iter().filter(|holder| !damaged.contains(&(holder.machine, file))).collect();
        let Some(source) = whole.iter().find(|holder| holder.is_own).or(whole.first()) else {
            let mut reasons = checks.iter().flat_map(|(_, check)| &check.damaged);
            let reason = reasons.find(|(found, _)| *found == file).map(|(_, reason)| reason.clone());
            return Err(reason.unwrap_or_else(|| "a file of it is missing".to_owned()));
        };
        uses_neighbour |= !source.is_own;
        let lacking = (0..hosts.count()).filter(|host| whole.iter().all(|holder| holder.machine != *host));
        transfers.extend(lacking.map(|host| Transfer {
            file,
            from: hosts.process_on(source.machine, file),
            to: hosts.process_on(host, file),
        }));
    }
    Ok(Plan { transfers, uses_neighbour })
}

/// Starts to receive files from other hosts, if a host lacks some.
fn exchange(
    processes: &ProcessGroup,
    folder: &CopyFolder,
    plan: &Plan,
) -> Result<Option<CopyExchange>, CheckpointError> {
    let channel = processes.byte_channel().filter(|_| !plan.transfers.is_empty());
    let start = |channel| CopyExchange::start(channel, folder.clone(), processes.deadline());
    channel.map(start).transpose()
}

/// Sends what this process has to send.
fn send(
    exchange: &CopyExchange,
    own: WorldRank,
    copy: &GatheredCopy,
    transfers: &[Transfer],
) -> Result<(), CheckpointError> {
    let files = &copy.manifest().files;
    transfers.iter().filter(|transfer| transfer.from == own).try_for_each(|transfer| {
        let name = &files[transfer.file].name;
        exchange.send_file(transfer.to, copy.step(), name, &AtomicU64::new(0))
    })
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data has a JSON text")
}

fn from_json<T: for<'de> Deserialize<'de>>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a copy of two files, written by the hosts 0 and 1, with the hosts that hold each file.
    fn copy(holders: [&[usize]; 2]) -> GatheredCopy {
        let mut machines: Vec<Vec<CopyPart>> = vec![Vec::new(); 3];
        for (file, holders) in holders.into_iter().enumerate() {
            for host in holders {
                machines[*host].push(part(file, *host == file));
            }
        }
        GatheredCopy::gather(&machines).pop().expect("both files are held")
    }

    fn part(file: usize, is_own: bool) -> CopyPart {
        let name = format!("rank-{file:04}.safetensors");
        let part = serde_json::json!({
            "series": "s", "files": 2, "is_own": is_own,
            "manifest": {
                "format": 1, "step": 7, "cursor": {"epoch": 0, "index": 0}, "description": {},
                "shards": [{"name": name, "bytes": 1, "hash": "a"}],
            },
        });
        serde_json::from_value(part).expect("a part")
    }

    /// Plans for hosts with two processes each. A damaged file is `(rank, file)`.
    fn planned(holders: [&[usize]; 2], damaged: &[(u32, usize)]) -> Result<Plan, String> {
        let check = |(rank, file): &(u32, usize)| {
            let damaged = vec![(*file, "it is damaged".to_owned())];
            (WorldRank::new(*rank), Check { damaged, failed: None })
        };
        let checks: Vec<(WorldRank, Check)> = damaged.iter().map(check).collect();
        plan(&copy(holders), &CopyHosts::of(&[0, 0, 1, 1, 2, 2], 0), &checks)
    }

    /// Checks a plan. A transfer is `(file, from, to)`.
    fn check(
        holders: [&[usize]; 2],
        damaged: &[(u32, usize)],
        transfers: &[(usize, u32, u32)],
        uses_neighbour: bool,
    ) {
        let plan = planned(holders, damaged).expect("a plan");
        let found = plan.transfers.iter();
        let found: Vec<_> =
            found.map(|transfer| (transfer.file, transfer.from.get(), transfer.to.get())).collect();
        assert_eq!(found, transfers, "{holders:?} {damaged:?}");
        assert_eq!(plan.uses_neighbour, uses_neighbour, "{holders:?} {damaged:?}");
    }

    #[test]
    fn each_host_gets_what_it_lacks_from_the_host_that_wrote_it() {
        check([&[0], &[1]], &[], &[(0, 0, 2), (0, 0, 4), (1, 3, 1), (1, 3, 5)], false);
        check([&[0, 1], &[1, 0]], &[], &[(0, 0, 4), (1, 3, 5)], false);
    }

    #[test]
    fn the_time_of_a_transfer_follows_from_the_busiest_process() {
        let holders: [&[usize]; 2] = [&[0], &[1]];
        // Each file has one byte, and its host sends it to two others.
        assert_eq!(planned(holders, &[]).expect("a plan").most_bytes(&copy(holders)), 2);
    }

    #[test]
    fn the_neighbour_has_the_files_of_a_host_that_is_lost() {
        check([&[0], &[0]], &[], &[(0, 0, 2), (0, 0, 4), (1, 1, 3), (1, 1, 5)], true);
        check([&[1], &[1]], &[], &[(0, 2, 0), (0, 2, 4), (1, 3, 1), (1, 3, 5)], true);
    }

    #[test]
    fn a_damaged_file_is_replaced_by_another_host_or_the_copy_is_not_used() {
        check([&[0, 1], &[1, 0]], &[(1, 0)], &[(0, 2, 0), (0, 2, 4), (1, 3, 5)], true);
        for (holders, damaged) in [([&[0, 1][..], &[1, 0]], &[(1, 0), (2, 0)][..]), ([&[0], &[1]], &[(0, 0)])]
        {
            assert_eq!(planned(holders, damaged), Err("it is damaged".to_owned()), "{holders:?}");
        }
    }

    #[test]
    fn a_host_without_a_folder_for_copies_prevents_their_use() {
        let failed = Check { failed: Some("no folder".to_owned()), ..Check::default() };
        let found = plan(&copy([&[0], &[1]]), &CopyHosts::of(&[0, 1], 0), &[(WorldRank::new(1), failed)]);
        assert_eq!(found, Err("no folder".to_owned()));
    }
}
