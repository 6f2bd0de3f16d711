//! Gradients of parameters that several stages hold, summed over the owners before the step ends.
//!
//! Stages declare such parameters
//! ([`StageModule::shared_parameters`](crate::stage::StageModule::shared_parameters)). Shared parameters with
//! the same global path are one parameter. If two parameters have the same path and do not declare it,
//! launching fails (`parameters.rs`). The usual case is the embedding of the first stage and the tied head of
//! the last stage. Each owner holds a copy. The copies start equal, which is also checked at launch. They get
//! the same gradient sum and the same update, and so stay equal to the bit.
//!
//! The copies on one rank, whether in one stage or in several, are one parameter: they use the storage of the
//! first of them ([`share_storage`]), which alone gets the gradient sum, the update and a state in the optimizer.
//! Each copy has a gradient sum of its own until the step ends, because the sum over the owners has this order
//! under every cut: first over the microbatches of each owner, then over the owners in the order of the stages.
//!
//! # Protocol
//!
//! If two ranks own a parameter, each sends the other the gradients of its copies ([`Tag::SharedGradient`]),
//! and both add all gradients. If more ranks own it, the rank of the lowest stage adds them: the others send
//! it the gradients of their copies, and it sends each of them the sum ([`Tag::SharedGradientSum`]). So `k`
//! ranks send `2 (k - 1)` tensors, and not `k (k - 1)`. The gradients are added in the order of the stages,
//! so the sum has the same bits in both cases and for every cut.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::Tensor;
use pipewright_schedule::{Rank, StageIndex};

use super::connection::Connection;
use super::context::RankContext;
use super::parameters::{KnownParameters, Owner, Owners};
use super::stages::LocalStages;
use crate::collective::{Exchange, Slot};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// A shared parameter whose gradient is being summed.
pub(super) struct SharedSum {
    parameter: u32,
    /// The copies on this rank, which all get the sum.
    copies: Owners,
    /// The other ranks that own the parameter.
    others: Vec<Rank>,
    state: State,
}

enum State {
    /// The rank waits for the gradient of each copy, in the order of the owners.
    Adding(Exchange<OptionalTensors>),
    /// The rank waits for the sum.
    Waiting(Exchange<OptionalTensors>),
    /// The sum; `None` if no copy has a gradient.
    Done(Box<OptionalTensor>),
}

/// Lets the copies of each shared parameter on this rank use the storage of the first of them. Call this when
/// the first copy has other storage: after the launch, an update, or a restore.
pub(super) fn share_storage(context: &RankContext, stages: &mut LocalStages, known: &KnownParameters) {
    let mut borrowed: BTreeMap<StageIndex, BTreeMap<usize, Value>> = BTreeMap::new();
    for (_, owners) in &known.shared {
        let mut copies = owners.iter().filter(|owner| owner.rank == context.rank());
        let Some(first) = copies.next() else { continue };
        // Integer and boolean tensors are small.
        if first.parameter >= stages.get(first.stage).runner().table().paths.len() {
            continue;
        }
        let mut value: Option<Value> = None;
        for copy in copies {
            let value = value.get_or_insert_with(|| stages.get(first.stage).runner().value(first.parameter));
            if stages.get(copy.stage).inner_device() == value.device() {
                borrowed.entry(copy.stage).or_default().insert(copy.parameter, value.clone());
            }
        }
    }
    for (stage, values) in borrowed {
        stages.get_mut(stage).runner_mut().borrow(values);
    }
}

/// Sends this rank's gradients of shared parameters, and returns the sums that it waits for.
pub(super) fn exchange_shared_gradients(
    context: &RankContext,
    connection: &mut Connection,
    stages: &mut LocalStages,
    known: &KnownParameters,
) -> Vec<SharedSum> {
    let mut sums = Vec::new();
    for (parameter, owners) in &known.shared {
        // Integer and boolean tensors have no gradients.
        let has_gradient =
            |owner: &Owner| owner.parameter < stages.get(owner.stage).runner().table().paths.len();
        if owners.iter().filter(|owner| owner.rank == context.rank()).all(has_gradient) {
            sums.push(SharedSum::begin(context, connection, stages, *parameter, owners));
        }
    }
    sums
}

