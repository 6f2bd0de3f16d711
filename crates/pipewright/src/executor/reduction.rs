//! Sums of one stage's gradients over its replicas.
//!
//! # Protocol
//!
//! In a reduce-scatter, every parameter's gradient is cut into as many parts as the group has members
//! ([`crate::tensor::shard`]). Each member sends every other member its parts ([`Tag::GradientShard`]) and adds the parts
//! that it receives. In an all-gather, each member sends its sums to all others ([`Tag::GradientSum`]).
//!
//! If parameters are sharded, the replicas of a shard group begin with a reduce-scatter. A replica then has the group's sum
//! of its own rows, which are all that it updates. The replicas that hold the same rows, one of each shard group, add these
//! sums with a reduce-scatter and an all-gather, after which all of them have the same bits. A group with one member
//! exchanges nothing. So with one shard group only the first reduce-scatter remains, and without sharding only the other two
//! exchanges.
//!
//! Neighbours are added first (`collective/sum.rs`): the sum over groups of 1, 2, 4 or 8 replicas, and then over the groups,
//! has the bits of the sum over all replicas.
//!
//! Sends do not wait, so no order of replicas can block another. The rank continues to compute meanwhile, and takes arrived
//! messages whenever it is polled. A parameter without a gradient on some replicas counts as zero there. One without a
//! gradient on all replicas has no sum.

use pipewright_schedule::{Action, StageIndex};

use super::machine::Executor;
use crate::collective::{Exchange, Group, sum};
use crate::failure::Cause;
use crate::hook::{Place, ReduceRun, ReplicaPlace, check_sums};
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::shard::{RowShard, join};
use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// The gradients of a stage that are being summed.
pub(super) struct Reduction {
    stage: StageIndex,
    state: State,
}

enum State {
    /// The rank waits for its rows of the gradients of the shard group.
    Sharding(Exchange<OptionalTensors>),
    /// The rank waits for the parts that it adds, from the replicas that hold the same rows.
    Scattering(Exchange<OptionalTensors>),
    /// The rank waits for the sums of these replicas.
    Gathering(Exchange<OptionalTensors>),
    Done,
    /// A function of a hook makes the sums.
    Own,
}

impl State {
    fn missing(&self) -> Option<AwaitedMessage> {
        match self {
            Self::Sharding(parts) | Self::Scattering(parts) | Self::Gathering(parts) => parts.missing(),
            Self::Done | Self::Own => None,
        }
    }
}

impl Executor {
    /// Returns whether gradients are summed over replicas at the end of this step.
    pub(super) fn reduces(&self) -> bool {
        self.endpoint.replica_count() > 1 && self.step.input.update
    }

    /// Runs `REDUCE_GRAD`, or lets the hook run it.
    pub(super) fn reduce(&mut self, action: Action, stage: StageIndex) -> Result<(), Cause> {
        if let Some(hook) = self.hook.clone() {
            let (at, is_due) = (self.replica_place(action), self.reduces());
            let mut run = ReduceRun::new(at, &mut *self.local_stage(stage).runner, is_due);
            hook.reduce_grad(&mut run)?;
            if !run.is_asked() {
                if is_due {
                    self.step.reductions.push(Reduction { stage, state: State::Own });
                }
                return Ok(());
            }
        }
        self.start_reduction(stage)
    }

    /// Runs the hook's function for a `WAIT_REDUCE_GRAD` whose sums have arrived.
    pub(super) fn end_reduction(&mut self, action: Action, stage: StageIndex) -> Result<(), Cause> {
        let Some(hook) = self.hook.clone() else { return Ok(()) };
        let (at, is_due) = (self.replica_place(action), self.reduces());
        hook.wait_reduce_grad(&mut ReduceRun::new(at, &mut *self.local_stage(stage).runner, is_due))?;
        Ok(())
    }

    /// Returns the place of an action among all replicas.
    fn replica_place(&self, action: Action) -> ReplicaPlace {
        let place = Place { rank: self.world_rank, action };
        ReplicaPlace {
            place,
            replicas: self.endpoint.replica_count(),
            replica: self.endpoint.coord().replica,
        }
    }

