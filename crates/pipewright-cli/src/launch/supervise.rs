//! Starts the processes of a run again and again until it ends.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use crate::display::say;
use crate::failure::{Exit, Failure};
use crate::fault::{Fault, Start};
use crate::launch::answer::{Answers, ask, ask_until_one_answers, require};
use crate::launch::attempt::{self, AttemptEnd, Joining, Stop};
use crate::launch::ended::{Ended, stopped, stopped_by_signal};
use crate::launch::growth::{Growing, Growth, cause_of};
use crate::launch::hosts::{Host, Places, is_this_machine};
use crate::launch::layout::Layout;
use crate::launch::lost_hosts::LostHosts;
use crate::launch::replacement::Replacement;
use crate::launch::returning_hosts::{Question, ReturningHosts};
use crate::launch::selection::{Selection, answering, enough, names_of, usable_slots};
use crate::launch::start_times::StartTimes;
use crate::launch::starter::Starter;
use crate::launch::target::{Target, with_settings};
use crate::launch::whole_run::{MemoryRule, WholeRun};
use crate::launch::wrong_hosts::leave_out;
use crate::recovery::{Restart, Restarts, SlowRank, have_joined, remove_growth_request, remove_joined};
use crate::run_folder::config_of;

/// The time that a host may take to answer: the deadline of the run, within these limits.
const SHORTEST_PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(20);

/// The time in which hosts are asked again after a failure while none answers, and the pause between two
/// questions.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);
const SILENCE_PAUSE: Duration = Duration::from_secs(2);

/// The time between two questions to the hosts that a smaller run does not use: the deadline of the run,
/// within these limits.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

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
    /// Whether the layout was changed before the run had begun, so that the words of the command need it.
    has_other_layout: bool,
    /// The run in its configured mesh, once it has begun and a host was lost.
    whole: Option<WholeRun>,
    /// The hosts of slow ranks, which are used last.
    slow: Vec<String>,
    /// The hosts that were lost.
    lost: LostHosts,
    starts: StartTimes,
    /// When the configuration of an earlier run in the folder was written.
    earlier: Option<SystemTime>,
}

/// The inputs of one start of the processes.
struct Attempt {
    hosts: Vec<Host>,
    /// The words of the command.
    words: Vec<String>,
    /// How often processes were started before.
    number: u64,
    /// The hosts onto which the run grows.
    added: Vec<String>,
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
    let mut run = Launched {
        earlier: None,
        layout,
        has_other_layout: false,
        whole: None,
        slow: Vec::new(),
        lost: LostHosts::default(),
        starts: StartTimes::default(),
        launch,
    };
    run.earlier = run.config_written();
    let words = run.launch.target.words.clone();
    let first = Attempt { hosts: run.first_hosts(&stop)?, words, number: 0, added: Vec::new() };
    // A launch that was killed may have left its record.
    Restart::remove(run.folder());
    let outcome = run.attempts(first, &stop);
    // Other processes than the leader may have left the fault too. Best effort.
    let _ = Fault::remove(run.folder());
    // The last restart may have failed before the run resumed.
    Restart::remove(run.folder());
    SlowRank::remove(run.folder());
    remove_growth_request(run.folder());
    remove_joined(run.folder());
    outcome
}

