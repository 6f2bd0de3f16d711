//! The lists that are tried, and the choice among their runs.

use crate::costs::Costs;
use crate::generate::error::GenerateErrorKind;
use crate::generate::generator::Generator;
use crate::generate::guide::{Formula, Guide};
use crate::generate::memory_limit::{PerStage, memory_limits};
use crate::generate::search::shortest;
use crate::generate::settings::Setting;
use crate::generate::spec::{ScheduleSpec, Search};
use crate::generate::stage_rule::StageRule;
use crate::generate::ticks::ticks;
use crate::generate::vocab_1f1b::run::{Kind, Task, run};
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::slices::Slices;

const NAME: &str = "vocab1f1b";

/// The number of microbatches beyond the ranks whose activations a stage holds without another limit.
const SPARE: u32 = 2;
pub(crate) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "1F1B with a part of the head on every rank; p + 2 activations of a stage",
    settings: &[Setting::Costs, Setting::MemoryLimit],
    trains: true,
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
    actions: 2,
    slices: Slices::ONE,
    check,
    generate,
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

fn check(spec: &ScheduleSpec, stages_per_rank: u32) -> Result<(), GenerateErrorKind> {
    let search = Search { schedule: NAME, actions: 2, other: "interleaved1f1b" };
    spec.check_search(search, spec.ranks * stages_per_rank)
}

fn generate(spec: &ScheduleSpec, placement: Placement) -> Schedule {
    let usual = PerStage::Same(placement.ranks().saturating_add(SPARE));
    let task = Task {
        microbatches: spec.microbatches,
        costs: ticks(spec.costs.as_ref().unwrap_or(&Costs::default()), &placement),
        limits: memory_limits(spec.memory_limit.as_ref().unwrap_or(&usual), placement.stages()),
        placement: &placement,
    };
    let best = shortest(ORDERS, |order, before| run(&task, order, before));
    let rows = best.expect("limits of at least one are kept, so that the first run comes to an end").rows;
    Schedule::generated(placement, spec.microbatches, rows)
}
