//! The receives that this process has posted for the boundary messages of other ranks.
//!
//! The size of a message follows from the metadata of its boundary and from the rows of its microbatch, so
//! the first message of a rank shows it. From then on, two receives of that size are posted for the rank,
//! into buffers that are allocated once: one is filled while the other is decoded. The rank gets the size,
//! and sends each message that fits to them ([`Way::Posted`](super::calls::Way)). A longer message is
//! announced, as the first one was, and its size counts from then on.
//!
//! **A larger size.** The posted receives are cancelled, and posted again with the larger size when they are
//! done. The rank gets the size when all of them have it, so no message is longer than its receive.

use std::collections::{BTreeMap, VecDeque};

use super::calls::{Calls, MpiError, Received, Transfer};
use crate::ids::WorldRank;
use crate::transport::wire::BLOCK;

/// The number of receives that are posted for a rank.
const RECEIVES: usize = 2;

/// The posted receives of all ranks that send boundary messages to this one.
#[derive(Default)]
pub(super) struct PostedReceives {
    links: BTreeMap<WorldRank, Link>,
    /// Whether receives that are done are not posted again.
    is_closed: bool,
}

/// The posted receives for the messages of one rank.
struct Link {
    /// The size of each buffer.
    bytes: usize,
    /// In the order in which messages arrive.
    receives: VecDeque<Transfer>,
    /// The number of receives that are not yet of this size.
    smaller: usize,
}

impl PostedReceives {
    /// Makes room for messages that are as long as one of `bytes` bytes from a rank. Returns the size that
    /// the rank must be told, if it is known now.
    pub(super) fn make_room(
        &mut self,
        calls: &Calls,
        from: WorldRank,
        bytes: usize,
    ) -> Result<Option<usize>, MpiError> {
        if self.is_closed {
            return Ok(None);
        }
        // The head of a later message may have a few bytes more, because larger numbers take more bytes.
        let with_head = bytes.saturating_add(BLOCK);
        match self.links.get_mut(&from) {
            // After a change of the size, the next message that is still too long changes it again.
            Some(link) if bytes <= link.bytes || link.smaller > 0 => Ok(None),
            Some(link) => {
                link.bytes = with_head;
                link.smaller = link.receives.len();
                link.receives.iter_mut().try_for_each(|receive| calls.cancel(receive))?;
                Ok(None)
            }
            None => {
                let post = |_| calls.post(from, vec![0; with_head]);
                let receives = (0..RECEIVES).map(post).collect::<Result<_, _>>()?;
                self.links.insert(from, Link { bytes: with_head, receives, smaller: 0 });
                Ok(Some(with_head))
            }
        }
    }

    /// Removes and returns a receive that is done, if there is one.
    pub(super) fn next_done(&mut self, calls: &Calls) -> Result<Option<Received>, MpiError> {
        for link in self.links.values_mut() {
            if let Some(received) = calls.received(&mut link.receives)? {
                return Ok(Some(received));
            }
        }
        Ok(None)
    }

    /// Posts a receive again with the buffer of one that was done. Returns the size that the rank must be
    /// told, if it has changed and all its receives have it.
    pub(super) fn post_again(
        &mut self,
        calls: &Calls,
        from: WorldRank,
        mut buffer: Vec<u8>,
    ) -> Result<Option<usize>, MpiError> {
        let Some(link) = self.links.get_mut(&from).filter(|_| !self.is_closed) else { return Ok(None) };
        let is_smaller = buffer.len() < link.bytes;
        if is_smaller {
            buffer = vec![0; link.bytes];
            link.smaller -= 1;
        }
        link.receives.push_back(calls.post(from, buffer)?);
        Ok((is_smaller && link.smaller == 0).then_some(link.bytes))
    }

    /// Cancels all receives, and posts none again.
    pub(super) fn close(&mut self, calls: &Calls) -> Result<(), MpiError> {
        self.is_closed = true;
        self.links.values_mut().flat_map(|link| &mut link.receives).try_for_each(|it| calls.cancel(it))
    }

    /// Returns whether no receive is posted.
    pub(super) fn is_empty(&self) -> bool {
        self.links.values().all(|link| link.receives.is_empty())
    }
}
