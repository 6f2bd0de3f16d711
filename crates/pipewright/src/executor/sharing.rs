//! Parameters that several stages hold: their gradients are summed over the owners before the step ends.
//!
//! Stages declare them ([`StageModule::shared_parameters`](crate::stage::StageModule::shared_parameters)); those of one
//! global path are one parameter. Two parameters of one path that are not declared are refused. The embedding of the first stage and the head of the last one, tied, are the usual
//! case. Each owner holds a copy of its own. Copies start equal, which is checked, get the same gradient sum and the
//! same update, and so stay equal to the bit.
//!
//! # Protocol
//!
//! Before the first step each rank sends every other the list of its parameters ([`Tag::Parameters`]); all arrive at
//! the same list of [`Shared`] parameters, or at the same reason to refuse. In every step a rank sends the gradients of its own copies to the other
//! owners ([`Tag::SharedGradient`]), then takes theirs. Sends do not wait, so no order of ranks can block another. Each
//! owner adds all gradients in the order of their stages, whatever the cut.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use burn::tensor::Tensor;
use pipewright_schedule::{Rank, StageIndex};

use super::machine::Executor;
use super::step::{Phase, StepState};
use crate::failure::Cause;
use crate::message::{OwnedParameter, Payload, Tag};
use crate::progress::{Doing, Waiting};
use crate::tensor::Value;

/// A copy of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Owner {
    pub stage: StageIndex,
    /// The parameter's place among its stage's.
    pub place: usize,
    pub rank: Rank,
}

/// A parameter with more than one copy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shared {
    pub path: Arc<str>,
    /// By stage; at least two.
    pub owners: Vec<Owner>,
}

/// The parameters that more than one place holds, by path, from what all ranks hold. Each of those places must declare
/// the path.
pub(super) fn find_shared(owned: &[(Rank, Vec<OwnedParameter>)]) -> Result<Vec<Shared>, Cause> {
    let mut by_path: BTreeMap<&Arc<str>, Vec<(Owner, &OwnedParameter)>> = BTreeMap::new();
    for (rank, parameters) in owned {
        for parameter in parameters {
            let owner = Owner { stage: parameter.stage, place: parameter.place, rank: *rank };
            by_path.entry(&parameter.path).or_default().push((owner, parameter));
        }
    }
    let several = by_path.into_iter().filter(|(_, owners)| owners.len() > 1);
    several.map(|(path, owners)| shared(path, owners)).collect()
}

/// One parameter with its owners in order, if their copies are equal.
fn shared(path: &Arc<str>, mut owners: Vec<(Owner, &OwnedParameter)>) -> Result<Shared, Cause> {
    owners.sort_unstable_by_key(|(owner, _)| *owner);
    if let Some(place) = owners.iter().position(|(_, parameter)| parameter.hash.is_none()) {
        let stage_of = |place: usize| owners[place].0.stage;
        let (stages, undeclared) = ((stage_of(0), stage_of(place.max(1))), stage_of(place));
        return Err(Cause::EqualPaths { parameter: path.clone(), stages, undeclared });
    }
    let (_, first) = owners[0];
    for (_, other) in &owners {
        let stages = (first.stage, other.stage);
        if other.shape != first.shape {
            let shapes = (first.shape.clone(), other.shape.clone());
            return Err(Cause::SharedShape { parameter: path.clone(), stages, shapes });
        }
        if other.hash != first.hash {
            return Err(Cause::SharedValues { parameter: path.clone(), stages });
        }
    }
    Ok(Shared { path: path.clone(), owners: owners.into_iter().map(|(owner, _)| owner).collect() })
}

impl Executor {
    /// Starts to learn which parameters the other ranks hold. [`Executor::poll`] does the rest.
    pub(crate) fn begin_introduction(&mut self) {
        self.step = StepState::idle();
        self.step.phase = Phase::Parameters { next: Rank::new(0) };
        self.board.does(self.world_rank, Doing::Computes);
        self.send_parameters();
    }

