//! Converts tensors for a hand-written operation of the CPU back end, and records the operation on the tape.
//!
//! [`on_cpu`] checks whether the operation can run here: single or half precision, the CPU back end, and a
//! tape without checkpointing or no tape. Otherwise the caller composes Burn operations, so that each
//! operation runs on every device.
//!
//! All sums are in single precision. An operation keeps tensors of half precision as they are for its
//! backward, reads their [`elements`] in single precision, and its results and gradients are rounded once.
//! Operations for which a copy in single precision takes too long read bfloat16 as it is ([`in_bf16`],
//! [`ReadElement`]).

use std::borrow::Cow;
use std::fmt::Debug;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{DType, Element, Int, Shape, Tensor, TensorData, bf16, f16};
use pipewright_kernel::half::Half;

/// A tensor of the CPU back end without a tape.
pub(crate) type CpuTensor = FloatTensor<Flex>;

/// The backward pass of an operation, with the data that it keeps.
pub(crate) trait Operation<const N: usize>: Clone + Debug + Send + 'static {
    /// Returns the gradients of the `wanted` inputs from the gradient of the output. They may have single
    /// precision: the tape gets them in the element types of the inputs.
    fn backward(self, gradient: CpuTensor, wanted: [bool; N]) -> [Option<CpuTensor>; N];
}

/// Where to record an operation on `N` inputs.
pub(crate) struct Tape<const N: usize> {
    /// `None` if no input is on a tape.
    nodes: Option<[NodeGuard; N]>,
    /// The element types of the inputs.
    inputs: [DType; N],
    /// The element type of the result.
    result: DType,
}

/// Returns the tensors in row-major order on the CPU back end, and where to record the operation; `None` if
/// the operation must be composed of Burn's own.
pub(crate) fn on_cpu<const N: usize>(tensors: [DispatchTensor; N]) -> Option<([CpuTensor; N], Tape<N>)> {
    // The number of dimensions does not matter here; 1 is arbitrary.
    let tensors = tensors.map(Tensor::<1>::from_dispatch);
    let on_tape = tensors.iter().any(Tensor::is_autodiff);
    let mut primitives = Vec::with_capacity(N);
    let mut nodes = Vec::with_capacity(N);
    for tensor in tensors {
        if !is_computed_here(tensor.dtype()) {
            return None;
        }
        if on_tape {
            // A constant becomes an untracked leaf of the other tensors' tape.
            let tensor = if tensor.is_autodiff() { tensor } else { tensor.autodiff() };
            let tensor = tensor.try_into_primitive::<Autodiff<Flex, NoCheckpointing>>().ok()?;
            let (primitive, node) = tensor.into_parts();
            primitives.push(row_major(primitive));
            nodes.push(node);
        } else {
            primitives.push(row_major(tensor.try_into_primitive::<Flex>().ok()?));
        }
    }
    let primitives: [CpuTensor; N] = primitives.try_into().expect("one primitive per tensor");
    let nodes = on_tape.then(|| nodes.try_into().expect("one node per tensor on the tape"));
    let inputs = primitives.each_ref().map(TensorMetadata::dtype);
    Some((primitives, Tape { nodes, inputs, result: inputs[0] }))
}

/// Whether the CPU back end has hand-written operations on elements of this type.
fn is_computed_here(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Returns the tape's node of a tensor on a tape without checkpointing.
pub(crate) fn node_of<const D: usize>(tensor: &Tensor<D>) -> Option<NodeId> {
    let on_cpu = tensor.clone().try_into_primitive::<Autodiff<Flex, NoCheckpointing>>();
    let node = on_cpu.ok().map(|tensor| tensor.id());
    #[cfg(feature = "cube")]
    let node = node.or_else(|| {
        let on_device = tensor.clone().try_into_primitive::<Autodiff<burn::backend::Cube, NoCheckpointing>>();
        Some(on_device.ok()?.id())
    });
    node
}

/// Returns the tensor of the CPU back end, row-major, if it is a tensor of that back end off the tape, in
/// single or half precision.
pub(crate) fn cpu<const D: usize>(tensor: Tensor<D>) -> Option<CpuTensor> {
    if !is_computed_here(tensor.dtype()) {
        return None;
    }
    tensor.try_into_primitive::<Flex>().ok().map(row_major)
}

/// Returns a primitive of the CPU back end as a tensor.
pub(crate) fn from_cpu<const D: usize>(tensor: CpuTensor) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(tensor)
}

impl<const N: usize> Tape<N> {
    /// Replaces the input `index` by `parent`, a tensor on the tape.
    pub(super) fn with_parent(mut self, index: usize, parent: Tensor<1>) -> Self {
        if let Some(nodes) = &mut self.nodes {
            let parent = parent.try_into_primitive::<Autodiff<Flex, NoCheckpointing>>();
            let parent = parent.expect("the anchor is on the back end of its weights");
            nodes[index] = parent.into_parts().1;
        }
        self
    }

