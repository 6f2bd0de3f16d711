//! `pipewright watch`: shows the steps of a run that another process trains, on any terminal that sees its folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use pipewright_document::text::quoted;
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_run::error::RunError;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::run_folder::config_of;
use pipewright_run::run_record::{MetricsLine, RunEvent, require_run};
use pipewright_run::run_watch::{Follower, News, recorded_overview};
use pipewright_run::training::load::load_settings;

use crate::display::Display;
use crate::signal;

/// The time between two looks at the metrics.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the metrics must stay as they are, without a process that writes them, until the run counts as ended. A
/// run that restarts writes again sooner.
const PATIENCE: Duration = Duration::from_secs(2);

/// The arguments of `pipewright watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArguments {
    /// The folder of the run
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
}

/// Runs the command.
pub(crate) fn run(arguments: &WatchArguments) -> Result<(), Failure> {
    let run = &arguments.run;
    require_run(run)?;
    let interrupt = Interrupt::default();
    signal::watch(&interrupt)
        .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    let mut follower = Follower::new(run);
    let mut watched = Watched::new(run);
    let mut since = Instant::now();
    loop {
        let news = follower.look()?;
        if news.is_whole || !news.records.is_empty() {
            since = Instant::now();
        }
        watched.show(news)?;
        if watched.is_complete() {
            let steps = watched.steps;
            watched.end(&format!("the run has taken all its {steps} steps"));
            return Ok(());
        }
        if interrupt.is_requested() {
            watched.end("the run continues without this display");
            return Ok(());
        }
        if since.elapsed() >= PATIENCE && !follower.is_under_way() {
            let (done, steps, run) = (watched.done, watched.steps, quoted(&run.to_string_lossy()));
            watched.end(&format!(
                "the run has ended after step {done} of {steps}; continue it with `pipewright resume {run}`"
            ));
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
}

/// The display of a run.
struct Watched<'a> {
    run: &'a Path,
    /// The display, from the first look on.
    display: Option<Display>,
    /// The number of steps of the whole run, and the number of finished steps.
    steps: u64,
    done: u64,
    /// The steps and the sentences of the events that the run has had.
    events: BTreeSet<(u64, String)>,
}

impl<'a> Watched<'a> {
    fn new(run: &'a Path) -> Self {
        Self { run, display: None, steps: u64::MAX, done: 0, events: BTreeSet::new() }
    }

    /// Shows what the run has written.
    fn show(&mut self, News { is_whole, records }: News) -> Result<(), Failure> {
        let is_first = self.display.is_none();
        if !is_first && !is_whole {
            records.iter().for_each(|record| self.add(record));
            return Ok(());
        }
        let config = config_of(self.run).map_err(RunError::input)?;
        // The configuration of a run that was resumed may have other steps.
        self.steps = load_settings(Some(&config), &[])?.settings.run.steps;
        let overview = recorded_overview(self.run)?;
        // A display that ends closes the screen, so this one ends before the next one begins.
        self.display = None;
        let mut display = Display::new(overview, 0, self.steps);
        let mut earlier = Vec::new();
        for record in &records {
            match record {
                MetricsLine::Step(step) => earlier.push(step.shown()),
                MetricsLine::Event(event) => self.note(event, !is_first),
            }
        }
        self.done = earlier.last().map_or(0, |metrics| metrics.step);
        display.recall(&earlier);
        self.display = Some(display);
        Ok(())
    }

    fn add(&mut self, record: &MetricsLine) {
        match record {
            MetricsLine::Step(step) => {
                self.done = step.step;
                self.display.iter_mut().for_each(|display| display.step(&step.shown()));
            }
            MetricsLine::Event(event) => self.note(event, true),
        }
    }

    /// Notes an event, and says it if it was not said before.
    fn note(&mut self, event: &RunEvent, is_said: bool) {
        let is_new = self.events.insert((event.step(), event.sentence()));
        if is_said && is_new {
            say(&event.sentence());
        }
    }

    fn is_complete(&self) -> bool {
        self.done >= self.steps
    }

    /// Leaves the last picture on the terminal, and says why it is the last one.
    fn end(mut self, reason: &str) {
        self.display.iter_mut().for_each(Display::finish);
        say(reason);
    }
}
