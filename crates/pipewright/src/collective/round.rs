//! A round: every member of a group sends each other one a message under one tag, and waits for theirs.
//!
//! Sending is the caller's; a round collects what comes, without waiting. All members send before they take, and sends
//! never wait, so no order of members can block another.

use std::time::Instant;

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use pipewright_schedule::Rank;

use super::group::Group;
use crate::message::Tag;
use crate::tensor::{OptionalTensors, Value};

/// What has come of a round so far.
#[derive(Debug)]
pub(crate) struct Round {
    tag: Tag,
    /// By the members' places.
    parts: Vec<Option<OptionalTensors>>,
    /// When the last of them was sent.
    latest: Option<Instant>,
}

impl Round {
    /// A round of which `own` is here, this member's contribution to itself.
    pub(crate) fn new(tag: Tag, group: &Group, own: OptionalTensors) -> Self {
        let mut parts = vec![None; group.members().len()];
        parts[group.place()] = Some(own);
        Self { tag, parts, latest: None }
    }

    pub(crate) fn tag(&self) -> Tag {
        self.tag
    }

    /// Takes what has come, with when it was sent; whether all is there.
    pub(crate) fn poll(
        &mut self,
        group: &Group,
        mut take: impl FnMut(Rank, Tag) -> Option<(Instant, OptionalTensors)>,
    ) -> bool {
        for (part, &rank) in self.parts.iter_mut().zip(group.members()).filter(|(part, _)| part.is_none()) {
            if let Some((sent, parts)) = take(rank, self.tag) {
                *part = Some(parts);
                self.latest = self.latest.max(Some(sent));
            }
        }
        self.missing(group).is_none()
    }

    /// When the last of what has come was sent; none where nothing has.
    pub(crate) fn latest(&self) -> Option<Instant> {
        self.latest
    }

    /// The first member that has not been heard.
    pub(crate) fn missing(&self, group: &Group) -> Option<Rank> {
        let mut members = self.parts.iter().zip(group.members());
        members.find(|(part, _)| part.is_none()).map(|(_, &rank)| rank)
    }

    /// What each member sent, in their order.
    pub(crate) fn into_parts(self) -> Vec<OptionalTensors> {
        self.parts.into_iter().flatten().collect()
    }
}

/// The sum over members, tensor by tensor, added in their order. A tensor that some lack counts as zero there; one that
/// all lack stays away. Tensors of one place have one shape.
pub(crate) fn sum(parts: Vec<OptionalTensors>) -> OptionalTensors {
    let add = |sum: Option<Value>, part: Option<Value>| match (sum, part) {
        (Some(sum), Some(part)) => {
            Some(Value::from_dispatch(Dispatch::float_add(sum.into_dispatch(), part.into_dispatch())))
        }
        (sum, part) => sum.or(part),
    };
    let sums = parts
        .into_iter()
        .reduce(|sums, parts| sums.into_iter().zip(parts).map(|(sum, part)| add(sum, part)).collect());
    sums.unwrap_or_default()
}
