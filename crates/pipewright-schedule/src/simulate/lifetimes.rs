//! The lifetimes of the activations on a rank, and the number of buffers that they need.
//!
//! They serve a runtime that allocates buffers once for a run instead of once for each microbatch. Lifetimes
//! are positions in the row of the rank, so the result does not depend on costs. Weight gradients and
//! messages are not included.
//!
//! Rules: (1) the activations of a forward live from the forward to the last backward of its stage and
//! microbatch (`B`, or the later one of `I` and `W`), and without a backward during the forward only; (2) by
//! microbatch, they live from the first forward of any of the rank's stages to the last backward of any; (3)
//! in the order of their starts, each range takes the lowest free slot. A slot is free from the action after
//! its last use, so the halves of an overlap have different slots.
//!
//! For intervals this greedy colouring is optimal: the number of slots is the largest number of ranges that
//! are alive at once. Time: `n log n` in the length of the row.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::schedule::Program;

/// The activations that share a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LifetimeOf {
    /// The activations of one stage and microbatch.
    StageAndMicrobatch,
    /// All activations of a microbatch on the rank.
    Microbatch,
}

/// The positions from which and to which activations live, and their buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LiveRange {
    /// The stage; `None` for all stages of the rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<StageIndex>,
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The position in the row at which the range starts.
    pub first: usize,
    /// The position of the last use; not before `first`.
    pub last: usize,
    /// The buffer, counted from 0.
    pub slot: u32,
}

/// The live ranges of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lifetimes {
    slots: u32,
    #[serde(rename = "live")]
    ranges: Vec<LiveRange>,
}

impl Lifetimes {
    /// Returns all ranges, in the order of their starts.
    pub fn ranges(&self) -> &[LiveRange] {
        &self.ranges
    }

    /// Returns the number of buffers that the rank needs.
    pub fn slots(&self) -> u32 {
        self.slots
    }
}

/// Returns the lifetimes of the activations of every rank.
pub fn all_lifetimes(program: &Program, of: LifetimeOf) -> Vec<Lifetimes> {
    program.placement().all_ranks().map(|rank| lifetimes(program, rank, of)).collect()
}

/// Returns the lifetimes of the activations of `rank`; no ranges if there is no such rank.
pub fn lifetimes(program: &Program, rank: Rank, of: LifetimeOf) -> Lifetimes {
    let mut spans: BTreeMap<(Option<StageIndex>, Microbatch), (usize, usize)> = BTreeMap::new();
    for (position, part) in parts_of(program.row(rank)) {
        let Some(microbatch) = part.microbatch() else { continue };
        let stage = (of == LifetimeOf::StageAndMicrobatch).then_some(part.stage());
        match part.kind() {
            ActionKind::Forward => {
                spans.entry((stage, microbatch)).or_insert((position, position)).1 = position;
            }
            kind if kind.is_compute() => {
                if let Some(span) = spans.get_mut(&(stage, microbatch)) {
                    span.1 = position;
                }
            }
            _ => {}
        }
    }
    let range = |((stage, microbatch), (first, last))| LiveRange { stage, microbatch, first, last, slot: 0 };
    let mut ranges: Vec<LiveRange> = spans.into_iter().map(range).collect();
    ranges.sort_by_key(|range| range.first);
    let slots = colour(&mut ranges);
    Lifetimes { ranges, slots }
}

fn parts_of(row: &[Action]) -> impl Iterator<Item = (usize, Action)> {
    row.iter().enumerate().flat_map(|(position, action)| action.parts().map(move |part| (position, part)))
}

/// Gives each range the lowest slot that is free at its start, and returns the number of slots.
fn colour(ranges: &mut [LiveRange]) -> u32 {
    let mut used: BinaryHeap<Reverse<(usize, u32)>> = BinaryHeap::new();
    let mut free: BinaryHeap<Reverse<u32>> = BinaryHeap::new();
    let mut slots = 0;
    for range in ranges {
        while let Some(&Reverse((last, slot))) = used.peek()
            && last < range.first
        {
            used.pop();
            free.push(Reverse(slot));
        }
        range.slot = free.pop().map_or_else(
            || {
                slots += 1;
                slots - 1
            },
            |Reverse(slot)| slot,
        );
        used.push(Reverse((range.last, range.slot)));
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use proptest::prelude::*;

    /// Checks the ranges of rank 0, written `stage.microbatch:first-last@slot`, or without the stage.
    fn check(of: LifetimeOf, rows: &str, slots: u32, expected: &str) {
        let program = parse_program(rows).expect("a program");
        let found = lifetimes(&program, Rank::new(0), of);
        let text = |range: &LiveRange| {
            let stage = range.stage.map_or_else(String::new, |stage| format!("{stage}."));
            format!("{stage}{}:{}-{}@{}", range.microbatch, range.first, range.last, range.slot)
        };
        let ranges: Vec<String> = found.ranges().iter().map(text).collect();
        assert_eq!((found.slots(), ranges.join(" ").as_str()), (slots, expected));
    }

    #[test]
    fn a_slot_is_used_again() {
        check(
            LifetimeOf::StageAndMicrobatch,
            "0F0,0F1,0B0,0F2,0B1,0B2\n",
            2,
            "0.0:0-2@0 0.1:1-4@1 0.2:3-5@0",
        );
    }

    #[test]
    fn a_split_backward_ends_with_its_weights() {
        check(LifetimeOf::StageAndMicrobatch, "0F0,0I0,0F1,0W0,0I1,0W1\n", 2, "0.0:0-3@0 0.1:2-5@1");
    }

    #[test]
    fn the_halves_of_an_overlap_live_together() {
        check(
            LifetimeOf::StageAndMicrobatch,
            "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0\n",
            3,
            "0.0:0-3@0 1.0:1-2@1 0.1:2-2@2",
        );
    }

    #[test]
    fn stages_of_a_microbatch_can_share() {
        check(LifetimeOf::Microbatch, "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1\n", 2, "0:0-4@0 1:2-7@1");
    }

    #[test]
    fn forwards_alone_need_one_buffer() {
        check(LifetimeOf::StageAndMicrobatch, "0F0,0SEND_F0,0F1,0SEND_F1\n1F0\n", 1, "0.0:0-0@0 0.1:2-2@0");
    }

    proptest! {
        #[test]
        fn slots_are_disjoint_and_as_few_as_can_be(spans in prop::collection::vec((0..40usize, 0..20usize), 0..30)) {
            let range = |(first, length)| LiveRange {
                stage: None,
                microbatch: Microbatch::new(0),
                first,
                last: first + length,
                slot: 0,
            };
            let mut ranges: Vec<LiveRange> = spans.into_iter().map(range).collect();
            ranges.sort_by_key(|range| range.first);
            let slots = colour(&mut ranges);
            let alive = |at: usize| ranges.iter().filter(|range| (range.first..=range.last).contains(&at)).count();
            prop_assert_eq!((0..60).map(alive).max(), Some(slots as usize));
            for (place, one) in ranges.iter().enumerate() {
                for other in ranges[..place].iter().filter(|other| other.slot == one.slot) {
                    prop_assert!(other.last < one.first || one.last < other.first);
                }
            }
        }
    }
}
