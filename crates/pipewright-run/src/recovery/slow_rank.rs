//! [`SlowRank`]: the record of a rank that has become slow, or is no longer slow.

use pipewright_schedule::slow_ranks::{STEPS, SpeedChange};
use serde::{Deserialize, Serialize};

/// A change of a rank's speed, as a line of the metrics has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlowRank {
    /// The change.
    pub event: SpeedEvent,
    /// The step after which the rank is named.
    pub step: u64,
    /// The rank; several if they compute their stages together.
    pub ranks: Vec<u32>,
    /// The time of its actions in this step over their usual time.
    pub slowdown: f64,
}

/// The name of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeedEvent {
    /// The rank is slow.
    SlowRank,
    /// The rank is as fast as before.
    RankNoLongerSlow,
}

impl SlowRank {
    /// Returns the record of a change after a step of a run in which `tensor_ranks` ranks compute each stage
    /// together.
    pub fn after(step: u64, change: &SpeedChange, tensor_ranks: u32) -> Self {
        let first = change.rank.get() * tensor_ranks;
        let event = if change.is_slow { SpeedEvent::SlowRank } else { SpeedEvent::RankNoLongerSlow };
        Self { event, step, ranks: (first..first + tensor_ranks).collect(), slowdown: change.slowdown }
    }

    /// Returns the sentence for the display.
    pub fn sentence(&self) -> String {
        let Self { step, slowdown, .. } = self;
        let subject = match &self.ranks[..] {
            [rank] => format!("rank {rank}"),
            ranks => {
                let (first, last) = (ranks.first().unwrap_or(&0), ranks.last().unwrap_or(&0));
                format!("the tensor group of the ranks {first} to {last}")
            }
        };
        match self.event {
            SpeedEvent::SlowRank => format!(
                "step {step}: {subject} is slow: its actions take {slowdown:.1} times their usual time for {STEPS} steps, \
                 and those of the other ranks do not"
            ),
            SpeedEvent::RankNoLongerSlow => format!("step {step}: {subject} is no longer slow"),
        }
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::Rank;

    use super::*;

    #[test]
    fn a_record_names_the_ranks_of_the_world() {
        let change = SpeedChange { rank: Rank::new(1), is_slow: true, slowdown: 2.54 };
        let slow = SlowRank::after(12, &change, 1);
        assert_eq!(
            serde_json::to_string(&slow).expect("JSON"),
            r#"{"event":"slow_rank","step":12,"ranks":[1],"slowdown":2.54}"#
        );
        assert!(slow.sentence().starts_with("step 12: rank 1 is slow: its actions take 2.5 times"));
        let healed = SlowRank::after(20, &SpeedChange { is_slow: false, ..change }, 2);
        assert_eq!(healed.sentence(), "step 20: the tensor group of the ranks 2 to 3 is no longer slow");
    }
}
