//! The rates that are assumed for devices and for the links between ranks, if they were not measured.

use crate::profile::LinkProfile;

/// The rates of a thread of a processor.
const THREAD: PeakRates = PeakRates { flops_per_s: 6e10, bytes_per_s: 1e10 };
/// The rates of a GPU whose name is not in [`GPUS`].
const GPU: PeakRates = PeakRates { flops_per_s: 2e13, bytes_per_s: 5e11 };
/// Words in the names of GPUs, with their peak rates of 32-bit numbers, of dense products of 16-bit numbers
/// with 32-bit sums, and of their memory, from NVIDIA's data sheets.
const GPUS: [(&str, f64, f64, f64); 9] = [
    ("H200", 6.7e13, 9.89e14, 4.8e12),
    ("H100", 6.7e13, 9.89e14, 3.35e12),
    ("A100", 1.95e13, 3.12e14, 2.0e12),
    ("L40S", 9.1e13, 3.62e14, 8.6e11),
    ("L40", 9.1e13, 1.81e14, 8.6e11),
    ("4090", 8.3e13, 1.65e14, 1.0e12),
    ("3090", 3.6e13, 7.1e13, 9.4e11),
    ("V100", 1.57e13, 1.25e14, 9.0e11),
    ("T4", 8.1e12, 6.5e13, 3.2e11),
];

/// The peak rates of a rank's share of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeakRates {
    /// Floating point operations per second; a multiplication and an addition are two.
    pub flops_per_s: f64,
    /// Bytes per second to and from memory.
    pub bytes_per_s: f64,
}

impl PeakRates {
    /// Returns the assumed rates of a processor that computes with this many threads.
    pub fn processor(threads: u32) -> Self {
        Self { flops_per_s: THREAD.flops_per_s * f64::from(threads), ..THREAD }
    }

    /// Returns the assumed rates of a GPU, by the name of the product.
    ///
    /// ```
    /// use pipewright_schedule::analytic::PeakRates;
    /// assert_eq!(PeakRates::gpu("NVIDIA H100 80GB HBM3").bytes_per_s, 3.35e12);
    /// ```
    pub fn gpu(name: &str) -> Self {
        known(name).map_or(GPU, |&(_, flops_per_s, _, bytes_per_s)| Self { flops_per_s, bytes_per_s })
    }

    /// Returns the peak rate of a GPU's matrix products in floating-point operations per second, of 16-bit
    /// numbers if `is_half`, by the name of the product; `None` if the product is not known, is a form with
    /// other rates, or is a part of a GPU.
    ///
    /// ```
    /// use pipewright_schedule::analytic::PeakRates;
    /// assert_eq!(PeakRates::data_sheet("NVIDIA A100-SXM4-80GB", true), Some(3.12e14));
    /// assert_eq!(PeakRates::data_sheet("NVIDIA RTX A1000", true), None);
    /// ```
    pub fn data_sheet(name: &str, is_half: bool) -> Option<f64> {
        let has = |word: &str| words(name).any(|found| found.eq_ignore_ascii_case(word));
        if ["PCIe", "NVL", "MIG", "Laptop", "Ti", "D"].into_iter().any(has) {
            return None;
        }
        known(name).map(|&(_, single, half, _)| if is_half { half } else { single })
    }
}

fn known(name: &str) -> Option<&'static (&'static str, f64, f64, f64)> {
    GPUS.iter().find(|(word, ..)| words(name).any(|found| found == *word))
}

fn words(name: &str) -> impl Iterator<Item = &str> {
    name.split(|letter: char| !letter.is_alphanumeric())
}

/// How two ranks are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// They are processes.
    Processes,
    /// They are threads of a process that compute on the processor.
    Threads,
    /// They are threads of a process that compute on devices.
    Devices,
}

impl Connection {
    /// Returns the link that is assumed.
    pub fn assumed_link(self) -> LinkProfile {
        match self {
            Self::Processes => LinkProfile::new(5e-5, 1e9),
            Self::Threads => LinkProfile::new(2e-5, 5e9),
            Self::Devices => LinkProfile::new(2e-5, 2e10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expected: Option<[f64; 2]>) {
        let found = [false, true].map(|is_half| PeakRates::data_sheet(name, is_half));
        assert_eq!(found, expected.map_or([None, None], |rates| rates.map(Some)), "{name}");
    }

    #[test]
    fn names_are_compared_word_by_word() {
        check("NVIDIA H100 80GB HBM3", Some([6.7e13, 9.89e14]));
        check("NVIDIA A100-SXM4-80GB", Some([1.95e13, 3.12e14]));
        check("NVIDIA L40S", Some([9.1e13, 3.62e14]));
        check("NVIDIA GeForce RTX 4090", Some([8.3e13, 1.65e14]));
        let unknown = ["NVIDIA RTX A1000", "NVIDIA T400", "NVIDIA H100 PCIe", "NVIDIA H200 NVL"];
        unknown.into_iter().for_each(|name| check(name, None));
        let other_rates = ["4090 Laptop GPU", "4090 D", "3090 Ti"];
        other_rates.into_iter().for_each(|name| check(&format!("NVIDIA GeForce RTX {name}"), None));
        check("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None);
    }
}
