//! The time of a product of matrices from its shape.
//!
//! A product computes tiles of its output, as many at once as there are multiprocessors. On average, half of
//! them are idle in the last wave, and each tile spends some of its time on its first loads and on its store.
//! So a product of `m x k` and `k x n` takes
//!
//! ```text
//! 2 (m n + half a wave of tiles) (k + ramp) / sustained rate, or its bytes / bandwidth, whichever is longer
//! ```
//!
//! The mean over the last wave makes the efficiency grow with `m` and never fall, where exact waves would
//! jump by some percent from one size to the next.

use crate::layout::Precision;
use crate::machine::Machine;
use crate::measured_times::MeasuredProduct;
use crate::setting::Setting;

/// The elements of the output of a tile: 128 x 256, the largest tile of CUTLASS's kernels.
const TILE: f64 = 128.0 * 256.0;
/// The steps along `k` that the first loads and the store of a tile are worth.
const RAMP: f64 = 64.0;
/// The rows that each of several products is padded by: half the height of a tile.
const PADDING: f64 = 64.0;

/// A product of `rows x inner` and `inner x columns`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// `m`.
    pub rows: f64,
    /// `n`.
    pub columns: f64,
    /// `k`.
    pub inner: f64,
    /// The bytes of an element of the output: 2 or 4, or 8 for sums of gradients, which are also read.
    pub output_bytes: f64,
}

impl Product {
    /// Returns the operations.
    pub fn operations(&self) -> f64 {
        2.0 * self.rows * self.columns * self.inner
    }

    /// Returns the seconds of the product in `precision` on one GPU.
    pub fn seconds(&self, setting: &Setting<'_>, precision: Precision) -> f64 {
        self.grouped_seconds(1.0, setting, precision)
    }

    /// Returns the seconds of `groups` such products, as products of experts are. If there are several, each pads
    /// its rows to tiles, by half a tile on average. One kernel with all products fills waves with tiles of all
    /// of them; kernels for each product, on streams of their own, fill the half of them.
    /// A product whose shape was measured takes the measured time.
    pub fn grouped_seconds(&self, groups: f64, setting: &Setting<'_>, precision: Precision) -> f64 {
        let machine = setting.machine;
        let shape = [self.rows, self.columns, self.inner];
        if let Some(seconds) = machine.measured.product(shape, precision) {
            return groups * seconds;
        }
        let bytes = precision.bytes();
        let waves =
            if setting.layout.implementation.has_one_grouped_kernel() { 1.0 } else { groups.max(2.0) / 2.0 };
        let half_wave = 0.5 * f64::from(machine.multiprocessors) * TILE * waves;
        let rows = self.rows + if groups > 1.0 { PADDING } else { 0.0 };
        let computed = 2.0 * (groups * rows * self.columns + half_wave) * (self.inner + RAMP);
        let inputs = (self.rows + self.columns) * self.inner * bytes;
        let moved = groups * (inputs + self.rows * self.columns * self.output_bytes);
        let arithmetic = computed / setting.product_rate(precision);
        arithmetic.max(moved / machine.kernel_bandwidth()) + groups * machine.constants.launch
    }
}

impl MeasuredProduct {
    /// Returns the operations.
    pub(crate) fn operations(&self) -> f64 {
        2.0 * self.rows * self.columns * self.inner
    }

    /// Returns the share of the peak that the product reaches.
    pub(crate) fn share_of_peak(&self, machine: &Machine) -> f64 {
        self.operations() / self.seconds / machine.peak(self.precision)
    }
}

impl Machine {
    /// Returns the operations per second that large products sustain.
    pub fn product_rate(&self, precision: Precision) -> f64 {
        let half = self.half_peak() * self.constants.product;
        let eight = self.fp8.map_or(half, |fp8| half.max(fp8 * self.constants.product_fp8));
        match precision {
            Precision::Half => half,
            Precision::Fp8 | Precision::Mxfp8 => eight,
            Precision::Nvfp4 => {
                self.nvfp4.map_or(eight, |nvfp4| eight.max(nvfp4 * self.constants.product_nvfp4))
            }
            Precision::Single => self.single_peak() * self.constants.product,
        }
    }

    /// Returns whether the machine has products of a precision.
    pub fn has_rate(&self, precision: Precision) -> bool {
        match precision {
            Precision::Half | Precision::Single => true,
            Precision::Fp8 | Precision::Mxfp8 => self.fp8.is_some(),
            Precision::Nvfp4 => self.nvfp4.is_some(),
        }
    }

    /// Returns the dense peak of a precision, in operations per second. If the machine does not have the
    /// precision, it is the peak of the next wider one.
    pub fn peak(&self, precision: Precision) -> f64 {
        let eight = self.fp8.unwrap_or_else(|| self.half_peak());
        match precision {
            Precision::Half => self.half_peak(),
            Precision::Fp8 | Precision::Mxfp8 => eight,
            Precision::Nvfp4 => self.nvfp4.unwrap_or(eight),
            Precision::Single => self.single_peak(),
        }
    }

    /// Returns the bytes per second that elementwise kernels reach.
    pub fn kernel_bandwidth(&self) -> f64 {
        self.memory_bandwidth * self.constants.memory
    }

    /// Returns the peak in bf16, or half of the peak in FP8 or the peak in f32 if the former is not known. With
    /// none, it is 0, and products take infinitely long; files without all three are refused.
    pub fn half_peak(&self) -> f64 {
        self.bf16.or(self.fp8.map(|fp8| fp8 / 2.0)).or(self.single).unwrap_or(0.0)
    }

    /// Returns the peak in f32. If it is not known, it is half of the peak in bf16, as tensor cores have in TF32.
    pub fn single_peak(&self) -> f64 {
        self.single.unwrap_or(self.half_peak() / 2.0)
    }
}
