//! The greedy zero-bubble scheduler: it optimises the order for measured times, under a memory limit on each
//! stage.
//!
//! After the heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", 2023. There is one stage per rank.
//! The paper's B and W are `I` and `W` here.
//!
//! In a simulated run, a free stage chooses its next action by rules with a few flags
//! (`rules.rs`). The scheduler runs all combinations of flags, and the fixed orders of ZB-H1 and ZB-H2 if the
//! limits allow them, and keeps the shortest. So with the memory of ZB-H1 it is never slower than ZB-H1, and
//! it never exceeds its limits.
//!
//! The limit of a stage counts the microbatches whose activations it holds, from `F` to `W`. A limit of one
//! is slow but has no deadlock: each stage takes the microbatches in order, so the next stage of the oldest
//! microbatch in flight holds no microbatch that blocks it.
//!
//! Time: about a dozen runs, each linear in the actions with a factor logarithmic in the ranks. A run stops
//! once it is longer than the best one so far. Sizes at which the search would take minutes are refused.

mod rules;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::action::Action;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::{Formula, Generator, Grid, Guide};
use crate::generate::search::{Outcome, Search, Task, shortest};
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_cursor::StageCursor;
use crate::generate::ticks::StageTicks;
use crate::generate::zb_greedy::rules::{Rules, StageState, Step};
use crate::generate::{zb_h1, zb_h2};
use crate::ids::StageIndex;
use crate::placement::Placement;

pub(super) const GENERATOR: Generator = Generator {
    name: "zb-greedy",
    summary: "made to measured times and a memory limit; never worse than ZB-H1 at its memory",
    settings: &[Setting::Costs, Setting::MemoryLimit],
    aliases: &["greedy"],
    guide: Guide {
        source: "the heuristic of Qi et al., \"Zero Bubble Pipeline Parallelism\", 2023",
        order: "There is one stage on each rank. In a simulated run, a free stage chooses its next action \
                by rules with a few flags. The generator tries all combinations of the flags, and the \
                orders of ZB-H1 and ZB-H2 if the limits allow them, and keeps the shortest. \
                A stage holds at most `p` activations, or as many as `memory_limit` says.",
        choice: "Choose it if stages differ in length and the costs are known, or if stages have different \
                 limits of memory. It never exceeds a limit, and with the memory of ZB-H1 it is never \
                 slower. `pipewright plan` searches such orders for measured costs.",
        bubble: &[Formula::at_most("m >= p", "(p - 1) / (3 m + p - 1)")],
        peak: &[Formula::at_most("", "p")],
    },
    actions: 3,
    check,
    generate,
    ..Generator::USUAL
};

fn check(schedule: &'static str, spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
    Search { schedule, actions: 3, other: "zb-h1" }.check(spec, stages_per_rank)
}

fn generate(spec: &ScheduleSpec, placement: &Placement) -> Grid {
    let task = Task::of(spec, placement, placement.ranks());
    let fixed = [zb_h1::rows, zb_h2::rows].map(|rows| rows(placement.ranks(), spec.microbatches));
    let plans = fixed.iter().map(|rows| Plan::Order(rows)).chain(Rules::all().map(Plan::Rules));
    let best = shortest(plans, |plan, before| run(&task, plan, before));
    best.expect("rules keep the limits, so that their runs come to an end").rows
}

/// The choice of the next action of a stage.
#[derive(Debug, Clone, Copy)]
enum Plan<'a> {
    /// By rules, when the stage is free.
    Rules(Rules),
    /// In the order of a row for each stage.
    Order(&'a [Vec<Option<Action>>]),
}

/// The state of a stage during a run.
struct Stage {
    cursor: StageCursor,
    cost: StageTicks,
    limit: u32,
    warm_up: u32,
    forwards: u32,
    backwards: u32,
    weights: u32,
    /// The arrival times of inputs and gradients that are not used yet, the next one first.
    inputs: VecDeque<u64>,
    gradients: VecDeque<u64>,
    free_at: u64,
    forward_was_last: bool,
    row: Vec<Option<Action>>,
}

