//! The parts of a plan for a cluster that a plan without a cluster does not have: ranks that divide
//! sequences, experts and the state of replicas, and blocks of which a part is recomputed.

/// The parts of a plan for a cluster that a [`Plan`](crate::plan::Plan) does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshOptions {
    /// The ranks that divide each sequence.
    pub context: u32,
    /// The groups of ranks that divide the experts among them; 0 if the model has no experts.
    pub expert: u32,
    /// The ranks that divide each expert.
    pub expert_tensor: u32,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub sequence_parallel: bool,
    /// The tensors that replicas shard.
    pub sharded: ShardedState,
    /// The part of each block that its backward computes again.
    pub recompute: RecomputedPart,
    /// The blocks that predict further tokens, in the last stage.
    pub predictors: u32,
    /// Whether products with parameters are in FP8.
    pub fp8: bool,
}

/// The tensors that replicas shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardedState {
    /// Nothing.
    Nothing,
    /// The state of the optimizer.
    Optimizer,
    /// Gradients and the state of the optimizer.
    Gradients,
    /// Parameters, gradients and the state of the optimizer.
    Parameters,
}

/// The part of a block that its backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecomputedPart {
    /// Nothing.
    Nothing,
    /// The scores of attention.
    Scores,
    /// Elementwise operations and every second product.
    Elementwise,
    /// All of it, from the input of the block.
    Block,
}

/// The options of a mesh without any of these parts.
#[cfg(test)]
pub(super) const NO_OPTIONS: MeshOptions = MeshOptions {
    context: 1,
    expert: 0,
    expert_tensor: 1,
    sequence_parallel: false,
    sharded: ShardedState::Nothing,
    recompute: RecomputedPart::Nothing,
    predictors: 0,
    fp8: false,
};

impl ShardedState {
    /// Returns how many of `replicas` replicas hold one copy of the parameters of a stage together.
    pub(super) fn shards(self, replicas: u32) -> u32 {
        match self {
            Self::Nothing | Self::Optimizer => 1,
            Self::Gradients | Self::Parameters => replicas,
        }
    }
}