impl Launched {
    /// Runs the attempts from the first one on.
    fn attempts(&mut self, mut attempt: Attempt, stop: &Stop) -> Result<(), Failure> {
        let mut restarts = Restarts::default();
        loop {
            // The fault of an earlier attempt would end the processes of this one.
            Fault::remove(self.folder()).map_err(|error| {
                let folder = self.folder().display();
                Failure::input(format!(
                    "{folder}: the record of an earlier fault cannot be removed: {error}; remove `failure*.json` there"
                ))
            })?;
            SlowRank::remove(self.folder());
            remove_growth_request(self.folder());
            remove_joined(self.folder());
            let Attempt { hosts, words, number, .. } = &attempt;
            let start = Start { number: *number, leaves_out_hosts: self.leaves_out_hosts(&restarts) };
            let mut command = self.launch.starter.command(self.processes(), hosts, words, start);
            let (mut replacement, mut growth) = (None, self.growth(&restarts));
            let resumes = self.launch.target.resumes || Restart::is_left(self.folder());
            // The processes of `train` leave no mark, because their folder may have an earlier run.
            let is_done = || if resumes { have_joined(self.folder(), *number) } else { self.has_begun() };
            let limit = Restart::is_left(self.folder()).then(|| self.starts.limit(self.processes()));
            let joining = Joining { is_done, limit };
            let end = attempt::run(&mut command, &self.first_cause(), &joining, stop, || {
                if let Some((growth, whole)) = &mut growth {
                    self.look_for_growth(growth, whole, hosts);
                }
                replacement = replacement.take().or_else(|| self.replacement(hosts, &restarts, stop));
                replacement.is_some()
            });
            let AttemptEnd { status, late, joined } = end.map_err(|error| {
                Failure::input(format!("{} cannot be started: {error}", command.get_program().display()))
            })?;
            let grown = growth.and_then(|(growth, _)| growth.into_asked());
            self.starts.note(joined);
            let Err(failure) = self.ended().outcome(status, late, stop) else { return Ok(()) };
            let would_continue =
                replacement.is_some() || grown.is_some() || !SlowRank::find(self.folder()).is_empty();
            let has_saved = status.code() == Some(Exit::Interrupted as i32);
            if stop.is_asked() && has_saved && would_continue {
                // The processes may have reported nothing, because they expected the run to continue.
                return Err(stopped_by_signal(self.folder()));
            }
            let has_stopped = failure.exit == Exit::Interrupted && !stop.is_asked();
            let end = match (replacement, grown) {
                (Some(replacement), _) if has_stopped => End::Replaced(replacement),
                (_, Some(hosts)) if has_stopped => End::Grown(hosts),
                (replacement, _) => {
                    self.slow.extend(replacement.into_iter().flat_map(|replacement| replacement.hosts));
                    End::Failed(failure)
                }
            };
            attempt = self.next(end, &attempt, &mut restarts, stop)?;
        }
    }

    /// Returns the search for hosts onto which the run can grow, if it has fewer processes than configured
    /// and a restart is left, because a growth that fails needs one.
    fn growth(&self, restarts: &Restarts) -> Option<(Growth, &WholeRun)> {
        let has_restart = restarts.has_left(self.launch.restarts);
        let whole = self.whole.as_ref().filter(|whole| has_restart && whole.grows())?;
        let is_smaller = whole.processes(self.layout) < whole.processes(whole.layout());
        let pause = self.deadline().clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        is_smaller.then(|| (Growth::new(ReturningHosts::new(pause)), whole))
    }

    /// Returns whether a restart may leave out a host: the run has several, and a restart is left.
    fn leaves_out_hosts(&self, restarts: &Restarts) -> bool {
        self.launch.places.hosts().len() > 1 && restarts.has_left(self.launch.restarts)
    }

    fn look_for_growth(&self, growth: &mut Growth, whole: &WholeRun, used: &[Host]) {
        let avoided = self.avoided();
        let is_unused = |host: &&Host| !used.contains(host) && !avoided.contains(&host.name);
        let unused: Vec<Host> = self.launch.places.hosts().iter().filter(is_unused).cloned().collect();
        if unused.is_empty() {
            return;
        }
        let run = Growing { whole, layout: self.layout, used, folder: self.folder() };
        growth.poll(&run, || Question {
            starter: self.launch.starter.clone(),
            hosts: unused,
            folder: self.folder().clone(),
            patience: self.patience(),
        });
    }

    /// Returns the hosts that the run uses only if the others do not suffice: hosts of slow ranks, and hosts
    /// that it has lost several times.
    fn avoided(&self) -> Vec<String> {
        let grows = self.whole.as_ref().is_some_and(WholeRun::grows);
        let left_out = if grows { self.lost.left_out(Instant::now()) } else { Vec::new() };
        [&self.slow[..], &left_out].concat()
    }

