//! Pipeline-parallel training on [Burn](burn): a model that is too large for one device is cut into stages,
//! the stages are placed on ranks, and the ranks run a program that was validated before the first step.
//!
//! ```text
//! batch --split--> microbatches --ValidatedProgram--> Executor (one per rank) <--Transport--> its neighbours
//!                                                        |
//!                              optimizer step, losses, Timeline (measured)
//! ```
//!
//! The schedule, its lowering and its validation are in [`pipewright_schedule`]; the layers are the user's.
//! This crate never prints and never waits without a deadline. ARCHITECTURE.md lists its global state: the
//! allocator of [`memory`] with the handler of failed allocations, and two locks.
//!
//! # A model of your own
//!
//! A layer is a Burn module with a typed forward ([`stage::StageModule`]), and a model is a list of them
//! ([`pipeline::Layers`]). [`Pipeline::builder`](pipeline::Pipeline::builder) cuts it into stages and starts
//! the ranks:
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor, activation};
//! use pipewright::pipeline::{Layers, Pipeline};
//! use pipewright::stage::{StageContext, StageModule};
//!
//! #[derive(Module, Debug)]
//! struct Block {
//!     linear: Linear,
//! }
//!
//! impl StageModule for Block {
//!     type Input = Tensor<2>;
//!     type Output = Tensor<2>;
//!
//!     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
//!         activation::gelu(self.linear.forward(input))
//!     }
//! }
//!
//! let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
//! let mut pipeline = Pipeline::builder(Layers::new(4, block))
//!     .ranks(2)
//!     .microbatches(4)
//!     .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
//!     .optimizer(AdamWConfig::new().init())
//!     .launch()?;
//!
//! let device = Device::flex();
//! let summary = pipeline.step(Tensor::<2>::ones([8, 8], &device), Tensor::<2>::zeros([8, 8], &device), 1e-2)?;
//! assert_eq!(summary.losses.len(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Without the builder
//!
//! The builder generates, lowers and validates a schedule, partitions the layers, and calls
//! [`Pipeline::launch`](pipeline::Pipeline::launch). Call these functions yourself if stages are more than lists of
//! layers:
//!
//! ```
//! # use burn::module::Module;
//! # use burn::nn::{Linear, LinearConfig};
//! # use burn::tensor::{Device, Tensor, activation};
//! use burn::optim::AdamWConfig;
//! use pipewright::pipeline::{Pipeline, PipelineConfig};
//! use pipewright::stage::{Stage, StageContext, StageModule};
//! use pipewright::transport::World;
//! use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, StageIndex, generate, lower, validate};
//!
//! #[derive(Module, Debug)]
//! struct Block {
//!     linear: Linear,
//!     #[module(skip)]
//!     stage: StageIndex,
//! }
//!
//! impl StageModule for Block {
//! #     type Input = Tensor<2>;
//! #     type Output = Tensor<2>;
//! #     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
//! #         activation::gelu(self.linear.forward(input))
//! #     }
//!     // Input, Output and forward are as above. A stage returns the paths of its parameters in the whole model.
//!     fn parameter_path(&self, local: &str) -> String {
//!         format!("layers.{}.{local}", self.stage)
//!     }
//! }
//!
//! let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
//! let program = lower(&generate("1f1b", &spec)?, &LowerConfig::from(Level::Comms))?;
//! let program = validate(program, Level::Comms)?;
//!
//! let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
//!     let block = Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()), stage };
//!     Ok(match stage.get() {
//!         1 => Stage::with_loss(block, |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean()),
//!         _ => Stage::new(block),
//!     })
//! };
//! let config = PipelineConfig { optimizer: Some(AdamWConfig::new().init()), ..PipelineConfig::default() };
//! let pipeline = Pipeline::launch(program, World::local(2), &config, make)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Examples
//!
//! Each is one short file in the crate's `examples` folder; `cargo run -p pipewright --example NAME` runs it.
//!
//! - `own_module`: a model of your own, in about ten lines from layers to steps.
//! - `two_stages`: a program next to the script for PyTorch that it translates.
//! - `transformer`: a GPT with token ids, attention and dropout, with validation, checkpoints and a log.
//! - `dropout`: dropout and other random numbers, the same under every cut.
//! - `training_loop`: a loop of your own with checkpoints, and a run that resumes under another cut.
//! - `own_optimizer`: an optimizer of your own, and a learning rate that changes from step to step.
//! - `skip_connections`: a model that is a [`graph`] of layers rather than a list.
//! - `auxiliary_losses`: losses in the middle of the model, and evaluation.
//! - `processes`: the same pipeline on threads of one process, or in several processes over MPI.
//! - `own_schedule`: a schedule of your own, from a table.
//! - `own_weight_gradients`: a layer of your own whose weight gradients wait for `W`, a low-rank adapter.
//! - `overlapped_exchange`: functions that run actions block by block, so that the exchanges of one
//!   microbatch's experts run while another microbatch computes.
//!
//! # Features
//!
//! - `x86-v4` (default): AVX-512 kernels in the CPU back end, used on machines that have them.
//! - `cuda`, `rocm`, `metal`, `vulkan`, `wgpu`: devices other than the processor; see [`device`].
//! - `mpi`: ranks as processes, over the installed MPI library.
//! - `tokenizers`: text data through a Hugging Face `tokenizer.json`.
//! - `testing`: pipelines in which a seed decides the order of events, for tests.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

/// Compiles the code in the repository's README and in the crate's.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles the code in the book.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/own-model.md")]
struct Book;

// In the order of the layers: a module imports only modules above it. `tools/layers` checks this.
pub mod ids;
pub mod byte_channel;
pub use pipewright_system::bounded_file;
pub mod device;
pub mod tensor;
pub mod batch;
pub mod memory;
mod rank_thread;
pub mod offload;
pub mod stream;
pub mod loss_scale;
pub mod checkpoint;
pub mod random;
mod autodiff;
pub mod nn;
pub mod optimizer;
pub mod stage;
pub mod graph;
pub mod message;
pub mod verification;
pub mod failure;
mod progress;
pub mod transport;
pub mod collective;
pub mod mesh;
pub mod hook;
mod config;
mod executor;
pub mod rank_link;
mod step_gate;
mod driver;
pub mod pipeline;
pub mod profile;
pub mod train;
pub mod prelude;
