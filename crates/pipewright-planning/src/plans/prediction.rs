//! The arguments that choose a profile and what follows from it, for `simulate --profile`.

use std::path::PathBuf;

use clap::Args;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::depends_on_costs;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::plan::{
    PlanChoice, Prediction, best_cut, choice_costs, predict_program, with_head_parts,
};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::recompute::StageRecompute;
use pipewright_schedule::simulate::Summary;
use pipewright_schedule::{
    LowerConfig, Recompute, Schedule, ScheduleSpec, StageIndex, ValidatedProgram, generate,
};
use pipewright_system::profile_file;
use pipewright_system::schedule_memory::check_named;

use crate::failure::{Exit, Failure};
use crate::schedules::size::say_few_microbatches;
use crate::schedules::timed_program::{EngineTimes, Source};

/// A profile, and the choices for it.
#[derive(Debug, Args)]
pub(crate) struct ProfileArguments {
    /// The costs of layers and links, from a file that `profile` wrote or that is written by hand
    #[arg(long, value_name = "PROFILE.toml", conflicts_with_all = ["cost", "logical"])]
    pub(crate) profile: Option<PathBuf>,
    /// With --profile, the first layer of each stage except stage 0; by default, the best partition
    #[arg(long, value_name = "LAYER,..", value_delimiter = ',', requires = "profile")]
    boundaries: Vec<usize>,
    /// With --profile, the number of parts into which the head is cut along the vocabulary, each a layer; by
    /// default, the number that the profile has
    #[arg(long, value_name = "K", requires = "profile", value_parser = clap::value_parser!(u32).range(1..=1000))]
    head_parts: Option<u32>,
}

/// The predicted figures, and what they are for.
pub(crate) struct Predicted {
    pub(crate) summary: Summary,
    pub(crate) prediction: Prediction,
    pub(crate) schedule: Schedule,
}

impl ProfileArguments {
    /// Returns the arguments for a profile, with the best partition.
    pub(crate) fn of(profile: PathBuf) -> Self {
        Self { profile: Some(profile), boundaries: Vec::new(), head_parts: None }
    }

    /// Predicts a schedule, and adds the times to make its program to `times`. `work` is what is made of it.
    pub(crate) fn predict(
        &self,
        source: Source,
        recompute: &Recompute,
        work: Use,
        times: &mut EngineTimes,
    ) -> Result<Predicted, Failure> {
        let name = source.name();
        match source {
            Source::Named(_, spec) if depends_on_costs(&name) => {
                check_named(&name, &spec, work)?;
                self.predict_measured(&name, &spec, recompute, times)
            }
            source => {
                let source = source.read(work, times)?;
                let schedule = source.computation().map_err(Failure::input)?;
                let choices = self.choices(&schedule, recompute)?;
                let boundaries = choices.boundaries(&schedule)?;
                let program = times.prove(&name, source, &choices.passes(&boundaries))?;
                choices.predict(schedule, program, boundaries)
            }
        }
    }

    /// Predicts a schedule that is made to measure: for the costs of its best cut.
    fn predict_measured(
        &self,
        name: &str,
        spec: &ScheduleSpec,
        recompute: &Recompute,
        times: &mut EngineTimes,
    ) -> Result<Predicted, Failure> {
        let mut generated =
            |spec: &ScheduleSpec| times.generate(|| generate(name, spec)).map_err(Failure::input);
        let plain = generated(spec)?;
        say_few_microbatches(&plain);
        let choices = self.choices(&plain, recompute)?;
        let mut made = |boundaries: &[usize]| {
            let choice = choices.choice(boundaries.to_vec());
            let costs = choice_costs(&choices.profile, plain.placement(), &choice).map_err(Failure::input)?;
            generated(&ScheduleSpec { costs: Some(costs), ..spec.clone() })
        };
        let measured = made(&choices.boundaries(&plain)?)?;
        let boundaries = choices.boundaries(&measured)?;
        let schedule = made(&boundaries)?;
        let passes = choices.passes(&boundaries);
        let program = times.prove(name, ProgramSource::Schedule(schedule.clone()), &passes)?;
        choices.predict(schedule, program, boundaries)
    }

    /// Reads the profile and checks the choices for a schedule.
    fn choices(&self, schedule: &Schedule, recompute: &Recompute) -> Result<Choices, Failure> {
        let file = self.profile.as_deref().unwrap_or_else(|| std::path::Path::new("-"));
        Ok(Choices {
            profile: with_head_parts(&profile_file::read(file)?, self.head_parts).into_owned(),
            boundaries: self.boundaries.clone(),
            recompute: recompute_of(recompute, schedule.placement().stages())?,
        })
    }
}

/// The profile and what was chosen for it.
struct Choices {
    profile: Profile,
    /// Empty for the best partition.
    boundaries: Vec<usize>,
    /// The part of its forwards that each stage recomputes.
    recompute: Vec<Option<StageRecompute>>,
}

impl Choices {
    fn boundaries(&self, schedule: &Schedule) -> Result<Vec<usize>, Failure> {
        let stages = schedule.placement().stages();
        if !self.boundaries.is_empty() || stages == 1 {
            return Ok(self.boundaries.clone());
        }
        best_cut(&self.profile, schedule, &self.choice(Vec::new())).map_err(Failure::input)
    }

    /// Returns the passes that make the program of a cut, with the stages that it trains.
    fn passes(&self, boundaries: &[usize]) -> LowerConfig {
        self.choice(boundaries.to_vec()).lowering(&self.profile).into()
    }

    fn predict(
        &self,
        schedule: Schedule,
        program: ValidatedProgram,
        boundaries: Vec<usize>,
    ) -> Result<Predicted, Failure> {
        let prediction = predict_program(&self.profile, &schedule, program, &self.choice(boundaries))
            .map_err(Failure::input)?;
        let summary = prediction.summary().map_err(|error| Failure::new(Exit::Bug, error))?;
        Ok(Predicted { summary, prediction, schedule })
    }

    fn choice(&self, boundaries: Vec<usize>) -> PlanChoice {
        let recompute = self.recompute.clone();
        PlanChoice { boundaries, recompute, microbatch_rows: self.profile.rows, ..PlanChoice::default() }
    }
}

/// Returns what each stage recomputes.
fn recompute_of(recompute: &Recompute, stages: u32) -> Result<Vec<Option<StageRecompute>>, Failure> {
    if recompute.is_by_block() {
        return Err(Failure::input(
            "--recompute block: a profile has no blocks inside its layers; write stage, or a list of stages",
        ));
    }
    match recompute.largest_stage() {
        Some(stage) if stage.get() >= stages => Err(Failure::input(format!(
            "--recompute: there is no stage {stage}; write none, stage, parts, or stages from 0 to {}",
            stages - 1
        ))),
        _ => Ok((0..stages).map(|stage| recompute.choice_of(StageIndex::new(stage))).collect()),
    }
}
