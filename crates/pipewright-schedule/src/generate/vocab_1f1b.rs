//! 1F1B with a head that is cut along the vocabulary, so that every rank computes a part of it.
//!
//! After Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. In the
//! paper, the ranks compute their parts of the head at the same time, between collectives. Here the parts are
//! stages like others: a part sends the hidden states and the statistics of the softmax on to the next one,
//! so there are only messages between neighbours.
//!
//! There are two stages on each rank, placed in a loop: the first round is meant for the layers, the second
//! one for the parts of the head. A stage holds the activations of at most `p + 2` microbatches, or of as
//! many as the memory limit says.
//!
//! In a simulated run, a free rank runs the first action of a list that can run. The lists are
//! orders of the four kinds: a forward and a backward of each of its two stages. The generator tries several
//! lists and keeps the shortest run.
//!
//! A limit of one is slow but has no deadlock: each stage takes the microbatches in order, so the stages that
//! the oldest microbatch in flight needs hold no microbatch that blocks it.
//!
//! Time: some runs, each linear in the actions with a factor logarithmic in the ranks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::action::Action;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::{Formula, Generator, Grid, Guide, StageRule};
use crate::generate::search::{Outcome, Search, Task, shortest};
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::generate::ticks::StageTicks;
use crate::ids::StageIndex;
use crate::placement::Placement;

/// The number of microbatches beyond the ranks whose activations a stage holds without another limit.
const SPARE: u32 = 2;
pub(super) const GENERATOR: Generator = Generator {
    name: "vocab1f1b",
    summary: "1F1B with a part of the head on every rank; p + 2 activations of a stage",
    settings: &[Setting::Costs, Setting::MemoryLimit],
    aliases: &["vocabulary-1f1b", "vocab"],
    guide: Guide {
        source: "the memory of Yeung et al., \"Balancing Pipeline Parallelism with Vocabulary Parallelism\", 2024, \
                 with messages between neighbours instead of collectives",
        order: "There are two stages on each rank, placed in a loop: the first round for the layers, the second one for \
                the parts of the head (`pipeline.head_parts`). In a simulated run, a free rank chooses among a forward \
                and a backward of each stage by a fixed order of preference. The generator tries several orders of \
                preference and keeps the shortest run. A stage holds the activations of at most `p + 2` microbatches, \
                or of as many as `memory_limit` says.",
        choice: "Choose it to spread the parameters and the work of a large head over all ranks. `1f1b` with a cut \
                 through the head has stages that are as long, but only the last ranks have a part of the head. A \
                 microbatch visits each rank twice on its way to the loss. So in the memory of `p + 2`, a step with 8 \
                 ranks and 32 microbatches takes 4% to 24% longer than with `1f1b`, if the head takes a tenth to \
                 four times as long as the layers. With a limit of `2 p`, it is shorter if the head takes at least half \
                 as long.",
        bubble: &[Formula::at_most("m >= p", "2 p / (m + 2 p)")],
        peak: &[Formula::at_most("", "2 p + 4")],
    },
    stages: StageRule::TwoLoops,
    check,
    generate,
    ..Generator::USUAL
};

/// The orders of preference that are tried.
const ORDERS: [[Kind; 4]; 8] = {
    use Kind::{HeadBackward, HeadForward, LayerBackward, LayerForward};
    [
        [LayerForward, HeadForward, HeadBackward, LayerBackward],
        [LayerForward, HeadBackward, HeadForward, LayerBackward],
        [LayerForward, LayerBackward, HeadBackward, HeadForward],
        [HeadForward, HeadBackward, LayerForward, LayerBackward],
        [HeadBackward, HeadForward, LayerForward, LayerBackward],
        [HeadForward, LayerForward, HeadBackward, LayerBackward],
        [LayerBackward, LayerForward, HeadBackward, HeadForward],
        [HeadBackward, LayerForward, HeadForward, LayerBackward],
    ]
};

fn check(schedule: &'static str, spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
    Search { schedule, actions: 2, other: "interleaved1f1b" }.check(spec, stages_per_rank)
}

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let task = Task::of(spec, placement, placement.ranks().saturating_add(SPARE));
    let best = shortest(ORDERS, |order, before| run(&task, order, before));
    best.expect("limits of at least one are kept, so that the first run comes to an end").rows
}

/// An action of a rank: of its first stage, which has layers, or of its second one, which has a part of the
/// head.
#[derive(Debug, Clone, Copy)]
enum Kind {
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
fn run(task: &Task<'_>, order: [Kind; 4], before: u64) -> Option<Outcome> {
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
