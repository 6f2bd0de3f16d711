//! Sums of one stage's gradients over its replicas.
//!
//! # Protocol
//!
//! In a reduce-scatter, every parameter's gradient is cut into as many parts as the group has members
//! ([`crate::tensor::shard`]). Each member sends every other member its parts ([`Tag::GradientShard`]) and
//! adds the parts that it receives. In an all-gather, each member sends its sums to all others
//! ([`Tag::GradientSum`]).
//!
//! If parameters are sharded, the replicas of a shard group begin with a reduce-scatter. A replica then has
//! the group's sum of its own rows, which are all that it updates. The replicas that hold the same rows, one
//! of each shard group, add these sums with a reduce-scatter and an all-gather, after which all of them have
//! the same bits. A group with one member exchanges nothing. So with one shard group only the first
//! reduce-scatter remains, and without sharding only the other two exchanges.
//!
//! In a repetition of a step, replicas have other shares of the batch ([`crate::verification`]). The parts
//! are then added in the order of the shares, so that the sums have the same bits.
//!
//! Neighbours are added first (`collective/sum.rs`): the sum over groups of 1, 2, 4 or 8 replicas, and then
//! over the groups, has the bits of the sum over all replicas.
//!
//! The gradients of experts that replicas hold together have messages of their own, among the replicas that
//! hold the same experts. Each of these replicas first adds the gradients of its group's tokens, one sum for
//! each replica of the group. An expert group has 2, 4, 8 or more replicas, or it has all of them, so it does
//! not change the bits either ([`crate::mesh::Mesh::expert_groups`]). If parameters are sharded, fewer
//! replicas of a shard group hold an expert, and each of them holds more of its rows; in a shard group that
//! is not larger than an expert group, one replica holds all rows ([`crate::mesh::Mesh::groups_fit`]).
//!
//! Sends do not wait, so no order of replicas can block another. The rank continues to compute meanwhile, and
//! takes arrived messages whenever it is polled. A parameter without a gradient on some replicas counts as
//! zero there. One without a gradient on all replicas has no sum.

use pipewright_schedule::{Action, StageIndex};

use super::connection::Connection;
use super::context::RankContext;
use super::stages::{LocalStage, LocalStages};
use crate::collective::{Exchange, Group, sum};
use crate::failure::Cause;
use crate::hook::{Place, ReduceRun, ReplicaPlace};
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::shard::{RowShard, RowShards, join};
use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// The gradients of a step that are being summed over the replicas. The sums may start before the program
/// ends.
#[derive(Default)]
pub(super) struct Reductions {
    stages: Vec<Reduction>,
    /// The repetition of the step, which gives the shares of the batch to other replicas.
    repetition: u32,
}

/// Gradients of a stage that are being summed.
struct Reduction {
    stage: StageIndex,
    part: StagePart,
    state: State,
}

/// The parameters of a stage whose gradients the same replicas sum.
struct StagePart {
    /// The indices of the parameters.
    parameters: Vec<usize>,
    /// Whether they are the experts that only some replicas hold.
    of_experts: bool,
}

impl StagePart {
    /// Returns the replicas that hold the same rows of the parameters.
    fn copies<'a>(&self, context: &'a RankContext) -> &'a Group {
        if self.of_experts { &context.expert_row_group } else { &context.copy_group }
    }

    /// Returns the replicas of a shard group that hold the parameters together.
    fn sharers<'a>(&self, context: &'a RankContext) -> &'a Group {
        if self.of_experts { &context.expert_shard_group } else { &context.shard_group }
    }

    /// Returns the rows that this replica holds if parameters are sharded.
    fn row_shard(&self, RowShards { experts, others }: RowShards) -> RowShard {
        if self.of_experts { experts } else { others }
    }

    fn shard_tag(&self, stage: StageIndex) -> Tag {
        Tag::GradientShard { stage, of_experts: self.of_experts }
    }
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

impl Reductions {
    /// Begins a computation of a step. `repetition` is 0 in the first one.
    pub(super) fn begin(&mut self, repetition: u32) {
        *self = Self { stages: Vec::new(), repetition };
    }

    /// Returns whether the sum of a stage has begun.
    pub(super) fn has(&self, stage: StageIndex) -> bool {
        self.stages.iter().any(|reduction| reduction.stage == stage)
    }

    /// Leaves the sum of a stage to a function of a hook.
    pub(super) fn leave_to_hook(&mut self, stage: StageIndex) {
        let part = StagePart { parameters: Vec::new(), of_experts: false };
        self.stages.push(Reduction { stage, part, state: State::Own });
    }

