//! The arguments that choose a profile and what follows from it, for `simulate --profile`.

use std::path::PathBuf;

use clap::Args;
use pipewright_schedule::plan::{PlanChoice, best_cut, choice_costs, predict};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::simulate::{Summary, logical};
use pipewright_schedule::{Schedule, ScheduleSpec, generate};

use crate::commands::schedule_size::is_made_to_measure;
use crate::config;
use crate::failure::{Exit, Failure};

/// A profile, and the choices for it.
#[derive(Debug, Args)]
pub(super) struct ProfileArguments {
    /// The costs of layers and links, from a file that `profile` wrote or that is written by hand
    #[arg(long, value_name = "PROFILE.toml", conflicts_with_all = ["cost", "logical"])]
    pub(super) profile: Option<PathBuf>,
    /// With --profile, the first layer of each stage except stage 0; by default, the best partition
    #[arg(long, value_name = "LAYER,..", value_delimiter = ',', requires = "profile")]
    boundaries: Vec<usize>,
    /// With --profile, the stages that recompute their forward: none, stage (all of them), or a list such as 0,2
    #[arg(long, value_name = "STAGES", requires = "profile", default_value = "none")]
    recompute: String,
}

/// The predicted figures, and what they are for.
pub(super) struct Predicted {
    pub(super) summary: Summary,
    pub(super) prediction: pipewright_schedule::plan::Prediction,
}

impl ProfileArguments {
    /// Predicts the schedule called `name`.
    pub(super) fn predict_named(&self, name: &str, spec: &ScheduleSpec) -> Result<Predicted, Failure> {
        let profile = self.read()?;
        let plain = generate(name, spec).map_err(Failure::input)?;
        if !is_made_to_measure(name) {
            return self.predict(&profile, &plain);
        }
        let stages = plain.placement().stages();
        let made = |boundaries: &[usize]| {
            let choice = self.choice(&profile, stages, boundaries.to_vec())?;
            let costs = choice_costs(&profile, stages, &choice).map_err(Failure::input)?;
            let spec = ScheduleSpec { costs: Some(costs), ..spec.clone() };
            generate(name, &spec).map_err(Failure::input)
        };
        let boundaries = self.boundaries_for(&profile, &plain)?;
        let measured = made(&boundaries)?;
        let boundaries = self.boundaries_for(&profile, &measured)?;
        self.predict_with(&profile, &made(&boundaries)?, boundaries)
    }

    /// Predicts a schedule.
    pub(super) fn predict_schedule(&self, schedule: &Schedule) -> Result<Predicted, Failure> {
        self.predict(&self.read()?, schedule)
    }

    fn read(&self) -> Result<Profile, Failure> {
        let file = self.profile.as_deref().unwrap_or_else(|| std::path::Path::new("-"));
        Ok(config::profile::read(file)?)
    }

    fn predict(&self, profile: &Profile, schedule: &Schedule) -> Result<Predicted, Failure> {
        let boundaries = self.boundaries_for(profile, schedule)?;
        self.predict_with(profile, schedule, boundaries)
    }

    fn boundaries_for(&self, profile: &Profile, schedule: &Schedule) -> Result<Vec<usize>, Failure> {
        let stages = schedule.placement().stages();
        if !self.boundaries.is_empty() || stages == 1 {
            return Ok(self.boundaries.clone());
        }
        let choice = self.choice(profile, stages, Vec::new())?;
        best_cut(profile, schedule, &choice).ok_or_else(|| {
            let layers = profile.layer_count();
            Failure::input(format!(
                "{layers} layers of the profile cannot fill {stages} stages; use at most {layers} stages"
            ))
        })
    }

    fn predict_with(
        &self,
        profile: &Profile,
        schedule: &Schedule,
        boundaries: Vec<usize>,
    ) -> Result<Predicted, Failure> {
        let choice = self.choice(profile, schedule.placement().stages(), boundaries)?;
        let prediction = predict(profile, schedule, &choice).map_err(Failure::input)?;
        let steps = logical(prediction.program.as_program());
        let steps = steps.map_err(|error| Failure::new(Exit::Bug, error))?.steps();
        let summary = Summary {
            makespan: prediction.step_s(),
            peak_bytes: Some(prediction.peak_bytes.clone()),
            ..Summary::of(&prediction.run, steps, &prediction.costs)
        };
        Ok(Predicted { summary, prediction })
    }

    fn choice(&self, profile: &Profile, stages: u32, boundaries: Vec<usize>) -> Result<PlanChoice, Failure> {
        let recompute = self.recompute_of(stages)?;
        Ok(PlanChoice { boundaries, recompute, data_parallel: 1, microbatch_rows: profile.rows })
    }

    fn recompute_of(&self, stages: u32) -> Result<Vec<bool>, Failure> {
        let all = |value| vec![value; stages as usize];
        match self.recompute.as_str() {
            "none" => return Ok(all(false)),
            "stage" | "all" => return Ok(all(true)),
            _ => {}
        }
        let mut choice = all(false);
        for part in self.recompute.split(',').map(str::trim) {
            let stage = part.parse::<usize>().ok().filter(|&stage| stage < choice.len());
            let stage = stage.ok_or_else(|| {
                Failure::input(format!(
                    "--recompute: `{part}` is not a stage; write none, stage, or stages from 0 to {}",
                    stages - 1
                ))
            })?;
            choice[stage] = true;
        }
        Ok(choice)
    }
}
