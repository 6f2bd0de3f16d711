//! `checkpoint_every`, `failure_every` and `copies` of the `[run]` section: when a run saves checkpoints, and
//! where it keeps copies of its state.

use std::time::Duration;

use pipewright_document::Value;
use pipewright_schedule::bytes::parse_time;
use serde::Serialize;

use crate::settings::section::Section;

/// The word that leaves the steps between two checkpoints to the run.
const AUTO: &str = "auto";

/// The shortest and the longest time between failures, in seconds: the longest is 10,000 days.
const SECONDS: std::ops::RangeInclusive<f64> = 1.0..=864e6;

/// The hours of one rank between two failures, a published rate that is rounded: Llama 3 405B had 419
/// unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4), one in 50,700 hours
/// of a GPU.
const HOURS_OF_A_RANK: f64 = 50_000.0;
/// The longest time between failures that is expected, an assumption without a source. Small runs rarely lose
/// a device, but they end for other reasons: a machine that restarts, a limit of a batch system, a full disk.
const LONGEST_ASSUMED: Duration = Duration::from_secs(86_400);

/// Whose memory has the copies of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Copies {
    /// The memory of the machine that wrote them.
    Machine,
    /// Also the memory of the next host.
    Neighbour,
}

impl Copies {
    /// The words of the configuration.
    pub const NAMED: [(&str, Self); 2] = [("machine", Self::Machine), ("neighbour", Self::Neighbour)];
}

/// When a run saves checkpoints, besides the one at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointEvery {
    /// After so many steps; 0: never.
    Steps(u64),
    /// After a number of steps that the run chooses.
    Auto,
}

impl Serialize for CheckpointEvery {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Steps(steps) => serializer.serialize_u64(*steps),
            Self::Auto => serializer.serialize_str(AUTO),
        }
    }
}

/// A time between two failures, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureEvery(f64);

impl FailureEvery {
    /// Returns the expected time between two failures of a run with this many ranks that does not give one.
    pub fn assumed(ranks: u32) -> Duration {
        let seconds = HOURS_OF_A_RANK * 3600.0 / f64::from(ranks.max(1));
        LONGEST_ASSUMED.min(Duration::from_secs_f64(seconds))
    }

    /// Returns the time.
    pub fn time(self) -> Duration {
        Duration::from_secs_f64(self.0)
    }
}

impl Serialize for FailureEvery {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}s", self.0))
    }
}

/// Reads the steps between two checkpoints.
pub(super) fn read_every(section: &mut Section<'_>) -> CheckpointEvery {
    const KEY: &str = "checkpoint_every";
    match section.value(KEY).and_then(Value::as_text) {
        Some(AUTO) => CheckpointEvery::Auto,
        Some(_) => {
            section.wrong_type::<()>(KEY, "a whole number or \"auto\"");
            CheckpointEvery::Steps(0)
        }
        None => CheckpointEvery::Steps(section.whole(KEY)),
    }
}

/// Reads the expected time between two failures, which has an effect only if the run chooses the steps
/// between two checkpoints. An argument may replace the choice of a file by a number of steps; the time is
/// then left out.
pub(super) fn read_failure_every(
    section: &mut Section<'_>,
    checkpoint_every: CheckpointEvery,
) -> Option<FailureEvery> {
    const KEY: &str = "failure_every";
    let text = section.text(KEY)?;
    let read = parse_time(&text, SECONDS).map(FailureEvery);
    if read.is_none() {
        let range = "a time from 1s to 10000d, such as \"90m\", \"24h\" or \"7d\"";
        section.out_of_range::<()>(KEY, &format!("{text:?}"), range);
    } else if checkpoint_every != CheckpointEvery::Auto {
        if !section.is_argument("checkpoint_every") || section.is_argument(KEY) {
            let other = "`checkpoint_every = \"auto\"`";
            let advice = "write `checkpoint_every = \"auto\"` in [run], or remove the key";
            section.report_without(KEY, other, advice);
        }
        return None;
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_runs_expect_more_failures() {
        assert_eq!(FailureEvery::assumed(0), LONGEST_ASSUMED);
        assert_eq!(FailureEvery::assumed(2000), LONGEST_ASSUMED);
        assert_eq!(FailureEvery::assumed(16_000).as_secs(), 11_250);
    }
}
