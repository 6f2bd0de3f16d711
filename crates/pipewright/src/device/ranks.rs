//! The devices of a pipeline's ranks.

use std::sync::Arc;

use burn::tensor::Device;

use super::choice::DeviceChoice;
use super::error::DeviceError;
use super::found::open;
use crate::ids::WorldRank;

/// The devices of the ranks: rank `r` of the world has entry `r` modulo their number. Without entries, each
/// stage stays on the device on which its module was made.
#[derive(Clone, Debug, Default)]
pub struct Devices(Arc<[Device]>);

impl Devices {
    /// Returns the devices that `choices` name.
    ///
    /// # Errors
    /// When this build cannot use one of them, or it does not exist.
    pub fn open(choices: &[DeviceChoice]) -> Result<Self, DeviceError> {
        choices.iter().map(open).collect::<Result<Vec<_>, _>>().map(Self::from)
    }

    /// Returns the device of a rank of the world; `None` without entries.
    pub fn of(&self, rank: WorldRank) -> Option<&Device> {
        self.0.get(rank.index().checked_rem(self.0.len())?)
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that no two of `ranks` ranks have the same device.
    ///
    /// # Errors
    /// When two ranks have the same device.
    pub fn require_exclusive(&self, ranks: usize) -> Result<(), DeviceError> {
        let own = self.0.iter().take(ranks).enumerate();
        let devices = own.filter(|&(index, device)| !self.0[..index].contains(device)).count();
        if devices == ranks { Ok(()) } else { Err(DeviceError::Shared { ranks, devices }) }
    }
}

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices.into_iter().map(Device::without_autodiff).collect())
    }
}

/// The device of all ranks.
impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        vec![device].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_devices_in_turn_unless_each_needs_its_own() {
        let devices = Devices::open(&[DeviceChoice::FLEX]).expect("a processor exists");
        assert_eq!(devices.of(WorldRank::new(5)), Some(&Device::flex()));
        assert_eq!(Devices::default().of(WorldRank::new(0)), None);
        assert_eq!(devices.require_exclusive(1), Ok(()));
        let error = devices.require_exclusive(2).expect_err("one for two");
        assert!(error.to_string().starts_with("2 ranks need different devices, but have only 1:"), "{error}");
        let same = Devices::from(vec![Device::flex(), Device::flex()]);
        assert_eq!(same.require_exclusive(2), Err(DeviceError::Shared { ranks: 2, devices: 1 }));
        assert_eq!(same.require_exclusive(1), Ok(()));
    }
}
