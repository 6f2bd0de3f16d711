//! Numbers one by one, for processors whose registers have no code of their own.

use super::register::Vector;

/// A register of one number.
#[derive(Clone, Copy)]
pub(crate) struct Portable(f32);

impl Vector for Portable {
    const LANES: usize = 1;

    type Square = [Self; 1];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        Self(number)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the trait says, here and in all functions below.
        Self(unsafe { *from })
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        // SAFETY: as above.
        if count == 0 { Self(0.0) } else { Self(unsafe { *from }) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.write(self.0) };
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        if count > 0 {
            // SAFETY: as above.
            unsafe { to.write(self.0) };
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        Self(self.0.mul_add(factor.0, sum.0))
    }

    #[inline(always)]
    unsafe fn flush(self, least: &mut Self) -> Self {
        if self.0.abs() == f32::MIN_POSITIVE {
            least.0 = 1.0;
        }
        if self.0.is_subnormal() { Self(0f32.copysign(self.0)) } else { self }
    }

    #[inline(always)]
    unsafe fn square() -> Self::Square {
        [Self(0.0)]
    }

    #[inline(always)]
    unsafe fn transpose(square: Self::Square) -> Self::Square {
        square
    }
}
