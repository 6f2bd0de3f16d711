//! The matrices and biases of a mixture's experts, as one input of an operation on the tape, and their
//! gradients.
//!
//! The gradient of a matrix or a bias is computed in `W` if its stage can defer it, on the tape if the parameter
//! is tracked, and otherwise never.

use std::borrow::Cow;
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::{DType, Tensor};
use pipewright_kernel::grouped::{ExpertElement, ExpertMatrix, Groups};
use pipewright_kernel::quantised::{QuantisedMatrix, Rounding};

use super::bundle::{Bundle, Slots};
use super::deferred::{Deferred, KeptWeight, WeightTask};
use super::held_matrix::{HeldForm, HeldLinear};
use super::matrix::{Operand, product};
use super::operation::{CpuTensor, ReadElement, cpu_tensor, elements, from_cpu, on_cpu, with_dtype};
use super::quantised_product::QuantisedWeight;
use crate::tensor::Value;

/// A layer of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Gate,
    Up,
    Down,
    /// The matrix at an index, of adapters.
    At(usize),
}

/// The matrices of all experts as products read them.
pub(super) struct Parts<'a, T: ReadElement> {
    /// The layers of the first expert, of the second, and so on.
    held: Vec<PartMatrix<'a, T>>,
    /// The number of layers of an expert.
    parts: usize,
    /// The number of groups of an expert's rows.
    sources: usize,
}

/// A matrix as products read it.
enum PartMatrix<'a, T: ReadElement> {
    Held(Cow<'a, [T]>),
    Quantised(Arc<QuantisedMatrix>, Rounding),
}

impl<'a, T: ReadElement> Parts<'a, T> {
    /// Returns matrices whose products are with `sources` consecutive groups of rows for each expert.
    pub(super) fn new(held: impl IntoIterator<Item = &'a MatrixValue>, parts: usize, sources: usize) -> Self {
        let read = |value: &'a MatrixValue| match value {
            MatrixValue::Held(tensor) => PartMatrix::Held(T::read(tensor)),
            MatrixValue::Quantised(weight) => PartMatrix::Quantised(weight.matrix(), weight.rounding()),
        };
        Self { held: held.into_iter().map(read).collect(), parts, sources }
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

    fn of_part(&self, part: Part) -> impl Iterator<Item = ExpertMatrix<'_, T>> {
        let matrices = self.held.iter().skip(part.index(self.parts)).step_by(self.parts);
        let matrices = matrices.map(|matrix| match matrix {
            PartMatrix::Held(elements) => ExpertMatrix::Held(elements),
            PartMatrix::Quantised(matrix, rounding) => ExpertMatrix::Quantised(matrix, *rounding),
        });
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
            Self::At(index) => index,
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
    id: ParamId,
    value: CpuTensor,
    gradient: Gradient,
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
}

/// A matrix of the CPU back end.
pub(super) struct HeldMatrix {
    pub(super) value: MatrixValue,
    /// The parameter and its gradient; `None` for a quantised matrix.
    parameter: Option<(ParamId, Gradient)>,
}

/// The elements of a matrix.
pub(super) enum MatrixValue {
    Held(CpuTensor),
    Quantised(QuantisedWeight),
}

impl MatrixValue {
    /// Returns the elements, unless they are quantised.
    pub(super) fn tensor(&self) -> Option<&CpuTensor> {
        match self {
            Self::Held(tensor) => Some(tensor),
            Self::Quantised(_) => None,
        }
    }
}

/// When the gradient of a matrix or a bias is computed.
#[derive(Clone, Debug)]
pub(super) enum Gradient {
    Later(Deferred),
    OnTape,
    Never,
}

impl Gradient {
    fn of<const D: usize>(parameter: &Tensor<D>, id: ParamId) -> Self {
        match Deferred::current(parameter, id) {
            Some(deferred) => Self::Later(deferred),
            None if parameter.is_tracked() => Self::OnTape,
            None => Self::Never,
        }
    }

    fn deferred(&self) -> Option<&Deferred> {
        match self {
            Self::Later(deferred) => Some(deferred),
            Self::OnTape | Self::Never => None,
        }
    }
}

impl Matrices {
    /// Returns the matrices of `layers`, with `parts` layers for each expert; `None` if a matrix or a bias has no operations of
    /// its own on the CPU back end. Quantised elements are rounded to `precision`, the element type of the inputs.
    pub(super) fn new(layers: &[&HeldLinear], parts: usize, precision: DType) -> Option<Self> {
        let count = layers.len();
        let mut biases = Vec::with_capacity(count);
        let mut held = Vec::with_capacity(count);
        let mut bundle = Bundle::new();
        for layer in layers {
            held.push(match layer.form() {
                HeldForm::Parameter(parameter) => {
                    let (weight, id) = (parameter.val(), parameter.id);
                    let ([value], _) = on_cpu([weight.clone().into_dispatch()])?;
                    let gradient = Gradient::of(&weight, id);
                    if matches!(gradient, Gradient::OnTape) {
                        bundle.add(held.len(), weight);
                    }
                    HeldMatrix { value: MatrixValue::Held(value), parameter: Some((id, gradient)) }
                }
                HeldForm::Frozen(quantised) => {
                    let weight = QuantisedWeight::new(quantised.clone(), precision);
                    HeldMatrix { value: MatrixValue::Quantised(weight), parameter: None }
                }
            });
            let bias = layer.bias.as_ref().map(|bias| (bias.val(), bias.id));
            biases.push(match bias {
                Some((bias, id)) => {
                    let ([value], _) = on_cpu([bias.clone().into_dispatch()])?;
                    let gradient = Gradient::of(&bias, id);
                    if matches!(gradient, Gradient::OnTape) {
                        bundle.add(count + biases.len(), bias);
                    }
                    Some(HeldBias { id, value, gradient })
                }
                None => None,
            });
        }
        Some(Self { held, parts, biases: Biases { held: biases, parts }, bundle })
    }