    /// Starts to sum a stage's gradients.
    pub(super) fn start(
        &mut self,
        context: &RankContext,
        connection: &mut Connection,
        stage: &mut LocalStage,
    ) -> Result<(), Cause> {
        add_sources(stage);
        let index = stage.index;
        let is_of_experts = |&parameter: &usize| stage.runner().table().is_on_one_replica(parameter);
        let (experts, others): (Vec<usize>, Vec<usize>) =
            (0..stage.runner().table().paths.len()).partition(is_of_experts);
        let others = StagePart { parameters: others, of_experts: false };
        let experts = StagePart { parameters: experts, of_experts: true };
        for part in [others, experts] {
            let is_alone =
                [part.sharers(context), part.copies(context)].iter().all(|group| group.members().len() == 1);
            if part.of_experts && (part.parameters.is_empty() || is_alone) {
                continue;
            }
            let runner = stage.runner_mut();
            let taken = part.parameters.iter().map(|&parameter| {
                let gradient = runner.sums().get(parameter);
                runner.sums_mut().set(parameter, None);
                gradient
            });
            let tag = part.shard_tag(index);
            let state = match context.row_shards() {
                Some(shards) => {
                    let parts = cut(taken, part.row_shard(shards).all_alike());
                    State::Sharding(scatter(connection, tag, part.sharers(context), parts))
                }
                None => {
                    let copies = part.copies(context);
                    State::Scattering(scatter(connection, tag, copies, cut_for(taken, copies)))
                }
            };
            let state = Sum { context, part: &part, repetition: self.repetition }
                .advance(connection, stage, state)?;
            self.stages.push(Reduction { stage: index, part, state });
        }
        Ok(())
    }

    /// Takes the messages that have arrived for any stage, without waiting.
    pub(super) fn advance(
        &mut self,
        context: &RankContext,
        connection: &mut Connection,
        stages: &mut LocalStages,
    ) -> Result<(), Cause> {
        for Reduction { stage, part, state } in &mut self.stages {
            let former = std::mem::replace(state, State::Done);
            let sum = Sum { context, part, repetition: self.repetition };
            *state = sum.advance(connection, stages.get_mut(*stage), former)?;
        }
        Ok(())
    }

    /// Returns the message that the stage's sum waits for; `None` if it is done or there is none.
    pub(super) fn awaited(&self, stage: StageIndex) -> Option<AwaitedMessage> {
        self.stages.iter().filter(|reduction| reduction.stage == stage).find_map(|sum| sum.state.missing())
    }

    /// Returns the message that the sum of any stage waits for, in the order of the stages; `None` if all are
    /// done.
    pub(super) fn awaited_by_any(&self, stages: &LocalStages) -> Option<AwaitedMessage> {
        stages.iter().find_map(|stage| self.awaited(stage.index))
    }

    /// Forgets the sums, which are in the stages.
    pub(super) fn clear(&mut self) {
        self.stages.clear();
    }
}

/// Lets the hook run a `REDUCE_GRAD`. Returns whether the sum over the replicas shall begin; `is_due` says
/// whether the step has one.
pub(super) fn run_reduce_hook(
    context: &RankContext,
    stage: &mut LocalStage,
    action: Action,
    is_due: bool,
) -> Result<bool, Cause> {
    let Some(hook) = context.hook() else { return Ok(true) };
    let mut run = ReduceRun::new(replica_place(context, action), stage.runner_mut(), is_due);
    hook.reduce_grad(&mut run)?;
    Ok(run.is_asked())
}

/// Runs the hook's function for a `WAIT_REDUCE_GRAD` whose sums have arrived.
pub(super) fn run_wait_hook(
    context: &RankContext,
    stage: &mut LocalStage,
    action: Action,
    is_due: bool,
) -> Result<(), Cause> {
    let Some(hook) = context.hook() else { return Ok(()) };
    hook.wait_reduce_grad(&mut ReduceRun::new(replica_place(context, action), stage.runner_mut(), is_due))?;
    Ok(())
}

/// Returns the place of an action among all replicas.
fn replica_place(context: &RankContext, action: Action) -> ReplicaPlace {
    let place = Place { rank: context.world_rank, action };
    ReplicaPlace { place, replicas: context.replica_count(), replica: context.replica() }
}

/// Adds the gradients of each expert over the replicas whose tokens have reached it. Other parameters do not
/// change.
pub(super) fn add_sources(stage: &mut LocalStage) {
    let runner = stage.runner_mut();
    for parameter in 0..runner.table().paths.len() {
        if runner.table().is_on_one_replica(parameter) {
            let sources = runner.sums_mut().take_sources(parameter);
            let total = sum(sources.into_iter().map(|gradient| vec![gradient])).pop().flatten();
            runner.sums_mut().set(parameter, total);
        }
    }
}

