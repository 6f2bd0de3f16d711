//! Verdicts on a program for the communicators of other systems, as `pipewright validate --transport` prints
//! them.

use std::fmt::Write;

use clap::Args;
use pipewright_schedule::communicator::{
    Communicator, Groups, Sends, Streams, UnknownStreams, Verdict, judge,
};
use pipewright_schedule::{Level, Program, Violations};
use serde_json::{Map, Value};

/// The arguments that choose communicators.
#[derive(Debug, Args)]
pub(crate) struct TransportArguments {
    /// Judge the program on a transport: buffered (messages are tagged and buffered), edge (one queue per
    /// directed pair of ranks), pair (one queue per pair of ranks), rank (one queue per rank), or all of them
    #[arg(long, value_name = "TRANSPORT", value_parser = transports)]
    transport: Option<Transports>,
    /// Messages of at most this size are sent without waiting for their receive; messages without a size
    /// count as smaller
    #[arg(long, value_name = "BYTES", requires = "transport")]
    eager: Option<u64>,
    /// The size of the messages between stage 0 and 1, between stage 1 and 2, and so on; the last size counts
    /// for the others
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', requires = "eager")]
    message_bytes: Vec<u64>,
    /// Sends and receives that follow each other start together, as PyTorch's batched exchanges do
    #[arg(long, requires = "transport")]
    grouped: bool,
}

/// The kinds of streams of `--transport`.
#[derive(Debug, Clone)]
struct Transports(Vec<Streams>);

fn transports(name: &str) -> Result<Transports, UnknownStreams> {
    Streams::parse_choice(name).map(Transports)
}

/// The verdicts on one program, by kind of streams.
pub(crate) struct Verdicts(Vec<(Streams, Verdict)>);

impl TransportArguments {
    pub(crate) fn is_given(&self) -> bool {
        self.transport.is_some()
    }

    /// Judges `program` on the chosen communicators; `None` if no transport was given.
    ///
    /// # Errors
    /// The violations that do not depend on the communicator.
    pub(crate) fn judge(&self, program: &Program, level: Level) -> Option<Result<Verdicts, Violations>> {
        let Transports(streams) = self.transport.as_ref()?;
        let verdict = |&streams: &Streams| Ok((streams, judge(program, level, &self.communicator(streams))?));
        Some(streams.iter().map(verdict).collect::<Result<_, _>>().map(Verdicts))
    }

    fn communicator(&self, streams: Streams) -> Communicator {
        let sends = Sends::eager_up_to(self.eager, self.message_bytes.clone());
        let groups = if self.grouped { Groups::Consecutive } else { Groups::Single };
        Communicator { streams, sends, groups }
    }
}

impl Verdicts {
    pub(crate) fn are_sound(&self) -> bool {
        self.0.iter().all(|(_, verdict)| verdict.is_sound())
    }

    /// Returns the transports on which the program is not sound, each with its verdict, such as
    /// `pair: may hang`.
    pub(crate) fn faults(&self) -> String {
        let faults = self.0.iter().filter(|(_, verdict)| !verdict.is_sound());
        faults
            .map(|(streams, verdict)| format!("{streams}: {}", verdict.word()))
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// Returns a table of the verdicts with what each of them assumes, and then the reasons of the bad ones.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{:9}  {:17}  assumes\n", "transport", "verdict");
        for (streams, verdict) in &self.0 {
            let (name, assumption) = (streams.name(), streams.assumption());
            writeln!(text, "{name:9}  {:17}  {assumption}", verdict.word()).expect("a string takes all text");
        }
        for (streams, verdict) in self.0.iter().filter(|(_, verdict)| !verdict.is_sound()) {
            writeln!(text, "\n{streams}: {verdict}").expect("a string takes all text");
        }
        text
    }

    /// Returns the verdict of each transport, and under `why` the first reason of each bad one.
    pub(crate) fn json(&self) -> Value {
        let words =
            self.0.iter().map(|(streams, verdict)| (streams.to_string(), Value::from(verdict.word())));
        let mut object: Map<String, Value> = words.collect();
        let why = self
            .0
            .iter()
            .filter_map(|(streams, verdict)| Some((streams.to_string(), first_reason(verdict)?.into())));
        object.insert("why".to_owned(), Value::Object(why.collect()));
        Value::Object(object)
    }
}

fn first_reason(verdict: &Verdict) -> Option<String> {
    let crossing = verdict.crossings.first().map(ToString::to_string);
    crossing.or_else(|| {
        let cycle: Vec<String> = verdict.cycle.iter().take(16).map(ToString::to_string).collect();
        (!cycle.is_empty()).then(|| cycle.join("; "))
    })
}
