//! Sizes and settings to use instead of the ones that a schedule refuses.

use std::fmt;

use crate::generate::settings::Setting;
use crate::words::counted;

/// Changes of a size and its settings that a schedule accepts together. They were tried.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Advice {
    /// Another schedule, without settings.
    pub schedule: Option<&'static str>,
    /// Another number of ranks.
    pub ranks: Option<u32>,
    /// Another number of stages on each rank.
    pub stages_per_rank: Option<u32>,
    /// Another number of microbatches, for one replica.
    pub microbatches: Option<u32>,
    /// Another group size.
    pub group_size: Option<u32>,
    /// Whether a memory limit of 0 becomes 1.
    pub memory_for_one: bool,
    /// The settings to leave out.
    pub left_out: Vec<Setting>,
}

impl Advice {
    /// Returns the changes in words. The microbatches of all `replicas` count.
    pub(super) fn words(&self, replicas: u32) -> String {
        let microbatches = self.microbatches.map(|number| u64::from(number) * u64::from(replicas));
        let uses = [
            self.schedule.map(|name| format!("`{name}`")),
            self.ranks.map(|number| counted(number, "rank")),
            self.stages_per_rank.map(|number| format!("{} on each rank", counted(number, "stage"))),
            microbatches.map(|number| counted(number, "microbatch")),
            self.group_size.map(|number| format!("a group size of {number}")),
            self.memory_for_one.then(|| "a memory limit of 1 microbatch".to_owned()),
        ];
        let uses: Vec<String> = uses.into_iter().flatten().collect();
        let left_out = match self.left_out.as_slice() {
            // The message has just named it.
            [_] => vec!["it".to_owned()],
            settings => settings.iter().map(|setting| format!("`{setting}`")).collect(),
        };
        match (uses.is_empty(), left_out.is_empty()) {
            (_, true) => format!("use {}", uses.join(" and ")),
            (true, false) => format!("leave {} out", left_out.join(" and ")),
            (false, false) => format!("leave {} out, and use {}", left_out.join(" and "), uses.join(" and ")),
        }
    }
}

/// Several pieces of advice; each is enough.
pub(super) struct Alternatives<'a> {
    pub(super) advice: &'a [Advice],
    pub(super) replicas: u32,
    /// The text between the problem and the advice.
    pub(super) before: &'static str,
}

/// Prints nothing if there is no advice.
impl fmt::Display for Alternatives<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, advice) in self.advice.iter().enumerate() {
            let before = if index == 0 { self.before } else { ", or " };
            write!(f, "{before}{}", advice.words(self.replicas))?;
        }
        Ok(())
    }
}
