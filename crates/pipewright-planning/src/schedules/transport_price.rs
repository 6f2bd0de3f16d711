//! Simulates a program on the communicators of other systems, and prints what each of them costs against
//! buffered messages.

use pipewright_schedule::communicator::{Communicator, Streams, Verdict};
use pipewright_schedule::simulate::{SimulateError, TimedRun, timed, timed_on};
use pipewright_schedule::{Costs, Program};
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::schedules::timed_program::TimedProgram;
use crate::schedules::transport::TransportArguments;

/// A program, its costs, and the time of the step after the program.
pub(crate) struct Priced<'a> {
    pub(crate) timed_program: &'a TimedProgram,
    pub(crate) costs: &'a Costs,
    /// The time of the optimizer, in the unit of the costs.
    pub(crate) optimizer: f64,
}

/// The time of a step on a transport, compared with the time with buffered messages.
#[derive(Serialize)]
pub(crate) struct Price {
    transport: &'static str,
    /// The time with buffered messages.
    buffered_makespan: f64,
    /// How much longer the step takes, as a share of the time with buffered messages.
    price: f64,
}

/// The simulation of a program on a transport, or the verdict that it is not sound there.
struct OnTransport {
    streams: Streams,
    outcome: Result<TimedRun, Box<Verdict>>,
}

impl Price {
    /// Compares the times of a step.
    fn of(streams: Streams, makespan: f64, buffered_makespan: f64) -> Self {
        let price = if buffered_makespan > 0.0 { makespan / buffered_makespan - 1.0 } else { 0.0 };
        Self { transport: streams.name(), buffered_makespan, price }
    }

    /// Returns the transport and its price, on one line. `time` formats a time with its unit.
    pub(crate) fn text(&self, time: impl Fn(f64) -> String) -> String {
        let Self { transport, buffered_makespan, price } = self;
        let buffered = time(*buffered_makespan);
        let share = percent(price.abs());
        if share == "0.0%" {
            return format!("{transport}: as fast as buffered messages");
        }
        let word = if *price < 0.0 { "shorter" } else { "longer" };
        format!("{transport}: {share} {word} than the {buffered} with buffered messages")
    }
}

