//! [`Machine`]: decides what a launch does next, from what has happened. It has no processes, files or clocks; the actor
//! carries its decisions out and tells it what comes of them. `README.md` of this folder has the diagram.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::launch::answer::{Answers, HostKind, Returned, answering, require};
use crate::launch::ended::{Ended, stopped, stopped_by_signal};
use crate::launch::events::{Decision, Event, Look, Moment, Patience, Start};
use crate::launch::host_table::{HostTable, Replacement, enough, names_of, slots};
use crate::launch::hosts::Host;
use crate::launch::watch::{Limits, Order, StartTimes, Watch};
use crate::recovery::{NextRestart, Restarts, SlowRank};

/// The time beyond the deadline of the run in which its processes must send a heartbeat: file systems in networks show
/// it late.
const LATE_HEARTBEAT: Duration = Duration::from_secs(20);

/// The time between two questions to the hosts that a smaller run does not use: the deadline of the run,
/// within these limits.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The rules of a launch.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// The folder of the run, for messages.
    pub(super) folder: PathBuf,
    pub(super) deadline: Duration,
    /// The most restarts.
    pub(super) restarts: u64,
    /// How the hosts belong together.
    pub(super) kind: HostKind,
}

/// The state of a launched run.
enum State {
    /// The next attempt is prepared.
    Preparing(Next),
    /// The launcher runs.
    Running(Running),
    /// Before the first event, and after the last one.
    Over,
}

/// The next attempt.
#[derive(Default)]
struct Next {
    why: Why,
    /// The hosts of the attempt before it, and those among them onto which the run had grown.
    before: Vec<Host>,
    added: Vec<String>,
    /// Whether the attempt before it has resumed the run.
    has_resumed: bool,
    /// The hosts that answer, the best ones first.
    answering: Vec<Host>,
    /// Words about the hosts that do not take part.
    refusal: String,
    start: Start,
}

/// Why there is a next attempt.
#[derive(Default)]
enum Why {
    #[default]
    First,
    Fault(Box<NextRestart>),
    /// The run has saved a checkpoint and stopped for this reason. The hosts are those onto which it grows.
    Stopped(&'static str, Vec<String>),
}

/// An attempt that runs.
#[derive(Default)]
struct Running {
    watch: Watch,
    /// The time of the last look.
    looked: Option<Duration>,
    hosts: Vec<Host>,
    added: Vec<String>,
    /// Whether the processes were asked to save a checkpoint and to end.
    is_saving: bool,
    /// The ranks whose hosts the processes have asked to replace, and the hosts that are replaced.
    slow: Vec<SlowRank>,
    replacement: Option<Replacement>,
    growth: Option<Growth>,
}

/// The search for hosts onto which the run can grow, during one attempt.
#[derive(Default)]
struct Growth {
    /// When the next question is due; `None` while one is under way.
    due: Option<Duration>,
    /// The hosts that have answered.
    found: Vec<String>,
    /// The hosts that have answered although the run cannot grow onto them.
    useless: Vec<String>,
    /// The last words about hosts that cannot take part again.
    refusal: Option<String>,
    /// Whether the processes were asked to end.
    is_asked: bool,
}

/// A launched run.
pub(super) struct Machine {
    rules: Rules,
    state: State,
    hosts: HostTable,
    /// The host that the run cannot do without, because it has the files, if the hosts share no folder.
    first: Option<String>,
    restarts: Restarts,
    starts: StartTimes,
    /// The number of processes of the run.
    processes: u32,
    /// The number of processes in the configured mesh, if the run grows again to them.
    grows_to: Option<u32>,
    /// Sentences for people, which the actor takes.
    pub(super) notes: Vec<String>,
}

impl Machine {
    pub(super) fn new(rules: Rules, hosts: Vec<Host>, processes: u32) -> Self {
        let restarts = Restarts::new(rules.restarts);
        let first = hosts.first().filter(|_| rules.kind == HostKind::Apart).map(|host| host.name.clone());
        Self {
            rules,
            first,
            state: State::Over,
            hosts: HostTable::new(hosts),
            restarts,
            starts: StartTimes::default(),
            processes,
            grows_to: None,
            notes: Vec::new(),
        }
    }

