//! The result of a timed simulation.

use serde::Serialize;

use crate::timeline::Timeline;

/// The predicted run of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedRun {
    pub(super) timeline: Timeline,
    pub(super) exposed: Vec<f64>,
    pub(super) exchanges: Vec<PredictedExchange>,
}

/// How long a rank exchanges the tokens of experts.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PredictedExchange {
    /// The time of all exchanges, in seconds.
    pub seconds: f64,
    /// The part of it in which the rank does not compute because it waits for an exchange, in seconds.
    pub exposed: f64,
}

impl TimedRun {
    /// Returns all events. An overlap has two events, one for each half; if their stages have exchanges, the
    /// two overlap. An event of an action lasts until its last computation ends, with its exchanges, which
    /// also have spans of their own in [`Timeline::scopes`]. A
    /// backward that computes its forward again has the event of the forward before its own. The event of a
    /// send lasts while the message occupies its link, a receive's until the arrival, and a collective's
    /// until it is complete. They may overlap with computation of the rank. [`Timeline::skips`] has the
    /// messages of skip connections between ranks. On a communicator with queues, a message without a buffer
    /// has the same times at both ends: from when both run and the link is free until the arrival.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Returns the seconds in which each rank does not compute because a message to it or a collective is in
    /// flight. Waiting for a tensor that has not been computed yet does not count, and neither do exchanges
    /// ([`TimedRun::exchanges`]).
    pub fn exposed(&self) -> &[f64] {
        &self.exposed
    }

    /// Returns how long each rank exchanges the tokens of experts, and waits for that.
    pub fn exchanges(&self) -> &[PredictedExchange] {
        &self.exchanges
    }

    /// Returns the mean share of the makespan that is lost to exposed communication.
    pub fn exposed_fraction(&self) -> f64 {
        let whole = self.timeline.makespan() * self.exposed.len() as f64;
        if whole > 0.0 { self.exposed.iter().sum::<f64>() / whole } else { 0.0 }
    }
}
