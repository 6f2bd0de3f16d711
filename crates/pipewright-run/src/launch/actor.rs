//! [`Launch`]: carries out what the state machine decides: asks hosts, starts and ends the launcher, looks at its
//! processes, and writes into the folder of the run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{ErrorKind, RunError};
use crate::fault;
use crate::interrupt::Interrupt;
use crate::launch::answer::{Asked, HostKind, LONGEST_PATIENCE, Question};
use crate::launch::ended::Ended;
use crate::launch::events::{Decision, Event, Look, Moment, Patience, Start};
use crate::launch::hosts::{Host, is_this_machine, of_plan, require_first};
use crate::launch::layouts::{Distribution, Layout, Replanner, WholeRun};
use crate::launch::meeting;
use crate::launch::processes::{Launcher, end_before};
use crate::launch::signs::RunSigns;
use crate::launch::starter::Starter;
use crate::launch::state::{Machine, Rules};
use crate::launch::watch::{Order, Seen};
use crate::observer::Observer;
use crate::recovery::{GROWTH, RESTART, SLOW_RANKS, wait_for_space};
use crate::run_folder::RunLock;
use crate::settings::Settings;

/// The time between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(20);

/// The shortest time that a host may take to answer.
const SHORTEST_PATIENCE: Duration = Duration::from_secs(5);

/// The time that a host which has got a copy of this program may take to answer for the first time.
const FIRST_PATIENCE: Duration = Duration::from_secs(60);

/// The longest time in which processes that were killed end on this machine.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The longest time for which the lock of a dead process is waited for. A file system in a network keeps the locks of a
/// lost machine for about one and a half minutes.
const LONGEST_LOCK: Duration = Duration::from_secs(120);

/// A run whose ranks are processes, which the installed launcher of processes starts, and starts again after a fault.
pub struct Launch {
    /// The command that the processes run.
    pub target: Target,
    /// The hosts; none for this machine alone. The ranks of a plan for unlike ranks
    /// ([`profile_ranks`](crate::settings::pipeline::PipelineSettings::profile_ranks)) are on their slots.
    pub hosts: Vec<Host>,
    /// The program that starts processes there ([`Starter::find`]).
    pub starter: Starter,
    /// The most restarts.
    pub restarts: u64,
    /// Plans the run again for fewer ranks. Without it, the run keeps its schedule and its way of cutting.
    pub replanner: Option<Replanner>,
    /// Receives sentences about restarts.
    pub observer: Arc<dyn Observer>,
    /// Asks for the end of the run: its processes save a checkpoint and end.
    pub interrupt: Interrupt,
}

/// The command that the processes of a launch run.
pub struct Target {
    /// The arguments of this program that train or resume the run. `--set` arguments may follow them.
    pub words: Vec<String>,
    /// The arguments that resume the run in its folder.
    pub resumption: Vec<String>,
    /// The settings of the run, as the processes load them.
    pub settings: Settings,
    /// Whether `words` resume a run.
    pub resumes: bool,
    /// Returns whether the command can run with further settings.
    pub accepts: Accepts,
}

/// Returns whether a command can run with further settings.
pub type Accepts = Box<dyn Fn(&[String]) -> bool>;

impl Target {
    /// Returns arguments with further settings.
    pub fn with_settings(words: &[String], set: &[String]) -> Vec<String> {
        let set = set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
        words.iter().cloned().chain(set).collect()
    }
}

/// A launch under way.
struct Actor {
    launch: Launch,
    signs: RunSigns,
    layout: Layout,
    /// Whether the layout was changed before the run had begun, so that the words of the command need it.
    has_other_layout: bool,
    /// The run in its configured mesh, once it has begun and was interrupted.
    whole: Option<WholeRun>,
    /// The layout of the next attempt, with its configuration if the run has begun.
    fitted: Option<(Layout, Option<Distribution>)>,
    words: Vec<String>,
    /// The number of the start that runs, or ran last.
    number: u64,
    launcher: Option<Launcher>,
    /// The question to the hosts that the run does not use.
    asked: Option<Asked>,
}

impl Launch {
    /// Starts the processes, and starts them again after each fault, until the run ends.
    ///
    /// # Errors
    /// Fails if the processes cannot be started, or with the kind of error with which the run ends.
    pub fn run(self) -> Result<(), RunError> {
        let settings = &self.target.settings;
        let (folder, deadline) = (settings.run.out.clone(), settings.run.deadline());
        let layout = Layout::of(settings);
        let kind = match (self.starter.is_slurm(), self.starter.sends_files()) {
            (true, _) => HostKind::Slurm,
            (false, true) => HostKind::Apart,
            (false, false) => HostKind::Shared,
        };
        let hosts = of_plan(self.hosts.clone(), &settings.pipeline.profile_ranks)?;
        if kind == HostKind::Apart {
            require_first(self.hosts.first(), &hosts)?;
        }
        let rules = Rules { folder: folder.clone(), deadline, restarts: self.restarts, kind };
        let mut machine = Machine::new(rules, hosts, layout.processes(settings));
        let mut actor = Actor {
            signs: RunSigns::create(&folder, self.target.resumes)?,
            layout,
            has_other_layout: false,
            whole: None,
            fitted: None,
            words: self.target.words.clone(),
            number: 0,
            launcher: None,
            asked: None,
            launch: self,
        };
        let outcome = actor.run(&mut machine);
        actor.signs.remove();
        outcome
    }
}