    /// Returns whether the operation has a backward pass.
    pub(super) fn is_recorded(&self) -> bool {
        self.nodes.is_some()
    }

    /// Records a result in single precision instead of the element type of the first input.
    pub(super) fn in_single(self) -> Self {
        Self { result: DType::F32, ..self }
    }

    /// Returns a tensor that the operation keeps, in the element type of the result.
    pub(super) fn kept(&self, elements: Vec<f32>, shape: impl Into<Shape>) -> CpuTensor {
        self.rounded(cpu_tensor(elements, shape))
    }

    /// Returns a tensor in the element type of the result.
    pub(super) fn rounded(&self, tensor: CpuTensor) -> CpuTensor {
        with_dtype(tensor, self.result)
    }

    /// Returns the operation's result as a tensor and records its backward pass. `operation` makes the
    /// backward pass from the result.
    pub(crate) fn record<const D: usize, O: Operation<N>>(
        self,
        elements: Vec<f32>,
        shape: [usize; D],
        operation: impl FnOnce(&CpuTensor) -> O,
    ) -> Tensor<D> {
        let result = self.kept(elements, shape);
        self.record_tensor(result, operation)
    }

    /// Like [`Tape::record`], but for a result that has its element type already.
    pub(super) fn record_tensor<const D: usize, O: Operation<N>>(
        self,
        result: CpuTensor,
        operation: impl FnOnce(&CpuTensor) -> O,
    ) -> Tensor<D> {
        let Some(nodes) = self.nodes else { return Tensor::from_primitive::<Flex>(result) };
        let prepared = Recorded::<O>::default().prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
        Tensor::from_primitive::<Autodiff<Flex, NoCheckpointing>>(match prepared {
            OpsKind::Tracked(tape) => {
                let operation = operation(&result);
                tape.finish((operation, self.inputs), result)
            }
            OpsKind::UnTracked(tape) => tape.finish(result),
        })
    }
}

/// Returns a tensor from its elements in row-major order.
pub(crate) fn cpu_tensor(elements: Vec<f32>, shape: impl Into<Shape>) -> CpuTensor {
    CpuTensor::from_data(TensorData::new(elements, shape.into()))
}

/// Returns the tensor with its elements rounded to `dtype`, single or half precision.
pub(super) fn with_dtype(tensor: CpuTensor, dtype: DType) -> CpuTensor {
    if tensor.dtype() == dtype {
        return tensor;
    }
    let shape = tensor.layout().shape().clone();
    match dtype {
        DType::BF16 => tensor_of(bf16::narrowed(&elements(&tensor)), shape),
        DType::F16 => tensor_of(f16::narrowed(&elements(&tensor)), shape),
        _ => cpu_tensor(elements(&tensor).into_owned(), shape),
    }
}

/// Returns a tensor off the tape with its elements rounded to `dtype`, single or half precision.
pub(crate) fn rounded_to<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    match cpu(tensor.clone()) {
        Some(tensor) => from_cpu(with_dtype(tensor, dtype)),
        None => tensor.cast(dtype),
    }
}

/// Returns a tensor of any element type from its elements in row-major order.
pub(super) fn tensor_of<E: Element>(elements: Vec<E>, shape: impl Into<Shape>) -> CpuTensor {
    CpuTensor::from_data(TensorData::new(elements, shape.into()))
}

/// Returns the elements of a tensor that [`row_major`] returned, in single precision. Elements of half
/// precision are copied.
pub(crate) fn elements(tensor: &CpuTensor) -> Cow<'_, [f32]> {
    let range = range_of(tensor);
    match tensor.dtype() {
        DType::BF16 => Cow::Owned(bf16::widened(&tensor.storage()[range])),
        DType::F16 => Cow::Owned(f16::widened(&tensor.storage()[range])),
        _ => Cow::Borrowed(&tensor.storage::<f32>()[range]),
    }
}

/// Returns whether tensors are operands of products in bfloat16.
pub(super) fn are_multiplied_in_bf16<'a>(tensors: impl IntoIterator<Item = &'a CpuTensor>) -> bool {
    tensors.into_iter().all(|tensor| tensor.dtype() == DType::BF16)
}

/// Returns the elements of tensors that [`row_major`] returned if all of them are bfloat16, so that an
/// operation need not copy them to single precision.
pub(crate) fn in_bf16<const N: usize>(tensors: [&CpuTensor; N]) -> Option<[&[bf16]; N]> {
    let are_bf16 = tensors.iter().all(|tensor| tensor.dtype() == DType::BF16);
    are_bf16.then(|| tensors.map(|tensor| &tensor.storage()[range_of(tensor)]))
}

