//! Asks each host whether it can take part, before processes start there: it must answer, have the same
//! build, and see the folder of the run.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, RunError};
use crate::fault::Start;
use crate::interrupt::Interrupt;
use crate::launch::binary_copies::build_of;
use crate::launch::hosts::Host;
use crate::launch::processes::end_before;
use crate::launch::short_command::{Printed, wait};
use crate::launch::starter::Starter;
use crate::training::shared_folder::{SHORT_LOOK, Token, is_seen, unwritable};

/// The longest time in which a host ends processes before it answers.
const LONGEST_END: Duration = Duration::from_secs(3);

/// The longest time that a host may take to answer.
pub(super) const LONGEST_PATIENCE: Duration = Duration::from_secs(20);

/// The time in which hosts are asked again while none answers, and the pause between two questions.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);
const SILENCE_PAUSE: Duration = Duration::from_secs(2);

/// The answers of some hosts: for each, whether it can take part.
pub(super) type Answers = Vec<Result<(), Refusal>>;

/// The answer of a host.
#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    /// The hash of the program.
    build: String,
    sees_folder: bool,
}

/// How the hosts of a launch belong together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HostKind {
    /// They share the folder of the run.
    #[default]
    Shared,
    /// They share no folder.
    Apart,
    /// They belong to an allocation of Slurm.
    Slurm,
}

/// Why a host cannot take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Silent,
    /// The command that asks has ended with this line, and without an answer.
    Ended(String),
    OtherBuild,
    OtherFolder,
}

impl Refusal {
    /// Returns words about a host.
    fn of(&self, host: &str, kind: HostKind, folder: &Path) -> String {
        let (is_slurm, sends_files) = (kind == HostKind::Slurm, kind == HostKind::Apart);
        match self {
            Self::Ended(line) if sends_files => format!(
                "the host {host} answers ssh, but no process starts there: {line}; `mpirun --host {host} -n 1 hostname` may show \
                 why"
            ),
            Self::Ended(_) => Self::Silent.of(host, kind, folder),
            Self::Silent if is_slurm => format!(
                "the node {host} does not answer: `srun --overlap --nodelist={host} -n 1 hostname` shows why"
            ),
            Self::Silent if sends_files => format!(
                "the host {host} answers ssh, but no process starts there in time: `mpirun --host {host} -n 1 hostname` shows why; \
                 if that hangs, a firewall between the two is in the way, or Open MPI uses another network: name it, as in \
                 `OMPI_MCA_oob_tcp_if_include=192.168.1.0/24`"
            ),
            Self::Silent => format!(
                "the host {host} does not answer: check its name, that it runs, and that `ssh {host}` needs no password"
            ),
            Self::OtherBuild => {
                format!(
                    "the host {host} has another build of this program: copy the same binary to all hosts"
                )
            }
            Self::OtherFolder => format!(
                "the host {host} does not see what this host writes into {}: let `run.out` be a folder of a file system \
                 that all hosts share",
                folder.display()
            ),
        }
    }
}

/// Returns the answer of this host to another one, a line of JSON. `token` is the path of a file that the asking host has
/// written. Ends the processes of earlier starts than `before` that are left on this host.
///
/// # Errors
/// Fails if this program cannot be read.
pub fn answer(token: &Path, before: Option<&str>) -> Result<String, RunError> {
    if let Some(before) = before.and_then(Start::read) {
        end_before(&before, LONGEST_END);
    }
    let answer = Answer { build: build().map_err(RunError::input)?, sees_folder: is_seen(token, SHORT_LOOK) };
    serde_json::to_string(&answer).map_err(|error| RunError::new(ErrorKind::Bug, error))
}

/// Returns the hash of this program, which says whether two hosts have the same build.
fn build() -> std::io::Result<String> {
    build_of(&std::env::current_exe()?)
}

/// A question to hosts, whether they can take part. All of them are asked at the same time.
#[derive(Clone)]
pub(super) struct Question {
    pub(super) starter: Starter,
    pub(super) hosts: Vec<Host>,
    /// The folder of the run, which the hosts must see.
    pub(super) folder: PathBuf,
    /// The start of the run's processes. A host that answers has ended the processes of earlier starts that were left
    /// there.
    pub(super) start: Start,
    /// The longest time of an answer.
    pub(super) patience: Duration,
}

