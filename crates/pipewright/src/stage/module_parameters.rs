//! Reads a stage's parameters and buffers from its module, and writes them back.

use std::convert::Infallible;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::autodiff::on_tape_of;
use crate::tensor::{OptionalTensors, Value};

/// A parameter of a module. It shares the module's storage.
pub(super) struct NamedTensor {
    pub(super) id: ParamId,
    /// Its path inside the module.
    pub(super) local: String,
    pub(super) value: Value,
    /// Whether the parameter has a gradient.
    pub(super) is_trained: bool,
}

/// Returns the float parameters of `module`, off the tape, in the order in which Burn visits them.
pub(super) fn parameters_of<M: Module>(module: &M) -> Vec<NamedTensor> {
    find(module).floats
}

/// Returns the integer and boolean parameters of `module`, which have no gradients, in the order in which
/// Burn visits them.
pub(super) fn discrete_of<M: Module>(module: &M) -> Vec<NamedTensor> {
    find(module).discrete
}

/// Returns the path of a layer of `module` that has running statistics: Burn's batch normalisation. Running
/// statistics of a user's own layer cannot be told from other parameters that are not trained.
pub(super) fn running_statistics_of<M: Module>(module: &M) -> Option<String> {
    find(module).running_statistics
}

/// Returns the device of a module's first parameter, or the default device for a module without parameters.
pub(super) fn device_of<M: Module>(module: &M) -> Device {
    module.devices().into_iter().next().unwrap_or_else(|| Device::flex().autodiff())
}

fn find<M: Module>(module: &M) -> Finder {
    let mut finder = Finder::default();
    module.visit(&mut finder);
    finder
}

#[derive(Default)]
struct Finder {
    path: Vec<String>,
    floats: Vec<NamedTensor>,
    discrete: Vec<NamedTensor>,
    running_statistics: Option<String>,
}

impl Finder {
    fn add_discrete<const D: usize, K: Basic>(&mut self, id: ParamId, tensor: Tensor<D, K>) {
        let (local, value) = (self.path.join("."), Value::of(tensor));
        self.discrete.push(NamedTensor { id, local, value, is_trained: false });
    }
}

impl ModuleVisitor for Finder {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        let is_trained = tensor.is_require_grad();
        let (local, value) = (self.path.join("."), Value::of(tensor.inner()));
        self.floats.push(NamedTensor { id: param.id, local, value, is_trained });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add_discrete(param.id, param.val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add_discrete(param.id, param.val());
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Struct:BatchNorm" {
            self.running_statistics.get_or_insert_with(|| self.path.join("."));
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

/// Replaces the float parameters of `module` with the values that `value` returns. `value` is called with the
/// index of each parameter in visiting order. Parameters stay on the tape if they were on it. A parameter for
/// which it returns `None` does not change. After an error the remaining parameters do not change.
pub(super) fn filled<M: Module, E>(
    module: M,
    value: impl FnMut(usize, &Value) -> Result<Option<Value>, E>,
) -> (M, Result<(), E>) {
    let mut filler = Filler { index: 0, value, outcome: Ok(()) };
    let module = module.map(&mut filler);
    (module, filler.outcome)
}

/// Like [`filled`], but with a list of values.
pub(super) fn with_values<M: Module>(module: M, values: OptionalTensors) -> M {
    let mut values = values.into_iter();
    let next = |_, _: &Value| Ok(values.next().expect("a module has the same parameters on every visit"));
    let (module, outcome) = filled(module, next);
    outcome.unwrap_or_else(|never: Infallible| match never {});
    module
}

struct Filler<F, E> {
    index: usize,
    value: F,
    outcome: Result<(), E>,
}

impl<E, F: FnMut(usize, &Value) -> Result<Option<Value>, E>> ModuleMapper for Filler<F, E> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.index;
        self.index += 1;
        if self.outcome.is_err() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let tensor = match (self.value)(index, &Value::of(tensor.clone().inner())) {
            Ok(Some(value)) => in_place_of(&tensor, Tensor::from_dispatch(value.into_dispatch())),
            Ok(None) => tensor,
            Err(error) => {
                self.outcome = Err(error);
                tensor
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Returns `value`, off the tape, as a leaf with the settings of `former`.
fn in_place_of<const D: usize>(former: &Tensor<D>, value: Tensor<D>) -> Tensor<D> {
    let value = on_tape_of(value, former);
    if former.is_require_grad() { value.require_grad() } else { value }
}

/// Replaces the integer and boolean parameters of `module` with the values that `value` returns. `value` is
/// called with the index of each parameter in the order of [`discrete_of`]. After an error the remaining
/// parameters do not change.
pub(super) fn with_discrete<M: Module, E>(
    module: M,
    value: impl FnMut(usize, &Value) -> Result<Value, E>,
) -> (M, Result<(), E>) {
    let mut filler = DiscreteFiller { index: 0, value, outcome: Ok(()) };
    let module = module.map(&mut filler);
    (module, filler.outcome)
}

struct DiscreteFiller<F, E> {
    index: usize,
    value: F,
    outcome: Result<(), E>,
}

impl<E, F: FnMut(usize, &Value) -> Result<Value, E>> DiscreteFiller<F, E> {
    fn replace<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        let index = self.index;
        self.index += 1;
        if self.outcome.is_err() {
            return tensor;
        }
        match (self.value)(index, &Value::of(tensor.clone())) {
            Ok(value) => Tensor::from_dispatch(value.into_dispatch()),
            Err(error) => {
                self.outcome = Err(error);
                tensor
            }
        }
    }
}

impl<E, F: FnMut(usize, &Value) -> Result<Value, E>> ModuleMapper for DiscreteFiller<F, E> {
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.replace(tensor), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.replace(tensor), mapper)
    }
}
