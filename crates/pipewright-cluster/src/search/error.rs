//! The errors of the search.

use pipewright_schedule::GenerateError;
use pipewright_schedule::bytes::bytes_text;
use pipewright_schedule::plan::System;
use pipewright_schedule::words::counted;
use thiserror::Error;

use crate::layout::{Layout, LayoutError};
use crate::memory::RankMemory;
use crate::pipeline::PipelineError;
use crate::systems::LayoutRefusal;

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
        "{} cannot be divided into {} of {}; use another number of GPUs or replicas",
        counted(*.gpus, "GPU"), counted(*.data, "replica"), counted(*.of_replica, "GPU")
    )]
    Replicas {
        /// The GPUs.
        gpus: u32,
        /// The replicas.
        data: u32,
        /// The GPUs that the other given parts of the mesh need in each replica.
        of_replica: u32,
    },
    /// The given mesh has another number of GPUs.
    #[error("the given mesh has {mesh}, not {gpus}; use {mesh}, or leave a part of the mesh out",
        mesh = counted(*.mesh, "GPU"))]
    MeshSize {
        /// The GPUs of the request.
        gpus: u32,
        /// The GPUs of the given mesh.
        mesh: u32,
    },
    /// No mesh divides the GPUs, the batch and the model.
    #[error(
        "no mesh{} divides {} such that its replicas divide {} of a step, it has at most {} and its tensor groups divide the heads; change the number of GPUs or of rows{}",
        with(.given), counted(*.gpus, "GPU"), counted(*.batch, "row"), counted(*.blocks as u64, "stage"),
        if .given.is_empty() { "" } else { ", or a given part of the layout" }
    )]
    NoMesh {
        /// The GPUs.
        gpus: u32,
        /// The rows of a step.
        batch: u32,
        /// The blocks of the model.
        blocks: usize,
        /// The given parts of the layout, such as `dp = 32`.
        given: Vec<String>,
    },
    /// The system of the request runs none of its layouts.
    #[error(
        "{system} runs no plan{}: {reason}; {}use another system",
        if *.has_given_parts { " with the given parts" } else { "" },
        if *.has_given_parts { "change a given part of the layout, or " } else { "" }
    )]
    System {
        /// The system.
        system: System,
        /// Why the system does not run the layout that it could run most nearly.
        reason: LayoutRefusal,
        /// Whether the request gives parts of the layout.
        has_given_parts: bool,
    },
    /// The experts of a model without experts are to be divided.
    #[error("ep is {expert}, and the model has no experts; leave it out")]
    NoExperts {
        /// The groups of ranks.
        expert: u32,
    },
    /// No schedule has the given name.
    #[error(transparent)]
    UnknownSchedule(#[from] GenerateError),
    /// The given schedule only computes forwards.
    #[error("the schedule `{schedule}` has no backward; use one that trains, or leave the schedule out")]
    NoBackward {
        /// The schedule.
        schedule: &'static str,
    },
    /// The given schedule exists in no size that the mesh and the batch allow.
    #[error(
        "no mesh that divides the GPUs and the batch has a plan with the schedule `{schedule}`, whose ranks have {chunks} of at least one block; leave the schedule out, or use another batch or mesh"
    )]
    Schedule {
        /// The schedule.
        schedule: String,
        /// The stages of a rank that the schedule allows.
        chunks: &'static str,
    },
    /// No pipeline can be simulated, and none fits without a simulation.
    #[error("no plan can be simulated; the pipeline with the schedule `{schedule}` failed")]
    Pipeline {
        /// The schedule of the first pipeline that failed.
        schedule: String,
        /// The cause.
        #[source]
        error: PipelineError,
    },
    /// No layout fits into memory.
    #[error(
        "no plan fits into {} per GPU: the smallest needs {} on rank {} of its pipeline, {} too much, with {}; {}; {}use more GPUs, fewer rows per step, or GPUs with more memory",
        bytes_text(.least.limit as u64),
        bytes_text(.least.needed() as u64),
        .least.rank,
        bytes_text((.least.needed() - .least.limit) as u64),
        sizes(&.least.layout),
        largest_parts(&.least.memory),
        if .least.has_given_parts { "leave out given parts of the layout, or " } else { "" }
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
    pub memory: RankMemory,
    /// The bytes that a rank may need.
    pub limit: f64,
    /// Whether the request gives parts of the layout.
    pub has_given_parts: bool,
}

impl LeastMemory {
    /// Returns all bytes of the rank.
    pub fn needed(&self) -> f64 {
        self.memory.total()
    }
}

/// Names the two largest parts of a rank's memory.
fn largest_parts(memory: &RankMemory) -> String {
    let mut parts = memory.named();
    parts.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let part = |(name, bytes): (&str, f64)| format!("{name} {}", bytes_text(bytes as u64));
    format!("its largest parts are {} and {}", part(parts[0]), part(parts[1]))
}

/// Returns a list with "with" before it, if it has items.
fn with(items: &[String]) -> String {
    if items.is_empty() { String::new() } else { format!(" with {}", items.join(", ")) }
}

/// Returns the sizes of a mesh and its microbatch.
fn sizes(layout: &Layout) -> String {
    let data = layout.data();
    let Layout { tensor, pipeline, context, expert, microbatch, .. } = layout;
    format!(
        "tp = {tensor}, pp = {pipeline}, dp = {data}, cp = {context}, ep = {expert} and mbs = {microbatch}"
    )
}
