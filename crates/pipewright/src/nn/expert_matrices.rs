//! The matrices and biases of a mixture's experts, as one input of an operation on the tape, and their
//! gradients.
//!
//! The gradient of a matrix is computed in `W` if its stage can defer it, on the tape if the matrix is
//! tracked, and otherwise never. The gradient of a bias is never deferred, because it is only a sum of rows.

use std::borrow::Cow;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use pipewright_kernel::grouped::{ExpertElement, Groups};

use super::bundle::{Bundle, Slots};
use super::deferred::{Deferred, KeptWeight, WeightTask};
use super::expert::Expert;
use super::matrix::{Operand, product};
use super::operation::{CpuTensor, ReadElement, cpu_tensor, elements, from_cpu, on_cpu};

/// A layer of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Gate,
    Up,
    Down,
}

/// The matrices of all experts as products read them.
pub(super) struct Parts<'a, T: ReadElement> {
    /// The layers of the first expert, of the second, and so on.
    held: Vec<Cow<'a, [T]>>,
    /// The number of layers of an expert.
    parts: usize,
    /// The number of groups of an expert's rows.
    sources: usize,
}

impl<'a, T: ReadElement> Parts<'a, T> {
    /// Returns matrices whose products are with `sources` consecutive groups of rows for each expert.
    pub(super) fn new(held: impl IntoIterator<Item = &'a CpuTensor>, parts: usize, sources: usize) -> Self {
        Self { held: held.into_iter().map(T::read).collect(), parts, sources }
    }

    pub(super) fn has_gates(&self) -> bool {
        self.parts == 3
    }

    /// Multiplies the rows of each expert by the expert's matrix, or by its transpose. The size is the inputs
    /// and outputs of the product.
    pub(super) fn product(
        &self,
        groups: &Groups,
        rows: &[T],
        (part, is_transposed): (Part, bool),
        size: [usize; 2],
    ) -> Vec<f32> {
        groups.product(rows, self.of_part(part), size, is_transposed)
    }

    /// Like [`Parts::product`], with results in the type of the operands.
    pub(super) fn rounded_product(
        &self,
        groups: &Groups,
        rows: &[T],
        (part, is_transposed): (Part, bool),
        size: [usize; 2],
    ) -> Vec<T> {
        groups.rounded_product(rows, self.of_part(part), size, is_transposed)
    }

    /// Like [`Parts::product`], but adds to `out`.
    pub(super) fn add_product(
        &self,
        out: &mut [f32],
        groups: &Groups,
        rows: &[T],
        (part, is_transposed): (Part, bool),
        size: [usize; 2],
    ) {
        groups.add_product(out, rows, self.of_part(part), size, is_transposed);
    }

    fn of_part(&self, part: Part) -> impl Iterator<Item = &[T]> {
        let matrices = self.held.iter().skip(part.index(self.parts)).step_by(self.parts).map(AsRef::as_ref);
        matrices.flat_map(|matrix| std::iter::repeat_n(matrix, self.sources))
    }
}

impl Part {
    /// Returns the index of the layer among the `parts` layers of an expert.
    fn index(self, parts: usize) -> usize {
        match self {
            Self::Gate => 0,
            Self::Up => parts - 2,
            Self::Down => parts - 1,
        }
    }
}

/// The matrices and biases of all experts.
pub(super) struct Matrices {
    /// The layers of the first expert, of the second, and so on.
    pub(super) held: Vec<HeldMatrix>,
    /// The number of layers of an expert.
    pub(super) parts: usize,
    pub(super) biases: Biases,
    /// The matrices whose gradients are computed on the tape, at the indices of `held`, and the biases, at
    /// the indices after them.
    bundle: Bundle,
}

/// The biases of all experts, in the order of the matrices.
#[derive(Clone, Debug)]
pub(super) struct Biases {
    held: Vec<Option<HeldBias>>,
    /// The number of layers of an expert.
    parts: usize,
}

/// The bias of a layer.
#[derive(Clone, Debug)]
struct HeldBias {
    value: CpuTensor,
    /// Whether its gradient is computed.
    is_on_tape: bool,
}

impl Biases {
    /// Returns whether a layer of an expert has a bias.
    pub(super) fn exist(&self) -> bool {
        self.held.iter().any(Option::is_some)
    }

    /// Returns a row for each row of the groups: the bias of its expert's layer times `factor`. `None` if no
    /// expert has a bias there.
    pub(super) fn rows(&self, groups: &Groups, part: Part, width: usize, factor: f32) -> Option<Vec<f32>> {
        let of_part = || self.held.iter().skip(part.index(self.parts)).step_by(self.parts);
        if of_part().all(Option::is_none) {
            return None;
        }
        let values: Vec<_> = of_part().map(|bias| bias.as_ref().map(|bias| elements(&bias.value))).collect();
        Some(groups.biases(values.iter().map(Option::as_deref), width, factor))
    }

    fn is_wanted(&self, index: usize) -> bool {
        self.held[index].as_ref().is_some_and(|bias| bias.is_on_tape)
    }
}

/// A matrix of the CPU back end.
pub(super) struct HeldMatrix {
    id: ParamId,
    pub(super) value: CpuTensor,
    gradient: Gradient,
}

/// When the gradient of a matrix is computed.
#[derive(Clone, Debug)]
enum Gradient {
    Later(Deferred),
    OnTape,
    Never,
}

impl Gradient {
    fn deferred(&self) -> Option<&Deferred> {
        match self {
            Self::Later(deferred) => Some(deferred),
            Self::OnTape | Self::Never => None,
        }
    }
}

