//! Checks whether an optimizer can update parameters row by row.
//!
//! With sharded parameters, each replica updates its own rows. The result equals the update of the whole
//! parameter only if the update of an element does not depend on other rows. This is true of SGD, Adam and
//! AdamW. It is not true of optimizers that use the whole matrix (Muon, Adafactor) or a parameter's norm
//! (Lamb, clipping by the norm of each parameter). Burn's optimizers do not say which kind they are, and
//! different parameters may have different ones. So the optimizer is tried on a small copy of the module: on
//! whole parameters, and on two shards.

use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, TensorData};

/// Sizes of the gradients, one for each step: the first step's state must affect the second, and the sizes
/// must reveal clipping at any threshold.
const SCALES: [f32; 3] = [1e-2, 1e15, 1e-2];
/// Rows of a trial parameter.
const ROWS: usize = 6;
/// Elements of a row, if the parameter has a second dimension.
const WIDTH: usize = 4;

/// Returns the index of a parameter of `module` whose rows depend on each other in the optimizer's update, if
/// one of the parameters that `is_cut` names is such a parameter.
pub(crate) fn mixes_rows<M: Module>(
    optimizer: &ModuleOptimizer,
    module: &M,
    is_cut: impl Fn(usize) -> bool,
) -> Option<usize> {
    let [whole, upper, lower] =
        [0..ROWS, 0..ROWS / 2, ROWS / 2..ROWS].map(|rows| trained(optimizer.clone(), module.clone(), rows));
    let same = |index: usize| whole[index] == [upper[index].as_slice(), &lower[index]].concat();
    (0..whole.len()).find(|&index| is_cut(index) && !same(index))
}

/// Returns the updated values of some rows of each trial parameter.
fn trained<M: Module>(mut optimizer: ModuleOptimizer, module: M, rows: Range<usize>) -> Vec<Vec<f32>> {
    let mut module = module.map(&mut Small { rows: rows.clone() });
    for scale in SCALES {
        let mut gradients = Gradients { rows: rows.clone(), scale, made: GradientsParams::new() };
        module.visit(&mut gradients);
        module = optimizer.step(0.1, module, gradients.made);
    }
    let mut reader = Reader(Vec::new());
    module.visit(&mut reader);
    reader.0
}

/// Returns rows of a small tensor; they differ for each `seed`.
fn small<const D: usize>(rows: Range<usize>, seed: f32, scale: f32) -> Tensor<D> {
    let mut shape = [1; D];
    shape[0] = ROWS;
    if D > 1 {
        shape[1] = WIDTH;
    }
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|index| scale * (index as f32 * 0.7 + seed).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex()).slice(rows)
}

/// Replaces each trained parameter with a small tensor. Other tensors stay and share their storage with the
/// module.
struct Small {
    rows: Range<usize>,
}

impl ModuleMapper for Small {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = if tensor.is_require_grad() {
            small(self.rows.clone(), 0.1, 1.0).autodiff().require_grad()
        } else {
            tensor
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

struct Gradients {
    rows: Range<usize>,
    scale: f32,
    made: GradientsParams,
}

impl ModuleVisitor for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.val().is_require_grad() {
            self.made.register(param.id, small::<D>(self.rows.clone(), self.scale, self.scale));
        }
    }
}

/// Returns the values of each trained parameter; empty for the others.
struct Reader(Vec<Vec<f32>>);

impl ModuleVisitor for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = Some(param.val()).filter(Tensor::is_require_grad);
        self.0.push(tensor.map(|tensor| tensor.into_data().iter::<f32>().collect()).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use burn::grad_clipping::GradientClipping;
    use burn::module::ParamGroup;
    use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    use burn::optim::{AdamConfig, AdamWConfig, MuonConfig, SgdConfig};

    use super::*;
    use crate::optimizer::AdamW;

    #[derive(Module, Debug)]
    struct Model {
        norm: BatchNorm,
        linear: Linear,
    }

    fn check(optimizer: &ModuleOptimizer, expected: Option<usize>) {
        let device = Device::flex().autodiff();
        let norm = BatchNormConfig::new(8).init(&device);
        let linear = LinearConfig::new(8, 8).with_bias(false).init(&device);
        let model = Model { norm, linear };
        assert_eq!(mixes_rows(optimizer, &model, |_| true), expected);
        assert_eq!(mixes_rows(optimizer, &model, |_| false), None, "no parameter is cut");
    }

    #[test]
    fn elementwise_optimizers_are_distinguished_from_others() {
        let clipped = |clipping| AdamConfig::new().init().with_grad_clipping(clipping);
        check(&SgdConfig::new().init(), None);
        check(&AdamConfig::new().init(), None);
        check(&AdamWConfig::new().init(), None);
        check(&AdamW::default().init(), None);
        check(&clipped(GradientClipping::Value(1.0)), None);
        check(&clipped(GradientClipping::Norm(1e-3)), Some(0));
        check(&clipped(GradientClipping::Norm(1e6)), Some(0));
    }

    #[test]
    fn each_parameters_own_optimizer_is_tried() {
        let matrices = ParamGroup::from_predicate("linear");
        // The batch norm's scale, shift, running mean and variance come before the matrix.
        check(&AdamW::default().init().with_group(matrices, MuonConfig::new().build(), None), Some(4));
    }
}
