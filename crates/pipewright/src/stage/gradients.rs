//! Sums of parameter gradients over the microbatches of a step. The number of a parameter's dimensions is not
//! in the type.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{Dispatch, DispatchTensor, TensorMetadata, ops::FloatTensorOps};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Gradients, Tensor};
use pipewright_kernel::scale::scale;
use pipewright_kernel::squares::sums_of_squares;

use super::error::StageError;
use super::first_value::FirstValue;
use super::parameter_table::ParameterTable;
use super::shards::Catches;
use super::watch::found_in;
use crate::autodiff::inner_of;
use crate::device::computes_behind;
use crate::nn::{
    ConvolutionTask, CpuTensor, Operand, RowIds, SplitTask, WeightTask, add_product, add_product_on_device,
    add_rows, add_rows_on_device, cpu, cpu_tensor, elements, from_cpu, owned, product_in_single,
};
use crate::tensor::shard::RowShard;
use crate::tensor::{Value, ValueKind, Values};

/// One sum for each float parameter of a stage, by the parameter's index. Gradients in half precision are
/// added in single precision.
#[derive(Clone, Debug)]
pub(crate) struct GradientSums {
    table: Arc<ParameterTable>,
    sums: Vec<Option<DispatchTensor>>,
    /// The gradients of experts from the tokens of all replicas of the group except the first one, by the
    /// parameter's index, and for each parameter by the replica, from 1. They are not in `sums`.
    of_sources: HashMap<usize, BTreeMap<usize, DispatchTensor>>,
    /// Whether a backward pass has computed the parameter's gradient at once instead of deferring it.
    undeferred: Vec<bool>,
    /// Whether each sum is checked when a gradient is added.
    is_watched: bool,
    /// The first parameter whose sum is not finite, if sums are checked.
    not_finite: Option<usize>,
}

impl GradientSums {
    /// Returns empty sums for the parameters of a module.
    pub(super) fn new(table: Arc<ParameterTable>) -> Self {
        let count = table.paths.len();
        let (sums, undeferred) = (vec![None; count], vec![false; count]);
        Self { table, sums, of_sources: HashMap::new(), undeferred, is_watched: false, not_finite: None }
    }

    /// Checks each sum from now on when a gradient is added, until the sums are dropped.
    pub(super) fn watch(&mut self) {
        self.is_watched = true;
    }

    /// Fails if sums are checked and one is not finite.
    pub(super) fn outcome(&self) -> Result<(), StageError> {
        let Some(index) = self.not_finite else { return Ok(()) };
        let parameter = self.table.paths[index].to_string();
        Err(StageError::FirstNotFinite { value: FirstValue::ParameterGradient { parameter } })
    }

    fn check(&mut self, index: usize, sum: &DispatchTensor) {
        let is_first = self.is_watched && self.not_finite.is_none();
        if is_first && !found_in(&[Value::from_dispatch(sum.clone())]).is_empty() {
            self.not_finite = Some(index);
        }
    }

    /// Drops the sum of a parameter.
    pub(super) fn drop_sum(&mut self, id: ParamId) {
        if let Some(index) = self.table.index_of(id) {
            self.sums[index] = None;
            self.of_sources.remove(&index);
        }
    }

    /// Returns the indices of the parameters whose gradients a backward pass has computed at once.
    pub(super) fn undeferred(&self) -> impl Iterator<Item = usize> {
        self.undeferred.iter().enumerate().filter_map(|(index, &undeferred)| undeferred.then_some(index))
    }

    /// Returns the sum of the parameter at `index`; `None` if it is not a float parameter, or has no sum yet.
    pub(crate) fn get(&self, index: usize) -> Option<Value> {
        self.sums.get(index)?.clone().map(Value::from_dispatch)
    }

    /// Replaces the sum of the parameter at `index`.
    pub(crate) fn set(&mut self, index: usize, sum: Option<Value>) {
        if let Some(own) = self.sums.get_mut(index) {
            *own = sum.map(Value::into_dispatch);
        }
    }

    /// Returns the gradients of the parameter at `index`, in the order of [`GradientSums::take_sources`].
    pub(crate) fn sources(&self, index: usize) -> Vec<Option<Value>> {
        let rest = self.of_sources.get(&index).into_iter().flat_map(BTreeMap::values);
        let rest = rest.map(|sum| Some(Value::from_dispatch(sum.clone())));
        std::iter::once(self.get(index)).chain(rest).collect()
    }

