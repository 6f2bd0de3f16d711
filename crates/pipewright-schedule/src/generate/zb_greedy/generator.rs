//! The candidate schedules, and the choice among them.

use crate::action::Action;
use crate::costs::Costs;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::memory_limit::{PerStage, memory_limits};
use crate::generate::search::{Outcome, shortest};
use crate::generate::settings::Setting;
use crate::generate::spec::{ScheduleSpec, Search};
use crate::generate::stage_rule::StageRule;
use crate::generate::ticks::ticks;
use crate::generate::zb_greedy::rules::Rules;
use crate::generate::zb_greedy::run::{Plan, Task, run};
use crate::generate::{zb_h1, zb_h2};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::slices::Slices;

const NAME: &str = "zb-greedy";

pub(crate) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "made to measured times and a memory limit; never worse than ZB-H1 at its memory",
    settings: &[Setting::Costs, Setting::MemoryLimit],
    trains: true,
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
    stages: StageRule::One,
    actions: 3,
    slices: Slices::ONE,
    check,
    generate,
};

fn check(spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
    let search = Search { schedule: NAME, actions: 3, other: "zb-h1" };
    spec.check_search(search, spec.ranks * stages_per_rank)
}

fn generate(spec: &ScheduleSpec, placement: Placement) -> Schedule {
    let (ranks, stages) = (placement.ranks(), placement.stages());
    let as_1f1b = PerStage::Same(ranks);
    let limits = spec.memory_limit.as_ref().unwrap_or(&as_1f1b);
    let task = Task {
        microbatches: spec.microbatches,
        costs: ticks(spec.costs.as_ref().unwrap_or(&Costs::default()), &placement),
        limits: memory_limits(limits, stages),
    };
    let best = best_of(&task, ranks);
    Schedule::generated(placement, spec.microbatches, best.rows)
}

/// Returns the shortest candidate; the first of several.
fn best_of(task: &Task, ranks: u32) -> Outcome {
    let fixed =
        [zb_h1::rows, zb_h2::rows].map(|rows| -> Vec<Vec<Option<Action>>> { rows(ranks, task.microbatches) });
    let plans = fixed.iter().map(|rows| Plan::Order(rows)).chain(Rules::all().map(Plan::Rules));
    let best = shortest(plans, |plan, before| run(task, plan, before));
    best.expect("rules keep the limits, so that their runs come to an end")
}
