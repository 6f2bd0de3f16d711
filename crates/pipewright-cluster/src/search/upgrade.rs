//! The gain of more hardware: the predicted step with twice the nodes, more memory, or a faster network.

use crate::pipeline::Programs;
use crate::predict::predict;
use crate::search::explore::search;
use crate::search::found::ClusterPlan;
use crate::search::request::Request;
use crate::setting::Setting;

/// A change of the hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
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
    pub change: Change,
    /// The fastest plan that the search found after the change; `None` if no mesh divides twice the GPUs.
    pub plan: Option<ClusterPlan>,
    /// The factor by which a step becomes faster: the seconds before, divided by the seconds after. With twice
    /// the nodes, 2 means that a training takes half as long and as many GPU hours. 1 if there is no plan.
    pub speedup: f64,
}

impl Change {
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

/// Returns the fastest plans after each change. `best` is the fastest plan of the request. Each change takes a
/// search with a quarter of the simulations. After a change that leaves the GPUs, no plan is slower than
/// `best`.
pub fn upgrades(request: &Request, best: &ClusterPlan) -> Vec<Upgrade> {
    let upgrade = |change: Change| {
        let changed = change.apply(request);
        let searched = search(&changed).ok().and_then(|found| found.plans.into_iter().next());
        let plans = [searched, same_layout(&changed, best)];
        let seconds = |plan: &ClusterPlan| plan.prediction.seconds;
        let fastest =
            plans.into_iter().flatten().min_by(|one, other| seconds(one).total_cmp(&seconds(other)));
        let speedup = fastest.as_ref().map_or(1.0, |plan| seconds(best) / seconds(plan));
        Upgrade { change, plan: fastest, speedup }
    };
    Change::ALL.into_iter().map(upgrade).collect()
}

/// Returns the layout of a plan on a changed machine, unless the number of GPUs changed.
fn same_layout(request: &Request, plan: &ClusterPlan) -> Option<ClusterPlan> {
    let layout = (plan.layout.gpus == request.gpus).then(|| plan.layout.clone())?;
    let setting = Setting { model: &request.model, layout: &layout, machine: &request.machine };
    let prediction = predict(&setting, &mut Programs::default()).ok()?;
    Some(ClusterPlan::new(request, layout, prediction))
}
