//! The order of batches when parameters are delayed by one update ([`crate::delay`]).
//!
//! Rule: batch `t + 2` reads the parameters that the update with batch `t` makes, and this update needs the
//! gradient norm over all ranks. So a rank starts a batch once every rank has ended the batch two before it.

use std::num::NonZeroU32;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Numbering;

/// The distance from a batch to the batch whose update it waits for.
pub(crate) const BATCHES_IN_FLIGHT: u32 = 2;

/// Counts what is left of each batch while rows run.
pub(crate) struct BatchGate {
    numbering: Numbering,
    /// For each batch, the computations that each rank has left.
    left: Vec<Vec<u32>>,
    /// For each batch, the number of ranks with computations left.
    unfinished: Vec<u32>,
    /// For each batch, the ranks that wait for its update.
    waiting: Vec<Vec<Rank>>,
}

impl BatchGate {
    /// Returns the gate before the first action of `rows`; `None` for a single batch, which waits for no update.
    pub(crate) fn over<Cell: Copy + Into<Option<Action>>>(
        numbering: Numbering,
        rows: &[Vec<Cell>],
    ) -> Option<Self> {
        if numbering.batches == NonZeroU32::MIN {
            return None;
        }
        let batches = numbering.batches.get() as usize;
        let mut left = vec![vec![0; rows.len()]; batches];
        for (rank, row) in rows.iter().enumerate() {
            let actions = row.iter().filter_map(|&cell| cell.into());
            for batch in actions.flat_map(|action: Action| computed_batches(numbering, action)) {
                if let Some(ranks) = left.get_mut(batch as usize) {
                    ranks[rank] += 1;
                }
            }
        }
        let unfinished = left.iter().map(|ranks| ranks.iter().filter(|left| **left > 0).count() as u32);
        Some(Self { numbering, unfinished: unfinished.collect(), waiting: vec![Vec::new(); batches], left })
    }

    /// Returns the batch whose update `action` waits for; `None` if `action` may run.
    pub(crate) fn closed_for(&self, action: Action) -> Option<u32> {
        needs(self.numbering, action)
            .find(|&batch| self.unfinished.get(batch as usize).is_some_and(|ranks| *ranks > 0))
    }

    /// Notes that `rank` waits for the update with `batch`, and returns a rank that has not ended it.
    pub(crate) fn wait(&mut self, rank: Rank, batch: u32) -> Rank {
        self.waiting[batch as usize].push(rank);
        self.behind(batch).unwrap_or(rank)
    }

    /// Returns a rank that has not ended `batch`.
    pub(crate) fn behind(&self, batch: u32) -> Option<Rank> {
        let behind = self.left[batch as usize].iter().position(|left| *left > 0);
        behind.map(|behind| Rank::new(behind as u32))
    }

    /// Notes that `rank` has computed `action`, and calls `ended` with each batch that the rank has ended and
    /// the ranks that this wakes.
    pub(crate) fn computed(&mut self, rank: Rank, action: Action, mut ended: impl FnMut(u32, Vec<Rank>)) {
        for batch in computed_batches(self.numbering, action) {
            let Some(left) = self.left.get_mut(batch as usize).map(|ranks| &mut ranks[rank.index()]) else {
                continue;
            };
            *left -= 1;
            if *left == 0 {
                let unfinished = &mut self.unfinished[batch as usize];
                *unfinished -= 1;
                let is_last = *unfinished == 0;
                let woken =
                    if is_last { std::mem::take(&mut self.waiting[batch as usize]) } else { Vec::new() };
                ended(batch, woken);
            }
        }
    }
}

/// Returns the batches of the parts of `action`, if it computes.
pub(crate) fn computed_batches(numbering: Numbering, action: Action) -> impl Iterator<Item = u32> {
    let parts = action.parts().filter(|part| part.is_compute());
    parts.filter_map(Action::microbatch).map(move |microbatch| numbering.batch_of(microbatch))
}

/// Returns the batches whose updates `action` needs.
pub(crate) fn needs(numbering: Numbering, action: Action) -> impl Iterator<Item = u32> {
    computed_batches(numbering, action).filter_map(needed_by)
}

/// Returns the batch whose update `batch` needs; `None` for the first batches, which read the first parameters.
pub(crate) fn needed_by(batch: u32) -> Option<u32> {
    batch.checked_sub(BATCHES_IN_FLIGHT)
}
