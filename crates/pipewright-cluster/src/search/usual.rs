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
    /// of predictions of this kind, and takes `slowest` seconds or fewer.
    pub(crate) fn prefer_usual(&mut self, machine: &Machine, slowest: f64) {
        let Some(fastest) = self.plans.first() else { return };
        let bar = self.accuracy.mean.min(MOST);
        let rare = |plan: &ClusterPlan| rare_parts(&plan.layout, machine);
        let slowdown = |plan: &ClusterPlan| plan.prediction.seconds / fastest.prediction.seconds - 1.0;
        let is_near = |plan: &ClusterPlan| slowdown(plan) <= bar && plan.prediction.seconds <= slowest;
        let near = self.plans.iter().enumerate().filter(|(_, plan)| is_near(plan));
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

#[cfg(test)]
mod tests {
    use crate::catalogue::by_name;
    use crate::layout::Precision;
    use crate::search::{Fixed, Request, search};
    use pipewright_shapes::reader;

    /// Checks the order of plans with schedules and seconds, the fastest first, after a usual one is preferred. Plans are
    /// not slower than `slowest` seconds, and the error of predictions is 4%.
    fn check(plans: &[(&str, f64)], slowest: f64, expected: &[&str], sentence: Option<&str>) {
        let model = reader::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model").model;
        let machine = by_name("h100").expect("a machine");
        let fixed = Fixed { pipeline: Some(8), chunks: Some(1), tensor: Some(8), ..Fixed::default() };
        let request = Request {
            fixed,
            simulations: 1,
            plans: 1,
            memory: Some(1e15),
            ..Request::new(model, machine, 64, 32, 8192, Precision::Half)
        };
        let mut report = search(&request).expect("a plan");
        let known = report.plans[0].clone();
        let plan = |&(schedule, seconds): &(&str, f64)| {
            let mut plan = known.clone();
            plan.layout.schedule = Some(schedule.to_owned());
            plan.prediction.seconds = seconds;
            plan
        };
        report.plans = plans.iter().map(plan).collect();
        (report.preferred, report.accuracy.mean) = (None, 0.04);
        report.prefer_usual(&request.machine, slowest);
        let names: Vec<&str> = report.plans.iter().map(|plan| plan.layout.schedule_name()).collect();
        assert_eq!(names, expected);
        assert_eq!(report.preferred.as_deref(), sentence);
        assert_eq!(report.fastest().layout.schedule_name(), plans[0].0);
    }

    #[test]
    fn a_usual_plan_within_the_error_is_preferred() {
        let sentence = "the first plan is 3.0% slower than the fastest one, less than predictions of this kind are off (4.0%), \
                        and needs no schedule zb-h1";
        let any = f64::INFINITY;
        check(
            &[("zb-h1", 1.0), ("v-half", 1.02), ("1f1b", 1.03)],
            any,
            &["1f1b", "zb-h1", "v-half"],
            Some(sentence),
        );
        // Not within the error.
        check(&[("zb-h1", 1.0), ("1f1b", 1.05)], any, &["zb-h1", "1f1b"], None);
        // Slower than a known plan.
        check(&[("zb-h1", 1.0), ("1f1b", 1.03)], 1.02, &["zb-h1", "1f1b"], None);
        // Not more usual.
        check(&[("zb-h1", 1.0), ("v-half", 1.01)], any, &["zb-h1", "v-half"], None);
        check(&[("1f1b", 1.0), ("zb-h1", 1.01)], any, &["1f1b", "zb-h1"], None);
    }
}
