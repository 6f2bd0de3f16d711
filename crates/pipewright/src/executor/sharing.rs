//! Gradients of parameters that several stages hold, summed over the owners before the step ends.
//!
//! Stages declare such parameters
//! ([`StageModule::shared_parameters`](crate::stage::StageModule::shared_parameters)). Shared parameters with
//! the same global path are one parameter. If two parameters have the same path and do not declare it,
//! launching fails (`parameters.rs`). The usual case is the embedding of the first stage and the tied head of
//! the last stage. Each owner holds a copy. The copies start equal, which is also checked at launch. They get
//! the same gradient sum and the same update, and so stay equal to the bit.
//!
//! # Protocol
//!
//! If two ranks own a parameter, each sends the other the gradients of its copies ([`Tag::SharedGradient`]),
//! and both add all gradients. If more ranks own it, the rank of the lowest stage adds them: the others send
//! it the gradients of their copies, and it sends each of them the sum ([`Tag::SharedGradientSum`]). So `k`
//! ranks send `2 (k - 1)` tensors, and not `k (k - 1)`. The gradients are added in the order of the stages,
//! so the sum has the same bits in both cases and for every cut.

use burn::tensor::Tensor;
use pipewright_schedule::Rank;

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

/// Sends this rank's gradients of shared parameters, and returns the sums that it waits for.
pub(super) fn exchange_shared_gradients(
    context: &RankContext,
    connection: &mut Connection,
    stages: &LocalStages,
    known: &KnownParameters,
) -> Vec<SharedSum> {
    // Integer and boolean tensors have no gradients.
    let has_gradient = |owner: &Owner| owner.parameter < stages.get(owner.stage).runner().paths().len();
    let shared = known
        .shared()
        .iter()
        .filter(|(_, owners)| owners.iter().filter(|owner| owner.rank == context.rank()).all(has_gradient));
    let sums =
        shared.map(|(parameter, owners)| SharedSum::begin(context, connection, stages, *parameter, owners));
    sums.collect()
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

/// Sets the gradient of each of this rank's copies to the sum over all copies.
pub(super) fn set_shared_gradients(stages: &mut LocalStages, sums: Vec<SharedSum>) {
    for SharedSum { copies, state, .. } in sums {
        let State::Done(total) = state else { continue };
        for owner in copies {
            let runner = stages.get_mut(owner.stage).runner_mut();
            let device = runner.device().clone();
            runner.set_gradient(owner.parameter, total.clone().map(|total| total.to_device(&device)));
        }
    }
}

impl SharedSum {
    /// Sends the gradients of this rank's copies.
    fn begin(
        context: &RankContext,
        connection: &mut Connection,
        stages: &LocalStages,
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
        let gradient = |owner: &Owner| vec![stages.get(owner.stage).runner().gradient(owner.parameter)];
        let copies: Owners = owners.iter().copied().filter(|owner| owner.rank == own).collect();
        for owner in &copies {
            for &to in &receivers {
                connection.send_copies(context.world_rank_of(to), tag(parameter, owner), gradient(owner));
            }
        }
        let state = match adds_for_all.filter(|&rank| rank != own) {
            None => State::Adding(Exchange::new(owners.iter().map(|owner| {
                if owner.rank == own {
                    Slot::Filled(gradient(owner))
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
