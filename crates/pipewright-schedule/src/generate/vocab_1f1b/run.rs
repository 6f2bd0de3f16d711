//! A simulated run of all ranks, in which a list of preferences chooses the actions.
//!
//! Actions take the times of their stages, and a result arrives at the neighbouring stage after the time of a
//! message. A rank chooses whenever one of its actions ends or a tensor arrives. Events are handled in the
//! order of time and then of ranks, so that a run depends only on its input.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::action::Action;
use crate::generate::search::Outcome;
use crate::generate::stage_cursor::StageCursor;
use crate::generate::ticks::StageTicks;
use crate::ids::StageIndex;
use crate::placement::Placement;

/// The input that all runs of a schedule share.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) placement: &'a Placement,
    pub(super) microbatches: u32,
    pub(super) costs: Vec<StageTicks>,
    /// The number of microbatches whose activations each stage may hold.
    pub(super) limits: Vec<u32>,
}

/// An action of a rank: of its first stage, which has layers, or of its second one, which has a part of the
/// head.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    LayerForward,
    LayerBackward,
    HeadForward,
    HeadBackward,
}

impl Kind {
    fn is_forward(self) -> bool {
        matches!(self, Self::LayerForward | Self::HeadForward)
    }

    fn is_of_head(self) -> bool {
        matches!(self, Self::HeadForward | Self::HeadBackward)
    }
}

/// The state of a stage during a run.
struct Stage {
    cursor: StageCursor,
    /// The number of microbatches whose activations the stage holds.
    held: u32,
    /// The arrival times of inputs and gradients that are not used yet, the next one first.
    inputs: VecDeque<u64>,
    gradients: VecDeque<u64>,
}

/// Simulates a step; `None` if it does not end before the tick `before`.
pub(super) fn run(task: &Task<'_>, order: [Kind; 4], before: u64) -> Option<Outcome> {
    let ranks = task.placement.ranks() as usize;
    let mut stages: Vec<Stage> = task.placement.all_stages().map(Stage::new).collect();
    stages[0].inputs.extend(std::iter::repeat_n(0, task.microbatches as usize));
    let mut rows = vec![Vec::with_capacity(4 * task.microbatches as usize); ranks];
    let mut free_at = vec![0; ranks];
    let mut wakes: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::from([Reverse((0, 0))]);
    let mut makespan = 0;
    while let Some(Reverse((now, rank))) = wakes.pop() {
        if free_at[rank] > now {
            continue;
        }
        let stage_of = |kind: Kind| if kind.is_of_head() { ranks + rank } else { rank };
        let can_run = |kind: &Kind| stages[stage_of(*kind)].can_run(*kind, now, task.limits[stage_of(*kind)]);
        let Some(kind) = order.into_iter().find(can_run) else { continue };
        let at = stage_of(kind);
        let StageTicks { forward, input_backward, weight_backward, output_hop, gradient_hop } =
            task.costs[at];
        rows[rank].push(Some(stages[at].perform(kind)));
        let takes = if kind.is_forward() { forward } else { input_backward + weight_backward };
        let end = now + takes;
        if end >= before {
            return None;
        }
        makespan = makespan.max(end);
        free_at[rank] = end;
        wakes.push(Reverse((end, rank)));
        let to = if kind.is_forward() { Some(at + 1) } else { at.checked_sub(1) };
        match to {
            Some(last) if last == stages.len() => stages[at].gradients.push_back(end),
            Some(to) => {
                let arrival = end + if kind.is_forward() { output_hop } else { gradient_hop };
                let Stage { inputs, gradients, .. } = &mut stages[to];
                if kind.is_forward() { inputs } else { gradients }.push_back(arrival);
                wakes.push(Reverse((arrival, to % ranks)));
            }
            None => {}
        }
    }
    Some(Outcome { makespan, rows })
}

impl Stage {
    fn new(stage: StageIndex) -> Self {
        let (inputs, gradients) = (VecDeque::new(), VecDeque::new());
        Self { cursor: StageCursor::new(stage), held: 0, inputs, gradients }
    }

    /// Returns whether the stage can run an action of this kind.
    fn can_run(&self, kind: Kind, now: u64, limit: u32) -> bool {
        let (queue, has_room) =
            if kind.is_forward() { (&self.inputs, self.held < limit) } else { (&self.gradients, true) };
        has_room && queue.front().is_some_and(|&arrival| arrival <= now)
    }

    fn perform(&mut self, kind: Kind) -> Action {
        if kind.is_forward() {
            self.inputs.pop_front();
            self.held += 1;
            self.cursor.forward()
        } else {
            self.gradients.pop_front();
            self.held -= 1;
            self.cursor.backward()
        }
    }
}
