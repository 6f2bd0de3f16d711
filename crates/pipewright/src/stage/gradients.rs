//! Sums of parameter gradients over the microbatches of a step. The number of a parameter's dimensions is not in the
//! type.

use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, Flex, ops::FloatTensorOps};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};

use super::body::StageBody;
use super::shards::Catches;
use super::state::parameters_of;
use crate::kernel::product::{Matrix, add_product, product};
use crate::kernel::squares::sum_squares;
use crate::nn::{CpuTensor, WeightTask, add_rows, cpu_tensor, elements, owned, row_major};
use crate::tensor::Value;
use crate::tensor::shard::RowShard;

/// One sum for each float parameter of a stage, in the order in which Burn visits them.
#[derive(Debug)]
pub(crate) struct GradientSums {
    paths: Vec<Arc<str>>,
    shapes: Vec<Vec<usize>>,
    places: HashMap<ParamId, usize>,
    duplicate: Option<(Arc<str>, Arc<str>)>,
    sums: Vec<Option<DispatchTensor>>,
}

impl GradientSums {
    /// Returns empty sums for the parameters of `module`.
    pub(crate) fn new<M: StageBody>(module: &M) -> Self {
        let found = parameters_of(module);
        let paths: Vec<Arc<str>> = found.iter().map(|found| module.path(&found.local).into()).collect();
        let shapes = found.iter().map(|found| found.value.shape().to_vec()).collect();
        let mut places = HashMap::new();
        let mut duplicate = None;
        for (place, found) in found.iter().enumerate() {
            if let Some(first) = places.insert(found.id, place) {
                duplicate = Some((Arc::clone(&paths[first]), Arc::clone(&paths[place])));
            }
        }
        let sums = vec![None; paths.len()];
        Self { paths, shapes, places, duplicate, sums }
    }

    /// The global path of each parameter.
    pub(crate) fn paths(&self) -> &[Arc<str>] {
        &self.paths
    }

    /// Changes every parameter's path.
    pub(crate) fn rename(&mut self, path: impl Fn(&str) -> Arc<str>) {
        let paths = self.paths.iter_mut().chain(self.duplicate.iter_mut().flat_map(|(a, b)| [a, b]));
        paths.for_each(|old| *old = path(old));
    }

    /// The parameters' ids.
    pub(crate) fn ids(&self) -> impl Iterator<Item = ParamId> {
        self.places.keys().copied()
    }

    /// Two places that hold the same parameter, if there are any.
    pub(crate) fn duplicate(&self) -> Option<(Arc<str>, Arc<str>)> {
        self.duplicate.clone()
    }

    /// The shape of each parameter.
    pub(crate) fn shapes(&self) -> &[Vec<usize>] {
        &self.shapes
    }

    /// The sum of the parameter at `place`; `None` if no float parameter is there, or it has no sum yet.
    pub(crate) fn get(&self, place: usize) -> Option<Value> {
        self.sums.get(place)?.clone().map(Value::from_dispatch)
    }

    /// Replaces the sum of the parameter at `place`.
    pub(crate) fn set(&mut self, place: usize, sum: Option<Value>) {
        if let Some(place) = self.sums.get_mut(place) {
            *place = sum.map(Value::into_dispatch);
        }
    }

    /// Removes the gradients of `module`'s parameters from `gradients` and adds them to the sums.
    pub(crate) fn add<M: Module>(&mut self, module: &M, gradients: &mut Gradients) {
        module.visit(&mut Adder { sums: self, place: 0, gradients });
    }

    /// Adds the gradients that a backward pass left in `catches`.
    pub(super) fn add_caught(&mut self, catches: Catches) {
        for (place, caught) in catches {
            let Some(gradient) = caught.take() else { continue };
            self.add_at(place, gradient.into_dispatch());
        }
    }

    fn add_at(&mut self, place: usize, gradient: DispatchTensor) {
        let sum = &mut self.sums[place];
        *sum = Some(match sum.take() {
            Some(sum) => Dispatch::float_add(sum, gradient),
            None => gradient,
        });
    }

