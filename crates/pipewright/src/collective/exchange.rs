//! An exchange: the messages that a rank expects from others, and those that have arrived.
//!
//! The caller sends; an exchange collects the messages that arrive, without waiting. Every exchange of this crate
//! follows one rule: a rank sends its own messages before it takes any, or it sends after it has taken messages of
//! ranks that do not wait for it. Sends never wait, so no order of ranks can block another.

use std::time::Instant;

use pipewright_schedule::Rank;

use super::group::Group;
use crate::message::Tag;
use crate::progress::Waiting;

/// Contents of one type from several ranks, in the order in which they are used.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    parts: Vec<Part<T>>,
    /// The time at which the latest of the arrived messages was sent.
    latest: Option<Instant>,
}

/// One content of an exchange.
#[derive(Debug)]
pub(crate) enum Part<T> {
    /// A message that has not arrived.
    Expected(Waiting),
    /// The content of a message that has arrived, or this rank's own.
    Here(T),
}

impl<T> Exchange<T> {
    /// Makes an exchange of these parts.
    pub(crate) fn new(parts: impl IntoIterator<Item = Part<T>>) -> Self {
        Self { parts: parts.into_iter().collect(), latest: None }
    }

    /// Makes an exchange in which every member of a group sends each other member one message under `tag`; `own` is
    /// this member's part.
    pub(crate) fn among(group: &Group, tag: Tag, own: T) -> Self {
        let mut own = Some(own);
        let part = |&from: &Rank| match own.take_if(|_| from == group.own()) {
            Some(own) => Part::Here(own),
            None => Part::Expected(Waiting { from, tag }),
        };
        Self::new(group.members().iter().map(part))
    }

    /// Makes an exchange of this rank's own part and then a message from each of `senders` under `tag`.
    pub(crate) fn gather(own: T, tag: Tag, senders: &[Rank]) -> Self {
        let others = senders.iter().map(|&from| Part::Expected(Waiting { from, tag }));
        Self::new(std::iter::once(Part::Here(own)).chain(others))
    }

    /// Makes an exchange of one message.
    pub(crate) fn one(from: Rank, tag: Tag) -> Self {
        Self::new([Part::Expected(Waiting { from, tag })])
    }

    /// Makes an exchange of a content that is already here.
    pub(crate) fn here(content: T) -> Self {
        Self::new([Part::Here(content)])
    }

    /// Calls `take` for each missing message. It returns the content with the time of sending, or `None` if the message
    /// has not arrived. Returns the first message that is still missing, or `None` if the exchange is complete.
    pub(crate) fn poll<E>(
        &mut self,
        mut take: impl FnMut(Waiting) -> Result<Option<(Instant, T)>, E>,
    ) -> Result<Option<Waiting>, E> {
        for part in &mut self.parts {
            let Part::Expected(waiting) = part else { continue };
            if let Some((sent, content)) = take(*waiting)? {
                *part = Part::Here(content);
                self.latest = self.latest.max(Some(sent));
            }
        }
        Ok(self.missing())
    }

    /// Returns the first message that has not arrived.
    pub(crate) fn missing(&self) -> Option<Waiting> {
        self.parts.iter().find_map(|part| match part {
            Part::Expected(waiting) => Some(*waiting),
            Part::Here(_) => None,
        })
    }

    /// Returns the time at which the latest of the arrived messages was sent; `None` before the first arrival.
    pub(crate) fn latest(&self) -> Option<Instant> {
        self.latest
    }

    /// Returns the content of a complete exchange of one message.
    pub(crate) fn into_one(self) -> T {
        self.into_parts().next().expect("a complete exchange of one message has its content")
    }

    /// Returns all contents of a complete exchange, in order.
    pub(crate) fn into_parts(self) -> impl Iterator<Item = T> {
        self.parts.into_iter().filter_map(|part| match part {
            Part::Here(content) => Some(content),
            Part::Expected(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_names_what_is_missing_and_keeps_its_order() {
        let ranks = [0, 1, 2].map(Rank::new);
        let group = Group::new(ranks.to_vec(), ranks[1]).expect("a group");
        let mut exchange = Exchange::among(&group, Tag::Ready, 10);
        let mut arrived = vec![ranks[2]];
        let mut poll = |arrived: &[Rank]| {
            let take = |waiting: Waiting| -> Result<_, ()> {
                Ok(arrived.contains(&waiting.from).then(|| (Instant::now(), waiting.from.get())))
            };
            exchange.poll(take).expect("it does not fail").map(|waiting| waiting.from)
        };
        assert_eq!(poll(&arrived), Some(ranks[0]));
        arrived.push(ranks[0]);
        assert_eq!(poll(&arrived), None);
        assert_eq!(exchange.into_parts().collect::<Vec<_>>(), [0, 10, 2]);
    }
}
