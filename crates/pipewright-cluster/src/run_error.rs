//! The errors of a run in a file of published runs.

use thiserror::Error;

/// The errors of a run.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum RunError {
    /// The model is not in the file.
    #[error("the file has no model of this name{hint}; add a [[model]]")]
    Model {
        /// The nearest name, if there is one.
        hint: String,
    },
    /// A size of the model is out of its range.
    #[error("the model's `{key}` is {value}; use a value from {least} to {most}")]
    ModelSize {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The smallest value.
        least: u64,
        /// The largest value.
        most: u64,
    },
    /// The width of a head would be 0.
    #[error(
        "the model's {heads} `heads` are more than its `hidden` of {hidden}; use fewer heads, or give `head_size`"
    )]
    Heads {
        /// The heads.
        heads: u64,
        /// The width of the hidden states.
        hidden: u64,
    },
    /// A model with experts does not say how many of them a token uses.
    #[error("the model has {experts} `experts` and no `experts_per_token`; add the number that a token uses")]
    ExpertsPerToken {
        /// The experts.
        experts: u64,
    },
    /// A number of the model contradicts another one.
    #[error("the model's `{key}` is {value}; use {expected}")]
    Contradiction {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The expected values.
        expected: String,
    },
    /// The machine is neither in the file nor known.
    #[error("the file has no machine `{name}`, and none is known by this name{hint}; add a [[machine]]")]
    Machine {
        /// The name.
        name: String,
        /// The nearest name, if there is one.
        hint: String,
    },
    /// The given number of replicas differs from the mesh.
    #[error("`dp` is {given}, but the GPUs and the mesh make {replicas} replicas; leave `dp` out")]
    Replicas {
        /// The given number.
        given: u32,
        /// The number that follows.
        replicas: u32,
    },
    /// Nothing was measured.
    #[error("there is neither `step_s` nor `tokens_per_s_per_gpu` above 0; give what was measured")]
    NotMeasured,
}

pipewright_schedule::message_as_debug!(RunError);
