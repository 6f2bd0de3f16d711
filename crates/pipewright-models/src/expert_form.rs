//! The form of the experts of a family.

use pipewright::nn::ExpertActivation;

/// The form of the experts that a router chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertForm {
    /// Whether the router and the layers of experts have a bias.
    pub has_bias: bool,
    /// Whether files have the matrices of all experts of a layer in one tensor, with the columns of gate and
    /// up in turn.
    pub are_joined: bool,
    /// The function between the layers of an expert.
    pub activation: ExpertActivation,
}

impl Default for ExpertForm {
    fn default() -> Self {
        Self { has_bias: false, are_joined: false, activation: ExpertActivation::Usual }
    }
}
