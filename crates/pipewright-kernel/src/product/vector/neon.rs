//! Registers of NEON.

use std::arch::aarch64::*;

use super::register::Vector;

impl Vector for float32x4_t {
    const LANES: usize = 4;

    type Square = [Self; 4];

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: as the trait says, here and in all functions below.
        unsafe { vdupq_n_f32(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        let mut elements = [0.0; 4];
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(from, elements.as_mut_ptr(), count);
            vld1q_f32(elements.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above.
        unsafe { vst1q_f32(to, self) };
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        let mut elements = [0.0; 4];
        // SAFETY: as above.
        unsafe {
            vst1q_f32(elements.as_mut_ptr(), self);
            std::ptr::copy_nonoverlapping(elements.as_ptr(), to, count);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { vaddq_f32(self, other) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, sum: Self) -> Self {
        // SAFETY: as above.
        unsafe { vfmaq_f32(sum, self, factor) }
    }

    #[inline(always)]
    unsafe fn flush(self, least: &mut Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let (magnitude, normal) = (vabsq_f32(self), vdupq_n_f32(f32::MIN_POSITIVE));
            *least = vbslq_f32(vceqq_f32(magnitude, normal), vdupq_n_f32(1.0), *least);
            let sign = vandq_u32(vreinterpretq_u32_f32(self), vdupq_n_u32(1 << 31));
            vbslq_f32(vcltq_f32(magnitude, normal), vreinterpretq_f32_u32(sign), self)
        }
    }

    #[inline(always)]
    unsafe fn square() -> Self::Square {
        // SAFETY: as above.
        unsafe { [vdupq_n_f32(0.0); 4] }
    }

    #[inline(always)]
    unsafe fn transpose([a, b, c, d]: Self::Square) -> Self::Square {
        // SAFETY: as above.
        unsafe {
            let (low, high) = (vzipq_f32(a, c), vzipq_f32(b, d));
            let (first, last) = (vzipq_f32(low.0, high.0), vzipq_f32(low.1, high.1));
            [first.0, first.1, last.0, last.1]
        }
    }
}
