//! Parameters that are spread over replicas: gathered before their stage computes, given up after it.
//!
//! # Protocol
//!
//! At `UNSHARD` a replica sends its rows of the stage's parameters to every other one ([`Tag::ParameterShard`]) and
//! goes on. The first computation that needs the parameters takes the others' rows, puts the whole parameters together,
//! and waits for what is missing. At `RESHARD` all but its own rows are dropped. Replicas run the same program, so what
//! one waits for another sends at the same place of it, and earlier than it waits itself: nothing can block.
//!
//! After the program no stage has more than its rows, which is what the optimizer sees.

use std::sync::Arc;

use burn::tensor::TensorData;
use pipewright_schedule::{Action, StageIndex};

use super::machine::Executor;
use super::reduction::joined;
use super::step::Phase;
use crate::collective::Round;
use crate::message::Tag;
use crate::progress::Waiting;

/// A parameter as it stands between two steps.
#[derive(Clone, Debug)]
pub struct NamedParameter {
    /// The stage that holds it.
    pub stage: StageIndex,
    /// Its global path.
    pub path: Arc<str>,
    /// Its values.
    pub data: TensorData,
}

impl Executor {
    /// `UNSHARD`, where parameters are sharded. Weight gradients need no parameters, so a gathering that serves them
    /// alone is left out, by all replicas alike.
    pub(super) fn unshard(&mut self, stage: StageIndex) {
        let rest = self.program.row(self.rank).iter().skip(self.step.position);
        if self.endpoint.part().is_some() && is_computed(stage, rest) {
            self.start_gather(stage);
        }
    }

    /// Sends this replica's rows of the stage's parameters to the others.
    fn start_gather(&mut self, stage: StageIndex) {
        let replicas = self.endpoint.replicas().clone();
        let local = self.local_stage(stage);
        let (rows, round) = (local.runner.rows(), local.gathers);
        local.gathers += 1;
        let tag = Tag::ParameterShard { stage, round };
        for (_, to) in replicas.others() {
            self.send_copies(to, tag, rows.clone());
        }
        self.local_stage(stage).gathering = Some(Round::new(tag, &replicas, rows));
    }

    /// Puts a stage's parameters in place if they are being gathered, or says what is missing.
    pub(super) fn fetch_parameters(&mut self, stage: StageIndex) -> Option<Waiting> {
        let mut round = self.local_stage(stage).gathering.take()?;
        if !self.poll_round(stage, &mut round) {
            let waiting = self.awaited_round(&round);
            self.local_stage(stage).gathering = Some(round);
            return waiting;
        }
        if let Some(latest) = round.latest() {
            self.note_exposed(latest);
        }
        self.local_stage(stage).runner.gather(joined(round.into_parts()));
        if self.step.phase == Phase::Actions {
            self.note_received(Action::Unshard { stage });
        }
        None
    }

    /// Drops what the stage has more than this replica's rows.
    pub(super) fn release(&mut self, stage: StageIndex) {
        let local = self.local_stage(stage);
        local.gathering = None;
        local.runner.release();
    }

    /// As [`Executor::release`], for all stages.
    pub(super) fn release_all(&mut self) {
        for local in &mut self.stages {
            local.gathering = None;
            local.runner.release();
        }
    }

    /// Collects the whole parameters of one stage; all replicas do so together. What is waited for, if anything.
    pub(super) fn poll_collect(&mut self, next: usize) -> Option<Waiting> {
        let is_sharded = self.endpoint.part().is_some();
        let Some(local) = self.stages.get(next) else {
            // As a step, it ends on no process before all ranks are through.
            match is_sharded {
                true => self.finish(),
                false => self.step.phase = Phase::Done,
            }
            return None;
        };
        let stage = local.stage;
        if is_sharded && local.gathers == 0 {
            self.start_gather(stage);
        }
        if let Some(waiting) = self.fetch_parameters(stage) {
            return Some(waiting);
        }
        let runner = &self.stages[next].runner;
        let named = runner.paths().iter().cloned().zip(runner.parameters());
        let named = named.map(|(path, data)| NamedParameter { stage, path, data });
        self.step.collected.extend(named);
        self.release(stage);
        self.board.moved(self.world_rank, 0);
        self.step.phase = Phase::Collect { next: next + 1 };
        None
    }
}

/// Whether a forward or a gradient of inputs of `stage` comes before the stage's parameters go.
fn is_computed<'a>(stage: StageIndex, rest: impl Iterator<Item = &'a Action>) -> bool {
    let held = rest.take_while(|action| **action != Action::Reshard { stage });
    held.flat_map(|action| action.parts()).any(|action| {
        let needs_parameters =
            matches!(action, Action::Forward { .. } | Action::Backward { .. } | Action::InputBackward { .. });
        needs_parameters && action.stage() == stage
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rest: &str, expected: bool) {
        let rest: Vec<Action> =
            rest.split_whitespace().map(|cell| cell.parse().expect("an action")).collect();
        assert_eq!(is_computed(StageIndex::new(1), rest.iter()), expected, "{rest:?}");
    }

    #[test]
    fn parameters_are_not_gathered_for_weight_gradients_only() {
        check("1UNSHARD 1W0 0F1 1W1 1RESHARD 1F2", false);
        check("1UNSHARD 1W0 1F1 1RESHARD", true);
        check("1UNSHARD 0F0 1I1 1RESHARD", true);
        check("1UNSHARD (0F7;1B3)OVERLAP_F_B 1RESHARD", true);
        check("1UNSHARD 0F0 0B0", false);
    }
}
