//! [`Fault`]: a failure after which a run may continue from its newest checkpoint.

use std::error::Error;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text, write_fresh};
use pipewright::failure::{Cause, StepError};
use pipewright::ids::WorldRank;
use pipewright_schedule::error_text::with_causes as sentence;
use serde::{Deserialize, Serialize};

/// The file of the first fault.
const FILE: &str = "failure.json";

/// The file of the same fault as another process than the leader sees it.
const SECOND_FILE: &str = "failure-others.json";

/// Returns whether a file in the folder of a run has the name of a record of a fault, or of its draft.
pub fn is_record(name: &str) -> bool {
    let rank = name.strip_prefix(".failure-").and_then(|name| name.strip_suffix(".json"));
    [FILE, SECOND_FILE].contains(&name) || rank.is_some_and(|rank| rank.parse::<u32>().is_ok())
}

/// The variable that `launch` sets for its processes. Its value is the text of a [`Start`].
pub const LAUNCHED: &str = "PIPEWRIGHT_LAUNCHED";

/// The parts of the text of a start after which `launch` may leave out hosts, and whose hosts share no folder, and the part
/// before its mark.
const LEAVES_OUT: &str = ",hosts";
const SENDS_FILES: &str = ",files";
const MARK: &str = ",mark=";

/// A start of the processes of a run by `launch`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// How often `launch` had started processes before: restarts and growths together.
    pub number: u64,
    /// Whether a restart may leave out a host: the run has several hosts, and a restart is left.
    pub leaves_out_hosts: bool,
    /// Whether the hosts share no folder, so that the first process sends its files to the others.
    pub sends_files: bool,
    /// The file of the launch next to the folder of the run, which no other launch has. `None` for a process
    /// that answers a question of `launch`.
    pub mark: Option<PathBuf>,
}

impl Start {
    /// Returns the start of this process; `None` if `launch` did not start it.
    pub fn of_this_process() -> Option<Self> {
        Self::read(&std::env::var(LAUNCHED).ok()?)
    }

    /// Reads the text of a start.
    pub fn read(text: &str) -> Option<Self> {
        let (text, mark) = match text.split_once(MARK) {
            Some((text, mark)) => (text, Some(PathBuf::from(mark))),
            None => (text, None),
        };
        let flag = |text: &'_ str, flag: &str| match text.strip_suffix(flag) {
            Some(rest) => (rest.len(), true),
            None => (text.len(), false),
        };
        let (length, sends_files) = flag(text, SENDS_FILES);
        let text = &text[..length];
        let (length, leaves_out_hosts) = flag(text, LEAVES_OUT);
        Some(Self { number: text[..length].parse().ok()?, leaves_out_hosts, sends_files, mark })
    }

    /// Returns whether the same launch has made this start before the start `other`.
    pub fn is_before(&self, other: &Self) -> bool {
        self.mark.is_some() && self.mark == other.mark && self.number < other.number
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, leaves_out_hosts, sends_files, mark } = self;
        let flag = |is_set: bool, flag: &'static str| if is_set { flag } else { "" };
        write!(f, "{number}{}{}", flag(*leaves_out_hosts, LEAVES_OUT), flag(*sends_files, SENDS_FILES))?;
        mark.iter().try_for_each(|mark| write!(f, "{MARK}{}", mark.display()))
    }
}

/// Returns how often `launch` had started processes before it started this one; `None` if it did not start
/// it.
pub fn launched_start() -> Option<u64> {
    Start::of_this_process().map(|start| start.number)
}

/// A fault in the folder of a run, with its report.
#[derive(Serialize, Deserialize)]
struct Left {
    #[serde(flatten)]
    fault: Fault,
    report: String,
}

/// Where a run failed, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The step that failed, from 1.
    pub step: u64,
    /// The rank that failed first, if it was a rank.
    pub rank: Option<u32>,
    /// The cause in one line, without the place. Faults with the same step and the same cause are the same.
    pub cause: String,
    /// The place and the cause in one line.
    pub summary: String,
    /// The bytes that the disk must have before the run continues, if the disk was full.
    pub space: Option<u64>,
    /// Whether the run must not be restarted. A restarted run that verifies steps would not know the usual
    /// norm, and would accept wrong bits.
    #[serde(default)]
    pub is_final: bool,
    /// The ranks that have computed wrong bits, if the run continues without their hosts.
    #[serde(default)]
    pub wrong_ranks: Vec<u32>,
    /// Whether the cause may lie outside the run: a process was killed or stopped, or a host is gone. Such a
    /// fault in the same step says nothing about that step.
    #[serde(default)]
    pub is_external: bool,
}