impl Actor {
    /// Carries out one decision after the other.
    fn run(&mut self, machine: &mut Machine) -> Result<(), RunError> {
        let (began, mut event) = (Instant::now(), Event::Launched);
        let run = self.launch.target.settings.run.clone();
        let stop = self.launch.interrupt.clone();
        loop {
            let is_look = matches!(event, Event::Looked(_));
            let loss = if is_look { None } else { self.signs.loss() };
            let at = Moment { time: began.elapsed(), is_asked: stop.is_requested(), loss };
            let decision = machine.on(event, &at);
            machine.notes.drain(..).for_each(|note| self.launch.observer.note(&note));
            event = match decision {
                Decision::Ask(patience) => self.ask(patience, machine),
                Decision::AskAside(hosts) => {
                    self.asked = Some(self.question(hosts, self.number).ask_aside());
                    self.look()
                }
                Decision::Fit(slots) => Event::Fitted(self.fit(slots, machine)),
                Decision::AwaitSpace(space) => {
                    let has_space = wait_for_space(&run.out, space, run.deadline(), || stop.is_requested());
                    Event::Space(has_space)
                }
                Decision::Prepare(start) => Event::Prepared(self.prepare(start)),
                Decision::Start(start) => match self.start(&start, machine.processes()) {
                    Ok(()) => self.look(),
                    Err(error) => Event::Failed(error),
                },
                Decision::Launcher(order) => self.obey(order),
                Decision::RequestGrowth(hosts) => {
                    Event::GrowthRequested(GROWTH.leave(&run.out, &hosts).is_ok())
                }
                Decision::KeepSlow => {
                    SLOW_RANKS.remove(&run.out);
                    self.look()
                }
                Decision::End(outcome) => return outcome,
            };
        }
    }

    /// Asks all hosts.
    fn ask(&mut self, patience: Patience, machine: &mut Machine) -> Event {
        if machine.hosts().is_empty() {
            return Event::Answered(Ok(Vec::new()));
        }
        let hosts = machine.hosts().to_vec();
        let stop = self.launch.interrupt.clone();
        Event::Answered(match patience {
            Patience::Once => self.question(hosts, self.number).ask(&stop),
            Patience::First => self.first_question(hosts.clone()).ask(&stop).and_then(|answers| {
                let starter = &self.launch.starter;
                if starter.sends_files() && answers.iter().all(Result::is_ok) {
                    meeting::require(starter, &hosts, || stop.is_requested())?;
                }
                Ok(answers)
            }),
            Patience::UntilOneAnswers => {
                let question = self.question(hosts, self.number + 1);
                self.read_whole(machine).and_then(|()| question.ask_until_one_answers(&stop))
            }
        })
    }

    /// Returns the first question to hosts.
    fn first_question(&self, hosts: Vec<Host>) -> Question {
        let question = self.question(hosts, self.number);
        // Hosts that have got a copy of this program answer `ssh`, and read the copy for the first time.
        let patience = if self.launch.starter.sends_files() { FIRST_PATIENCE } else { question.patience };
        Question { patience, ..question }
    }

