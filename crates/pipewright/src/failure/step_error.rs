//! [`StepError`]: a step that failed, with its place and its cause.

use pipewright_schedule::Action;

use super::cause::Cause;
use crate::ids::{StepNumber, WorldRank};

/// A step that failed: where, and why.
#[derive(Clone, thiserror::Error)]
#[error("step {step}: rank {rank}{}: {cause}", Where(*.action, .cause))]
pub struct StepError {
    /// The rank that failed first.
    pub rank: WorldRank,
    /// The step, counted from 1.
    pub step: StepNumber,
    /// The rank's action; `None` after the program, unless its device failed in it.
    pub action: Option<Action>,
    /// Why it failed.
    #[source]
    pub cause: Cause,
}

pipewright_schedule::message_as_debug!(StepError);

/// The place of an error spelled out: `, stage 2, microbatch 5, action 2F5` or `, stage 2, update`.
struct Where<'a>(Option<Action>, &'a Cause);

impl std::fmt::Display for Where<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let &Self(action, cause) = self;
        if let Cause::Update { stage, .. } = cause {
            return write!(f, ", stage {stage}, update");
        }
        let Some(action) = action else { return Ok(()) };
        write!(f, ", stage {}", action.stage())?;
        if let Some(microbatch) = action.microbatch() {
            write!(f, ", microbatch {microbatch}")?;
        }
        write!(f, ", action {action}")
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::StageIndex;

    use super::super::update_failure::UpdateFailure;
    use super::*;

    fn error(rank: u32, action: Option<&str>) -> StepError {
        StepError {
            rank: WorldRank::new(rank),
            step: StepNumber::new(3),
            action: action.map(|text| text.parse().expect("an action")),
            cause: Cause::Panic { message: "out of cheese".to_owned() },
        }
    }

    #[test]
    fn a_failed_update_names_its_stage() {
        let stage = StageIndex::new(5);
        let text =
            |failure| StepError { cause: Cause::Update { stage, failure }, ..error(1, None) }.to_string();
        let device = |message: &str| text(UpdateFailure::of_device(message.to_owned()));
        assert_eq!(device("lost"), "step 3: rank 1, stage 5, update: the device failed: lost");
        assert_eq!(
            device("can't allocate buffer of size: 4096"),
            "step 3: rank 1, stage 5, update: the device has no memory left: 4096 bytes were asked for"
        );
        let message = "out of cheese".to_owned();
        assert_eq!(
            text(UpdateFailure::Optimizer { message }),
            "step 3: rank 1, stage 5, update: the optimizer panicked: out of cheese"
        );
    }

    #[test]
    fn an_error_names_its_place_and_cause() {
        assert_eq!(
            error(1, Some("1F3")).to_string(),
            "step 3: rank 1, stage 1, microbatch 3, action 1F3: the stage panicked: out of cheese"
        );
        assert_eq!(error(1, None).to_string(), "step 3: rank 1: the stage panicked: out of cheese");
    }
}
