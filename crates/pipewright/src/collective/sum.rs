//! Sums of tensors over the members of a group.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;

use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// Adds lists of tensors, index by index: neighbours in pairs, then the sums of the pairs in pairs, and so
/// on, as in `((a + b) + (c + d)) + e`. So the sum has the same bits if groups of 2, 4, 8 or more such lists
/// are added first, and then the sums of the groups.
///
/// A tensor that is absent in some lists counts as zero there; a tensor that is absent in all lists is absent
/// from the sum. Tensors at the same index have the same shape.
pub(crate) fn sum(lists: impl IntoIterator<Item = OptionalTensors>) -> OptionalTensors {
    let mut lists: Vec<OptionalTensors> = lists.into_iter().collect();
    while lists.len() > 1 {
        let mut rest = lists.into_iter();
        let pair = || Some((rest.next()?, rest.next()));
        lists = std::iter::from_fn(pair).map(|(one, other)| added(one, other)).collect();
    }
    lists.pop().unwrap_or_default()
}

/// Adds two lists; returns the first if the second does not exist.
fn added(one: OptionalTensors, other: Option<OptionalTensors>) -> OptionalTensors {
    let Some(other) = other else { return one };
    let add = |(one, other): (OptionalTensor, OptionalTensor)| match (one, other) {
        (Some(one), Some(other)) => {
            Some(Value::from_dispatch(Dispatch::float_add(one.into_dispatch(), other.into_dispatch())))
        }
        (one, other) => one.or(other),
    };
    one.into_iter().zip(other).map(add).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;

    fn list(numbers: [Option<f32>; 2]) -> OptionalTensors {
        let tensor = |number| Value::of(Tensor::<1>::from_data([number], &Device::flex()));
        numbers.map(|number| number.map(tensor)).into()
    }

    fn numbers(list: OptionalTensors) -> Vec<Option<f32>> {
        list.into_iter().map(|tensor| Some(tensor?.into_data().iter().next().expect("a number"))).collect()
    }

    #[test]
    fn neighbours_are_added_first_so_groups_may_be() {
        // In single precision, 1 is lost when it is added to 1e8, and 2 + 2 + 2 + 2 is not.
        let parts = [1e8, 3.0, 3.0, 3.0, 3.0, -1e8, 3.0].map(|number| list([Some(number), None]));
        let whole = numbers(sum(parts.clone()));
        let in_order =
            parts.iter().flat_map(|part| numbers(part.clone())[0]).fold(0.0, |sum, part| sum + part);
        let expected = ((1e8f32 + 3.0) + (3.0 + 3.0)) + ((3.0 + -1e8) + 3.0);
        assert_eq!(whole, [Some(expected), None]);
        assert_ne!(expected, in_order, "the order matters for these numbers");
        for size in [2, 4] {
            let groups = parts.chunks(size).map(|group| sum(group.to_vec()));
            assert_eq!(numbers(sum(groups.collect::<Vec<_>>())), whole, "groups of {size}");
        }
    }

    #[test]
    fn an_absent_tensor_counts_as_zero() {
        let lists =
            [list([None, None]), list([Some(2.0), None]), list([None, None]), list([Some(3.0), None])];
        assert_eq!(numbers(sum(lists)), [Some(5.0), None]);
        assert!(sum(Vec::new()).is_empty());
    }
}
