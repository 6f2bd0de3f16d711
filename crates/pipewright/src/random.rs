//! Random numbers that do not depend on how the model is cut.
//!
//! Each layer has a [`RandomStream`] of its own for each microbatch of each step. The stream depends only on
//! the run's seed, the step, the microbatch and the layer's name. So a layer draws the same numbers under
//! every cut and every schedule, after a resume, and when its forward is computed a second time.
//!
//! Layers that draw from the generator of their device, such as Burn's own `Dropout`, have the same
//! properties: `generators.rs` seeds it for each forward. All ranks of a process share this generator, so the
//! forwards of such layers run one at a time, and ranks that compute a stage together cannot have them.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use pipewright::nn::Dropout;
//! use pipewright::random::{RandomStream, StreamKey};
//!
//! let key = StreamKey { seed: 42, step: 7.into(), microbatch: 3 };
//! let draw = || RandomStream::new(key, "layers.0.dropout");
//! let input = Tensor::<2>::ones([4, 4], &Device::flex());
//! let dropout = Dropout::new(0.5);
//! let outputs = [dropout.forward(input.clone(), draw()), dropout.forward(input, draw())];
//! let [first, second] = outputs.map(Tensor::into_data);
//! assert_eq!(first, second);
//! ```

mod generators;
mod stream;

pub(crate) use generators::{DrawsTogether, LayerDraws, is_probing, runs_layer_alone, seeded};
pub use stream::{RandomStream, StreamKey};
