//! The systems that can execute a plan, and what each of them can run.
//!
//! - torchtitan 0.3.0 (`distributed/pipeline_parallel.py`) runs any table of computations. It makes the stages
//!   of a rank itself: in a loop, or in a V with two stages per rank.
//! - Megatron Core 0.16.1 (`pipeline_parallel/schedules.py`) runs 1F1B with one stage per rank, and
//!   interleaved 1F1B with several, in a loop. Microbatches run in groups of at least as many as there are
//!   ranks; so does a last, shorter group.
//! - DeepSpeed 0.19.8 (`runtime/pipe/schedule.py`, `TrainSchedule`) runs 1F1B with one stage per rank.
//!
//! None of them cuts the head along the vocabulary, and each recomputes in all stages or in none.

use std::borrow::Cow;
use std::fmt;

use thiserror::Error;

use crate::generate::rounds;
use crate::placement::Placement;
use crate::recompute::StageRecompute;

/// A system that executes plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum System {
    /// PyTorch's trainer for language models.
    Torchtitan,
    /// NVIDIA's trainer, Megatron-LM with Megatron Core.
    Megatron,
    /// Microsoft's DeepSpeed, with its `PipelineModule`.
    Deepspeed,
}

/// The reason why a system cannot run a plan, as a sentence.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Refusal(Cow<'static, str>);

crate::error_text::message_as_debug!(Refusal);

impl Refusal {
    /// Returns the refusal with this reason.
    pub fn new(reason: impl Into<Cow<'static, str>>) -> Self {
        Self(reason.into())
    }
}

/// A schedule and the placement of its stages.
#[derive(Debug, Clone, Copy)]
pub struct PlacedSchedule<'a> {
    /// The name of the schedule.
    pub name: &'a str,
    /// The microbatches of a group, if the schedule has that setting and it is set.
    pub group_size: Option<u32>,
    /// The ranks of a replica.
    pub ranks: u32,
    /// The stages on all these ranks.
    pub stages: u32,
    /// Whether the stages are in a loop over the ranks, or in a V with two stages per rank.
    pub is_loop_or_v: bool,
    /// The microbatches of a replica.
    pub microbatches: u32,
}

/// The parts of a plan on which it depends whether a system can run it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer<'a> {
    /// The name of the schedule.
    pub(super) name: &'static str,
    /// The microbatches of a group, if the schedule has that setting.
    pub(super) group_size: Option<u32>,
    /// The stages on the ranks of a replica.
    pub(super) placement: &'a Placement,
    /// The microbatches of a replica.
    pub(super) microbatches: u32,
    /// For each stage, what it recomputes of its forwards.
    pub(super) recompute: &'a [Option<StageRecompute>],
    /// The parts of the head.
    pub(super) head_parts: u32,
    /// Whether the ranks of each of several pipelines have consecutive numbers, and that matters because
    /// there are nodes.
    pub(super) has_rows_in_nodes: bool,
}

impl System {
    /// All systems.
    pub const ALL: [Self; 3] = [Self::Torchtitan, Self::Megatron, Self::Deepspeed];