    /// Takes out the gradients of the parameter at `index`, one sum for each replica whose tokens have
    /// reached it, in the order of the replicas. An expert's gradient is the sum of all of them; other
    /// parameters have one.
    pub(crate) fn take_sources(&mut self, index: usize) -> Vec<Option<Value>> {
        let first = self.sums.get_mut(index).and_then(Option::take);
        let rest = self.of_sources.remove(&index).unwrap_or_default();
        let all = std::iter::once(first).chain(rest.into_values().map(Some));
        all.map(|sum| sum.map(Value::from_dispatch)).collect()
    }

    /// Removes the gradients of `module`'s parameters from `gradients` and adds them to the sums.
    pub(crate) fn add<M: Module>(&mut self, module: &M, gradients: &mut Gradients) {
        module.visit(&mut Adder { sums: self, index: 0, gradients });
    }

    /// Adds the gradients that a backward pass left in `catches`.
    pub(super) fn add_caught(&mut self, catches: Catches) {
        for (index, caught) in catches {
            let Some(gradient) = caught.take() else { continue };
            self.undeferred[index] = true;
            self.add_at(index, gradient.into_dispatch());
        }
    }

    /// Adds a gradient to a sum, which has at least single precision.
    fn add_at(&mut self, index: usize, gradient: DispatchTensor) {
        let gradient = match gradient.dtype() {
            DType::F16 | DType::BF16 => Dispatch::float_cast(gradient, FloatDType::F32),
            _ => gradient,
        };
        let sum = match self.sums[index].take() {
            Some(sum) => Dispatch::float_add(sum, gradient),
            None => gradient,
        };
        self.check(index, &sum);
        self.sums[index] = Some(sum);
    }

    /// Computes a weight gradient that a backward pass deferred and adds it, in place if there is already a
    /// sum.
    ///
    /// # Errors
    /// When a layer of the user's returns a gradient of another shape than its parameter.
    pub(crate) fn add_deferred(&mut self, task: WeightTask) -> Result<(), StageError> {
        let (weight, source) = match task {
            WeightTask::Split(task) => return self.add_split(task),
            WeightTask::Product { weight, source, .. } => (weight, source),
            WeightTask::Rows { weight, .. } => (weight, 0),
            WeightTask::Convolution(ref task) => (task.weight, 0),
            WeightTask::LowRank(ref task) => (task.weight, 0),
        };
        let index = self.index_of(weight);
        let shape = self.table.shapes[index].as_slice();
        let sum = match source {
            0 => self.sums[index].take(),
            _ => self.of_sources.get_mut(&index).and_then(|sources| sources.remove(&source)),
        };
        let sum = match (task, shape) {
            (WeightTask::Convolution(task), shape) => add_convolution(sum, &task, shape),
            (task, &[rows, columns]) => {
                add_task(sum.map(Tensor::from_dispatch), task, [rows, columns]).into_dispatch()
            }
            _ => unreachable!("other weights whose gradients are deferred are matrices"),
        };
        self.check(index, &sum);
        match source {
            0 => self.sums[index] = Some(sum),
            _ => drop(self.of_sources.entry(index).or_default().insert(source, sum)),
        }
        Ok(())
    }

    /// Adds a gradient that a function of the user's has computed.
    ///
    /// # Errors
    /// When no parameter has the path, or the gradient is not one float tensor of its shape.
    pub(crate) fn add_by_path(&mut self, path: &str, gradient: Values) -> Result<(), StageError> {
        let Some(index) = self.table.paths.iter().position(|known| **known == *path) else {
            let known = self.table.paths.first();
            let known = known.map(|known| format!("; its first one is `{known}`")).unwrap_or_default();
            return Err(StageError::Mistake(format!("the stage has no parameter `{path}`{known}")));
        };
        let (parameter, expected) = (&self.table.paths[index], &self.table.shapes[index]);
        let fits = |value: &Value| value.kind() == ValueKind::Float && value.shape().to_vec() == *expected;
        match <[Value; 1]>::try_from(gradient) {
            Ok([gradient]) if fits(&gradient) => {
                let gradient = inner_of(Tensor::<1>::from_dispatch(gradient.into_dispatch()));
                self.add_at(index, gradient.into_dispatch());
                Ok(())
            }
            other => {
                let found = other.map_or_else(|values| values, Vec::from);
                let found =
                    found.iter().map(|value| format!("{:?} {:?}", value.dtype(), value.shape().to_vec()));
                Err(StageError::Mistake(format!(
                    "the function added a gradient {} to the parameter `{parameter}`, which takes one float tensor of shape \
                     {expected:?}",
                    found.collect::<Vec<_>>().join(", ")
                )))
            }
        }
    }

