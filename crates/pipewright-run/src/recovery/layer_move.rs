//! [`LayerMove`]: the record of layers that have moved to other ranks, because ranks have become slower or faster.

use std::ops::Range;

use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::words::counted;
use serde::{Deserialize, Serialize};

/// The least slowdown that a sentence names, and the most speed-up.
const NAMED: [f64; 2] = [1.1, 0.9];

/// Layers that have moved to other ranks, as a line of the metrics has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerMove {
    /// The name of the event.
    pub event: MoveEvent,
    /// The step after which the layers have moved.
    pub step: u64,
    /// The layers that have moved from stage to stage, in their order.
    pub moves: Vec<MovedRun>,
    /// The time of each rank's actions over their usual time, by which the cut was chosen.
    pub slowdowns: Vec<f64>,
    /// The milliseconds of a step with the cut before, as predicted for these speeds.
    pub before_ms: f64,
    /// The milliseconds of a step with the cut after, as predicted for these speeds.
    pub after_ms: f64,
    /// The bytes that went from rank to rank.
    pub bytes: u64,
    /// The seconds of the move that were predicted.
    pub predicted_s: f64,
    /// The seconds of the move.
    pub seconds: f64,
}

/// The name of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveEvent {
    /// Layers have moved.
    LayerMove,
}

/// Consecutive layers that have moved together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedRun {
    /// The layers, counted from 0 in the whole model.
    pub layers: Range<usize>,
    /// The rank that had them.
    pub from: u32,
    /// The rank that has them.
    pub to: u32,
}

impl LayerMove {
    /// Returns the sentence for the display.
    pub fn sentence(&self) -> String {
        let Self { step, before_ms, after_ms, seconds, predicted_s, .. } = self;
        let moves: Vec<String> = self.moves.iter().map(MovedRun::words).collect();
        let reasons: Vec<String> = (0..).zip(&self.slowdowns).filter_map(reason).collect();
        let reason = if reasons.is_empty() {
            "the ranks are as fast as at first".to_owned()
        } else {
            reasons.join(", ")
        };
        format!(
            "step {step}: {} in {seconds:.2} s (predicted: {predicted_s:.2} s for {}), because {reason}: a step takes \
             {after_ms:.0} ms instead of {before_ms:.0} ms, as predicted",
            moves.join(", "),
            bytes_text(self.bytes)
        )
    }
}

impl MovedRun {
    fn words(&self) -> String {
        let Self { layers, from, to } = self;
        let layers = match layers.len() {
            1 => format!("layer {} moved", layers.start),
            _ => format!("layers {} to {} moved", layers.start, layers.end.saturating_sub(1)),
        };
        if from == to {
            format!("{layers} between stages of rank {from}")
        } else {
            format!("{layers} from rank {from} to rank {to}")
        }
    }
}

/// Returns the words for the speed of a rank; `None` if it is about the usual one.
fn reason((rank, &slowdown): (u32, &f64)) -> Option<String> {
    let is_named = slowdown >= NAMED[0] || slowdown <= NAMED[1];
    is_named.then(|| format!("rank {rank} takes {slowdown:.1} times its usual time"))
}

/// Returns the sentence about a better cut that a run cannot have.
pub(crate) fn kept(step: u64, layers: usize, reason: &str) -> String {
    format!(
        "step {step}: {} should move to other ranks, and stay where they are: {reason}",
        counted(layers, "layer")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(slowdowns: &[f64]) -> LayerMove {
        LayerMove {
            event: MoveEvent::LayerMove,
            step: 60,
            moves: vec![MovedRun { layers: 4..6, from: 1, to: 0 }, MovedRun { layers: 7..8, from: 1, to: 1 }],
            slowdowns: slowdowns.to_vec(),
            before_ms: 80.0,
            after_ms: 60.0,
            bytes: 3_000_000,
            predicted_s: 0.01,
            seconds: 0.02,
        }
    }

    #[test]
    fn a_sentence_names_layers_ranks_times_and_the_reason() {
        assert_eq!(
            moved(&[1.0, 2.0]).sentence(),
            format!(
                "step 60: layers 4 to 5 moved from rank 1 to rank 0, layer 7 moved between stages of rank 1 in 0.02 s \
                 (predicted: 0.01 s for {}), because rank 1 takes 2.0 times its usual time: a step takes 60 ms instead of \
                 80 ms, as predicted",
                bytes_text(3_000_000)
            )
        );
        assert!(moved(&[1.0, 1.05]).sentence().contains("because the ranks are as fast as at first: "));
    }

    #[test]
    fn a_line_comes_back() {
        let text = serde_json::to_string(&moved(&[1.0, 2.0])).expect("JSON");
        assert!(
            text.starts_with(r#"{"event":"layer_move","step":60,"moves":[{"layers":{"start":4,"end":6},"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<LayerMove>(&text).expect("a record"), moved(&[1.0, 2.0]));
    }
}
