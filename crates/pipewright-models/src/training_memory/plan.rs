//! Compares the memory that the ranks of a run need with the memory of the machine, or of their devices.

use pipewright::device::DeviceChoice;
use pipewright::ids::WorldRank;
use pipewright_schedule::held_bytes::HeldBytes;

use crate::training_memory::held::TrainingMemory;

/// The arrangement of the ranks of a run, as far as it decides which of them share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    /// The number of replicas.
    pub replicas: u32,
    /// The number of ranks that compute each stage together. All need the memory of the first.
    pub tensor_ranks: u32,
    /// Whether all ranks are in one process of this machine.
    pub is_local: bool,
}

/// The memory that a run needs, and the memory that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    memory: TrainingMemory,
    shape: RunShape,
    devices: Vec<DeviceLoad>,
    machine: Option<u64>,
    /// The memory of each rank of the world that a profile states; empty without a profile.
    stated: Vec<Option<u64>>,
    /// The bytes of the copies of the state.
    copies: u64,
    /// The most bytes of a rank if all tokens choose experts of one replica.
    one_replica: Option<u64>,
    /// The bytes per second that the ranks together read from the files of the base, if they are known.
    read_rate: Option<u64>,
}

/// A device, and what its ranks need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLoad {
    /// The device.
    pub device: DeviceChoice,
    /// Its memory in bytes; `None` if the back end does not know it.
    pub memory: Option<u64>,
    /// The ranks that compute on it at the same time, each with what it needs in bytes.
    pub ranks: Vec<(WorldRank, u64)>,
}

/// A rank that needs more memory than a profile states for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallRank {
    /// The rank.
    pub rank: WorldRank,
    /// The bytes that it needs.
    pub needed: u64,
    /// The bytes that it has.
    pub available: u64,
}

/// Memory that is too small.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortage<'a> {
    /// The memory of ranks, as a profile states it.
    Ranks(Vec<SmallRank>),
    /// The memory of this machine.
    Machine {
        /// The bytes that are needed: by all ranks, or by the largest one if each is a process.
        needed: u64,
        /// The bytes of the machine.
        available: u64,
    },
    /// The memory of this machine, which holds the copies of the state of ranks on devices.
    Copies {
        /// The bytes of the copies.
        needed: u64,
        /// The bytes of the machine.
        available: u64,
    },
    /// The memory of a device.
    Device {
        /// The device with its ranks.
        load: &'a DeviceLoad,
        /// The bytes that it lacks.
        missing: u64,
    },
}

impl MemoryPlan {
    /// Plans the memory of a run. `machine` is the memory of this machine in bytes; `None` if it is not
    /// known.
    pub fn new(memory: TrainingMemory, shape: RunShape, machine: Option<u64>) -> Self {
        Self {
            memory,
            shape,
            devices: Vec::new(),
            machine,
            stated: Vec::new(),
            copies: 0,
            one_replica: None,
            read_rate: None,
        }
    }

    /// Adds copies of the state in the memory of the machine, with these bytes: of all ranks, or of one rank
    /// if each is a process.
    pub fn with_copies(self, copies: u64) -> Self {
        Self { copies, ..self }
    }

    /// Adds the bytes per second that the ranks together read from the files of the base.
    pub fn with_read_rate(self, read_rate: Option<f64>) -> Self {
        Self { read_rate: read_rate.map(|rate| rate as u64), ..self }
    }

    /// Returns the seconds in which a step reads the base from its files; `None` if it is in memory or the rate is not
    /// known.
    pub fn read_s(&self) -> Option<f64> {
        let step = self.memory.streamed()?.step.saturating_mul(u64::from(self.shape.replicas));
        Some(step as f64 / self.read_rate?.max(1) as f64)
    }

    /// Adds the memory of the ranks for the case that the tokens of all replicas that hold experts together
    /// choose experts of one of them.
    pub fn with_one_replica(self, memory: &TrainingMemory) -> Self {
        Self { one_replica: memory.ranks().iter().map(HeldBytes::total).max(), ..self }
    }

