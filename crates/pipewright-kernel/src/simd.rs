//! Shared parts of loops over elements: uninitialised memory, sums in a fixed number of lanes, and what tests hide.
//!
//! Functions that loop are compiled once for each kind of vector unit (`#[multiversion]`); what they call is
//! inlined into each version, so it is `#[inline(always)]`.

use std::mem::MaybeUninit;

/// Lanes of a sum: independent chains of additions, which fill one AVX-512 register.
pub(super) const LANES: usize = 16;

/// Returns whether tests have hidden AVX-512, and whether they have hidden all vector instructions.
#[cfg(target_arch = "x86_64")]
pub(super) fn are_hidden() -> [bool; 2] {
    #[cfg(feature = "testing")]
    return [crate::testing::is_hidden(), crate::testing::are_vectors_hidden()];
    #[cfg(not(feature = "testing"))]
    return [false; 2];
}

/// Allocates uninitialised memory for `len` elements.
pub(super) fn fresh<T>(len: usize) -> Vec<MaybeUninit<T>> {
    let mut elements = Vec::with_capacity(len);
    // SAFETY: the capacity is allocated, and uninitialised elements need no value.
    unsafe { elements.set_len(len) };
    elements
}

/// Returns the elements as initialised.
///
/// # Safety
/// Every element must have been written.
pub(super) unsafe fn written<T>(elements: Vec<MaybeUninit<T>>) -> Vec<T> {
    let mut elements = std::mem::ManuallyDrop::new(elements);
    // SAFETY: the same allocation, of the same layout; the caller says that the elements have values.
    unsafe { Vec::from_raw_parts(elements.as_mut_ptr().cast(), elements.len(), elements.capacity()) }
}

/// Returns the sum of `term(i)` for `i` below `count`, in [`LANES`] chains that are added pairwise at the
/// end.
#[inline(always)]
pub(super) fn sum(count: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = count - count % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, index) in lanes.iter_mut().zip(start..start + LANES) {
            // If `term` checks the index, the compiler uses vector instructions only if it knows that the
            // check passes.
            // SAFETY: `start` and `whole` are multiples of `LANES`, and `start < whole <= count`.
            unsafe { std::hint::assert_unchecked(index < count) };
            *lane += term(index);
        }
    }
    for (lane, index) in lanes.iter_mut().zip(whole..count) {
        *lane += term(index);
    }
    fold(lanes, |a, b| a + b)
}

/// Returns the largest of `elements`, or minus infinity if there is none. NaN is ignored.
#[inline(always)]
pub(super) fn max(elements: &[f32]) -> f32 {
    max_of(elements, |element| element)
}

/// Like [`max`], for elements that `single` converts.
#[inline(always)]
pub(super) fn max_of<T: Copy>(elements: &[T], single: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = elements.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &element) in lanes.iter_mut().zip(chunk) {
            let element = single(element);
            *lane = if element > *lane { element } else { *lane };
        }
    }
    for (lane, &element) in lanes.iter_mut().zip(rest) {
        let element = single(element);
        *lane = if element > *lane { element } else { *lane };
    }
    fold(lanes, f32::max)
}

/// Joins the lanes pairwise: each with the one half of them further.
#[inline(always)]
pub(super) fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_counts_once() {
        for count in [0, 1, 15, 16, 17, 40] {
            assert_eq!(sum(count, |index| index as f32), (0..count).sum::<usize>() as f32, "{count}");
            let elements: Vec<f32> = (0..count).map(|index| index as f32).collect();
            let expected = elements.last().copied().unwrap_or(f32::NEG_INFINITY);
            assert_eq!(max(&elements), expected, "{count}");
        }
    }
}
