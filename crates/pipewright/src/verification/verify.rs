//! [`Verify`]: whether suspicious steps are computed again.

use serde::{Deserialize, Serialize};

/// The most repetitions of a step.
pub const REPETITIONS: u32 = 3;

/// Whether suspicious steps are computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// No step is repeated.
    #[default]
    Off,
    /// A suspicious step is repeated, and the bits are compared.
    OnSuspicion,
}

impl Verify {
    /// All values with their names in configurations.
    pub const NAMED: [(&'static str, Self); 2] = [("off", Self::Off), ("on-suspicion", Self::OnSuspicion)];
}