    /// Returns a question to hosts, which ends the processes of the starts before this number there.
    fn question(&self, hosts: Vec<Host>, number: u64) -> Question {
        let run = &self.launch.target.settings.run;
        Question {
            starter: self.launch.starter.clone(),
            hosts,
            folder: run.out.clone(),
            start: self.numbered(number),
            patience: run.deadline().clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE),
        }
    }

    /// Returns the start with a number. Its processes know the launch by its mark.
    fn numbered(&self, number: u64) -> fault::Start {
        fault::Start {
            number,
            leaves_out_hosts: false,
            sends_files: self.launch.starter.sends_files(),
            mark: Some(self.signs.mark().to_owned()),
        }
    }

    /// Reads the run once it has begun.
    fn read_whole(&mut self, machine: &mut Machine) -> Result<(), RunError> {
        if self.whole.is_some() || !self.signs.has_begun() {
            return Ok(());
        }
        let settings = &self.launch.target.settings;
        let set = if self.has_other_layout { Layout::of(settings).arguments(settings) } else { Vec::new() };
        let runs_here = machine.hosts().iter().any(|host| is_this_machine(&host.name));
        let whole = WholeRun::read(&settings.run.out, &set, runs_here, self.launch.replanner)?;
        if !self.has_other_layout {
            // With the schedule `auto`, the plan has chosen it.
            self.layout = whole.layout();
        }
        let grows_to = whole.grows().then(|| whole.processes(whole.layout()));
        machine.note_mesh(self.layout.processes(settings), grows_to);
        self.whole = Some(whole);
        Ok(())
    }

    /// Finds how the run continues on so many processes, and returns how many it needs.
    fn fit(&mut self, slots: u32, machine: &Machine) -> Result<u32, Option<RunError>> {
        let target = &self.launch.target;
        let accepts = |layout: Layout| (target.accepts)(&layout.arguments(&target.settings));
        let (layout, distribution) = match &self.whole {
            _ if machine.hosts().is_empty() => (self.layout, None),
            Some(whole) => {
                let distribution = whole.for_slots(slots).map_err(Some)?;
                (distribution.layout, Some(distribution))
            }
            None => (Layout::for_slots(&target.settings, slots, accepts).ok_or(None)?, None),
        };
        self.fitted = Some((layout, distribution));
        Ok(layout.processes(&target.settings))
    }

    /// Prepares the folder of the run and the words of the command, and leaves the record of a restart if the run has
    /// begun.
    fn prepare(&mut self, start: Start) -> Result<(), RunError> {
        let Start { mut record, slots, hosts, .. } = start;
        let target = &self.launch.target;
        let folder = &target.settings.run.out;
        let Some((layout, distribution)) = self.fitted.take() else {
            // The first start. A launch that was killed may have left its record.
            RESTART.remove(folder);
            return Ok(());
        };
        if self.signs.has_run() {
            // A process on another host may still end.
            let locked = RunLock::wait(folder, LONGEST_LOCK, || self.launch.interrupt.is_requested());
            locked.map_err(|error| RunError::new(ErrorKind::RankFailed, error))?;
        }
        record.change = match &distribution {
            Some(distribution) => distribution.change_from(self.layout, slots),
            None => layout.change_from(self.layout),
        };
        let has_changed = std::mem::replace(&mut self.layout, layout) != layout;
        // The run may be seen to begin after the layout was chosen.
        let has_begun = if hosts.is_empty() { self.signs.has_begun() } else { distribution.is_some() };
        if !has_begun {
            self.has_other_layout |= has_changed;
            let set = if self.has_other_layout { layout.arguments(&target.settings) } else { Vec::new() };
            self.launch.observer.note(&record.sentence_before_begin());
            self.words = Target::with_settings(&target.words, &set);
            return Ok(());
        }
        if let Some(distribution) = distribution.filter(|_| has_changed) {
            distribution.apply(folder)?;
        }
        RESTART.leave(folder, &record).map_err(|error| {
            RunError::input(format!("{}: the run cannot continue in this folder: {error}", folder.display()))
        })?;
        self.words.clone_from(&target.resumption);
        Ok(())
    }

    /// Starts the processes.
    fn start(&mut self, start: &Start, processes: u32) -> Result<(), RunError> {
        let Start { hosts, record, leaves_out_hosts, .. } = start;
        self.number = record.number();
        self.signs.clear(self.number)?;
        let start = fault::Start { leaves_out_hosts: *leaves_out_hosts, ..self.numbered(self.number) };
        let command = self.launch.starter.command(processes, hosts, &self.words, &start);
        self.launcher = Some(Launcher::start(command).inspect_err(|_| self.end_left_over())?);
        Ok(())
    }

    /// Does with the launcher what the machine orders, and looks again after a pause.
    fn obey(&mut self, order: Order) -> Event {
        let obeyed = self.launcher.as_ref().map_or(Ok(()), |launcher| launcher.obey(order));
        if let Err(error) = obeyed {
            self.end_left_over();
            return Event::Failed(error);
        }
        std::thread::sleep(PAUSE);
        self.look()
    }

    /// Looks at the launcher and its processes.
    fn look(&mut self) -> Event {
        let status = self.launcher.as_mut().map_or(Ok(None), Launcher::status);
        let is_stopped = self.launcher.as_ref().is_some_and(Launcher::is_stopped);
        match status {
            Ok(None) => Event::Looked(Look {
                seen: Seen { is_stopped, ..self.signs.look() },
                slow: SLOW_RANKS.find(&self.launch.target.settings.run.out).unwrap_or_default(),
                returned: self.asked.as_mut().and_then(Asked::poll),
            }),
            Ok(Some(status)) => {
                self.end_left_over();
                self.asked = None;
                let code = status.code();
                Event::Ended(Ended { code, status: status.to_string(), ..self.signs.end(code) })
            }
            Err(error) => {
                self.end_left_over();
                Event::Failed(error)
            }
        }
    }

    /// Ends processes on this machine whose launcher was killed: they may continue, and hold the lock of the folder.
    fn end_left_over(&self) {
        end_before(&self.numbered(self.number + 1), LONGEST_END);
    }
}
