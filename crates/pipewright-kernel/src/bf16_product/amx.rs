//! One part of a result with AMX: the sums of up to 32 rows and 32 columns, in four of the eight tile
//! registers.
//!
//! ```text
//!                                                tmm6: 16 pairs x 16 columns   tmm7: the next 16 columns
//! tmm4: 16 rows of the left operand x 16 pairs   tmm0 += tmm4 tmm6             tmm1 += tmm4 tmm7
//! tmm5: the next 16 rows                         tmm2 += tmm5 tmm6             tmm3 += tmm5 tmm7
//! ```
//!
//! Each loaded register is used twice, so loading takes no longer than multiplying. The instructions are
//! written in assembly, because Rust's functions for them are not stable.

use std::arch::asm;
use std::arch::x86_64::{_mm512_load_ps, _mm512_setzero_ps};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::tile::{COLUMNS, Tile};

/// Rows of a tile, and words of each row.
pub(super) const SIDE: usize = 16;

/// Words of a tile.
const WORDS: usize = SIDE * SIDE;

/// Rows of a panel of the left operand: two tiles.
pub(super) const ROWS: usize = 2 * SIDE;

/// Bytes from a row of a packed tile of the left operand to the next.
const LEFT_STRIDE: usize = SIDE * size_of::<u32>();

/// Bytes from a row of a panel of the right operand to the next, and the same for a row of sums.
const STRIDE: usize = COLUMNS * size_of::<u32>();

/// Bytes of a tile.
const TILE: usize = WORDS * size_of::<u32>();

/// Gives all tile registers of this thread 16 rows of 64 bytes. The registers are released when it is
/// dropped.
pub(super) struct Tiles {
    /// The registers are the thread's, so another thread must not drop it.
    _of_thread: PhantomData<*const ()>,
}

