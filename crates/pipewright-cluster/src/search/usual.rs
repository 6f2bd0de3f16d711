//! The choice among plans that predictions cannot tell apart: the one with parts that most trainings have.

use crate::layout::{Layout, ShardedState};
use crate::machine::Machine;
use crate::search::found::{ClusterPlan, ClusterReport};

/// The largest difference of two plans that the error of predictions may explain. Plans of one model on one machine
/// have most of their error in common, so a kind with large errors does not make all plans alike.
const MOST: f64 = 0.05;
/// The tokens up to which few trainings divide sequences.
const SHORT: u32 = 32_768;

/// Returns the parts of a layout that few trainings have.
fn rare_parts(layout: &Layout, machine: &Machine) -> Vec<String> {
    let name = layout.schedule_name();
    let is_rare_schedule = layout.pipeline > 1 && !["1f1b", "interleaved1f1b"].contains(&name);
    let in_pipeline = layout.pipeline > 1;
    let parts = [
        (is_rare_schedule, format!("schedule {name}")),
        (layout.tensor > machine.gpus_per_node, "tensor group on several nodes".to_owned()),
        (
            layout.context > 1 && layout.sequence <= SHORT,
            format!("context parallelism for {} tokens", layout.sequence),
        ),
        (layout.sharding == ShardedState::Gradients, "sharded gradients".to_owned()),
        (
            in_pipeline && layout.sharding == ShardedState::Parameters,
            "sharded parameters in a pipeline".to_owned(),
        ),
    ];
    parts.into_iter().filter_map(|(is_rare, part)| is_rare.then_some(part)).collect()
}

impl ClusterReport {
    /// Moves the plan with the fewest rare parts to the front, if it is as fast as the fastest one within the error
    /// of predictions of this kind.
    pub(crate) fn prefer_usual(&mut self, machine: &Machine) {
        let Some(fastest) = self.plans.first() else { return };
        let bar = self.accuracy.mean.min(MOST);
        let rare = |plan: &ClusterPlan| rare_parts(&plan.layout, machine);
        let slowdown = |plan: &ClusterPlan| plan.prediction.seconds / fastest.prediction.seconds - 1.0;
        let near = self.plans.iter().enumerate().filter(|(_, plan)| slowdown(plan) <= bar);
        // Of equally many, the first one is the fastest.
        let Some((index, plan)) = near.min_by_key(|(_, plan)| rare(plan).len()) else { return };
        if index == 0 {
            return;
        }
        self.preferred = Some(format!(
            "the first plan is {:.1}% slower than the fastest one, less than predictions of this kind are off ({:.1}%), and \
             needs no {}",
            slowdown(plan) * 100.0,
            self.accuracy.mean * 100.0,
            rare(fastest)
                .into_iter()
                .filter(|part| !rare(plan).contains(part))
                .collect::<Vec<_>>()
                .join(" and no ")
        ));
        let plan = self.plans.remove(index);
        self.plans.insert(0, plan);
    }
}
