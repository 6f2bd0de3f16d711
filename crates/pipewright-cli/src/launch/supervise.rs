//! Starts the processes of a run again and again until it ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, SystemTime};

use crate::display::say;
use crate::failure::{Exit, Failure};
use crate::fault::Fault;
use crate::launch::answer::{Refusal, ask, require};
use crate::launch::attempt::{self, Stop};
use crate::launch::hosts::{Host, Places};
use crate::launch::layout::Layout;
use crate::launch::replacement::Replacement;
use crate::launch::starter::Starter;
use crate::launch::target::{Target, with_settings};
use crate::recovery::{Restart, Restarts, SlowRank, is_full};
use crate::run_folder::{config_of, newest_checkpoint_bytes};
use crate::run_record::metrics;
use crate::text::quoted;

/// The time that a host may take to answer: the deadline of the run, within these limits.
const SHORTEST_PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(20);

/// A run to launch.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) target: Target,
    pub(crate) places: Places,
    pub(crate) starter: Starter,
    /// The most restarts.
    pub(crate) restarts: u64,
}

/// A run that is launched.
struct Launched {
    launch: Launch,
    layout: Layout,
    /// Whether the layout was changed once, so that no configuration is sure to have it.
    has_other_layout: bool,
    /// The hosts of slow ranks, which are used last.
    slow: Vec<String>,
    /// When the configuration of an earlier run in the folder was written.
    earlier: Option<SystemTime>,
}

/// What one start of the processes needs.
struct Attempt {
    hosts: Vec<Host>,
    /// The words of the command.
    words: Vec<String>,
    /// The number of the restart; 0 before the first one.
    restart: u64,
}

/// Starts the processes, and starts them again after each fault, until the run ends.
///
/// # Errors
/// Fails if the processes cannot be started, or with the exit code of the run.
pub(crate) fn supervise(launch: Launch) -> Result<(), Failure> {
    let stop = Stop::watch().map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    let layout = Layout::of(&launch.target.settings);
    let mut run = Launched { earlier: None, layout, has_other_layout: false, slow: Vec::new(), launch };
    run.earlier = run.config_written();
    let words = run.launch.target.words.clone();
    let first = Attempt { hosts: run.first_hosts(&stop)?, words, restart: 0 };
    // A launch that was killed may have left its record.
    Restart::remove(run.folder());
    let outcome = run.attempts(first, &stop);
    // The last restart may have failed before the run resumed.
    Restart::remove(run.folder());
    SlowRank::remove(run.folder());
    outcome
}

impl Launched {
    /// Runs the attempts from the first one on.
    fn attempts(&mut self, mut attempt: Attempt, stop: &Stop) -> Result<(), Failure> {
        let mut restarts = Restarts::default();
        loop {
            // The fault of an earlier attempt would end the processes of this one.
            Fault::remove(self.folder()).map_err(|error| {
                Failure::input(format!("{}: cannot be removed: {error}", self.first_cause().display()))
            })?;
            SlowRank::remove(self.folder());
            let Attempt { hosts, words, restart } = &attempt;
            let mut command = self.launch.starter.command(self.processes(), hosts, words, *restart);
            let mut replacement = None;
            let status = attempt::run(&mut command, &self.first_cause(), stop, || {
                replacement = replacement.take().or_else(|| self.replacement(hosts, &restarts, stop));
                replacement.is_some()
            });
            let status = status.map_err(|error| {
                Failure::input(format!("{} cannot be started: {error}", command.get_program().display()))
            })?;
            let Err(failure) = self.outcome(status, stop) else { return Ok(()) };
            let is_replaced = failure.exit == Exit::Interrupted && !stop.is_asked();
            self.slow.extend(replacement.iter().flat_map(|replacement| replacement.hosts.clone()));
            let replacement = replacement.filter(|_| is_replaced);
            let is_planned = replacement.is_some();
            let failure = replacement.map_or(failure, |replacement| replacement.failure());
            attempt = self
                .next(failure, is_planned, &mut restarts, stop)
                .map_err(|why| if is_planned { stopped(why, stop.is_asked(), self.folder()) } else { why })?;
        }
    }

