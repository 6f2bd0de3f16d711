//! The flags that the greedy scheduler tries, and the choice of a free stage.

/// The flags by which a stage chooses its next action.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) warm_up: WarmUp,
    pub(super) preference: Preference,
    pub(super) filling: Filling,
}

/// The largest number of forwards of a stage before its first backward, if memory allows them.
#[derive(Debug, Clone, Copy)]
pub(super) enum WarmUp {
    /// As in 1F1B: one for each stage from this one to the last.
    Narrow,
    /// As in ZB-H2: enough work until the first gradient arrives.
    Wide,
    /// Without a limit other than memory.
    Full,
}

/// The choice if both a forward and a backward can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preference {
    /// The backward.
    Backward,
    /// The one that did not run last.
    Alternate,
}

/// The gaps that a weight gradient fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filling {
    /// Every gap, even if that delays the next action.
    Any,
    /// Gaps that are long enough, or whose end is not known.
    Fitting,
}

/// An action of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Forward,
    InputBackward,
    WeightBackward,
}

/// The state of a free stage, on which its choice depends.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageState {
    /// The time at which the next forward can run, memory included; `None` if it is not known.
    pub(super) forward_at: Option<u64>,
    /// The time at which the next backward for the inputs can run; `None` if it is not known.
    pub(super) backward_at: Option<u64>,
    /// The duration of a weight gradient, if one is pending.
    pub(super) weights_take: Option<u64>,
    /// Whether the last action other than a weight gradient was a forward.
    pub(super) forward_was_last: bool,
    pub(super) now: u64,
}

impl Rules {
    /// Returns all combinations of flags.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [WarmUp::Narrow, WarmUp::Wide, WarmUp::Full].into_iter().flat_map(|warm_up| {
            [Preference::Backward, Preference::Alternate].into_iter().flat_map(move |preference| {
                [Filling::Any, Filling::Fitting].into_iter().map(move |filling| Self {
                    warm_up,
                    preference,
                    filling,
                })
            })
        })
    }

    /// Returns the largest number of forwards before the first backward of a stage with `following` later
    /// stages.
    pub(super) fn warm_up(self, following: u32) -> u32 {
        match self.warm_up {
            WarmUp::Narrow => following + 1,
            WarmUp::Wide => 2 * following + 1,
            WarmUp::Full => u32::MAX,
        }
    }

    /// Chooses the next action of a free stage; `None` to wait until its state changes.
    pub(super) fn choose(self, state: StageState) -> Option<Step> {
        let StageState { forward_at, backward_at, weights_take, forward_was_last, now } = state;
        let is_ready = |at: Option<u64>| at.is_some_and(|at| at <= now);
        match (is_ready(forward_at), is_ready(backward_at)) {
            (true, true) if self.preference == Preference::Alternate && !forward_was_last => {
                Some(Step::Forward)
            }
            (_, true) => Some(Step::InputBackward),
            (true, false) => Some(Step::Forward),
            (false, false) => {
                let gap_ends = forward_at.into_iter().chain(backward_at).min();
                let fits = |takes: &u64| {
                    self.filling == Filling::Any || gap_ends.is_none_or(|end| now + takes <= end)
                };
                weights_take.filter(fits).map(|_| Step::WeightBackward)
            }
        }
    }
}