    /// Compares with the memory of each rank of the world, as a profile states it. `None` for a rank whose memory is not
    /// known. If ranks are processes, the memory of this machine and of its devices no longer counts.
    pub fn with_stated(self, stated: Vec<Option<u64>>) -> Self {
        Self { stated, ..self }
    }

    /// Returns the memory of a rank of the world that a profile states.
    pub fn stated(&self, rank: WorldRank) -> Option<u64> {
        self.stated.get(rank.index()).copied().flatten()
    }

    /// Returns the bytes that a rank of the world needs, with its copies of the state if it is a process on the
    /// processor.
    pub fn needed_by(&self, rank: WorldRank) -> u64 {
        let copies = if self.shape.is_local || !self.devices.is_empty() { 0 } else { self.copies };
        self.total_of(rank).saturating_add(copies)
    }

    /// The tensor ranks of a rank are consecutive, and so are the ranks of a replica.
    fn total_of(&self, rank: WorldRank) -> u64 {
        let (ranks, tensor_ranks) = (self.memory.ranks(), self.shape.tensor_ranks.max(1) as usize);
        ranks[rank.index() / tensor_ranks % ranks.len()].total()
    }

    /// Returns the most bytes of a rank for that case; `None` if each replica holds all experts.
    pub fn one_replica(&self) -> Option<u64> {
        self.one_replica
    }

    /// Compares with the memory of devices instead of the machine. `choices` are the devices of all ranks, in
    /// their order, and `memory_of` returns the memory of a device in bytes, if it is known.
    pub fn on_devices(
        self,
        choices: impl IntoIterator<Item = DeviceChoice>,
        memory_of: impl Fn(DeviceChoice) -> Option<u64>,
    ) -> Self {
        let loads = choices.into_iter().zip((0..).map(WorldRank::new));
        let loads = loads.map(|(device, rank)| (device, rank, self.total_of(rank)));
        Self { devices: device_loads(loads, self.shape.is_local, memory_of), ..self }
    }

    /// Returns the memory of the ranks and stages of a replica.
    pub fn memory(&self) -> &TrainingMemory {
        &self.memory
    }

    /// Returns the arrangement of the ranks.
    pub fn shape(&self) -> RunShape {
        self.shape
    }

    /// Returns the devices with their ranks; none if all ranks compute on the processor.
    pub fn devices(&self) -> &[DeviceLoad] {
        &self.devices
    }

    /// Returns the memory of this machine in bytes, if it is known.
    pub fn machine(&self) -> Option<u64> {
        self.machine
    }

    /// Returns the bytes of the copies of the state.
    pub fn copies(&self) -> u64 {
        self.copies
    }

    /// Returns the rank that needs the most memory.
    pub fn largest(&self) -> (usize, HeldBytes) {
        let ranks = self.memory.ranks().iter().copied().enumerate();
        ranks.max_by_key(|(index, rank)| (rank.total(), usize::MAX - index)).unwrap_or_default()
    }

    /// Returns the bytes that this machine must have: the sum of all ranks, in which the bytes that ranks
    /// share count once, or the bytes of the largest rank if each rank is a process, because processes may run
    /// on other machines. Both include the copies.
    pub fn needed(&self) -> u64 {
        let RunShape { replicas, tensor_ranks, is_local } = self.shape;
        let ranks = if is_local {
            let ranks = self.memory.ranks().iter();
            let replica = ranks.fold(0, |sum: u64, rank| sum.saturating_add(rank.total()));
            let all = replica.saturating_mul(replicas.into()).saturating_mul(tensor_ranks.into());
            let again = if self.devices.is_empty() { self.memory.shared_again() } else { 0 };
            let again = again.saturating_mul(replicas.into()).saturating_mul(tensor_ranks.into());
            all.saturating_sub(self.shared().saturating_mul(replicas.saturating_sub(1).into()))
                .saturating_sub(again)
        } else {
            self.largest().1.total()
        };
        ranks.saturating_add(self.copies)
    }

