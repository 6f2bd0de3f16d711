//! The parameters of a stage: their paths in a model directory, their shapes, and their elements.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use pipewright::tensor::Placement;

use crate::parameter::{BuiltParameter, BuiltParameters, ParameterSpec};
use crate::stage::ModelStage;

/// Returns the parameters that `stage` contributes to a model directory, in the order in which Burn visits
/// them. Copies of tables, such as the table of a tied head, are not among them.
pub fn parameter_specs(stage: &ModelStage) -> Vec<ParameterSpec> {
    let mut specs = Vec::new();
    visit_parameters(stage, |spec, _, _| specs.push(spec));
    specs
}

/// Calls `visit` for each parameter of [`parameter_specs`], with how the ranks of a tensor group hold it, and
/// with a function that copies its elements out.
pub(crate) fn visit_parameters(
    stage: &ModelStage,
    mut visit: impl FnMut(ParameterSpec, Placement, &dyn Fn() -> TensorData),
) {
    let visit = |local: String, _, data: &dyn Fn() -> TensorData| {
        // The original of a copy belongs to the embedding.
        if let Some(BuiltParameter { spec, placement, is_copy: false }) = stage.parameter(&local) {
            let shape = stage.split.tensor.shard(*placement).shape(&spec.shape);
            visit(ParameterSpec { shape, ..spec.clone() }, *placement, data);
        }
    };
    stage.visit(&mut Parameters { names: Vec::new(), visit });
}

/// Returns the common beginning of the paths of a module's parameters, such as `model.layers.3.mlp`.
pub(super) fn path_of(module: &impl Module, built: &BuiltParameters) -> String {
    let mut common: Option<Vec<String>> = None;
    let visit = |_: String, id: ParamId, _: &dyn Fn() -> TensorData| {
        let Some(BuiltParameter { spec, .. }) = built.get(&id) else { return };
        let mut names: Vec<String> = spec.path.split('.').map(str::to_owned).collect();
        // The last one is the name of the parameter itself.
        names.pop();
        match &mut common {
            Some(common) => {
                let equal = common.iter().zip(&names).take_while(|(a, b)| a == b).count();
                common.truncate(equal);
            }
            None => common = Some(names),
        }
    };
    module.visit(&mut Parameters { names: Vec::new(), visit });
    common.unwrap_or_default().join(".")
}

/// Calls `visit` for each parameter, with the path and the identifier that Burn gives it, and with a function that
/// copies its elements out.
pub(super) struct Parameters<F> {
    pub(super) names: Vec<String>,
    pub(super) visit: F,
}

impl<F: FnMut(String, ParamId, &dyn Fn() -> TensorData)> ModuleVisitor for Parameters<F> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.names.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.names.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        (self.visit)(self.names.join("."), param.id, &|| param.val().to_data());
    }
}
