//! Sums of tensors over the members of a group.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;

use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// Adds lists of tensors, place by place, in the order of the lists. A tensor that is absent in some lists counts as
/// zero there; a tensor that is absent in all lists is absent from the sum. Tensors at the same place have the same
/// shape.
pub(crate) fn sum(lists: impl IntoIterator<Item = OptionalTensors>) -> OptionalTensors {
    let add = |sum: OptionalTensor, part: OptionalTensor| match (sum, part) {
        (Some(sum), Some(part)) => {
            Some(Value::from_dispatch(Dispatch::float_add(sum.into_dispatch(), part.into_dispatch())))
        }
        (sum, part) => sum.or(part),
    };
    let sums = lists
        .into_iter()
        .reduce(|sums, parts| sums.into_iter().zip(parts).map(|(sum, part)| add(sum, part)).collect());
    sums.unwrap_or_default()
}