    /// Returns the slow hosts that the processes ask to replace. If no other hosts that answer can take their
    /// place, removes the request, and the run continues on the slow ones.
    fn replacement(&self, hosts: &[Host], restarts: &Restarts, stop: &Stop) -> Option<Replacement> {
        let slow = SlowRank::find(self.folder());
        if slow.is_empty() {
            return None;
        }
        let among = |all: &[Host]| Replacement::of(&slow, hosts, all, &self.slow, self.processes());
        let all = self.launch.places.hosts();
        let replacement = if restarts.has_left(self.launch.restarts) && among(all).is_some() {
            self.ask(all, stop).ok().and_then(|answers| among(&answering(all, &answers)))
        } else {
            None
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

    fn deadline(&self) -> Duration {
        self.launch.target.settings.run.deadline()
    }

    /// Returns the longest time of an answer.
    fn patience(&self) -> Duration {
        self.deadline().clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE)
    }

    fn processes(&self) -> u32 {
        self.layout.processes(&self.launch.target.settings)
    }

    /// Asks all hosts whether they can take part.
    fn ask(&self, hosts: &[Host], stop: &Stop) -> Result<Answers, Failure> {
        ask(&self.launch.starter, hosts, self.folder(), self.patience(), stop)
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
            require(&self.launch.places, &answers, self.folder())?;
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

    /// Returns the run after its processes have ended.
    fn ended(&self) -> Ended<'_> {
        Ended { folder: self.folder(), has_run: self.has_run() }
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
        let may_shrink = !before.added.is_empty() && failure.exit != Exit::Interrupted;
        let failure = match failure {
            // The run continues on the hosts that it used before.
            failure if is_silent && may_shrink => failure.with_fault(Some(self.failed_growth(&before.added))),
            failure if is_silent => {
                let silent = "the processes ended before they had resumed the run; their message is above";
                return Err(restarts.not_resumed(Failure::new(failure.exit, silent)));
            }
            failure => failure,
        };
        let failure = leave_out(failure, &before.hosts, &mut self.launch.places)?;
        let next = restarts.next(failure, self.launch.restarts)?;
        let deadline = self.deadline();
        let mut next = next.after_space(self.folder(), deadline, || stop.is_asked())?;
        let prepared = self.prepare(&mut next.record, before, stop).map_err(|why| next.refused(why));
        // The failure is the reason for the end, although a signal came meanwhile.
        if stop.is_asked() { Err(next.failure) } else { prepared }
    }

    /// Returns the fault of processes that have not resumed the run on these further hosts.
    fn failed_growth(&self, hosts: &[String]) -> Fault {
        let step = self.ended().steps_done() + 1;
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

    /// Selects the hosts that answer, and the layout of the run on them. Notes the hosts that the attempt
    /// `before` has lost.
    fn select(&mut self, before: &Attempt, stop: &Stop) -> Result<Selection, Failure> {
        let hosts = self.launch.places.hosts();
        if hosts.is_empty() {
            let layout = self.layout;
            return Ok(Selection { hosts: Vec::new(), slots: u32::MAX, layout, distribution: None });
        }
        let since = Instant::now();
        let is_over = || since.elapsed() > LONGEST_SILENCE;
        let ask = |patience| ask(&self.launch.starter, hosts, self.folder(), patience, stop);
        let patience = [self.patience(), LONGEST_PATIENCE];
        let answers = ask_until_one_answers(ask, patience, SILENCE_PAUSE, is_over)?;
        let mut answering = answering(hosts, &answers);
        // The processes on the further hosts of a run may have failed before it has resumed.
        let has_resumed = !Restart::is_left(self.folder());
        let is_lost =
            |host: &Host| !answering.contains(host) || (!has_resumed && before.added.contains(&host.name));
        let lost = names_of(&before.hosts, is_lost);
        self.lost.note(&lost, Instant::now());
        if !has_resumed {
            // Hosts onto which the run could not grow are not tried again at once.
            answering.retain(|host| !before.added.contains(&host.name));
        }
        let avoided = self.avoided();
        // The sort is stable.
        answering.sort_by_key(|host| avoided.contains(&host.name));
        let slots = usable_slots(&answering, &avoided, self.processes());
        let refused = |why: Option<Failure>| {
            let lost =
                require(&self.launch.places, &answers, self.folder()).err().map(|failure| failure.text());
            let lost = lost.unwrap_or_else(|| "all hosts answer, and no layout of the run fits".to_owned());
            let why = why.map_or_else(String::new, |why| format!("\n{}", why.text()));
            Failure::new(
                Exit::RankFailed,
                format!(
                    "the run cannot continue on the hosts that answer, which take {slots} processes: {lost}{why}"
                ),
            )
        };
        let (layout, distribution) = match &self.whole {
            Some(whole) => {
                let distribution = whole.for_slots(slots).map_err(|why| refused(Some(why)))?;
                (distribution.layout, Some(distribution))
            }
            None => {
                let target = &self.launch.target;
                let accepts = |layout: Layout| target.accepts(&layout.arguments(&target.settings));
                let layout = Layout::for_slots(&target.settings, slots, accepts);
                (layout.ok_or_else(|| refused(None))?, None)
            }
        };
        let processes = layout.processes(&self.launch.target.settings);
        let hosts = enough(&answering, processes).ok_or_else(|| refused(None))?;
        Ok(Selection { hosts, slots, layout, distribution })
    }
}
