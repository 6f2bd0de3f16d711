//! Splits tensors by all rules, and joins them again.

use burn::tensor::{Bool, Device, Int, Tensor};

use pipewright_schedule::Slices;

use super::{Batch, Merge, SplitError, SplitRule, SplitSpec, merge, merge_by, split};
use crate::tensor::{Values, pack, unpack};

type Nest = (Tensor<2>, (Tensor<3>, Tensor<1, Int>));

fn batch(rows: usize) -> Values {
    let device = Device::flex();
    let numbers = |count: usize| Tensor::<1, Int>::arange(0..count as i64, &device);
    let nest: Nest = (
        numbers(rows * 2).float().reshape([rows, 2]),
        (numbers(3 * rows).float().reshape([3, rows, 1]), numbers(5)),
    );
    pack(nest)
}

const SPECS: (SplitSpec, (SplitSpec, SplitSpec)) =
    (SplitSpec::Along(0), (SplitSpec::Along(1), SplitSpec::Replicate));

fn check(rows: usize, microbatches: u32) {
    let parts = split(&batch(rows), SplitRule::uneven(microbatches).inputs(SPECS)).expect("it splits");
    assert_eq!(parts.len(), microbatches as usize);
    let merged = merge_by(parts, (Merge::Along(0), (Merge::Along(1), Merge::List))).expect("they join");
    let expected: Nest = unpack(batch(rows)).expect("the nest");
    let [a, b, c] = <[Values; 3]>::try_from(merged).expect("three outputs");
    let (a, b): (Tensor<2>, Tensor<3>) = (unpack(a).expect("one"), unpack(b).expect("one"));
    assert_eq!((a.into_data(), b.into_data()), (expected.0.into_data(), expected.1.0.into_data()));
    assert_eq!(c.len(), microbatches as usize);
    let each: Vec<Tensor<1, Int>> = c.into_iter().map(|value| unpack(vec![value]).expect("ids")).collect();
    assert!(each.into_iter().all(|ids| ids.into_data() == expected.1.1.clone().into_data()));
}

#[test]
fn splitting_along_a_dimension_is_undone_by_joining() {
    check(8, 4);
    check(7, 4);
    check(8, 1);
}

fn check_balanced(rows: usize, microbatches: u32, expected: &[usize]) {
    let parts = split(&batch(rows), SplitRule::balanced(microbatches).inputs(SPECS)).expect("it splits");
    let sizes: Vec<usize> = parts.iter().map(|part| part[0].shape()[0]).collect();
    assert_eq!(sizes, expected, "{rows} rows in {microbatches}");
    assert!(parts.iter().all(|part| part[1].shape()[1] == part[0].shape()[0] && part[2].shape()[0] == 5));
    let merged = merge_by(parts, (Merge::Along(0), (Merge::Along(1), Merge::List))).expect("they join");
    let [a, b, _] = <[Values; 3]>::try_from(merged).expect("three outputs");
    let (a, b): (Tensor<2>, Tensor<3>) = (unpack(a).expect("one"), unpack(b).expect("one"));
    let expected: Nest = unpack(batch(rows)).expect("the nest");
    assert_eq!((a.into_data(), b.into_data()), (expected.0.into_data(), expected.1.0.into_data()));
}

#[test]
fn balanced_sizes_are_those_of_tensor_split() {
    // The values of `[len(part) for part in torch.tensor_split(torch.arange(rows), parts)]`.
    check_balanced(5, 4, &[2, 1, 1, 1]);
    check_balanced(9, 4, &[3, 2, 2, 2]);
    check_balanced(8, 4, &[2, 2, 2, 2]);
    check_balanced(11, 4, &[3, 3, 3, 2]);
    check_balanced(4, 4, &[1, 1, 1, 1]);
    let few = split(&batch(3), SplitRule::balanced(4).inputs(SPECS)).err();
    check_refused(few, "3 rows make runs of 1, and with them fewer than 4 microbatches");
}

