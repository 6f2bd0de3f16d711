//! Checks whether an optimizer can update the parts of a cut parameter.
//!
//! With sharded parameters, each replica updates its own rows, and a tensor rank has some rows or columns. The result
//! equals the update of the whole parameter only if the update of an element does not depend on other parts. This is
//! true of SGD, Adam and AdamW. It is not true of optimizers that use the whole matrix (Muon, Adafactor) or a
//! parameter's norm (Lamb, clipping by the norm of each parameter). `AdamW8bit` uses neighbours in a row, so it can
//! update rows but not columns. Burn's optimizers do not say which kind they are, and different parameters may have
//! different ones. So the optimizer is tried on a small copy of the module: on whole parameters, and on halves.

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

/// How a parameter is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterCut {
    Whole,
    /// Each part has whole rows.
    ByRows,
    /// Parts may have some columns of each row.
    ByRowsOrColumns,
}

/// Returns the index of a parameter of `module` whose parts, as `cut_of` says, depend on each other in the optimizer's
/// update.
pub(crate) fn mixes_parts<M: Module>(
    optimizer: &ModuleOptimizer,
    module: &M,
    cut_of: impl Fn(usize) -> ParameterCut,
) -> Option<usize> {
    let trial = |part| trained(optimizer.clone(), module.clone(), part);
    let all = Part { rows: (0, ROWS), columns: (0, WIDTH) };
    let whole = trial(all);
    let by_rows = [(0, ROWS / 2), (ROWS / 2, ROWS)].map(|rows| trial(Part { rows, ..all }));
    let by_columns = [(0, WIDTH / 2), (WIDTH / 2, WIDTH)].map(|columns| trial(Part { columns, ..all }));
    let has_same_rows = |index: usize| {
        let [upper, lower] = &by_rows;
        whole[index] == [upper[index].as_slice(), &lower[index]].concat()
    };
    let has_same_columns = |index: usize| {
        if whole[index].len() == ROWS {
            return true;
        }
        let [left, right] = by_columns.each_ref().map(|half| half[index].chunks(WIDTH / 2));
        whole[index]
            .chunks(WIDTH)
            .zip(left.zip(right))
            .all(|(row, (left, right))| row == [left, right].concat())
    };
    (0..whole.len()).find(|&index| match cut_of(index) {
        ParameterCut::Whole => false,
        ParameterCut::ByRows => !has_same_rows(index),
        ParameterCut::ByRowsOrColumns => !(has_same_rows(index) && has_same_columns(index)),
    })
}

/// Some rows and columns of a trial parameter: the first one, and the one after the last.
#[derive(Clone, Copy)]
struct Part {
    rows: (usize, usize),
    columns: (usize, usize),
}

/// Returns the updated values of a part of each trial parameter.
fn trained<M: Module>(mut optimizer: ModuleOptimizer, module: M, part: Part) -> Vec<Vec<f32>> {
    let mut module = module.map(&mut Small { part });
    for scale in SCALES {
        let mut gradients = Gradients { part, scale, made: GradientsParams::new() };
        module.visit(&mut gradients);
        module = optimizer.step(0.1, module, gradients.made);
    }
    let mut reader = Reader(Vec::new());
    module.visit(&mut reader);
    reader.0
}

/// Returns a part of a small tensor; tensors differ for each `seed`. The second dimension has the columns.
fn small<const D: usize>(part: Part, seed: f32, scale: f32) -> Tensor<D> {
    let mut shape = [1; D];
    shape[0] = ROWS;
    let mut ranges = shape.map(|size| 0..size);
    ranges[0] = part.rows.0..part.rows.1;
    if D > 1 {
        shape[1] = WIDTH;
        ranges[1] = part.columns.0..part.columns.1;
    }
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|index| scale * libm::sinf(index as f32 * 0.7 + seed)).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex()).slice(ranges)
}

/// Replaces each trained parameter with a small tensor. Other tensors stay and share their storage with the
/// module.
struct Small {
    part: Part,
}

impl ModuleMapper for Small {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = if tensor.is_require_grad() {
            small(self.part, 0.1, 1.0).autodiff().require_grad()
        } else {
            tensor
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

struct Gradients {
    part: Part,
    scale: f32,
    made: GradientsParams,
}

impl ModuleVisitor for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.val().is_require_grad() {
            self.made.register(param.id, small::<D>(self.part, libm::logf(self.scale), self.scale));
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
    use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};

    use super::*;
    use crate::optimizer::{Adafactor, AdamW, AdamW8bit, Lion, Muon};

    #[derive(Module, Debug)]
    struct Model {
        norm: BatchNorm,
        linear: Linear,
    }

    /// Checks which parameter is refused if all are cut, by rows and by rows or columns.
    fn check(optimizer: &ModuleOptimizer, expected: [Option<usize>; 2]) {
        let device = Device::flex().autodiff();
        let norm = BatchNormConfig::new(8).init(&device);
        let linear = LinearConfig::new(8, 8).with_bias(false).init(&device);
        let model = Model { norm, linear };
        let cuts = [ParameterCut::ByRows, ParameterCut::ByRowsOrColumns];
        assert_eq!(cuts.map(|cut| mixes_parts(optimizer, &model, |_| cut)), expected);
        assert_eq!(mixes_parts(optimizer, &model, |_| ParameterCut::Whole), None, "no parameter is cut");
    }

    #[test]
    fn elementwise_optimizers_are_distinguished_from_others() {
        let clipped = |clipping| AdamConfig::new().init().with_grad_clipping(clipping);
        check(&SgdConfig::new().init(), [None; 2]);
        check(&AdamConfig::new().init(), [None; 2]);
        check(&AdamWConfig::new().init(), [None; 2]);
        check(&AdamW::default().init(), [None; 2]);
        check(&Lion::default().init(), [None; 2]);
        check(&clipped(GradientClipping::Value(1.0)), [None; 2]);
        check(&Adafactor::default().init(), [Some(0); 2]);
        check(&clipped(GradientClipping::Norm(1e-3)), [Some(0); 2]);
        check(&clipped(GradientClipping::Norm(1e6)), [Some(0); 2]);
    }

    #[test]
    fn neighbours_in_a_row_share_their_scale() {
        // The batch norm's scale, shift, running mean and variance come before the matrix.
        check(&AdamW8bit(AdamW::default()).init(), [None, Some(4)]);
    }

    #[test]
    fn each_parameters_own_optimizer_is_tried() {
        let matrices = ParamGroup::from_predicate("linear");
        check(&AdamW::default().init().with_group(matrices, Muon::default(), None), [Some(4); 2]);
    }
}