impl Matrices {
    /// Returns `None` if a matrix or a bias has no operations of its own on the CPU back end.
    pub(super) fn new(experts: &[&Expert]) -> Option<Self> {
        let parts = experts[0].layers().len();
        let count = parts * experts.len();
        let mut biases = Vec::with_capacity(count);
        let mut held = Vec::with_capacity(count);
        let mut bundle = Bundle::new();
        for layer in experts.iter().flat_map(|expert| expert.layers()) {
            let (weight, id) = (layer.weight.val(), layer.weight.id);
            let ([value], _) = on_cpu([weight.clone().into_dispatch()])?;
            let gradient = match Deferred::current(&weight, id) {
                Some(deferred) => Gradient::Later(deferred),
                None if weight.is_tracked() => Gradient::OnTape,
                None => Gradient::Never,
            };
            if matches!(gradient, Gradient::OnTape) {
                bundle.add(held.len(), weight);
            }
            held.push(HeldMatrix { id, value, gradient });
            let bias = layer.bias.as_ref().map(Param::val);
            biases.push(match bias {
                Some(bias) => {
                    let ([value], _) = on_cpu([bias.clone().into_dispatch()])?;
                    let is_on_tape = bias.is_tracked();
                    if is_on_tape {
                        bundle.add(count + biases.len(), bias);
                    }
                    Some(HeldBias { value, is_on_tape })
                }
                None => None,
            });
        }
        Some(Self { held, parts, biases: Biases { held: biases, parts }, bundle })
    }

    /// Returns the tensor through which the tape reaches the matrices: the token of the matrices on the tape.
    /// If no matrix is on it, this is a matrix whose gradient is deferred, with its collector; the tape then
    /// gets no gradient of it.
    pub(super) fn token(&self, experts: &[&Expert]) -> (Tensor<1>, Option<Deferred>) {
        let is_deferred = |held: &HeldMatrix| held.gradient.deferred().is_some();
        match self.held.iter().position(is_deferred).filter(|_| !self.bundle.token.is_tracked()) {
            Some(index) => {
                let matrix = experts[index / self.parts].layers()[index % self.parts].weight.val();
                let token = Tensor::from_dispatch(matrix.into_dispatch());
                (token, self.held[index].gradient.deferred().cloned())
            }
            None => (self.bundle.token.clone(), None),
        }
    }

    /// Returns the matrices as the backward pass keeps them.
    pub(super) fn kept(self) -> KeptMatrices {
        let keep = |HeldMatrix { id, value, gradient }| KeptMatrix {
            id,
            weight: KeptWeight::new(from_cpu(value), id, gradient.deferred()),
            gradient,
        };
        let slots = self.bundle.token.is_tracked().then_some(self.bundle.slots);
        let kept = self.held.into_iter().map(keep).collect();
        KeptMatrices { kept, parts: self.parts, biases: self.biases, slots }
    }
}

/// The matrices that the backward pass needs.
#[derive(Clone, Debug)]
pub(super) struct KeptMatrices {
    pub(super) kept: Vec<KeptMatrix>,
    pub(super) parts: usize,
    pub(super) biases: Biases,
    /// For the gradients on the tape, if there are any.
    pub(super) slots: Option<Slots>,
}

/// A matrix that the backward pass needs.
#[derive(Clone, Debug)]
pub(super) struct KeptMatrix {
    id: ParamId,
    pub(super) weight: KeptWeight,
    gradient: Gradient,
}

impl KeptMatrices {
    /// Defers or computes the gradient of each matrix, from the inputs and output gradients of the parts. Each
    /// expert has `sources` consecutive groups of rows. Deferred gradients are of one source each; on the tape
    /// they are added.
    pub(super) fn differentiate(&self, groups: &Groups, sources: usize, parts: &[(CpuTensor, CpuTensor)]) {
        for (group, range) in groups.ranges().enumerate() {
            let (expert, source) = (group / sources, group % sources);
            for (part, (x, gradient)) in parts.iter().enumerate() {
                let index = self.parts * expert + part;
                let kept = &self.kept[index];
                let [x, gradient] = [x, gradient].map(|rows| rows.narrow(0, range.start, range.len()));
                match (&kept.gradient, &self.slots) {
                    (Gradient::Later(deferred), _) => {
                        let (x, gradient) = (Box::new(from_cpu(x)), from_cpu(gradient));
                        deferred.push(WeightTask::Product { weight: kept.id, source, x, gradient });
                    }
                    (Gradient::OnTape, Some(slots)) => slots.add(index, weight_gradient(&x, &gradient)),
                    _ => {}
                }
            }
        }
    }

    /// Computes the gradients of the biases of a part: `factor` times the sums of the output gradients of each
    /// expert, which are rows of `width` numbers. A replica has no experts with biases for others, so each
    /// expert has one group of rows.
    pub(super) fn differentiate_biases<T: ExpertElement>(
        &self,
        groups: &Groups,
        part: Part,
        gradient: &[T],
        (width, factor): (usize, f32),
    ) {
        let Some(slots) = &self.slots else { return };
        let of_part = (part.index(self.parts)..self.kept.len()).step_by(self.parts);
        if !of_part.clone().any(|index| self.biases.is_wanted(index)) {
            return;
        }
        for (index, mut sum) in of_part.zip(groups.sums(gradient, width)) {
            if self.biases.is_wanted(index) {
                sum.iter_mut().for_each(|element| *element *= factor);
                slots.add(self.kept.len() + index, cpu_tensor(sum, [width]));
            }
        }
    }
}

/// Returns `xᵀ gradient`.
pub(super) fn weight_gradient(x: &CpuTensor, gradient: &CpuTensor) -> CpuTensor {
    let dims = |tensor: &CpuTensor| [tensor.layout().shape()[0], tensor.layout().shape()[1]];
    product(Operand::new(x, dims(x)).transposed(), Operand::new(gradient, dims(gradient)))
}