    /// Returns the slow hosts that the processes ask to replace. If no other hosts that answer can take their
    /// place, removes the request, and the run continues on the slow ones.
    ///
    /// In an allocation of Slurm it is not known which rank is on which host.
    fn replacement(&self, hosts: &[Host], restarts: &Restarts, stop: &Stop) -> Option<Replacement> {
        let slow = SlowRank::find(self.folder());
        if slow.is_empty() {
            return None;
        }
        let among = |all: &[Host]| Replacement::of(&slow, hosts, all, &self.slow, self.processes());
        let replacement = match &self.launch.places {
            Places::Hosts(all) if restarts.has_left(self.launch.restarts) && among(all).is_some() => {
                self.ask(all, stop).ok().and_then(|answers| among(&answering(all, &answers)))
            }
            _ => None,
        };
        if replacement.is_none() {
            SlowRank::remove(self.folder());
        }
        replacement
    }

    fn folder(&self) -> &PathBuf {
        &self.launch.target.settings.run.out
    }

    fn first_cause(&self) -> PathBuf {
        Fault::path_in(self.folder())
    }

    fn processes(&self) -> u32 {
        self.layout.processes(&self.launch.target.settings)
    }

    /// Asks all hosts whether they can take part.
    fn ask(&self, hosts: &[Host], stop: &Stop) -> Result<Vec<Result<(), Refusal>>, Failure> {
        let patience = self.launch.target.settings.run.deadline().clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE);
        ask(&self.launch.starter, hosts, self.folder(), patience, stop)
    }

    /// Returns when the configuration in the folder was written.
    fn config_written(&self) -> Option<SystemTime> {
        fs::metadata(config_of(self.folder()).ok()?).and_then(|file| file.modified()).ok()
    }

    /// Returns whether the processes have begun or resumed the run, which writes its configuration. Before
    /// that, only the command that was launched has the settings of the run.
    fn has_begun(&self) -> bool {
        let written = self.config_written();
        written.is_some() && written != self.earlier
    }

    /// Returns whether the folder has the run that was launched. Before the processes of `train` have agreed,
    /// it may have an earlier run.
    fn has_run(&self) -> bool {
        self.launch.target.resumes || self.has_begun()
    }

    /// Returns the hosts of the first attempt, after all hosts have answered.
    fn first_hosts(&self, stop: &Stop) -> Result<Vec<Host>, Failure> {
        let hosts = self.launch.places.hosts();
        if !hosts.is_empty() {
            let answers = self.ask(hosts, stop)?;
            require(hosts, &answers, self.folder())?;
        }
        let needed = self.processes();
        enough(hosts, needed).ok_or_else(|| {
            let slots: u32 = hosts.iter().map(|host| host.slots).sum();
            Failure::input(format!(
                "the run needs {needed} processes, and the hosts take {slots}: name more hosts or slots, or make \
                 pipeline.ranks or mesh.data_parallel smaller"
            ))
        })
    }

    /// Judges the end of the launcher. A failure that is a fault may be followed by a restart.
    fn outcome(&self, status: ExitStatus, stop: &Stop) -> Result<(), Failure> {
        let exit = match status.code() {
            Some(0) => return Ok(()),
            Some(2) => Exit::WrongInput,
            Some(3) => Exit::CheckFailed,
            Some(5) => Exit::Interrupted,
            Some(70) => Exit::Bug,
            _ => Exit::RankFailed,
        };
        if matches!(exit, Exit::CheckFailed | Exit::Interrupted | Exit::Bug) {
            return Err(Failure::already_reported(exit));
        }
        if stop.is_asked() && exit == Exit::RankFailed {
            // A rank may have failed by itself. Otherwise the signal has ended the launcher.
            return Err(Fault::take(self.folder()).map_or_else(
                || {
                    Failure::new(
                        Exit::Interrupted,
                        "stopped by a signal before the processes had saved a checkpoint",
                    )
                },
                |(_, report)| Failure::new(exit, report),
            ));
        }
        match self.fault(exit, status) {
            Some((fault, report)) => Err(Failure::new(exit, report).with_fault(Some(fault))),
            None => Err(Failure::already_reported(exit)),
        }
    }

    /// Returns the fault that ended the processes, and its report; `None` if it is a mistake of the user.
    fn fault(&self, exit: Exit, status: ExitStatus) -> Option<(Fault, String)> {
        Fault::take(self.folder()).or_else(|| {
            // A full disk may not even take the first cause.
            let is_disk_full = self.has_run() && is_full(self.folder());
            let cause = match (is_disk_full, exit) {
                (true, _) => "the disk is full".to_owned(),
                (false, Exit::WrongInput) => return None,
                (false, _) => format!("a process has ended: {status}"),
            };
            let step = self.steps_done() + 1;
            let summary = format!("step {step}: {cause}");
            let space = is_disk_full.then(|| newest_checkpoint_bytes(self.folder()).unwrap_or_default());
            Some((Fault { step, rank: None, cause, summary: summary.clone(), space }, summary))
        })
    }

    /// Returns the last step in the metrics.
    fn steps_done(&self) -> u64 {
        let steps = if self.has_run() { metrics(self.folder()).unwrap_or_default() } else { Vec::new() };
        steps.last().map_or(0, |step| step.step)
    }

    /// Prepares the next attempt after a failure, which `is_planned` if a slow host is replaced. A signal
    /// that asked for the end of the run ends it.
    fn next(
        &mut self,
        failure: Failure,
        is_planned: bool,
        restarts: &mut Restarts,
        stop: &Stop,
    ) -> Result<Attempt, Failure> {
        if stop.is_asked() {
            return Err(failure);
        }
        if failure.fault().is_none() && Restart::is_left(self.folder()) {
            let silent = "the processes ended before they had resumed the run; their message is above";
            return Err(restarts.not_resumed(Failure::new(failure.exit, silent)));
        }
        let next = restarts.next(failure, self.launch.restarts)?;
        let deadline = self.launch.target.settings.run.deadline();
        let mut next = next.after_space(self.folder(), deadline, || stop.is_asked())?;
        let prepared = self
            .prepare(&mut next.record, stop)
            .map_err(|why| if is_planned { why } else { next.refused(why) });
        // The failure is the reason for the end, although a signal came meanwhile.
        if stop.is_asked() { Err(next.failure) } else { prepared }
    }

    /// Chooses the hosts and the words of the next attempt, and leaves its record if the run has begun.
    fn prepare(&mut self, record: &mut Restart, stop: &Stop) -> Result<Attempt, Failure> {
        let before = self.layout;
        let hosts = self.hosts_that_answer(stop)?;
        record.change = self.layout.change_from(before);
        self.has_other_layout |= self.layout != before;
        let layout = if self.has_other_layout {
            self.layout.arguments(&self.launch.target.settings)
        } else {
            Vec::new()
        };
        let restart = record.restart;
        if !self.has_begun() {
            say(&record.sentence_before_begin());
            return Ok(Attempt { hosts, words: with_settings(&self.launch.target.words, &layout), restart });
        }
        record.leave(self.folder()).map_err(|error| {
            Failure::input(format!(
                "{}: the run cannot continue in this folder: {error}",
                self.folder().display()
            ))
        })?;
        Ok(Attempt { hosts, words: self.launch.target.resumption(&layout), restart })
    }

    /// Returns whether the run can have this layout.
    fn is_valid(&self, layout: Layout) -> bool {
        let settings = &self.launch.target.settings;
        if !self.has_begun() {
            return self.launch.target.accepts(&layout.arguments(settings));
        }
        config_of(self.folder()).is_ok_and(|config| layout.is_valid(&config, settings))
    }

    /// Returns the hosts that answer, and chooses the layout for them.
    fn hosts_that_answer(&mut self, stop: &Stop) -> Result<Vec<Host>, Failure> {
        let hosts = self.launch.places.hosts();
        if hosts.is_empty() {
            return Ok(Vec::new());
        }
        let settings = &self.launch.target.settings;
        let answers = self.ask(hosts, stop)?;
        let mut answering = answering(hosts, &answers);
        // The sort is stable.
        answering.sort_by_key(|host| self.slow.contains(&host.name));
        let slots = usable_slots(&answering, &self.slow, self.processes());
        let layout = Layout::for_slots(settings, slots, |layout| self.is_valid(layout));
        let chosen =
            layout.and_then(|layout| Some((layout, enough(&answering, layout.processes(settings))?)));
        let Some((layout, hosts)) = chosen else {
            let lost = require(hosts, &answers, self.folder()).err().map(|failure| failure.text());
            let lost = lost.unwrap_or_else(|| "all hosts answer, and no layout of the run fits".to_owned());
            return Err(Failure::new(
                Exit::RankFailed,
                format!(
                    "the run cannot continue on the hosts that answer, which take {slots} processes: {lost}"
                ),
            ));
        };
        self.layout = layout;
        Ok(hosts)
    }
}