    fn index_of(&self, weight: ParamId) -> usize {
        self.table.index_of(weight).expect("a stage's layers have the stage's parameters")
    }

    fn add_split(&mut self, SplitTask { layer, wanted, compute }: SplitTask) -> Result<(), StageError> {
        for (gradient, weight) in compute().into_iter().zip(wanted.iter()) {
            let Some(index) = weight.map(|weight| self.index_of(weight)) else { continue };
            let (found, expected) = (gradient.shape().to_vec(), &self.table.shapes[index]);
            if found != *expected {
                let path = &self.table.paths[index];
                return Err(StageError::Mistake(format!(
                    "the layer `{layer}` returned a gradient of shape {found:?} for its parameter `{path}` of shape \
                     {expected:?}: `SplitBackward::backward_weights` returns the gradients in the order and the shapes of \
                     the weights"
                )));
            }
            self.add_at(index, gradient.into_dispatch());
        }
        Ok(())
    }

    /// Cuts each part of the rows of each gradient sum into `copies` parts, and returns the sum of squares of
    /// each of them: zero without rows, and no sums for a parameter without a gradient. `row_shard` returns
    /// the rows of the parameter at an index that its sum has. A sum depends on the parameter alone, and not
    /// on the other parameters of its rank.
    ///
    /// The CPU back end adds the squares of a part in f64, in storage order. Another device adds them in f32,
    /// in an order that depends only on the number of elements; its sums are read in one go.
    pub(crate) fn squares(&self, copies: u32, row_shard: impl Fn(usize) -> RowShard) -> Vec<Vec<f64>> {
        let mut pending = PendingSquares::default();
        let mut squares_of = |(index, sum): (usize, &Option<DispatchTensor>)| -> Vec<PartSquares> {
            let Some(sum) = sum.clone().map(Value::from_dispatch) else { return Vec::new() };
            let shard = row_shard(index);
            if copies == 1 && shard.count == 1 {
                // A slice of the whole would be a copy on some devices.
                return vec![pending.square(sum)];
            }
            let parts = shard.parts().flat_map(|part| self.rows_of_part(index, shard, part, copies));
            let parts = parts.map(|rows| (!rows.is_empty()).then(|| sum.narrow(0, rows.start, rows.end)));
            let square = |part: Option<Value>| match part {
                Some(part) => pending.square(part),
                None => PartSquares::Zero,
            };
            parts.map(square).collect()
        };
        let sums: Vec<Vec<PartSquares>> = self.sums.iter().enumerate().map(&mut squares_of).collect();
        let [on_host, on_device] = pending.add();
        let square = |part: PartSquares| match part {
            PartSquares::Zero => 0.0,
            PartSquares::OnHost(index) => on_host[index],
            PartSquares::OnDevice(index) => on_device[index],
        };
        sums.into_iter().map(|parts| parts.into_iter().map(square).collect()).collect()
    }

    /// Cuts a part of the rows of a parameter into `copies` parts. Returns the ranges of their rows in the
    /// rows of `shard`, which contains the part.
    fn rows_of_part(
        &self,
        index: usize,
        shard: RowShard,
        part: RowShard,
        copies: u32,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let whole = self.table.shapes[index][0];
        let (first, rows) = (shard.rows(whole).start, part.rows(whole));
        RowShard::all(copies).map(move |copy| {
            let own = copy.rows(rows.len());
            rows.start - first + own.start..rows.start - first + own.end
        })
    }

    /// Takes the sums out, each multiplied by the factor of its index, keyed for Burn's optimizers. The sums
    /// are empty afterwards.
    pub(crate) fn take<M: Module>(&mut self, module: &M, factor: impl Fn(usize) -> f64) -> GradientsParams {
        let mut taker =
            Taker { sums: self.sums.iter_mut().enumerate(), factor, taken: GradientsParams::new() };
        module.visit(&mut taker);
        taker.taken
    }

