//! The search for the shortest of several simulated runs.

use crate::action::Action;

/// The result of a simulated run.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The end of the last action, in ticks.
    pub(super) makespan: u64,
    pub(super) rows: Vec<Vec<Option<Action>>>,
}

/// Returns the shortest run of all candidates; the first of several. `run` simulates a candidate; it returns
/// nothing if the run does not end before a tick, so that it can stop when it is longer than the best one.
pub(super) fn shortest<Candidate>(
    candidates: impl IntoIterator<Item = Candidate>,
    run: impl Fn(Candidate, u64) -> Option<Outcome>,
) -> Option<Outcome> {
    candidates.into_iter().fold(None, |best: Option<Outcome>, candidate| {
        let before = best.as_ref().map_or(u64::MAX, |best| best.makespan);
        run(candidate, before).or(best)
    })
}
