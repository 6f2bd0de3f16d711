//! The low-rank adapters of a mixture's experts, in the operation of the mixture on the CPU back end. They have single
//! precision, as [`adapted_product`](super::adapted_product()) has.
//!
//! For rows `x` of an expert, a layer with an adapter gives `x w + low b` with `low = scale * x a`. For its output gradient
//! `g`, with `back = scale * g bᵀ`, the gradient of `x` is `g wᵀ + back aᵀ`, that of `a` is `xᵀ back`, and that of `b` is
//! `lowᵀ g`. Gate and up have the same `a`, or one each.

use burn::tensor::{DType, Tensor};
use pipewright_kernel::grouped::Groups;

use super::deferred::Deferred;
use super::expert::Expert;
use super::expert_matrices::{KeptMatrices, KeptMatrix, Matrices, MatrixValue, Part, Parts};
use super::held_matrix::HeldLinear;
use super::operation::{CpuTensor, cpu_tensor, elements};

/// The adapters of all experts.
pub(super) struct LowRankExperts<'a> {
    layers: Vec<&'a HeldLinear>,
    pub(super) matrices: Matrices,
    pub(super) form: LowRankForm,
}

/// Which layers have an adapter, and the factor of the adapters.
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRankForm {
    enters: bool,
    /// Whether up has a first matrix of its own.
    is_own: bool,
    leaves: bool,
    scale: f32,
    /// The rank of all of them.
    rank: usize,
}

impl LowRankForm {
    /// Returns the rank of the adapters.
    pub(super) fn rank(self) -> usize {
        self.rank
    }
}

impl<'a> LowRankExperts<'a> {
    /// Returns `None` if a matrix has no operations of its own on the CPU back end. The experts are alike.
    pub(super) fn of(experts: &[&'a Expert]) -> Option<Self> {
        let adapters = || experts.iter().filter_map(|expert| expert.adapter.as_ref());
        let first = adapters().next()?;
        let layers: Vec<&HeldLinear> = adapters().flat_map(|adapter| adapter.layers()).collect();
        let rank = layers.first()?.form().dims()[1];
        let (enters, leaves) = (first.enter.is_some(), first.down.is_some());
        let matrices = Matrices::new(&layers, first.layers().len(), DType::F32)?;
        let is_own = first.enter_up.is_some();
        let form = LowRankForm { enters, is_own, leaves, scale: first.scale as f32, rank };
        Some(Self { layers, matrices, form })
    }

    /// See [`Matrices::token`].
    pub(super) fn token(&self) -> (Tensor<1>, Option<Deferred>) {
        self.matrices.token(&self.layers)
    }

    /// Returns the products of the forward with these groups of rows.
    pub(super) fn pass<'p>(&'p self, groups: &'p Groups, sources: usize) -> LowRankPass<'p> {
        let held = self.matrices.held.iter().map(|held| &held.value);
        LowRankPass { parts: Parts::new(held, self.matrices.parts, sources), form: self.form, groups }
    }
}

/// The adapters and the results of their first matrices, as the backward pass keeps them.
#[derive(Clone, Debug)]
pub(super) struct KeptLowRank {
    pub(super) matrices: KeptMatrices,
    pub(super) form: LowRankForm,
    /// Of gate and up, of up if it has a first matrix of its own, and of down.
    pub(super) low: [Option<Vec<f32>>; 3],
}

impl KeptLowRank {
    pub(super) fn values(&self) -> Vec<MatrixValue> {
        self.matrices.kept.iter().map(KeptMatrix::value).collect()
    }

    /// Returns the products of the backward with the matrices `held`.
    pub(super) fn pass<'p>(
        &self,
        held: &'p [MatrixValue],
        groups: &'p Groups,
        sources: usize,
    ) -> LowRankPass<'p> {
        LowRankPass { parts: Parts::new(held, self.matrices.parts, sources), form: self.form, groups }
    }

    /// Defers or computes the gradients of the matrices. `enter` are the inputs, the `back` of one or two first matrices, and
    /// the output gradients of gate and up; `leave` the same of down.
    pub(super) fn differentiate(
        &self,
        (groups, sources): (&Groups, usize),
        enter: Option<(CpuTensor, Vec<CpuTensor>, [CpuTensor; 2])>,
        leave: Option<[CpuTensor; 3]>,
    ) {
        let low = |index: usize| {
            let low = self.low[index].clone().unwrap_or_default();
            cpu_tensor(low, [groups.rows(), self.form.rank])
        };
        let mut parts = Vec::new();
        if let Some((x, backs, [gate, up])) = enter {
            let of_up = low(usize::from(self.form.is_own));
            let mut firsts = backs.into_iter().map(|back| (x.clone(), back));
            parts.extend(firsts.next());
            parts.extend([(low(0), gate), (of_up, up)]);
            parts.extend(firsts);
        }
        if let Some([x, back, out]) = leave {
            parts.extend([(x, back), (low(2), out)]);
        }
        self.matrices.differentiate(groups, sources, &parts);
    }
}

/// The products with the matrices of the adapters.
pub(super) struct LowRankPass<'a> {
    parts: Parts<'a, f32>,
    form: LowRankForm,
    groups: &'a Groups,
}

impl LowRankPass<'_> {
    /// Returns the index of the first matrix of gate and up; `None` if they have no adapter. The second matrices of gate and up
    /// follow.
    pub(super) fn enter(&self) -> Option<usize> {
        self.form.enters.then_some(0)
    }

    /// Returns the index of the first matrix of up, if it has one of its own.
    pub(super) fn enter_up(&self) -> Option<usize> {
        (self.form.enters && self.form.is_own).then_some(3)
    }

    /// Returns the index of the first matrix of down; `None` if it has no adapter.
    pub(super) fn leave(&self) -> Option<usize> {
        self.form.leaves.then_some(if self.form.enters { 3 + usize::from(self.form.is_own) } else { 0 })
    }

    /// Returns `scale * x a` for the first matrix at an index.
    pub(super) fn low(&self, x: &[f32], index: usize, inputs: usize) -> Vec<f32> {
        self.scaled(x, (index, false), [inputs, self.form.rank])
    }

    /// Returns `scale * g bᵀ` for the second matrix at an index.
    pub(super) fn back(&self, gradient: &[f32], index: usize, outputs: usize) -> Vec<f32> {
        self.scaled(gradient, (index, true), [outputs, self.form.rank])
    }

    fn scaled(&self, rows: &[f32], (index, is_turned): (usize, bool), size: [usize; 2]) -> Vec<f32> {
        let mut low = self.parts.product(self.groups, rows, (Part::At(index), is_turned), size);
        low.iter_mut().for_each(|element| *element *= self.form.scale);
        low
    }

    /// Adds `low b` for the second matrix at an index.
    pub(super) fn add(&self, out: &mut [f32], low: &[f32], index: usize, outputs: usize) {
        let size = [self.form.rank, outputs];
        self.parts.add_product(out, self.groups, low, (Part::At(index), false), size);
    }

    /// Adds `back aᵀ` for the first matrix at an index.
    pub(super) fn add_back(&self, out: &mut [f32], back: &[f32], index: usize, inputs: usize) {
        let size = [self.form.rank, inputs];
        self.parts.add_product(out, self.groups, back, (Part::At(index), true), size);
    }
}

/// Returns the elements of a tensor in single precision.
pub(super) fn singles(tensor: &CpuTensor) -> Vec<f32> {
    elements(tensor).into_owned()
}
