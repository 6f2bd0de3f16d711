//! The critical path of an order, in blocks (`polish.rs`).

use crate::plan::evaluate::Evaluator;
use crate::plan::order::Order;

/// Part of a critical path: computations of one rank without a gap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Block {
    pub(super) rank: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

/// Returns the blocks of a critical path of the order that `evaluator` keeps, the last one first.
pub(super) fn critical(order: &Order, evaluator: &Evaluator) -> Vec<Block> {
    let ended = evaluator.ended();
    let mut blocks = Vec::new();
    let end_of = |rank: usize| ended[rank].last().map_or(0.0, |ended| ended.at);
    let latest = (0..ended.len()).max_by(|&one, &other| end_of(one).total_cmp(&end_of(other)));
    let Some((mut rank, mut last)) = latest.and_then(|rank| Some((rank, ended[rank].len().checked_sub(1)?)))
    else {
        return blocks;
    };
    loop {
        let first = (0..=last).rev().find(|&at| ended[rank][at].has_waited).unwrap_or(0);
        blocks.push(Block { rank, first, last });
        if !ended[rank][first].has_waited {
            return blocks;
        }
        let Some(sender) = evaluator.sender_of(order.rows[rank][first]) else { return blocks };
        (rank, last) = sender;
    }
}
