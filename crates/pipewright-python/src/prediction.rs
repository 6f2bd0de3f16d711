//! Predictions of programs: at costs of actions, in ticks, and at the costs of a profile.

use std::sync::Arc;

use pipewright_schedule::communicator::Communicator;
use pipewright_schedule::costs::check_recomputed;
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::lower::{ProgramSource, SourceError};
use pipewright_schedule::picture::TimeUnit;
use pipewright_schedule::plan::{PlanChoice, PredictError, Prediction, best_cut, predict_program};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::simulate::{SimulateError, Summary, logical, timed, timed_on};
use pipewright_schedule::{Costs, Level, LowerConfig, Recompute};
use pyo3::prelude::*;

use crate::arguments::{named, whole_list};
use crate::costs::costs_of;
use crate::errors::{Raised, plain, value_error};
use crate::interrupt::interruptible;
use crate::profile::profile_of;
use crate::timeline::{Predicted, PyTimeline};

/// The error of a prediction.
pub(crate) enum PredictionError {
    /// The program is unsound.
    Source(SourceError),
    /// The costs do not fit the program.
    Simulate(SimulateError),
    /// The profile or the choices for it do not fit the program.
    Profile(PredictError),
}

impl From<PredictError> for PredictionError {
    fn from(error: PredictError) -> Self {
        match error {
            PredictError::Lower(error) => Self::Source(error.into()),
            PredictError::Simulate(error) => Self::Simulate(error),
            error => Self::Profile(error),
        }
    }
}

impl From<SourceError> for PredictionError {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

impl From<SimulateError> for PredictionError {
    fn from(error: SimulateError) -> Self {
        Self::Simulate(error)
    }
}

impl PredictionError {
    /// Returns the error with its causes.
    pub(crate) fn sentence(&self) -> String {
        match self {
            Self::Source(error) => with_causes(error),
            Self::Simulate(error) => with_causes(error),
            Self::Profile(error) => with_causes(error),
        }
    }
}

impl Raised for PredictionError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Source(error) => error.raised(py),
            Self::Simulate(error) => error.raised(py),
            Self::Profile(error) => plain(py, "PlanError", error),
        }
    }
}

/// The costs of a prediction.
pub(crate) enum At {
    Costs(Box<Costs>, Option<Communicator>),
    Profile(ProfileChoices),
    Ticks,
}

impl At {
    /// Reads the arguments of a simulation of a schedule with `stages` stages, and refuses arguments without an effect.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    pub(crate) fn of(
        py: Python<'_>,
        stages: u32,
        costs: Option<&Bound<'_, PyAny>>,
        profile: Option<&Bound<'_, PyAny>>,
        boundaries: Option<&Bound<'_, PyAny>>,
        recompute: &str,
        logical: bool,
        communicator: Option<Communicator>,
    ) -> PyResult<Self> {
        let recompute: Recompute = named(py, recompute)?;
        if communicator.is_some() && (logical || profile.is_some()) {
            return Err(value_error("transport is for costs; leave profile and logical out, or transport"));
        }
        if profile.is_none() && boundaries.is_some() {
            return Err(value_error("boundaries are for a profile; add it, or leave them out"));
        }
        if logical {
            return match (costs, profile, &recompute) {
                (None, None, Recompute::None) => Ok(Self::Ticks),
                _ => Err(value_error(
                    "ticks have no costs; leave costs, profile and recompute out, or logical",
                )),
            };
        }
        let Some(profile) = profile else {
            if recompute.has_parts() {
                let message = "recompute names parts of layers, whose sizes and times are in a profile; add it, or name stages";
                return Err(value_error(message));
            }
            let costs = Costs {
                recompute,
                ..costs_of(costs)?.map(|given| given.of_stages(stages)).unwrap_or_default()
            };
            return Ok(Self::Costs(Box::new(costs), communicator));
        };
        if costs.is_some() {
            return Err(value_error("costs and profile are given; leave one of them out"));
        }
        if recompute.is_by_block() {
            let message = "recompute is block, and a profile has no blocks inside its layers; use stage, or a list of stages";
            return Err(value_error(message));
        }
        let boundaries = boundaries.map(|list| whole_list("boundaries", list)).transpose()?;
        Ok(Self::Profile(ProfileChoices { profile: profile_of(profile)?, boundaries, recompute }))
    }

    /// Proves the program of a schedule that is called `name`, and predicts its run. Other threads of Python go on.
    pub(crate) fn timeline(
        self,
        py: Python<'_>,
        name: String,
        source: ProgramSource,
    ) -> PyResult<PyTimeline> {
        let predicted = interruptible(py, move |_| self.predict(name, source))?;
        predicted.map(PyTimeline::from).map_err(|error| error.raised(py))
    }

    /// Proves the program of a schedule that is called `name`, and predicts its run.
    pub(crate) fn predict(self, name: String, source: ProgramSource) -> Result<Predicted, PredictionError> {
        match self {
            Self::Costs(costs, communicator) => at_costs(name, source, *costs, communicator.as_ref()),
            Self::Profile(choices) => at_profile(name, source, choices),
            Self::Ticks => in_ticks(name, source),
        }
    }
}

