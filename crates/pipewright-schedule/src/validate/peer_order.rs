//! The rule of message order: for each ordered pair of ranks, the receives are in the order of the sends,
//! because a transport without tags delivers in order.

use std::collections::BTreeMap;

use crate::action::Action;
use crate::ids::{Microbatch, Rank};
use crate::schedule::Program;
use crate::transfer::Transfer;
use crate::validate::context::Context;
use crate::validate::violation::Report;

/// Checks the messages that have both ends. Only the first violation of a pair of ranks is reported, because
/// it causes the later ones.
pub(super) fn check(context: &Context<'_>, report: &mut Report) {
    let numbers = SendNumbers::new(context);
    let mut received = vec![0; numbers.channels.len()];
    let mut reported = vec![false; numbers.channels.len()];
    for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
        for (position, &action) in row.iter().enumerate() {
            let receive = Some(action).filter(|action| action.kind().is_receive());
            let Some(transfer) = receive.and_then(|action| complete(context, rank, action)) else { continue };
            let channel = numbers.channel(&transfer);
            let expected = received[channel];
            received[channel] += 1;
            if numbers.number(&transfer) != expected && !reported[channel] {
                reported[channel] = true;
                let peer = transfer.sender;
                let sent = || nth_send(context, peer, rank, expected).unwrap_or(transfer.send);
                let problem = || {
                    format!(
                        "{action} is in the place of the receive of {}, which rank {peer} sends first; receive in the order \
                         of the sends",
                        sent()
                    )
                };
                report.push(rank, || (position, problem()));
            }
        }
    }
}

/// Returns the message of `action` on `rank`, if both its ends are in the program and `rank` owns the stage.
fn complete(context: &Context<'_>, rank: Rank, action: Action) -> Option<Transfer> {
    let transfer = Transfer::of(context.program.placement(), action)?;
    let here = context.program.placement().owner(action.stage()) == Some(rank);
    (here && context.present.contains(transfer.send) && context.present.contains(transfer.receive))
        .then_some(transfer)
}

/// Returns the send number `wanted` from one rank to another. It scans the row, so it serves only to describe
/// violations.
fn nth_send(context: &Context<'_>, from: Rank, to: Rank, wanted: u32) -> Option<Action> {
    let sends = context.program.row(from).iter().filter(|action| action.kind().is_send());
    let transfers = sends.filter_map(|&action| complete(context, from, action));
    transfers.filter(|transfer| transfer.receiver == to).nth(wanted as usize).map(|transfer| transfer.send)
}

/// The number of each send among the sends from its rank to the same peer.
struct SendNumbers {
    microbatches: usize,
    /// The channel number of each ordered pair of ranks that have neighbouring stages.
    channels: BTreeMap<(Rank, Rank), usize>,
    /// For each stage, the channels of its forward and of its backward sends.
    channel_of: Vec<[usize; 2]>,
    /// For each stage and microbatch, the numbers of its forward and of its backward send.
    numbers: Vec<[u32; 2]>,
}

impl SendNumbers {
    fn new(context: &Context<'_>) -> Self {
        let mut this = Self::without_numbers(context.program);
        let mut sent = vec![0u32; this.channels.len()];
        for (rank, row) in (0..).map(Rank::new).zip(context.program.rows()) {
            for &action in row.iter().filter(|action| action.kind().is_send()) {
                let Some(transfer) = complete(context, rank, action) else { continue };
                let channel = this.channel(&transfer);
                let (slot, direction) = this.slot(&transfer);
                this.numbers[slot][direction] = sent[channel];
                sent[channel] += 1;
            }
        }
        this
    }

    fn without_numbers(program: &Program) -> Self {
        let placement = program.placement();
        let mut channels = BTreeMap::new();
        let mut channel_to = |from: Rank, to: Option<Rank>| {
            let next = channels.len();
            to.map_or(0, |to| *channels.entry((from, to)).or_insert(next))
        };
        let channel_of = placement.all_stages().map(|stage| {
            let rank = placement.rank_of(stage);
            [placement.next(stage), placement.previous(stage)]
                .map(|peer| channel_to(rank, peer.map(|peer| placement.rank_of(peer))))
        });
        let channel_of: Vec<_> = channel_of.collect();
        let microbatches = program.microbatches() as usize;
        let numbers = vec![[0; 2]; placement.stages() as usize * microbatches];
        Self { microbatches, channels, channel_of, numbers }
    }

    fn channel(&self, transfer: &Transfer) -> usize {
        let (_, direction) = self.slot(transfer);
        self.channel_of[transfer.send.stage().index()][direction]
    }

    fn number(&self, transfer: &Transfer) -> u32 {
        let (slot, direction) = self.slot(transfer);
        self.numbers[slot][direction]
    }

    /// Returns the index of a message's number. Its send is in the program, so its stage and microbatch are
    /// in range.
    fn slot(&self, transfer: &Transfer) -> (usize, usize) {
        let direction = usize::from(matches!(transfer.send, Action::SendBackward { .. }));
        let microbatch = transfer.send.microbatch().map_or(0, Microbatch::index);
        (transfer.send.stage().index() * self.microbatches + microbatch, direction)
    }
}