    /// Returns the tensor through which the tape reaches the parameters: the token of the parameters on the
    /// tape. If no parameter is on it, this is one whose gradient is deferred, with its collector; the tape then
    /// gets no gradient of it.
    pub(super) fn token(&self, layers: &[&HeldLinear]) -> (Tensor<1>, Option<Deferred>) {
        let token = self.bundle.token.clone();
        if token.is_tracked() {
            return (token, None);
        }
        for (layer, (matrix, bias)) in layers.iter().zip(self.held.iter().zip(&self.biases.held)) {
            let of_matrix = matrix.parameter.as_ref().and_then(|(_, gradient)| gradient.deferred());
            if let (Some(deferred), Some(parameter)) = (of_matrix, &layer.weight) {
                let matrix = Tensor::from_dispatch(parameter.val().into_dispatch());
                return (matrix, Some(deferred.clone()));
            }
            let deferred = bias.as_ref().and_then(|bias| bias.gradient.deferred());
            if let (Some(deferred), Some(bias)) = (deferred, &layer.bias) {
                return (bias.val(), Some(deferred.clone()));
            }
        }
        (token, None)
    }

    /// Returns the matrices as the backward pass keeps them.
    pub(super) fn kept(self) -> KeptMatrices {
        let keep = |HeldMatrix { value, parameter }| match (value, parameter) {
            (MatrixValue::Held(value), Some((id, gradient))) => {
                KeptMatrix::Held(KeptWeight::new(from_cpu(value), id, gradient.deferred()), id, gradient)
            }
            (MatrixValue::Quantised(weight), _) => KeptMatrix::Quantised(weight),
            (MatrixValue::Held(_), None) => unreachable!("a matrix that is not quantised is a parameter"),
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
pub(super) enum KeptMatrix {
    Held(KeptWeight, ParamId, Gradient),
    Quantised(QuantisedWeight),
}

impl KeptMatrix {
    pub(super) fn value(&self) -> MatrixValue {
        match self {
            Self::Held(weight, ..) => MatrixValue::Held(weight.get_on_cpu()),
            Self::Quantised(weight) => MatrixValue::Quantised(weight.clone()),
        }
    }
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
                let KeptMatrix::Held(_, id, when) = &self.kept[index] else { continue };
                let [x, gradient] = [x, gradient].map(|rows| rows.narrow(0, range.start, range.len()));
                match (when, &self.slots) {
                    (Gradient::Later(deferred), _) => {
                        let (x, gradient) = (Box::new(from_cpu(x)), from_cpu(gradient));
                        deferred.push(WeightTask::Product { weight: *id, source, x, gradient });
                    }
                    (Gradient::OnTape, Some(slots)) => slots.add(index, weight_gradient(&x, &gradient)),
                    _ => {}
                }
            }
        }
    }

    /// Defers or computes the gradients of the biases of a part: `factor` times the sums of the output
    /// gradients of each expert, which are rows of `width` numbers of the type `T`. A replica has no experts
    /// with biases for others, so each expert has one group of rows.
    pub(super) fn differentiate_biases<T: ReadElement + ExpertElement>(
        &self,
        groups: &Groups,
        part: Part,
        gradient: &CpuTensor,
        (width, factor): (usize, f32),
    ) {
        let of_part = (part.index(self.parts)..self.kept.len()).step_by(self.parts);
        for (index, range) in of_part.zip(groups.ranges()) {
            let Some(HeldBias { id, value, gradient: when }) = &self.biases.held[index] else { continue };
            let rows = gradient.narrow(0, range.start, range.len());
            let sum = move || {
                let mut sum = T::sum_rows(&T::read(&rows), width);
                sum.iter_mut().for_each(|element| *element *= factor);
                cpu_tensor(sum, [width])
            };
            match (when, &self.slots) {
                (Gradient::Later(deferred), _) => {
                    let dtype = value.dtype();
                    let sum = move || Value::of(from_cpu::<1>(with_dtype(sum(), dtype)));
                    deferred.leave(*id, "Expert", sum);
                }
                (Gradient::OnTape, Some(slots)) => slots.add(self.kept.len() + index, sum()),
                _ => {}
            }
        }
    }
}

/// Returns `xᵀ gradient`.
pub(super) fn weight_gradient(x: &CpuTensor, gradient: &CpuTensor) -> CpuTensor {
    let dims = |tensor: &CpuTensor| [tensor.layout().shape()[0], tensor.layout().shape()[1]];
    product(Operand::new(x, dims(x)).transposed(), Operand::new(gradient, dims(gradient)))
}