    /// Returns the name of the system in lower case, as options have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Torchtitan => "torchtitan",
            Self::Megatron => "megatron",
            Self::Deepspeed => "deepspeed",
        }
    }

    /// Returns the system with this name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|system| name.eq_ignore_ascii_case(system.name()))
    }

    /// Returns whether the system has an option to number the ranks of a pipeline consecutively, such as
    /// Megatron's `--use-tp-pp-dp-mapping`. Without it, the replicas of a stage are neighbours.
    pub(super) fn has_pipeline_order(self) -> bool {
        self == Self::Megatron
    }

    /// Returns whether the system runs orders that no schedule with a name has.
    pub(super) fn runs_searched_orders(self) -> bool {
        self == Self::Torchtitan
    }

    /// Returns why the system cannot run a schedule; `None` if it can.
    pub fn schedule_refusal(self, schedule: &PlacedSchedule<'_>) -> Option<Refusal> {
        let &PlacedSchedule { name, ranks, stages, .. } = schedule;
        match self {
            Self::Torchtitan => (!schedule.is_loop_or_v).then(|| {
                Refusal::new(
                    "torchtitan places stages in a loop, or in a V with two stages per rank, and this plan places them otherwise",
                )
            }),
            Self::Megatron if name == SEVERAL_STAGES && stages > ranks => megatron_groups_refusal(schedule),
            Self::Megatron | Self::Deepspeed => (name != ONE_STAGE || stages != ranks).then(|| {
                let with_several = if self == Self::Megatron { ", and interleaved 1F1B with several" } else { "" };
                Refusal::new(format!(
                    "{self} does not run this schedule; it runs 1F1B with one stage per rank{with_several}"
                ))
            }),
        }
    }

    /// Returns why the system cannot run a plan; `None` if it can.
    pub(super) fn refusal(self, offer: &Offer<'_>) -> Option<Refusal> {
        let Offer { placement, recompute, .. } = *offer;
        if offer.head_parts > 1 {
            return Some(Refusal::new(format!("{self} does not cut the head along the vocabulary")));
        }
        let schedule = PlacedSchedule {
            name: offer.name,
            group_size: offer.group_size,
            ranks: placement.ranks(),
            stages: placement.stages(),
            is_loop_or_v: is_loop(placement) || is_v(placement),
            microbatches: offer.microbatches,
        };
        if let Some(refusal) = self.schedule_refusal(&schedule) {
            return Some(refusal);
        }
        let is_whole = |choice: &Option<StageRecompute>| choice.is_none_or(|it| it == StageRecompute::WHOLE);
        if recompute.iter().any(|choice| *choice != recompute[0] || !is_whole(choice)) {
            let reason = format!("{self} recomputes all layers of all stages or none, and this plan some");
            return Some(Refusal::new(reason));
        }
        (offer.has_rows_in_nodes && !self.has_pipeline_order()).then(|| {
            Refusal::new(format!(
                "{self} numbers the replicas of a stage consecutively, and this plan numbers the ranks of a pipeline \
                 consecutively, so that other ranks would share a node"
            ))
        })
    }
}

/// The schedules of Megatron and DeepSpeed, by their names here.
const ONE_STAGE: &str = "1f1b";
const SEVERAL_STAGES: &str = "interleaved1f1b";

/// Returns why Megatron cannot interleave the stages of a schedule with several stages per rank.
fn megatron_groups_refusal(schedule: &PlacedSchedule<'_>) -> Option<Refusal> {
    let &PlacedSchedule { ranks, microbatches, .. } = schedule;
    if ranks == 1 {
        return Some(Refusal::new(
            "Megatron has several stages per rank only in pipelines of several ranks, and this plan has one rank",
        ));
    }
    let group = group_size(schedule.group_size, ranks, microbatches);
    let last = microbatches % group;
    let runs = (ranks..=microbatches).contains(&group) && (last == 0 || last >= ranks);
    (!runs).then(|| {
        Refusal::new(
            "Megatron runs microbatches in groups of at least as many as the ranks, and this plan has a smaller group",
        )
    })
}

/// Returns the number of microbatches of a group of interleaved 1F1B: the one that is set, or the size of
/// equal rounds.
pub(crate) fn group_size(set: Option<u32>, ranks: u32, microbatches: u32) -> u32 {
    set.unwrap_or_else(|| microbatches / rounds(ranks, microbatches)).max(1)
}

/// Returns whether stage `s` is on rank `s mod p`.
pub(crate) fn is_loop(placement: &Placement) -> bool {
    let (ranks, stages) = (placement.ranks(), placement.stages());
    stages.is_multiple_of(ranks) && Placement::looped(ranks, stages / ranks).as_ref() == Ok(placement)
}

