//! [`Replan`]: whether layers move to other ranks while a run trains.

use serde::Serialize;

/// Whether layers move to other ranks while a run trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replan {
    /// The layers stay where they are.
    Never,
    /// Layers move when ranks have become slower or faster.
    WhenSlow,
}

impl Replan {
    /// The words of the configuration.
    pub const NAMED: [(&str, Self); 2] = [("never", Self::Never), ("when-slow", Self::WhenSlow)];
}