impl Tiles {
    /// # Safety
    /// The processor must have the instructions, and the operating system must let the process use them. The
    /// thread must not have another value of this type.
    pub(super) unsafe fn configure() -> Self {
        /// The operand of `ldtilecfg` (Intel's Software Developer's Manual, volume 2).
        #[repr(align(64))]
        struct Shapes([u8; 64]);

        let mut shapes = Shapes([0; 64]);
        // The palette of eight tiles of at most 16 rows of 64 bytes.
        shapes.0[0] = 1;
        for tile in 0..8 {
            // The lower byte of the length of a row, and the number of rows.
            shapes.0[16 + 2 * tile] = LEFT_STRIDE as u8;
            shapes.0[48 + tile] = SIDE as u8;
        }
        // SAFETY: the caller says that the process may use the instruction, which reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, preserves_flags)) };
        Self { _of_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the thread configured the registers, so it may release them.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Sums of a part, in rows of [`COLUMNS`].
#[repr(align(64))]
struct Sums(MaybeUninit<[f32; ROWS * COLUMNS]>);

impl Tile {
    /// Computes a part of up to [`ROWS`] rows.
    ///
    /// # Safety
    /// As [`Tile::compute`]. The left operand has [`ROWS`] rows, or [`SIDE`] if the part has no more, in tiles
    /// of [`WORDS`] words: first the tiles of the first 16 rows, then the tiles of the others. The number of pairs
    /// is a multiple of [`SIDE`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) unsafe fn compute_with(self, _tiles: &Tiles) {
        let mut sums = Sums(MaybeUninit::uninit());
        let into = sums.0.as_mut_ptr().cast();
        // SAFETY: the registers are configured, and the caller says which words the operands have.
        unsafe {
            if self.rows > SIDE {
                self.sum_of_32_rows(into);
            } else {
                self.sum_of_16_rows(into);
            }
        }
        let mut row = 0;
        // SAFETY: the instructions wrote all rows of sums, which begin at cache lines; each row of the part
        // is one of the output's.
        unsafe {
            while row + 4 <= self.rows {
                self.finish_rows::<4>(row, into);
                row += 4;
            }
            while row < self.rows {
                self.finish_rows::<1>(row, into);
                row += 1;
            }
        }
    }

    /// Writes `N` rows of the output from `row` on.
    ///
    /// # Safety
    /// As [`Tile::compute`], and `sums` must have these rows, aligned to cache lines.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn finish_rows<const N: usize>(self, row: usize, sums: *const f32) {
        let mut loaded = [[_mm512_setzero_ps(); 2]; N];
        // SAFETY: the caller says that the rows exist.
        unsafe {
            for (index, [low, high]) in loaded.iter_mut().enumerate() {
                let sums = sums.add((row + index) * COLUMNS);
                (*low, *high) = (_mm512_load_ps(sums), _mm512_load_ps(sums.add(COLUMNS / 2)));
            }
            let output = self.output.at(row * self.stride);
            let update = self.update.map(|update| update.at(row, 0));
            Self { output, update, ..self }.finish(loaded);
        }
    }

    /// # Safety
    /// As [`Tile::compute_with`], for more than 16 rows. `sums` must point to memory for [`Sums`].
    unsafe fn sum_of_32_rows(self, sums: *mut f32) {
        let steps = self.pairs / SIDE;
        // SAFETY: the left operand has `2 steps` tiles, the right operand has `16 steps` rows of 128 bytes,
        // and the sums have 32 of them.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm6, [{right} + {stride}]",
                "tileloadd tmm4, [{left} + {left_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {stride} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{next_left} + {left_stride}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, {tile}",
                "add {next_left}, {tile}",
                "add {right}, {tiles}",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{next_sums} + {stride}], tmm2",
                "tilestored [{next_sums} + {stride} + 64], tmm3",
                tile = const TILE,
                tiles = const 2 * TILE,
                steps = inout(reg) steps => _,
                left = inout(reg) self.left => _,
                next_left = inout(reg) self.left.wrapping_add(steps * WORDS) => _,
                right = inout(reg) self.right => _,
                sums = in(reg) sums,
                next_sums = in(reg) sums.wrapping_add(SIDE * COLUMNS),
                stride = in(reg) STRIDE,
                left_stride = in(reg) LEFT_STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// # Safety
    /// As [`Tile::compute_with`], for up to 16 rows. `sums` must point to memory for 16 rows of [`COLUMNS`].
    unsafe fn sum_of_16_rows(self, sums: *mut f32) {
        // SAFETY: the left operand has `steps` tiles, the right operand has `16 steps` rows of 128 bytes, and
        // the sums have 16 of them.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm6, [{right} + {stride}]",
                "tileloadd tmm4, [{left} + {left_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {stride} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {left}, {tile}",
                "add {right}, {tiles}",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                tile = const TILE,
                tiles = const 2 * TILE,
                steps = inout(reg) self.pairs / SIDE => _,
                left = inout(reg) self.left => _,
                right = inout(reg) self.right => _,
                sums = in(reg) sums,
                stride = in(reg) STRIDE,
                left_stride = in(reg) LEFT_STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Registers of sums of [`multiply_registers`].
pub(crate) const REGISTERS: usize = 4;

/// Multiplies tiles, `rounds` times in each of [`REGISTERS`] registers of sums.
///
/// # Safety
/// As [`Tiles::configure`].
pub(crate) unsafe fn multiply_registers(rounds: usize) {
    // Pairs of the number 0.5.
    let operand = [0x3f00_3f00_u32; WORDS];
    if rounds == 0 {
        return;
    }
    // SAFETY: as the caller says. The operand is a tile.
    unsafe {
        let _tiles = Tiles::configure();
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{operand} + {stride}]",
            "tileloadd tmm5, [{operand} + {stride}]",
            "tileloadd tmm6, [{operand} + {stride}]",
            "tileloadd tmm7, [{operand} + {stride}]",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            operand = in(reg) &raw const operand,
            stride = in(reg) LEFT_STRIDE,
            rounds = inout(reg) rounds => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
