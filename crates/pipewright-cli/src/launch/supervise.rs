//! Starts the processes of a run again and again until it ends.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use crate::display::say;
use crate::failure::{Exit, Failure, exit_code};
use crate::launch::attempt::{self, AttemptEnd, Stop};
use crate::launch::ended::{Ended, steps_done, stopped, stopped_by_signal};
use crate::launch::growth::cause_of;
use crate::launch::hosts::{Host, Places, is_this_machine};
use crate::launch::known_run::KnownRun;
use crate::launch::layout::Layout;
use crate::launch::left_over::end_before;
use crate::launch::lost_hosts::LostHosts;
use crate::launch::mark::LaunchMark;
use crate::launch::replacement::Replacement;
use crate::launch::selection::{Selection, names_of};
use crate::launch::start_times::StartTimes;
use crate::launch::starter::Starter;
use crate::launch::target::{Target, with_settings};
use crate::launch::watch::{Limits, Seen};
use crate::launch::whole_run::{MemoryRule, WholeRun};
use crate::launch::wrong_hosts::leave_out;
use pipewright_run::fault::{Fault, Start};
use pipewright_run::recovery::{Restart, Restarts, SlowRank, remove_growth_request};
use pipewright_run::run_folder::{RunLock, config_of};
use pipewright_run::training::shared_folder::unwritable;

/// The time beyond the deadline of the run in which its processes must send a heartbeat: file systems in networks show
/// it late.
const LATE_HEARTBEAT: Duration = Duration::from_secs(20);

/// The time between two looks at the heartbeat.
const HEARTBEAT_PAUSE: Duration = Duration::from_millis(500);

/// The longest time in which processes that were killed end on this machine.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The longest time for which the lock of a dead process is waited for. A file system in a network keeps the locks of a
/// lost machine for about one and a half minutes.
const LONGEST_LOCK: Duration = Duration::from_secs(120);

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
pub(super) struct Launched {
    pub(super) launch: Launch,
    pub(super) layout: Layout,
    /// Whether the layout was changed before the run had begun, so that the words of the command need it.
    has_other_layout: bool,
    /// The run in its configured mesh, once it has begun and a host was lost.
    pub(super) whole: Option<WholeRun>,
    /// The hosts of slow ranks, which are used last.
    pub(super) slow: Vec<String>,
    /// The hosts that were lost.
    pub(super) lost: LostHosts,
    starts: StartTimes,
    /// When the configuration of an earlier run in the folder was written.
    earlier: Option<SystemTime>,
    mark: LaunchMark,
}

/// The inputs of one start of the processes.
pub(super) struct Attempt {
    pub(super) hosts: Vec<Host>,
    /// The words of the command.
    words: Vec<String>,
    /// How often processes were started before.
    pub(super) number: u64,
    /// The hosts onto which the run grows.
    pub(super) added: Vec<String>,
}

/// The result of an attempt.
struct AttemptResult {
    end: AttemptEnd,
    /// The slow hosts for whose replacement the processes were asked to end.
    replacement: Option<Replacement>,
    /// The hosts for which they were asked to end, so that the run can grow.
    grown: Option<Vec<String>>,
}

/// Why the processes have ended before the run has.
enum End {
    Failed(Failure),
    /// They have saved a checkpoint, and slow hosts are replaced.
    Replaced(Replacement),
    /// They have saved a checkpoint, and the run grows onto these hosts.
    Grown(Vec<String>),
}

