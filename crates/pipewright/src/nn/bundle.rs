//! Any number of weights as one input of an operation on the tape.
//!
//! An operation has a fixed number of inputs, and a mixture has as many weights as experts. A chain of
//! operations, one per weight, ends in a number, the bundle's token, which is the operation's input. The
//! operation's backward pass fills a slot for each weight. The backward pass of the chain comes later and
//! gives each weight the gradient in its slot.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Device, Tensor};

use super::operation::{CpuTensor, Operation, on_cpu};

/// The gradients of the weights, by the index that [`Bundle::add`] was given.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots(Arc<Mutex<Vec<Option<CpuTensor>>>>);

impl Slots {
    /// Adds a gradient to a slot, which is empty before the first one.
    pub(super) fn add(&self, index: usize, gradient: CpuTensor) {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() <= index {
            slots.resize(index + 1, None);
        }
        slots[index] = Some(match slots[index].take() {
            Some(sum) => Flex::float_add(sum, gradient),
            None => gradient,
        });
    }

    fn take(&self, index: usize) -> Option<CpuTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(index)?.take()
    }
}

/// A chain of weights of the CPU back end.
#[derive(Debug)]
pub(super) struct Bundle {
    pub(super) token: Tensor<1>,
    pub(super) slots: Slots,
}

impl Bundle {
    pub(super) fn new() -> Self {
        Self { token: Tensor::zeros([1], &Device::flex()), slots: Slots::default() }
    }

    /// Adds a weight, whose gradient will be in the slot `index`.
    pub(super) fn add<const D: usize>(&mut self, index: usize, weight: Tensor<D>) {
        let inputs = [self.token.clone().into_dispatch(), weight.into_dispatch()];
        let (_, tape) =
            on_cpu(inputs).expect("the caller has checked that the weight is of the CPU back end");
        self.token = tape.record(vec![0.0], [1], |_| Link { index, slots: self.slots.clone() });
    }
}

#[derive(Clone, Debug)]
struct Link {
    index: usize,
    slots: Slots,
}

impl Operation<2> for Link {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 2]) -> [Option<CpuTensor>; 2] {
        [Some(gradient), self.slots.take(self.index)]
    }
}