    pub(super) fn hosts(&self) -> &[Host] {
        self.hosts.hosts()
    }

    /// Returns the number of processes of the run.
    pub(super) fn processes(&self) -> u32 {
        self.processes
    }

    /// Notes the mesh of a run that has begun: the number of its processes, and the number to which it grows again.
    pub(super) fn note_mesh(&mut self, processes: u32, grows_to: Option<u32>) {
        (self.processes, self.grows_to) = (processes, grows_to);
    }

    /// Decides what to do after an event.
    pub(super) fn on(&mut self, event: Event, at: &Moment) -> Decision {
        match (std::mem::replace(&mut self.state, State::Over), event) {
            (State::Over, Event::Launched) => self.prepare(Next::default()),
            (State::Preparing(next), Event::Space(has_space)) => self.after_space(next, has_space, at),
            (State::Preparing(next), Event::Answered(Ok(answers))) => self.answered(next, &answers, at),
            (State::Preparing(next), Event::Fitted(fitted)) => self.fitted(next, fitted, at),
            (State::Preparing(next), Event::Prepared(Ok(()))) => self.prepared(next, at),
            (State::Preparing(next), Event::Answered(Err(why)) | Event::Prepared(Err(why))) => {
                refused(next, why, &self.rules.folder, at)
            }
            (State::Running(running), Event::Looked(look)) => self.looked(running, look, at),
            (State::Running(mut running), Event::Answered(answers)) => {
                let answering = answering(self.hosts(), &answers.unwrap_or_default());
                let others =
                    self.hosts.replacement(&running.slow, &running.hosts, &answering, self.processes);
                // The first host has the files.
                let is_first = |name: &String| Some(name) == self.first.as_ref();
                running.replacement = others.filter(|others| !others.hosts.iter().any(is_first));
                let is_replaced = running.replacement.is_some();
                self.state = State::Running(running);
                if is_replaced { Decision::Launcher(Order::Wait) } else { Decision::KeepSlow }
            }
            (State::Running(mut running), Event::Fitted(fitted)) => {
                let is_larger = fitted.is_ok_and(|processes| processes > self.processes);
                let decision = running.growth.as_mut().map(|growth| growth.fitted(is_larger));
                self.state = State::Running(running);
                decision.unwrap_or(Decision::Launcher(Order::Wait))
            }
            (State::Running(mut running), Event::GrowthRequested(is_asked)) => {
                // If the request cannot be written, the run stays as it is until other hosts answer.
                running.growth.iter_mut().for_each(|growth| growth.note_requested(is_asked));
                self.state = State::Running(running);
                Decision::Launcher(Order::Wait)
            }
            (State::Running(running), Event::Ended(ended)) => self.ended(running, &ended, at),
            (_, Event::Failed(failure)) => Decision::End(Err(failure)),
            (_, event) => {
                let text = format!("a launch does not expect {event:?} in this state");
                Decision::End(Err(RunError::new(ErrorKind::Bug, text)))
            }
        }
    }

    /// Prepares an attempt, the first one or one that follows another.
    fn prepare(&mut self, next: Next) -> Decision {
        let is_first = matches!(next.why, Why::First);
        self.state = State::Preparing(next);
        Decision::Ask(if is_first { Patience::First } else { Patience::UntilOneAnswers })
    }

    /// Continues after a wait for space on the disk.
    fn after_space(&mut self, next: Next, has_space: bool, at: &Moment) -> Decision {
        let Why::Fault(restart) = next.why else { return self.prepare(next) };
        match restart.after_wait(has_space, at.is_asked, self.rules.deadline) {
            Ok(restart) => self.prepare(Next { why: Why::Fault(Box::new(restart)), ..next }),
            Err(failure) => refuse(failure, at),
        }
    }