impl Question {
    /// Returns for each host whether it can take part.
    ///
    /// # Errors
    /// Fails if the folder cannot be written, or if `stop` asks for the end of the run.
    pub(super) fn ask(&self, stop: &Interrupt) -> Result<Answers, RunError> {
        let Self { starter, hosts, folder, start, patience } = self;
        let unwritable = |error: std::io::Error| unwritable(folder, &error);
        let token = Token::create(folder).map_err(unwritable)?;
        let own = build().map_err(RunError::input)?;
        let path: PathBuf = std::path::absolute(token.file()).map_err(unwritable)?;
        // A host that has its files from this one looks for nothing.
        let path = if starter.sends_files() { "/".to_owned() } else { path.display().to_string() };
        let words = ["launch", "--answer", &path, "--end-before", &start.to_string()].map(str::to_owned);
        let question = |host: &Host| {
            let mut command = starter.command(1, std::slice::from_ref(host), &words, &Start::default());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()
        };
        let questions: Vec<Option<Child>> = hosts.iter().map(question).collect();
        let since = Instant::now();
        let is_over = || since.elapsed() > *patience || stop.is_requested();
        let expects = |host: &Host| Expected {
            build: (!starter.is_foreign(host)).then_some(own.as_str()),
            sees_folder: !starter.sends_files(),
        };
        let answer = |child: Option<Child>, host| {
            judge(child.and_then(|child| wait(child, is_over)).as_ref(), expects(host))
        };
        let answers = questions.into_iter().zip(hosts);
        let mut answers: Answers = answers.map(|(child, host)| answer(child, host)).collect();
        // Such a host answers `ssh`, so its question has failed for a moment: several launchers that start at the same time
        // may be in each other's way.
        for (host, found) in hosts.iter().zip(&mut answers).filter(|_| starter.sends_files()) {
            if matches!(found, Err(Refusal::Ended(_))) && !is_over() {
                *found = answer(question(host), host);
            }
        }
        if stop.is_requested() {
            return Err(RunError::new(
                ErrorKind::Interrupted,
                "stopped by a signal while the hosts were asked",
            ));
        }
        Ok(answers)
    }

    /// Asks again while all hosts are silent, at most for a minute: a machine or a network that is busy for a moment
    /// does not end a run. Each question gets more time, because a machine that stays busy answers each one late.
    ///
    /// # Errors
    /// As [`Question::ask`].
    pub(super) fn ask_until_one_answers(&self, stop: &Interrupt) -> Result<Answers, RunError> {
        let since = Instant::now();
        let ask = |patience| Self { patience, ..self.clone() }.ask(stop);
        let is_over = || since.elapsed() > LONGEST_SILENCE;
        ask_until_one_answers(ask, [self.patience, LONGEST_PATIENCE], SILENCE_PAUSE, is_over)
    }

    /// Asks on a thread of its own, so that a host that does not answer delays nothing. Nodes that have left the
    /// allocation of Slurm join it again first.
    pub(super) fn ask_aside(self) -> Asked {
        let stop = Interrupt::default();
        let thread_stop = stop.clone();
        let thread = std::thread::spawn(move || {
            let refusal = self.starter.rejoin(&self.hosts, || thread_stop.is_requested()).err();
            // A folder that takes no file ends the run by itself.
            let answers = self.ask(&thread_stop).unwrap_or_default();
            Returned { hosts: answering(&self.hosts, &answers), refusal }
        });
        Asked { stop, thread: Some(thread) }
    }
}

/// A question that is under way. It ends when this is dropped.
pub(super) struct Asked {
    stop: Interrupt,
    thread: Option<JoinHandle<Returned>>,
}

/// The result of a question to hosts that the run does not use.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Returned {
    /// The hosts that answer.
    pub(super) hosts: Vec<Host>,
    /// Words about hosts that Slurm does not let take part again.
    pub(super) refusal: Option<String>,
}

impl Asked {
    /// Returns the result once it is known. A question that panicked has no answer.
    pub(super) fn poll(&mut self) -> Option<Returned> {
        let thread = self.thread.take_if(|thread| thread.is_finished())?;
        Some(thread.join().unwrap_or_default())
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.stop.request();
        // The commands of the question end within one look at them, except a command that hands a node over.
        self.thread.take().map(JoinHandle::join);
    }
}

/// Returns the hosts that have answered.
pub(super) fn answering(hosts: &[Host], answers: &[Result<(), Refusal>]) -> Vec<Host> {
    hosts.iter().zip(answers).filter(|(_, answer)| answer.is_ok()).map(|(host, _)| host.clone()).collect()
}

/// Asks until a host answers or `is_over`. The first time of an answer is the first one of `patience`, and it doubles with
/// each question until the second one.
fn ask_until_one_answers(
    mut ask: impl FnMut(Duration) -> Result<Answers, RunError>,
    [mut patience, longest]: [Duration; 2],
    pause: Duration,
    is_over: impl Fn() -> bool,
) -> Result<Answers, RunError> {
    loop {
        let answers = ask(patience)?;
        let is_silent =
            |answer: &Result<(), Refusal>| matches!(answer, Err(Refusal::Silent | Refusal::Ended(_)));
        if is_over() || !answers.iter().all(is_silent) {
            return Ok(answers);
        }
        patience = (patience * 2).min(longest);
        // Hosts that refuse at once are silent too.
        std::thread::sleep(pause);
    }
}

/// The answer that a host must give.
#[derive(Clone, Copy)]
struct Expected<'a> {
    /// The hash of the program; `None` for a build for another system.
    build: Option<&'a str>,
    sees_folder: bool,
}

