//! Waiting until a device has computed tensors.

use burn::tensor::{Tensor, Transaction};

use super::value::Value;

/// A part of a tensor is read without a copy on the device if the numbers of elements before and after it are
/// multiples of this one.
const ALIGNMENT: usize = 64;

/// Waits until the device of `tensors` has computed all of them. They are float tensors of one device, off
/// the tape.
///
/// A device reports a failed operation when its result is read, and a wait for the device alone does not
/// report it. So some elements of each tensor are read, in one go.
///
/// # Errors
/// The back end's message, if the device or an operation that the tensors depend on has failed.
pub(crate) fn wait_until_computed(tensors: impl IntoIterator<Item = Value>) -> Result<(), String> {
    let mut samples = tensors.into_iter().filter_map(sample).peekable();
    if samples.peek().is_none() {
        return Ok(());
    }
    let read = samples.fold(Transaction::default(), Transaction::register);
    read.try_execute().map(drop).map_err(|error| error.to_string())
}

/// Returns the first elements of a tensor, at most [`ALIGNMENT`], so that the number of the others is a
/// multiple of
/// [`ALIGNMENT`]. Returns `None` if the tensor has no elements.
fn sample(tensor: Value) -> Option<Tensor<1>> {
    let count = tensor.shape().num_elements();
    let length = (count.checked_sub(1)? % ALIGNMENT) + 1;
    let sample = tensor.reshaped(&[count]).narrow(0, 0, length);
    Some(Tensor::from_dispatch(sample.into_dispatch()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn samples_leave_whole_blocks() {
        let length = |shape: [usize; 2]| {
            let tensor = Tensor::<2>::zeros(shape, &Device::flex());
            sample(Value::of(tensor)).map(|sample| sample.dims()[0])
        };
        assert_eq!([[1, 1], [8, 8], [5, 13], [0, 7]].map(length), [Some(1), Some(64), Some(1), None]);
    }

    #[test]
    fn computed_tensors_are_no_failure() {
        let tensors = [[3, 2], [0, 2]].map(|shape| Value::of(Tensor::<2>::ones(shape, &Device::flex())));
        assert_eq!(wait_until_computed(tensors), Ok(()));
        assert_eq!(wait_until_computed([]), Ok(()));
    }
}
