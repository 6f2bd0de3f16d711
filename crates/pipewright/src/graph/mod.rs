//! Models as graphs of named layers. The stages and their connections follow from the split points.
//!
//! A [`Graph`] names the nodes, the values that each node takes, and the nodes before which the model is
//! split. It holds the *configurations* of the layers, not the layers: each rank makes the layers of its own
//! stages. A skip connection may cross any number of stages and have any number of uses; its gradients return
//! along the same route.
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
//! # The route of a value
//!
//! A value is made in one stage and used there or in later stages. It is sent in the messages between
//! neighbouring stages if that moves it between ranks no more often than a direct message would (once, or
//! never if both stages are on one rank). Otherwise it is sent directly, in its own message. If several
//! stages already hold the value, the sender is chosen so that the total number of moves is smallest. The
//! gradient returns along the same route.
//!
//! Two nodes may hold copies of one parameter ([`GraphBuilder::tie`]).
//!
//! # Same bits for every cut
//!
//! The gradient of a value with several uses is the sum over the uses in the order of the nodes, for every
//! cut and every route: `g1 + (g2 + (g3 + ..))`. Later stages pass their partial sums to earlier ones. Inside
//! a layer, Burn's tape adds.

mod builder;
mod layer;
mod any_parameter;
mod any_layer;
mod chain;
mod placed;
mod plan;
mod route;

pub use any_layer::AnyLayer;
pub(crate) use any_layer::{Typed, Untyped};
pub use builder::{Graph, GraphBuilder, GraphError};
pub(crate) use chain::Chain;
pub use layer::{GraphLayer, GraphStage};
pub use placed::PlacedGraph;
