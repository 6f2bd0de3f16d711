//! [`ReportLink`]: the exchange of reports between processes whose ranks have begun the next step.
//!
//! The ranks compute meanwhile, so the threads that wait for the results exchange the reports, up and down the
//! tree of all ranks, as the ranks would (`executor/report_exchange.rs`). A message has the attempt of its step.
//! A failure of that attempt ends the exchange; a failure of a later one does not.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ranks::Ranks;
use super::step_plan::StepAttempt;
use crate::byte_channel::ByteChannel;
use crate::executor::{OpenReport, RankReport};
use crate::failure::StepError;
use crate::ids::{Attempt, WorldRank};
use crate::message::{MessageError, Tag, encoded};

/// The connection of a process to the processes that it exchanges reports with.
pub(super) struct ReportLink {
    channel: ByteChannel,
    /// The messages that have arrived and were not taken.
    arrived: Vec<(WorldRank, ReportMessages)>,
}

/// A message of an exchange: the reports of a subtree ([`Tag::Report`]), or the summary of all reports
/// ([`Tag::Summary`]).
#[derive(Serialize, Deserialize)]
struct ReportMessages {
    attempt: Attempt,
    tag: Tag,
    encoded: Vec<u8>,
}

impl ReportLink {
    pub(super) fn new(channel: ByteChannel) -> Self {
        Self { channel, arrived: Vec::new() }
    }

    /// Exchanges this process's report on the step `at` for the reports of all ranks.
    ///
    /// # Errors
    /// When the step fails on a rank of another process, such as a lost one, or when no rank of the world has
    /// made progress for the whole deadline.
    pub(super) fn exchange(
        &mut self,
        at: StepAttempt,
        mut open: OpenReport,
        ranks: &Ranks,
    ) -> Result<Vec<RankReport>, StepError> {
        // A step that failed has left messages.
        self.arrived.retain(|(_, message)| message.attempt >= at.attempt);
        let tree = open.tree.clone();
        let unreadable = |error: MessageError| ranks.own_error(at, error.into());
        for &child in &tree.children {
            let reports = self.receive(at, child, Tag::Report, ranks)?;
            open.add_subtree(child, &reports).map_err(unreadable)?;
        }
        let Some(parent) = tree.parent else {
            let (summary, reports) = open.summarize();
            self.send(at, &tree.children, Tag::Summary, &summary);
            return Ok(reports);
        };
        self.send(at, &[parent], Tag::Report, &open.subtree());
        let summary = self.receive(at, parent, Tag::Summary, ranks)?;
        self.send(at, &tree.children, Tag::Summary, &summary);
        open.complete(parent, &summary).map_err(unreadable)
    }

    /// Sends a message to several ranks. The last one has the largest subtree and gets it first.
    fn send(&self, at: StepAttempt, to: &[WorldRank], tag: Tag, content: &[u8]) {
        let message = ReportMessages { attempt: at.attempt, tag, encoded: content.to_vec() };
        let bytes = encoded(&message);
        to.iter().rev().for_each(|&to| self.channel.send(to, bytes.to_vec()));
    }

    /// Waits for a message of an exchange.
    fn receive(
        &mut self,
        at: StepAttempt,
        from: WorldRank,
        tag: Tag,
        ranks: &Ranks,
    ) -> Result<Arc<[u8]>, StepError> {
        ranks.await_process(at, |wait| self.look(wait, (from, at.attempt, tag)))
    }

    /// Returns the message with this key, if it arrives within `wait`.
    fn look(&mut self, wait: Duration, key: (WorldRank, Attempt, Tag)) -> Option<Arc<[u8]>> {
        let is_wanted =
            |(from, message): &(WorldRank, ReportMessages)| (*from, message.attempt, message.tag) == key;
        if !self.arrived.iter().any(is_wanted)
            && let Ok((from, bytes)) = self.channel.incoming().recv_timeout(wait)
        {
            // A process of another build is refused at launch, so every message can be read.
            self.arrived.extend(postcard::from_bytes(&bytes).ok().map(|message| (from, message)));
        }
        let index = self.arrived.iter().position(is_wanted)?;
        Some(self.arrived.swap_remove(index).1.encoded.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_taken_by_its_sender_step_and_kind() {
        let mut links: Vec<ReportLink> = ByteChannel::group(3).into_iter().map(ReportLink::new).collect();
        let [rank_0, rank_1, rank_2] = [0, 1, 2].map(WorldRank::new);
        let at = |attempt| StepAttempt { attempt: Attempt::new(attempt), ..StepAttempt::default() };
        // The reports of a later step arrive first.
        links[1].send(at(2), &[rank_0], Tag::Report, &[12]);
        links[1].send(at(1), &[rank_0], Tag::Report, &[11]);
        links[2].send(at(1), &[rank_0, rank_1], Tag::Summary, &[21]);
        let mut look = |link: usize, from, attempt, tag| {
            let key = (from, Attempt::new(attempt), tag);
            let looks = (0..3).find_map(|_| links[link].look(Duration::from_millis(20), key));
            looks.map(|message| message.to_vec())
        };
        assert_eq!(look(0, rank_2, 1, Tag::Report), None, "it is a summary");
        assert_eq!(look(0, rank_1, 1, Tag::Report), Some(vec![11]));
        assert_eq!(look(0, rank_1, 1, Tag::Report), None, "it was taken");
        assert_eq!(look(0, rank_2, 1, Tag::Summary), Some(vec![21]));
        assert_eq!(look(0, rank_1, 2, Tag::Report), Some(vec![12]));
        assert_eq!(look(1, rank_2, 1, Tag::Summary), Some(vec![21]));
    }
}
