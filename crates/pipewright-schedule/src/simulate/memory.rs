//! The memory of a rank at each moment of a timeline, simulated or measured.
//!
//! Rules: (1) the activation of a forward is allocated when it starts, and freed when the full backward or the input
//! backward ends; (2) the input backward allocates a stash when it ends, which the weight backward frees when it ends;
//! (3) a stage's weight gradients are allocated when its first weight backward starts, and stay allocated; (4) in a run
//! without backwards, a forward frees its activation when it ends; (5) a forward that is in the timeline twice is
//! computed again: the first one keeps its inputs only ([`StageSizes::recompute`]), the second one allocates the
//! activation, and the backward after it frees both. Parameters, optimizer state and messages are not included.
//!
//! [`UNIT`] counts memory in stage activations of one microbatch, as the papers do: one for an activation, one for a
//! stash and none for gradients.

use std::collections::{BTreeSet, HashMap};

use crate::action::{Action, ActionKind};
use crate::costs::StageSizes;
use crate::ids::Rank;
use crate::timeline::{Event, Timeline};

/// Sizes that count activations.
pub const UNIT: StageSizes = StageSizes { output: 0, activation: 1, stash: 1, gradient: 0, recompute: None };

/// A step of the memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryStep {
    /// The time of the change, in seconds.
    pub time: f64,
    /// The memory from this time on, in the units of the sizes.
    pub held: u64,
}

/// Returns the memory of `rank` over time, from the first change to the last. `sizes` has one entry for each stage, or
/// one for all stages; if it is empty, the memory is 0.
pub fn memory_curve(timeline: &Timeline, rank: Rank, sizes: &[StageSizes]) -> Vec<MemoryStep> {
    let mut held = Held {
        trains: trains(timeline),
        sizes,
        bytes: 0,
        stages: BTreeSet::new(),
        forwards: forwards(timeline.events_of(rank)),
        curve: Vec::new(),
    };
    for event in timeline.events_of(rank).iter().filter(|event| event.action.is_compute()) {
        for part in event.action.parts() {
            held.starts(event.start, part);
        }
        for part in event.action.parts() {
            held.ends(event.end, part);
        }
    }
    held.curve
}

/// Returns the peak memory of each rank.
pub fn peak_memory(timeline: &Timeline, sizes: &[StageSizes]) -> Vec<u64> {
    let ranks = (0..timeline.ranks()).map(Rank::new);
    let peak = |rank| memory_curve(timeline, rank, sizes).iter().map(|step| step.held).max();
    ranks.map(|rank| peak(rank).unwrap_or(0)).collect()
}

/// Returns how many times each forward is in the events.
fn forwards(events: &[Event]) -> HashMap<Action, Forwards> {
    let mut forwards: HashMap<Action, Forwards> = HashMap::new();
    for part in events.iter().flat_map(|event| event.action.parts()) {
        if part.kind() == ActionKind::Forward {
            forwards.entry(part).or_default().all += 1;
        }
    }
    forwards
}

/// How many times a forward is in a timeline, and how many of them have started.
#[derive(Clone, Copy, Default)]
struct Forwards {
    all: u32,
    started: u32,
}

fn trains(timeline: &Timeline) -> bool {
    timeline.events().iter().any(|event| {
        let kind = event.action.kind();
        kind.is_compute() && kind != ActionKind::Forward
    })
}

/// The memory while a rank's events are replayed.
struct Held<'a> {
    trains: bool,
    sizes: &'a [StageSizes],
    bytes: u64,
    /// The stages whose gradients are allocated.
    stages: BTreeSet<u32>,
    forwards: HashMap<Action, Forwards>,
    curve: Vec<MemoryStep>,
}