impl Priced<'_> {
    /// Returns the communicators of `arguments`. Messages have the sizes of the costs if no others are given.
    pub(crate) fn communicators(&self, arguments: &TransportArguments) -> Vec<Communicator> {
        arguments.communicators_at(self.costs, self.program())
    }

    /// Simulates the program on `communicator`.
    ///
    /// # Errors
    /// When the program is not sound on the communicator.
    pub(crate) fn simulate(&self, communicator: &Communicator) -> Result<TimedRun, Failure> {
        self.run(communicator).map_err(|error| self.failure(error))
    }

    /// Returns the price of `run`, which ran on `streams`. A program that is sound with queues is also sound with
    /// buffered messages.
    ///
    /// # Errors
    /// When the simulation with buffered messages fails.
    pub(crate) fn price(&self, run: &TimedRun, streams: Streams) -> Result<Price, Failure> {
        let buffered = match streams {
            Streams::Buffered => self.step(run),
            _ => self.step(&timed(self.program(), self.costs).map_err(|error| self.failure(error))?),
        };
        Ok(Price::of(streams, self.step(run), buffered))
    }

    /// Simulates the program on several communicators, and returns a table of the results, as text or as JSON.
    ///
    /// # Errors
    /// When the program is not sound on any of them.
    pub(crate) fn compare(&self, communicators: &[Communicator], as_json: bool) -> Result<String, Failure> {
        let mut all = Vec::new();
        for communicator in communicators {
            let outcome = match self.run(communicator) {
                Ok(run) => Ok(run),
                Err(SimulateError::Unsound { verdict, .. }) => Err(verdict),
                Err(error) => return Err(self.failure(error)),
            };
            all.push(OnTransport { streams: communicator.streams, outcome });
        }
        let is_first = |one: &&OnTransport| one.streams == Streams::Buffered;
        let buffered = all.iter().find(is_first).and_then(|one| one.outcome.as_ref().ok());
        let Some(buffered) = buffered.map(|run| self.step(run)) else {
            let verdict = all.into_iter().find_map(|one| one.outcome.err()).unwrap_or_default();
            let streams = Streams::Buffered;
            return Err(self.failure(SimulateError::Unsound { streams, verdict }));
        };
        Ok(if as_json { self.json(&all, buffered) } else { self.text(&all, buffered) })
    }

    fn text(&self, all: &[OnTransport], buffered: f64) -> String {
        let mut text = self.timed_program.title() + "\n";
        let unit = self.timed_program.unit;
        let longest = all.iter().filter_map(|one| Some(self.step(one.outcome.as_ref().ok()?)));
        let longest = longest.fold(0.0, f64::max);
        let mut row = |cells: [&str; 6]| {
            let [name, verdict, time, price, bubble, exposed] = cells;
            let row = format!("{name:9}  {verdict:17}  {time:>10}  {price:>8}  {bubble:>6}  {exposed:>7}");
            text.push_str(&format!("{}\n", row.trim_end()));
        };
        row(["transport", "verdict", "time", "price", "bubble", "exposed"]);
        for OnTransport { streams, outcome } in all {
            match outcome {
                Ok(run) => {
                    let time = unit.format(self.step(run), longest);
                    let price = signed(Price::of(*streams, self.step(run), buffered).price);
                    let bubble = percent(run.timeline().bubble_fraction());
                    row([streams.name(), "sound", &time, &price, &bubble, &percent(run.exposed_fraction())]);
                }
                Err(verdict) => row([streams.name(), verdict.word(), "", "", "", ""]),
            }
        }
        for OnTransport { streams, outcome } in all {
            if let Err(verdict) = outcome {
                text.push_str(&format!("\n{streams}: {verdict}\n"));
            }
        }
        text
    }

    fn json(&self, all: &[OnTransport], buffered: f64) -> String {
        let one = |OnTransport { streams, outcome }: &OnTransport| -> Value {
            match outcome {
                Ok(run) => json!({
                    "transport": streams.name(), "verdict": "sound", "makespan": self.step(run),
                    "price": Price::of(*streams, self.step(run), buffered).price,
                    "bubble_fraction": run.timeline().bubble_fraction(),
                    "exposed_comm_fraction": run.exposed_fraction(),
                    "queue_waits": run.timeline().queue_waits().len(),
                }),
                Err(verdict) => json!({
                    "transport": streams.name(), "verdict": verdict.word(), "why": verdict.reason(),
                }),
            }
        };
        let transports: Vec<Value> = all.iter().map(one).collect();
        json!({ "transports": transports }).to_string() + "\n"
    }

    fn run(&self, communicator: &Communicator) -> Result<TimedRun, SimulateError> {
        timed_on(self.program(), self.costs, communicator)
    }

    fn program(&self) -> &Program {
        &self.timed_program.program
    }

    /// Returns the time of a step with the optimizer.
    fn step(&self, run: &TimedRun) -> f64 {
        run.timeline().makespan() + self.optimizer
    }

    fn failure(&self, error: SimulateError) -> Failure {
        match error {
            SimulateError::Costs(error) => Failure::input(error),
            error => Failure::new(Exit::CheckFailed, format!("{}: {error}", self.timed_program.name)),
        }
    }
}

/// Returns a price with its sign; a price that rounds to 0 has a plus.
fn signed(price: f64) -> String {
    let sign = if (price * 1000.0).round() < 0.0 { '-' } else { '+' };
    format!("{sign}{}", percent(price.abs()))
}

fn percent(fraction: f64) -> String {
    format!("{:.1}%", fraction * 100.0)
}