/// Returns the hosts that have answered.
fn answering(hosts: &[Host], answers: &[Result<(), Refusal>]) -> Vec<Host> {
    hosts.iter().zip(answers).filter(|(_, answer)| answer.is_ok()).map(|(host, _)| host.clone()).collect()
}

/// Returns the slots that a run of so many `processes` may use: those of the hosts that are not `slow` if
/// they take all processes, and otherwise those of all hosts. So the run does not grow onto a slow host.
fn usable_slots(hosts: &[Host], slow: &[String], processes: u32) -> u32 {
    let sum = |slots: u32, host: &Host| slots.saturating_add(host.slots);
    let fast = hosts.iter().filter(|host| !slow.contains(&host.name)).fold(0, sum);
    if fast >= processes { fast } else { hosts.iter().fold(0, sum) }
}

/// Returns the end of a run that was stopped, with a checkpoint, to replace a slow host, and that does not
/// continue because of `why`, or because a signal has come meanwhile.
fn stopped(why: Failure, is_asked: bool, folder: &Path) -> Failure {
    let advice = format!("resume with: pipewright resume {}", quoted(&folder.to_string_lossy()));
    if is_asked {
        return Failure::new(Exit::Interrupted, format!("stopped by a signal; {advice}"));
    }
    why.under(format!("the run has saved a checkpoint and stopped, because a host is slow; {advice}\n"))
}

