//! The memory of a rank at each moment of a timeline, simulated or measured.
//!
//! Rules: (1) the activation of a forward is allocated when it starts, and freed when the full backward or
//! the input backward ends; (2) the input backward allocates a stash when it ends, which the weight backward
//! frees when it ends; (3) a stage's weight gradients are allocated when its first weight backward ends
//! ([`WithGradients`]), and stay allocated; (4) the forward of a stage without backwards frees its activation when it ends, and
//! the input backward of a stage without weight backwards allocates no stash; (5) a forward that is in the
//! timeline twice is computed again: the first one keeps its inputs and the activations of the layers that
//! are not computed again ([`StageSizes::recompute`]), the second one allocates the other activations, and
//! the backward after it frees both; (6) the full backward or the input backward of a stage that computes
//! parts of its layers again ([`StageSizes::parts`]) allocates their results when it starts, and frees them
//! when it ends; (7) `OFFLOAD` frees the tensors that it moves ([`StageSizes::offload`]) when it ends, and
//! `RELOAD` allocates them when it starts; (8) `UNSHARD` allocates the frozen matrices that stay in a file
//! ([`StageSizes::streamed`]) when it starts, and `RESHARD` frees them. Other parameters, optimizer state and
//! messages are not included.
//!
//! If microbatches are cut into slices, a slice has its share of the bytes of its microbatch, rounded up. Two
//! rules are added: (9) the backward of a slice allocates the gradients of the keys and values of the slices
//! before it, because it attends to them; the gradients of the last slice stay as sums when it ends, and the
//! gradients of each other slice are added to the sums and freed, together with the sums of its own slice;
//! (10) a forward that is computed again keeps the keys and values of its slice in addition to its inputs,
//! because later slices attend to them.
//!
//! [`UNIT`] counts memory in stage activations of one microbatch or slice, as the papers do: one for an
//! activation, one for a stash and none for gradients.

use std::collections::{BTreeSet, HashMap};

use crate::action::{Action, ActionKind};
use crate::costs::StageSizes;
use crate::ids::{Rank, StageIndex};
use crate::slices::Slices;
use crate::timeline::{Event, Timeline};

/// Sizes that count activations.
pub const UNIT: StageSizes = StageSizes {
    output: 0,
    activation: 1,
    stash: 1,
    gradient: 0,
    recompute: None,
    keys_values: 0,
    parts: 0,
    offload: 0,
    streamed: 0,
};

/// A step of the memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryStep {
    /// The time of the change, in seconds.
    pub time: f64,
    /// The memory from this time on, in the units of the sizes.
    pub held: u64,
}

/// Returns the memory of `rank` over time, from the first change to the last. `sizes` has one entry for each
/// stage, or one for all stages; if it is empty, the memory is 0.
pub fn memory_curve(timeline: &Timeline, rank: Rank, sizes: &[StageSizes]) -> Vec<MemoryStep> {
    let events = timeline.events_of(rank);
    let (mut held, mut curve) = (0u64, Vec::new());
    for MemoryChange { event, is_at_end, more, less } in memory_changes(events, timeline.slices(), sizes) {
        // A measured timeline may lack events, so the memory is kept from falling below 0.
        let next = held.saturating_add(more).saturating_sub(less);
        if next != held {
            held = next;
            let time = if is_at_end { events[event].end } else { events[event].start };
            curve.push(MemoryStep { time, held });
        }
    }
    curve
}

/// The stages of a rank that have the gradients of their weights.
///
/// A weight backward computes the gradient of one parameter after the other, and frees the tensors from which it has computed
/// each. So the gradients count from the end of the first weight backward of a stage.
#[derive(Default)]
pub(crate) struct WithGradients(Vec<StageIndex>);

impl WithGradients {
    /// Returns the bytes that a stage with gradients of these bytes allocates when a weight backward of it ends.
    pub(crate) fn allocate(&mut self, stage: StageIndex, gradient: u64) -> u64 {
        if self.0.contains(&stage) {
            return 0;
        }
        self.0.push(stage);
        gradient
    }
}

/// A change of the memory of a rank at the start or at the end of an event.
pub(crate) struct MemoryChange {
    /// The index of the event.
    pub(crate) event: usize,
    pub(crate) is_at_end: bool,
    pub(crate) more: u64,
    pub(crate) less: u64,
}