/// Proves the program of a schedule that is called `name`, and predicts its run at `costs`, on a communicator
/// if one is given.
pub(crate) fn at_costs(
    name: String,
    source: ProgramSource,
    costs: Costs,
    communicator: Option<&Communicator>,
) -> Result<Predicted, PredictionError> {
    let passes = LowerConfig::training_at(&costs);
    let (program, run, steps) = match communicator {
        Some(communicator) => {
            // The communicator decides whether the program is sound. A receive holds its rank in the logical
            // simulation, which some communicators do not demand.
            let program = source.lowered(&passes)?.into_program();
            let run = timed_on(&program, &costs, communicator)?;
            let steps = logical(&program).map_or(0, |run| run.steps());
            (program, run, steps)
        }
        None => {
            let program = source.program(&passes)?.into_program();
            let run = timed(&program, &costs)?;
            let steps = logical(&program)?.steps();
            (program, run, steps)
        }
    };
    let summary = Summary::of(&run, steps, &costs);
    let (timeline, unit) = (run.timeline().clone(), TimeUnit::Costs);
    Ok(Predicted { name, program: Arc::new(program), costs, timeline, prediction: None, summary, unit })
}

/// Proves the program, and counts each of its actions as a tick.
fn in_ticks(name: String, source: ProgramSource) -> Result<Predicted, PredictionError> {
    let program = source.program(&LowerConfig::from(Level::Comms))?.into_program();
    let run = logical(&program)?;
    let (timeline, summary) = (run.timeline(1.0), Summary::of_logical(&run));
    let (costs, unit) = (Costs::default(), TimeUnit::Costs);
    let program = Arc::new(program);
    Ok(Predicted { name, program, costs, timeline, prediction: None, summary, unit })
}

/// The choices for a profile.
#[derive(Clone)]
pub(crate) struct ProfileChoices {
    pub(crate) profile: Arc<Profile>,
    /// The first layer of each stage except the first; `None` for the best cut.
    pub(crate) boundaries: Option<Vec<usize>>,
    pub(crate) recompute: Recompute,
}

/// Proves the program of a schedule that is called `name`, and predicts its run at the costs of a profile.
pub(crate) fn at_profile(
    name: String,
    source: ProgramSource,
    choices: ProfileChoices,
) -> Result<Predicted, PredictionError> {
    let schedule = source.computation().map_err(SourceError::from)?;
    let ProfileChoices { profile, boundaries, recompute } = choices;
    let stages = schedule.placement().stages();
    check_recomputed(&recompute, stages).map_err(SimulateError::from)?;
    let mut choice = PlanChoice {
        recompute: schedule.placement().all_stages().map(|stage| recompute.choice_of(stage)).collect(),
        microbatch_rows: profile.rows,
        ..PlanChoice::default()
    };
    choice.boundaries = match boundaries {
        Some(boundaries) => boundaries,
        None => best_cut(&profile, &schedule, &choice)?,
    };
    let program = source.program(&LowerConfig::from(choice.lowering(&profile)))?;
    of_prediction(name, predict_program(&profile, &schedule, program, &choice)?)
}

/// Returns the prediction of a schedule that is called `name` at the costs of a profile.
pub(crate) fn of_prediction(name: String, prediction: Prediction) -> Result<Predicted, PredictionError> {
    let summary = prediction.summary()?;
    let Prediction { program, costs, run, .. } = prediction;
    let (program, timeline, unit) =
        (Arc::new(program.into_program()), run.timeline().clone(), TimeUnit::Seconds);
    Ok(Predicted { name, program, costs, timeline, prediction: None, summary, unit })
}
