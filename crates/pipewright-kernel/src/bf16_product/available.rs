//! Finds out which instruction for products of bfloat16 the processor has.

use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::sync::{LazyLock, OnceLock};

use super::instruction::Instruction;

/// Proves that the processor has an instruction, and that the operating system lets this process use it.
#[derive(Clone, Copy)]
pub(super) struct Available(Instruction);

impl Available {
    /// Returns the fastest instruction. From the first product on it is the same for the whole life of the process, so all
    /// its products have the same bits.
    pub(super) fn detect() -> Option<Self> {
        #[cfg(feature = "testing")]
        if crate::testing::is_hidden() {
            return None;
        }
        // AMX needs AVX-512 too: for packing, and for rounding the sums.
        let has_registers = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16");
        has_registers.then(|| Self(if has_tiles() { Instruction::Amx } else { Instruction::Avx512Bf16 }))
    }

    pub(super) fn instruction(self) -> Instruction {
        self.0
    }

    /// Returns the instruction for a product. If it is AMX, the process keeps using AMX.
    pub(super) fn begin(self) -> Instruction {
        let uses_tiles = self.0 == Instruction::Amx && *USES_TILES.get_or_init(|| true);
        if uses_tiles { Instruction::Amx } else { Instruction::Avx512Bf16 }
    }
}

/// Returns whether the processor has `tdpbf16ps`, this process may use it, and [`leave_out_tiles`] has not turned it off.
fn has_tiles() -> bool {
    #[cfg(feature = "testing")]
    if crate::testing::are_tiles_hidden() {
        return false;
    }
    static HAS_TILES: LazyLock<bool> = LazyLock::new(|| is_supported() && is_permitted());
    USES_TILES.get() != Some(&false) && *HAS_TILES
}

/// Whether products of this process use AMX. The first product or [`leave_out_tiles`] decides, whichever is first.
static USES_TILES: OnceLock<bool> = OnceLock::new();

/// Turns off AMX for this process. Returns `false` if a product has used AMX before; the process then keeps using it.
pub(super) fn leave_out_tiles() -> bool {
    !USES_TILES.get_or_init(|| false)
}

/// Returns whether the processor has the instructions, and the operating system saves their registers
/// (Intel's Software Developer's Manual, volume 2, `CPUID` and `XGETBV`).
fn is_supported() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // The configuration of the tiles, and the tiles.
    const REGISTERS: u64 = (1 << 17) | (1 << XTILEDATA);
    let listed = __cpuid_count(7, 0).edx;
    // SAFETY: the operating system lets programs read which registers it saves if it saves AVX-512 registers.
    let saved = unsafe { _xgetbv(0) };
    listed & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && saved & REGISTERS == REGISTERS
}

/// The number of the tiles among the registers that operating systems save.
const XTILEDATA: u32 = 18;

/// Asks Linux to let this process use tiles. The permission is for all threads of the process, running and
/// future ones. Linux refuses it if a thread's stack for signals is too small to save the tiles.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    // `asm/prctl.h`.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    // SAFETY: the call reads and writes no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, libc::c_long::from(XTILEDATA)) == 0 }
}

/// Other systems are not asked: each has its own call for it.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