fn judge(printed: Option<&Printed>, expected: Expected<'_>) -> Result<(), Refusal> {
    let Some(printed) = printed else { return Err(Refusal::Silent) };
    // A shell of the host may print lines of its own.
    match printed.stdout.lines().find_map(|line| serde_json::from_str::<Answer>(line).ok()) {
        None => Err(Refusal::Ended(printed.telling_line().to_owned())),
        Some(answer) if expected.build.is_some_and(|build| answer.build != build) => Err(Refusal::OtherBuild),
        Some(answer) if expected.sees_folder && !answer.sees_folder => Err(Refusal::OtherFolder),
        Some(_) => Ok(()),
    }
}

/// Fails with every host that cannot take part.
pub(super) fn require(
    hosts: &[Host],
    answers: &[Result<(), Refusal>],
    kind: HostKind,
    folder: &Path,
) -> Result<(), RunError> {
    let refusals = hosts.iter().zip(answers);
    let refusals =
        refusals.filter_map(|(host, answer)| Some(answer.as_ref().err()?.of(&host.name, kind, folder)));
    let refusals: Vec<String> = refusals.collect();
    if refusals.is_empty() { Ok(()) } else { Err(RunError::input(refusals.join("\n"))) }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn silent_hosts_are_asked_again() {
        let check = |later: &[Answers], limit: usize, asked: usize| {
            let count = Cell::new(0);
            let silent = vec![Err(Refusal::Silent); 2];
            let ask = |patience: Duration| {
                assert_eq!(patience.as_secs(), [5, 10, 20].get(count.get()).copied().unwrap_or(20));
                count.set(count.get() + 1);
                Ok(later.get(count.get() - 1).unwrap_or(&silent).clone())
            };
            let patience = [5, 20].map(Duration::from_secs);
            let answers = ask_until_one_answers(ask, patience, Duration::ZERO, || count.get() >= limit)
                .expect("no question fails");
            assert_eq!(count.get(), asked);
            assert_eq!(answers, *later.get(asked - 1).unwrap_or(&silent));
        };
        let silent = vec![Err(Refusal::Silent); 2];
        let one = vec![Err(Refusal::Silent), Ok(())];
        let refused = vec![Err(Refusal::OtherBuild), Err(Refusal::Silent)];
        check(std::slice::from_ref(&one), 9, 1);
        check(&[silent.clone(), silent.clone(), one], 9, 3);
        check(&[silent, refused], 9, 2);
        check(&[], 4, 4);
    }

    #[test]
    fn an_answer_is_judged() {
        let shared = Expected { build: Some("abc"), sees_folder: true };
        let printed = |stdout: &str| {
            let (stdout, stderr) = (stdout.to_owned(), "ssh: no route".to_owned());
            Printed { is_success: true, stdout, stderr }
        };
        let check = |text: &str, expected| assert_eq!(judge(Some(&printed(text)), shared), expected);
        check("Welcome\n{\"build\":\"abc\",\"sees_folder\":true}\n", Ok(()));
        check("{\"build\":\"abd\",\"sees_folder\":true}\n", Err(Refusal::OtherBuild));
        check("{\"build\":\"abc\",\"sees_folder\":false}\n", Err(Refusal::OtherFolder));
        check("Welcome\n", Err(Refusal::Ended("ssh: no route".to_owned())));
        assert_eq!(judge(None, shared), Err(Refusal::Silent));
        let apart = Expected { build: None, sees_folder: false };
        let other = "{\"build\":\"abd\",\"sees_folder\":false}\n";
        assert_eq!(judge(Some(&printed(other)), apart), Ok(()));
    }

    #[test]
    fn each_host_that_cannot_take_part_is_named() {
        let hosts = ["a", "b", "c"].map(|name| Host { name: name.to_owned(), slots: 1 });
        let answers = [Err(Refusal::Silent), Ok(()), Err(Refusal::OtherBuild)];
        let words = |kind| require(&hosts, &answers, kind, Path::new("out")).expect_err("two").text();
        let slurm = words(HostKind::Slurm);
        assert!(slurm.contains("the node a does not answer: `srun ") && !slurm.contains("ssh"), "{slurm}");
        let apart = words(HostKind::Apart);
        assert!(apart.contains("the host a answers ssh, but no process starts there"), "{apart}");
        let ended = Refusal::Ended("ssh: no route".to_owned());
        let of_ended = |kind| ended.of("a", kind, Path::new("out"));
        let apart = of_ended(HostKind::Apart);
        assert!(
            apart.contains("the host a answers ssh, but no process starts there: ssh: no route; "),
            "{apart}"
        );
        assert!(of_ended(HostKind::Shared).starts_with("the host a does not answer: check its name"));
        let text = words(HostKind::Shared);
        assert!(
            text.contains("host a does not answer") && text.contains("host c has another build"),
            "{text}"
        );
        assert!(!text.contains("host b"), "{text}");
    }
}