    /// Chooses among the hosts that answer.
    fn answered(&mut self, mut next: Next, answers: &Answers, at: &Moment) -> Decision {
        let refused = require(self.hosts(), answers, self.rules.kind, &self.rules.folder);
        if matches!(next.why, Why::First) {
            let (needed, takes) = (self.processes, slots(self.hosts()));
            return match refused.map(|()| enough(self.hosts(), needed)) {
                Ok(Some(hosts)) => self.start(next, hosts),
                Ok(None) => Decision::End(Err(RunError::input(format!(
                    "the run needs {needed} processes, and the hosts take {takes}: name more hosts or slots, or make \
                     pipeline.ranks or mesh.data_parallel smaller"
                )))),
                Err(failure) => Decision::End(Err(failure)),
            };
        }
        let all_answer = || "all hosts answer, and no layout of the run fits".to_owned();
        next.refusal = refused.err().map_or_else(all_answer, |failure| failure.text());
        let mut answering = answering(self.hosts(), answers);
        // The processes on the further hosts of a run may have failed before it has resumed. These are not tried again at
        // once.
        let has_failed = |host: &Host| !next.has_resumed && next.added.contains(&host.name);
        let lost = names_of(&next.before, |host| !answering.contains(host) || has_failed(host));
        self.hosts.note_lost(&lost, at.time);
        answering.retain(|host| !has_failed(host));
        let slots = self.hosts.sort(&mut answering, self.processes, self.grows_to.is_some(), at.time);
        if let Some(first) = &self.first {
            answering.sort_by_key(|host| host.name != *first);
            if answering.first().is_none_or(|host| host.name != *first) {
                let text =
                    format!("the host {first} has the files of the run, which does not continue without it");
                let failure = RunError::new(ErrorKind::RankFailed, text);
                return self::refused(next, failure, &self.rules.folder, at);
            }
        }
        (next.answering, next.start.slots) = (answering, slots);
        self.state = State::Preparing(next);
        Decision::Fit(slots)
    }

    /// Starts the processes in the layout that fits.
    fn fitted(&mut self, next: Next, fitted: Result<u32, Option<RunError>>, at: &Moment) -> Decision {
        let (why, hosts) = match fitted {
            Ok(processes) => (None, enough(&next.answering, processes).map(|hosts| (processes, hosts))),
            Err(why) => (why, None),
        };
        let Some((processes, hosts)) = hosts else {
            let (slots, refusal) = (next.start.slots, &next.refusal);
            let why = why.map_or_else(String::new, |why| format!("\n{}", why.text()));
            let text = format!(
                "the run cannot continue on the hosts that answer, which take {slots} processes: {refusal}{why}"
            );
            return refused(next, RunError::new(ErrorKind::RankFailed, text), &self.rules.folder, at);
        };
        self.processes = processes;
        self.start(next, hosts)
    }

    fn start(&mut self, mut next: Next, hosts: Vec<Host>) -> Decision {
        let leaves_out_hosts = self.hosts().len() > 1 && self.restarts.has_left();
        next.start = Start { hosts, leaves_out_hosts, ..next.start };
        let start = next.start.clone();
        self.state = State::Preparing(next);
        Decision::Prepare(start)
    }

    /// Starts the processes, unless a signal came after a failure: the failure is the reason for the end then.
    fn prepared(&mut self, next: Next, at: &Moment) -> Decision {
        let next = match next {
            Next { why: Why::Fault(restart), .. } if at.is_asked => {
                return Decision::End(Err(restart.failure));
            }
            next => next,
        };
        if let Some(lost) = lost(at, ErrorKind::RankFailed, false) {
            return Decision::End(Err(lost));
        }
        let start = next.start.clone();
        self.state = State::Running(self.running(next, at));
        Decision::Start(start)
    }

    /// Returns the attempt that begins.
    fn running(&mut self, next: Next, at: &Moment) -> Running {
        let hosts = next.start.hosts;
        let mut added = Vec::new();
        if let Why::Stopped(_, grown) = next.why
            && !grown.is_empty()
        {
            added = names_of(&hosts, |host| !next.before.contains(host));
            if added.is_empty() {
                // They do not answer any more.
                self.hosts.note_lost(&grown, at.time);
            }
        }
        let deadline = self.rules.deadline;
        let limits = Limits {
            joining: self.starts.limit(self.processes, deadline),
            silence: deadline.saturating_add(LATE_HEARTBEAT),
            stopped: deadline,
        };
        // A growth that fails needs a restart.
        let can_grow = self.restarts.has_left() && self.grows_to.is_some_and(|most| self.processes < most);
        let due = Some(at.time + self.pause());
        let growth = can_grow.then(|| Growth { due, ..Growth::default() });
        Running { watch: Watch::new(limits), hosts, added, growth, ..Running::default() }
    }

