//! How well predictions were judged: the errors of published runs of the same kind.
//!
//! `errors_by_kind.toml` has them by stack, machine and kind of run. A test compares the file with the predictions of the
//! published runs that the repository has, so it follows the cost model.

use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::setting::Setting;
use pipewright_shapes::model::{Mixer, Model};

/// The error that a prediction of a kind without published runs may have at least.
pub const UNJUDGED: f64 = 0.2;
/// The tokens from which a sequence counts as long.
const LONG: u32 = 32_768;

/// The errors of some published runs of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindErrors {
    /// The name of the stack.
    pub stack: String,
    /// The name of the machine.
    pub machine: String,
    /// The kind of run, by [`kind_of`].
    pub kind: String,
    /// The runs.
    pub runs: usize,
    /// The mean of the errors of a step without their signs, as a share.
    pub mean: f64,
    /// The largest of them.
    pub largest: f64,
}

/// How well predictions of the kind of a setting were judged.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Accuracy {
    /// The kind of run.
    pub kind: &'static str,
    /// The name of the stack.
    pub stack: &'static str,
    /// The name of the machine, or of the known machine whose figures it has.
    pub machine: String,
    /// The published runs that were compared: on this machine, or else on all machines.
    pub runs: usize,
    /// Whether these runs were on this machine.
    pub on_this_machine: bool,
    /// The mean of their errors without signs; [`UNJUDGED`] without runs.
    pub mean: f64,
    /// The largest of them.
    pub largest: f64,
}

/// The file of errors, as a table of runs.
#[derive(Deserialize)]
struct File {
    kinds: Vec<KindErrors>,
}

static KINDS: LazyLock<Vec<KindErrors>> = LazyLock::new(|| {
    let file: Result<File, _> = toml::from_str(include_str!("errors_by_kind.toml"));
    file.map_or_else(|_| Vec::new(), |file| file.kinds)
});

/// Returns the errors of all published runs of the repository, by kind.
pub fn kinds() -> &'static [KindErrors] {
    &KINDS
}

/// Returns the kind of a run: a state space, experts, adapters, long sequences, or dense.
pub fn kind_of(model: &Model, sequence: u32) -> &'static str {
    let has = |is_it: fn(&Mixer) -> bool| model.blocks.iter().any(|block| is_it(&block.mixer));
    if model.is_adapted() {
        "adapters"
    } else if has(|mixer| matches!(mixer, Mixer::Mamba2(_))) {
        "state spaces"
    } else if model.has_experts() {
        "experts"
    } else if sequence >= LONG {
        "long sequences"
    } else {
        "dense"
    }
}

impl Accuracy {
    /// Returns how well predictions of the kind of a setting were judged.
    pub fn of(setting: &Setting<'_>) -> Self {
        let kind = kind_of(setting.model, setting.layout.sequence);
        let stack = setting.layout.implementation.stack.name();
        let machine = setting.machine.based_on.as_ref().unwrap_or(&setting.machine.name);
        let of_kind = |errors: &&KindErrors| errors.kind == kind && errors.stack == stack;
        let all: Vec<&KindErrors> = kinds().iter().filter(of_kind).collect();
        let own: Vec<&KindErrors> = all.iter().copied().filter(|errors| errors.machine == *machine).collect();
        let on_this_machine = !own.is_empty();
        let counted = if on_this_machine { own } else { all };
        let runs = counted.iter().map(|errors| errors.runs).sum::<usize>();
        let sum: f64 = counted.iter().map(|errors| errors.mean * errors.runs as f64).sum();
        Self {
            kind,
            stack,
            machine: machine.clone(),
            runs,
            on_this_machine,
            mean: if runs > 0 { sum / runs as f64 } else { UNJUDGED },
            largest: counted.iter().map(|errors| errors.largest).fold(0.0, f64::max),
        }
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, stack, machine, runs, mean, largest, .. } = self;
        if *runs == 0 {
            let least = UNJUDGED * 100.0;
            return write!(
                f,
                "no published run of this kind ({kind}, {stack}) was compared: expect an error of {least:.0}% or more"
            );
        }
        let place = if self.on_this_machine { machine.as_str() } else { "other machines" };
        let runs = pipewright_schedule::words::counted(*runs as u64, "published run");
        let (mean, largest) = (mean * 100.0, largest * 100.0);
        write!(f, "{kind}, {place}, {stack}: {runs}, mean error {mean:.1}%, largest {largest:.1}%")
    }
}
