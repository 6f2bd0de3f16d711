//! The controls of the page: one entry for each size, setting and cost. The page's script knows none of them by name.

use pipewright_schedule::generate::{Generator, Setting, StageRule};
use serde::Serialize;

/// A control.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Field {
    /// Its key in a setup, and in links.
    pub(crate) key: &'static str,
    label: &'static str,
    /// The value that an empty control stands for.
    hint: &'static str,
    help: &'static str,
    /// The value of a setup without this key; empty for the choice of the schedule or of the costs.
    pub(crate) usual: &'static str,
    kind: Kind,
    pub(crate) is_cost: bool,
    #[serde(skip)]
    shown: Shown,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// A whole number.
    Number,
    /// Numbers or sizes, one for all stages or one for each.
    Text,
    Flag,
}

/// The schedules that have a control.
#[derive(Debug, Clone, Copy)]
enum Shown {
    Always,
    /// Schedules with a choice of the number of stages on a rank.
    FreeStages,
    /// Schedules with this setting.
    With(Setting),
}

/// All controls, in their order on the page.
pub(crate) const FIELDS: [Field; 16] = [
    Field { usual: "4", ..Field::size("ranks", "ranks", "4", "The number of ranks in the pipeline") },
    Field {
        usual: "8",
        ..Field::size("microbatches", "microbatches", "8", "The number of microbatches in a step")
    },
    Field {
        shown: Shown::FreeStages,
        ..Field::size("stages_per_rank", "chunks per rank", "2", "The number of stages on each rank")
    },
    Field::size(
        "group_size",
        "group size",
        "auto",
        "The number of microbatches that a chunk runs before the next chunk",
    )
    .with(Setting::GroupSize),
    Field { kind: Kind::Text, ..Field::size("memory_limit", "memory limit", "auto", LIMIT) }
        .with(Setting::MemoryLimit),
    Field::size(
        "slices",
        "slices",
        "2",
        "The number of slices into which each microbatch is cut along its sequence",
    )
    .with(Setting::Slices),
    Field::flag(
        "wide_warmup",
        "wide warm-up",
        "Warm up with two forwards instead of one for each later rank",
    )
    .with(Setting::WideWarmup),
    Field::flag(
        "overlap",
        "overlap",
        "Let forwards and backwards overlap, so that exchanges of experts are hidden",
    )
    .with(Setting::Overlap),
    Field::cost("F", "forward", "1", "The time of a forward"),
    Field::cost("B", "backward", "I + W", "The time of a whole backward"),
    Field::cost(
        "I",
        "input half",
        "B / 2 or 1",
        "The time of a backward's half that computes the gradients of the inputs",
    ),
    Field::cost(
        "W",
        "weight half",
        "B / 2 or 1",
        "The time of a backward's half that computes the gradients of the weights",
    ),
    Field::cost("hop", "message", "0", "The time of a message between ranks"),
    Field::cost("exchange", "expert exchange", "0", EXCHANGE).with(Setting::Overlap),
    Field::cost(
        "attention",
        "attention",
        "0",
        "The share of a forward that grows from slice to slice, from 0 to 1",
    )
    .with(Setting::Slices),
    Field::cost("activation", "memory", "counted", MEMORY),
];

const LIMIT: &str =
    "The number of activations that a stage may hold, one for all stages or a list with one for each";
const EXCHANGE: &str =
    "The time in which the tokens of a forward, and of a backward, travel to their experts and back";
const MEMORY: &str =
    "The memory of the activations of one microbatch, such as 512MiB; if empty, activations are counted";

impl Field {
    const fn size(key: &'static str, label: &'static str, hint: &'static str, help: &'static str) -> Self {
        Self { key, label, hint, help, usual: "", kind: Kind::Number, is_cost: false, shown: Shown::Always }
    }

    const fn flag(key: &'static str, label: &'static str, help: &'static str) -> Self {
        Self { kind: Kind::Flag, ..Self::size(key, label, "", help) }
    }

    const fn cost(key: &'static str, label: &'static str, hint: &'static str, help: &'static str) -> Self {
        Self { kind: Kind::Text, is_cost: true, ..Self::size(key, label, hint, help) }
    }

    const fn with(self, setting: Setting) -> Self {
        Self { shown: Shown::With(setting), ..self }
    }

    /// Returns whether a schedule has this control.
    pub(crate) fn is_of(&self, generator: &Generator) -> bool {
        match self.shown {
            Shown::Always => true,
            Shown::FreeStages => matches!(generator.stages, StageRule::Loops | StageRule::Vs),
            Shown::With(setting) => generator.settings.contains(&setting),
        }
    }
}
