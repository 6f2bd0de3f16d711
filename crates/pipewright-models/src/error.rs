//! The errors of configuring a model and of cutting it into stages.

/// An error of configuring a model, or of cutting it into stages.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There is no family of this name.
    #[error(
        "unknown model family `{found}`: set `model_type` (or `architectures`) to one of {}",
        .known.join(", ")
    )]
    UnknownFamily {
        /// The name that was found; empty if there is none.
        found: String,
        /// The names of all families.
        known: &'static [&'static str],
    },
    /// A key is missing or has a value of another type.
    #[error("invalid model configuration: {0}")]
    Parse(#[from] serde_json::Error),
    /// A value that the family does not support.
    #[error("`{key} = {value}` is not supported: only {supported} is")]
    NotSupported {
        /// The key.
        key: &'static str,
        /// The value that was asked for.
        value: String,
        /// The value or values that work.
        supported: &'static str,
    },
    /// A value outside its range.
    #[error("`{key} = {value}` is out of range: it must be {range}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The value that was asked for.
        value: String,
        /// The range of the value.
        range: &'static str,
    },
    /// Two values that do not fit together.
    #[error("`{key} = {value}` is not divisible by `{by} = {divisor}`")]
    NotDivisible {
        /// The key of the dividend.
        key: &'static str,
        /// The dividend.
        value: usize,
        /// The key of the divisor.
        by: &'static str,
        /// The divisor.
        divisor: usize,
    },
    /// A range of layers that is not a stage of the model.
    #[error("layers {start}..{end} are not a stage of a model of {layers} layers")]
    LayerRange {
        /// First layer.
        start: usize,
        /// Layer after the last.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
}