    fn pause(&self) -> Duration {
        self.rules.deadline.clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }

    /// Decides after a look at the processes.
    fn looked(&mut self, mut running: Running, look: Look, at: &Moment) -> Decision {
        let Look { seen, slow, returned } = look;
        let decision = self.look_for_growth(&mut running, returned, at);
        let decision = decision.or_else(|| self.look_for_slow(&mut running, slow));
        let decision = decision.unwrap_or_else(|| {
            let must_save = at.is_asked || running.replacement.is_some();
            if must_save && !std::mem::replace(&mut running.is_saving, true) {
                return Decision::Launcher(Order::Save);
            }
            let passed = at.time.saturating_sub(running.looked.replace(at.time).unwrap_or(at.time));
            Decision::Launcher(running.watch.look(passed, seen))
        });
        self.state = State::Running(running);
        decision
    }

    /// Asks the hosts that the run does not use from time to time, and grows if the answers allow it.
    fn look_for_growth(
        &mut self,
        running: &mut Running,
        returned: Option<Returned>,
        at: &Moment,
    ) -> Option<Decision> {
        let pause = self.pause();
        let growth = running.growth.as_mut().filter(|growth| !growth.is_asked)?;
        if let Some(Returned { hosts, refusal }) = returned {
            growth.due = Some(at.time + pause);
            if refusal != growth.refusal {
                self.notes.extend(refusal.clone());
                growth.refusal = refusal;
            }
            growth.found = names_of(&hosts, |_| true);
            let is_other = !growth.found.is_empty() && growth.found != growth.useless;
            return is_other.then(|| Decision::Fit(slots(running.hosts.iter().chain(&hosts))));
        }
        growth.due.filter(|due| at.time >= *due)?;
        let unused = self.hosts.unused(&running.hosts, at.time);
        if unused.is_empty() {
            return None;
        }
        growth.due = None;
        Some(Decision::AskAside(unused))
    }

    /// Replaces the hosts of slow ranks if others can take their place. Otherwise the run continues on the slow ones.
    fn look_for_slow(&mut self, running: &mut Running, slow: Vec<SlowRank>) -> Option<Decision> {
        // A record that cannot be removed is judged once.
        if running.replacement.is_some() || slow.is_empty() || slow == running.slow {
            return None;
        }
        running.slow = slow;
        let others = self.hosts.replacement(&running.slow, &running.hosts, self.hosts(), self.processes);
        let can_replace = self.restarts.has_left() && others.is_some();
        Some(if can_replace { Decision::Ask(Patience::Once) } else { Decision::KeepSlow })
    }

    /// Decides after the launcher has ended.
    fn ended(&mut self, running: Running, ended: &Ended, at: &Moment) -> Decision {
        let Running { watch, hosts, added, replacement, growth, .. } = running;
        self.starts.note(watch.joined());
        let Err(failure) = ended.outcome(&watch, at.is_asked) else { return Decision::End(Ok(())) };
        let is_saved = at.is_asked && ended.has_saved();
        if let Some(lost) = lost(at, failure.kind, is_saved) {
            return Decision::End(Err(lost));
        }
        let grown = growth.filter(|growth| growth.is_asked).map(|growth| growth.found);
        if is_saved && (replacement.is_some() || grown.is_some() || ended.is_slow) {
            // The processes may have reported nothing, because they expected the run to continue.
            return Decision::End(Err(stopped_by_signal(&self.rules.folder)));
        }
        replacement.iter().for_each(|replacement| self.hosts.note_slow(&replacement.hosts));
        let has_stopped = failure.kind == ErrorKind::Interrupted && !at.is_asked;
        let why = match (replacement, grown) {
            (Some(replacement), _) if has_stopped => {
                let reason = "a host is slow";
                match self.restarts.next(replacement.failure(), ended.has_resumed) {
                    Ok(restart) => Ok((Why::Stopped(reason, Vec::new()), restart.record)),
                    Err(why) => Err(stopped(why, reason, at.is_asked, &self.rules.folder)),
                }
            }
            (_, Some(grown)) if has_stopped => {
                let record = self.restarts.grow(cause_of(&grown));
                Ok((Why::Stopped("more hosts answer", grown), record))
            }
            _ if at.is_asked => Err(failure),
            _ => self.after_fault(failure, ended, &hosts, &added).map(|restart| {
                let record = restart.record.clone();
                (Why::Fault(Box::new(restart)), record)
            }),
        };
        let (why, record) = match why {
            Ok(why) => why,
            Err(failure) => return Decision::End(Err(failure)),
        };
        let space = if let Why::Fault(restart) = &why { restart.space() } else { None };
        let (start, has_resumed) = (Start { record, ..Start::default() }, ended.has_resumed);
        let next = Next { why, before: hosts, added, has_resumed, start, ..Next::default() };
        let Some((space, note)) = space else { return self.prepare(next) };
        self.notes.push(note);
        self.state = State::Preparing(next);
        Decision::AwaitSpace(space)
    }