/// Takes the gradients and sums that have arrived, or returns a missing message. A rank that adds for all
/// sends a sum as soon as it has it, whatever the other sums wait for.
pub(super) fn receive_shared_gradients(
    context: &RankContext,
    connection: &mut Connection,
    stages: &LocalStages,
    sums: &mut [SharedSum],
) -> Result<Option<AwaitedMessage>, Cause> {
    let device = stages.first().runner().device();
    let mut missing = None;
    for sum in sums {
        let awaited = match &mut sum.state {
            State::Adding(messages) | State::Waiting(messages) => {
                connection.receive_tensors(messages, device)?
            }
            State::Done(_) => continue,
        };
        match awaited {
            Some(awaited) => missing = missing.or(Some(awaited)),
            None => sum.complete(context, connection),
        }
    }
    Ok(missing)
}

/// Sets the gradient of the first of this rank's copies to the sum over all copies, and the gradient of each
/// copy with storage of its own.
pub(super) fn set_shared_gradients(stages: &mut LocalStages, sums: Vec<SharedSum>) {
    for SharedSum { copies, state, .. } in sums {
        let State::Done(total) = state else { continue };
        for owner in copies {
            let runner = stages.get_mut(owner.stage).runner_mut();
            if runner.is_borrowed(owner.parameter) {
                continue;
            }
            let device = runner.device().clone();
            runner.sums_mut().set(owner.parameter, total.clone().map(|total| total.to_device(&device)));
        }
    }
}

impl SharedSum {
    /// Sends the gradients of this rank's copies, and takes them out.
    fn begin(
        context: &RankContext,
        connection: &mut Connection,
        stages: &mut LocalStages,
        parameter: u32,
        owners: &Owners,
    ) -> Self {
        let own = context.rank();
        let mut others: Vec<Rank> =
            owners.iter().map(|owner| owner.rank).filter(|&rank| rank != own).collect();
        others.sort_unstable();
        others.dedup();
        let adds_for_all = (others.len() > 1).then_some(owners[0].rank);
        let receivers = match adds_for_all {
            None => others.clone(),
            Some(rank) if rank == own => Vec::new(),
            Some(rank) => vec![rank],
        };
        let copies: Owners = owners.iter().copied().filter(|owner| owner.rank == own).collect();
        let take = |owner: &Owner| {
            let runner = stages.get_mut(owner.stage).runner_mut();
            let gradient = runner.sums().get(owner.parameter);
            runner.sums_mut().set(owner.parameter, None);
            (*owner, vec![gradient])
        };
        let mut gradients: HashMap<Owner, OptionalTensors> = copies.iter().map(take).collect();
        for owner in &copies {
            for &to in &receivers {
                let gradient = gradients[owner].clone();
                connection.send_copies(context.world_rank_of(to), tag(parameter, owner), gradient);
            }
        }
        let state = match adds_for_all.filter(|&rank| rank != own) {
            None => State::Adding(Exchange::new(owners.iter().map(|owner| {
                if let Some(gradient) = gradients.remove(owner) {
                    Slot::Filled(gradient)
                } else {
                    Slot::Expected(context.awaited(owner.rank, tag(parameter, owner)))
                }
            }))),
            Some(rank) => {
                let tag = Tag::SharedGradientSum { parameter };
                State::Waiting(Exchange::one(context.world_rank_of(rank), tag))
            }
        };
        Self { parameter, copies, others, state }
    }

    /// Computes or takes the sum, whose messages have arrived. The rank that adds for all sends it.
    fn complete(&mut self, context: &RankContext, connection: &mut Connection) {
        let total = match std::mem::replace(&mut self.state, State::Done(Box::default())) {
            State::Adding(gradients) => {
                let total = add(gradients.into_contents());
                let receivers: &[Rank] = if self.others.len() > 1 { &self.others } else { &[] };
                for &to in receivers {
                    let tag = Tag::SharedGradientSum { parameter: self.parameter };
                    connection.send_copies(context.world_rank_of(to), tag, vec![total.clone()]);
                }
                total
            }
            State::Waiting(message) => message.into_one().into_iter().next().flatten(),
            State::Done(total) => *total,
        };
        self.state = State::Done(Box::new(total));
    }
}

/// Adds the gradients that exist, in their order.
fn add(gradients: impl Iterator<Item = OptionalTensors>) -> OptionalTensor {
    let gradients = gradients.filter_map(|gradient| gradient.into_iter().next().flatten());
    let gradients = gradients.map(|gradient| Tensor::<1>::from_dispatch(gradient.into_dispatch()));
    gradients.reduce(|sum, gradient| sum + gradient).map(Value::of)
}

fn tag(parameter: u32, owner: &Owner) -> Tag {
    Tag::SharedGradient { parameter, stage: owner.stage, index: owner.parameter as u32 }
}