impl Held<'_> {
    fn starts(&mut self, time: f64, part: Action) {
        let sizes = self.sizes_of(part);
        match part.kind() {
            ActionKind::Forward => {
                let recompute = sizes.of_recomputed();
                let forwards = self.forwards.entry(part).or_default();
                forwards.started += 1;
                let bytes = match *forwards {
                    Forwards { all: 0 | 1, .. } => sizes.activation,
                    Forwards { started: 1, .. } => recompute.kept,
                    Forwards { .. } => recompute.recomputed,
                };
                self.change(time, bytes, 0);
            }
            ActionKind::Backward | ActionKind::WeightBackward if self.stages.insert(part.stage().get()) => {
                self.change(time, sizes.gradient, 0);
            }
            _ => {}
        }
    }

    fn ends(&mut self, time: f64, part: Action) {
        let sizes = self.sizes_of(part);
        match part.kind() {
            ActionKind::Forward if !self.trains => self.change(time, 0, sizes.activation),
            ActionKind::Backward => self.change(time, 0, self.activation_of(part)),
            ActionKind::InputBackward => self.change(time, sizes.stash, self.activation_of(part)),
            ActionKind::WeightBackward => self.change(time, 0, sizes.stash),
            _ => {}
        }
    }

    /// Returns the bytes that the forward of a backward has allocated.
    fn activation_of(&self, backward: Action) -> u64 {
        let (stage, sizes) = (backward.stage(), self.sizes_of(backward));
        let forward = backward.microbatch().map(|microbatch| Action::Forward { stage, microbatch });
        let recompute = sizes.of_recomputed();
        match forward.and_then(|forward| self.forwards.get(&forward)) {
            Some(forwards) if forwards.all > 1 => recompute.kept.saturating_add(recompute.recomputed),
            _ => sizes.activation,
        }
    }

    fn sizes_of(&self, part: Action) -> StageSizes {
        let at = part.stage().index().min(self.sizes.len().saturating_sub(1));
        self.sizes.get(at).copied().unwrap_or_default()
    }

    fn change(&mut self, time: f64, more: u64, less: u64) {
        // A measured timeline may lack events, so the memory is kept from falling below 0.
        let bytes = self.bytes.saturating_add(more).saturating_sub(less);
        if bytes != self.bytes {
            self.bytes = bytes;
            self.curve.push(MemoryStep { time, held: bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::{Costs, RecomputeSizes};
    use crate::csv::parse_program;
    use crate::recompute::Recompute;
    use crate::simulate::{logical, timed};

    const SIZES: StageSizes =
        StageSizes { output: 0, activation: 10, stash: 3, gradient: 100, recompute: None };

    fn check(rows: &str, sizes: &[StageSizes], expected: &[(f64, u64)]) {
        let program = parse_program(rows).expect("a program");
        let timeline = logical(&program).expect("no deadlock").timeline(1.0);
        let curve = memory_curve(&timeline, Rank::new(0), sizes);
        let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_full_backward_frees_at_its_end() {
        check("0F0,0F1,0B0,0B1\n", &[UNIT], &[(0.0, 1), (1.0, 2), (3.0, 1), (4.0, 0)]);
        check("0F0,0B0\n", &[SIZES], &[(0.0, 10), (1.0, 110), (2.0, 100)]);
    }

    #[test]
    fn a_split_backward_leaves_a_stash() {
        check("0F0,0I0,0W0\n", &[SIZES], &[(0.0, 10), (2.0, 3), (2.0, 103), (3.0, 100)]);
        check("0F0,0I0,0W0\n", &[UNIT], &[(0.0, 1), (3.0, 0)]);
    }

    #[test]
    fn an_overlap_holds_both() {
        check("0F0,1F0,(0F1;1B0)OVERLAP_F_B\n", &[UNIT], &[(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 2)]);
    }

    #[test]
    fn a_forward_that_is_computed_again_keeps_its_inputs() {
        let program = parse_program("0F0,0F1,0I0,0W0,0B1\n").expect("a program");
        let costs = Costs { recompute: Recompute::Stage, ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        let recompute = Some(RecomputeSizes { kept: 2, recomputed: 8 });
        let curve = memory_curve(run.timeline(), Rank::new(0), &[StageSizes { recompute, ..SIZES }]);
        let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
        let weights = [(4.0, 5), (4.0, 105), (5.0, 102)];
        let expected = [(0.0, 2), (1.0, 4), (2.0, 12)].into_iter().chain(weights);
        assert_eq!(found, expected.chain([(5.0, 110), (8.0, 100)]).collect::<Vec<_>>());
        assert_eq!(peak_memory(run.timeline(), &[UNIT]), [1]);
    }

    #[test]
    fn without_backwards_nothing_stays() {
        check("0F0,0F1\n", &[UNIT], &[(0.0, 1), (1.0, 0), (1.0, 1), (2.0, 0)]);
        check("0F0,0F1\n", &[], &[]);
    }
}
