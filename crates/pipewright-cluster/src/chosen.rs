//! The plan that the search chooses instead of a published run.

use std::fmt::Write as _;

use serde::Serialize;

use crate::published::Run;
use crate::search::{ClusterPlan, Request, SearchError, search_from};

/// The simulations of each search.
const SIMULATIONS: usize = 40;

/// The plan that the search chooses for the model, the machine and the batch of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Chosen {
    /// The ranks of a tensor group.
    pub tp: u32,
    /// The ranks of a pipeline.
    pub pp: u32,
    /// The replicas.
    pub dp: u32,
    /// The ranks that divide each sequence.
    pub cp: u32,
    /// The groups of ranks that divide the experts.
    pub ep: u32,
    /// The ranks that divide each expert: a tensor group, or 1.
    pub etp: u32,
    /// The chunks of a rank.
    pub vp: u32,
    /// The rows of a microbatch.
    pub mbs: u32,
    /// The schedule.
    pub schedule: String,
    /// The blocks of each stage.
    pub cut: Vec<usize>,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub sequence_parallel: bool,
    /// The part of the forward that is computed again: `none`, `selective` or `full`.
    pub recompute: &'static str,
    /// The tensors that replicas divide: `none`, `optimizer`, `gradients` or `parameters`.
    pub data_parallel: &'static str,
    /// The predicted seconds of a step.
    pub predicted_step_s: f64,
    /// The predicted seconds of the published run divided by these, minus 1.
    pub gain: f64,
}

impl Chosen {
    /// Searches the plan for a run whose step takes `published` seconds by its prediction. The plan is not slower
    /// than the run if the run fits into memory and its pipeline is not too large for the search to simulate.
    ///
    /// # Errors
    /// When the search fails, for example because no plan fits into memory.
    pub(crate) fn instead_of(run: &Run, published: f64) -> Result<Self, SearchError> {
        let request = Request { plans: 1, simulations: SIMULATIONS, ..Request::for_run(run) };
        let found = search_from(&request, &run.layout)?;
        Ok(Self::new(&found.plans[0], published))
    }

    /// Makes the row's plan from a plan and the predicted seconds of the published run.
    fn new(plan: &ClusterPlan, published: f64) -> Self {
        let ClusterPlan { layout, prediction, .. } = plan;
        Self {
            tp: layout.tensor,
            pp: layout.pipeline,
            dp: layout.data(),
            cp: layout.context,
            ep: layout.expert,
            etp: layout.expert_tensor,
            vp: layout.chunks,
            mbs: layout.microbatch,
            schedule: layout.schedule_name().to_owned(),
            cut: prediction.blocks.clone(),
            sequence_parallel: layout.sequence_parallel,
            recompute: layout.recompute.name(),
            data_parallel: layout.sharding.name(),
            predicted_step_s: prediction.seconds,
            gain: published / prediction.seconds - 1.0,
        }
    }

    /// Returns the cells of a table, without the outer bars.
    pub(crate) fn cells(&self) -> String {
        let Self { tp, pp, dp, cp, ep, vp, mbs, schedule, recompute, data_parallel, .. } = self;
        let mut mesh = format!("t{tp} p{pp} d{dp}");
        for (letter, ranks) in [("c", cp), ("e", ep)] {
            if *ranks > 1 {
                let _ = write!(mesh, " {letter}{ranks}");
            }
        }
        let chunks = if *vp > 1 { format!(", {vp} chunks") } else { String::new() };
        format!(
            "{mesh} | {schedule}{chunks} | {mbs} | {recompute} | {data_parallel} | {:.2} | {:+.1}%",
            self.predicted_step_s,
            self.gain * 100.0
        )
    }
}
