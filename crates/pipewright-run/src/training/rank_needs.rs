//! What each rank of the world computes with, and what it needs: its device, its threads and its memory.

use pipewright::device::{BackEnd, DeviceChoice};
use pipewright::ids::WorldRank;
use pipewright_models::training_memory::MemoryPlan;
use pipewright_schedule::bytes::bytes_text as bytes;
use pipewright_schedule::profile::Profile;
use serde_json::{Value, json};

use crate::settings::Settings;
use crate::training::memory::{ROWS, device_bytes, line, row};

/// What a rank of the world has and needs.
#[derive(Clone, Debug, PartialEq)]
pub struct RankNeeds {
    /// The rank.
    pub rank: WorldRank,
    /// The rank of a plan's profile that it is, if the configuration says so.
    pub profile_rank: Option<u32>,
    /// The device.
    pub device: DeviceChoice,
    /// The threads.
    pub threads: usize,
    /// The memory in bytes, as a profile states it, or the memory of its device. `None` if it is not known, and for a
    /// thread or process on the processor without a profile.
    pub memory: Option<u64>,
    /// The bytes that it needs.
    pub needed: u64,
}

impl RankNeeds {
    /// Returns whether the rank fits into its memory, as far as that is known.
    pub fn fits(&self) -> bool {
        self.memory.is_none_or(|memory| self.needed <= memory)
    }
}

/// Returns the memory in bytes that a profile states for each rank of the world.
pub fn stated_memory(profile: &Profile, ranks: u32) -> Vec<Option<u64>> {
    let usual = match (&profile.device, profile.ranks.is_empty()) {
        (Some(device), false) => device.memory_bytes,
        _ => profile.memory_of_rank(ranks),
    };
    let of_rank = |rank: u32| profile.ranks.get(rank as usize).and_then(|rank| rank.memory_bytes).or(usual);
    (0..ranks).map(of_rank).collect()
}

/// Returns the needs of all ranks of the world.
pub fn rank_needs(settings: &Settings, plan: &MemoryPlan) -> Vec<RankNeeds> {
    let pipeline = &settings.pipeline;
    let needs = |rank: WorldRank| {
        let device = settings.run.devices.choice_of(rank);
        let of_device = (device.back_end != BackEnd::Flex).then(|| device_bytes(device)).flatten();
        RankNeeds {
            rank,
            profile_rank: pipeline.profile_ranks.get(rank.index()).copied(),
            device,
            threads: pipeline.threads_per_rank.of(rank),
            memory: plan.stated(rank).or(of_device),
            needed: plan.needed_by(rank),
        }
    };
    (0..settings.mesh.ranks(pipeline.ranks)).map(WorldRank::new).map(needs).collect()
}

/// Returns the needs as JSON, a table for each rank.
pub fn needs_json(needs: &[RankNeeds]) -> Value {
    let rank = |needs: &RankNeeds| {
        json!({
            "rank": needs.rank.get(),
            "profile_rank": needs.profile_rank,
            "device": needs.device.to_string(),
            "threads": needs.threads,
            "memory": needs.memory,
            "needed": needs.needed,
            "fits": needs.fits(),
        })
    };
    needs.iter().map(rank).collect()
}

/// Returns a table of the needs; nothing if all ranks have as many threads on the same device, and a profile states no
/// memory. Of many ranks, those that need the most are shown.
pub fn needs_table(needs: &[RankNeeds], plan: &MemoryPlan) -> String {
    let machine = |needs: &RankNeeds| (needs.device, needs.threads, needs.profile_rank.is_some());
    let is_stated = needs.iter().any(|needs| plan.stated(needs.rank).is_some());
    let are_alike = needs.iter().all(|one| machine(one) == machine(&needs[0]) && one.profile_rank.is_none());
    if are_alike && !is_stated {
        return String::new();
    }
    let mut shown: Vec<&RankNeeds> = needs.iter().collect();
    shown.sort_by_key(|needs| (needs.fits(), u64::MAX - needs.needed));
    shown.truncate(ROWS);
    shown.sort_by_key(|needs| needs.rank);
    let mut text = String::new();
    row(&mut text, "machines", "rank", &["threads", "needs", "has", "device"]);
    for needs in &shown {
        let has = needs.memory.map_or_else(|| "?".to_owned(), bytes);
        let of_profile = needs.profile_rank.map(|rank| format!(", rank {rank} of the profile"));
        let device = format!("{}{}", needs.device, of_profile.unwrap_or_default());
        let cells = [needs.threads.to_string(), bytes(needs.needed), has, device];
        row(&mut text, "", &needs.rank.to_string(), &cells);
    }
    if shown.len() < needs.len() {
        line(&mut text, "", &format!("these {ROWS} of {} ranks need the most", needs.len()));
    }
    text
}