/// Returns the first hosts that take this many processes together; `None` if all hosts take fewer. An empty
/// list means that the processes run on this machine, which takes any number.
fn enough(hosts: &[Host], processes: u32) -> Option<Vec<Host>> {
    let mut left = processes;
    let mut chosen = Vec::new();
    for host in hosts {
        if left == 0 {
            break;
        }
        left = left.saturating_sub(host.slots);
        chosen.push(host.clone());
    }
    (left == 0 || hosts.is_empty()).then_some(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> [Host; 3] {
        [("a", 2), ("b", 2), ("c", 2)].map(|(name, slots)| Host { name: name.to_owned(), slots })
    }

    #[test]
    fn a_run_does_not_grow_onto_a_slow_host() {
        let slots = |processes| usable_slots(&hosts(), &["b".to_owned()], processes);
        assert_eq!([2, 4, 5].map(slots), [4, 4, 6]);
    }

    #[test]
    fn a_signal_while_a_slow_host_is_replaced_interrupts_the_run() {
        let end = |is_asked| stopped(Failure::new(Exit::RankFailed, "no host"), is_asked, Path::new("out"));
        let (asked, refused) = (end(true), end(false));
        assert_eq!(asked.exit, Exit::Interrupted);
        assert_eq!(asked.full_text(), "stopped by a signal; resume with: pipewright resume out");
        assert_eq!(refused.exit, Exit::RankFailed);
        assert!(refused.full_text().ends_with("resume with: pipewright resume out\nno host"));
    }

    #[test]
    fn spare_hosts_are_not_used() {
        let hosts = hosts();
        let names = |processes| {
            enough(&hosts, processes)
                .map(|hosts| hosts.iter().map(|host| host.name.clone()).collect::<String>())
        };
        assert_eq!([2, 3, 6].map(names), ["a", "ab", "abc"].map(|names| Some(names.to_owned())));
        assert_eq!(names(7), None);
        assert_eq!(enough(&[], 4), Some(Vec::new()));
    }
}
