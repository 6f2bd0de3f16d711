//! The kernels: the code of tiles and of packing for each kind of registers.

use super::pack::{Panel, Vectors};
use super::tile::{Order, Tile};
#[cfg(target_arch = "aarch64")]
use super::vector::Neon;
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use crate::simd::are_hidden;

/// The instructions of a product. All have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg_attr(
        all(target_arch = "aarch64", not(test)),
        expect(dead_code, reason = "every such processor has NEON, and tests compare both")
    )]
    Portable,
}

impl Kernel {
    /// Returns the fastest kernel that the processor has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let [is_wide_hidden, is_hidden] = are_hidden();
            if is_x86_feature_detected!("avx512f") && !is_wide_hidden {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && !is_hidden {
                return Self::Avx2;
            }
        }
        #[cfg(target_arch = "aarch64")]
        return Self::Neon;
        #[cfg(not(target_arch = "aarch64"))]
        Self::Portable
    }

    /// Returns all kernels that the processor has.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let mut kernels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            kernels.push(Self::Avx2);
        }
        if !kernels.contains(&Self::detect()) {
            kernels.push(Self::detect());
        }
        kernels
    }

    /// Returns the most rows and the columns of a tile.
    pub(super) fn size(self) -> [usize; 2] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => [14, 32],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => [6, 16],
            #[cfg(target_arch = "aarch64")]
            Self::Neon => [8, 12],
            Self::Portable => [4, 4],
        }
    }

    /// # Safety
    /// As [`Tile::compute`], with the kernel's instructions and size.
    pub(super) unsafe fn compute(self, order: Order, tile: &Tile) {
        // SAFETY: as the caller says.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => compute_avx512(order, tile),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => compute_avx2(order, tile),
                #[cfg(target_arch = "aarch64")]
                Self::Neon => compute_neon(order, tile),
                Self::Portable => compute_portable(order, tile),
            }
        }
    }

    /// # Safety
    /// As [`Tile::compute_turned`], with the kernel's instructions and size.
    pub(super) unsafe fn compute_turned(self, tile: &Tile) {
        // SAFETY: as the caller says.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => turned_avx512(tile),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => turned_avx2(tile),
                #[cfg(target_arch = "aarch64")]
                Self::Neon => turned_neon(tile),
                Self::Portable => turned_portable(tile),
            }
        }
    }

    /// # Safety
    /// As [`Vectors::pack`], with the kernel's instructions.
    pub(super) unsafe fn pack(self, vectors: Vectors<'_>, panel: Panel, into: *mut f32) {
        // SAFETY: as the caller says.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => pack_avx512(vectors, panel, into),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => pack_avx2(vectors, panel, into),
                #[cfg(target_arch = "aarch64")]
                Self::Neon => pack_neon(vectors, panel, into),
                Self::Portable => pack_portable(vectors, panel, into),
            }
        }
    }
}

/// Compiles tiles of all heights, and packing, with some instructions.
macro_rules! kernel {
    ([$compute:ident $turned:ident $pack:ident], $vector:ty, $vectors:literal, [$($rows:literal)*] $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $compute(order: Order, tile: &Tile) {
            // SAFETY: as the caller says, with the number of rows as a constant.
            unsafe {
                match (order, tile.requests.is_some(), tile.rows) {
                    $((Order::Blocks, true, $rows) => tile.compute::<$vector, $rows, $vectors, false, false, true>(),
                    (Order::Blocks, false, $rows) => tile.compute::<$vector, $rows, $vectors, false, false, false>(),
                    (Order::Pairs, true, $rows) => tile.compute::<$vector, $rows, $vectors, true, false, true>(),
                    (Order::Pairs, false, $rows) => tile.compute::<$vector, $rows, $vectors, true, false, false>(),
                    (Order::FlushedPairs, _, $rows) => tile.compute::<$vector, $rows, $vectors, true, true, false>(),)*
                    _ => unreachable!("a panel has at most the rows of a tile"),
                }
            }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn $turned(tile: &Tile) {
            // SAFETY: as above.
            unsafe {
                match tile.rows {
                    $($rows => tile.compute_turned::<$vector, $rows>(),)*
                    _ => unreachable!("a panel has at most the rows of a tile"),
                }
            }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn $pack(vectors: Vectors<'_>, panel: Panel, into: *mut f32) {
            // SAFETY: as the caller says.
            unsafe { vectors.pack::<$vector, $vectors>(panel, into) };
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!([compute_avx512 turned_avx512 pack_avx512], Avx512, 2, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f");
#[cfg(target_arch = "x86_64")]
kernel!([compute_avx2 turned_avx2 pack_avx2], Avx2, 2, [1 2 3 4 5 6], "avx2,fma");
#[cfg(target_arch = "aarch64")]
kernel!([compute_neon turned_neon pack_neon], Neon, 3, [1 2 3 4 5 6 7 8]);
kernel!([compute_portable turned_portable pack_portable], Portable, 4, [1 2 3 4]);