/// Starts the processes, and starts them again after each fault, until the run ends.
///
/// # Errors
/// Fails if the processes cannot be started, or with the exit code of the run.
pub(crate) fn supervise(launch: Launch) -> Result<(), Failure> {
    let stop = Stop::watch().map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    let layout = Layout::of(&launch.target.settings);
    let out = &launch.target.settings.run.out;
    let mark = LaunchMark::create(out).map_err(|error| unwritable(out, &error))?;
    let mut known = KnownRun::new(out);
    let mut run = Launched {
        earlier: None,
        mark,
        layout,
        has_other_layout: false,
        whole: None,
        slow: Vec::new(),
        lost: LostHosts::default(),
        starts: StartTimes::default(),
        launch,
    };
    run.earlier = run.config_written();
    known.look(run.launch.target.resumes, None);
    let words = run.launch.target.words.clone();
    let first = Attempt { hosts: run.first_hosts(&stop)?, words, number: 0, added: Vec::new() };
    // A launch that was killed may have left its record.
    Restart::remove(run.folder());
    let outcome = run.attempts(first, &mut known, &stop);
    if known.is_lost() {
        // Another folder may be in its place.
        return outcome;
    }
    // Other processes than the leader may have left the fault too. Best effort.
    let _ = Fault::remove(run.folder());
    // The last restart may have failed before the run resumed.
    Restart::remove(run.folder());
    SlowRank::remove(run.folder());
    remove_growth_request(run.folder());
    outcome
}

impl Launched {
    /// Runs the attempts from the first one on.
    fn attempts(&mut self, mut attempt: Attempt, known: &mut KnownRun, stop: &Stop) -> Result<(), Failure> {
        let mut restarts = Restarts::default();
        loop {
            // It may have been lost since the last attempt.
            known.lost(Exit::RankFailed, false).map_or(Ok(()), Err)?;
            self.clear_records()?;
            let AttemptResult { end, replacement, grown } = self.attempt(&attempt, known, &restarts, stop)?;
            self.starts.note(end.joined);
            let Err(failure) = self.ended(end).outcome(stop) else { return Ok(()) };
            let is_saved = stop.is_asked() && end.status.code() == Some(exit_code(Exit::Interrupted).into());
            known.lost(failure.kind, is_saved).map_or(Ok(()), Err)?;
            let would_continue =
                replacement.is_some() || grown.is_some() || !SlowRank::find(self.folder()).is_empty();
            if is_saved && would_continue {
                // The processes may have reported nothing, because they expected the run to continue.
                return Err(stopped_by_signal(self.folder()));
            }
            let has_stopped = failure.kind == Exit::Interrupted && !stop.is_asked();
            let end = match (replacement, grown) {
                (Some(replacement), _) if has_stopped => End::Replaced(replacement),
                (_, Some(hosts)) if has_stopped => End::Grown(hosts),
                (replacement, _) => {
                    self.slow.extend(replacement.into_iter().flat_map(|replacement| replacement.hosts));
                    End::Failed(failure)
                }
            };
            let next = self.next(end, &attempt, &mut restarts, stop);
            attempt = next.map_err(|failure| known.lost(failure.kind, stop.is_asked()).unwrap_or(failure))?;
        }
    }

    /// Removes what an earlier attempt has left for this process or for the processes of the next one.
    fn clear_records(&self) -> Result<(), Failure> {
        // The fault of an earlier attempt would end the processes of this one.
        Fault::remove(self.folder()).map_err(|error| {
            let folder = self.folder().display();
            Failure::input(format!(
                "{folder}: the record of an earlier fault cannot be removed: {error}; remove `failure*.json` there"
            ))
        })?;
        SlowRank::remove(self.folder());
        remove_growth_request(self.folder());
        self.mark.clear().map_err(|error| unwritable(self.folder(), &error))
    }

