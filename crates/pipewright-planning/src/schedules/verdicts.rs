//! Verdicts on a program for the communicators of other systems, as `pipewright validate --transport` prints
//! them.

use pipewright_schedule::communicator::{Communicator, Streams, Verdict, judge};
use pipewright_schedule::{Level, Program, Violations};
use serde_json::{Map, Value};

/// The verdicts on one program, by kind of streams.
pub(crate) struct Verdicts(Vec<(Streams, Verdict)>);

impl Verdicts {
    /// Judges `program` on communicators.
    ///
    /// # Errors
    /// The violations that do not depend on the communicator.
    pub(crate) fn of(program: &Program, level: Level, on: &[Communicator]) -> Result<Self, Violations> {
        let verdict = |on: &Communicator| Ok((on.streams, judge(program, level, on)?));
        on.iter().map(verdict).collect::<Result<_, _>>().map(Self)
    }

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
            text.push_str(&format!("{name:9}  {:17}  {assumption}\n", verdict.word()));
        }
        for (streams, verdict) in self.0.iter().filter(|(_, verdict)| !verdict.is_sound()) {
            text.push_str(&format!("\n{streams}: {verdict}\n"));
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
            .filter_map(|(streams, verdict)| Some((streams.to_string(), verdict.reason()?.into())));
        object.insert("why".to_owned(), Value::Object(why.collect()));
        Value::Object(object)
    }
}
