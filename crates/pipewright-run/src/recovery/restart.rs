//! [`Restart`]: the record of a restart, which the resumed run writes into its metrics.
//!
//! `launch` writes the record into the folder of the run before it starts the processes again, and the
//! process that writes the metrics takes it from there. That process may be on another machine than the one
//! that decides. It accepts only the record of the restart that started it, because a restart that fails
//! leaves its record behind.

use std::time::Duration;

use pipewright_schedule::bytes::bytes_text as bytes;
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// The names of the events in the metrics.
const EVENT: &str = "restart";
const GROWTH: &str = "growth";

/// Where the state was from which a run continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateSource {
    /// In the memory of the hosts whose processes wrote it.
    Memory,
    /// At least a part was only in the memory of the host after the one whose process wrote it.
    Neighbour,
    /// On the disk.
    Disk,
}

/// A restart, or the continuation on more processes, as a line of the metrics has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// `restart`, or `growth` if the run continues on more processes.
    pub event: String,
    /// The last step whose result counts; the run continues after it.
    pub step: u64,
    /// The step that failed, of a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_step: Option<u64>,
    /// The rank that failed first, if it was a rank.
    pub rank: Option<u32>,
    /// The place and the cause in one line.
    pub cause: String,
    /// The number of this restart, from 1; of a growth, the number of restarts before it.
    pub restart: u64,
    /// The most restarts of this run; 0 of a growth.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub of: u64,
    /// How often the run has continued on more processes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub growths: u64,
    /// Where the state of `step` was, if the run has copies in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<StateSource>,
    /// The bytes of that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
    /// The milliseconds in which that state was found, sent to the hosts that lacked it, read and verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ms: Option<u64>,
    /// How the run is distributed from this restart on, if that has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

impl Restart {
    /// Returns the record of restart number `restart` of at most `of`, after a fault.
    pub fn after(fault: &Fault, restart: u64, of: u64) -> Self {
        Self {
            failed_step: Some(fault.step),
            rank: fault.rank,
            of,
            ..Self::new(EVENT, fault.summary.clone(), restart)
        }
    }

    /// Returns the record of growth number `growths`, after `restart` restarts.
    pub fn growth(cause: String, restart: u64, growths: u64) -> Self {
        Self { growths, ..Self::new(GROWTH, cause, restart) }
    }

    fn new(event: &str, cause: String, restart: u64) -> Self {
        Self { event: event.to_owned(), cause, restart, ..Self::default() }
    }

    /// Returns the number of the start that the record belongs to; 0 is the first start.
    pub fn number(&self) -> u64 {
        self.restart + self.growths
    }

    /// Returns the record of a run that continues after `step`, whose state of so many `bytes` was in
    /// `source` and read in the time `took`.
    pub fn with_state(self, step: u64, source: StateSource, bytes: u64, took: Duration) -> Self {
        let read_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        Self { step, state: Some(source), state_bytes: Some(bytes), read_ms: Some(read_ms), ..self }
    }

    /// Returns the sentence for the display.
    pub fn sentence(&self) -> String {
        let cost = self.cost();
        let source = match self.state {
            Some(StateSource::Memory) => format!(", which was read in memory {cost}"),
            Some(StateSource::Neighbour) => {
                format!(", which was read in memory {cost}, in part on the host after the one that wrote it")
            }
            Some(StateSource::Disk) => {
                format!(", which was read on the disk {cost}, because no newer copy in memory is complete")
            }
            None => String::new(),
        };
        match self.step {
            0 => self.saying("the run continues again from step 1"),
            step => self.saying(&format!("the run continues from step {step}{source}")),
        }
    }

    /// Returns words about what the state cost.
    fn cost(&self) -> String {
        let size = bytes(self.state_bytes.unwrap_or_default());
        let repeated = self.failed_step.map_or(0, |failed| failed.saturating_sub(self.step + 1));
        let took = self.read_ms.unwrap_or_default();
        format!("in {took} ms ({size}, {} computed again)", counted(repeated, "complete step"))
    }

    /// Returns the sentence for a restart before the run has begun or resumed.
    pub fn sentence_before_begin(&self) -> String {
        self.saying("the processes start again")
    }

    fn saying(&self, continuation: &str) -> String {
        let Self { cause, restart, of, change, .. } = self;
        let change = change.as_ref().map_or_else(String::new, |change| format!(", {change}"));
        let number = match self.failed_step {
            Some(_) => format!(" (restart {restart} of {of})"),
            None => String::new(),
        };
        format!("{cause}; {continuation}{change}{number}")
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_how_the_run_continues() {
        let fault = Fault {
            step: 7,
            rank: Some(1),
            cause: "it broke".to_owned(),
            summary: "step 7: rank 1: it broke".to_owned(),
            ..Fault::default()
        };
        let restart = Restart::after(&fault, 1, 3);
        assert_eq!(
            Restart { step: 4, ..restart.clone() }.sentence(),
            "step 7: rank 1: it broke; the run continues from step 4 (restart 1 of 3)"
        );
        let with = |source| restart.clone().with_state(5, source, 2048, Duration::from_millis(31)).sentence();
        for (source, expected) in [
            (
                StateSource::Memory,
                "step 5, which was read in memory in 31 ms (2.0 KiB, 1 complete step computed again) (",
            ),
            (StateSource::Neighbour, "in part on the host after the one that wrote it (restart 1 of 3)"),
            (StateSource::Disk, "step 5, which was read on the disk in 31 ms (2.0 KiB, 1 complete"),
        ] {
            assert!(with(source).contains(expected), "{}", with(source));
        }
        let smaller = Restart { change: Some("with 2 ranks instead of 4".to_owned()), ..restart };
        assert_eq!(
            smaller.sentence_before_begin(),
            "step 7: rank 1: it broke; the processes start again, with 2 ranks instead of 4 (restart 1 of 3)"
        );
        let growth = Restart::growth("the host b answers again".to_owned(), 1, 1);
        let json = r#"{"event":"growth","step":0,"rank":null,"cause":"the host b answers again","restart":1,"growths":1}"#;
        assert_eq!(serde_json::to_string(&growth).expect("JSON"), json);
        assert_eq!(serde_json::from_str::<Restart>(json).expect("a record"), growth);
        let larger = Restart { step: 4, change: Some("with 4 ranks instead of 2".to_owned()), ..growth };
        assert_eq!(
            larger.sentence(),
            "the host b answers again; the run continues from step 4, with 4 ranks instead of 2"
        );
    }
}
