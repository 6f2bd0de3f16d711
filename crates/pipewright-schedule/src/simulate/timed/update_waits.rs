//! The waits of a timed simulation for the updates between batches.

use super::state::Run;
use crate::action::Action;
use crate::batch_gate::needs;
use crate::ids::Rank;

impl Run<'_> {
    /// Waits for the update that `action` needs. Returns whether that is known to have happened.
    pub(super) fn passes_update(&mut self, rank: Rank, action: Action) -> bool {
        let Some(updates) = &mut self.updates else { return true };
        if let Some(batch) = updates.gate.closed_for(action) {
            updates.gate.wait(rank, batch);
            return false;
        }
        for batch in needs(self.program.numbering(), action) {
            let Some(&until) = updates.ended.get(batch as usize) else { continue };
            self.ranks[rank.index()].clock.idle_until(&mut self.tape, until);
        }
        true
    }

    /// Counts a computation, and wakes the ranks that wait for the batch that it has ended.
    pub(super) fn note_computed(&mut self, rank: Rank, action: Action) {
        let Some(updates) = &mut self.updates else { return };
        let now = self.ranks[rank.index()].clock.now();
        let (tape, ended, ready) = (&mut self.tape, &mut updates.ended, &mut self.ready);
        updates.gate.computed(rank, action, |batch, woken| {
            let batch = &mut ended[batch as usize];
            *batch = tape.latest(rank, [*batch, now]);
            ready.extend(woken);
        });
    }

    /// Returns a rank that has not ended the batch whose update `action` waits for; `None` if it waits for no
    /// update.
    pub(super) fn update_waiter(&self, rank: Rank, action: Action) -> Option<Rank> {
        let gate = &self.updates.as_ref()?.gate;
        Some(gate.behind(gate.closed_for(action)?).unwrap_or(rank))
    }
}
