//! Configurations for training, which only the binary can read: what a plan needs from them, as traits.

use std::fmt;
use std::path::Path;

use pipewright_schedule::plan::{Plan, TrainingState};
use pipewright_schedule::profile::Profile;
use pipewright_shapes::model::Model;
use pipewright_shapes::reader::Described;
use pipewright_shapes::training::{AdaptedLayer, AdapterSizes};
use toml::{Table, Value};

use crate::failure::Failure;

/// A reader of configurations for training.
pub trait Configurations: fmt::Debug {
    /// Reads the run of a configuration, or of the built-in sample. `set` overrides keys.
    ///
    /// # Errors
    /// When the configuration cannot be read, or has mistakes.
    fn run(
        &self,
        file: Option<&Path>,
        set: &[String],
        fixed: FixedRanks,
    ) -> Result<Box<dyn PlannedRun>, Failure>;

    /// Reads the model, the rows and the batch of a configuration, for a plan on a cluster.
    ///
    /// # Errors
    /// When the configuration cannot be read, or has mistakes, or its adapters do not fit the model.
    fn model(&self, file: Option<&Path>, set: &[String]) -> Result<PlannedModel, Failure>;
}

/// A model, and what its file says about the run.
#[derive(Debug)]
pub struct PlannedModel {
    /// The model, and what is assumed about it.
    pub described: Described,
    /// The tokens of a row, if the file is a configuration for `train`.
    pub sequence: Option<u32>,
    /// The rows of a step, if the file is a configuration for `train`.
    pub batch: Option<u32>,
    /// The adapters that a configuration trains in place of the model.
    pub adapters: Option<PlannedAdapters>,
}

/// Adapters on the layers of a model.
#[derive(Debug)]
pub struct PlannedAdapters {
    /// The sizes of an adapter.
    pub sizes: AdapterSizes,
    /// The adapted layers, each with the index of its block.
    pub layers: Vec<(usize, AdaptedLayer)>,
}

impl PlannedAdapters {
    /// Returns a model whose adapters are trained.
    pub(crate) fn on(self, model: Model) -> Result<Model, Failure> {
        model.with_adapters(self.sizes, self.layers).map_err(Failure::input)
    }
}

/// The numbers of ranks that the user fixes for a plan.
#[derive(Clone, Copy, Debug, Default)]
pub struct FixedRanks {
    /// The replicas.
    pub data_parallel: Option<u32>,
    /// The ranks that share each stage.
    pub tensor_parallel: Option<u32>,
}

/// The run of a configuration that is planned.
pub trait PlannedRun {
    /// Returns the profile in `file`, or without a file estimated costs.
    ///
    /// # Errors
    /// When the file cannot be read, has mistakes, or is of another run.
    fn profile(&self, file: Option<&Path>) -> Result<Profile, Failure>;

    /// Returns the ranks of all replicas.
    fn ranks(&self) -> u32;

    /// Returns the microbatches of a step.
    fn microbatches(&self) -> u32;

    /// Returns the rows of a microbatch.
    fn microbatch_rows(&self) -> u32;

    /// Returns the bytes of training state per byte of parameters.
    ///
    /// # Errors
    /// When the model cannot have such a state.
    fn training_state(&self) -> Result<TrainingState, Failure>;

    /// Returns the number of replicas if they hold the experts together. The times of their exchanges are for this number.
    fn replicas_with_experts(&self) -> Option<u32>;

    /// Returns whether the base stays in its files in all plans.
    fn always_streams(&self) -> bool;

    /// Returns the numbers of parts of the head that a plan for `ranks` tries; none leaves the number of the profile.
    fn head_parts(&self, profile: &Profile, ranks: u32) -> Vec<u32>;

    /// Returns the precision, as the configuration names it.
    fn precision(&self) -> String;

    /// Returns a sentence if a plan with `replicas` cannot have the configuration's groups of replicas.
    fn note_on_groups(&self, replicas: u32) -> Option<String>;

    /// Returns the configuration that the choices of a plan complete.
    fn base(&self, plan: &Plan) -> Base;
}

/// A configuration that the choices of a plan complete.
#[derive(Clone, Debug)]
pub struct Base {
    /// The keys, without what the plan chooses in place of them.
    pub keys: Table,
    /// The value of `mesh.data_parallel` for the replicas of the plan.
    pub replicas: Value,
    /// The batches of a step. A plan is of one batch.
    pub batches: u32,
}

/// The reader where nothing can be trained: it refuses every configuration.
#[derive(Clone, Copy, Debug)]
pub struct NoConfigurations;

impl NoConfigurations {
    fn refusal(file: Option<&Path>) -> Failure {
        let name = file.map_or_else(|| "--set".to_owned(), |file| file.display().to_string());
        Failure::input(format!(
            "{name}: only the program `pipewright` reads configurations for training; here, plan a profile (--profile), or a \
             model's config.json (--cluster)"
        ))
    }
}

impl Configurations for NoConfigurations {
    fn run(
        &self,
        file: Option<&Path>,
        _set: &[String],
        _fixed: FixedRanks,
    ) -> Result<Box<dyn PlannedRun>, Failure> {
        Err(Self::refusal(file))
    }

    fn model(&self, file: Option<&Path>, _set: &[String]) -> Result<PlannedModel, Failure> {
        Err(Self::refusal(file))
    }
}
