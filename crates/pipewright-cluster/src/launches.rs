//! The pace of the host, which launches the kernels of a block.
//!
//! Without graphs, each kernel takes the host some microseconds, in which PyTorch checks, records and launches it.
//! A GPU that is faster than the host waits. Kernels of a block are not equally long, so short ones wait while the
//! host is behind and long ones let it catch up: with the times `g` of the GPU and `h` of the host, a block takes
//! `(g^p + h^p)^(1/p)`. Around the exchange of experts' tokens the host reads how many there are, so it is never
//! ahead of the GPU, and its time for these kernels is added to the block's.

use pipewright_shapes::model::{Block, FeedForward, Mixer};

use crate::implementation::{Dispatcher, Graphs};
use crate::setting::Setting;

/// The power `p`. With 4, a host that is as fast as the GPU costs a fifth.
const POWER: f64 = 4.0;
/// The kernels of attention in a forward: a norm, products, positions, attention and a sum.
const ATTENTION: f64 = 24.0;
/// The kernels of a Mamba-2 mixer or of linear attention in a forward: products, convolution, the parts of the scan, norms.
const MAMBA: f64 = 28.0;
/// The kernels of a dense feed-forward part in a forward.
const DENSE: f64 = 10.0;
/// The kernels of experts in a forward besides the products: the router, the maps of tokens, both exchanges, copies
/// and their weights.
const EXPERTS: f64 = 60.0;
/// The kernels of an exchange whose sizes the host reads, so that it waits for the GPU.
const SIZES: f64 = 40.0;
/// The kernels of each product with weights in a narrow format: casts and scales.
const CASTS: f64 = 3.0;
/// The share of experts' kernels that are in no graph of parts of blocks.
const UNGRAPHED: f64 = 0.7;
/// The kernels of a backward, divided by the kernels of a forward.
const BACKWARD: f64 = 2.0;

impl Setting<'_> {
    /// Returns the seconds in which the GPU waits for the host in a forward and in a backward of a block that take
    /// these times on the GPU.
    pub(crate) fn launches(&self, block: &Block, [forward, backward]: [f64; 2]) -> [f64; 2] {
        let [ahead, behind] = self.launched_kernels(block).map(|kernels| kernels * self.stack().host_kernel);
        let wait = |gpu: f64, host: f64| (gpu.powf(POWER) + host.powf(POWER)).powf(1.0 / POWER) - gpu;
        [wait(forward, ahead) + behind, wait(backward, ahead * BACKWARD) + behind * BACKWARD]
    }

    /// The kernels of a forward that the host launches one by one: ahead of the GPU, and around the exchange of
    /// experts' tokens.
    fn launched_kernels(&self, block: &Block) -> [f64; 2] {
        let implementation = &self.layout.implementation;
        let casts = |products: f64| if self.layout.precision.is_narrow() { CASTS * products } else { 0.0 };
        let mixer = match block.mixer {
            Mixer::Attention(_) => ATTENTION + casts(2.0),
            Mixer::Latent(_) => ATTENTION + casts(5.0),
            Mixer::Mamba2(_) | Mixer::Delta(_) => MAMBA + casts(2.0),
            Mixer::None => 0.0,
        };
        let feed_forward = match &block.feed_forward {
            FeedForward::Dense(_) => DENSE + casts(2.0),
            FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
                let own = experts.count as f64 / f64::from(self.layout.expert);
                let products = if implementation.has_one_grouped_kernel() { 2.0 } else { 2.0 * own };
                let sizes = if implementation.dispatcher == Dispatcher::AllToAll { SIZES } else { 0.0 };
                let shared = if experts.shared_inner > 0 { DENSE } else { 0.0 };
                EXPERTS + products + casts(2.0) + sizes + shared
            }
            FeedForward::None => 0.0,
        };
        let is_routed = block.feed_forward.experts().is_some();
        match (implementation.graphs, is_routed) {
            (Graphs::None, false) => [mixer + feed_forward, 0.0],
            (Graphs::None, true) => [mixer, feed_forward],
            // Kernels whose sizes depend on the routing of tokens are in no graph.
            (Graphs::Partial, true) => [0.0, feed_forward * UNGRAPHED],
            (Graphs::Partial, false) | (Graphs::Full, _) => [0.0; 2],
        }
    }
}
