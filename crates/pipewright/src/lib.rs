//! Pipeline-parallel training on [Burn](burn): a model too large for one device is cut into stages, the stages are
//! placed on ranks, and the ranks run a program that was proved sound before anything started.
//!
//! ```text
//! batch --split--> microbatches --ValidatedProgram--> Executor (one a rank) <--Transport--> its neighbours
//!                                                        |
//!                              optimizer step, losses, Timeline (measured)
//! ```
//!
//! The schedule, its lowering and its proof are [`pipewright_schedule`]'s; what the layers compute is the user's.
//! This crate never prints, keeps no global state outside the allocator of [`memory`], and never waits without a deadline.
//!
//! # A model of your own
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor, activation};
//! use pipewright::pipeline::{Pipeline, PipelineConfig};
//! use pipewright::stage::{Stage, StageContext, StageModule};
//! use pipewright::transport::World;
//! use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, StageIndex, generate, lower, validate};
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
//! let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
//! let program = lower(&generate("1f1b", &spec)?, &LowerConfig::from(Level::Comms))?;
//! let program = validate(program, Level::Comms)?;
//!
//! let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
//!     let block = Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
//!     Ok(match stage.get() {
//!         1 => Stage::with_loss(block, |output: Tensor<2>, target: Tensor<2>| (output - target).powf_scalar(2.0).mean()),
//!         _ => Stage::new(block),
//!     }
//!     // The two blocks have parameters of their own, so each has paths of its own.
//!     .with_prefix(&format!("blocks.{stage}")))
//! };
//! let config = PipelineConfig { optimizer: Some(AdamWConfig::new().init()), ..PipelineConfig::default() };
//! let mut pipeline = Pipeline::launch(program, World::local(2), &config, make)?;
//!
//! let device = Device::flex();
//! let report = pipeline.step(Tensor::<2>::ones([8, 8], &device), Tensor::<2>::zeros([8, 8], &device), 1e-2)?;
//! assert_eq!(report.losses.len(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// In the order of the layers: a module imports only modules above it. `tests/layers.rs` keeps this order.
pub mod tensor;
pub mod batch;
pub mod memory;
pub mod checkpoint;
mod kernel;
pub mod nn;
pub mod optimizer;
mod autodiff;
pub mod stage;
pub mod graph;
pub mod message;
pub mod failure;
mod progress;
pub mod transport;
pub mod collective;
pub mod mesh;
pub mod hook;
mod executor;
mod driver;
pub mod pipeline;
pub mod train;
