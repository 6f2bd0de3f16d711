//! The errors of the search.

use pipewright_schedule::GenerateError;
use thiserror::Error;

use crate::layout::{Layout, LayoutError};

/// The bytes of a GiB.
const GIB: f64 = 1_073_741_824.0;

/// The errors of the search.
#[derive(Clone, PartialEq, Error)]
pub enum SearchError {
    /// A number of the request is not above 0.
    #[error("`{name}` is {value}; use a number above 0")]
    OutOfRange {
        /// The number.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// The given parts of the layout do not fit the GPUs, the batch or the model.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The given replicas do not divide the GPUs.
    #[error(
        "{gpus} GPUs are not a multiple of {data} replicas of {of_replica} GPUs; use another number of GPUs or replicas"
    )]
    Replicas {
        /// The GPUs.
        gpus: u32,
        /// The replicas.
        data: u32,
        /// The GPUs that the other given parts of the mesh need in each replica.
        of_replica: u32,
    },
    /// No mesh divides the GPUs, the batch and the model.
    #[error(
        "no mesh divides {gpus} GPUs such that its replicas divide {batch} rows of a step, its stages are at most {blocks} blocks and its tensor groups divide the heads; change the number of GPUs or of rows"
    )]
    NoMesh {
        /// The GPUs.
        gpus: u32,
        /// The rows of a step.
        batch: u32,
        /// The blocks of the model.
        blocks: usize,
    },
    /// There is no schedule of the given name.
    #[error(transparent)]
    UnknownSchedule(#[from] GenerateError),
    /// The given schedule exists in no size that the mesh and the batch allow.
    #[error(
        "no plan with the schedule `{schedule}` can be simulated; leave the schedule out, or use another batch"
    )]
    Schedule {
        /// The schedule.
        schedule: String,
    },
    /// No layout fits into memory.
    #[error(
        "no plan fits into {:.1} GiB per GPU: the smallest needs {:.1} GiB on rank {} of its pipeline, {:.1} GiB too much, with {}; use more GPUs, fewer rows per step, or GPUs with more memory",
        .least.limit / GIB, .least.needed / GIB, .least.rank, (.least.needed - .least.limit) / GIB, sizes(&.least.layout)
    )]
    Memory {
        /// The layout that needs least.
        least: Box<LeastMemory>,
    },
}

pipewright_schedule::message_as_debug!(SearchError);

/// The layout whose largest rank needs the fewest bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct LeastMemory {
    /// The layout.
    pub layout: Layout,
    /// The rank of a pipeline that needs most.
    pub rank: usize,
    /// The bytes of this rank.
    pub needed: f64,
    /// The bytes that a rank may need.
    pub limit: f64,
}

/// Returns the sizes of a mesh and its microbatch.
fn sizes(layout: &Layout) -> String {
    let data = layout.data();
    let Layout { tensor, pipeline, context, expert, microbatch, .. } = layout;
    format!(
        "tp = {tensor}, pp = {pipeline}, dp = {data}, cp = {context}, ep = {expert} and mbs = {microbatch}"
    )
}
