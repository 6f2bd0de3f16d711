//! The module that a stage in training runs: a user's [`StageModule`], or its part of a graph.

use std::any::Any;
use std::sync::Arc;

use burn::module::Module;
use pipewright_schedule::StageIndex;

use super::error::StageError;
use super::module::{StageContext, StageModule};
use super::visit::{ModulePlace, any, any_mut};
use crate::memory::StreamedMatrix;
use crate::tensor::{Boundary, EdgePlacement, Placement, Values, pack, unpack};

/// A module that takes the tensors of a boundary without their types and checks them itself.
pub(crate) trait StageBody: Module + 'static {
    /// The tensors that the loss takes.
    type Output: Boundary;

    /// Returns the outputs of the module for one microbatch.
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Self::Output, StageError>;

    /// Returns the number of blocks: parts that run one after another and can be recomputed one by one.
    fn blocks(&self) -> usize {
        1
    }

    /// Runs a block. The first takes the inputs of the stage, each other one the tensors of the block before
    /// it, and the last returns the outputs of the stage.
    fn forward_block(
        &self,
        block: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        let _ = block;
        Ok(pack(self.forward(inputs, context)?))
    }

    /// Returns the number of layers. Each has a tape of its own, so the gradients inside it are added in an order
    /// that does not depend on the other layers of the stage (`tape.rs`). A module whose layers are not known
    /// counts as one. If a module with several layers has several blocks, these are its layers.
    fn layers(&self) -> usize {
        1
    }

    /// Runs a layer, as [`StageBody::forward_block`] runs a block.
    fn forward_layer(
        &self,
        layer: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        self.forward_block(layer, inputs, context)
    }

    /// Returns the name of a layer; `None` if it has no name.
    fn layer_name(&self, layer: usize) -> Option<Arc<str>> {
        let _ = layer;
        None
    }

    /// Returns the module at a place, if it is this one or a part of it, and the name of its type.
    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)>;

    /// Like [`StageBody::part`], but to change it. [`StageBody::parts_changed`] must be called afterwards.
    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)>;

    /// Updates what the module knows of its parts.
    fn parts_changed(&mut self) {}

    /// Returns the module as the user knows it: the one that the user made, or the `Vec` of the layers.
    fn exposed(&self) -> &dyn Any {
        self
    }

    /// Returns the global path of a parameter.
    fn parameter_path(&self, local: &str) -> String;

    /// Returns whether a parameter has single precision in a pipeline of half precision.
    fn stays_in_single_precision(&self, local: &str) -> bool;

    /// Returns how the ranks of a tensor group hold a parameter.
    fn placement(&self, local: &str) -> Placement {
        let _ = local;
        Placement::REPLICATED
    }

    /// Returns how the ranks of a tensor group take an input and return its gradient.
    fn input_placement(&self, input: usize) -> EdgePlacement {
        let _ = input;
        EdgePlacement::WHOLE
    }

    /// Returns how the ranks of a tensor group have an output and take its gradient.
    fn output_placement(&self, output: usize) -> EdgePlacement {
        let _ = output;
        EdgePlacement::WHOLE
    }

    /// Returns why the module cannot run slices of microbatches; `None` if it can.
    fn refuses_slices(&self) -> Option<String>;

    /// Returns the global paths of the parameters that have other holders.
    fn shared_parameters(&self) -> Vec<String>;

    /// Returns the matrices that are in memory only while the stage computes.
    fn streamed(&self) -> Vec<Arc<StreamedMatrix>> {
        Vec::new()
    }

    /// Returns the tensors that come from or go to stages that are not neighbours.
    fn skips(&self) -> &Skips;
}

/// Tensors that go directly between stages that are not neighbours, in ascending order of the stages. In a
/// list of inputs or outputs they follow the tensors of the neighbour, in this order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skips {
    pub inputs: Vec<Skip>,
    pub outputs: Vec<Skip>,
}

/// A number of tensors from or to one stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skip {
    pub stage: StageIndex,
    pub tensors: usize,
}

/// The skips of a stage that is connected to its neighbours only.
pub(crate) static NO_SKIPS: Skips = Skips { inputs: Vec::new(), outputs: Vec::new() };

impl<M: StageModule> StageBody for M {
    type Output = M::Output;

    fn forward(&self, inputs: Values, context: &StageContext) -> Result<M::Output, StageError> {
        let input = unpack(inputs).map_err(StageError::Input)?;
        context
            .run_layer(&format!("stage {}", context.stage()), || StageModule::forward(self, input, context))
    }

    fn blocks(&self) -> usize {
        StageModule::blocks(self)
    }

    fn forward_block(
        &self,
        block: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        let name = format!("stage {}, block {block}", context.stage());
        let run = || StageModule::forward_block(self, block, inputs, context);
        context.run_layer(&name, run)?.map_err(StageError::Input)
    }

    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)> {
        matches!(place, ModulePlace::Stage(_)).then(|| any(self))
    }

    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)> {
        matches!(place, ModulePlace::Stage(_)).then(|| any_mut(self))
    }

    fn parameter_path(&self, local: &str) -> String {
        StageModule::parameter_path(self, local)
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        StageModule::stays_in_single_precision(self, local)
    }

    fn placement(&self, local: &str) -> Placement {
        StageModule::placement(self, local)
    }

    fn input_placement(&self, input: usize) -> EdgePlacement {
        StageModule::input_placement(self, input)
    }

    fn output_placement(&self, output: usize) -> EdgePlacement {
        StageModule::output_placement(self, output)
    }

    fn refuses_slices(&self) -> Option<String> {
        StageModule::refuses_slices(self)
    }

    fn shared_parameters(&self) -> Vec<String> {
        StageModule::shared_parameters(self)
    }

    fn streamed(&self) -> Vec<Arc<StreamedMatrix>> {
        StageModule::streamed(self)
    }

    fn skips(&self) -> &Skips {
        &NO_SKIPS
    }
}