    /// Computes the weight gradients that a backward pass deferred and adds them, in place if there is already a sum.
    pub(crate) fn add_deferred(&mut self, tasks: impl IntoIterator<Item = WeightTask>) {
        for task in tasks {
            let place =
                *self.places.get(&task.weight()).expect("a stage's layers have the stage's parameters");
            let sum = self.sums[place].take().map(into_cpu);
            self.sums[place] = Some(from_cpu(add_task(sum, &task, &self.shapes[place])));
        }
    }

    /// Returns the sum of squares of each gradient sum, in f64. Squares are added element by element in storage order
    /// within each of `parts` parts, and then over the parts. So the result depends on the parameter alone, and not on
    /// the other parameters of its rank.
    pub(crate) fn squares(&self, parts: u32) -> Vec<f64> {
        let of_parts = |sum: &DispatchTensor| {
            let sum = Value::from_dispatch(sum.clone());
            let parts = RowShard::all(parts).filter_map(|part| part.cut(&sum));
            parts.map(|part| sum_of_squares(&part.into_dispatch())).sum()
        };
        self.sums.iter().map(|sum| sum.as_ref().map_or(0.0, of_parts)).collect()
    }

    /// Takes the sums out, each multiplied by `factor`, keyed for Burn's optimizers. The sums are empty afterwards.
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

/// Returns the sum with the task's gradient added.
fn add_task(sum: Option<CpuTensor>, task: &WeightTask, shape: &[usize]) -> CpuTensor {
    let zeros = || cpu_tensor(vec![0.0; shape.iter().product()], shape.to_vec());
    match task {
        WeightTask::Product { x, gradient, .. } => {
            let &[inputs, outputs] = shape else { unreachable!("a linear layer's weight is a matrix") };
            let rows = x.layout().num_elements() / inputs;
            let x = Matrix::new(elements(x), rows, inputs).transposed();
            let gradient = Matrix::new(elements(gradient), rows, outputs);
            let Some(mut sum) = sum else { return cpu_tensor(product(x, gradient), shape.to_vec()) };
            add_product(sum.storage_mut(), outputs, x, gradient);
            sum
        }
        WeightTask::Rows { ids, gradient, .. } => {
            let mut sum = sum.unwrap_or_else(zeros);
            add_rows(sum.storage_mut(), ids, elements(gradient));
            sum
        }
        WeightTask::Convolution(task) => {
            let mut sum = sum.unwrap_or_else(zeros);
            task.add_to(sum.storage_mut());
            sum
        }
    }
}

/// Returns a sum that may be written to: whole, and in storage order.
fn into_cpu(sum: DispatchTensor) -> CpuTensor {
    let sum = Tensor::<1>::from_dispatch(sum).try_into_primitive::<Flex>();
    owned(sum.expect("weight gradients are put off on the CPU back end alone"))
}

fn from_cpu(sum: CpuTensor) -> DispatchTensor {
    Tensor::<1>::from_primitive::<Flex>(sum).into_dispatch()
}

fn sum_of_squares(tensor: &DispatchTensor) -> f64 {
    // The number of dimensions does not matter for a sum over all elements; 1 is arbitrary.
    let tensor = Tensor::<1>::from_dispatch(tensor.clone());
    match tensor.clone().try_into_primitive::<Flex>() {
        Ok(flex) if flex.dtype() == burn::tensor::DType::F32 => sum_squares(elements(&row_major(flex))),
        // The elements of other back ends are read first: the sum must not depend on how a device reduces.
        _ => sum_squares(&tensor.into_data().iter::<f32>().collect::<Vec<_>>()),
    }
}

struct Adder<'a> {
    sums: &'a mut GradientSums,
    place: usize,
    gradients: &'a mut Gradients,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.place;
        self.place += 1;
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            self.sums.add_at(place, gradient.into_dispatch());
        }
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
