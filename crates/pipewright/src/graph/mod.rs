//! A model as a graph of named layers: its stages and what connects them follow from where it is split.
//!
//! [`Graph`] names nodes, the values that each takes and the nodes before which the model is split. It holds what layers
//! are *made from*, not the layers: each rank makes those of its own stages. Skip connections may cross any number of
//! stages and have any number of uses; their gradients come back the same way.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Tensor};
//! use pipewright::tensor::{BoundaryError, pack, unpack};
//! use pipewright::graph::{Graph, GraphLayer};
//! use pipewright::stage::{Stage, StageContext};
//! use pipewright::tensor::Values;
//! use pipewright_schedule::{Placement, StageIndex};
//!
//! /// A linear map of the sum of what comes in.
//! #[derive(Module, Debug)]
//! struct Sum {
//!     linear: Linear,
//! }
//!
//! impl GraphLayer for Sum {
//!     fn forward(&self, inputs: Values, _context: &StageContext) -> Result<Values, BoundaryError> {
//!         let inputs = inputs.into_iter().map(|value| unpack::<Tensor<2>>(vec![value]));
//!         let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
//!         let sum = inputs.into_iter().reduce(|sum, input| sum + input);
//!         Ok(sum.map(|sum| pack(self.linear.forward(sum))).unwrap_or_default())
//!     }
//! }
//!
//! let graph = Graph::builder()
//!     .input("image")
//!     .node("down", LinearConfig::new(4, 4), ["image"])
//!     .node("middle", LinearConfig::new(4, 4), ["down"])
//!     .node("up", LinearConfig::new(4, 4), ["middle", "down"])
//!     .output("up")
//!     .split_before("middle")
//!     .split_before("up")
//!     .build()?;
//! // Stages 0 and 2 on rank 0: the skip connection stays there.
//! let placement = Placement::explicit([0, 1, 0].map(Into::into).to_vec())?;
//! let placed = graph.place(&placement)?;
//! let make = |_name: &str, config: &LinearConfig| Sum { linear: config.init(&Device::flex().autodiff()) };
//! let last = placed.stage(StageIndex::new(2), make);
//! let stage = Stage::of_graph_with_loss(last, |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which way a value goes
//!
//! A value is made in one stage and used there or in later ones. From one to the other it rides along in the messages
//! between neighbouring stages, when that moves it between ranks no more often than sending it straight would (once, or
//! never when both are on one rank); otherwise it is sent straight, in a message of its own. Which stage it comes from,
//! where several have it already, is chosen for the fewest moves of all. Its gradient goes back the same way.
//!
//! Two nodes may hold copies of one parameter ([`GraphBuilder::tie`]).
//!
//! # Same bits for every cut
//!
//! The gradient of a value with several uses is the sum over them in the order of the nodes, whatever the cut and the
//! way: `g1 + (g2 + (g3 + ..))`. Stages pass sums on from the back. Inside a layer, sums are those of Burn's tape.

mod builder;
mod chain;
mod layer;
mod plan;
mod route;

pub use builder::{Graph, GraphBuilder, GraphError};
pub(crate) use chain::{MixedChain, TypedChain};
pub use layer::{GraphLayer, GraphStage};
pub use plan::PlacedGraph;