#[test]
fn the_sizes_of_replicas_have_the_ratio_of_their_shares() {
    let sizes = |rows: usize, microbatches: u32, shares: &[u32]| {
        let parts = split(&batch(rows), SplitRule::shared(microbatches, shares).inputs(SPECS));
        let rows_of = |parts: Vec<Values>| parts.iter().map(|part| part[0].shape()[0]).collect::<Vec<_>>();
        parts.map(rows_of).map_err(|error| error.to_string())
    };
    assert_eq!(sizes(16, 4, &[3, 1]), Ok(vec![6, 6, 2, 2]));
    assert_eq!(sizes(12, 3, &[1, 4, 1]), Ok(vec![2, 8, 2]));
    assert_eq!(sizes(16, 4, &[7, 7]), Ok(vec![4; 4]));
    assert_eq!(sizes(16, 4, &[]), Ok(vec![4; 4]));
    let refused = |rows: usize, microbatches: u32, shares: &[u32], expected: &str| {
        let error = sizes(rows, microbatches, shares).expect_err("the rows do not divide");
        assert!(error.starts_with(expected), "{error}");
    };
    refused(
        12,
        4,
        &[3, 1],
        "12 rows do not divide into 4 microbatches with the shares 3, 1 of their replicas: give a multiple of 8 rows, such as \
         16, or other shares",
    );
    // The least numbers that work, also if the shares have a common divisor.
    refused(
        10,
        4,
        &[6, 2],
        "10 rows do not divide into 4 microbatches with the shares 6, 2 of their replicas: give a multiple of 8 rows, such as 16",
    );
    assert_eq!(sizes(16, 4, &[6, 2]), Ok(vec![6, 6, 2, 2]));
    refused(
        15,
        3,
        &[3, 1],
        "15 rows do not divide into 3 microbatches with the shares 3, 1 of their replicas: use a multiple of 2 microbatches, the number of replicas",
    );
    refused(
        8,
        4,
        &[1, 0],
        "8 rows do not divide into 4 microbatches with the shares 1, 0 of their replicas: give each replica a share from 1",
    );
    let huge = "4 rows do not divide into 4 microbatches with the shares 4294967295, 4294967294 of their replicas: give a multiple \
                of 17179869178 rows";
    refused(4, 4, &[u32::MAX, u32::MAX - 1], huge);
}

#[test]
fn a_mean_is_taken_in_order() {
    let device = Device::flex();
    let part = |x: f32| pack(Tensor::<1>::from_floats([x, 1.0], &device));
    let merged = merge_by(vec![part(1.0), part(2.0), part(6.0)], Merge::Mean).expect("a mean");
    let mean: Tensor<1> = unpack(merged.concat()).expect("one tensor");
    assert_eq!(mean.into_data(), Tensor::<1>::from_floats([3.0, 1.0], &device).into_data());
}

#[test]
fn a_sum_is_the_sum_of_the_microbatches() {
    let check = |rows: usize, microbatches: u32| {
        let sums: (Tensor<2>, (Tensor<3>, Tensor<1, Int>)) = {
            let parts = split(&batch(rows), SplitRule::equal(microbatches).inputs(SPECS)).expect("it splits");
            let merged = merge_by(parts, (Merge::Sum, (Merge::Sum, Merge::Sum))).expect("sums");
            unpack(merged.concat()).expect("the nest")
        };
        let (a, (b, c)): Nest = unpack(batch(rows)).expect("the nest");
        let size = rows / microbatches as usize;
        let a = a.reshape([microbatches as usize, size, 2]).sum_dim(0).squeeze_dim::<2>(0);
        let b = b.reshape([3, microbatches as usize, size]).sum_dim(1).reshape([3, size, 1]);
        assert_eq!(sums.0.into_data(), a.into_data());
        assert_eq!(sums.1.0.into_data(), b.into_data());
        assert_eq!(sums.1.1.into_data(), (c * i64::from(microbatches)).into_data());
    };
    check(8, 4);
    check(6, 2);
    check(3, 1);
}

