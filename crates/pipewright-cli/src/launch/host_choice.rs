//! Chooses the hosts of each attempt at a run: of the first attempt, of attempts after faults, of a run that grows, and
//! of a run whose slow hosts are replaced.

use std::time::{Duration, Instant};

use crate::failure::{Exit, Failure};
use crate::launch::answer::{Answers, ask, ask_until_one_answers, require};
use crate::launch::attempt::Stop;
use crate::launch::growth::{Growing, Growth};
use crate::launch::hosts::Host;
use crate::launch::layout::Layout;
use crate::launch::replacement::Replacement;
use crate::launch::returning_hosts::{Question, ReturningHosts};
use crate::launch::selection::{Selection, answering, enough, names_of, usable_slots};
use crate::launch::supervise::{Attempt, Launched};
use crate::launch::whole_run::WholeRun;
use pipewright_run::recovery::{Restart, Restarts, SlowRank};

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

impl Launched {
    /// Returns the search for hosts onto which the run can grow, if it has fewer processes than configured
    /// and a restart is left, because a growth that fails needs one.
    pub(super) fn growth(&self, restarts: &Restarts) -> Option<(Growth, &WholeRun)> {
        let has_restart = restarts.has_left(self.launch.restarts);
        let whole = self.whole.as_ref().filter(|whole| has_restart && whole.grows())?;
        let is_smaller = whole.processes(self.layout) < whole.processes(whole.layout());
        let pause = self.deadline().clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        is_smaller.then(|| (Growth::new(ReturningHosts::new(pause)), whole))
    }

    /// Returns whether a restart may leave out a host: the run has several, and a restart is left.
    pub(super) fn leaves_out_hosts(&self, restarts: &Restarts) -> bool {
        self.launch.places.hosts().len() > 1 && restarts.has_left(self.launch.restarts)
    }

    pub(super) fn look_for_growth(&self, growth: &mut Growth, whole: &WholeRun, attempt: &Attempt) {
        let used = &attempt.hosts[..];
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
            start: self.start(attempt.number, false),
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
    pub(super) fn replacement(
        &self,
        used: &Attempt,
        restarts: &Restarts,
        stop: &Stop,
    ) -> Option<Replacement> {
        let slow = SlowRank::find(self.folder());
        if slow.is_empty() {
            return None;
        }
        let among = |all: &[Host]| Replacement::of(&slow, &used.hosts, all, &self.slow, self.processes());
        let all = self.launch.places.hosts();
        let replacement = if restarts.has_left(self.launch.restarts) && among(all).is_some() {
            self.ask(all, used.number, stop).ok().and_then(|answers| among(&answering(all, &answers)))
        } else {
            None
        };
        if replacement.is_none() {
            SlowRank::remove(self.folder());
        }
        replacement
    }

    /// Returns the longest time of an answer.
    fn patience(&self) -> Duration {
        self.deadline().clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE)
    }

    /// Asks all hosts whether they can take part, for the start with this number.
    fn ask(&self, hosts: &[Host], number: u64, stop: &Stop) -> Result<Answers, Failure> {
        let start = self.start(number, false);
        ask(&self.launch.starter, hosts, (self.folder(), &start), self.patience(), stop)
    }

    /// Returns the hosts of the first attempt, after all hosts have answered.
    pub(super) fn first_hosts(&self, stop: &Stop) -> Result<Vec<Host>, Failure> {
        let hosts = self.launch.places.hosts();
        if !hosts.is_empty() {
            let answers = self.ask(hosts, 0, stop)?;
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

    /// Selects the hosts that answer, and the layout of the run on them. Notes the hosts that the attempt
    /// `before` has lost.
    pub(super) fn select(&mut self, before: &Attempt, stop: &Stop) -> Result<Selection, Failure> {
        let hosts = self.launch.places.hosts();
        if hosts.is_empty() {
            let layout = self.layout;
            return Ok(Selection { hosts: Vec::new(), slots: u32::MAX, layout, distribution: None });
        }
        let since = Instant::now();
        let is_over = || since.elapsed() > LONGEST_SILENCE;
        let start = self.start(before.number + 1, false);
        let ask = |patience| ask(&self.launch.starter, hosts, (self.folder(), &start), patience, stop);
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
