//! Tensors without static types, at the edges of stages.
//!
//! A stage is written with ordinary Burn tensors. Between stages the runtime moves [`Values`]: tensors whose
//! number of dimensions and kind are known at run time. [`Boundary`] converts between the two, [`Metadata`]
//! says what both sides of a boundary expect, [`Precision`] says in which element type stages compute,
//! `shard` says which rows of a parameter a replica holds, and [`Placement`] says which shard of it a rank
//! holds that computes stages together with others. [`EdgePlacement`] says how such ranks hold the tensors between
//! stages.

mod transfer;
mod value;
mod computed;
mod boundary;
mod metadata;
mod boundary_check;
mod precision;
mod element_type;
pub(crate) mod shard;
mod placement;
mod spread;
pub(crate) mod layout;

pub use boundary::{Boundary, BoundaryError, Unpack, pack, unpack};
pub(crate) use boundary_check::{Boundaries, Flow, TensorMismatch};
pub use boundary_check::{MetadataError, Mismatch, Side};
pub(crate) use computed::wait_until_computed;
pub(crate) use element_type::{Lossy, float_type_of, int_type_of};
pub use metadata::{CheckMetadata, Dim, Metadata, OnMismatch, TensorSpec};
pub(crate) use metadata::{Vote, Votes};
pub use placement::{CopyGradient, ExpertRank, Placement, TensorRank, TensorShard};
pub use precision::Precision;
pub use spread::{EdgePlacement, Spread};
pub use value::{OptionalTensor, OptionalTensors, Value, ValueKind, Values};
