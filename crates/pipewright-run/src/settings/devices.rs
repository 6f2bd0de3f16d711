//! The keys `device`, `devices` and `exclusive` of the `[run]` section: the devices that ranks compute on.

use std::fmt;

use pipewright::device::{BackEnd, DeviceChoice, DeviceError, Devices};
use pipewright::ids::WorldRank;
use pipewright::tensor::Precision;
use pipewright_models::training_memory::ComputeDevices;
use serde::Serialize;
use sysinfo::System;

use crate::settings::section::Section;

/// The devices of the ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceSettings {
    /// The device of all ranks; `None` if `devices` is written.
    pub(super) device: Option<DeviceChoice>,
    /// Rank `r` has entry `r` modulo their number; empty unless it is written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) devices: Vec<DeviceChoice>,
    /// Whether ranks that would share a device are refused.
    pub(super) exclusive: bool,
}

impl DeviceSettings {
    /// Returns the entries, at least one.
    fn choices(&self) -> &[DeviceChoice] {
        self.device.as_ref().map_or(&self.devices, std::slice::from_ref)
    }

    /// Returns the device of the first rank.
    pub fn first(&self) -> &DeviceChoice {
        &self.choices()[0]
    }

    /// Returns the devices of some ranks, which get the numbers from 0 in this order.
    #[must_use]
    pub fn of_ranks(&self, ranks: impl IntoIterator<Item = WorldRank>) -> Self {
        let devices = match self.device {
            Some(_) => Vec::new(),
            None => ranks.into_iter().map(|rank| self.choice_of(rank)).collect(),
        };
        Self { devices, ..self.clone() }
    }

    /// Returns whether all ranks compute on the processor.
    pub fn are_processor(&self) -> bool {
        self.choices().iter().all(is_processor)
    }

    /// Returns what the ranks of a run of `ranks` ranks compute on, as far as it decides which tensors they
    /// keep.
    pub fn compute_devices(&self, ranks: u32) -> ComputeDevices {
        let choices = self.choices();
        let used = &choices[..choices.len().min(ranks as usize)];
        if used.iter().all(is_processor) {
            ComputeDevices::Processor
        } else if used.iter().any(is_processor) {
            ComputeDevices::Mixed
        } else {
            ComputeDevices::Others
        }
    }

    /// Finds the devices of all of `ranks` ranks.
    ///
    /// # Errors
    /// When a device does not exist or does not compute in `precision`, or ranks would share one and may not.
    pub fn open(&self, ranks: u32, precision: Precision) -> Result<Devices, DeviceFailure> {
        let devices = open(self.choices(), precision)?;
        if self.exclusive {
            devices.require_exclusive(ranks as usize)?;
        }
        Ok(devices)
    }

    /// Finds the device of one rank of the world. The devices of the other ranks may be on other machines.
    ///
    /// # Errors
    /// When the device does not exist or does not compute in `precision`.
    pub fn open_one(&self, rank: WorldRank, precision: Precision) -> Result<Devices, DeviceFailure> {
        open(&[self.choice_of(rank)], precision)
    }

    /// Returns the name of a rank's device among all machines; `None` if ranks may share it.
    pub fn own_name(&self, rank: WorldRank) -> Option<String> {
        let host = System::host_name().unwrap_or_else(|| "this machine".to_owned());
        self.exclusive.then(|| format!("`{}` of {host}", self.choice_of(rank).resolved()))
    }

    /// Returns the device of a rank as the configuration names it.
    pub fn choice_of(&self, rank: WorldRank) -> DeviceChoice {
        let choices = self.choices();
        choices[rank.index() % choices.len()]
    }
}

fn is_processor(choice: &DeviceChoice) -> bool {
    choice.back_end == BackEnd::Flex
}

/// Why the devices of a run cannot be used.
#[derive(thiserror::Error)]
pub enum DeviceFailure {
    /// A device does not exist, or ranks would share it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device does not compute in the precision of the run.
    #[error(
        "the device `{device}` does not compute in {precision}: use another device or another `run.precision`"
    )]
    Precision {
        /// The device.
        device: DeviceChoice,
        /// The precision.
        precision: Precision,
    },
}

pipewright_schedule::message_as_debug!(DeviceFailure);

fn open(choices: &[DeviceChoice], precision: Precision) -> Result<Devices, DeviceFailure> {
    let devices = Devices::open(choices)?;
    for (rank, &device) in (0..).map(WorldRank::new).zip(choices) {
        if devices.of(rank).is_some_and(|device| !precision.is_computed_on(device)) {
            return Err(DeviceFailure::Precision { device, precision });
        }
    }
    Ok(devices)
}

/// Prints one name if all entries are the same.
impl fmt::Display for DeviceSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<String> = self.choices().iter().map(ToString::to_string).collect();
        names.dedup();
        f.write_str(&names.join(", "))
    }
}

/// Reads the keys. Between `device` and `devices`, an argument of the command line overrides a file.
pub(super) fn read(section: &mut Section<'_>) -> DeviceSettings {
    let one = section.text("device").and_then(|text| choice(section, "device", &text));
    let is_written = section.is_written("devices");
    let list = section.texts("devices").unwrap_or_default();
    let mut list: Vec<DeviceChoice> =
        list.iter().filter_map(|text| choice(section, "devices", text)).collect();
    let exclusive = section.flag("exclusive");
    let mut device = if is_written { None } else { Some(one.unwrap_or_default()) };
    if is_written && section.is_written("device") {
        match (section.is_argument("device"), section.is_argument("devices")) {
            (true, false) => (device, list) = (Some(one.unwrap_or_default()), Vec::new()),
            (false, true) => {}
            _ => section.report("devices", "`device` and `devices` are both written", "remove one of them"),
        }
    }
    if device.is_none() && list.is_empty() {
        // The list has a mistake, which is reported.
        device = Some(DeviceChoice::FLEX);
    }
    DeviceSettings { device, devices: list, exclusive }
}

fn choice(section: &mut Section<'_>, key: &'static str, text: &str) -> Option<DeviceChoice> {
    match text.parse::<DeviceChoice>() {
        Ok(choice) if !choice.back_end.is_compiled_in() => {
            section.report_error(key, DeviceError::NotCompiledIn { choice });
        }
        Ok(choice) => return Some(choice),
        Err(DeviceError::Unknown { name }) => {
            section.unknown_word(key, &name, BackEnd::ALL.into_iter().map(BackEnd::name));
        }
        Err(error) => section.report_error(key, error),
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_devices_of_the_ranks_decide_what_is_kept() {
        let check = |names: &[&str], ranks, expected| {
            let devices = names.iter().map(|name| name.parse().expect("a device")).collect();
            let settings = DeviceSettings { device: None, devices, exclusive: false };
            assert_eq!(settings.compute_devices(ranks), expected, "{names:?}, {ranks} ranks");
        };
        check(&["flex"], 4, ComputeDevices::Processor);
        check(&["cuda"], 4, ComputeDevices::Others);
        check(&["cuda:0", "cuda:1", "flex"], 2, ComputeDevices::Others);
        check(&["cuda:0", "cuda:1", "flex"], 3, ComputeDevices::Mixed);
        check(&["flex", "cuda"], 1, ComputeDevices::Processor);
    }
}
