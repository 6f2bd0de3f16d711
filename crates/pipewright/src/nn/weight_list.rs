//! The parameters of a [`SplitBackward`](super::SplitBackward) layer without their types, and how the
//! gradient of each is computed.

use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

use super::deferred::{Deferred, KeptWeight};
use crate::autodiff::{Rule, inner_of, record};
use crate::tensor::{Boundary, Value, Values};

/// The parameters of a layer: a reference to a [`Param`], or a tuple of up to six references.
pub trait WeightList: sealed::Sealed {
    /// The parameters' tensors: one tensor, or a tuple of tensors.
    type Tensors: Boundary;

    /// Appends the parameters, first to last.
    #[doc(hidden)]
    fn list(&self, into: &mut Vec<Weight>);
}

mod sealed {
    pub trait Sealed {}
}

/// A parameter in one forward, on the tape if the module is.
#[doc(hidden)]
#[derive(Debug)]
pub struct Weight {
    id: ParamId,
    /// The number of dimensions does not matter here; the operations that record it use 2.
    tensor: Tensor<2>,
    is_tracked: bool,
    deferred: Option<Deferred>,
}

impl<const D: usize> sealed::Sealed for &Param<Tensor<D>> {}

impl<const D: usize> WeightList for &Param<Tensor<D>> {
    type Tensors = Tensor<D>;

    fn list(&self, into: &mut Vec<Weight>) {
        let tensor = self.val();
        into.push(Weight {
            id: self.id,
            is_tracked: tensor.is_tracked(),
            deferred: Deferred::current(&tensor, self.id),
            tensor: Tensor::from_dispatch(tensor.into_dispatch()),
        });
    }
}

macro_rules! tuple_list {
    ($($name:ident),+) => {
        impl<$($name: WeightList),+> sealed::Sealed for ($($name,)+) {}

        impl<$($name: WeightList),+> WeightList for ($($name,)+) {
            type Tensors = ($($name::Tensors,)+);

            fn list(&self, into: &mut Vec<Weight>) {
                #[expect(non_snake_case, reason = "the type parameters name the tuple's fields")]
                let ($($name,)+) = self;
                $($name.list(into);)+
            }
        }
    };
}

tuple_list!(A);
tuple_list!(A, B);
tuple_list!(A, B, C);
tuple_list!(A, B, C, D);
tuple_list!(A, B, C, D, E);
tuple_list!(A, B, C, D, E, F);

impl Weight {
    /// Returns the weight off the tape.
    pub(super) fn value(&self) -> Value {
        Value::of(inner_of(self.tensor.clone()))
    }

    /// Returns the parameter if it needs a gradient.
    pub(super) fn wanted(&self) -> Option<ParamId> {
        self.is_tracked.then_some(self.id)
    }

    /// Returns how the backward pass keeps the weight.
    pub(super) fn kept(&self) -> KeptWeight {
        KeptWeight::new(inner_of(self.tensor.clone()), self.id, self.deferred.as_ref())
    }
}

/// How the gradients of a layer's weights are computed.
#[derive(Clone, Debug)]
pub(super) enum Gradients {
    /// In `W`.
    Deferred(Deferred),
    /// In the backward pass, which then leaves them in these slots.
    OnTape(Slots),
    /// No weight needs a gradient.
    Unwanted,
}

/// The gradient of each weight that needs one, between the backward of the layer and the backward of the
/// weight.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(Arc<Mutex<Vec<Option<Value>>>>);

impl Slots {
    pub(super) fn fill(&self, gradients: Values) {
        *self.lock() = gradients.into_iter().map(Some).collect();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Value>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Decides how the gradients of `weights` are computed. Also returns the tensor that is recorded on the tape
/// in their place, through which the backward pass reaches the layer. Gradients are deferred if all of them
/// can be.
pub(super) fn gradients_of(weights: &[Weight]) -> (Gradients, Tensor<2>) {
    let tracked: Vec<_> = weights.iter().enumerate().filter(|(_, weight)| weight.is_tracked).collect();
    let device = weights.first().map(|weight| inner_of(weight.tensor.clone()).device()).unwrap_or_default();
    let token = Tensor::zeros([1, 1], &device);
    let Some((_, first)) = tracked.first() else { return (Gradients::Unwanted, token) };
    if let Some(deferred) = &first.deferred
        && tracked.iter().all(|(_, weight)| weight.deferred.is_some())
    {
        return (Gradients::Deferred(deferred.clone()), deferred.recorded(first.tensor.clone()));
    }
    // A chain of operations on two inputs: an operation on the tape has a fixed number of inputs.
    let slots = Slots::default();
    let token = tracked.into_iter().fold(token.clone(), |chain, (index, weight)| {
        let link = Link { index, slots: slots.clone() };
        record([chain, weight.tensor.clone()], token.clone(), Arc::new(link))
    });
    (Gradients::OnTape(slots), token)
}

/// Gives a weight the gradient in its slot.
#[derive(Debug)]
struct Link {
    index: usize,
    slots: Slots,
}

impl Rule for Link {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let own = self.slots.lock().get_mut(self.index).and_then(Option::take);
        [Some(gradient), own.map(|own| Tensor::from_dispatch(own.into_dispatch()))]
    }
}
