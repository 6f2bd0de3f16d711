//! The rates that are assumed for the devices of a run and the links between its ranks, if they were not
//! measured.

use pipewright::device::found;
use pipewright::ids::WorldRank;
use pipewright_schedule::analytic::{Connection, PeakRates};
use pipewright_schedule::profile::LinkProfile;

use pipewright_run::settings::Settings;
use pipewright_run::settings::pipeline::TransportChoice;

/// Returns the assumed rates of a rank. Ranks with different devices or numbers of threads have the rates of the first
/// rank.
pub(crate) fn assumed_rates(settings: &Settings) -> PeakRates {
    if settings.run.devices.are_processor() {
        PeakRates::processor(settings.pipeline.threads_per_rank.of(WorldRank::new(0)) as u32)
    } else {
        PeakRates::gpu(&device_name(settings))
    }
}

/// Returns the assumed link between two ranks.
pub(crate) fn assumed_link(settings: &Settings) -> LinkProfile {
    let connection = match settings.pipeline.transport {
        TransportChoice::Mpi => Connection::Processes,
        TransportChoice::Local if settings.run.devices.are_processor() => Connection::Threads,
        TransportChoice::Local => Connection::Devices,
    };
    connection.assumed_link()
}

/// Returns the name of the first rank's device, such as the product's.
pub(crate) fn device_name(settings: &Settings) -> String {
    if settings.run.devices.are_processor() {
        return processor_name();
    }
    let choice = settings.run.devices.first();
    let devices = found();
    let same = devices.iter().find(|device| device.choice == *choice);
    let similar = || devices.iter().find(|device| device.choice.back_end == choice.back_end);
    same.or_else(similar).map_or_else(|| choice.to_string(), |device| device.name.clone())
}

fn processor_name() -> String {
    let system = sysinfo::System::new_with_specifics(
        sysinfo::RefreshKind::nothing().with_cpu(sysinfo::CpuRefreshKind::nothing()),
    );
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
    brand.filter(|brand| !brand.is_empty()).unwrap_or_else(|| "processor".to_owned())
}
