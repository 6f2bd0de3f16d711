//! Gradients of one stage summed over its replicas.
//!
//! # Protocol
//!
//! Every parameter's gradient is cut into as many parts as there are replicas ([`crate::shard`]). Each replica sends
//! every other one that one's parts ([`Tag::GradientShard`]) and adds what it gets for its own, in the order of the
//! replicas: a reduce-scatter. Where parameters are sharded that is all, for a replica updates its own rows alone.
//! Otherwise it sends the sums to all ([`Tag::GradientSum`]): an all-gather, and every replica has the same bits. Sends
//! do not wait, so no order of replicas can block another. The rank computes on meanwhile; whenever it is polled it
//! takes what has come.
//!
//! A parameter without a gradient on some replicas counts as zero there; without one on all, it stays without.

use pipewright_schedule::{Rank, StageIndex};

use super::machine::Executor;
use crate::collective::{Round, sum};
use crate::failure::Cause;
use crate::message::Tag;
use crate::progress::Waiting;
use crate::tensor::shard::{RowShard, join};
use crate::tensor::{OptionalTensors, Value};

/// The gradients of a stage on their way.
pub(super) struct Reduction {
    stage: StageIndex,
    state: State,
}

enum State {
    /// OptionalTensors for this replica come from all.
    Scattering(Round),
    /// The sums of all replicas come.
    Gathering(Round),
    Done,
}

impl State {
    fn round(&self) -> Option<&Round> {
        match self {
            Self::Scattering(round) | Self::Gathering(round) => Some(round),
            Self::Done => None,
        }
    }
}

impl Executor {
    /// Whether gradients are summed over replicas at the end of this step.
    pub(super) fn reduces(&self) -> bool {
        self.endpoint.replica_count() > 1 && self.step.update_follows
    }

    /// Sends the stage's gradients on their way, unless they are already; not those of losses that are not finite.
    pub(super) fn start_reduction(&mut self, stage: StageIndex) -> Result<(), Cause> {
        if !self.reduces() || self.step.reductions.iter().any(|reduction| reduction.stage == stage) {
            return Ok(());
        }
        self.read_losses()?;
        self.read_auxiliary()?;
        let replicas = self.endpoint.replicas().clone();
        let mut parts = self.cut_gradients(stage);
        let own = std::mem::take(&mut parts[replicas.place()]);
        let tag = Tag::GradientShard { stage };
        for (place, to) in replicas.others() {
            self.send_tensors(to, tag, std::mem::take(&mut parts[place]));
        }
        let state = State::Scattering(Round::new(tag, &replicas, own));
        self.step.reductions.push(Reduction { stage, state });
        self.advance_reductions();
        Ok(())
    }

    /// Takes the stage's gradients apart, a list for each replica. Each goes as soon as its parts, in storage of their
    /// own, are there: so they need no more memory than the gradients did.
    fn cut_gradients(&mut self, stage: StageIndex) -> Vec<OptionalTensors> {
        let replicas = self.endpoint.replica_count();
        let runner = &mut self.local_stage(stage).runner;
        let mut lists = vec![OptionalTensors::new(); replicas as usize];
        for place in 0..runner.paths().len() {
            let gradient = runner.gradient(place);
            runner.set_gradient(place, None);
            for (list, part) in lists.iter_mut().zip(RowShard::all(replicas)) {
                list.push(gradient.as_ref().and_then(|whole| part.cut(whole)).map(Value::copied));
            }
        }
        lists
    }

    /// Takes what has come for any stage, without waiting.
    pub(super) fn advance_reductions(&mut self) {
        let mut reductions = std::mem::take(&mut self.step.reductions);
        for Reduction { stage, state } in &mut reductions {
            let former = std::mem::replace(state, State::Done);
            *state = self.advance(*stage, former);
        }
        self.step.reductions = reductions;
    }

    fn advance(&mut self, stage: StageIndex, state: State) -> State {
        match state {
            State::Scattering(mut round) => {
                if !self.poll_round(stage, &mut round) {
                    return State::Scattering(round);
                }
                let sums = sum(round.into_parts());
                if self.endpoint.part().is_some() {
                    self.set_gradients(stage, sums);
                    return State::Done;
                }
                let (tag, replicas) = (Tag::GradientSum { stage }, self.endpoint.replicas().clone());
                for (_, to) in replicas.others() {
                    self.send_copies(to, tag, sums.clone());
                }
                self.advance(stage, State::Gathering(Round::new(tag, &replicas, sums)))
            }
            State::Gathering(mut round) => {
                if !self.poll_round(stage, &mut round) {
                    return State::Gathering(round);
                }
                self.set_gradients(stage, joined(round.into_parts()));
                State::Done
            }
            State::Done => State::Done,
        }
    }

    fn set_gradients(&mut self, stage: StageIndex, gradients: OptionalTensors) {
        let runner = &mut self.local_stage(stage).runner;
        gradients.into_iter().enumerate().for_each(|(place, gradient)| runner.set_gradient(place, gradient));
    }

    /// Sends tensors to a rank of another replica. This rank goes on with what they are parts of, so they leave in
    /// storage of their own; encoding makes that too.
    pub(super) fn send_copies(&mut self, to: Rank, tag: Tag, mut tensors: OptionalTensors) {
        if self.endpoint.moves_storage() {
            tensors = tensors.into_iter().map(|tensor| tensor.map(Value::copied)).collect();
        }
        self.send_tensors(to, tag, tensors);
    }

    /// Takes what has come of a round among replicas for a stage of this rank; whether all is there.
    pub(super) fn poll_round(&mut self, stage: StageIndex, round: &mut Round) -> bool {
        let replicas = self.endpoint.replicas().clone();
        let device = self.local_stage(stage).runner.device().inner();
        round.poll(&replicas, |from, tag| {
            let (sent, tensors) = self.try_take_tensors(from, tag)?;
            let moved = tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(&device)));
            Some((sent, moved.collect()))
        })
    }

    /// What the stage's reduction waits for; none when it is done, or there is none.
    pub(super) fn awaited_reduction(&self, stage: StageIndex) -> Option<Waiting> {
        let reduction = self.step.reductions.iter().find(|reduction| reduction.stage == stage)?;
        self.awaited_round(reduction.state.round()?)
    }

    /// What a round among replicas waits for.
    pub(super) fn awaited_round(&self, round: &Round) -> Option<Waiting> {
        let from = round.missing(self.endpoint.replicas())?;
        Some(Waiting { from, tag: round.tag() })
    }

    /// What any stage's reduction waits for; none when all are done.
    pub(super) fn awaited_reductions(&self) -> Option<Waiting> {
        self.stages.iter().find_map(|local| self.awaited_reduction(local.stage))
    }
}

/// The wholes of which each replica sent a part; none where nobody has any.
pub(super) fn joined(parts: Vec<OptionalTensors>) -> OptionalTensors {
    let places = parts.iter().map(Vec::len).max().unwrap_or(0);
    let mut parts: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
    (0..places).map(|_| join(parts.iter_mut().filter_map(|parts| parts.next().flatten()))).collect()
}
