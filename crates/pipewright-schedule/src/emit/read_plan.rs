//! A plan that was read from a file of another system.

use crate::emit::read_error::{ReadError, ReadErrorKind};
use crate::plan::{PlanChoice, System};
use crate::schedule::Schedule;
use crate::words::counted;

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
    /// The parts of the file that the prediction does not count, as sentences.
    pub remarks: Vec<String>,
}

impl ReadPlan {
    /// Returns the number of ranks, over all replicas.
    pub fn ranks(&self) -> u32 {
        self.schedule.ranks() * self.choice.data_parallel * self.choice.tensor_parallel
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.schedule.microbatches() * self.choice.data_parallel
    }
}

/// The ranks of a file: of a pipeline, and of a tensor group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) pipeline: u32,
    pub(super) tensor: u32,
}

impl Sizes {
    /// Returns the number of replicas: of a total of `ranks` ranks, or `stated`. If neither is known, there is
    /// one.
    pub(super) fn replicas(self, ranks: Option<u32>, stated: Option<u32>) -> Result<u32, ReadError> {
        let model = self.pipeline.saturating_mul(self.tensor).max(1);
        let Some(ranks) = ranks else { return Ok(stated.unwrap_or(1)) };
        if ranks == 0 || !ranks.is_multiple_of(model) || stated.is_some_and(|stated| stated != ranks / model)
        {
            let replicas = stated.map(|stated| format!(" in {}", counted(stated, "replica")));
            let what = format!(
                "the file places a model on {}{}, and {} were given; give a number of ranks that fits",
                counted(model, "rank"),
                replicas.unwrap_or_default(),
                counted(ranks, "rank")
            );
            return Err(ReadErrorKind::Contradiction { what }.into());
        }
        Ok(ranks / model)
    }
}