/// Returns the changes of the memory of a rank, in their order, from its events, which are sorted by start.
pub(crate) fn memory_changes(events: &[Event], slices: Slices, sizes: &[StageSizes]) -> Vec<MemoryChange> {
    let mut held = Held {
        kinds: kinds(events),
        sizes,
        slices,
        at: (0, false),
        with_gradients: WithGradients::default(),
        forwards: forwards(events),
        changes: Vec::new(),
    };
    let mut transfers = transfers(events).into_iter().peekable();
    let mut transfer_while = |held: &mut Held<'_>, is_due: &dyn Fn(f64) -> bool| {
        while let Some((_, index)) = transfers.next_if(|&(time, _)| is_due(time)) {
            held.transfers(index, events[index].action);
        }
    };
    for (index, event) in events.iter().enumerate().filter(|(_, event)| event.action.is_compute()) {
        transfer_while(&mut held, &|time| time <= event.start);
        held.at = (index, false);
        event.action.parts().for_each(|part| held.starts(part));
        // A `RELOAD` that starts when a computation ends comes after it in the row.
        transfer_while(&mut held, &|time| time < event.end);
        held.at = (index, true);
        event.action.parts().for_each(|part| held.ends(part));
    }
    transfer_while(&mut held, &|_| true);
    held.changes
}

/// Returns the peak memory of each rank.
pub fn peak_memory(timeline: &Timeline, sizes: &[StageSizes]) -> Vec<u64> {
    let ranks = (0..timeline.ranks()).map(Rank::new);
    let peak = |rank| memory_curve(timeline, rank, sizes).iter().map(|step| step.held).max();
    ranks.map(|rank| peak(rank).unwrap_or(0)).collect()
}

/// Returns the moments at which tensors leave memory and come back, and at which frozen matrices are read and dropped, in
/// order, with the indices of the events.
fn transfers(events: &[Event]) -> Vec<(f64, usize)> {
    let moment = |(index, event): (usize, &Event)| match event.action.kind() {
        ActionKind::Offload => Some((event.end, index)),
        ActionKind::Reload | ActionKind::Unshard | ActionKind::Reshard => Some((event.start, index)),
        _ => None,
    };
    let mut moments: Vec<(f64, usize)> = events.iter().enumerate().filter_map(moment).collect();
    moments.sort_by(|one, other| one.0.total_cmp(&other.0));
    moments
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

/// Returns the kinds of actions in the events, by stage.
fn kinds(events: &[Event]) -> HashMap<StageIndex, BTreeSet<ActionKind>> {
    let mut kinds: HashMap<StageIndex, BTreeSet<ActionKind>> = HashMap::new();
    for part in events.iter().flat_map(|event| event.action.parts()) {
        kinds.entry(part.stage()).or_default().insert(part.kind());
    }
    kinds
}

fn makes_input_gradient(part: Action) -> bool {
    matches!(part.kind(), ActionKind::Backward | ActionKind::InputBackward)
}

/// The memory while a rank's events are replayed.
struct Held<'a> {
    kinds: HashMap<StageIndex, BTreeSet<ActionKind>>,
    sizes: &'a [StageSizes],
    slices: Slices,
    /// The event that is replayed, and whether it ends.
    at: (usize, bool),
    with_gradients: WithGradients,
    forwards: HashMap<Action, Forwards>,
    changes: Vec<MemoryChange>,
}

