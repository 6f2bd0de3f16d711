//! Collectives that block, each with a deadline: for code that has a rank's thread to itself.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Int, Shape, Tensor};
use pipewright_schedule::Rank;

use super::group::Group;
use super::round::{Round, sum};
use crate::message::{Payload, Tag};
use crate::tensor::shard::{RowShard, join};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values, pack};
use crate::transport::{Endpoint, Waited};

/// The longest wait that a clock can add up to a moment.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A rank's way to act with its group. All members call the same collectives in the same order.
pub struct Communicator<'a> {
    endpoint: &'a mut Endpoint,
    group: Group,
    number: u32,
    round: u32,
    deadline: Duration,
}

/// Why a collective was not completed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A member has not taken part.
    #[error(
        "rank {rank} has not sent {tag} within {waited:?}: see whether it still runs, and calls the same collectives"
    )]
    Silent {
        /// The first such member.
        rank: Rank,
        /// What was waited for.
        tag: Tag,
        /// For how long.
        waited: Duration,
    },
    /// A rank has failed, and with it the run.
    #[error("aborted because rank {rank} failed")]
    Aborted {
        /// The rank that failed first.
        rank: Rank,
    },
    /// A broadcast from a rank that does not take part.
    #[error("rank {rank} is not in the group, and cannot broadcast to it: name one of its members")]
    Root {
        /// The rank.
        rank: Rank,
    },
    /// The members brought tensors that cannot be added.
    #[error(
        "tensor {place} has shape {own:?} here and {other:?} on rank {rank}: tensors that are added have one shape"
    )]
    Shapes {
        /// The tensor's place in the list.
        place: usize,
        /// Its shape here.
        own: Shape,
        /// Its shape there.
        other: Shape,
        /// The other rank.
        rank: Rank,
    },
    /// The members brought tensors of different element types.
    #[error(
        "tensor {place} is {own:?} here and {other:?} on rank {rank}: tensors that are added have one type"
    )]
    Types {
        /// The tensor's place in the list.
        place: usize,
        /// Its type here.
        own: DType,
        /// Its type there.
        other: DType,
        /// The other rank.
        rank: Rank,
    },
    /// The members brought lists of different lengths.
    #[error("{own} tensor(s) here and {other} on rank {rank}: all members bring as many")]
    Count {
        /// Tensors here.
        own: usize,
        /// Tensors there.
        other: usize,
        /// The other rank.
        rank: Rank,
    },
    /// Another number of parts than members.
    #[error("{found} part(s) for {expected} members: bring one for each")]
    Parts {
        /// Tensors given.
        found: usize,
        /// Members of the group.
        expected: usize,
    },
    /// Integers and booleans are not added.
    #[error("tensor {place} is {kind}; sums are of floats alone")]
    Kind {
        /// Its place in the list.
        place: usize,
        /// What it is.
        kind: ValueKind,
    },
}

impl<'a> Communicator<'a> {
    /// A communicator of `group`. Its `number` is the same on all members, and that of no other communicator of this
    /// world. A collective fails when a member has not sent its part within `deadline`.
    pub fn new(endpoint: &'a mut Endpoint, group: Group, number: u32, deadline: Duration) -> Self {
        Self { endpoint, group, number, round: 0, deadline }
    }

