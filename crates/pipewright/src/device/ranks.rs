//! The devices of a pipeline's ranks, and the numbers of their threads.

use std::sync::Arc;

use burn::tensor::Device;
use serde::{Serialize, Serializer};

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

/// The numbers of threads that ranks compute with: rank `r` of the world has entry `r` modulo their number. The
/// results have the same bits for all numbers.
///
/// ```
/// use pipewright::device::RankThreads;
/// use pipewright::ids::WorldRank;
///
/// let threads = RankThreads::from(vec![4, 1]);
/// let of_ranks: Vec<usize> = (0..3).map(|rank| threads.of(WorldRank::new(rank))).collect();
/// assert_eq!(of_ranks, [4, 1, 4]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankThreads(Arc<[usize]>);

impl RankThreads {
    /// Returns the number of a rank of the world, which is at least 1.
    pub fn of(&self, rank: WorldRank) -> usize {
        let entry = rank.index().checked_rem(self.0.len()).map_or(1, |index| self.0[index]);
        entry.max(1)
    }

    /// Returns the numbers of some ranks, which get the numbers from 0 in this order.
    #[must_use]
    pub fn of_ranks(&self, ranks: impl IntoIterator<Item = WorldRank>) -> Self {
        ranks.into_iter().map(|rank| self.of(rank)).collect::<Vec<_>>().into()
    }

    /// Returns the sum over the ranks.
    pub fn sum(&self, ranks: impl IntoIterator<Item = WorldRank>) -> usize {
        ranks.into_iter().map(|rank| self.of(rank)).sum()
    }
}

impl From<Vec<usize>> for RankThreads {
    fn from(threads: Vec<usize>) -> Self {
        Self(threads.into())
    }
}

/// The number of all ranks.
impl From<usize> for RankThreads {
    fn from(threads: usize) -> Self {
        vec![threads].into()
    }
}

/// Writes one number if all entries are the same, and otherwise the list.
impl Serialize for RankThreads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.first() {
            Some(first) if self.0.iter().any(|other| other != first) => self.0.serialize(serializer),
            first => first.unwrap_or(&1).serialize(serializer),
        }
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
