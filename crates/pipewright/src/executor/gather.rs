//! Parameters that are spread over replicas: gathered before their stage computes, given up after it.
//!
//! # Protocol
//!
//! At `UNSHARD` a replica sends its rows of the stage's parameters to every other one ([`Tag::ParameterShard`]) and goes
//! on. The first computation that needs the parameters takes the others' rows, puts the whole parameters together, and
//! waits for what is missing. At `RESHARD` all but its own rows are dropped. Replicas run the same program, so what one
//! waits for another sends at the same place of it, and earlier than it waits itself: nothing can block.
//!
//! After the program no stage has more than its rows, which is what the optimizer sees.

use pipewright_schedule::{Action, StageIndex};

use super::machine::Executor;
use super::reduction::joined;
use super::step::{Blocked, Phase};
use crate::collective::Round;
use crate::pipeline::NamedParameter;
use crate::transport::Tag;

/// Why a parameter is there after a gathering.
const EVERY_ROW: &str = "every row of a parameter is on some replica";

impl Executor {
    /// Sends this replica's rows of the stage's parameters to the others, where parameters are sharded.
    pub(super) fn start_gather(&mut self, stage: StageIndex) {
        if self.endpoint.part().is_none() {
            return;
        }
        let replicas = self.endpoint.replicas().clone();
        let chunk = self.chunk(stage);
        let (rows, round) = (chunk.runner.rows(), chunk.gathers);
        chunk.gathers += 1;
        let tag = Tag::ParameterShard { stage, round };
        for (_, to) in replicas.others() {
            self.send_copies(to, tag, rows.clone());
        }
        self.chunk(stage).gathering = Some(Round::new(tag, &replicas, rows));
    }

    /// Puts a stage's parameters in place if they are being gathered, or says what is missing.
    pub(super) fn fetch_parameters(&mut self, stage: StageIndex) -> Option<Blocked> {
        let mut round = self.chunk(stage).gathering.take()?;
        if !self.poll_round(&mut round) {
            let blocked = self.awaited_round(&round);
            self.chunk(stage).gathering = Some(round);
            return blocked;
        }
        if let Some(entered) = self.step.entered {
            self.note_exposed(entered);
        }
        let whole = joined(round.into_parts()).into_iter().map(|whole| whole.expect(EVERY_ROW)).collect();
        self.chunk(stage).runner.gather(whole);
        if self.step.phase == Phase::Actions {
            self.note_received(Action::Unshard { stage });
        }
        None
    }

    /// Drops what the stage has more than this replica's rows.
    pub(super) fn release(&mut self, stage: StageIndex) {
        let chunk = self.chunk(stage);
        chunk.gathering = None;
        chunk.runner.release();
    }

    /// As [`Executor::release`], for all stages.
    pub(super) fn release_all(&mut self) {
        for chunk in &mut self.chunks {
            chunk.gathering = None;
            chunk.runner.release();
        }
    }

    /// Collects the whole parameters of one stage; all replicas do so together. What is waited for, if anything.
    pub(super) fn poll_collect(&mut self, next: usize) -> Option<Blocked> {
        let Some(chunk) = self.chunks.get(next) else {
            self.step.phase = Phase::Done;
            return None;
        };
        let (stage, begins) = (chunk.stage, chunk.gathers == 0);
        if begins {
            self.start_gather(stage);
        }
        if let Some(blocked) = self.fetch_parameters(stage) {
            return Some(blocked);
        }
        let runner = &self.chunks[next].runner;
        let named = runner.paths().iter().cloned().zip(runner.parameters());
        let named = named.map(|(path, data)| NamedParameter { stage, path, data });
        self.step.collected.extend(named);
        self.release(stage);
        self.board.moved(self.world_rank, 0);
        self.step.phase = Phase::Collect { next: next + 1 };
        None
    }
}
