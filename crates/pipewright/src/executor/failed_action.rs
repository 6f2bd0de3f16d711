//! The action that the error of a failed step names, and whether its device may have failed earlier.

use pipewright_schedule::{Action, StageIndex};

use crate::failure::{Cause, UpdateFailure};

/// The state of a rank when it failed.
pub(super) struct Failure<'a> {
    /// The rank's row of the program.
    pub(super) row: &'a [Action],
    /// The action that was running; `None` before and after the program.
    pub(super) action: Option<Action>,
    /// Whether all actions of the row have run.
    pub(super) has_run: bool,
    /// The last stage whose update has begun.
    pub(super) updates: Option<StageIndex>,
    /// Whether the rank's device computes behind the rank.
    pub(super) computes_behind: bool,
}

/// Returns the action that an error names, and its cause.
///
/// A device that computes behind its rank may fail in any action of the program, which the rank notices when
/// it reads the losses or the squares of the gradients. The error then names the last action that the device
/// got. The update is the last user code of a step, so an error after its begin names it and its stage.
pub(super) fn locate(failure: &Failure<'_>, cause: Cause) -> (Option<Action>, Cause) {
    let &Failure { row, action, has_run, updates, computes_behind } = failure;
    if let Some(stage) = updates {
        return (action, of_update(stage, cause));
    }
    let is_late = has_run && computes_behind;
    let last = || row.iter().rev().copied().find(|action| action.is_compute());
    match cause {
        Cause::Panic { message } if is_late => (action.or_else(last), Cause::Device { message }),
        cause @ Cause::DeviceMemory { .. } if is_late => (action.or_else(last), cause),
        cause => (action, cause),
    }
}

/// Returns the cause of a failure in or after the update of `stage`.
fn of_update(stage: StageIndex, cause: Cause) -> Cause {
    let failure = match cause {
        Cause::Panic { message } => UpdateFailure::Optimizer { message },
        Cause::DeviceMemory { bytes } => UpdateFailure::DeviceMemory { bytes },
        cause => return cause,
    };
    Cause::Update { stage, failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: [&str; 4] = ["1RECV_F0", "1F0", "1B0", "1SEND_B0"];

    fn check(action: Option<usize>, has_updated: bool, computes_behind: bool, cause: Cause, expected: &str) {
        let updates = has_updated.then_some(StageIndex::new(1));
        let row = ROW.map(|text| text.parse::<Action>().expect("an action"));
        let has_run = action.is_none();
        let action = action.map(|index| row[index]);
        let (action, cause) =
            locate(&Failure { row: &row, action, has_run, updates, computes_behind }, cause);
        let action = action.map_or("-".to_owned(), |action| action.to_string());
        assert_eq!(format!("{action} {cause}"), expected);
    }

    #[test]
    fn a_device_that_fails_after_the_program_is_reported_with_its_last_action() {
        let panic = || Cause::Panic { message: "lost".to_owned() };
        let memory = || Cause::DeviceMemory { bytes: 8 };
        let late =
            "1B0 the device failed: lost; it computes behind its rank, so an earlier action may be the cause";
        check(None, false, true, panic(), late);
        check(None, false, true, memory(), "1B0 the device has no memory left: 8 bytes were asked for");
        // In an action, the code of the stage may have panicked by itself.
        check(Some(1), false, true, panic(), "1F0 the stage panicked: lost");
        check(Some(1), false, true, memory(), "1F0 the device has no memory left: 8 bytes were asked for");
        // The processor computes at once, and an optimizer belongs to no action.
        check(None, false, false, panic(), "- the stage panicked: lost");
        check(None, true, true, panic(), "- the optimizer panicked: lost");
        check(None, true, true, memory(), "- the device has no memory left: 8 bytes were asked for");
    }
}
