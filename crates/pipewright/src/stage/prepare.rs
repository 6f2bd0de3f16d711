//! [`Stage`]: a module with its loss, before a pipeline prepares it for its rank.

use burn::tensor::Tensor;
use pipewright_schedule::Microbatch;

use super::body::StageBody;
use super::error::StageError;
use super::module::{StageContext, StageModule};
use super::runner::StageRunner;
use super::settings::{Loss, StageOptions, StageSettings};
use super::training::TrainingStage;
use super::weight_work::WeightWork;
use crate::tensor::{Boundary, unpack};

/// A stage that a pipeline can run on a rank.
///
/// Only the last stage of a training pipeline has a loss.
pub struct Stage {
    options: StageOptions,
    /// Prepares the module and the loss, whose types are unknown here.
    prepare: Box<Prepare>,
}

type Prepare = dyn FnOnce(StageOptions, StageSettings) -> Result<Box<dyn StageRunner>, StageError> + Send;

impl Stage {
    /// Makes a stage that sends its output to the next stage.
    pub fn new<M: StageModule>(module: M) -> Self {
        Self::of_body(module, None)
    }

    /// Makes the last stage. `loss` takes the stage's output and the microbatch's targets, and returns a
    /// scalar (shape `[1]`), the *mean* over the microbatch. The loss of a step is the mean over its
    /// microbatches. `loss` must not call another pipeline of the process: its first call keeps the
    /// generators of the back ends for itself.
    pub fn with_loss<M, T, L>(module: M, loss: L) -> Self
    where
        M: StageModule,
        T: Boundary,
        L: Fn(M::Output, T) -> Tensor<1> + Send + 'static,
    {
        Self::with_context_loss(module, move |output, target, _: &StageContext| loss(output, target))
    }

    /// Like [`Stage::with_loss`], but for a loss that also reads side inputs ([`StageContext::side`]), values
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

    /// Passes outputs in half precision to the loss as they are. By default, the loss gets a copy of them in
    /// single precision. The losses of [`nn`](crate::nn) compute in single precision in both cases, with the
    /// same results, and need no copy.
    pub fn with_half_precision_loss(mut self) -> Self {
        self.options.loss_takes_half = true;
        self
    }

    /// Passes the weight gradients that wait for `W` to `runner` instead of computing them in order, for
    /// example to interleave them with other work, to time them, or to compute some in another way. `runner`
    /// is called in `W` or at the end of `B`, and also when a hook's function computes weight gradients
    /// ([`BackwardRun::run_weights`](crate::hook::BackwardRun::run_weights)): once or more per microbatch,
    /// and perhaps with no work left. The stage then computes the weight gradients that `runner` has not
    /// computed or skipped.
    pub fn with_weight_runner(
        mut self,
        runner: impl FnMut(Microbatch, &mut WeightWork) + Send + 'static,
    ) -> Self {
        self.options.weight_runner = Some(Box::new(runner));
        self
    }

    /// Puts `prefix` and a dot in front of every parameter's path, for a module that does not know its place
    /// in the model: `linear.weight` becomes `blocks.1.linear.weight`. Paths that the module declares as
    /// shared do not change.
    ///
    /// Two stages must not use the same path for different parameters. If the prefix depends on the part of
    /// the model and not on the stage's number, a run can resume from a checkpoint under another cut.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.options.prefixes.push(prefix.to_owned());
        self
    }

    /// Makes the parameters whose global path `is_base` accepts the base of an adapter, which comes from files
    /// of its own. They are frozen from the start: their gradients are not computed, and neither the norm of
    /// the gradients nor the optimizer knows them. Checkpoints do not contain them, and a restore keeps their
    /// values. In half precision they are held rounded.
    /// [`Pipeline::unfreeze`](crate::pipeline::Pipeline::unfreeze) does not train them.
    ///
    /// All stages of a pipeline must make the same parameters their base.
    pub fn with_base(mut self, is_base: impl Fn(&str) -> bool + Send + 'static) -> Self {
        self.options.is_base = Some(Box::new(is_base));
        self
    }

    pub(crate) fn of_body<M: StageBody>(body: M, loss: Option<Loss<M::Output>>) -> Self {
        let prepare = move |options, settings| -> Result<Box<dyn StageRunner>, StageError> {
            Ok(Box::new(TrainingStage::new(body, loss, options, settings)?))
        };
        Self { options: StageOptions::default(), prepare: Box::new(prepare) }
    }

    /// Prepares the stage for the rank on which it runs.
    pub(crate) fn prepare(self, settings: StageSettings) -> Result<Box<dyn StageRunner>, StageError> {
        (self.prepare)(self.options, settings)
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").finish_non_exhaustive()
    }
}