    /// Drops all sums.
    pub(crate) fn clear(&mut self) {
        self.sums.fill(None);
        self.of_sources.clear();
        (self.is_watched, self.not_finite) = (false, None);
    }
}

/// Returns the sum with the gradient of a convolution's weight added.
fn add_convolution(sum: Option<DispatchTensor>, task: &ConvolutionTask, shape: &[usize]) -> DispatchTensor {
    // The number of dimensions does not matter here; 1 is arbitrary.
    let on_cpu =
        |sum| cpu(Tensor::<1>::from_dispatch(sum)).expect("a convolution is deferred on the CPU back end");
    let zeros = || cpu_tensor(vec![0.0; shape.iter().product()], shape.to_vec());
    let mut sum = sum.map(on_cpu).map_or_else(zeros, owned);
    task.add_to(sum.storage_mut());
    from_cpu::<1>(sum).into_dispatch()
}

/// Returns the sum, of `shape`, with the task's gradient added.
fn add_task(sum: Option<Tensor<2>>, task: WeightTask, shape: [usize; 2]) -> Tensor<2> {
    match task {
        WeightTask::Product { x, gradient, .. } => match (cpu(x.as_ref().clone()), cpu(gradient.clone())) {
            (Some(x), Some(gradient)) => {
                from_cpu(add_product_on_cpu(sum.map(into_cpu), &x, &gradient, shape))
            }
            _ => add_product_on_device(sum, *x, gradient),
        },
        WeightTask::Rows { ids: RowIds::Host(ids), gradient, .. } => {
            let gradient = cpu(gradient).expect("ids are on the host if the gradient is on the CPU back end");
            let zeros = || cpu_tensor(vec![0.0; shape.iter().product()], shape);
            let mut sum = sum.map_or_else(zeros, into_cpu);
            add_rows(sum.storage_mut(), &ids, &elements(&gradient));
            from_cpu(sum)
        }
        WeightTask::Rows { ids: RowIds::Device(ids), gradient, .. } => {
            add_rows_on_device(sum, *ids, gradient, shape)
        }
        WeightTask::LowRank(task) => {
            let zeros = || cpu_tensor(vec![0.0; shape.iter().product()], shape);
            let mut sum = sum.map_or_else(zeros, into_cpu);
            task.add_to(sum.storage_mut(), shape);
            from_cpu(sum)
        }
        WeightTask::Convolution(_) | WeightTask::Split(_) => {
            unreachable!("they are added by functions of their own")
        }
    }
}

fn add_product_on_cpu(
    sum: Option<CpuTensor>,
    x: &CpuTensor,
    gradient: &CpuTensor,
    [inputs, outputs]: [usize; 2],
) -> CpuTensor {
    let rows = x.layout().num_elements() / inputs;
    let x = Operand::new(x, [rows, inputs]).transposed();
    let gradient = Operand::new(gradient, [rows, outputs]);
    let Some(mut sum) = sum else { return product_in_single(x, gradient) };
    add_product(&mut sum, x, gradient);
    sum
}

/// Returns a sum that may be written to: whole, and in storage order.
fn into_cpu(sum: Tensor<2>) -> CpuTensor {
    owned(cpu(sum).expect("a parameter's gradients are all on its stage's device"))
}

/// The sum of squares of a part of a gradient sum, or its index in one of the lists of such sums.
enum PartSquares {
    Zero,
    OnHost(usize),
    OnDevice(usize),
}

/// The parts whose squares are added together: on the processor by several threads, and on another device
/// with one wait for all.
#[derive(Default)]
struct PendingSquares {
    on_host: Vec<CpuTensor>,
    /// A sum of squares each.
    on_device: Vec<Tensor<1>>,
}

