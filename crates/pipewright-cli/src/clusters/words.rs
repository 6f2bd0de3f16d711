//! The names of a plan's parts in the output.

use pipewright_cluster::layout::{Precision, Recompute, Sharding};

pub(crate) fn precision(precision: Precision) -> &'static str {
    match precision {
        Precision::Half => "bf16",
        Precision::Fp8 => "fp8",
    }
}

pub(crate) fn recompute(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::Full => "full",
    }
}

pub(crate) fn sharding(sharding: Sharding) -> &'static str {
    match sharding {
        Sharding::Replicated => "none",
        Sharding::Optimizer => "optimizer",
        Sharding::Gradients => "gradients",
        Sharding::Parameters => "parameters",
    }
}