    /// Those who take part.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns when all members have called it.
    ///
    /// # Errors
    /// When one has not, or a rank failed.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.all_gather(Values::new()).map(drop)
    }

    /// The tensors of the member `root`, on every member. What the others bring is not looked at.
    ///
    /// # Errors
    /// When the root has not sent them, or a rank failed.
    pub fn broadcast(&mut self, root: Rank, tensors: Values) -> Result<Values, CollectiveError> {
        let tag = self.next_tag();
        if !self.group.members().contains(&root) {
            return Err(CollectiveError::Root { rank: root });
        }
        if self.endpoint.rank() == root {
            let others: Vec<Rank> = self.group.others().map(|(_, rank)| rank).collect();
            others.into_iter().for_each(|to| self.send(to, tag, &tensors));
            return Ok(tensors);
        }
        let mut received = None;
        self.wait(tag, |endpoint| {
            received = received.take().or_else(|| take(endpoint, root, tag).map(|(_, tensors)| tensors));
            received.is_none().then_some(root)
        })?;
        Ok(received.into_iter().flatten().flatten().collect())
    }

    /// The tensors of all members, in their order.
    ///
    /// # Errors
    /// When a member has not sent them, or a rank failed.
    pub fn all_gather(&mut self, tensors: Values) -> Result<Vec<Values>, CollectiveError> {
        let tag = self.next_tag();
        let gathered = self.exchange(tag, vec![tensors; self.group.members().len()])?;
        Ok(gathered.into_iter().map(|parts| parts.into_iter().flatten().collect()).collect())
    }

    /// Takes a list of float tensors for each member and returns the sum, over all members, of those for this one. They
    /// are added in the order of the members.
    ///
    /// # Errors
    /// When a member has not sent its part or brings other shapes, or a rank failed.
    pub fn reduce_scatter(&mut self, parts: Vec<Values>) -> Result<Values, CollectiveError> {
        let tag = self.next_tag();
        let expected = self.group.members().len();
        if parts.len() != expected {
            return Err(CollectiveError::Parts { found: parts.len(), expected });
        }
        for (place, tensor) in parts.iter().flat_map(|part| part.iter().enumerate()) {
            if tensor.kind() != ValueKind::Float {
                return Err(CollectiveError::Kind { place, kind: tensor.kind() });
            }
        }
        // All members see the types of all, and so all or none of them go on.
        let received = self.exchange(tag, parts)?;
        self.check_addable(&received)?;
        Ok(sum(received).into_iter().flatten().collect())
    }

    /// The sum of float tensors over all members, on every member, to the same bits: they are added in the order of the
    /// members.
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`].
    pub fn all_reduce(&mut self, tensors: Values) -> Result<Values, CollectiveError> {
        let shapes: Vec<Shape> = tensors.iter().map(Value::shape).collect();
        self.check_shapes(&shapes)?;
        let rows: Values = tensors
            .into_iter()
            .zip(&shapes)
            .map(|(tensor, shape)| tensor.reshaped(&[shape.num_elements()]))
            .collect();
        // A tensor with fewer elements than there are members has none for the last ones, who bring an empty one.
        let part = |part: RowShard| {
            rows.iter().map(move |row| {
                let rows = part.rows(row.shape()[0]);
                row.narrow(0, rows.start, rows.end)
            })
        };
        let parts = RowShard::all(self.group.members().len() as u32).map(|one| part(one).collect()).collect();
        let sums = self.reduce_scatter(parts)?;
        let gathered = self.all_gather(sums)?;
        let whole = shapes.iter().enumerate().map(|(place, shape)| {
            let parts = gathered.iter().filter_map(|parts| parts.get(place)).cloned();
            let parts: Vec<Value> = parts.filter(|part| part.shape().num_elements() > 0).collect();
            join(parts).unwrap_or_else(|| rows[place].clone()).reshaped(shape)
        });
        Ok(whole.collect())
    }

    /// Sends each member its list and takes what each sent here.
    fn exchange(
        &mut self,
        tag: Tag,
        mut lists: Vec<Values>,
    ) -> Result<Vec<OptionalTensors>, CollectiveError> {
        let group = self.group.clone();
        let own = std::mem::take(&mut lists[group.place()]);
        for (place, to) in group.others() {
            self.send(to, tag, &lists[place]);
        }
        drop(lists);
        let mut round = Round::new(tag, &group, own.into_iter().map(Some).collect());
        self.wait(tag, |endpoint| {
            round.poll(&group, |from, tag| take(endpoint, from, tag));
            round.missing(&group)
        })?;
        Ok(round.into_parts())
    }

    /// Waits until `missing` names nobody.
    fn wait(
        &mut self,
        tag: Tag,
        mut missing: impl FnMut(&mut Endpoint) -> Option<Rank>,
    ) -> Result<(), CollectiveError> {
        let now = Instant::now();
        let until = now.checked_add(self.deadline).unwrap_or(now + LONGEST);
        while let Some(rank) = missing(self.endpoint) {
            match self.endpoint.wait(until) {
                Waited::Arrived => {}
                Waited::TimedOut => return Err(CollectiveError::Silent { rank, tag, waited: self.deadline }),
                Waited::Aborted => {
                    let rank = self.endpoint.abort().first().map_or(rank, |error| error.rank);
                    return Err(CollectiveError::Aborted { rank });
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, to: Rank, tag: Tag, tensors: &[Value]) {
        // A float that is sent is the receiver's alone, who may write to it; nobody writes to the others.
        let own = |tensor: &Value| match tensor.kind() {
            ValueKind::Float => tensor.clone().copied(),
            _ => tensor.clone(),
        };
        self.endpoint.send(to, tag, Payload::Tensors(tensors.iter().map(own).map(Some).collect()));
    }

    fn next_tag(&mut self) -> Tag {
        let tag = Tag::Collective { communicator: self.number, round: self.round };
        self.round += 1;
        tag
    }

    fn check_addable(&self, received: &[OptionalTensors]) -> Result<(), CollectiveError> {
        let own = &received[self.group.place()];
        for (parts, &rank) in received.iter().zip(self.group.members()) {
            if parts.len() != own.len() {
                return Err(CollectiveError::Count { own: own.len(), other: parts.len(), rank });
            }
            for (place, (own, other)) in own.iter().flatten().zip(parts.iter().flatten()).enumerate() {
                if own.dtype() != other.dtype() {
                    let (own, other) = (own.dtype(), other.dtype());
                    return Err(CollectiveError::Types { place, own, other, rank });
                }
                if own.shape() != other.shape() {
                    let (own, other) = (own.shape(), other.shape());
                    return Err(CollectiveError::Shapes { place, own, other, rank });
                }
            }
        }
        Ok(())
    }

    /// Compares the shapes that all members bring, so that all or none of them go on.
    fn check_shapes(&mut self, shapes: &[Shape]) -> Result<(), CollectiveError> {
        let dims = |shape: &Shape| {
            let dims: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
            pack(Tensor::<1, Int>::from_data(dims.as_slice(), &Device::flex()))
        };
        let gathered = self.all_gather(shapes.iter().flat_map(dims).collect())?;
        for (theirs, &rank) in gathered.into_iter().zip(self.group.members()) {
            if theirs.len() != shapes.len() {
                return Err(CollectiveError::Count { own: shapes.len(), other: theirs.len(), rank });
            }
            for (place, (theirs, own)) in theirs.into_iter().zip(shapes).enumerate() {
                let other = Shape::from(theirs.into_data().iter::<i64>().collect::<Vec<_>>());
                if other != *own {
                    return Err(CollectiveError::Shapes { place, own: own.clone(), other, rank });
                }
            }
        }
        Ok(())
    }
}

fn take(endpoint: &mut Endpoint, from: Rank, tag: Tag) -> Option<(Instant, OptionalTensors)> {
    let message = endpoint.try_take(from, tag)?;
    let sent = message.sent();
    match message.into_payload() {
        Payload::Tensors(tensors) => Some((sent, tensors)),
        _ => unreachable!("the tag says tensors"),
    }
}
