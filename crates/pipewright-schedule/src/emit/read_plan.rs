//! A plan that was read from a file of another system.

use crate::emit::read_error::ReadError;
use crate::generate::{ScheduleSpec, generate, most_cells};
use crate::mesh::{Mesh, MeshOrder};
use crate::plan::{PlanChoice, System};
use crate::profile::Profile;
use crate::schedule::Schedule;
use crate::words::counted;

/// The most cells of a schedule that is made for a file. A prediction needs about 1 KiB for each.
const MOST_CELLS: u64 = 1 << 22;

/// A plan that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadPlan {
    /// The system that runs it.
    pub system: System,
    /// The computations of each rank of a replica.
    pub schedule: Schedule,
    /// A name of the schedule for people.
    pub schedule_name: String,
    /// The cut, the recomputation, the mesh and the rows of a microbatch. Its training state is the default.
    pub choice: PlanChoice,
    /// How often a step runs the schedule.
    pub runs: u32,
    /// The parts of the file that the prediction does not count, as sentences.
    pub remarks: Vec<String>,
}

impl ReadPlan {
    /// Returns the number of ranks, over all replicas. The ranks that share a sequence count as one.
    pub fn ranks(&self) -> u32 {
        self.schedule.ranks() * self.choice.mesh.data * self.choice.mesh.tensor
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.schedule.microbatches() * self.choice.mesh.data
    }

    /// Returns an error if the numbers of ranks and microbatches do not fit 32 bits. The largest number
    /// counts as too large, because the product of the replicas saturates there.
    pub(super) fn check_size(&self) -> Result<(), ReadError> {
        let Mesh { data, tensor, .. } = self.choice.mesh;
        let times = |number: u32, by: u32| u64::from(number).saturating_mul(u64::from(by));
        let ranks = times(self.schedule.ranks(), tensor).saturating_mul(u64::from(data));
        let microbatches = times(self.schedule.microbatches(), data);
        for (number, name) in [(ranks, "ranks"), (microbatches, "microbatches")] {
            if number >= u64::from(u32::MAX) {
                let what = format!(
                    "the file has {number} {name} over all replicas, or more, and a plan has fewer than {}; use smaller numbers",
                    u32::MAX
                );
                return Err(ReadError::new(what));
            }
        }
        Ok(())
    }
}

/// Makes the schedule of a file.
pub(super) fn generate_within(name: &str, spec: &ScheduleSpec) -> Result<Schedule, ReadError> {
    let cells = most_cells(name, spec)?;
    if cells > MOST_CELLS {
        let what = format!(
            "the schedule has up to {cells} cells, and at most {MOST_CELLS} are predicted; use fewer microbatches, stages or ranks"
        );
        return Err(ReadError::new(what));
    }
    Ok(generate(name, spec)?)
}

/// Returns the mistake of a text that has no option of any system. `found` is the start of the text, or its keys.
pub(super) fn no_system(found: &str) -> ReadError {
    ReadError::new(format!(
        "read {found}, and expected options of torchtitan (`--parallelism.pipeline_parallel_degree 4`), options of Megatron \
         (`--pipeline-model-parallel-size 4`), or DeepSpeed's JSON (`{{\"pipeline\": ..}}`)"
    ))
}

/// Returns the mistake of a number of stages that does not divide by the ranks.
pub(super) fn uneven_stages(stages: usize, ranks: u32) -> ReadError {
    ReadError::new(format!(
        "there are {} for {}; each rank needs the same number of stages",
        counted(stages, "stage"),
        counted(ranks, "rank")
    ))
}

/// Returns the remark about checkpoints of so many layers, if the largest stage has more.
pub(super) fn checkpoint_remark(layers: u64, most: u64) -> Option<String> {
    (1..most).contains(&layers).then(|| {
        format!(
            "checkpoints of {} each are predicted as one checkpoint for each stage, which needs less memory while the forward \
             runs and more in the backward",
            counted(layers, "layer")
        )
    })
}

/// Returns the order of ranks of a system that numbers the replicas of a stage consecutively. Without nodes, it
/// does not matter.
pub(super) fn usual_order(profile: &Profile) -> MeshOrder {
    if profile.node.is_some() { MeshOrder::Replicas } else { MeshOrder::default() }
}

/// Returns the number of replicas of a mesh whose other sizes are read: of a total of `ranks` ranks, or
/// `stated`. If neither is known, there is one.
pub(super) fn replicas_of(mesh: Mesh, ranks: Option<u32>, stated: Option<u32>) -> Result<u32, ReadError> {
    let model = mesh.pipeline.saturating_mul(mesh.tensor).saturating_mul(mesh.context).max(1);
    let Some(ranks) = ranks else { return Ok(stated.unwrap_or(1)) };
    if ranks == 0 || !ranks.is_multiple_of(model) || stated.is_some_and(|stated| stated != ranks / model) {
        let replicas = stated.map(|stated| format!(" in {}", counted(stated, "replica")));
        let what = format!(
            "the file places a model on {}{}, and {} were given; give a number of ranks that fits",
            counted(model, "rank"),
            replicas.unwrap_or_default(),
            counted(ranks, "rank")
        );
        return Err(ReadError::new(what));
    }
    Ok(ranks / model)
}

/// Returns the remarks about ranks that share a sequence, and about ranks that share experts, if there are
/// several. `context` and `experts` are their options, with the size of the second.
pub(super) fn sharing_remarks(
    mesh: Mesh,
    context: &str,
    (experts, size): (&str, Option<u32>),
) -> Vec<String> {
    let mut remarks = Vec::new();
    if mesh.context > 1 {
        remarks.push(format!(
            "`--{context} {}` is not predicted: the ranks that share a sequence count as one rank, and the costs of the profile \
             are taken as they are",
            mesh.context
        ));
    }
    if let Some(size) = size.filter(|&size| size > 1) {
        remarks.push(format!(
            "`--{experts} {size}` is not predicted; the costs of the profile are taken as they are"
        ));
    }
    remarks
}