    /// Returns the bytes that replicas hold together; 0 unless there are several in one process, on the
    /// processor.
    pub fn shared(&self) -> u64 {
        let RunShape { replicas, tensor_ranks, is_local } = self.shape;
        let are_together = is_local && replicas > 1 && self.devices.is_empty();
        if are_together { self.memory.shared().saturating_mul(tensor_ranks.into()) } else { 0 }
    }

    /// Returns the first memory that is too small, or all ranks that are, as a profile states it. Memory that is not known
    /// is large enough. Copies of the
    /// state are in the memory of the machine, also the bytes of ranks on devices.
    pub fn shortage(&self) -> Option<Shortage<'_>> {
        let small = |(rank, stated): (WorldRank, &Option<u64>)| {
            let (needed, available) = (self.needed_by(rank), (*stated)?);
            (needed > available).then_some(SmallRank { rank, needed, available })
        };
        let small: Vec<SmallRank> = (0..).map(WorldRank::new).zip(&self.stated).filter_map(small).collect();
        if !small.is_empty() {
            return Some(Shortage::Ranks(small));
        }
        if !self.shape.is_local && !self.stated.is_empty() && self.stated.iter().all(Option::is_some) {
            // The processes may be on other machines.
            return None;
        }
        if !self.devices.is_empty() {
            let of_device = self.devices.iter().find_map(|load| {
                let missing = load.needed().saturating_sub(load.memory?);
                (missing > 0).then_some(Shortage::Device { load, missing })
            });
            return of_device.or_else(|| {
                let available = self.machine?;
                (self.copies > available).then_some(Shortage::Copies { needed: self.copies, available })
            });
        }
        let (needed, available) = (self.needed(), self.machine?);
        (needed > available).then_some(Shortage::Machine { needed, available })
    }
}

impl DeviceLoad {
    /// Returns the bytes that the ranks need together.
    pub fn needed(&self) -> u64 {
        self.ranks.iter().fold(0, |sum, (_, needed)| sum.saturating_add(*needed))
    }

    /// Returns the rank that needs the most, and its bytes.
    pub fn largest(&self) -> Option<(WorldRank, u64)> {
        let ranks = self.ranks.iter().copied();
        ranks.max_by_key(|(rank, needed)| (*needed, u32::MAX - rank.get()))
    }
}

/// Returns the devices of a run, each with its ranks. If ranks are processes (`is_local` is false), ranks
/// with devices of the same name may be on several machines. So each of them counts alone, and only the rank
/// that needs the most is kept.
pub fn device_loads(
    ranks: impl IntoIterator<Item = (DeviceChoice, WorldRank, u64)>,
    is_local: bool,
    memory_of: impl Fn(DeviceChoice) -> Option<u64>,
) -> Vec<DeviceLoad> {
    let mut loads: Vec<DeviceLoad> = Vec::new();
    for (device, rank, needed) in ranks {
        let device = device.resolved();
        match loads.iter_mut().find(|load| load.device == device) {
            None => {
                loads.push(DeviceLoad { device, memory: memory_of(device), ranks: vec![(rank, needed)] });
            }
            Some(load) if is_local => load.ranks.push((rank, needed)),
            Some(load) if load.ranks[0].1 < needed => load.ranks[0] = (rank, needed),
            Some(_) => {}
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_share_bytes_on_the_processor_alone() {
        let shape = RunShape { replicas: 3, tensor_ranks: 2, is_local: true };
        let rank = HeldBytes { parameters: 40, ..HeldBytes::default() };
        let memory = TrainingMemory::new(vec![rank; 2], Vec::new()).with_shared(50, 10);
        let plan = MemoryPlan::new(memory, shape, None);
        // 70 bytes of the first replica, whose ranks share 10, and 20 of each further one, for both tensor ranks.
        assert_eq!((plan.needed(), plan.shared()), (2 * (70 + 2 * 20), 2 * 50));
        let devices = (0..12).map(|index| format!("cuda:{index}").parse().expect("a device"));
        let plan = plan.on_devices(devices, |_| None);
        assert_eq!((plan.needed(), plan.shared()), (2 * 3 * 80, 0));
    }
}