    /// Checks the sums that a hook's functions have replaced, before they are used.
    pub(super) fn check_own_sums(&self) -> Result<(), Cause> {
        if self.hook.is_some() && self.reduces() {
            self.stages.iter().try_for_each(|stage| check_sums(&*stage.runner))?;
        }
        Ok(())
    }

    /// Starts to sum the stage's gradients, unless the sum has begun. Fails if a loss is not finite.
    pub(super) fn start_reduction(&mut self, stage: StageIndex) -> Result<(), Cause> {
        if !self.reduces() || self.step.reductions.iter().any(|reduction| reduction.stage == stage) {
            return Ok(());
        }
        self.read_losses()?;
        self.read_auxiliary()?;
        let (shards, copies) = (self.endpoint.shard_group().clone(), self.endpoint.copy_group().clone());
        let is_sharded = self.endpoint.row_shard().is_some();
        let group = if is_sharded { &shards } else { &copies };
        let runner = &mut self.local_stage(stage).runner;
        let taken = (0..runner.paths().len()).map(|place| {
            let gradient = runner.gradient(place);
            runner.set_gradient(place, None);
            gradient
        });
        let parts = cut(taken, group);
        let exchange = self.scatter(stage, group, parts);
        let state = if is_sharded { State::Sharding(exchange) } else { State::Scattering(exchange) };
        self.step.reductions.push(Reduction { stage, state });
        self.advance_reductions()
    }

    /// Sends each other member of the group its parts, and returns the exchange of this member's.
    fn scatter(
        &mut self,
        stage: StageIndex,
        group: &Group,
        mut parts: Vec<OptionalTensors>,
    ) -> Exchange<OptionalTensors> {
        let own = std::mem::take(&mut parts[group.place()]);
        let tag = Tag::GradientShard { stage };
        for (place, to) in group.others() {
            self.send_tensors(to, tag, std::mem::take(&mut parts[place]));
        }
        Exchange::among(group, tag, own)
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
            State::Sharding(mut parts) => {
                if self.receive_tensors(&mut parts, &device)?.is_some() {
                    return Ok(State::Sharding(parts));
                }
                let (sums, copies) = (sum(parts.into_contents()), self.endpoint.copy_group().clone());
                if copies.members().len() == 1 {
                    self.set_gradients(stage, sums);
                    return Ok(State::Done);
                }
                let exchange = self.scatter(stage, &copies, cut(sums, &copies));
                self.advance_reduction(stage, State::Scattering(exchange))
            }
            State::Scattering(mut parts) => {
                if self.receive_tensors(&mut parts, &device)?.is_some() {
                    return Ok(State::Scattering(parts));
                }
                let sums = sum(parts.into_contents());
                let (tag, copies) = (Tag::GradientSum { stage }, self.endpoint.copy_group().clone());
                for (_, to) in copies.others() {
                    self.send_copies(to, tag, sums.clone());
                }
                self.advance_reduction(stage, State::Gathering(Exchange::among(&copies, tag, sums)))
            }
            State::Gathering(mut sums) => {
                if self.receive_tensors(&mut sums, &device)?.is_some() {
                    return Ok(State::Gathering(sums));
                }
                self.set_gradients(stage, joined(sums.into_contents()));
                Ok(State::Done)
            }
            State::Done | State::Own => Ok(state),
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

/// Cuts gradients into one list for each member of the group. A gradient is dropped as soon as its parts have their own
/// storage, so that the parts need no more memory than the gradients did.
fn cut(gradients: impl IntoIterator<Item = OptionalTensor>, group: &Group) -> Vec<OptionalTensors> {
    let members = group.members().len();
    let mut lists = vec![OptionalTensors::new(); members];
    for gradient in gradients {
        for (list, part) in lists.iter_mut().zip(RowShard::all(members as u32)) {
            list.push(gradient.as_ref().and_then(|whole| part.cut(whole)).map(Value::copied));
        }
    }
    lists
}

/// Joins the parts of each replica to whole tensors. A tensor of which no replica has a part is absent.
pub(super) fn joined(parts: impl Iterator<Item = OptionalTensors>) -> OptionalTensors {
    let mut parts: Vec<_> = parts.map(Vec::into_iter).collect();
    let places = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..places).map(|_| join(parts.iter_mut().filter_map(|parts| parts.next().flatten()))).collect()
}