    /// Decides whether a restart follows a failure.
    fn after_fault(
        &mut self,
        failure: RunError,
        ended: &Ended,
        used: &[Host],
        added: &[String],
    ) -> Result<NextRestart, RunError> {
        let is_silent = failure.fault().is_none() && !ended.has_resumed;
        let failure = if !is_silent {
            failure
        } else if !added.is_empty() && failure.kind != ErrorKind::Interrupted {
            // The run continues on the hosts that it used before.
            failure.with_fault(Some(ended.failed_growth(added)))
        } else {
            let silent = "the processes ended before they had resumed the run; their message is above";
            RunError::new(failure.kind, silent)
        };
        let failure = self.hosts.leave_out_wrong(failure, used)?;
        self.restarts.next(failure, ended.has_resumed)
    }
}

/// Ends a run whose next attempt cannot be prepared.
fn refused(next: Next, why: RunError, folder: &Path, at: &Moment) -> Decision {
    match next.why {
        Why::First => Decision::End(Err(why)),
        // The failure is the reason for the end, although a signal came meanwhile.
        Why::Fault(restart) if at.is_asked => Decision::End(Err(restart.failure)),
        Why::Fault(restart) => refuse(restart.refused(why), at),
        Why::Stopped(reason, _) => refuse(stopped(why, reason, at.is_asked, folder), at),
    }
}

/// Ends a run with a failure, or with the loss of its folder, which explains the failure.
fn refuse(failure: RunError, at: &Moment) -> Decision {
    Decision::End(Err(lost(at, failure.kind, at.is_asked).unwrap_or(failure)))
}

/// Returns the failure of a run whose folder is lost, in place of an end of this kind. The processes' own reason counts if it
/// is not a consequence of the loss, and so does an end after a signal whose state `is_saved`.
fn lost(at: &Moment, kind: ErrorKind, is_saved: bool) -> Option<RunError> {
    let counts = !is_saved && !matches!(kind, ErrorKind::CheckFailed | ErrorKind::Bug);
    at.loss.as_ref().filter(|_| counts).map(|loss| RunError::new(ErrorKind::RankFailed, loss.clone()))
}

impl Growth {
    /// Decides about the hosts that were found, on which the run would have more processes if it `is_larger`.
    fn fitted(&mut self, is_larger: bool) -> Decision {
        if is_larger {
            return Decision::RequestGrowth(self.found.clone());
        }
        self.useless.clone_from(&self.found);
        Decision::Launcher(Order::Wait)
    }

    fn note_requested(&mut self, is_asked: bool) {
        self.is_asked = is_asked;
        if !is_asked {
            self.useless.clone_from(&self.found);
        }
    }
}

/// Returns words about hosts that answer again.
fn cause_of(hosts: &[String]) -> String {
    match hosts {
        [host] => format!("the host {host} answers"),
        hosts => format!("the hosts {} answer", hosts.join(" and ")),
    }
}

#[cfg(test)]
mod tests;
