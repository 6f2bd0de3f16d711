//! The settings that some schedules have besides their size, by name.
//!
//! A schedule refuses a setting that it does not have, so that a mistake is not ignored.

use std::fmt;

/// A setting that some schedules have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setting {
    /// [`group_size`](crate::ScheduleSpec::group_size).
    GroupSize,
    /// [`wide_warmup`](crate::ScheduleSpec::wide_warmup).
    WideWarmup,
    /// [`costs`](crate::ScheduleSpec::costs).
    Costs,
    /// [`memory_limit`](crate::ScheduleSpec::memory_limit).
    MemoryLimit,
    /// [`slices`](crate::ScheduleSpec::slices).
    Slices,
    /// [`overlap`](crate::ScheduleSpec::overlap).
    Overlap,
}

impl Setting {
    /// Every setting.
    pub const ALL: [Self; 6] =
        [Self::GroupSize, Self::WideWarmup, Self::Costs, Self::MemoryLimit, Self::Slices, Self::Overlap];
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::GroupSize => "group_size",
            Self::WideWarmup => "wide_warmup",
            Self::Costs => "costs",
            Self::MemoryLimit => "memory_limit",
            Self::Slices => "slices",
            Self::Overlap => "overlap",
        })
    }
}
