//! The page that shows the stages of a plan in the names of another system, and the parts of the plan that the
//! files leave out.

use std::fmt::Write;

use serde::Serialize;

use crate::emit::model_parts::{ModelParts, StageParts};
use crate::ids::StageIndex;
use crate::plan::{Plan, System};

/// A part of a plan that a system does not have, or has in another form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Remark {
    /// The part of the plan, such as `recomputation`.
    pub subject: &'static str,
    /// The system's way to do it.
    pub text: String,
}

/// The names of layers in a system.
pub(super) struct Mapping {
    pub(super) system: System,
    /// Returns the layers of a stage as the system names them.
    pub(super) names: fn(&StageParts) -> String,
}

impl Mapping {
    /// Returns the page, as Markdown.
    pub(super) fn text(&self, plan: &Plan, parts: &ModelParts, remarks: &[Remark]) -> String {
        let mut text = format!("# {} as {} runs it\n\n", plan.title(), self.system);
        let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all text");
        line(format!("| stage | rank | layers of the profile | {} |", self.system));
        line("|---|---|---|---|".to_owned());
        let placement = plan.schedule.placement();
        let starts = [0].into_iter().chain(plan.boundaries.iter().copied());
        let ends = plan.boundaries.iter().copied().chain([parts.layers()]);
        for (index, ((stage, start), end)) in
            (0..).zip(parts.stages(&plan.boundaries).iter().zip(starts).zip(ends))
        {
            let rank = placement.rank_of(StageIndex::new(index));
            let layers = if end - start == 1 { start.to_string() } else { format!("{start} to {}", end - 1) };
            line(format!("| {index} | {rank} | {layers} | {} |", (self.names)(stage)));
        }
        line(String::new());
        if remarks.is_empty() {
            line("The files contain the whole plan.".to_owned());
        } else {
            line(format!("| part of the plan | in {} |", self.system));
            line("|---|---|".to_owned());
            for Remark { subject, text } in remarks {
                line(format!("| {subject} | {text} |"));
            }
        }
        text
    }
}

/// Returns the names of a stage's layers as torchtitan has them.
pub(super) fn torchtitan_names(stage: &StageParts) -> Vec<String> {
    let first = stage.embedding.then(|| "tok_embeddings".to_owned());
    let blocks = stage.blocks.clone().map(|block| format!("layers.{block}"));
    let last = if stage.head { &["norm", "lm_head"][..] } else { &[] };
    first.into_iter().chain(blocks).chain(last.iter().map(|&name| name.to_owned())).collect()
}
