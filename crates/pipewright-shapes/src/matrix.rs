//! The matrices of a model's products, and how ranks divide them.

/// A product of a matrix of parameters with the hidden states of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// The width of the input of a token.
    pub input: u64,
    /// The width of the output of a token.
    pub output: u64,
    /// How ranks of a tensor group divide it.
    pub division: Division,
    /// For the matrices of experts, their number and how many of them a token uses.
    pub of_experts: Option<Share>,
}

/// How the ranks of a tensor group divide a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// By outputs.
    Columns,
    /// By inputs.
    Rows,
    /// Not at all: each rank has all of it.
    Whole,
}

/// The share of the experts that a token uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The experts of a token.
    pub used: u64,
    /// All experts.
    pub of: u64,
}