impl Fault {
    /// Returns the fault of a failed step.
    pub fn of_step(error: &StepError) -> Self {
        Self {
            step: error.step.get(),
            rank: Some(error.rank.get()),
            cause: first_line(&sentence(error.cause.without_origin())),
            summary: first_line(&sentence(error)),
            is_final: matches!(error.cause, Cause::Unconfirmed { .. }),
            is_external: matches!(
                error.cause,
                Cause::LostPeer { .. } | Cause::SilentPeer { .. } | Cause::Transport { .. }
            ),
            ..Self::default()
        }
    }

    /// Returns the fault of a full disk after step `done`; `None` if the error has another cause. The run
    /// needs `space` bytes to continue.
    pub fn of_full_disk(
        error: &(dyn Error + 'static),
        done: u64,
        space: impl FnOnce() -> u64,
    ) -> Option<Self> {
        is_full(error).then(|| Self {
            step: done,
            rank: None,
            cause: "the disk is full".to_owned(),
            summary: format!("step {done}: {}", first_line(&sentence(error))),
            space: Some(space()),
            ..Self::default()
        })
    }

    /// Writes the fault and its report into the folder of the run, unless another process has written an
    /// earlier one. Returns whether there is a fault now.
    pub fn leave(&self, run: &Path, report: &str) -> bool {
        let path = run.join(FILE);
        let left = Left { fault: self.clone(), report: report.to_owned() };
        let text = serde_json::to_vec(&left).unwrap_or_default();
        match File::create_new(&path).and_then(|mut file| file.write_all(&text)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // Best effort: the disk may be full, and the file may not exist.
                let _ = fs::remove_file(&path);
                false
            }
            _ => true,
        }
    }

    /// Writes the fault and its report as the process of a rank sees them that is not the leader. They count
    /// if the launcher ends the leader before it has written its own. So that each reader finds a whole
    /// record, the process writes a draft first.
    pub fn leave_second(&self, run: &Path, report: &str, rank: WorldRank) {
        let path = run.join(SECOND_FILE);
        if path.exists() {
            return;
        }
        let draft = run.join(format!(".failure-{rank}.json"));
        let left = Left { fault: self.clone(), report: report.to_owned() };
        let text = serde_json::to_vec(&left).unwrap_or_default();
        if write_fresh(&draft, &text).and_then(|()| fs::rename(&draft, &path)).is_err() {
            // Best effort: the disk may be full, and the file may not exist.
            let _ = fs::remove_file(&draft);
        }
    }

    /// Returns whether a process has left a fault in the folder of a run.
    pub fn is_left(run: &Path) -> bool {
        [FILE, SECOND_FILE].into_iter().any(|file| run.join(file).exists())
    }

    /// Removes what an earlier attempt has left of a fault in the folder of a run.
    ///
    /// # Errors
    /// Fails if a file exists and cannot be removed.
    pub fn remove(run: &Path) -> io::Result<()> {
        let is_missing = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        };
        [FILE, SECOND_FILE].into_iter().try_for_each(|file| match fs::remove_file(run.join(file)) {
            Err(error) if !is_missing(&error) => Err(error),
            _ => Ok(()),
        })
    }

    /// Removes the fault from the folder of a run, and returns it with its report.
    pub fn take(run: &Path) -> Option<(Self, String)> {
        Self::take_file(&run.join(FILE))
    }

    /// Like [`Fault::take`], as another process than the leader has seen the fault.
    pub fn take_second(run: &Path) -> Option<(Self, String)> {
        Self::take_file(&run.join(SECOND_FILE))
    }

    fn take_file(path: &Path) -> Option<(Self, String)> {
        let text = read_regular_text(path, SMALL_TEXT).ok()?;
        // Best effort: `remove` refuses the next attempt if the file stays.
        let _ = fs::remove_file(path);
        serde_json::from_str::<Left>(&text).ok().map(|left| (left.fault, left.report))
    }

    /// Returns whether this is the same fault again, although another rank may have noticed it first.
    pub fn repeats(&self, earlier: &Self) -> bool {
        let may_repeat = !self.is_external && !earlier.is_external;
        may_repeat && self.step == earlier.step && self.cause == earlier.cause
    }
}

