//! The pass `offload`: moves the tensors that recomputed forwards keep out of memory until their backwards.
//!
//! A forward that is computed again keeps its inputs only ([`crate::recompute`]). They are whole tensors
//! outside of any tape, so a rank can write them somewhere else and read them again, and no bit changes.
//!
//! Rules: (1) `OFFLOAD` directly follows the forward; (2) `RELOAD` comes directly before the computation that
//! precedes the backward, so that the tensors arrive while the rank computes; (3) a forward is left alone if
//! it is not computed again, or if fewer than two computations of its rank come between it and its backward:
//! then nothing would be away during a computation; (4) of the forwards that are not left alone, the first
//! ones in flight stay in memory ([`OffloadConfig::keep`]); (5) a program that offloads already does not
//! change. Time and memory are linear in the program.
//!
//! The pass comes last, so it does not change the order of messages.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::action::Action;
use crate::ids::{Microbatch, StageIndex};
use crate::recompute::{KeptForwards, Recompute, backward_follows};
use crate::schedule::Program;

/// The forwards whose kept tensors leave memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadConfig {
    /// The forwards that are computed again. Only these keep tensors that can be moved.
    pub recompute: Recompute,
    /// The stages whose tensors leave; `None` for all stages that compute forwards again.
    pub stages: Option<BTreeSet<StageIndex>>,
    /// The number of microbatches in flight on a stage whose tensors stay in memory.
    pub keep: u32,
}

impl OffloadConfig {
    /// Returns the choice of everything that recomputed forwards keep.
    pub fn all(recompute: Recompute) -> Self {
        Self { recompute, stages: None, keep: 0 }
    }

    fn has(&self, stage: StageIndex) -> bool {
        self.stages.as_ref().is_none_or(|stages| stages.contains(&stage))
    }
}

/// Adds `OFFLOAD` and `RELOAD` to every row.
pub fn offload(program: Program, config: &OffloadConfig) -> Program {
    if program.offloads() {
        return program;
    }
    program.map_rows(|_, row| offloaded(row, config))
}

/// Returns the first `OFFLOAD` whose forward is not computed again with a choice of recomputation. Such a
/// forward keeps a tape, which cannot leave memory.
pub fn unmovable(program: &Program, recompute: &Recompute) -> Option<Action> {
    program.rows().iter().find_map(|row| {
        let movable = recomputed(row, recompute);
        let is_unmovable = |&cell: &Action| {
            matches!(cell, Action::Offload { stage, microbatch } if !movable.contains(&(stage, microbatch)))
        };
        row.iter().copied().find(is_unmovable)
    })
}

/// Returns the forwards of a row that are computed again.
fn recomputed(row: &[Action], recompute: &Recompute) -> HashSet<(StageIndex, Microbatch)> {
    let mut kept: HashMap<StageIndex, KeptForwards> = HashMap::new();
    let mut recomputed = HashSet::new();
    for (position, cell) in row.iter().enumerate() {
        for part in cell.parts() {
            let Some(choice) = recompute.of(part.stage()) else { continue };
            let kept = kept.entry(part.stage()).or_default();
            if let Some((_, microbatch)) = input_gradient(part) {
                kept.backward(microbatch);
            }
            if let Action::Forward { stage, microbatch } = part
                && !kept.forward(choice.keep, microbatch)
                && !backward_follows(row, position)
            {
                recomputed.insert((stage, microbatch));
            }
        }
    }
    recomputed
}

fn offloaded(row: Vec<Action>, config: &OffloadConfig) -> Vec<Action> {
    let recomputed = recomputed(&row, &config.recompute);
    let computations: Vec<usize> = (0..row.len()).filter(|&position| row[position].is_compute()).collect();
    let mut backwards: HashMap<(StageIndex, Microbatch), usize> = HashMap::new();
    for (number, &position) in computations.iter().enumerate() {
        for part in row[position].parts() {
            if let Some(key) = input_gradient(part) {
                backwards.entry(key).or_insert(number);
            }
        }
    }
    // The microbatches whose inputs stay.
    let mut kept: HashMap<StageIndex, KeptForwards> = HashMap::new();
    let [mut before, mut after] = [const { Vec::<(usize, Action)>::new() }; 2];
    for (number, &position) in computations.iter().enumerate() {
        for part in row[position].parts() {
            let kept = kept.entry(part.stage()).or_default();
            if let Some((_, microbatch)) = input_gradient(part) {
                kept.backward(microbatch);
            }
            let Action::Forward { stage, microbatch } = part else { continue };
            let key = (stage, microbatch);
            let Some(&backward) = backwards.get(&key) else { continue };
            if config.has(stage)
                && recomputed.contains(&key)
                && backward >= number + 3
                && !kept.forward(config.keep, microbatch)
            {
                after.push((position, Action::Offload { stage, microbatch }));
                before.push((computations[backward - 1], Action::Reload { stage, microbatch }));
            }
        }
    }
    before.sort_by_key(|&(position, _)| position);
    let mut lowered = Vec::with_capacity(row.len() + before.len() + after.len());
    let [mut before, mut after] = [before, after].map(|list| list.into_iter().peekable());
    for (position, action) in row.into_iter().enumerate() {
        while let Some((_, reload)) = before.next_if(|&(at, _)| at == position) {
            lowered.push(reload);
        }
        lowered.push(action);
        while let Some((_, offload)) = after.next_if(|&(at, _)| at == position) {
            lowered.push(offload);
        }
    }
    lowered
}