    /// Starts the processes, and returns when all on this machine have ended.
    fn attempt(
        &self,
        attempt: &Attempt,
        known: &mut KnownRun,
        restarts: &Restarts,
        stop: &Stop,
    ) -> Result<AttemptResult, Failure> {
        let Attempt { hosts, words, number, .. } = attempt;
        let start = self.start(*number, self.leaves_out_hosts(restarts));
        let mut command = self.launch.starter.command(self.processes(), hosts, words, &start);
        let (mut replacement, mut growth) = (None, self.growth(restarts));
        let (mut has_sent, mut beat, mut heard) = (false, None, None::<Instant>);
        let before = self.config_written();
        let mut see = |known: &mut KnownRun| {
            let has_run = self.has_run();
            let sign = if has_sent && has_run { None } else { self.mark.sign(*number) };
            has_sent |= sign.is_some();
            known.look(has_run, sign);
            // The file may be on another machine.
            if has_sent && heard.is_none_or(|heard| heard.elapsed() > HEARTBEAT_PAUSE) {
                (heard, beat) = (Some(Instant::now()), self.mark.beat());
            }
            // The mark may not be readable here. An earlier start has written the configuration too.
            let has_joined = has_sent || self.config_written().is_some_and(|written| Some(written) != before);
            Seen { has_fault: Fault::is_left(self.folder()), has_joined, beat, is_stopped: false }
        };
        let end = attempt::run(&mut command, self.limits(), stop, || {
            if let Some((growth, whole)) = &mut growth {
                self.look_for_growth(growth, whole, attempt);
            }
            replacement = replacement.take().or_else(|| self.replacement(attempt, restarts, stop));
            (see(known), replacement.is_some())
        });
        // Processes whose launcher was killed may continue, and hold the lock of the folder.
        end_before(&self.start(number + 1, false), LONGEST_END);
        // They may have begun the run, or lost its folder, after the last look.
        known.look(self.has_run(), self.mark.sign(*number));
        let grown = growth.and_then(|(growth, _)| growth.into_asked());
        Ok(AttemptResult { end: end?, replacement, grown })
    }

    pub(super) fn folder(&self) -> &PathBuf {
        &self.launch.target.settings.run.out
    }

    /// Returns the start with a number. Its processes know the launch by its mark.
    pub(super) fn start(&self, number: u64, leaves_out_hosts: bool) -> Start {
        Start { number, leaves_out_hosts, mark: Some(self.mark.path().to_owned()) }
    }

    /// Returns the longest times of an attempt.
    fn limits(&self) -> Limits {
        let deadline = self.deadline();
        Limits {
            joining: self.starts.limit(self.processes(), deadline),
            silence: deadline.saturating_add(LATE_HEARTBEAT),
            stopped: deadline,
        }
    }

    pub(super) fn deadline(&self) -> Duration {
        self.launch.target.settings.run.deadline()
    }

    pub(super) fn processes(&self) -> u32 {
        self.layout.processes(&self.launch.target.settings)
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

    /// Returns the run after its launcher has ended.
    fn ended(&self, end: AttemptEnd) -> Ended<'_> {
        Ended { folder: self.folder(), has_run: self.has_run(), end }
    }

    /// Prepares the attempt that follows `before`. A signal that asked for the end of the run ends it.
    fn next(
        &mut self,
        end: End,
        before: &Attempt,
        restarts: &mut Restarts,
        stop: &Stop,
    ) -> Result<Attempt, Failure> {
        match end {
            End::Failed(failure) => self.after_fault(failure, before, restarts, stop),
            End::Replaced(replacement) => {
                self.slow.extend(replacement.hosts.clone());
                let next = restarts.next(replacement.failure(), self.launch.restarts);
                let prepared = next.and_then(|mut next| self.prepare(&mut next.record, before, stop));
                prepared.map_err(|why| stopped(why, "a host is slow", stop.is_asked(), self.folder()))
            }
            End::Grown(hosts) => {
                let mut record = restarts.grow(cause_of(&hosts));
                let prepared = self.prepare(&mut record, before, stop);
                let mut attempt = prepared
                    .map_err(|why| stopped(why, "more hosts answer", stop.is_asked(), self.folder()))?;
                attempt.added = names_of(&attempt.hosts, |host| !before.hosts.contains(host));
                if attempt.added.is_empty() {
                    // They do not answer any more.
                    self.lost.note(&hosts, Instant::now());
                }
                Ok(attempt)
            }
        }
    }

