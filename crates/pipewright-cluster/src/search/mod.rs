//! The search for the fastest layout of a model on a machine.
//!
//! ```text
//! Request --space--> meshes --estimate--> candidates that fit, fastest first --simulate--> ClusterReport
//! ```
//!
//! Each layout that divides the GPUs, the batch and the model is estimated without a simulation, unless the
//! time of its computation alone is above the estimates that fit for certain. The fastest candidates are then
//! simulated with both cuts. If none fits, all layouts are estimated with both cuts. Only plans whose
//! predicted memory fits are returned. The search reads no clock and no file, so the same request always
//! finds the same plans.
//!
//! ```
//! use pipewright_cluster::layout::Precision;
//! use pipewright_cluster::search::{Request, search};
//! use pipewright_cluster::catalogue;
//! use pipewright_shapes::reader;
//! let config = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
//!     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false}"#;
//! let model = reader::read(config)?.model;
//! let request = Request { simulations: 8, ..Request::new(model, catalogue::by_name("h100")?, 8, 64, 8192, Precision::Half) };
//! let best = &search(&request)?.plans[0];
//! assert!(best.prediction.peak_memory() <= request.memory_limit());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod request;
mod bound;
mod found;
mod space;
mod backward_form;
mod least_makespan;
mod schedules;
mod least_bytes;
mod explore;
mod simulate;
mod usual;
mod plans;
mod upgrade;

pub use bound::lower_bound;
pub use error::{LeastMemory, SearchError, SearchErrorKind};
pub(crate) use explore::MOST_COMPUTATIONS;
pub use found::{ClusterPlan, ClusterReport, Goal, MachineRanks, Shares};
pub use plans::{search, search_from};
pub use request::{Fixed, Request};
pub use upgrade::{Gain, HardwareChange, Upgrade, upgrades};