/// Returns whether the stages go down the ranks and up again, two on each rank.
fn is_v(placement: &Placement) -> bool {
    Placement::v(placement.ranks(), 2).as_ref() == Ok(placement)
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchtitan => "torchtitan",
            Self::Megatron => "Megatron",
            Self::Deepspeed => "DeepSpeed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal_text(system: System, offer: &Offer<'_>) -> String {
        system.refusal(offer).map(|refusal| refusal.to_string()).unwrap_or_default()
    }

    fn check(system: System, name: &'static str, chunks: u32, microbatches: u32, expected: &str) {
        check_ranks(system, name, [4, chunks], microbatches, expected);
    }

    fn check_ranks(
        system: System,
        name: &'static str,
        [ranks, chunks]: [u32; 2],
        microbatches: u32,
        expected: &str,
    ) {
        let placement = Placement::looped(ranks, chunks).expect("a placement");
        let offer = Offer {
            name,
            group_size: None,
            placement: &placement,
            microbatches,
            recompute: &[None],
            head_parts: 1,
            has_rows_in_nodes: false,
        };
        let refused = refusal_text(system, &offer);
        let title = format!("{system} {name} {ranks} {chunks} {microbatches}: {refused}");
        assert!(refused.contains(expected) && refused.is_empty() == expected.is_empty(), "{title}");
    }

    #[test]
    fn each_system_runs_its_schedules() {
        use System::{Deepspeed, Megatron, Torchtitan};
        let no = "does not run this schedule; it runs 1F1B with one stage per rank";
        check(Torchtitan, "searched", 3, 8, "");
        check(Megatron, "1f1b", 1, 3, "");
        check(Megatron, "interleaved1f1b", 2, 8, "");
        // Rounds of five microbatches each.
        check(Megatron, "interleaved1f1b", 2, 10, "");
        check(Megatron, "interleaved1f1b", 2, 3, "groups of at least as many as the ranks");
        check(Megatron, "interleaved1f1b", 1, 8, no);
        check(Megatron, "zb-h1", 1, 8, no);
        check_ranks(Megatron, "1f1b", [1, 1], 8, "");
        check_ranks(Megatron, "interleaved1f1b", [1, 2], 8, "several stages per rank only in");
        check(Deepspeed, "1f1b", 1, 8, "");
        check(Deepspeed, "interleaved1f1b", 2, 8, no);
    }

    #[test]
    fn torchtitan_places_in_a_loop_or_a_v_of_two() {
        let two = Placement::v(4, 2).expect("a placement");
        let three = Placement::v(4, 3).expect("a placement");
        assert!(is_v(&two) && !is_loop(&two) && !is_v(&three) && !is_loop(&three));
    }

    #[test]
    fn some_stages_heads_in_parts_and_orders_are_refused() {
        let placement = Placement::looped(2, 1).expect("a placement");
        let plain = Offer {
            name: "1f1b",
            group_size: None,
            placement: &placement,
            microbatches: 4,
            recompute: &[Some(StageRecompute::WHOLE); 2],
            head_parts: 1,
            has_rows_in_nodes: false,
        };
        let system = System::Deepspeed;
        assert_eq!(refusal_text(system, &plain), "");
        let some = Offer { recompute: &[Some(StageRecompute::WHOLE), None], ..plain };
        assert!(refusal_text(system, &some).contains("recomputes all layers of all stages or none"));
        let part = Offer { recompute: &[StageRecompute::first(1); 2], ..plain };
        assert!(refusal_text(system, &part).contains("recomputes all layers of all stages or none"));
        let parts = Offer { head_parts: 2, ..plain };
        assert!(refusal_text(system, &parts).contains("does not cut the head"));
        let rows = Offer { has_rows_in_nodes: true, ..plain };
        assert!(refusal_text(system, &rows).contains("numbers the replicas of a stage"));
        assert_eq!(System::Megatron.refusal(&rows), None);
    }
}
