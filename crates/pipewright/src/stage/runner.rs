//! The interface between a stage and the executor, without the types of the user's model: [`StageCompute`]
//! runs microbatches, [`StageParameters`] gives access to parameters and their gradients. `TrainingStage`
//! implements both, in `training/compute.rs` and `training/parameters.rs`.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Device, TensorData};
use pipewright_schedule::{Microbatch, StageIndex};

use super::body::Skips;
use super::error::StageError;
use super::forwarded::Forwarded;
use super::gradients::GradientSums;
use super::microbatch::{BackwardState, ForwardState};
use super::parameter_table::ParameterTable;
use super::segment::Replacement;
use super::visit::Visit;
use super::weight_work::WeightWork;
use crate::checkpoint::{CheckpointError, StageState, StoredState};
use crate::memory::StreamedMatrix;
use crate::optimizer::{Factors, GradientHook};
use crate::tensor::shard::RowShard;
use crate::tensor::{EdgePlacement, OptionalTensors, TensorRank, Value, Values};

/// The paths of parameters after a restore.
#[derive(Clone, Debug, Default)]
pub(crate) struct RestoredPaths {
    /// The parameters that the checkpoint has.
    pub restored: Vec<Arc<str>>,
    /// The parameters that it does not have.
    pub missing: Vec<Arc<str>>,
}

/// A parameter of a stage, as described to other ranks.
pub(crate) struct Held {
    pub path: Arc<str>,
    pub shape: Vec<usize>,
    /// Its values if the stage declares it as shared, otherwise `None`.
    pub shared: Option<TensorData>,
    /// Its values if other ranks of a tensor group hold the same part, otherwise `None`.
    pub copied: Option<TensorData>,
}

/// A stage that is prepared for its rank. It exists only after `Stage::prepare`.
pub(crate) trait StageRunner: StageCompute + StageParameters {}

impl<S: StageCompute + StageParameters> StageRunner for S {}

/// The part of a batch that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchPart {
    Input,
    Target,
}

/// The computation of a stage.
pub(crate) trait StageCompute: Send {
    /// Returns tensors of a batch in the element types with which the stage computes. Converts a tensor if
    /// nothing is lost. Otherwise an input is refused, and a target stays as it is.
    fn admitted(&self, part: BatchPart, values: Values) -> Result<Values, StageError>;

    /// Runs what is left of a forward.
    fn forward(&mut self, forward: &mut ForwardState) -> Result<(), StageError>;

    /// Runs the next block of a forward, or `replacement` in its place.
    fn forward_block(
        &mut self,
        forward: &mut ForwardState,
        replacement: Option<Replacement<'_>>,
    ) -> Result<(), StageError>;

    /// Ends a forward that has run all blocks, and keeps the tensors that its backward needs. An evaluation
    /// keeps none.
    fn finish_forward(&mut self, forward: ForwardState) -> Result<Forwarded, StageError>;

    /// Computes the forward of a microbatch again if the stage has kept only its inputs, so that the backward
    /// does not need to. Returns whether it did. If several blocks are recomputed one by one, they are left
    /// to the backward.
    fn recompute(&mut self, microbatch: Microbatch) -> Result<bool, StageError>;

    /// Takes out the float tensors that the forward of a microbatch keeps as inputs of a second one, until
    /// [`StageCompute::put_inputs`]; none if it keeps a tape.
    fn take_inputs(&mut self, microbatch: Microbatch) -> Values;

    /// Puts back what [`StageCompute::take_inputs`] has returned.
    fn put_inputs(&mut self, microbatch: Microbatch, inputs: Values);

    /// Begins the backward of a microbatch with the gradients of the outputs. `is_whole` says that
    /// [`StageCompute::backward_weights`] follows at once.
    fn begin_backward(
        &mut self,
        microbatch: Microbatch,
        gradients: OptionalTensors,
        is_whole: bool,
    ) -> BackwardState;