impl Held<'_> {
    fn starts(&mut self, part: Action) {
        let sizes = self.sizes_of(part);
        if part.kind() == ActionKind::Forward {
            let recompute = sizes.of_recomputed();
            let forwards = self.forwards.entry(part).or_default();
            forwards.started += 1;
            let bytes = match *forwards {
                Forwards { all: 0 | 1, .. } => sizes.activation,
                Forwards { started: 1, .. } => recompute.kept.saturating_add(sizes.keys_values),
                Forwards { .. } => recompute.recomputed,
            };
            self.change(bytes, 0);
        }
        if makes_input_gradient(part) {
            let keys_values = self.slices_before(part).saturating_mul(sizes.keys_values);
            self.change(keys_values.saturating_add(sizes.parts), 0);
        }
    }

    fn ends(&mut self, part: Action) {
        let sizes = self.sizes_of(part);
        let gradient = match part.kind() {
            ActionKind::Backward | ActionKind::WeightBackward => {
                self.with_gradients.allocate(part.stage(), sizes.gradient)
            }
            _ => 0,
        };
        match part.kind() {
            ActionKind::Forward if !self.runs_backward(part) => self.change(0, sizes.activation),
            ActionKind::Backward => {
                self.change(gradient, self.activation_of(part).saturating_add(sizes.parts));
            }
            ActionKind::InputBackward => {
                let stash = if self.has(part, ActionKind::WeightBackward) { sizes.stash } else { 0 };
                self.change(stash, self.activation_of(part).saturating_add(sizes.parts));
            }
            ActionKind::WeightBackward => self.change(gradient, sizes.stash),
            _ => {}
        }
        if makes_input_gradient(part) && self.has_slice_after(part) {
            self.change(0, (self.slices_before(part) + 1).saturating_mul(sizes.keys_values));
        }
    }

    /// Moves tensors or frozen matrices into memory, or out of it.
    fn transfers(&mut self, event: usize, action: Action) {
        let (sizes, kind) = (self.sizes_of(action), action.kind());
        self.at = (event, kind == ActionKind::Offload);
        match kind {
            ActionKind::Offload => self.change(0, sizes.offload),
            ActionKind::Reload => self.change(sizes.offload, 0),
            ActionKind::Reshard => self.change(0, sizes.streamed),
            _ => self.change(sizes.streamed, 0),
        }
    }

    /// Returns whether the stage of `part` has actions of a kind.
    fn has(&self, part: Action, kind: ActionKind) -> bool {
        self.kinds.get(&part.stage()).is_some_and(|kinds| kinds.contains(&kind))
    }

    fn runs_backward(&self, part: Action) -> bool {
        [ActionKind::Backward, ActionKind::InputBackward].into_iter().any(|kind| self.has(part, kind))
    }

    /// Returns the number of slices before the slice of `part` in the same microbatch.
    fn slices_before(&self, part: Action) -> u64 {
        part.microbatch().map_or(0, |number| u64::from(self.slices.place(number).1.get()))
    }

    /// Returns whether a slice of the same microbatch follows the slice of `part`.
    fn has_slice_after(&self, part: Action) -> bool {
        part.microbatch().is_some_and(|number| self.slices.after(number).is_some())
    }

    /// Returns the bytes that the forward of a backward has allocated.
    fn activation_of(&self, backward: Action) -> u64 {
        let (stage, sizes) = (backward.stage(), self.sizes_of(backward));
        let forward = backward.microbatch().map(|microbatch| Action::Forward { stage, microbatch });
        let recompute = sizes.of_recomputed();
        match forward.and_then(|forward| self.forwards.get(&forward)) {
            Some(forwards) if forwards.all > 1 => {
                recompute.kept.saturating_add(recompute.recomputed).saturating_add(sizes.keys_values)
            }
            _ => sizes.activation,
        }
    }

    fn sizes_of(&self, part: Action) -> StageSizes {
        let at = part.stage().index().min(self.sizes.len().saturating_sub(1));
        self.sizes.get(at).copied().unwrap_or_default().for_slice(self.slices)
    }

    fn change(&mut self, more: u64, less: u64) {
        let (event, is_at_end) = self.at;
        self.changes.push(MemoryChange { event, is_at_end, more, less });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::{Costs, RecomputeSizes};
    use crate::csv::parse_program;
    use crate::recompute::Recompute;
    use crate::simulate::{logical, timed};

    const SIZES: StageSizes = StageSizes { activation: 10, stash: 3, gradient: 100, ..UNIT };

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
        check("0F0,0B0\n", &[SIZES], &[(0.0, 10), (2.0, 100)]);
    }

    #[test]
    fn a_split_backward_leaves_a_stash() {
        check("0F0,0I0,0W0\n", &[SIZES], &[(0.0, 10), (2.0, 3), (3.0, 100)]);
        check("0F0,0I0,0W0\n", &[UNIT], &[(0.0, 1), (3.0, 0)]);
    }

    #[test]
    fn an_overlap_holds_both() {
        let expected = [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 2), (4.0, 1), (4.0, 2), (6.0, 1), (7.0, 0)];
        check("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n", &[UNIT], &expected);
    }

    #[test]
    fn a_forward_that_is_computed_again_keeps_its_inputs() {
        let program = parse_program("0F0,0F1,0I0,0W0,0B1\n").expect("a program");
        let costs = Costs { recompute: Recompute::Stage, ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        let recompute = Some(RecomputeSizes { kept: 2, recomputed: 8 });
        let curve = memory_curve(run.timeline(), Rank::new(0), &[StageSizes { recompute, ..SIZES }]);
        let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
        let weights = [(4.0, 5), (5.0, 102)];
        let expected = [(0.0, 2), (1.0, 4), (2.0, 12)].into_iter().chain(weights);
        assert_eq!(found, expected.chain([(5.0, 110), (8.0, 100)]).collect::<Vec<_>>());
        assert_eq!(peak_memory(run.timeline(), &[UNIT]), [1]);
    }

    #[test]
    fn a_backward_holds_the_parts_that_it_computes_again() {
        let sizes = StageSizes { parts: 4, ..SIZES };
        let curve = [(0.0, 10), (1.0, 14), (2.0, 3), (3.0, 100)];
        check("0F0,0I0,0W0\n", &[sizes], &curve);
        check("0F0,0B0\n", &[StageSizes { gradient: 0, ..sizes }], &[(0.0, 10), (1.0, 14), (2.0, 0)]);
    }

    #[test]
    fn tensors_that_have_left_are_not_held() {
        let check = |rows: &str, offload: &str, expected: &[(f64, u64)]| {
            let program = parse_program(rows).expect("a program");
            let costs = Costs { recompute: Recompute::Stage, ..offload.parse().expect("costs") };
            let run = timed(&program, &costs).expect("no deadlock");
            let recompute = Some(RecomputeSizes { kept: 2, recomputed: 8 });
            let sizes = StageSizes { recompute, gradient: 0, offload: 2, ..SIZES };
            let curve = memory_curve(run.timeline(), Rank::new(0), &[sizes]);
            let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
            assert_eq!(found, expected, "{offload}: {rows}");
        };
        let rows = "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0RELOAD1,0B0,0B1,0B2\n";
        let end = [(6.0, 4), (6.0, 12), (9.0, 2), (9.0, 10), (12.0, 0)];
        let at_once = [(0.0, 2), (1.0, 0), (1.0, 2), (2.0, 0), (2.0, 2), (2.0, 4), (3.0, 6), (3.0, 14)];
        check(rows, "offload=0", &[&at_once[..], &end].concat());
        let slow = [(0.0, 2), (1.0, 4), (1.5, 2), (2.0, 4), (2.5, 2), (2.5, 4), (3.0, 6), (3.0, 14)];
        check(rows, "offload=0.5", &[&slow[..], &end].concat());
        // What `0B1` has used is free when `0RELOAD0` starts.
        let rows = "0F0,0OFFLOAD0,0F1,0B1,0RELOAD0,0F2,0B0,0B2\n";
        let forwards = [(0.0, 2), (1.0, 0), (1.0, 10), (4.0, 0), (4.0, 2), (4.0, 4)];
        let backwards = [(5.0, 12), (8.0, 2), (8.0, 10), (11.0, 0)];
        check(rows, "offload=0", &[&forwards[..], &backwards].concat());
    }

    #[test]
    fn frozen_matrices_are_held_from_their_read_until_they_are_dropped() {
        let sizes = [StageSizes { streamed: 1000, ..SIZES }, StageSizes { streamed: 5000, ..SIZES }];
        let forwards = [(0.0, 1000), (0.0, 1010), (1.0, 10), (1.0, 5010), (1.0, 5020)];
        let backwards = [(3.0, 5110), (3.0, 110), (3.0, 1110), (4.0, 1200), (4.0, 200)];
        let rows = "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD\n";
        let program = parse_program(rows).expect("a program");
        let run = timed(&program, &Costs::default()).expect("no deadlock");
        let curve = memory_curve(run.timeline(), Rank::new(0), &sizes);
        let held: Vec<u64> = curve.iter().map(|step| step.held).collect();
        let expected: Vec<u64> = forwards.iter().chain(&backwards).map(|&(_, held)| held).collect();
        assert_eq!(held, expected);
        assert_eq!(peak_memory(run.timeline(), &sizes), [5110]);
    }

    /// Checks the memory of microbatches that are cut into `slices` slices.
    fn check_slices(slices: u32, rows: &str, sizes: StageSizes, expected: &[(f64, u64)]) {
        let program = parse_program(rows).expect("a program");
        let program = program.with_slices(Slices::new(slices).expect("not 0")).expect("whole microbatches");
        let timeline = logical(&program).expect("no deadlock").timeline(1.0);
        let curve = memory_curve(&timeline, Rank::new(0), &[sizes]);
        let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn slices_share_the_bytes_of_their_microbatch() {
        let sizes = StageSizes { activation: 12, keys_values: 4, ..SIZES };
        // Each slice has 6 bytes of activations. The last slice adds 2 bytes for the gradients of the other
        // one's keys and values.
        let expected = [(0.0, 6), (1.0, 12), (2.0, 14), (3.0, 108), (4.0, 102), (4.0, 100)];
        check_slices(2, "0F0,0F1,0B1,0B0\n", sizes, &expected);
        check_slices(1, "0F0,0B0\n", sizes, &[(0.0, 12), (2.0, 100)]);
        check_slices(2, "0F0,0F1,0B1,0B0\n", UNIT, &[(0.0, 1), (1.0, 2), (3.0, 1), (4.0, 0)]);
    }

    #[test]
    fn gradients_of_keys_wait_for_their_slice() {
        // 1 byte of keys and values for each of three slices, from the backward of slice 2 to the slice's
        // own. The backward of slice 1 has the byte of slice 0 a second time.
        let sizes = StageSizes { activation: 0, stash: 0, gradient: 0, keys_values: 3, ..SIZES };
        let rows = "0F0,0F1,0F2,0I2,0F3,0F4,0F5,0I1,0W2,0W1,0B0,0B5,0B4,0B3\n";
        let expected = [(3.0, 2), (7.0, 3), (8.0, 1), (11.0, 0), (11.0, 2), (12.0, 3), (13.0, 1), (14.0, 0)];
        check_slices(3, rows, sizes, &expected);
    }

    #[test]
    fn a_slice_that_is_computed_again_keeps_its_keys() {
        let program = parse_program("0F0,0F1,0B1,0B0\n").expect("a program");
        let program = program.with_slices(Slices::new(2).expect("not 0")).expect("whole microbatches");
        let costs = Costs { recompute: Recompute::Stage, ..Costs::default() };
        let run = timed(&program, &costs).expect("no deadlock");
        let recompute = Some(RecomputeSizes { kept: 2, recomputed: 8 });
        let sizes = StageSizes { activation: 10, gradient: 0, keys_values: 4, recompute, ..SIZES };
        let curve = memory_curve(run.timeline(), Rank::new(0), &[sizes]);
        let found: Vec<(f64, u64)> = curve.iter().map(|step| (step.time, step.held)).collect();
        // Slice 0 keeps 1 byte of inputs and 2 of keys and values. Slice 1 is not computed again, because its
        // backward follows at once; its 5 bytes are an activation, and its backward adds 2 bytes of gradients
        // for slice 0.
        assert_eq!(found, [(0.0, 3), (0.5, 8), (1.0, 10), (2.0, 5), (2.0, 9), (3.5, 2), (3.5, 0)]);
    }

    #[test]
    fn a_frozen_stage_keeps_what_its_backwards_need() {
        // Stage 0 runs forward only, and stage 2 has no weight gradients.
        let rows = "0F0,1F0,2F0,2I0,1I0,1W0\n";
        let expected = [(0.0, 10), (1.0, 0), (1.0, 10), (2.0, 20), (4.0, 10), (5.0, 3), (6.0, 100)];
        check(rows, &[SIZES], &expected);
    }

    #[test]
    fn without_backwards_nothing_stays() {
        check("0F0,0F1\n", &[UNIT], &[(0.0, 1), (1.0, 0), (1.0, 1), (2.0, 0)]);
        check("0F0,0F1\n", &[], &[]);
    }
}
