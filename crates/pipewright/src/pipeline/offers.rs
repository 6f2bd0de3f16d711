//! Batches that a process offers: its ranks have them, and begin them only if a gradient norm says that all processes have
//! begun the same ones.

use super::begun::{Condition, Offered, Running, Waiting};
use super::running::Pipeline;
use crate::executor::{agree_alike, digest};

impl Pipeline {
    /// Gives the ranks a batch that they begin only if all processes have begun the same one. Returns `None` if
    /// they do not have it, because it cannot be used, or because no gradient norm before it can say so.
    pub(super) fn offer(&mut self, waiting: &Waiting) -> Option<Running> {
        let before = self.last_begun().map(|before| &before.plan);
        if self.is_whole_world() || !before.is_some_and(|before| before.updates() && self.may_follow(before))
        {
            return None;
        }
        let checked = waiting.batch.as_ref().ok()?;
        let form = checked.form();
        let digest = digest(&form);
        let mut batch = checked.clone();
        batch.adopt(&self.setup, agree_alike(form).ok()?);
        let last = self.ranks.at;
        let Waiting { purpose, when, start, .. } = *waiting;
        let offered = Offered { batch: checked.clone(), purpose, when, last };
        let Ok(running) = self.send_batch(batch, start, Condition::Offer(Box::new(offered))) else {
            self.ranks.begin(last);
            return None;
        };
        // The ranks have the batch before they can learn that all processes have begun it.
        self.setup.next_batch.add_sent(digest);
        Some(running)
    }

    /// Takes back the batches that were offered and that not all processes have, and lets them wait. No rank has begun
    /// them. Other processes may not have offered them, so their numbers do not count.
    pub(super) fn take_back_offers(&mut self) {
        let granted = self.granted;
        let is_open = |next: &mut Result<Running, _>| {
            let is_open = |next: &Running| {
                matches!(next.condition, Condition::Offer(_)) && next.plan.at.attempt > granted
            };
            next.as_ref().is_ok_and(is_open)
        };
        while let Some(Ok(Running { condition, start, .. })) = self.begun.pop_back_if(is_open) {
            if let Condition::Offer(offered) = condition {
                let Offered { batch, purpose, when, last } = *offered;
                self.take_back(last);
                self.waiting.push_front(Waiting { batch: Ok(batch), purpose, when, common: None, start });
            }
        }
        if self.begun.is_empty() {
            self.setup.next_batch.clear();
        }
    }
}
