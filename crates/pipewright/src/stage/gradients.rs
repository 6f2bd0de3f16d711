//! Sums of parameter gradients over the microbatches of a step, without the parameters' ranks in the type.

use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, Flex, ops::FloatTensorOps};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use super::module::StageModule;

/// One sum for each float parameter of a stage, in the order in which Burn visits them.
#[derive(Debug)]
pub(crate) struct GradientSums {
    paths: Vec<Arc<str>>,
    sums: Vec<Option<DispatchTensor>>,
}

impl GradientSums {
    /// Empty sums for the parameters of `module`.
    pub(crate) fn new<M: StageModule>(module: &M) -> Self {
        let mut names = Names::default();
        module.visit(&mut names);
        let paths: Vec<_> = names.found.iter().map(|local| module.parameter_path(local).into()).collect();
        let sums = vec![None; paths.len()];
        Self { paths, sums }
    }

    /// Global path of each parameter.
    pub(crate) fn paths(&self) -> &[Arc<str>] {
        &self.paths
    }

    /// Takes the gradients of `module`'s parameters out of `gradients` and adds them.
    pub(crate) fn add<M: Module>(&mut self, module: &M, gradients: &mut Gradients) {
        module.visit(&mut Adder { sums: self.sums.iter_mut(), gradients });
    }

    /// Sum of squares of each sum, in f64, element by element in storage order: the result depends on the parameter
    /// alone, never on which other parameters share its rank.
    pub(crate) fn squares(&self) -> Vec<f64> {
        self.sums.iter().map(|sum| sum.as_ref().map_or(0.0, sum_of_squares)).collect()
    }

    /// Hands the sums over, each multiplied by `factor`, keyed for Burn's optimizers; the sums are empty afterwards.
    pub(crate) fn take<M: Module>(&mut self, module: &M, factor: f64) -> GradientsParams {
        let mut taker = Taker { sums: self.sums.iter_mut(), factor, taken: GradientsParams::new() };
        module.visit(&mut taker);
        taker.taken
    }

    /// Drops all sums.
    pub(crate) fn clear(&mut self) {
        self.sums.fill(None);
    }
}

/// Lanes of the sum of squares: independent chains, so that the additions need not wait for each other.
const LANES: usize = 16;

fn sum_of_squares(tensor: &DispatchTensor) -> f64 {
    // Rank plays no part in a sum over all elements, so any may stand in the type.
    let tensor = Tensor::<1>::from_dispatch(tensor.clone());
    match tensor.clone().try_into_primitive::<Flex>() {
        Ok(flex) if flex.is_contiguous() && flex.dtype() == burn::tensor::DType::F32 => {
            let start = flex.layout().start_offset();
            let elements = flex.layout().num_elements();
            squares_of(&flex.storage::<f32>()[start..start + elements])
        }
        // Elsewhere the elements come to the host first: the sum must not depend on how a device reduces.
        _ => squares_of(&tensor.into_data().iter::<f32>().collect::<Vec<_>>()),
    }
}

fn squares_of(elements: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (chunks, rest) = elements.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &element) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(element) * f64::from(element);
        }
    }
    let rest: f64 = rest.iter().map(|&element| f64::from(element) * f64::from(element)).sum();
    lanes.iter().sum::<f64>() + rest
}

/// Collects the local path of every float parameter.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for Names {
    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.found.push(self.path.join("."));
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}

struct Adder<'a> {
    sums: std::slice::IterMut<'a, Option<DispatchTensor>>,
    gradients: &'a mut Gradients,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let sum = self.sums.next().expect("a module has the same parameters on every visit");
        let Some(gradient) = param.val().grad_remove(self.gradients) else { return };
        let gradient = gradient.into_dispatch();
        *sum = Some(match sum.take() {
            Some(sum) => Dispatch::float_add(sum, gradient),
            None => gradient,
        });
    }
}

struct Taker<'a> {
    sums: std::slice::IterMut<'a, Option<DispatchTensor>>,
    factor: f64,
    taken: GradientsParams,
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let sum = self.sums.next().expect("a module has the same parameters on every visit");
        if let Some(sum) = sum.take() {
            self.taken.register(param.id, Tensor::<D>::from_dispatch(sum).mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_do_not_depend_on_a_slice_or_its_neighbours() {
        let device = burn::tensor::Device::flex();
        let elements: Vec<f32> = (0..37).map(|i| i as f32 * 0.1).collect();
        let whole = Tensor::<1>::from_floats(elements.as_slice(), &device);
        let expected: f64 = elements[3..35].iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let found = sum_of_squares(&whole.slice(3..35).into_dispatch());
        assert!((found - expected).abs() < 1e-9 * expected, "{found} {expected}");
    }
}