/// Returns the stage and the microbatch whose input gradients `part` computes.
fn input_gradient(part: Action) -> Option<(StageIndex, Microbatch)> {
    match part {
        Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
            Some((stage, microbatch))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    /// Checks the rows that the pass makes. `choice` is what is recomputed, the stages or `all`, and the
    /// number that stays.
    fn check((recompute, stages, keep): (&str, &str, u32), rows: &str, expected: &str) {
        let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
        let stage = |text: &str| StageIndex::new(text.parse().expect("a stage"));
        let config = OffloadConfig {
            recompute: recompute.parse().expect("a choice"),
            stages: (stages != "all").then(|| stages.split(' ').map(stage).collect()),
            keep,
        };
        assert_eq!(print_program(&offload(program, &config)), expected, "{config:?}");
    }

    const ALL: (&str, &str, u32) = ("stage", "all", 0);

    #[test]
    fn tensors_are_away_during_a_computation() {
        check(
            ALL,
            "0F0,0F1,0F2,0B0,0B1,0B2\n",
            "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0OFFLOAD2,0RELOAD1,0B0,0RELOAD2,0B1,0B2\n",
        );
        check(ALL, "0F0,0F1,0B1,0B0\n", "0F0,0OFFLOAD0,0F1,0RELOAD0,0B1,0B0\n");
    }

    #[test]
    fn a_backward_that_comes_soon_needs_no_other_place() {
        for rows in ["0F0,0B0\n", "0F0,0F1,0B0,0B1\n", "0F0,0F1\n", "0F0,0I0,0W0\n"] {
            check(ALL, rows, rows);
        }
    }

    #[test]
    fn messages_are_no_computations() {
        check(
            ALL,
            "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0I0,0W0,0RECV_B1,0B1,0RECV_B2,0B2\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2\n",
            "0F0,0OFFLOAD0,0SEND_F0,0F1,0OFFLOAD1,0SEND_F1,0RELOAD0,0F2,0OFFLOAD2,0SEND_F2,0RECV_B0,0I0,0RELOAD1,0W0,0RECV_B1,0RELOAD2,0B1,0RECV_B2,0B2\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2\n",
        );
    }

    #[test]
    fn only_what_is_computed_again_leaves() {
        let rows = "0F0,1F0,0F1,1F1,1B1,0B1,1B0,0B0\n";
        check(("none", "all", 0), rows, rows);
        check(("parts", "all", 0), rows, rows);
        check(("1", "all", 0), rows, "0F0,1F0,1OFFLOAD0,0F1,1F1,1B1,1RELOAD0,0B1,1B0,0B0\n");
        check(("stage", "1", 0), rows, "0F0,1F0,1OFFLOAD0,0F1,1F1,1B1,1RELOAD0,0B1,1B0,0B0\n");
        check(("0:keep=1", "all", 0), rows, "0F0,1F0,0F1,0OFFLOAD1,1F1,0RELOAD1,1B1,0B1,1B0,0B0\n");
    }

    #[test]
    fn the_first_in_flight_may_stay() {
        let rows = "0F0,0F1,0F2,0B2,0B1,0B0\n";
        check(ALL, rows, "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0RELOAD1,0B2,0RELOAD0,0B1,0B0\n");
        check(("stage", "all", 1), rows, "0F0,0F1,0OFFLOAD1,0F2,0RELOAD1,0B2,0B1,0B0\n");
        check(("stage", "all", 2), rows, rows);
    }

    #[test]
    fn halves_of_overlaps_count() {
        check(
            ALL,
            "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n",
            "0F0,0OFFLOAD0,1F0,0RELOAD0,(0F1;1B0)OVERLAP_F_B,0OFFLOAD1,0B0,1F1,0RELOAD1,1B1,0B1\n",
        );
    }

    #[test]
    fn a_tape_cannot_leave() {
        let rows = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0RELOAD1,0B2,0RELOAD0,0B1,0B0\n";
        let program = parse_program(rows).expect("a program");
        let found = |recompute: &str| {
            unmovable(&program, &recompute.parse().expect("a choice")).map(|action| action.to_string())
        };
        assert_eq!(found("stage"), None);
        assert_eq!(found("0:layers=2"), None);
        for recompute in ["none", "parts", "1", "0:keep=1"] {
            assert_eq!(found(recompute).as_deref(), Some("0OFFLOAD0"), "{recompute}");
        }
        let program = parse_program("0F0,0B0,0F1,0OFFLOAD1,0RELOAD1,0B1\n").expect("a program");
        let found = unmovable(&program, &Recompute::Stage).map(|action| action.to_string());
        assert_eq!(
            found.as_deref(),
            Some("0OFFLOAD1"),
            "a forward is not computed again if its backward follows"
        );
    }

    #[test]
    fn a_program_that_offloads_does_not_change() {
        let rows = "0F0,0F1,0F2,0OFFLOAD0,0B2,0B1,0RELOAD0,0B0\n";
        check(ALL, rows, rows);
    }
}
