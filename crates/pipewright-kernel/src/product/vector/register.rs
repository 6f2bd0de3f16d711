//! The operations of a register of a processor.

/// A register of [`Vector::LANES`] numbers.
///
/// # Safety
/// Each function needs the instructions of its type. Pointers must point to as many elements as are read or written.
pub(crate) trait Vector: Copy {
    const LANES: usize;

    /// As many registers as each has lanes.
    type Square: AsMut<[Self]>;

    unsafe fn splat(number: f32) -> Self;

    unsafe fn load(from: *const f32) -> Self;

    /// Loads `count` elements, at most [`Vector::LANES`]. The other lanes are zero.
    unsafe fn load_part(from: *const f32, count: usize) -> Self;

    unsafe fn store(self, to: *mut f32);

    /// Stores the first `count` lanes, at most [`Vector::LANES`].
    unsafe fn store_part(self, to: *mut f32, count: usize);

    unsafe fn add(self, other: Self) -> Self;

    /// Returns `self * factor + sum`, rounded once.
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self;

    /// Replaces subnormal numbers by zeros of their signs. Sets lanes of `least` to one where a number has the
    /// magnitude of the least normal number.
    unsafe fn flush(self, least: &mut Self) -> Self;

    /// Returns a square of zeros.
    unsafe fn square() -> Self::Square;

    /// Transposes a square.
    unsafe fn transpose(square: Self::Square) -> Self::Square;
}

/// Asks for a line in the first-level cache. The address may be any.
#[inline(always)]
pub(crate) fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: each processor has the instruction, and it may be given any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for a line in the second-level cache. The address may be any.
#[inline(always)]
pub(crate) fn prefetch_second<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in [`prefetch`].
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