#[test]
fn a_function_joins_microbatches_of_different_sizes_and_any_form() {
    let parts = split(&batch(7), SplitRule::uneven(4).inputs(SPECS)).expect("it splits");
    let largest = Merge::function(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0).max());
    let smallest = Merge::function(|parts: Vec<Values>| {
        let all: Vec<Tensor<3>> = parts.into_iter().map(|part| unpack(part).expect("floats")).collect();
        Tensor::cat(all, 1).min()
    });
    let last = Merge::function(|mut parts: Vec<Tensor<1, Int>>| parts.pop().expect("a microbatch"));
    let merged = merge_by(parts, (largest, (smallest, last))).expect("they join");
    let merged: (Tensor<1>, (Tensor<1>, Tensor<1, Int>)) = unpack(merged.concat()).expect("three tensors");
    assert_eq!((merged.0.into_scalar::<f32>(), merged.1.0.into_scalar::<f32>()), (13.0, 0.0));
    assert_eq!(merged.1.1.dims(), [5]);
}

#[test]
fn functions_that_do_not_fit_are_named() {
    let refused = |third: Merge, start: &str| {
        let parts = split(&batch(8), SplitRule::equal(2).inputs(SPECS)).expect("it splits");
        check_refused(merge_by(parts, (Merge::List, (Merge::List, third))).err(), start);
    };
    let of = "the function that joins output 2";
    refused(
        Merge::function(|parts: Vec<Tensor<2>>| Tensor::cat(parts, 0)),
        &format!(
            "{of} cannot take the tensor of microbatch 0: expected a float tensor of rank 2, found a int tensor"
        ),
    );
    let one =
        "cannot take the tensor of microbatch 0: an output is one tensor, and the function takes another";
    refused(
        Merge::function(|mut parts: Vec<(Tensor<1, Int>, Tensor<1>)>| parts.remove(0)),
        &format!("{of} {one}"),
    );
    refused(Merge::function(|_: Vec<()>| ()), &format!("{of} {one}"));
    refused(Merge::function(|_: Vec<Tensor<1, Int>>| ()), &format!("{of} returned 0 tensors: return one"));
    refused(
        Merge::function(|parts: Vec<Values>| parts.concat()),
        &format!("{of} returned 2 tensors: return one"),
    );
    refused(
        Merge::function(|_: Vec<Values>| -> Values { panic!("out of cheese") }),
        &format!("{of} panicked: out of cheese"),
    );
    let shapes =
        |parts: Vec<Tensor<1, Int>>| parts[0].clone().narrow(0, 0, 2) + parts[1].clone().narrow(0, 0, 3);
    refused(Merge::function(shapes), &format!("{of} panicked: "));
}

#[test]
fn sums_that_do_not_exist_are_named() {
    let device = Device::flex();
    let refused = |parts: Vec<Values>, start: &str| check_refused(merge_by(parts, Merge::Sum).err(), start);
    let floats = |rows| pack(Tensor::<1>::zeros([rows], &device));
    refused(
        vec![floats(2), floats(1)],
        "output 0 of microbatch 1 is [1], and of microbatch 0 it is [2]: a sum or",
    );
    let flags = pack(Tensor::<1>::zeros([2], &device).greater_elem(1.0));
    refused(vec![flags.clone(), flags], "output 0 is bool: only numbers have a sum");
    let ints = pack(Tensor::<1, Int>::zeros([2], &device));
    refused(vec![floats(2), ints], "output 0 of microbatch 1 is [2]");
}

