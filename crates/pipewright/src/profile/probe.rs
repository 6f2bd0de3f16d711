//! The hook that measures: it waits for the device after each action, so that the action's event has the time
//! of its computation, and records the bytes that the first rank holds, or the times in which backwards compute
//! parts of layers again.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use pipewright_schedule::Action;

use crate::device::Devices;
use crate::hook::ActionHook;
use crate::ids::WorldRank;
use crate::memory::{held_and_peak, restart_peak};
use crate::nn::{PartTimes, timed_parts};

/// The bytes that a rank holds around an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) action: Action,
    pub(super) before: u64,
    pub(super) after: u64,
    /// The most bytes during the action.
    pub(super) peak: u64,
}

/// The times in which an action of a rank computed parts of layers again.
pub(super) type Remade = (Action, PartTimes);

/// The records of a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Probed {
    /// Nothing if the memory is not counted.
    pub(super) holdings: Vec<Holding>,
    /// The gradients of inputs of all ranks; nothing if no times are taken.
    pub(super) remade: Vec<Remade>,
}

/// The hook.
pub(super) struct Probe {
    pub(super) devices: Devices,
    /// Whether it takes the times in which parts of layers are computed again.
    times_parts: bool,
    probed: Mutex<Probed>,
}

impl Probe {
    /// Makes a probe that has room for the actions of a step. The list must not grow on a rank's thread,
    /// because its memory would be counted there.
    pub(super) fn new(devices: Devices, actions: usize, times_parts: bool) -> Self {
        let holdings = Vec::with_capacity(actions);
        Self { devices, times_parts, probed: Mutex::new(Probed { holdings, ..Probed::default() }) }
    }

    /// Returns what was recorded since the last call.
    pub(super) fn take(&self) -> Probed {
        let mut probed = self.probed.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = probed.clone();
        probed.holdings.clear();
        probed.remade.clear();
        taken
    }

    /// Runs an action, and waits for the device.
    fn run(&self, rank: WorldRank, run: &mut dyn FnMut()) {
        run();
        if let Some(device) = self.devices.of(rank) {
            // An error of the device is reported when its results are read.
            let _ = device.sync();
        }
    }
}

impl ActionHook for Probe {
    fn around(&self, rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
        if self.times_parts {
            let ((), times) = timed_parts(|| self.run(rank, run));
            if let Action::InputBackward { .. } = action {
                self.probed.lock().unwrap_or_else(PoisonError::into_inner).remade.push((action, times));
            }
            return;
        }
        let before = held_and_peak();
        restart_peak();
        self.run(rank, run);
        // The memory of other devices is not counted on the thread of their rank.
        let is_counted =
            rank.get() == 0 && self.devices.of(rank).is_none_or(|device| *device == Device::flex());
        if let (true, Some((before, _)), Some((after, peak))) = (is_counted, before, held_and_peak()) {
            let holdings = &mut self.probed.lock().unwrap_or_else(PoisonError::into_inner).holdings;
            if holdings.len() < holdings.capacity() {
                holdings.push(Holding { action, before, after, peak });
            }
        }
    }
}
