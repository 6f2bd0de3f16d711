//! The errors of the search, in the words of the command line.

use std::fmt;

use pipewright_cluster::layout::LayoutError;
use pipewright_cluster::pipeline::PipelineError;
use pipewright_cluster::search::{LeastMemory, Request, SearchError};
use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_schedule::words::counted;

use crate::clusters::layout_text::{layout, memory_parts};
use crate::clusters::request::PlanOptions;
use crate::display::bytes;
use crate::failure::{Exit, Failure, sentence};

/// The text of an error of the search: its reason and its advice.
#[derive(Debug)]
struct Refusal {
    /// The reason why no plan exists.
    reason: String,
    /// The advice; empty if the reason says what to do.
    advice: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)?;
        if self.advice.is_empty() { Ok(()) } else { write!(formatter, "; {}", self.advice) }
    }
}

/// The words for what the user gave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a> {
    /// The options of the command.
    pub(super) options: &'a PlanOptions<'a>,
    /// The request that the options mean.
    pub(super) request: &'a Request,
}

impl Words<'_> {
    /// Returns the failure of a search. A plan that does not fit is a check that failed. Anything else is
    /// wrong input.
    pub(super) fn refused(&self, error: SearchError) -> Failure {
        let exit = match error {
            SearchError::Memory { .. } => Exit::CheckFailed,
            _ => Exit::WrongInput,
        };
        Failure::new(exit, self.refusal(&error).to_string())
    }

    /// Returns why a search has no plan, without the advice for its request.
    pub(super) fn reason(&self, error: &SearchError) -> String {
        self.refusal(error).reason
    }

    /// Returns what an error of the search says, with the options that the user knows.
    fn refusal(&self, error: &SearchError) -> Refusal {
        match error {
            SearchError::Layout(LayoutError::Mesh { gpus, of, .. }) => self.mesh(*gpus, u64::from(*of)),
            SearchError::Replicas { gpus, data, of_replica } => {
                self.mesh(*gpus, u64::from(*data) * u64::from(*of_replica))
            }
            SearchError::Layout(LayoutError::Batch { batch, of, data }) => self.batch(*batch, *of, *data),
            SearchError::Layout(LayoutError::Stages { blocks, stages }) => Refusal {
                reason: format!(
                    "{} ({}) are more than the {} of the model, its embedding and its head",
                    counted(*stages, "stage"),
                    self.given(&["--pipeline-parallel", "--stages-per-rank"]),
                    counted(*blocks as u64, "block"),
                ),
                advice: "use fewer stages".to_owned(),
            },
            SearchError::Layout(LayoutError::Division { what, count, ranks, group }) => Refusal {
                reason: format!(
                    "{} cannot be divided among the ranks of --{group}-parallel {ranks}",
                    counted(*count, what)
                ),
                advice: format!("use a number that divides {count}"),
            },
            SearchError::Layout(LayoutError::Dropout { tensor }) => Refusal {
                reason: format!(
                    "--tensor-parallel {tensor}: `adapter.dropout` needs layers that one rank computes"
                ),
                advice: "leave --tensor-parallel out, or set `adapter.dropout` to 0".to_owned(),
            },
            SearchError::MeshSize { gpus, mesh } => self.mesh_size(*gpus, *mesh),
            SearchError::NoMesh { gpus, .. } => self.no_mesh(*gpus),
            SearchError::NoExperts { expert } => Refusal {
                reason: format!("--expert-parallel {expert}: the model has no experts"),
                advice: "leave it out".to_owned(),
            },
            SearchError::Schedule { schedule, chunks } => self.no_schedule(schedule, chunks),
            SearchError::Pipeline { schedule, error: PipelineError::TooLarge { computations } } => {
                self.too_large(schedule, *computations)
            }
            SearchError::Memory { least } => self.memory(least),
            _ => Refusal { reason: sentence(error), advice: String::new() },
        }
    }

    /// Returns the flags that are given, with their values.
    fn given(&self, flags: &[&str]) -> String {
        let sizes = self.options.sizes_by_flag().into_iter();
        let given = sizes.filter(|(flag, _)| flags.contains(flag));
        let given = given.filter_map(|(flag, size)| Some(format!("{flag} {}", size?)));
        given.collect::<Vec<_>>().join(", ")
    }

    /// Says that the mesh does not divide the GPUs, with the next number that it divides.
    fn mesh(&self, gpus: u32, of: u64) -> Refusal {
        let (flag, unit) = match self.options.cluster.nodes {
            Some(_) => ("--nodes", u64::from(self.request.machine.gpus_per_node)),
            None => ("--ranks", 1),
        };
        let near = common_multiple(of, unit).and_then(|step| next(gpus, step));
        let advice = near.map_or_else(String::new, |near| format!("use {flag} {}, or ", near / unit));
        Refusal {
            reason: format!(
                "{} cannot be divided into a mesh of {of} ({})",
                counted(gpus, "GPU"),
                self.given(&MESH)
            ),
            advice: format!("{advice}use another mesh"),
        }
    }

    /// Says that the replicas do not divide the rows, with the next number that they divide.
    fn batch(&self, batch: u32, of: u32, data: u32) -> Refusal {
        let advice =
            next(batch, of.into()).map_or_else(String::new, |near| match self.options.cluster.batch_tokens {
                Some(tokens) => format!("use --batch-tokens {}, or ", tokens / u64::from(batch) * near),
                None => format!("use --global-batch {near}, or "),
            });
        let (among, other) = match data {
            0 | 1 => (String::new(), "microbatch size"),
            _ => (format!(" on each of {data} replicas"), "mesh"),
        };
        Refusal {
            reason: format!(
                "{} of a step cannot be divided into microbatches of {}{among}",
                counted(batch, "row"),
                counted(of / data.max(1), "row"),
            ),
            advice: format!("{advice}use another {other}"),
        }
    }

    /// Returns the given parts of a plan as "with ...", and what else the advice is to change.
    fn with_given(&self) -> (String, &'static str) {
        match self.given(&PARTS).as_str() {
            "" => (String::new(), ""),
            given => (format!(" with {given}"), ", or a given part of the plan"),
        }
    }

    /// Says that a schedule has no plan.
    fn no_schedule(&self, schedule: &str, chunks: &str) -> Refusal {
        let (with, other) = self.with_given();
        Refusal {
            reason: format!(
                "no mesh{with} that divides the GPUs and the batch has a plan with --schedule {schedule}, whose ranks \
                 have {chunks} of at least one block"
            ),
            advice: format!("leave --schedule out, or change the batch{other}"),
        }
    }

    /// Says that the given mesh has another number of GPUs.
    fn mesh_size(&self, gpus: u32, mesh: u32) -> Refusal {
        let per_node = self.request.machine.gpus_per_node;
        let advice = match self.options.cluster.nodes {
            None => format!("use --ranks {mesh}"),
            Some(_) if mesh.is_multiple_of(per_node) => format!("use --nodes {}", mesh / per_node),
            Some(_) => format!("use --ranks {mesh} instead of --nodes"),
        };
        Refusal {
            reason: format!(
                "the given mesh ({}) has {}, not {gpus}",
                self.given(&MESH),
                counted(mesh, "GPU")
            ),
            advice: format!("{advice}, or leave a part of the mesh out"),
        }
    }

    /// Says that the pipelines of a schedule are too large to simulate.
    fn too_large(&self, schedule: &str, computations: u64) -> Refusal {
        let advice = match self.request.fixed.schedule {
            Some(_) => "or leave --schedule out",
            None => "or --schedule 1f1b",
        };
        Refusal {
            reason: format!(
                "no plan can be simulated: a pipeline with the schedule {schedule} has {computations} forwards and \
                 backwards, which are too many"
            ),
            advice: format!("use fewer microbatches or stages, {advice}"),
        }
    }

    /// Says that no mesh divides the GPUs.
    fn no_mesh(&self, gpus: u32) -> Refusal {
        let (with, other) = self.with_given();
        Refusal {
            reason: format!(
                "no mesh{with} divides {} such that its replicas divide {} of a step, it has at most {} and its \
                 tensor groups divide the heads",
                counted(gpus, "GPU"),
                counted(self.request.batch, "row"),
                counted(self.request.model.blocks.len() as u64, "stage"),
            ),
            advice: format!("change the number of GPUs or of rows{other}"),
        }
    }

    /// Says that no plan fits into memory, and what is short.
    fn memory(&self, least: &LeastMemory) -> Refusal {
        let given = if least.has_given_parts { "fewer given parts of the plan, " } else { "" };
        let memory = match self.options.memory {
            Some(_) => "a larger --memory",
            None => "GPUs with more memory",
        };
        Refusal {
            reason: format!(
                "no plan fits into {} per GPU: the smallest ({}) needs {} on rank {} of its pipeline, {} too much ({})",
                bytes(least.limit as u64),
                layout(&least.layout, &self.request.model),
                bytes(least.needed() as u64),
                least.rank,
                bytes((least.needed() - least.limit) as u64),
                memory_parts(&least.memory),
            ),
            advice: format!("use {given}more GPUs, fewer rows per step, or {memory}"),
        }
    }
}

/// The sizes that are parts of a plan.
const PARTS: [&str; 7] = [
    "--tensor-parallel",
    "--pipeline-parallel",
    "--data-parallel",
    "--context-parallel",
    "--expert-parallel",
    "--stages-per-rank",
    "--microbatch-size",
];

/// The sizes whose product divides the GPUs.
const MESH: [&str; 4] = ["--tensor-parallel", "--pipeline-parallel", "--data-parallel", "--context-parallel"];

/// Returns the smallest multiple of `of` that is not below `value`, if it is a possible size.
fn next(value: u32, of: u64) -> Option<u64> {
    u64::from(value).checked_next_multiple_of(of).filter(|&near| near <= u64::from(u32::MAX))
}

/// Returns the least common multiple of two numbers above 0, unless it is too large.
fn common_multiple(one: u64, other: u64) -> Option<u64> {
    (one / greatest_common_divisor(one, other)).checked_mul(other)
}