#[test]
fn specs_that_do_not_fit_are_named() {
    let error = |specs: Vec<SplitSpec>, microbatches| {
        split(&batch(8), SplitRule::uneven(microbatches).inputs(specs)).err()
    };
    let one = vec![SplitSpec::Replicate];
    check_refused(error(one, 2), "1 spec for 3 tensors");
    let missing = vec![SplitSpec::Along(2), SplitSpec::Replicate, SplitSpec::Replicate];
    check_refused(error(missing, 2), "tensor 0 of shape [8, 2] has no dimension 2");
    let unlike = vec![SplitSpec::Along(0), SplitSpec::Along(0), SplitSpec::Replicate];
    check_refused(error(unlike, 2), "tensor 1 has 3 rows, tensor 0 has 8");
    let few = vec![SplitSpec::Along(0), SplitSpec::Along(1), SplitSpec::Replicate];
    check_refused(error(few, 5), "8 rows make runs of 2, and with them fewer than 5 microbatches");
    let parts = split(&batch(8), SplitRule::uneven(2).inputs(SPECS)).expect("it splits");
    let error = merge_by(parts.clone(), (Merge::Along(0), (Merge::Along(0), Merge::Mean))).err();
    check_refused(error, "output 2 is int: only floats have a mean");
    let error = merge_by(parts, (Merge::Mean, (Merge::Along(3), Merge::List))).err();
    check_refused(error, "tensor 1 of shape [3, 4, 1] has no dimension 3");
}

fn kinds(rows: usize) -> (Tensor<2>, Tensor<1, Int>, Tensor<3, Bool>) {
    let device = Device::flex();
    let floats = Tensor::<1, Int>::arange(0..(rows * 3) as i64, &device).float().reshape([rows, 3]);
    let ints = Tensor::arange(0..rows as i64, &device);
    let bools = Tensor::<1, Int>::arange(0..(rows * 4) as i64, &device).greater_elem(3).reshape([rows, 2, 2]);
    (floats, ints, bools)
}

/// Checks that a batch is refused with a message that starts like this.
fn check_refused(error: Option<SplitError>, start: &str) {
    let message = error.expect("it is refused").to_string();
    assert!(message.starts_with(start), "{message}");
}

fn check_equal(rows: usize, microbatches: u32, expected: Result<(), SplitError>) {
    let whole = pack(kinds(rows));
    let found = split(&whole, microbatches).and_then(|parts| {
        assert_eq!(parts.len(), microbatches as usize);
        merge(parts)
    });
    match (found, expected) {
        (Ok(merged), Ok(())) => {
            type Batch = (Tensor<2>, Tensor<1, Int>, Tensor<3, Bool>);
            let (a, b): (Batch, Batch) = (unpack(whole).unwrap(), unpack(merged).unwrap());
            assert_eq!(a.0.into_data(), b.0.into_data());
            assert_eq!(a.1.into_data(), b.1.into_data());
            assert_eq!(a.2.into_data(), b.2.into_data());
        }
        (found, expected) => assert_eq!(found.err(), expected.err()),
    }
}

#[test]
fn splitting_and_joining_are_inverse() {
    check_equal(8, 1, Ok(()));
    check_equal(8, 2, Ok(()));
    check_equal(8, 8, Ok(()));
}

#[test]
fn rows_must_divide() {
    for (rows, microbatches) in [(8, 3), (8, 0), (4, 8)] {
        let error = split(&pack(kinds(rows)), microbatches).err();
        check_refused(error, &format!("{rows} rows do not divide into {microbatches} microbatches"));
    }
}

#[test]
fn rows_must_agree() {
    let device = Device::flex();
    let pair = pack((Tensor::<2>::zeros([4, 1], &device), Tensor::<2>::zeros([2, 1], &device)));
    check_refused(split(&pair, 2).err(), "tensor 1 has 2 rows, tensor 0 has 4");
    check_refused(split(&[], 2).err(), "the batch holds no tensor");
}

#[test]
fn outputs_that_differ_do_not_join() {
    let device = Device::flex();
    let parts = vec![pack(Tensor::<2>::zeros([2, 3], &device)), pack(Tensor::<2>::zeros([2, 4], &device))];
    check_refused(merge(parts).err(), "output 0 of microbatch 1 is [2, 4], and of microbatch 0 it is [2, 3]");
}

#[test]
fn a_whole_microbatch_counts_as_one_slice_even_if_all_its_ids_are_ignored() {
    let ids = Tensor::<1, Int>::from_data([-1, -1, 3, 4], &Device::flex());
    let batch = Batch::split((), ids, 2).and_then(|batch| batch.ignoring(-1)).expect("two targets count");
    assert_eq!(batch.slice_shares(Slices::new(1).expect("not 0")), [1.0, 1.0]);
}