/// Simulates a step; `None` if it does not end before the tick `before`, or if the given order exceeds the
/// memory limit of a stage.
fn run(task: &Task<'_>, plan: Plan<'_>, before: u64) -> Option<Outcome> {
    let mut stages: Vec<Stage> = (0..task.costs.len()).map(|stage| Stage::new(task, stage, plan)).collect();
    let mut wakes: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::from([Reverse((0, 0))]);
    let mut makespan = 0;
    while let Some(Reverse((now, at))) = wakes.pop() {
        let stage = &mut stages[at];
        if stage.free_at > now {
            continue;
        }
        let step = match plan {
            Plan::Rules(rules) => rules.choose(stage.state(now)),
            Plan::Order(rows) => stage.step_of_row(&rows[at], now),
        };
        let Some(step) = step else { continue };
        if step == Step::Forward && stage.forwards - stage.weights == stage.limit {
            return None;
        }
        let end = stage.perform(step, now);
        if end >= before {
            return None;
        }
        makespan = makespan.max(end);
        wakes.push(Reverse((end, at)));
        let StageTicks { output_hop, gradient_hop, .. } = stage.cost;
        let receiver = match step {
            Step::Forward if at + 1 == stages.len() => {
                stages[at].gradients.push_back(end);
                None
            }
            Step::Forward => Some((at + 1, true, end + output_hop)),
            Step::InputBackward => at.checked_sub(1).map(|to| (to, false, end + gradient_hop)),
            Step::WeightBackward => None,
        };
        if let Some((to, is_input, arrival)) = receiver {
            let queue = if is_input { &mut stages[to].inputs } else { &mut stages[to].gradients };
            queue.push_back(arrival);
            wakes.push(Reverse((arrival, to)));
        }
    }
    Some(Outcome { makespan, rows: stages.into_iter().map(|stage| stage.row).collect() })
}

impl Stage {
    fn new(task: &Task<'_>, stage: usize, plan: Plan<'_>) -> Self {
        let following = (task.costs.len() - 1 - stage) as u32;
        let warm_up = match plan {
            Plan::Rules(rules) => rules.warm_up(following),
            Plan::Order(_) => u32::MAX,
        };
        let from_batch = if stage == 0 { task.microbatches as usize } else { 0 };
        Self {
            cursor: StageCursor::new(StageIndex::new(stage as u32)),
            cost: task.costs[stage],
            limit: task.limits[stage],
            warm_up,
            forwards: 0,
            backwards: 0,
            weights: 0,
            inputs: std::iter::repeat_n(0, from_batch).collect(),
            gradients: VecDeque::new(),
            free_at: 0,
            forward_was_last: false,
            row: Vec::with_capacity(3 * task.microbatches as usize),
        }
    }

    fn state(&self, now: u64) -> StageState {
        let has_room = self.forwards - self.weights < self.limit;
        let may_warm_up = self.backwards > 0 || self.forwards < self.warm_up;
        StageState {
            forward_at: self.inputs.front().copied().filter(|_| has_room && may_warm_up),
            backward_at: self.gradients.front().copied(),
            weights_take: (self.weights < self.backwards).then_some(self.cost.weight_backward),
            forward_was_last: self.forward_was_last,
            now,
        }
    }

    /// Returns the next action of a row, if it can run.
    fn step_of_row(&self, row: &[Option<Action>], now: u64) -> Option<Step> {
        let has_come = |queue: &VecDeque<u64>| queue.front().is_some_and(|&arrival| arrival <= now);
        match row.get(self.row.len()).copied().flatten()? {
            Action::Forward { .. } => has_come(&self.inputs).then_some(Step::Forward),
            Action::InputBackward { .. } => has_come(&self.gradients).then_some(Step::InputBackward),
            _ => Some(Step::WeightBackward),
        }
    }

    /// Starts an action and returns its end.
    fn perform(&mut self, step: Step, now: u64) -> u64 {
        let (action, takes) = match step {
            Step::Forward => {
                self.inputs.pop_front();
                self.forwards += 1;
                (self.cursor.forward(), self.cost.forward)
            }
            Step::InputBackward => {
                self.gradients.pop_front();
                self.backwards += 1;
                (self.cursor.input_backward(), self.cost.input_backward)
            }
            Step::WeightBackward => {
                self.weights += 1;
                (self.cursor.weight_backward(), self.cost.weight_backward)
            }
        };
        self.forward_was_last =
            step == Step::Forward || (self.forward_was_last && step != Step::InputBackward);
        self.row.push(Some(action));
        self.free_at = now + takes;
        self.free_at
    }
}