    /// Tells every other rank which parameters this one holds.
    fn send_parameters(&mut self) {
        let mine = self.owned();
        for to in self.other_ranks() {
            self.endpoint.send(to, Tag::Parameters, Payload::Parameters(mine.clone()));
        }
        let rank = self.rank;
        self.step.owned = vec![(rank, mine)];
    }

    /// Takes another rank's list; false while it has not arrived.
    pub(super) fn take_parameters(&mut self, from: Rank) -> bool {
        let Some(message) = self.endpoint.try_take(from, Tag::Parameters) else { return false };
        let Payload::Parameters(owned) = message.into_payload() else {
            unreachable!("the tag says parameters")
        };
        self.step.owned.push((from, owned));
        true
    }

    /// Sends this rank's gradients of shared parameters to the other ranks that hold them.
    pub(super) fn send_shared(&mut self) {
        let shared = self.shared.clone().unwrap_or_default();
        for (parameter, shared) in (0u32..).zip(shared.iter()) {
            let mut ranks: Vec<Rank> = shared.owners.iter().map(|owner| owner.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let own = self.rank;
            for owner in shared.owners.iter().filter(|owner| owner.rank == own) {
                for &to in ranks.iter().filter(|&&rank| rank != own) {
                    let gradient = self.local_stage(owner.stage).runner.gradient(owner.place);
                    let tag =
                        Tag::SharedGradient { parameter, stage: owner.stage, place: owner.place as u32 };
                    self.send_copies(self.endpoint.world_rank_of(to), tag, vec![gradient]);
                }
            }
        }
    }

    /// Sums the gradients of one shared parameter over its owners, or says whose is missing.
    pub(super) fn sum_shared(&mut self, parameter: u32) -> Option<Waiting> {
        let shared =
            self.shared.clone().expect("the shared parameters are known before their gradients are summed");
        let owners = &shared[parameter as usize].owners;
        if !owners.iter().any(|owner| owner.rank == self.rank) {
            return None;
        }
        while let Some(owner) = owners.get(self.step.shared_gradients.len()) {
            let gradient = match owner.rank == self.rank {
                true => self.local_stage(owner.stage).runner.gradient(owner.place),
                false => {
                    let tag =
                        Tag::SharedGradient { parameter, stage: owner.stage, place: owner.place as u32 };
                    let waiting = self.waiting(owner.rank, tag);
                    let Some((_, tensors)) = self.try_take_tensors(waiting.from, tag) else {
                        return Some(waiting);
                    };
                    let device = self.stages[0].runner.device();
                    tensors.into_iter().next().flatten().map(|gradient| gradient.to_device(&device))
                }
            };
            self.step.shared_gradients.push(gradient);
        }
        let gradients = std::mem::take(&mut self.step.shared_gradients);
        let gradients = gradients
            .into_iter()
            .flatten()
            .map(|gradient| Tensor::<1>::from_dispatch(gradient.into_dispatch()));
        let sum = gradients.reduce(|sum, gradient| sum + gradient);
        let rank = self.rank;
        for owner in owners.iter().filter(|owner| owner.rank == rank) {
            let runner = &mut self.local_stage(owner.stage).runner;
            let device = runner.device();
            runner.set_gradient(owner.place, sum.clone().map(|sum| Value::of(sum).to_device(&device)));
        }
        None
    }

    /// Whether this rank's copy is the one whose gradient counts for the norm.
    pub(super) fn counts(&self, stage: StageIndex, place: usize) -> bool {
        let is_this = |owner: &Owner| (owner.stage, owner.place) == (stage, place);
        let shared = self.shared.iter().flat_map(|shared| shared.iter());
        let shared = shared.map(|shared| &shared.owners).find(|owners| owners.iter().any(is_this));
        shared.is_none_or(|owners| is_this(&owners[0]))
    }

    fn owned(&self) -> Vec<OwnedParameter> {
        let mut owned = Vec::new();
        for local in &self.stages {
            let held = (0..).zip(local.runner.held());
            owned.extend(held.map(|(place, held)| OwnedParameter {
                stage: local.stage,
                place,
                path: held.path,
                shape: held.shape,
                hash: held.shared.map(|values| hash_of(values.as_bytes())),
            }));
        }
        owned
    }
}

/// The same for the same bytes in every process of one build.
fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