impl PendingSquares {
    fn square(&mut self, part: Value) -> PartSquares {
        let is_on_host = !computes_behind(&part.device());
        let elements_of_row = part.shape().last().map_or(1, |&width| width.max(1));
        let rows = part.shape().iter().product::<usize>() / elements_of_row;
        // The number of dimensions does not matter for a sum over all elements; 1 is arbitrary.
        let part = Tensor::<1>::from_dispatch(part.into_dispatch());
        if let Some(part) = cpu(part.clone()) {
            self.on_host.push(part);
            return PartSquares::OnHost(self.on_host.len() - 1);
        }
        if is_on_host {
            let elements: Vec<f32> = part.into_data().iter::<f32>().collect();
            let count = elements.len();
            self.on_host.push(cpu_tensor(elements, [count]));
            return PartSquares::OnHost(self.on_host.len() - 1);
        }
        // Burn's sum over all elements adds atomically, in no fixed order; its sums along a dimension have an
        // order.
        let squares = part.cast(DType::F32).square().reshape([rows, elements_of_row]);
        self.on_device.push(squares.sum_dim(1).sum_dim(0).reshape([1]));
        PartSquares::OnDevice(self.on_device.len() - 1)
    }

    /// Returns the sums of squares on the processor, and the sums on another device.
    fn add(self) -> [Vec<f64>; 2] {
        let on_host: Vec<_> = self.on_host.iter().map(elements).collect();
        let on_host = sums_of_squares(&on_host.iter().map(AsRef::as_ref).collect::<Vec<_>>());
        if self.on_device.is_empty() {
            return [on_host, Vec::new()];
        }
        [on_host, Tensor::cat(self.on_device, 0).into_data().iter().collect()]
    }
}

struct Adder<'a> {
    sums: &'a mut GradientSums,
    index: usize,
    gradients: &'a mut Gradients,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let index = self.index;
        self.index += 1;
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            self.sums.undeferred[index] = true;
            self.sums.add_at(index, gradient.into_dispatch());
        }
    }
}

/// Returns the tensor times `factor`.
fn scaled<const D: usize>(tensor: Tensor<D>, factor: f64) -> Tensor<D> {
    if tensor.dtype() != DType::F32 {
        return tensor.mul_scalar(factor);
    }
    match cpu(tensor.clone()) {
        Some(on_cpu) => {
            drop(tensor);
            let mut on_cpu = owned(on_cpu);
            scale(on_cpu.storage_mut(), factor as f32);
            from_cpu(on_cpu)
        }
        None => tensor.mul_scalar(factor),
    }
}

struct Taker<'a, F> {
    sums: std::iter::Enumerate<std::slice::IterMut<'a, Option<DispatchTensor>>>,
    factor: F,
    taken: GradientsParams,
}

impl<F: Fn(usize) -> f64> ModuleVisitor for Taker<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (index, sum) = self.sums.next().expect("a module has the same parameters on every visit");
        if let Some(sum) = sum.take() {
            let gradient = scaled(Tensor::<D>::from_dispatch(sum), (self.factor)(index));
            self.taken.register(param.id, gradient.cast(param.dtype()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    /// Products of bfloat16 count subnormal numbers as zero; single precision does not.
    #[test]
    fn deferred_gradients_of_bf16_are_products_of_bf16() {
        let bf16 = |number: f32| {
            let number = Tensor::<2>::from_data(TensorData::new(vec![number; 4], [2, 2]), &Device::flex());
            cpu(number.cast(DType::BF16)).expect("on the CPU")
        };
        let (subnormal, large) = (bf16(1e-39), bf16(1e20));
        for sum in [None, Some(cpu_tensor(vec![0.0; 4], [2, 2]))] {
            for (x, gradient) in [(&subnormal, &large), (&large, &subnormal)] {
                let product = add_product_on_cpu(sum.clone(), x, gradient, [2, 2]);
                assert!(elements(&product).iter().all(|&x| x == 0.0), "{product:?}");
            }
        }
    }

    #[test]
    fn squares_do_not_depend_on_a_slice_or_its_neighbours() {
        let device = Device::flex();
        let elements: Vec<f32> = (0..37).map(|i| i as f32 * 0.1).collect();
        let whole = Tensor::<1>::from_floats(elements.as_slice(), &device);
        let expected: f64 = elements[3..35].iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let mut pending = PendingSquares::default();
        pending.square(Value::of(whole.slice(3..35)));
        let [found, _] = pending.add();
        let [found] = found[..] else { panic!("one part, on the processor") };
        assert!((found - expected).abs() < 1e-9 * expected, "{found} {expected}");
    }
}
