//! The phases after a rank's program: one function each, which does the next thing of its phase or says what it waits
//! for.

use std::time::Instant;

use pipewright_schedule::{Rank, StageIndex};

use super::machine::Executor;
use super::sharing::find_shared;
use super::step::Phase;
use crate::failure::Cause;
use crate::message::Tag;
use crate::progress::Waiting;

impl Executor {
    pub(super) fn end_of_program(&mut self) -> Result<Option<Waiting>, Cause> {
        self.release_all();
        self.read_losses()?;
        self.read_auxiliary()?;
        if self.program.is_forward_only() {
            self.finish();
        } else if !self.step.update_follows {
            self.accumulated += self.program.microbatches();
            self.finish();
        } else if self.reduces() {
            // The program may have started some of them.
            let stages: Vec<StageIndex> = self.stages.iter().map(|local| local.stage).collect();
            stages.into_iter().try_for_each(|stage| self.start_reduction(stage))?;
            self.step.phase = Phase::Replicas;
        } else {
            self.sum_all_shared();
        }
        Ok(None)
    }

    pub(super) fn poll_replicas(&mut self) -> Option<Waiting> {
        let waiting = self.awaited_reductions();
        if waiting.is_none() {
            self.board.moved(self.world_rank, self.step.position);
            self.step.reductions.clear();
            self.sum_all_shared();
        }
        waiting
    }

    fn sum_all_shared(&mut self) {
        self.send_shared();
        self.step.phase = Phase::Shared { next: 0 };
    }

    pub(super) fn poll_parameters(&mut self, next: Rank) -> Result<Option<Waiting>, Cause> {
        if next.get() == self.endpoint.ranks() {
            self.shared = Some(find_shared(&self.step.owned)?.into());
            self.step.phase = Phase::Done;
            return Ok(None);
        }
        if next != self.rank && !self.take_parameters(next) {
            return Ok(Some(self.waiting(next, Tag::Parameters)));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Parameters { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    pub(super) fn poll_shared(&mut self, next: u32) -> Option<Waiting> {
        if self.shared.as_ref().is_none_or(|shared| next as usize == shared.len()) {
            self.compute_norm_part();
            match self.endpoint.part() {
                Some(_) => self.step.phase = Phase::SquaredNorms { next: 0 },
                None => self.exchange_norm_parts(),
            }
            return None;
        }
        if let Some(waiting) = self.sum_shared(next) {
            return Some(waiting);
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Shared { next: next + 1 };
        None
    }

    pub(super) fn poll_squares(&mut self, next: usize) -> Option<Waiting> {
        let replicas = self.endpoint.replicas();
        if next == replicas.members().len() {
            self.add_square_sums();
            self.exchange_norm_parts();
            return None;
        }
        let (own, from) = (replicas.place(), replicas.members()[next]);
        if next != own && !self.take_square_sums(next) {
            return Some(Waiting { from, tag: Tag::SquaredNorms });
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::SquaredNorms { next: next + 1 };
        None
    }

    fn exchange_norm_parts(&mut self) {
        self.send_norm_part();
        self.step.phase = Phase::Norm { next: Rank::new(0) };
    }

    pub(super) fn poll_norm(&mut self, next: Rank) -> Result<Option<Waiting>, Cause> {
        if next.get() == self.endpoint.ranks() {
            self.step.norm = Some(self.gradient_norm()?);
            self.tell_ready();
            self.step.phase = Phase::Ready { next: 0 };
            return Ok(None);
        }
        if next != self.rank && !self.take_norm_part(next) {
            return Ok(Some(self.waiting(next, Tag::GradientNorm)));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Norm { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    pub(super) fn poll_ready(&mut self, next: usize) -> Option<Waiting> {
        let replicas = self.endpoint.replicas();
        if next == replicas.members().len() {
            self.step.phase = Phase::Update;
            return None;
        }
        let (own, from) = (replicas.place(), replicas.members()[next]);
        if next != own && self.endpoint.try_take_world(from, Tag::Ready).is_none() {
            return Some(Waiting { from, tag: Tag::Ready });
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Ready { next: next + 1 };
        None
    }

    pub(super) fn poll_update(&mut self) -> Result<Option<Waiting>, Cause> {
        let start = Instant::now();
        self.step.has_updated = true;
        self.update();
        self.step.update = start.elapsed();
        self.board.moved(self.world_rank, self.step.position);
        self.finish();
        Ok(None)
    }

    /// The rank has done its part. Across processes the step is done when all have.
    pub(super) fn finish(&mut self) {
        self.make_report();
        self.step.phase = match self.endpoint.is_distributed() {
            false => Phase::Done,
            true if self.world_rank.get() == 0 => Phase::Reports { next: Rank::new(1) },
            true => Phase::Summary,
        };
    }

    pub(super) fn poll_reports(&mut self, next: Rank) -> Result<Option<Waiting>, Cause> {
        if next.get() == self.endpoint.world_ranks() {
            self.send_summary();
            self.step.phase = Phase::Done;
            return Ok(None);
        }
        if !self.take_report(next)? {
            return Ok(Some(Waiting { from: next, tag: Tag::Report }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Reports { next: Rank::new(next.get() + 1) };
        Ok(None)
    }

    pub(super) fn poll_summary(&mut self) -> Result<Option<Waiting>, Cause> {
        if !self.take_summary()? {
            return Ok(Some(Waiting { from: Rank::new(0), tag: Tag::Summary }));
        }
        self.board.moved(self.world_rank, self.step.position);
        self.step.phase = Phase::Done;
        Ok(None)
    }
}
