//! The flags that the greedy scheduler tries, and the choice that a free stage makes by them.

/// How a stage decides between several things that it could do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) warm_up: WarmUp,
    pub(super) preference: Preference,
    pub(super) filling: Filling,
}

/// How many forwards a stage runs at most before its first backward, as far as memory allows.
#[derive(Debug, Clone, Copy)]
pub(super) enum WarmUp {
    /// As in 1F1B: one for each stage from it to the last.
    Narrow,
    /// As in ZB-H2: enough to work until the first gradient comes up.
    Wide,
    /// As many as memory allows.
    Full,
}

/// Which of a forward and a backward comes first where both can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preference {
    /// The backward.
    Backward,
    /// The one that did not run last.
    Alternate,
}

/// Which gaps a weight gradient fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filling {
    /// Every gap, though it may delay what comes next.
    Any,
    /// Gaps that are long enough, as far as it is known when they end.
    Fitting,
}

/// What a stage can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Forward,
    InputBackward,
    WeightBackward,
}

/// What a free stage knows when it chooses.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageState {
    /// When the next forward can run, memory included; `None` where that is not known.
    pub(super) forward_at: Option<u64>,
    /// When the next backward for the inputs can run; `None` where that is not known.
    pub(super) backward_at: Option<u64>,
    /// How long a weight gradient takes, where one waits.
    pub(super) weights_take: Option<u64>,
    /// Whether the last step other than a weight gradient was a forward.
    pub(super) forward_was_last: bool,
    pub(super) now: u64,
}

impl Rules {
    /// All combinations of flags.
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

    /// The most forwards before the first backward of a stage that `following` stages follow.
    pub(super) fn warm_up(self, following: u32) -> u32 {
        match self.warm_up {
            WarmUp::Narrow => following + 1,
            WarmUp::Wide => 2 * following + 1,
            WarmUp::Full => u32::MAX,
        }
    }

    /// What a free stage does; `None` to wait until the state changes.
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
