//! A stage's parameters and optimizer state, out of its module and back into it.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::value::Value;

/// A parameter of a module, sharing its storage.
pub(super) struct Found {
    pub(super) id: ParamId,
    /// Its path inside the module.
    pub(super) local: String,
    pub(super) value: Value,
}

/// The float parameters of `module`, off the tape, in the order in which Burn visits them.
pub(super) fn parameters_of<M: Module>(module: &M) -> Vec<Found> {
    let mut finder = Finder::default();
    module.visit(&mut finder);
    finder.found
}

#[derive(Default)]
struct Finder {
    path: Vec<String>,
    found: Vec<Found>,
}

impl ModuleVisitor for Finder {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = Value::of(param.val().inner());
        self.found.push(Found { id: param.id, local: self.path.join("."), value });
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// `module` with the checkpoint's values in its float parameters, whose paths come in visiting order; with an error,
/// some of them.
pub(super) fn filled<M: Module>(
    module: M,
    paths: &[Arc<str>],
    checkpoint: &Checkpoint,
) -> (M, Result<(), CheckpointError>) {
    let mut filler = Filler { paths: paths.iter(), checkpoint, outcome: Ok(()) };
    let module = module.map(&mut filler);
    (module, filler.outcome)
}

struct Filler<'a> {
    paths: std::slice::Iter<'a, Arc<str>>,
    checkpoint: &'a Checkpoint,
    outcome: Result<(), CheckpointError>,
}

impl ModuleMapper for Filler<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.paths.next().expect("a module has the same parameters on every visit");
        if self.outcome.is_err() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let dtype = tensor.dtype();
        let tensor = match self.checkpoint.parameter(path, &tensor.dims(), dtype) {
            Ok(data) => {
                let filled = Tensor::<D>::from_data(data, (&tensor.device(), dtype));
                if tensor.is_require_grad() { filled.require_grad() } else { filled }
            }
            Err(error) => {
                self.outcome = Err(error);
                tensor
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
