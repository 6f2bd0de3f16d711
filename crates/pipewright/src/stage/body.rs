//! What a stage in training runs: a user's [`StageModule`], or the part of a graph.

use burn::module::Module;
use pipewright_schedule::StageIndex;

use super::module::{StageContext, StageModule};
use super::runner::StageError;
use crate::tensor::{Boundary, Values, unpack};

/// A module that takes a boundary's tensors and looks at them itself.
pub(crate) trait StageBody: Module + 'static {
    /// What the loss sees.
    type Output: Boundary;

    /// The tensors for one microbatch.
    fn run(&self, inputs: Values, context: &StageContext) -> Result<Self::Output, StageError>;

    /// The global path of a parameter.
    fn path(&self, local: &str) -> String;

    /// Global paths of the parameters that have other holders.
    fn shared(&self) -> Vec<String>;

    /// Tensors that come from or go to stages that are not neighbours.
    fn skips(&self) -> &Skips;
}

/// Tensors that go straight between stages that are not neighbours, by stage, ascending. They stand after those of the
/// neighbour, in this order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skips {
    pub inputs: Vec<Skip>,
    pub outputs: Vec<Skip>,
}

/// So many tensors from or to one stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skip {
    pub stage: StageIndex,
    pub tensors: usize,
}

/// For a stage that is connected to its neighbours alone.
pub(crate) static NO_SKIPS: Skips = Skips { inputs: Vec::new(), outputs: Vec::new() };

impl<M: StageModule> StageBody for M {
    type Output = M::Output;

    fn run(&self, inputs: Values, context: &StageContext) -> Result<M::Output, StageError> {
        Ok(self.forward(unpack(inputs).map_err(StageError::Input)?, context))
    }

    fn path(&self, local: &str) -> String {
        self.parameter_path(local)
    }

    fn shared(&self) -> Vec<String> {
        self.shared_parameters()
    }

    fn skips(&self) -> &Skips {
        &NO_SKIPS
    }
}