    /// Runs the backward of the next block: computes the gradients of its inputs. Defers weight gradients
    /// until
    /// [`StageCompute::backward_weights`] where possible, and adds the others to the sums.
    fn backward_block(&mut self, backward: &mut BackwardState) -> Result<(), StageError>;

    /// Runs the backwards of all blocks that are left, as [`StageCompute::backward_block`] does.
    fn backward(&mut self, backward: &mut BackwardState) -> Result<(), StageError>;

    /// Adds the weight gradients that the microbatch's backward has deferred so far to the sums. `first` may
    /// run some of them itself. Returns the number of tasks.
    fn backward_weights(
        &mut self,
        microbatch: Microbatch,
        first: &mut dyn FnMut(&mut WeightWork<'_>),
    ) -> Result<usize, StageError>;

    /// Returns the module that computes, as the user knows it.
    fn module(&self) -> &dyn Any;

    /// Returns the number of blocks, at least 1.
    fn blocks(&self) -> usize;

    /// Returns the matrices that are in memory only while the stage computes.
    fn streamed(&self) -> Vec<Arc<StreamedMatrix>>;

    /// Returns the tensors that come from or go to stages that are not neighbours.
    fn skips(&self) -> &Skips;

    /// Returns how the ranks of a tensor group take an input and return its gradient.
    fn input_placement(&self, input: usize) -> EdgePlacement;

    /// Returns how the ranks of a tensor group have an output and take its gradient.
    fn output_placement(&self, output: usize) -> EdgePlacement;

    /// Returns the device on which the stage computes.
    fn device(&self) -> &Device;

    /// Remembers the values of parameters that the forward changes, such as running statistics, so that
    /// [`Self::reset`] restores them. If `trains` is false, forgets the values that it remembers.
    fn keep_buffers(&mut self, trains: bool);

    /// Drops every microbatch in flight and every gradient, and puts running statistics back, which restores
    /// the state before the step.
    fn reset(&mut self);
}

/// The parameters of a stage, their gradient sums and their optimizer.
pub(crate) trait StageParameters: Send {
    /// Returns the parameters. Parameters of floats have an index.
    fn table(&self) -> &ParameterTable;

    /// Returns the gradient sums of the float parameters. After the reduction of a sharded stage, they have
    /// only this replica's rows.
    fn sums(&self) -> &GradientSums;

    fn sums_mut(&mut self) -> &mut GradientSums;

    /// Returns the replica's rows of the parameter at `index` of [`ParameterTable::paths`].
    fn row_shard(&self, index: usize) -> RowShard;

    /// Returns whether the stage has its whole parameters.
    fn is_gathered(&self) -> bool;

    /// Returns every float parameter of the stage, in the order of [`ParameterTable::paths`], then the
    /// integer and boolean parameters.
    fn held(&self) -> Vec<Held>;

    /// Returns the parameters whose gradients [`StageCompute::backward_block`] has computed, each with the
    /// number of its elements.
    fn undeferred(&self) -> Vec<(Arc<str>, usize)>;

    /// Cuts each part of a parameter's rows that the stage holds ([`StageParameters::row_shard`]) into
    /// `copies` parts, and returns the sum of squares of each of them, in the order of
    /// [`ParameterTable::paths`]. Replicas get the same bits whether each has all parts or some. Parts
    /// without rows have the sum zero, and a parameter without a gradient has no sums.
    fn gradient_squares(&self, copies: u32) -> Vec<Vec<f64>>;

    /// Returns the parameter at `index` of [`ParameterTable::paths`] as the stage holds it. It shares its
    /// storage.
    fn value(&self, index: usize) -> Value;

    /// Lets parameters use the storage of other ones on this rank, which have the same values: copies of a
    /// shared parameter. The stage does not update them or restore them.
    fn borrow(&mut self, values: BTreeMap<usize, Value>);

    /// Drops the parameters that use the storage of other ones, so that an update may write to it in place.
    /// [`StageParameters::borrow`] must follow.
    fn drop_borrowed(&mut self);