/// Lets `single` or `half` replace the elements of a tensor that [`row_major`] returned: in its own memory,
/// unless another tensor shares it. A tensor of f16 gets single precision.
pub(super) fn replace_elements<R>(
    tensor: &mut CpuTensor,
    single: impl FnOnce(&mut [f32]) -> R,
    half: impl FnOnce(&mut [bf16]) -> R,
) -> R {
    if tensor.dtype() == DType::F16 {
        *tensor = with_dtype(tensor.clone(), DType::F32);
    }
    let range = range_of(tensor);
    match tensor.dtype() {
        DType::BF16 => half(&mut tensor.storage_mut()[range]),
        _ => single(&mut tensor.storage_mut()[range]),
    }
}

/// An element type in which an operation reads the tensors that [`row_major`] returned.
pub(super) trait ReadElement: pipewright_kernel::element::Element + Element {
    /// Returns the elements; copies them if they have another type.
    fn read(tensor: &CpuTensor) -> Cow<'_, [Self]>;
}

impl ReadElement for f32 {
    fn read(tensor: &CpuTensor) -> Cow<'_, [Self]> {
        elements(tensor)
    }
}

impl ReadElement for bf16 {
    fn read(tensor: &CpuTensor) -> Cow<'_, [Self]> {
        match in_bf16([tensor]) {
            Some([elements]) => Cow::Borrowed(elements),
            None => Cow::Owned(Self::narrowed(&elements(tensor))),
        }
    }
}

/// Returns where the elements of a tensor that [`row_major`] returned are in its storage.
pub(super) fn range_of(tensor: &CpuTensor) -> std::ops::Range<usize> {
    let start = tensor.layout().start_offset();
    start..start + tensor.layout().num_elements()
}

/// Returns the tensor with its elements in row-major order; copies them only if necessary.
pub(super) fn row_major(tensor: CpuTensor) -> CpuTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// Returns the tensor, in single precision, in storage of exactly its elements, so that the whole storage may
/// be overwritten.
pub(crate) fn owned(tensor: CpuTensor) -> CpuTensor {
    let whole = tensor.storage::<f32>().len() == tensor.layout().num_elements();
    if whole && tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// Converts ids to indices; a negative id becomes an index beyond any table.
pub(crate) fn indices(ids: Tensor<1, Int>) -> Vec<usize> {
    ids.into_data().iter::<i64>().map(|id| usize::try_from(id).unwrap_or(usize::MAX)).collect()
}

/// Adapts an [`Operation`] to the interface of Burn's tape.
#[derive(Debug)]
struct Recorded<O>(std::marker::PhantomData<fn() -> O>);

impl<O> Default for Recorded<O> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<O: Operation<N>, const N: usize> Backward<Flex, N> for Recorded<O> {
    type State = (O, [DType; N]);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = row_major(grads.consume::<Flex>(&ops.node));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (operation, dtypes) = ops.state;
        let gradients = operation.backward(gradient, wanted);
        for ((parent, gradient), dtype) in ops.parents.into_iter().zip(gradients).zip(dtypes) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, with_dtype(gradient, dtype));
            }
        }
    }
}

/// Panics unless the last dimension of an input has the number of features that a layer takes. The runtime
/// reports the panic as an error of the stage, with the layer's place in the model.
pub(super) fn takes_features(layer: &str, expected: usize, shape: &[usize]) {
    let found = shape.last().copied().unwrap_or_default();
    assert!(
        found == expected,
        "{layer} takes {expected} features, got {found}: its input has the shape {shape:?}"
    );
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn elements_are_replaced_in_their_memory_unless_it_is_shared() {
        for dtype in [DType::F32, DType::BF16] {
            let tensor = Tensor::<1>::from_data([1.0, 2.0], (&Device::flex(), dtype));
            let mut tensor = cpu(tensor).expect("on the processor");
            let replace = |tensor: &mut CpuTensor, by: f32| {
                replace_elements(tensor, |single| single.fill(by), |half| half.fill(bf16::from_f32(by)));
            };
            let start = tensor.bytes().as_ptr();
            replace(&mut tensor, 3.0);
            assert_eq!((tensor.bytes().as_ptr(), elements(&tensor).as_ref()), (start, [3.0; 2].as_slice()));
            let mut copy = tensor.clone();
            replace(&mut copy, 4.0);
            assert_eq!(
                (elements(&tensor).as_ref(), elements(&copy).as_ref()),
                (&[3.0; 2][..], &[4.0; 2][..])
            );
        }
    }
}
