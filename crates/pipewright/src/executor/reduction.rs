//! Sums of one stage's gradients over its replicas.
//!
//! # Protocol
//!
//! Every parameter's gradient is cut into as many parts as there are replicas ([`crate::tensor::shard`]). Each replica
//! sends every other replica its parts ([`Tag::GradientShard`]) and adds the parts that it receives, in the order of
//! the replicas: a reduce-scatter. If parameters are sharded, the reduction ends here, because a replica updates only
//! its own rows. Otherwise each replica sends its sums to all others ([`Tag::GradientSum`]): an all-gather, after which
//! every replica has the same bits. Sends do not wait, so no order of replicas can block another. The rank continues to
//! compute meanwhile, and takes arrived messages whenever it is polled.
//!
//! A parameter without a gradient on some replicas counts as zero there. One without a gradient on all replicas has no
//! sum.

use pipewright_schedule::StageIndex;

use super::machine::Executor;
use crate::collective::{Exchange, sum};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::shard::{RowShard, join};
use crate::tensor::{OptionalTensors, Value};

/// The gradients of a stage that are being summed.
pub(super) struct Reduction {
    stage: StageIndex,
    state: State,
}

enum State {
    /// The rank waits for the parts that this replica adds, from all replicas.
    Scattering(Exchange<OptionalTensors>),
    /// The rank waits for the sums of all replicas.
    Gathering(Exchange<OptionalTensors>),
    Done,
}

impl State {
    fn missing(&self) -> Option<AwaitedMessage> {
        match self {
            Self::Scattering(parts) | Self::Gathering(parts) => parts.missing(),
            Self::Done => None,
        }
    }
}

impl Executor {
    /// Returns whether gradients are summed over replicas at the end of this step.
    pub(super) fn reduces(&self) -> bool {
        self.endpoint.replica_count() > 1 && self.step.input.update
    }

    /// Starts to sum the stage's gradients, unless the sum has begun. Fails if a loss is not finite.
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
        let state = State::Scattering(Exchange::among(&replicas, tag, own));
        self.step.reductions.push(Reduction { stage, state });
        self.advance_reductions()
    }

    /// Cuts the stage's gradients into one list per replica. A gradient is dropped as soon as its parts have their own
    /// storage, so that the parts need no more memory than the gradients did.
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

    /// Takes the messages that have arrived for any stage, without waiting.
    pub(super) fn advance_reductions(&mut self) -> Result<(), Cause> {
        let mut reductions = std::mem::take(&mut self.step.reductions);
        for Reduction { stage, state } in &mut reductions {
            let former = std::mem::replace(state, State::Done);
            *state = self.advance_reduction(*stage, former)?;
        }
        self.step.reductions = reductions;
        Ok(())
    }

    fn advance_reduction(&mut self, stage: StageIndex, state: State) -> Result<State, Cause> {
        let device = self.local_stage(stage).runner.device().clone().inner();
        match state {
            State::Scattering(mut parts) => {
                if self.receive_tensors(&mut parts, &device)?.is_some() {
                    return Ok(State::Scattering(parts));
                }
                let sums = sum(parts.into_contents());
                if self.endpoint.part().is_some() {
                    self.set_gradients(stage, sums);
                    return Ok(State::Done);
                }
                let (tag, replicas) = (Tag::GradientSum { stage }, self.endpoint.replicas().clone());
                for (_, to) in replicas.others() {
                    self.send_copies(to, tag, sums.clone());
                }
                self.advance_reduction(stage, State::Gathering(Exchange::among(&replicas, tag, sums)))
            }
            State::Gathering(mut sums) => {
                if self.receive_tensors(&mut sums, &device)?.is_some() {
                    return Ok(State::Gathering(sums));
                }
                self.set_gradients(stage, joined(sums.into_contents()));
                Ok(State::Done)
            }
            State::Done => Ok(State::Done),
        }
    }

    fn set_gradients(&mut self, stage: StageIndex, gradients: OptionalTensors) {
        let runner = &mut self.local_stage(stage).runner;
        gradients.into_iter().enumerate().for_each(|(place, gradient)| runner.set_gradient(place, gradient));
    }

    /// Returns the message that the stage's reduction waits for; `None` if it is done or there is none.
    pub(super) fn awaited_reduction(&self, stage: StageIndex) -> Option<AwaitedMessage> {
        self.step.reductions.iter().find(|reduction| reduction.stage == stage)?.state.missing()
    }

    /// Returns the message that any stage's reduction waits for; `None` if all are done.
    pub(super) fn awaited_reductions(&self) -> Option<AwaitedMessage> {
        self.stages.iter().find_map(|stage| self.awaited_reduction(stage.index))
    }
}

/// Joins the parts of each replica to whole tensors. A tensor of which no replica has a part is absent.
pub(super) fn joined(parts: impl Iterator<Item = OptionalTensors>) -> OptionalTensors {
    let mut parts: Vec<_> = parts.map(Vec::into_iter).collect();
    let places = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..places).map(|_| join(parts.iter_mut().filter_map(|parts| parts.next().flatten()))).collect()
}
