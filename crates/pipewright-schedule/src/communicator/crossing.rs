//! Receives that get the tensor of another message, because messages have no tags.

use std::collections::BTreeMap;
use std::fmt;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Program;
use crate::transfer::Transfer;

/// A receive that gets the tensor of another message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crossing {
    /// The rank that receives.
    pub receiver: Rank,
    /// The position of the receive in the row of its rank.
    pub position: usize,
    /// The receive.
    pub receive: Action,
    /// The rank that sends.
    pub sender: Rank,
    /// The send that the receive meets.
    pub send: Action,
}

impl Crossing {
    /// Returns what happens at the receive, without its place.
    pub fn text(&self) -> String {
        let Self { receive, sender, send, .. } = self;
        format!("{receive} gets the tensor of {send} from rank {sender}")
    }
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, position {}: {}", self.receiver, self.position, self.text())
    }
}

/// The sends and the receives of one directed pair of ranks, in the order of their rows. The receives have
/// their positions.
type Channel = (Vec<Action>, Vec<(usize, Action)>);

/// Returns the receives of `program` that are not at the place of their send in the order of messages, at
/// most `limit` of each directed pair of ranks, and the number of all of them. Every send has its receive.
pub(super) fn crossings(program: &Program, limit: usize) -> (Vec<Crossing>, u64) {
    let (mut listed, mut total) = (Vec::new(), 0);
    for ((sender, receiver), (sends, receives)) in channels(program) {
        let mut of_channel = 0;
        for (send, (position, receive)) in sends.into_iter().zip(receives) {
            if Transfer::other_end(send) == Some(receive) {
                continue;
            }
            of_channel += 1;
            if of_channel <= limit {
                listed.push(Crossing { receiver, position, receive, sender, send });
            }
        }
        total += of_channel as u64;
    }
    (listed, total)
}

fn channels(program: &Program) -> BTreeMap<(Rank, Rank), Channel> {
    let mut channels: BTreeMap<(Rank, Rank), Channel> = BTreeMap::new();
    for (position, action) in program.rows().iter().flat_map(|row| row.iter().copied().enumerate()) {
        let Some(transfer) = Transfer::of(program.placement(), action) else { continue };
        let (sends, receives) = channels.entry((transfer.sender, transfer.receiver)).or_default();
        match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => sends.push(action),
            Action::RecvForward { .. } | Action::RecvBackward { .. } => receives.push((position, action)),
            _ => {}
        }
    }
    channels
}
