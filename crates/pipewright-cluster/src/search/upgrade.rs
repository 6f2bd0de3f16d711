//! The gain of more hardware: the predicted step with twice the nodes, more memory, or a faster network.

use crate::search::error::SearchError;
use crate::search::found::ClusterPlan;
use crate::search::plans::{plan_of, search};
use crate::search::request::Request;

/// A change of the hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HardwareChange {
    /// Twice the GPUs, with the same rows of a step.
    TwiceTheNodes,
    /// Twice the bytes that a rank may need.
    TwiceTheMemory,
    /// Twice the bandwidth between nodes.
    TwiceTheNetwork,
}

/// The predicted step after a change.
#[derive(Debug, Clone, PartialEq)]
pub struct Upgrade {
    /// The change.
    pub change: HardwareChange,
    /// The fastest plan that the search found after the change, or why it found none: the given parts of the
    /// layout may not divide twice the GPUs.
    pub gain: Result<Gain, SearchError>,
}

/// The plan after a change of the hardware.
#[derive(Debug, Clone, PartialEq)]
pub struct Gain {
    /// The fastest plan that the search found.
    pub plan: ClusterPlan,
    /// The factor by which a step becomes faster: the seconds before, divided by the seconds after. With twice
    /// the nodes, 2 means that a training takes half as long and as many GPU hours.
    pub speedup: f64,
}

impl HardwareChange {
    /// All changes.
    pub const ALL: [Self; 3] = [Self::TwiceTheNodes, Self::TwiceTheMemory, Self::TwiceTheNetwork];

    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::TwiceTheNodes => "twice the nodes",
            Self::TwiceTheMemory => "twice the memory",
            Self::TwiceTheNetwork => "twice the network's bandwidth",
        }
    }

    fn apply(self, request: &Request) -> Request {
        let mut changed =
            Request { plans: 1, simulations: (request.simulations / 4).max(8), ..request.clone() };
        match self {
            Self::TwiceTheNodes => changed.gpus = changed.gpus.saturating_mul(2),
            Self::TwiceTheMemory => changed.memory = Some(2.0 * request.memory_limit()),
            Self::TwiceTheNetwork => changed.machine.network_bandwidth *= 2.0,
        }
        changed
    }
}

/// Returns the fastest plans after each change. `best` is the fastest plan of the request
/// ([`ClusterReport::fastest`](crate::search::ClusterReport::fastest)). Each change takes a search with a quarter of the
/// simulations. After a change that leaves the GPUs, no plan is slower than `best`. With several kinds of machines, there
/// are none: it is not clear which kind changes.
pub fn upgrades(request: &Request, best: &ClusterPlan) -> Vec<Upgrade> {
    if !request.further.is_empty() {
        return Vec::new();
    }
    let upgrade = |change| Upgrade { change, gain: gain(&change.apply(request), best) };
    HardwareChange::ALL.into_iter().map(upgrade).collect()
}

/// Returns the fastest plan of a changed request, and how much faster it is than `best`.
fn gain(changed: &Request, best: &ClusterPlan) -> Result<Gain, SearchError> {
    let seconds = |plan: &ClusterPlan| plan.prediction.seconds;
    let searched = search(changed).map(|mut found| found.plans.swap_remove(0));
    let plan = match (searched, same_layout(changed, best)) {
        (Ok(searched), Some(same)) if seconds(&same) < seconds(&searched) => same,
        (Ok(searched), _) => searched,
        (Err(_), Some(same)) => same,
        (Err(error), None) => return Err(error),
    };
    Ok(Gain { speedup: seconds(best) / seconds(&plan), plan })
}

/// Returns the layout of a plan on a changed machine, unless the number of GPUs changed.
fn same_layout(request: &Request, plan: &ClusterPlan) -> Option<ClusterPlan> {
    if plan.layout.gpus == request.gpus { plan_of(request, &plan.layout) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::by_name;
    use crate::layout::Precision;
    use crate::search::explore::MOST_COMPUTATIONS;
    use crate::search::request::Fixed;
    use pipewright_shapes::reader;

    /// 64 ranks and 2,048 microbatches are more than the search simulates.
    #[test]
    fn a_plan_is_as_fast_as_before_on_the_same_machine() {
        let model = reader::read(include_str!("../../tests/cluster/llama_405b.json")).expect("a model");
        let machine = by_name("h100").expect("a machine");
        let fixed = Fixed { pipeline: Some(63), chunks: Some(1), ..Fixed::default() };
        let request = Request {
            fixed,
            plans: 1,
            simulations: 1,
            ..Request::new(model.model, machine, 504, 2048, 8192, Precision::Half)
        };
        let best = search(&request).expect("a plan").plans.remove(0);
        assert!(
            u64::from(best.layout.stages()) * 2 * u64::from(best.layout.microbatches()) > MOST_COMPUTATIONS
        );
        assert_eq!(same_layout(&request, &best), Some(best));
    }
}