    /// Returns whether the parameter at `index` uses the storage of another one.
    fn is_borrowed(&self, index: usize) -> bool;

    /// Returns the rows of each parameter that a sharded stage holds; `None` if it holds no rows or the whole
    /// parameter.
    fn rows(&self) -> OptionalTensors;

    /// Gives a sharded stage its whole parameters, in the order of [`ParameterTable::paths`], until
    /// [`StageParameters::release`]. The entry of a parameter that is not sharded is `None`.
    fn gather(&mut self, whole: OptionalTensors);

    /// Reduces the parameters of a sharded stage to its part again.
    fn release(&mut self);

    /// Notes the values of the parameters that are not trained, before the forwards of a step.
    fn note_statistics(&mut self);

    /// Returns the parameters that are not trained and that forwards have changed since
    /// [`StageParameters::note_statistics`], in the order of [`ParameterTable::paths`]; the others are
    /// absent. `None` if the stage has no parameter that a forward may change.
    fn changed_statistics(&mut self) -> Option<OptionalTensors>;

    /// Replaces the values of parameters that are not trained. Absent values do not change.
    fn set_statistics(&mut self, values: OptionalTensors);

    /// Calls `hook` for each gradient sum times `factor`.
    fn change_gradients(
        &mut self,
        stage: StageIndex,
        factor: f64,
        hook: &dyn GradientHook,
    ) -> Result<(), StageError>;

    /// Exchanges the version of delayed parameters with which the stage computes ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)): for the older one
    /// before a batch, and back if it does not update.
    fn switch_version(&mut self);

    /// Ends a batch without an update: drops the gradient sums. The newer version of delayed parameters stays.
    fn skip_update(&mut self);

    /// Multiplies the gradient sums by their factors, takes one optimizer step with them and clears them.
    fn update(&mut self, factors: &Factors, learning_rate: f64);

    /// Updates as [`StageParameters::update`] does, before it is known whether the factors are right. The
    /// sums, the parameters and the optimizer's state from before are kept until
    /// [`StageParameters::keep_update`] or [`StageParameters::undo_update`]. If the optimizer panics, the
    /// stage is as before. Returns whether it is updated.
    fn update_early(&mut self, factors: &Factors, learning_rate: f64) -> bool;

    /// Keeps the early update, if there is one, and clears the gradient sums. Returns whether there is one.
    fn keep_update(&mut self) -> bool;

    /// Undoes the early update, if there is one. Returns whether there was one.
    fn undo_update(&mut self) -> bool;

    /// Visits the module, whose parameters must be whole. Returns the number of modules or parameters that it
    /// found.
    fn visit(&mut self, stage: StageIndex, visit: &Visit) -> Result<usize, StageError>;

    /// Waits until the stage's device has computed the parameters.
    ///
    /// # Errors
    /// The back end's message, if the device has failed.
    fn await_parameters(&self) -> Result<(), String>;

    /// Returns the parameters' values, in the order of [`ParameterTable::paths`]. A sharded stage returns
    /// its part of them unless they are gathered.
    fn parameters(&self) -> Vec<TensorData>;

    /// Returns the current parameters and optimizer, without the base of adapters. They share storage with the
    /// stage. `rank` is the rank of the stage in its tensor group.
    fn held_state(&self, rank: TensorRank) -> StageState;

    /// Like [`StageParameters::held_state`], without parameters that another replica contributes to the state of
    /// all replicas.
    fn state(&self, rank: TensorRank) -> StageState;

    /// Restores parameters and optimizer state of `rank` of its tensor group, and freezes the parameters that
    /// were frozen. If `may_miss`, parameters that the state does not have keep their values. After an
    /// error, some parameters are restored and others are not.
    fn restore(
        &mut self,
        stored: &dyn StoredState,
        rank: TensorRank,
        may_miss: bool,
    ) -> Result<RestoredPaths, CheckpointError>;
}
