//! Collectives that block until a deadline, for code that has a rank's thread to itself.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Shape, Tensor};
use pipewright_schedule::words::counted;

use super::exchange::Exchange;
use super::group::Group;
use super::sum::sum;
use crate::ids::WorldRank;
use crate::message::{AwaitedMessage, MessageError, Payload, Tag};
use crate::tensor::shard::{RowShard, join};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values, pack};
use crate::transport::{Endpoint, Waited, end_of_wait};

/// Runs collectives of a group for one of its members. All members call the same collectives in the same
/// order.
pub struct Communicator<'a> {
    endpoint: &'a mut Endpoint,
    group: Group,
    number: u32,
    round: u32,
    deadline: Duration,
}

/// Why a collective failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A member has not sent its part.
    #[error(
        "rank {rank} has not sent {tag} within {waited:?}: see whether it still runs, and calls the same collectives"
    )]
    Silent {
        /// The first such member.
        rank: WorldRank,
        /// The message that is missing.
        tag: Tag,
        /// The deadline.
        waited: Duration,
    },
    /// A rank has failed, which ends the run.
    #[error("aborted because rank {rank} failed")]
    Aborted {
        /// The rank that failed first.
        rank: WorldRank,
    },
    /// The members call the collective with tensors or ranks that do not fit each other.
    #[error("{0}")]
    Mistake(String),
    /// A member sent something else than tensors.
    #[error(transparent)]
    Message(#[from] MessageError),
}

pipewright_schedule::message_as_debug!(CollectiveError);

impl<'a> Communicator<'a> {
    /// Makes a communicator of `group`. Its `number` is the same on all members and differs from the numbers
    /// of all other communicators of the world. A collective fails if a member has not sent its part within
    /// `deadline`.
    pub fn new(endpoint: &'a mut Endpoint, group: Group, number: u32, deadline: Duration) -> Self {
        Self { endpoint, group, number, round: 0, deadline }
    }