/// Sends each other member of the group its parts, and returns the exchange of this member's.
fn scatter(
    connection: &mut Connection,
    tag: Tag,
    group: &Group,
    mut parts: Vec<OptionalTensors>,
) -> Exchange<OptionalTensors> {
    let own = std::mem::take(&mut parts[group.index()]);
    for (index, to) in group.others() {
        connection.send_tensors(to, tag, std::mem::take(&mut parts[index]));
    }
    Exchange::among(group, tag, own)
}

/// The sum of one part of a stage, in a computation of a step.
struct Sum<'a> {
    context: &'a RankContext,
    part: &'a StagePart,
    /// The repetition of the step.
    repetition: u32,
}

impl Sum<'_> {
    /// Takes the messages of the sum that have arrived, and continues as far as they allow.
    fn advance(
        &self,
        connection: &mut Connection,
        stage: &mut LocalStage,
        state: State,
    ) -> Result<State, Cause> {
        let &Self { context, part, repetition } = self;
        let (index, device, copies) = (stage.index, stage.inner_device(), part.copies(context));
        match state {
            State::Sharding(mut parts) => {
                if connection.receive_tensors(&mut parts, &device)?.is_some() {
                    return Ok(State::Sharding(parts));
                }
                let sums = sum(context.by_share(part.sharers(context), parts.into_contents(), repetition));
                if copies.members().len() == 1 {
                    set_gradients(stage, part, sums);
                    return Ok(State::Done);
                }
                let exchange = scatter(connection, part.shard_tag(index), copies, cut_for(sums, copies));
                self.advance(connection, stage, State::Scattering(exchange))
            }
            State::Scattering(mut parts) => {
                if connection.receive_tensors(&mut parts, &device)?.is_some() {
                    return Ok(State::Scattering(parts));
                }
                let tag = Tag::GradientSum { stage: index, of_experts: part.of_experts };
                let sums = sum(context.by_share(copies, parts.into_contents(), repetition));
                for (_, to) in copies.others() {
                    connection.send_copies(to, tag, sums.clone());
                }
                let gathering = State::Gathering(Exchange::among(copies, tag, sums));
                self.advance(connection, stage, gathering)
            }
            State::Gathering(mut sums) => {
                if connection.receive_tensors(&mut sums, &device)?.is_some() {
                    return Ok(State::Gathering(sums));
                }
                set_gradients(stage, part, join_rows(sums.into_contents()));
                Ok(State::Done)
            }
            State::Done | State::Own => Ok(state),
        }
    }
}

fn set_gradients(stage: &mut LocalStage, part: &StagePart, gradients: OptionalTensors) {
    let runner = stage.runner_mut();
    let gradients = part.parameters.iter().zip(gradients);
    gradients.for_each(|(&parameter, gradient)| runner.sums_mut().set(parameter, gradient));
}

/// Cuts gradients into one list for each member of the group, of equal parts.
fn cut_for(gradients: impl IntoIterator<Item = OptionalTensor>, group: &Group) -> Vec<OptionalTensors> {
    cut(gradients, RowShard::all(group.members().len() as u32))
}

/// Cuts gradients into one list for each shard. A gradient is dropped as soon as its parts have their own
/// storage, so that the parts need no more memory than the gradients did.
fn cut(
    gradients: impl IntoIterator<Item = OptionalTensor>,
    shards: impl Iterator<Item = RowShard>,
) -> Vec<OptionalTensors> {
    let mut lists: Vec<(RowShard, OptionalTensors)> =
        shards.map(|shard| (shard, OptionalTensors::new())).collect();
    for gradient in gradients {
        for (shard, list) in &mut lists {
            let part = gradient.as_ref().and_then(|whole| shard.cut(whole));
            list.push(if shard.has_all() { part } else { part.map(Value::copied) });
        }
    }
    lists.into_iter().map(|(_, list)| list).collect()
}

/// Joins the parts of each replica to whole tensors. A tensor is absent if no replica has a part of it.
pub(super) fn join_rows(parts: impl Iterator<Item = OptionalTensors>) -> OptionalTensors {
    let mut parts: Vec<_> = parts.map(Vec::into_iter).collect();
    let parameters = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..parameters).map(|_| join(parts.iter_mut().filter_map(|parts| parts.next().flatten()))).collect()
}
