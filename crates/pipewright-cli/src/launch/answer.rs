//! Asks each host whether it can take part, before processes start there: it must answer, have the same
//! build, and see the folder of the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::failure::{Exit, Failure};
use crate::launch::attempt::Stop;
use crate::launch::hosts::{Host, Places};
use crate::launch::left_over::end_before;
use crate::launch::short_command::wait;
use crate::launch::starter::Starter;
use crate::output;
use pipewright_run::fault::Start;
use pipewright_run::training::shared_folder::{Token, is_seen, unwritable};

/// The longest time in which a host ends processes before it answers.
const LONGEST_END: Duration = Duration::from_secs(3);

/// The answers of some hosts: for each, whether it can take part.
pub(crate) type Answers = Vec<Result<(), Refusal>>;

/// The answer of a host.
#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    /// The hash of the program.
    build: String,
    sees_folder: bool,
}

/// Why a host cannot take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Silent,
    OtherBuild,
    OtherFolder,
}

impl Refusal {
    /// Returns words about a host, which belongs to an allocation of Slurm if `is_slurm`.
    fn of(self, host: &str, is_slurm: bool, folder: &Path) -> String {
        match self {
            Self::Silent if is_slurm => format!(
                "the node {host} does not answer: `srun --overlap --nodelist={host} -n 1 hostname` shows why"
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

/// Prints the answer of this host. `token` is the path of a file that the asking host has written. Ends the processes
/// of earlier starts than `before` that are left on this host.
pub(crate) fn answer(token: &Path, before: Option<&str>) -> Result<(), Failure> {
    if let Some(before) = before.and_then(Start::read) {
        end_before(&before, LONGEST_END);
    }
    let answer = Answer { build: build().map_err(Failure::input)?, sees_folder: is_seen(token) };
    let line = serde_json::to_string(&answer).map_err(|error| Failure::new(Exit::Bug, error))?;
    output::write(None, &format!("{line}\n"))
}

/// Returns the hash of this program, which says whether two hosts have the same build.
fn build() -> std::io::Result<String> {
    let binary = fs::File::open(std::env::current_exe()?)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(binary)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Asks all hosts at the same time. Returns for each whether it can take part. A host that answers has ended the
/// processes of starts before `before` that were left there.
///
/// # Errors
/// Fails if the folder cannot be written, or if a signal asks for the end of the run.
pub(crate) fn ask(
    starter: &Starter,
    hosts: &[Host],
    (folder, before): (&Path, &Start),
    patience: Duration,
    stop: &Stop,
) -> Result<Answers, Failure> {
    let unwritable = |error: std::io::Error| unwritable(folder, &error);
    let token = Token::create(folder).map_err(unwritable)?;
    let own = build().map_err(Failure::input)?;
    let path: PathBuf = std::path::absolute(token.file()).map_err(unwritable)?;
    let mut words = vec!["launch".to_owned(), "--answer".to_owned(), path.display().to_string()];
    words.extend(["--end-before".to_owned(), before.to_string()]);
    let question = |host: &Host| {
        let mut command = starter.command(1, std::slice::from_ref(host), &words, &Start::default());
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()
    };
    let questions: Vec<Option<Child>> = hosts.iter().map(question).collect();
    let since = Instant::now();
    let is_over = || since.elapsed() > patience || stop.is_asked();
    let text = |child: Option<Child>| Some(wait(child?, is_over)?.stdout);
    let answers = questions.into_iter().map(|child| judge(text(child), &own)).collect();
    if stop.is_asked() {
        return Err(Failure::new(Exit::Interrupted, "stopped by a signal while the hosts were asked"));
    }
    Ok(answers)
}

/// Asks again while all hosts are silent and `is_over` is false: a machine or a network that is busy for a
/// moment does not end a run. The first time of an answer is the first one of `patience`, and it doubles with
/// each question until the second one: a machine that stays busy answers each question late.
///
/// # Errors
/// Fails if `ask` fails.
pub(crate) fn ask_until_one_answers(
    mut ask: impl FnMut(Duration) -> Result<Answers, Failure>,
    [mut patience, longest]: [Duration; 2],
    pause: Duration,
    is_over: impl Fn() -> bool,
) -> Result<Answers, Failure> {
    loop {
        let answers = ask(patience)?;
        if is_over() || answers.iter().any(|answer| *answer != Err(Refusal::Silent)) {
            return Ok(answers);
        }
        patience = (patience * 2).min(longest);
        // Hosts that refuse at once are silent too.
        std::thread::sleep(pause);
    }
}

fn judge(text: Option<String>, own: &str) -> Result<(), Refusal> {
    let answers = text.iter().flat_map(|text| text.lines());
    // A shell of the host may print lines of its own.
    match answers.filter_map(|line| serde_json::from_str::<Answer>(line).ok()).next() {
        None => Err(Refusal::Silent),
        Some(answer) if answer.build != own => Err(Refusal::OtherBuild),
        Some(answer) if !answer.sees_folder => Err(Refusal::OtherFolder),
        Some(_) => Ok(()),
    }
}

/// Fails with every host that cannot take part.
pub(crate) fn require(
    places: &Places,
    answers: &[Result<(), Refusal>],
    folder: &Path,
) -> Result<(), Failure> {
    let is_slurm = matches!(places, Places::Slurm(_));
    let refusals = places
        .hosts()
        .iter()
        .zip(answers)
        .filter_map(|(host, answer)| Some(answer.err()?.of(&host.name, is_slurm, folder)));
    let refusals: Vec<String> = refusals.collect();
    if refusals.is_empty() { Ok(()) } else { Err(Failure::input(refusals.join("\n"))) }
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
        let check = |text: &str, expected| assert_eq!(judge(Some(text.to_owned()), "abc"), expected);
        check("Welcome\n{\"build\":\"abc\",\"sees_folder\":true}\n", Ok(()));
        check("{\"build\":\"abd\",\"sees_folder\":true}\n", Err(Refusal::OtherBuild));
        check("{\"build\":\"abc\",\"sees_folder\":false}\n", Err(Refusal::OtherFolder));
        check("Welcome\n", Err(Refusal::Silent));
        assert_eq!(judge(None, "abc"), Err(Refusal::Silent));
    }

    #[test]
    fn each_host_that_cannot_take_part_is_named() {
        let hosts = ["a", "b", "c"].map(|name| Host { name: name.to_owned(), slots: 1 });
        let answers = [Err(Refusal::Silent), Ok(()), Err(Refusal::OtherBuild)];
        let words =
            |places: &Places| require(places, &answers, Path::new("out")).expect_err("two hosts").text();
        let slurm = words(&Places::Slurm(hosts.to_vec()));
        assert!(slurm.contains("the node a does not answer: `srun ") && !slurm.contains("ssh"), "{slurm}");
        let text = words(&Places::Hosts(hosts.to_vec()));
        assert!(
            text.contains("host a does not answer") && text.contains("host c has another build"),
            "{text}"
        );
        assert!(!text.contains("host b"), "{text}");
    }
}