    /// Prepares the attempt after a failure.
    fn after_fault(
        &mut self,
        failure: Failure,
        before: &Attempt,
        restarts: &mut Restarts,
        stop: &Stop,
    ) -> Result<Attempt, Failure> {
        if stop.is_asked() {
            return Err(failure);
        }
        let has_resumed = !Restart::is_left(self.folder());
        let is_silent = failure.fault().is_none() && !has_resumed;
        let may_shrink = !before.added.is_empty() && failure.kind != Exit::Interrupted;
        let failure = match failure {
            // The run continues on the hosts that it used before.
            failure if is_silent && may_shrink => failure.with_fault(Some(self.failed_growth(&before.added))),
            failure if is_silent => {
                let silent = "the processes ended before they had resumed the run; their message is above";
                return Err(restarts.not_resumed(Failure::new(failure.kind, silent)));
            }
            failure => failure,
        };
        let failure = leave_out(failure, &before.hosts, &mut self.launch.places)?;
        let next = restarts.next(failure, self.launch.restarts)?;
        let deadline = self.deadline();
        let mut next = next.after_space(self.folder(), deadline, say, || stop.is_asked())?;
        let prepared = self.prepare(&mut next.record, before, stop).map_err(|why| next.refused(why));
        // The failure is the reason for the end, although a signal came meanwhile.
        if stop.is_asked() { Err(next.failure) } else { prepared }
    }

    /// Returns the fault of processes that have not resumed the run on these further hosts.
    fn failed_growth(&self, hosts: &[String]) -> Fault {
        let step = steps_done(self.folder(), self.has_run()) + 1;
        let cause = format!("the run could not resume with the processes on {}", hosts.join(" and "));
        Fault { step, rank: None, summary: format!("step {step}: {cause}"), cause, ..Fault::default() }
    }

    /// Chooses the hosts, the configuration and the words of the attempt after `before`, and leaves its
    /// record if the run has begun.
    fn prepare(&mut self, record: &mut Restart, before: &Attempt, stop: &Stop) -> Result<Attempt, Failure> {
        let has_begun = self.has_begun();
        if has_begun && self.whole.is_none() && !self.launch.places.hosts().is_empty() {
            self.read_whole()?;
        }
        let selection = self.select(before, stop)?;
        if self.has_run() {
            // A process on another host may still end.
            let locked = RunLock::wait(self.folder(), LONGEST_LOCK, || stop.is_asked());
            locked.map_err(|error| Failure::new(Exit::RankFailed, error))?;
        }
        record.change = selection.change_from(self.layout);
        let has_changed = selection.layout != self.layout;
        let Selection { hosts, layout, distribution, .. } = selection;
        self.layout = layout;
        let (target, number) = (&self.launch.target, record.number());
        if !has_begun {
            self.has_other_layout |= has_changed;
            let set = if self.has_other_layout { layout.arguments(&target.settings) } else { Vec::new() };
            say(&record.sentence_before_begin());
            let words = with_settings(&target.words, &set);
            return Ok(Attempt { hosts, words, number, added: Vec::new() });
        }
        if let Some(distribution) = distribution.filter(|_| has_changed) {
            distribution.apply(self.folder())?;
        }
        record.leave(self.folder()).map_err(|error| {
            Failure::input(format!(
                "{}: the run cannot continue in this folder: {error}",
                self.folder().display()
            ))
        })?;
        Ok(Attempt { hosts, words: target.resumption(&[]), number, added: Vec::new() })
    }

    /// Reads the run that has begun.
    fn read_whole(&mut self) -> Result<(), Failure> {
        let settings = &self.launch.target.settings;
        let set = if self.has_other_layout { Layout::of(settings).arguments(settings) } else { Vec::new() };
        let hosts = self.launch.places.hosts();
        let runs_here = hosts.iter().any(|host| is_this_machine(&host.name));
        let memory = if runs_here { MemoryRule::Strict } else { MemoryRule::Preferred };
        let whole = WholeRun::read(self.folder(), &set, memory)?;
        if !self.has_other_layout {
            // With the schedule `auto`, the plan has chosen it.
            self.layout = whole.layout();
        }
        self.whole = Some(whole);
        Ok(())
    }
}
