//! Whether the ranks begin the next step during a step ([`pipewright::train::Trainer::step_ahead`]).

/// The reasons not to begin the next step during a step. They are the same in all processes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AfterStep {
    /// The run has no further step.
    pub(super) is_last: bool,
    /// A signal asks for the end of the run, which ends with this step.
    pub(super) is_interrupted: bool,
    /// A checkpoint reads the state.
    pub(super) is_checkpoint_due: bool,
    /// An evaluation uses the ranks.
    pub(super) is_evaluation_due: bool,
    /// A copy in memory reads the state.
    pub(super) is_copy_due: bool,
    /// The run may end with the next step, for a reason that is known only after this one.
    pub(super) may_end: bool,
}

impl AfterStep {
    /// Returns whether nothing after the step needs the ranks or their state before the next step.
    pub(super) fn may_begin_next(self) -> bool {
        let Self { is_last, is_interrupted, is_checkpoint_due, is_evaluation_due, is_copy_due, may_end } =
            self;
        !(is_last || is_interrupted || is_checkpoint_due || is_evaluation_due || is_copy_due || may_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl Fn(&mut AfterStep), expected: bool) {
        let mut after = AfterStep::default();
        change(&mut after);
        assert_eq!(after.may_begin_next(), expected, "{after:?}");
    }

    #[test]
    fn a_step_begins_early_if_nothing_needs_the_state_before_it() {
        check(|_| (), true);
        check(|after| after.is_last = true, false);
        check(|after| after.is_interrupted = true, false);
        check(|after| after.is_checkpoint_due = true, false);
        check(|after| after.is_evaluation_due = true, false);
        check(|after| after.is_copy_due = true, false);
        check(|after| after.may_end = true, false);
        check(|after| (after.is_copy_due, after.may_end) = (true, true), false);
    }
}
