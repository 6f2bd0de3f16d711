//! An exchange: the messages that a rank expects from others, and the ones that have arrived.
//!
//! The caller sends; an exchange collects the messages that arrive, without waiting. Every exchange of this
//! crate follows one rule: a rank sends its own messages before it takes any, or it sends after it has taken
//! messages of ranks that do not wait for it. Sends never wait, so no order of ranks can block another.

use std::time::Instant;

use super::group::Group;
use crate::ids::WorldRank;
use crate::message::{AwaitedMessage, Tag};

/// Contents of one type from several ranks, in the order in which they are used.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    slots: Vec<Slot<T>>,
    /// The time at which the latest of the arrived messages was sent.
    pub(crate) latest: Option<Instant>,
}

/// One content of an exchange.
#[derive(Debug)]
pub(crate) enum Slot<T> {
    /// A message that has not arrived.
    Expected(AwaitedMessage),
    /// The content of a message that has arrived, or this rank's own.
    Filled(T),
}

impl<T> Exchange<T> {
    /// Makes an exchange of these slots.
    pub(crate) fn new(slots: impl IntoIterator<Item = Slot<T>>) -> Self {
        Self { slots: slots.into_iter().collect(), latest: None }
    }

    /// Makes an exchange in which every member of a group sends each other member one message under `tag`;
    /// `own` is the content of this member.
    pub(crate) fn among(group: &Group, tag: Tag, own: T) -> Self {
        let mut own = Some(own);
        let slot = |&from: &WorldRank| match own.take_if(|_| from == group.own()) {
            Some(own) => Slot::Filled(own),
            None => Slot::Expected(AwaitedMessage { from, tag }),
        };
        Self::new(group.members().iter().map(slot))
    }

    /// Makes an exchange of this rank's own content and then a message from each of `senders` under `tag`.
    pub(crate) fn gather(own: T, tag: Tag, senders: &[WorldRank]) -> Self {
        let others = senders.iter().map(|&from| Slot::Expected(AwaitedMessage { from, tag }));
        Self::new(std::iter::once(Slot::Filled(own)).chain(others))
    }

    /// Makes an exchange of one message.
    pub(crate) fn one(from: WorldRank, tag: Tag) -> Self {
        Self::new([Slot::Expected(AwaitedMessage { from, tag })])
    }

    /// Makes an exchange of a content that is already here.
    pub(crate) fn complete(content: T) -> Self {
        Self::new([Slot::Filled(content)])
    }

    /// Calls `take` for each missing message. It returns the content with the time of sending, or `None` if
    /// the message has not arrived. Returns the first message that is still missing, or `None` if the
    /// exchange is complete.
    pub(crate) fn poll<E>(
        &mut self,
        mut take: impl FnMut(AwaitedMessage) -> Result<Option<(Instant, T)>, E>,
    ) -> Result<Option<AwaitedMessage>, E> {
        for slot in &mut self.slots {
            let Slot::Expected(awaited) = slot else { continue };
            if let Some((sent, content)) = take(*awaited)? {
                *slot = Slot::Filled(content);
                self.latest = self.latest.max(Some(sent));
            }
        }
        Ok(self.missing())
    }

    /// Returns the first message that has not arrived.
    pub(crate) fn missing(&self) -> Option<AwaitedMessage> {
        self.slots.iter().find_map(|slot| match slot {
            Slot::Expected(awaited) => Some(*awaited),
            Slot::Filled(_) => None,
        })
    }

    /// Returns the content of a complete exchange of one message.
    pub(crate) fn into_one(self) -> T {
        self.into_contents().next().expect("a complete exchange of one message has its content")
    }

    /// Returns all contents of a complete exchange, in order.
    pub(crate) fn into_contents(self) -> impl Iterator<Item = T> {
        self.slots.into_iter().filter_map(|slot| match slot {
            Slot::Filled(content) => Some(content),
            Slot::Expected(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_names_what_is_missing_and_keeps_its_order() {
        let ranks = [0, 1, 2].map(WorldRank::new);
        let group = Group::new(ranks.to_vec(), ranks[1]).expect("a group");
        let mut exchange = Exchange::among(&group, Tag::Ready, 10);
        let mut arrived = vec![ranks[2]];
        let mut poll = |arrived: &[WorldRank]| {
            let take = |awaited: AwaitedMessage| -> Result<_, ()> {
                Ok(arrived.contains(&awaited.from).then(|| (Instant::now(), awaited.from.get())))
            };
            exchange.poll(take).expect("it does not fail").map(|awaited| awaited.from)
        };
        assert_eq!(poll(&arrived), Some(ranks[0]));
        arrived.push(ranks[0]);
        assert_eq!(poll(&arrived), None);
        assert_eq!(exchange.into_contents().collect::<Vec<_>>(), [0, 10, 2]);
    }
}
