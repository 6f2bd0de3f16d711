//! The controls of the page: one entry for each size, setting and cost. The page's script knows none of them by name.

use pipewright_schedule::generate::{Generator, Setting, StageRule};
use serde::Serialize;

/// A control.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Field {
    /// Its key in a setup, and in links.
    pub(crate) key: &'static str,
    pub(crate) label: &'static str,
    pub(crate) help: &'static str,
    /// The value of a setup without this key; empty for the choice of the schedule or of the costs.
    pub(crate) usual: &'static str,
    /// What an empty control stands for.
    hint: &'static str,
    kind: Kind,
    is_cost: bool,
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

impl Field {
    const SIZE: Self = Self {
        key: "",
        label: "",
        help: "",
        usual: "",
        hint: "",
        kind: Kind::Number,
        is_cost: false,
        shown: Shown::Always,
    };
    const COST: Self = Self { kind: Kind::Text, is_cost: true, ..Self::SIZE };

    pub(crate) fn is_cost(&self) -> bool {
        self.is_cost
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

/// All controls, in their order on the page.
pub(crate) const FIELDS: [Field; 16] = [
    Field {
        key: "ranks",
        label: "ranks",
        hint: "4",
        help: "The number of ranks in the pipeline",
        usual: "4",
        ..Field::SIZE
    },
    Field {
        key: "microbatches",
        label: "microbatches",
        hint: "8",
        help: "The number of microbatches in a step",
        usual: "8",
        ..Field::SIZE
    },
    Field {
        key: "stages_per_rank",
        label: "chunks per rank",
        hint: "2",
        help: "The number of stages on each rank; if empty, two",
        shown: Shown::FreeStages,
        ..Field::SIZE
    },
    Field {
        key: "group_size",
        label: "group size",
        hint: "auto",
        help: "The number of microbatches that a chunk runs before the next chunk; if empty, the schedule's own",
        shown: Shown::With(Setting::GroupSize),
        ..Field::SIZE
    },
    Field {
        key: "memory_limit",
        label: "memory limit",
        hint: "auto",
        help: "The number of activations that a stage may hold, one for all stages or a list with one for each; if empty, \
               the schedule's own",
        kind: Kind::Text,
        shown: Shown::With(Setting::MemoryLimit),
        ..Field::SIZE
    },
    Field {
        key: "slices",
        label: "slices",
        hint: "2",
        help: "The number of slices into which each microbatch is cut along its sequence; if empty, two",
        shown: Shown::With(Setting::Slices),
        ..Field::SIZE
    },
    Field {
        key: "wide_warmup",
        label: "wide warm-up",
        help: "Warm up with two forwards instead of one for each later rank",
        kind: Kind::Flag,
        shown: Shown::With(Setting::WideWarmup),
        ..Field::SIZE
    },
    Field {
        key: "overlap",
        label: "overlap",
        help: "Let forwards and backwards that follow each other overlap, so that exchanges of experts are hidden",
        kind: Kind::Flag,
        shown: Shown::With(Setting::Overlap),
        ..Field::SIZE
    },
    Field {
        key: "F",
        label: "forward",
        hint: "1",
        help: "The time of a forward; if empty, 1",
        ..Field::COST
    },
    Field {
        key: "B",
        label: "backward",
        hint: "I + W",
        help: "The time of a whole backward; if empty, the sum of its two halves",
        ..Field::COST
    },
    Field {
        key: "I",
        label: "input half",
        hint: "1",
        help: "The time of the half of a backward that computes the gradients of the inputs; if empty, 1, or half of the backward",
        ..Field::COST
    },
    Field {
        key: "W",
        label: "weight half",
        hint: "1",
        help: "The time of the half of a backward that computes the gradients of the weights; if empty, 1, or half of the backward",
        ..Field::COST
    },
    Field {
        key: "hop",
        label: "message",
        hint: "0",
        help: "The time of a message between ranks; if empty, 0",
        ..Field::COST
    },
    Field {
        key: "exchange",
        label: "expert exchange",
        hint: "0",
        help: "The time in which the tokens of a forward, and of a backward, travel to their experts and back; if empty, 0",
        shown: Shown::With(Setting::Overlap),
        ..Field::COST
    },
    Field {
        key: "attention",
        label: "attention",
        hint: "0",
        help: "The share of a forward that grows from slice to slice, from 0 to 1; if empty, 0",
        shown: Shown::With(Setting::Slices),
        ..Field::COST
    },
    Field {
        key: "activation",
        label: "memory",
        hint: "512MiB",
        help: "The memory of the activations of one microbatch, such as 512MiB; if empty, activations are counted",
        ..Field::COST
    },
];
