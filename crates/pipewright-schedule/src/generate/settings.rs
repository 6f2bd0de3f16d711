//! The settings that single schedules have beyond their size, by name.
//!
//! A schedule that has no use for a setting refuses it, rather than ignoring what somebody meant.

use std::fmt;

use crate::generate::spec::ScheduleSpec;

/// A setting of single schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Setting {
    /// [`ScheduleSpec::group`].
    Group,
    /// [`ScheduleSpec::wide_warmup`].
    WideWarmup,
    /// [`ScheduleSpec::costs`].
    Costs,
    /// [`ScheduleSpec::memory_limit`].
    MemoryLimit,
}

impl Setting {
    /// Every setting.
    pub const ALL: [Self; 4] = [Self::Group, Self::WideWarmup, Self::Costs, Self::MemoryLimit];

    /// Whether `spec` gives this setting.
    pub(super) fn is_given(self, spec: &ScheduleSpec) -> bool {
        match self {
            Self::Group => spec.group.is_some(),
            Self::WideWarmup => spec.wide_warmup,
            Self::Costs => spec.costs.is_some(),
            Self::MemoryLimit => spec.memory_limit.is_some(),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Group => "group",
            Self::WideWarmup => "wide_warmup",
            Self::Costs => "costs",
            Self::MemoryLimit => "memory_limit",
        })
    }
}
