//! [`Stage`]: a module with its loss, before a pipeline prepares it for its rank.

use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::{Microbatch, Slices};

use super::body::StageBody;
use super::error::StageError;
use super::module::{StageContext, StageModule};
use super::runner::StageRunner;
use super::training::{Loss, TrainingStage};
use super::weight_work::{WeightRunner, WeightWork};
use crate::optimizer::{ClipGroup, OptimizerGroup};
use crate::tensor::shard::RowShard;
use crate::tensor::{Boundary, Precision, unpack};

/// A stage that a pipeline can run on a rank.
///
/// Only the last stage of a training pipeline has a loss.
pub struct Stage {
    unprepared: Box<dyn Unprepared>,
}

impl Stage {
    /// Makes a stage that sends its output to the next stage.
    pub fn new<M: StageModule>(module: M) -> Self {
        Self::of_body(module, None)
    }

    /// Makes the last stage. `loss` takes the stage's output and the microbatch's targets, and returns a scalar (shape
    /// `[1]`), the *mean* over the microbatch. The loss of a step is the mean over its microbatches. `loss` must not
    /// wait for another pipeline of the process: its first call keeps the generators of the back ends for itself.
    pub fn with_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T) -> Tensor<1> + Send + 'static,
    {
        Self::with_context_loss(module, move |output, target, _: &StageContext| loss(output, target))
    }

    /// As [`Stage::with_loss`], for a loss that also reads side inputs ([`StageContext::side`]), values
    /// ([`StageContext::value`]) or the microbatch's number. It may add auxiliary losses.
    pub fn with_context_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T, &StageContext) -> Tensor<1> + Send + 'static,
    {
        let loss = move |output, target, context: &StageContext| {
            Ok(loss(output, unpack(target).map_err(StageError::Target)?, context))
        };
        Self::of_body(module, Some(Box::new(loss)))
    }

    /// Passes the weight gradients that wait for `W` to `runner` instead of computing them in order, for example to
    /// interleave them with other work, to time them, or to compute some in another way. `runner` is called in `W` or
    /// at the end of `B`, and also when a hook's function computes weight gradients
    /// ([`BackwardRun::run_weights`](crate::hook::BackwardRun::run_weights)): once or more per microbatch, and perhaps with
    /// no work left. The stage then computes the weight gradients
    /// that `runner` has not computed or skipped.
    pub fn with_weight_runner(
        mut self,
        runner: impl FnMut(Microbatch, &mut WeightWork) + Send + 'static,
    ) -> Self {
        self.unprepared.set_weight_runner(Box::new(runner));
        self
    }

    /// Puts `prefix` and a dot in front of every parameter's path, for a module that does not know its place in the
    /// model: `linear.weight` becomes `blocks.1.linear.weight`. Paths that the module declares as shared do not change.
    ///
    /// Two stages must not use the same path for different parameters. If the prefix depends on the part of the model
    /// and not on the stage's number, a run can resume from a checkpoint under another cut.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.unprepared.add_prefix(prefix);
        self
    }

    pub(crate) fn of_body<M: StageBody>(body: M, loss: Option<Loss<M::Output>>) -> Self {
        Self {
            unprepared: Box::new(UnpreparedStage { body, loss, prefixes: Vec::new(), weight_runner: None }),
        }
    }

    /// Prepares the stage for the rank on which it runs.
    pub(crate) fn prepare(self, settings: StageSettings) -> Result<Box<dyn StageRunner>, StageError> {
        self.unprepared.prepare(settings)
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").finish_non_exhaustive()
    }
}

/// The settings with which a pipeline prepares a stage.
#[derive(Clone, Default)]
pub(crate) struct StageSettings {
    /// Where the stage computes; `None` for the device of its module.
    pub device: Option<Device>,
    /// The precision in which the stage computes.
    pub precision: Precision,
    /// The optimizer; `None` for a stage that is not trained.
    pub optimizer: Option<ModuleOptimizer>,
    /// The number of ranks that compute the stage together.
    pub tensor_ranks: u32,
    /// The groups of parameters with an optimizer of their own.
    pub optimizer_groups: Arc<[OptimizerGroup]>,
    /// The groups of parameters with a largest norm of their own.
    pub clip_groups: Arc<[ClipGroup]>,
    /// The part of each trained parameter that this replica holds; `None` if it holds all.
    pub row_shard: Option<RowShard>,
    /// Whether the stage must end in a loss.
    pub must_have_loss: bool,
    /// The number of slices into which microbatches are cut.
    pub slices: Slices,
    /// Whether a forward that is recomputed is recomputed block by block instead of as a whole.
    pub by_block: bool,
}

/// A stage without the types of its module.
trait Unprepared: Send {
    fn add_prefix(&mut self, prefix: &str);

    fn set_weight_runner(&mut self, runner: WeightRunner);

    fn prepare(self: Box<Self>, settings: StageSettings) -> Result<Box<dyn StageRunner>, StageError>;
}

/// A module, its loss, and the settings that the user has made for them.
struct UnpreparedStage<M: StageBody> {
    body: M,
    loss: Option<Loss<M::Output>>,
    /// The prefixes of the parameters' paths, the innermost first.
    prefixes: Vec<String>,
    weight_runner: Option<WeightRunner>,
}

impl<M: StageBody> Unprepared for UnpreparedStage<M> {
    fn add_prefix(&mut self, prefix: &str) {
        self.prefixes.push(prefix.to_owned());
    }

    fn set_weight_runner(&mut self, runner: WeightRunner) {
        self.weight_runner = Some(runner);
    }

    fn prepare(self: Box<Self>, settings: StageSettings) -> Result<Box<dyn StageRunner>, StageError> {
        let Self { body, loss, prefixes, weight_runner } = *self;
        if settings.must_have_loss && loss.is_none() {
            return Err(StageError::NoLoss);
        }
        let mut stage = TrainingStage::new(body, loss);
        if let Some(device) = &settings.device {
            stage.move_to(device);
        }
        stage.compute_in(settings.precision)?;
        prefixes.iter().for_each(|prefix| stage.add_prefix(prefix));
        stage.check_paths()?;
        stage.run_slices(settings.slices)?;
        stage.set_up(weight_runner, settings.by_block);
        stage.set_optimizer(settings.optimizer, settings.optimizer_groups, settings.clip_groups);
        stage.split_over(settings.tensor_ranks)?;
        if let Some(row_shard) = settings.row_shard {
            stage.shard(row_shard)?;
        }
        Ok(Box::new(stage))
    }
}
