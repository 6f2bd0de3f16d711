//! The part of a forward that its backward computes again, and how scores of attention are computed.

use pipewright_schedule::emit::Modules;

/// The part of the forward that the backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Nothing.
    None,
    /// With unfused attention, the scores (arXiv 2205.05198). Fused attention keeps no scores. There,
    /// elementwise operations and every second product are computed again, as torchtitan's selective
    /// checkpoints do.
    Selective,
    /// These parts of a block.
    Modules(Modules),
    /// All of a block.
    Full,
}

/// How scores of attention are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scores {
    /// In one kernel, which keeps no scores and skips pairs that are masked.
    Fused,
    /// By two products of matrices with a softmax between them, for all pairs.
    Unfused,
}

impl Recompute {
    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Modules(_) => "modules",
            Self::Full => "full",
        }
    }
}