    /// Returns the group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Waits until all members have called it.
    ///
    /// # Errors
    /// When a member has not called it, or a rank failed.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.all_gather(Values::new()).map(drop)
    }

    /// Returns the tensors of the member `root` on every member; the tensors of the other members are
    /// dropped.
    ///
    /// # Errors
    /// When the root has not sent them, or a rank failed.
    pub fn broadcast(&mut self, root: WorldRank, tensors: Values) -> Result<Values, CollectiveError> {
        let tag = self.next_tag();
        if !self.group.members().contains(&root) {
            return Err(CollectiveError::Mistake(format!(
                "rank {root} is not in the group, and cannot broadcast to it: name one of its members"
            )));
        }
        if self.endpoint.rank() == root {
            let others: Vec<WorldRank> = self.group.others().map(|(_, rank)| rank).collect();
            others.into_iter().for_each(|to| self.send(to, tag, &tensors));
            return Ok(tensors);
        }
        let mut received = Exchange::one(root, tag);
        self.complete(&mut received)?;
        Ok(received.into_contents().flatten().flatten().collect())
    }

    /// Returns the tensors of all members, in the order of the members.
    ///
    /// # Errors
    /// When a member has not sent them, or a rank failed.
    pub fn all_gather(&mut self, tensors: Values) -> Result<Vec<Values>, CollectiveError> {
        let tag = self.next_tag();
        let gathered = self.exchange(tag, vec![tensors; self.group.members().len()])?;
        Ok(gathered.into_iter().map(|parts| parts.into_iter().flatten().collect()).collect())
    }

    /// Takes a list of float tensors for each member and returns the sum, over all members, of the tensors
    /// for this one. The tensors of neighbouring members are added first, then the sums of the pairs in
    /// pairs, and so on.
    ///
    /// # Errors
    /// When a member has not sent its part or brings other shapes, or a rank failed.
    pub fn reduce_scatter(&mut self, parts: Vec<Values>) -> Result<Values, CollectiveError> {
        let tag = self.next_tag();
        let expected = self.group.members().len();
        if parts.len() != expected {
            let found = counted(parts.len(), "part");
            return Err(CollectiveError::Mistake(format!(
                "{found} for {expected} members: pass one for each"
            )));
        }
        for (index, tensor) in parts.iter().flat_map(|part| part.iter().enumerate()) {
            if tensor.kind() != ValueKind::Float {
                return Err(CollectiveError::Mistake(format!(
                    "tensor {index} is {}; only floats can be added",
                    tensor.kind()
                )));
            }
        }
        // Every member checks the types of all members, so that either all members continue or none does.
        let received = self.exchange(tag, parts)?;
        self.check_addable(&received)?;
        Ok(sum(received).into_iter().flatten().collect())
    }

    /// Returns the sum of float tensors over all members, with the same bits on every member: they are added
    /// in the order of [`Communicator::reduce_scatter`].
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
        // A tensor with fewer elements than there are members has no rows for the last members, which send an
        // empty tensor.
        let part = |part: RowShard| {
            rows.iter().map(move |row| {
                let rows = part.rows(row.shape()[0]);
                row.narrow(0, rows.start, rows.end)
            })
        };
        let parts = RowShard::all(self.group.members().len() as u32).map(|one| part(one).collect()).collect();
        let sums = self.reduce_scatter(parts)?;
        let gathered = self.all_gather(sums)?;
        let whole = shapes.iter().enumerate().map(|(index, shape)| {
            let parts = gathered.iter().filter_map(|parts| parts.get(index)).cloned();
            let parts: Vec<Value> = parts.filter(|part| part.shape().num_elements() > 0).collect();
            join(parts).unwrap_or_else(|| rows[index].clone()).reshaped(shape)
        });
        Ok(whole.collect())
    }

    /// Sends each member its list and receives the lists of all members.
    fn exchange(
        &mut self,
        tag: Tag,
        mut lists: Vec<Values>,
    ) -> Result<Vec<OptionalTensors>, CollectiveError> {
        let group = self.group.clone();
        let own = std::mem::take(&mut lists[group.index()]);
        for (index, to) in group.others() {
            self.send(to, tag, &lists[index]);
        }
        drop(lists);
        let devices: Vec<Device> = own.iter().map(Value::device).collect();
        let own = own.into_iter().map(Some).collect();
        let mut exchange = Exchange::among(&group, tag, own);
        self.complete(&mut exchange)?;
        // A tensor arrives on its sender's device. Each joins this member's tensor at the same index.
        let moved = |(index, tensor): (usize, Option<Value>)| match devices.get(index) {
            Some(device) => tensor.map(|tensor| tensor.to_device(device)),
            None => tensor,
        };
        let here = |list: OptionalTensors| list.into_iter().enumerate().map(moved).collect();
        Ok(exchange.into_contents().map(here).collect())
    }

    /// Waits until all messages of an exchange have arrived.
    fn complete(&mut self, exchange: &mut Exchange<OptionalTensors>) -> Result<(), CollectiveError> {
        let until = end_of_wait(self.deadline);
        while let Some(AwaitedMessage { from: rank, tag }) = exchange.poll(|awaited| self.take(awaited))? {
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

    fn take(
        &mut self,
        AwaitedMessage { from, tag }: AwaitedMessage,
    ) -> Result<Option<(Instant, OptionalTensors)>, MessageError> {
        let Some(message) = self.endpoint.try_take(from, tag) else { return Ok(None) };
        let sent = message.sent();
        message.into_tensors().map(|tensors| Some((sent, tensors)))
    }

    fn send(&mut self, to: WorldRank, tag: Tag, tensors: &[Value]) {
        // The receiver may write to a float tensor, so it gets a copy. Tensors of other kinds are not written
        // to.
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
        let own = &received[self.group.index()];
        for (parts, &rank) in received.iter().zip(self.group.members()) {
            if parts.len() != own.len() {
                return Err(other_count(own.len(), parts.len(), rank));
            }
            for (index, (own, other)) in own.iter().flatten().zip(parts.iter().flatten()).enumerate() {
                if own.dtype() != other.dtype() {
                    return Err(unlike(index, "type", [own.dtype(), other.dtype()], rank));
                }
                if own.shape() != other.shape() {
                    return Err(unlike(index, "shape", [own.shape(), other.shape()], rank));
                }
            }
        }
        Ok(())
    }

    /// Compares the shapes of all members on every member, so that either all members continue or none does.
    fn check_shapes(&mut self, shapes: &[Shape]) -> Result<(), CollectiveError> {
        let dims = |shape: &Shape| {
            let dims: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
            pack(Tensor::<1, Int>::from_data(dims.as_slice(), &Device::flex()))
        };
        let gathered = self.all_gather(shapes.iter().flat_map(dims).collect())?;
        for (theirs, &rank) in gathered.into_iter().zip(self.group.members()) {
            if theirs.len() != shapes.len() {
                return Err(other_count(shapes.len(), theirs.len(), rank));
            }
            for (index, (theirs, own)) in theirs.into_iter().zip(shapes).enumerate() {
                let other = Shape::from(theirs.into_data().iter::<i64>().collect::<Vec<_>>());
                if other != *own {
                    return Err(unlike(index, "shape", [own, &other], rank));
                }
            }
        }
        Ok(())
    }
}

fn other_count(own: usize, other: usize, rank: WorldRank) -> CollectiveError {
    let own = counted(own, "tensor");
    CollectiveError::Mistake(format!(
        "{own} here and {other} on rank {rank}: all members pass the same number"
    ))
}

/// Returns the error of a tensor whose type or shape differs on another rank.
fn unlike<T: Debug>(index: usize, what: &str, [own, other]: [T; 2], rank: WorldRank) -> CollectiveError {
    CollectiveError::Mistake(format!(
        "tensor {index} has the {what} {own:?} here and {other:?} on rank {rank}: tensors that are added have one {what}"
    ))
}
