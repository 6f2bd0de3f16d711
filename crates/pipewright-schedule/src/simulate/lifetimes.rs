//! How long activations live on a rank, and in how few buffers they fit.
//!
//! A runtime that allocates buffers once a run, and not once a microbatch, asks how many it needs and which
//! one each microbatch uses. Positions are those of the rank's row, so the answer holds whatever the actions
//! cost. Weight gradients and messages are not counted here.
//!
//! Rules: (1) what a forward saves lives from the forward to the last backward of its stage and microbatch
//! (`B`, or the later one of `I` and `W`); without a backward it lives for the forward alone; (2) by
//! microbatch, it lives from the first forward of any of the rank's stages to the last backward of any; (3)
//! in the order of their beginnings, each takes the lowest slot that is free. A slot is free from the action
//! behind its last use, so both halves of an overlap have their own.
//!
//! For intervals this greedy colouring is optimal: the number of slots is the largest number that live at
//! once. Time `n log n` in the rank's row.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::schedule::Program;

/// What shares a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LifetimeOf {
    /// Each stage's activations of each microbatch by themselves.
    StageAndMicrobatch,
    /// All activations that a rank holds of a microbatch.
    Microbatch,
}

/// From where to where something lives, and in which buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveRange {
    /// The stage; `None` for all stages of the rank.
    pub stage: Option<StageIndex>,
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The position in the rank's row at which it begins.
    pub first: usize,
    /// The position of its last use; not before `first`.
    pub last: usize,
    /// The buffer, counted from 0.
    pub slot: u32,
}

/// The live ranges of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifetimes {
    ranges: Vec<LiveRange>,
    slots: u32,
}

impl Lifetimes {
    /// All ranges, by their beginnings.
    pub fn ranges(&self) -> &[LiveRange] {
        &self.ranges
    }

    /// The number of buffers that the rank needs.
    pub fn slots(&self) -> u32 {
        self.slots
    }
}

/// The lifetimes of the activations of `rank`, which has none where there is no such rank.
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

/// Gives each range the lowest slot that is free at its beginning; returns how many slots there are.
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

    /// Ranges are written `stage.microbatch:first-last@slot`, or without the stage.
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
