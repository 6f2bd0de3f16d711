//! The rates that are assumed for what is not measured: of the devices of a run, and of the links between them.

use pipewright::device::{DeviceChoice, FoundDevice, found};
use pipewright_schedule::analytic::PeakRates;
use pipewright_schedule::profile::LinkProfile;

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;

/// The rates of a thread of a processor.
const THREAD: PeakRates = PeakRates { flops_per_s: 6e10, bytes_per_s: 1e10 };
/// The rates of a GPU whose name is not in [`GPUS`].
const GPU: PeakRates = PeakRates { flops_per_s: 2e13, bytes_per_s: 5e11 };
/// Parts of the names of GPUs, with their peak rates in 32 bits and of their memory.
const GPUS: [(&str, f64, f64); 8] = [
    ("H200", 6.7e13, 4.8e12),
    ("H100", 6.7e13, 3.35e12),
    ("A100", 1.95e13, 2.0e12),
    ("L40", 9.1e13, 8.6e11),
    ("4090", 8.3e13, 1.0e12),
    ("3090", 3.6e13, 9.4e11),
    ("V100", 1.57e13, 9.0e11),
    ("T4", 8.1e12, 3.2e11),
];

/// Returns the assumed rates of a rank. Ranks with different devices have those of the first rank.
pub(crate) fn assumed_rates(settings: &Settings) -> PeakRates {
    if settings.run.devices.are_processor() {
        let threads = f64::from(settings.pipeline.threads_per_rank);
        return PeakRates { flops_per_s: THREAD.flops_per_s * threads, ..THREAD };
    }
    let name = device_name(settings);
    let known = GPUS.iter().find(|(part, _, _)| name.contains(part));
    known.map_or(GPU, |&(_, flops_per_s, bytes_per_s)| PeakRates { flops_per_s, bytes_per_s })
}

/// Returns the assumed link between two ranks.
pub(crate) fn assumed_link(settings: &Settings) -> LinkProfile {
    match settings.pipeline.transport {
        TransportChoice::Mpi => LinkProfile::new(5e-5, 1e9),
        TransportChoice::Local if settings.run.devices.are_processor() => LinkProfile::new(2e-5, 5e9),
        TransportChoice::Local => LinkProfile::new(2e-5, 2e10),
    }
}

/// Returns the name of the first rank's device, such as the product's.
pub(crate) fn device_name(settings: &Settings) -> String {
    let choice = settings.run.devices.first();
    let name = |choice: &DeviceChoice| {
        let is_it = |found: &FoundDevice| found.choice == *choice;
        let is_like_it = |found: &FoundDevice| found.choice.back_end == choice.back_end;
        let devices = found();
        let device = devices.iter().find(|device| is_it(device));
        device.or(devices.iter().find(|device| is_like_it(device))).map(|device| device.name.clone())
    };
    if settings.run.devices.are_processor() {
        processor_name()
    } else {
        name(choice).unwrap_or_else(|| choice.to_string())
    }
}

fn processor_name() -> String {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing().with_cpu(sysinfo::CpuRefreshKind::nothing()),
    );
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
    brand.filter(|brand| !brand.is_empty()).unwrap_or_else(|| "processor".to_owned())
}
