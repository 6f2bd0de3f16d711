//! The root of the backward pass of a stage that is not the last: it starts from a received gradient.
//!
//! Burn starts a backward pass from a scalar. A stage in the middle of a pipeline has no scalar: it has an
//! output whose gradient arrives later, from another rank. The usual solution, `sum(output * gradient)`,
//! costs a pass over the output and one over the gradient, and keeps the output in memory until the gradient
//! arrives.
//!
//! [`gradient_root`] records an operation whose forward is a constant scalar and whose backward ignores the gradient of
//! that scalar and returns the gradient from its [`GradientSlot`]. It adds no arithmetic and holds no storage
//! of the output: once the output is sent, the sender holds none of its memory.
//!
//! ```text
//! forward:   output --gradient_root--> root (scalar)      the output leaves the stage
//! backward:  slot.fill(received gradient); root.backward()
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, TensorMetadata,
    backend_extension,
};
use burn::tensor::{DType, FloatDType, Shape, Tensor};

use crate::tensor::Value;

/// Holds the received gradient of one output of one microbatch until the backward pass takes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct GradientSlot(Arc<Mutex<Option<DispatchTensor>>>);

impl GradientSlot {
    /// Stores the received gradient: a float tensor without a tape, of the output's shape.
    pub(crate) fn fill(&self, gradient: Value) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient.into_dispatch());
    }

    fn take(&self) -> Option<DispatchTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Returns a scalar (shape `[1]`) whose backward pass gives `output` the gradient from `slot`.
///
/// `output` must be on the tape. Only its node is used, so it may be sent afterwards.
pub(crate) fn gradient_root(output: &Value, slot: GradientSlot) -> Tensor<1> {
    let root = <Dispatch as GradientRootBackend>::gradient_root(output.clone().into_dispatch(), slot);
    Tensor::from_dispatch(root)
}

/// Back ends that can record a gradient root.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait GradientRootBackend: Backend {
    /// See [`gradient_root`].
    fn gradient_root(output: FloatTensor<Self>, slot: GradientSlot) -> FloatTensor<Self> {
        // Without a tape there is no backward pass: return the scalar.
        let _ = slot;
        scalar::<Self>(&output)
    }
}

impl GradientRootBackend for Flex {}

#[cfg(feature = "cube")]
impl GradientRootBackend for burn::backend::Cube {}

impl<B, C> GradientRootBackend for Autodiff<B, C>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    fn gradient_root(output: FloatTensor<Self>, slot: GradientSlot) -> FloatTensor<Self> {
        let (primitive, node) = output.into_parts();
        let root = scalar::<B>(&primitive);
        let state = RootState {
            slot,
            shape: primitive.shape(),
            dtype: primitive.dtype(),
            device: primitive.device(),
        };
        drop(primitive);
        match GradientRoot.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, root),
            OpsKind::UnTracked(prep) => prep.finish(root),
        }
    }
}

fn scalar<B: Backend>(like: &FloatTensor<B>) -> FloatTensor<B> {
    let device = like.device();
    // A root is added to the losses of its stage, which have at least single precision.
    let dtype = match like.dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    };
    B::float_zeros(Shape::from([1]), &device, FloatDType::from(dtype))
}

#[derive(Debug)]
struct GradientRoot;

#[derive(Clone, Debug)]
struct RootState<D> {
    slot: GradientSlot,
    shape: Shape,
    dtype: DType,
    device: D,
}

impl<B> Backward<B, 1> for GradientRoot
where
    B: Backend,
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = RootState<B::Device>;

    fn backward(
        self,
        ops: Ops<RootState<B::Device>, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        // The scalar's own gradient is 1 by construction: drop it.
        drop(grads.consume::<B>(&ops.node));
        let [Some(parent)] = ops.parents else { return };
        let state = ops.state;
        let gradient = match state.slot.take() {
            Some(tensor) => Tensor::<1>::from_dispatch(tensor)
                .try_into_primitive::<B>()
                .expect("a received gradient is a float tensor of the stage's own back end, off the tape"),
            // No later stage used this output: its gradient is zero, and the operations before it need that
            // zero.
            None => B::float_zeros(state.shape.clone(), &state.device, FloatDType::from(state.dtype)),
        };
        assert_eq!(
            (gradient.shape(), gradient.dtype()),
            (state.shape, state.dtype),
            "a gradient has the shape and type of its output"
        );
        grads.register::<B>(parent.id, gradient);
    }
}
