//! Compares what the ranks on each device need with the device's memory, for runs that do not compute on the processor
//! alone.

use pipewright::device::{BackEnd, DeviceChoice, describe};
use pipewright::ids::WorldRank;
use pipewright_schedule::words::counted;
use serde_json::{Value, json};
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::bytes;
use crate::failure::{Exit, Failure};

/// A device, and what its ranks need.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DeviceLoad {
    device: DeviceChoice,
    /// Its memory in bytes; `None` if the back end does not know it.
    memory: Option<u64>,
    /// The ranks that compute on it at the same time, each with what it needs in bytes.
    ranks: Vec<(WorldRank, u64)>,
}

/// Returns the devices of a run, each with its ranks. Processes of ranks with devices of the same name may be on several
/// machines, so each of them counts alone, and only the one that needs the most.
pub(crate) fn device_loads(settings: &Settings, needs: impl Fn(WorldRank) -> u64) -> Vec<DeviceLoad> {
    let ranks = settings.mesh.ranks(settings.pipeline.ranks);
    let ranks = (0..ranks).map(|rank| {
        let rank = WorldRank::new(rank);
        (settings.run.devices.choice_of(rank), rank, needs(rank))
    });
    let is_local = settings.pipeline.transport == TransportChoice::Local;
    loads(ranks, is_local, memory_of)
}

/// Returns the least memory that a rank of a run has if the ranks of each device share it equally; `None` if that of a
/// device is not known.
pub(crate) fn least_share(settings: &Settings) -> Option<u64> {
    let ranks = settings.mesh.ranks(settings.pipeline.ranks);
    let ranks = (0..ranks).map(WorldRank::new).map(|rank| (settings.run.devices.choice_of(rank), rank, 0));
    let shares = loads(ranks, true, memory_of).into_iter();
    shares.map(|load| Some(load.memory? / load.ranks.len().max(1) as u64)).min().flatten()
}

fn memory_of(device: DeviceChoice) -> Option<u64> {
    match device.back_end {
        BackEnd::Flex => machine_bytes(),
        _ => describe(device)?.memory,
    }
}

/// Returns the memory that this process may use, in bytes: that of the machine, or the limit of its control group.
pub(crate) fn machine_bytes() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let of_process = sysinfo::get_current_pid().ok().and_then(|pid| {
        system.refresh_processes_specifics(
            ProcessesToUpdate::Some(&[pid]),
            false,
            ProcessRefreshKind::nothing(),
        );
        system.process(pid)?.cgroup_limits()
    });
    let limits = [of_process, system.cgroup_limits()].into_iter().flatten().map(|limits| limits.total_memory);
    limits.chain([system.total_memory()]).filter(|bytes| *bytes > 0).min()
}

fn loads(
    ranks: impl Iterator<Item = (DeviceChoice, WorldRank, u64)>,
    is_local: bool,
    memory: impl Fn(DeviceChoice) -> Option<u64>,
) -> Vec<DeviceLoad> {
    let mut loads: Vec<DeviceLoad> = Vec::new();
    for (device, rank, needed) in ranks {
        let device = device.resolved();
        match loads.iter_mut().find(|load| load.device == device) {
            None => loads.push(DeviceLoad { device, memory: memory(device), ranks: vec![(rank, needed)] }),
            Some(load) if is_local => load.ranks.push((rank, needed)),
            Some(load) if load.ranks[0].1 < needed => load.ranks[0] = (rank, needed),
            Some(_) => {}
        }
    }
    loads
}

impl DeviceLoad {
    fn needed(&self) -> u64 {
        self.ranks.iter().fold(0, |sum, (_, needed)| sum.saturating_add(*needed))
    }

    /// Returns what the device has and what its ranks need as JSON.
    pub(crate) fn json(&self) -> Value {
        json!({ "device": self.device.to_string(), "memory": self.memory, "needed": self.needed() })
    }

    /// Returns what the device has and what its ranks need.
    pub(crate) fn balance(&self) -> String {
        let has = match self.memory {
            Some(memory) => format!("{} of memory", bytes(memory)),
            None => "an amount of memory that its back end does not know".to_owned(),
        };
        format!("`{}` has {has}; {} {}", self.device, self.who(), bytes(self.needed()))
    }

    /// Returns the ranks as the subject of a sentence.
    fn who(&self) -> String {
        match &self.ranks[..] {
            [(rank, _)] => format!("rank {rank} needs"),
            ranks => format!("its {} together need", counted(ranks.len(), "rank")),
        }
    }

    /// Fails with [`Exit::CheckFailed`] if the ranks need more than the device has.
    pub(crate) fn require_fit(&self) -> Result<(), Failure> {
        let Some(short) =
            self.memory.and_then(|memory| self.needed().checked_sub(memory)).filter(|it| *it > 0)
        else {
            return Ok(());
        };
        let most = self.ranks.iter().max_by_key(|(rank, needed)| (*needed, u32::MAX - rank.get()));
        let most = match most {
            Some((rank, needed)) if self.ranks.len() > 1 => {
                format!("; rank {rank} needs the most, {}", bytes(*needed))
            }
            _ => String::new(),
        };
        Err(Failure::new(
            Exit::CheckFailed,
            format!(
                "the run does not fit into memory: {}, which is {} too little{most}; use more devices with more \
                 pipeline.ranks and run.devices, mesh.data_parallel_mode=sharded, pipeline.recompute=stage, fewer rows a \
                 microbatch, or a smaller model",
                self.balance(),
                bytes(short)
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the loads of ranks on these devices. Rank `r` needs `10 (r + 1)` bytes, and each GPU has 45.
    fn of(devices: &[&str], is_local: bool) -> Vec<DeviceLoad> {
        let ranks = (0..).map(WorldRank::new).zip(devices).map(|(rank, device)| {
            let device: DeviceChoice = device.parse().expect("a device");
            (device, rank, 10 * u64::from(rank.get() + 1))
        });
        loads(ranks, is_local, |device| match device.back_end {
            BackEnd::Cuda => Some(45),
            BackEnd::Flex => Some(1_000),
            _ => None,
        })
    }

    fn failures(devices: &[&str], is_local: bool) -> Vec<String> {
        let failures = of(devices, is_local).into_iter().filter_map(|load| load.require_fit().err());
        failures.map(|failure| failure.text()).collect()
    }

    #[test]
    fn ranks_on_a_device_share_its_memory() {
        assert!(failures(&["cuda:0", "cuda:1", "cuda:0"], true).is_empty());
        // `cuda` is the first one, so ranks 0 and 3 share it.
        let failed = failures(&["cuda", "cuda:1", "flex", "cuda:0"], true);
        let expected = "`cuda:0` has 45 B of memory; its 2 ranks together need 50 B, which is 5 B too little; rank 3 needs \
                        the most, 40 B; use more devices";
        assert!(failed.len() == 1 && failed[0].contains(expected), "{failed:?}");
    }

    #[test]
    fn processes_may_be_on_several_machines() {
        assert!(failures(&["cuda"; 4], false).is_empty());
        let failed = failures(&["cuda"; 5], false);
        assert!(
            failed.len() == 1 && failed[0].contains("; rank 4 needs 50 B, which is 5 B too little; use"),
            "{failed:?}"
        );
    }

    #[test]
    fn memory_that_is_not_known_is_not_compared() {
        let loads = of(&["wgpu"; 9], true);
        assert!(loads[0].require_fit().is_ok());
        let expected =
            "`wgpu` has an amount of memory that its back end does not know; its 9 ranks together need 450 B";
        assert_eq!(loads[0].balance(), expected);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(machine_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