/// Returns whether an error or one of its causes is a disk or a quota that is full.
pub fn is_full(error: &(dyn Error + 'static)) -> bool {
    let is_full = |error: &(dyn Error + 'static)| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        })
    };
    std::iter::successors(Some(error), |&error| error.source()).any(is_full)
}

/// Returns the first line. Reports of what each rank did follow it.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use pipewright::checkpoint::CheckpointError;
    use pipewright::ids::{StepNumber, WorldRank};

    use super::*;

    fn missed(rank: u32, step: u64) -> Fault {
        let cause = Cause::Deadline { waited: Duration::from_secs(3), report: format!("rank {rank} waits") };
        let (rank, step) = (WorldRank::new(rank), StepNumber::new(step));
        Fault::of_step(&StepError { rank, step, action: None, cause })
    }

    #[test]
    fn a_deadline_that_another_rank_misses_in_the_same_step_is_the_same_fault() {
        assert_eq!(missed(1, 7).summary, "step 7: rank 1: no rank has moved for 3.0 s");
        assert!(missed(1, 7).repeats(&missed(0, 7)));
        assert!(!missed(1, 7).repeats(&missed(1, 8)));
    }

    #[test]
    fn only_a_fault_that_the_run_itself_reports_can_repeat() {
        let check = |cause: Cause, expected: bool| {
            let error = StepError { rank: WorldRank::new(1), step: 7.into(), action: None, cause };
            let fault = Fault::of_step(&error);
            assert_eq!(fault.repeats(&fault), expected, "{fault:?}");
        };
        let peer = WorldRank::new(0);
        check(Cause::Abandoned { message: "NaN".to_owned() }, true);
        check(Cause::LostPeer { peer }, false);
        check(Cause::SilentPeer { peer, waited: Duration::from_secs(3), report: String::new() }, false);
    }

    #[test]
    fn the_first_fault_in_a_folder_is_kept_until_it_is_taken() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let run = folder.path();
        for step in [7, 8] {
            assert!(missed(1, step).leave(run, "a report"));
        }
        let left = Some((missed(1, 7), "a report".to_owned()));
        assert_eq!([Fault::take(run), Fault::take(run)], [left, None]);
        assert!(!missed(1, 7).leave(&run.join("missing"), ""));
        assert!(missed(1, 7).leave(run, "a report"));
        for folder in [run, run, &run.join("missing")] {
            Fault::remove(folder).expect("a file that is missing is not removed");
        }
        assert_eq!(Fault::take(run), None);
    }

    #[test]
    fn the_first_fault_that_other_processes_see_is_kept_until_it_is_taken() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let run = folder.path();
        let leave = || [7, 8].map(|step| missed(1, step).leave_second(run, "a report", WorldRank::new(1)));
        leave();
        let left = Some((missed(1, 7), "a report".to_owned()));
        assert_eq!([Fault::take(run), Fault::take_second(run), Fault::take_second(run)], [None, left, None]);
        leave();
        Fault::remove(run).expect("the file is ours");
        assert_eq!(fs::read_dir(run).expect("a folder").count(), 0, "no file stays");
        // A record that stays would be read after the next attempt.
        fs::create_dir(run.join(SECOND_FILE)).expect("a new folder");
        Fault::remove(run).expect_err("it is not a file");
    }

    #[test]
    fn a_start_is_read_from_its_text() {
        for (text, number, [leaves_out_hosts, sends_files], mark) in [
            ("0", 0, [false, false], None),
            ("2", 2, [false, false], None),
            ("3,hosts", 3, [true, false], None),
            ("3,files", 3, [false, true], None),
            ("3,hosts,files,mark=/a", 3, [true, true], Some("/a")),
            ("3,hosts,mark=/a,hosts", 3, [true, false], Some("/a,hosts")),
            ("2,mark=/b", 2, [false, false], Some("/b")),
        ] {
            let start = Start { number, leaves_out_hosts, sends_files, mark: mark.map(PathBuf::from) };
            assert_eq!((start.to_string(), Start::read(text)), (text.to_owned(), Some(start)));
        }
        assert_eq!(["", "hosts", "2,host", ",mark=/a"].map(Start::read), [const { None }; 4]);
    }

    #[test]
    fn a_start_is_before_the_later_starts_of_its_launch() {
        let start = |text| Start::read(text).expect("a start");
        let check = |one, other, expected| assert_eq!(start(one).is_before(&start(other)), expected);
        check("1,mark=/a", "2,mark=/a", true);
        check("2,mark=/a", "2,mark=/a", false);
        check("1,mark=/a", "2,mark=/b", false);
        // Processes that answer a question are not processes of the run.
        check("1", "2", false);
    }

    #[test]
    fn only_a_full_disk_is_a_fault_of_the_disk() {
        let error = |kind: io::ErrorKind| {
            let path = PathBuf::from("out");
            CheckpointError::Io { action: "write", path, source: kind.into() }
        };
        let fault = Fault::of_full_disk(&error(io::ErrorKind::StorageFull), 4, || 9).expect("it is full");
        assert!(
            fault.space == Some(9) && fault.step == 4 && fault.summary.starts_with("step 4: out: "),
            "{fault:?}"
        );
        assert_eq!(Fault::of_full_disk(&error(io::ErrorKind::PermissionDenied), 4, || 9), None);
    }
}
