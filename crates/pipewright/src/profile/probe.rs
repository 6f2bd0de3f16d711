//! The hook that measures: it waits for the device after each action, so that the action's event has the time
//! of its computation, and records the bytes that the first rank holds.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use pipewright_schedule::Action;

use crate::device::Devices;
use crate::hook::ActionHook;
use crate::ids::WorldRank;
use crate::memory::{held_and_peak, restart_peak};

/// The bytes that a rank holds around an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) action: Action,
    pub(super) before: u64,
    pub(super) after: u64,
    /// The most bytes during the action.
    pub(super) peak: u64,
}

/// The hook.
pub(super) struct Probe {
    pub(super) devices: Devices,
    holdings: Mutex<Vec<Holding>>,
}

impl Probe {
    /// Makes a probe that has room for the actions of a step. The list must not grow on a rank's thread,
    /// because its memory would be counted there.
    pub(super) fn new(devices: Devices, actions: usize) -> Self {
        Self { devices, holdings: Mutex::new(Vec::with_capacity(actions)) }
    }

    /// Returns what was recorded since the last call; nothing if the memory is not counted.
    pub(super) fn take(&self) -> Vec<Holding> {
        let mut holdings = self.holdings.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = holdings.clone();
        holdings.clear();
        taken
    }
}

impl ActionHook for Probe {
    fn around(&self, rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
        let before = held_and_peak();
        restart_peak();
        run();
        if let Some(device) = self.devices.of(rank) {
            // An error of the device is reported when its results are read.
            let _ = device.sync();
        }
        // The memory of other devices is not counted on the thread of their rank.
        let is_counted =
            rank.get() == 0 && self.devices.of(rank).is_none_or(|device| *device == Device::flex());
        if let (true, Some((before, _)), Some((after, peak))) = (is_counted, before, held_and_peak()) {
            let mut holdings = self.holdings.lock().unwrap_or_else(PoisonError::into_inner);
            if holdings.len() < holdings.capacity() {
                holdings.push(Holding { action, before, after, peak });
            }
        }
    }
}
