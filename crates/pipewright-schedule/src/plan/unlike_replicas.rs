//! Plans replicas of unlike ranks: the ranks of each replica, and its share of the batch.
//!
//! A few divisions of the ranks are considered, with all sizes of microbatches: ranks of similar speed at the same place
//! of all replicas or in the same replica, and the order of the profile (`replica_rows.rs` has their rows). The most
//! promising divisions are planned, each as the pipeline that stands for all replicas ([`Profile::of_replicas`]), and the fastest plan counts.
//!
//! **The bound.** A rank computes no layer faster than at the speed of the kind of layer that it is best at, so the ranks
//! together take at least the work of all rows over the sum of these speeds. If a replica is one rank, the rank takes its
//! own time for a row. The optimizer takes at least the mean over the ranks of a replica, at the largest speed.

use crate::divisor::{divisors, greatest_common_divisor};
use crate::ids::Rank;
use crate::mesh::Mesh;
use crate::plan::layers::Layers;
use crate::plan::machines::replica_uses;
use crate::plan::network::Network;
use crate::plan::planner::plan_pipelines;
use crate::plan::rank_times::Step;
use crate::plan::replica_rows::{places, rows_of, times_of};
use crate::plan::report::{Plan, PlanError, PlanReport};
use crate::plan::request::PlanRequest;
use crate::plan::tuning::ROUNDING;
use crate::plan::tuning::unlike::DIVISIONS_OF_REPLICAS;
use crate::profile::{Profile, RankProfile};
use crate::words::counted;

/// The ranks of all replicas, and how they share a step.
struct Division {
    /// The ranks of each replica.
    replicas: Vec<Vec<Rank>>,
    /// The rows of a microbatch of each replica.
    rows: Vec<u32>,
    /// The mean of `rows`.
    mean: u32,
    /// The microbatches of a step, over all replicas.
    microbatches: u32,
    /// The time of a step without what depends on the cut.
    estimate: f64,
}

/// Searches the best plans with `replicas` replicas of a profile of unlike ranks.
pub(super) fn plan_replicas(
    profile: &Profile,
    request: &PlanRequest,
    replicas: u32,
    keep_going: &mut dyn FnMut() -> bool,
) -> Result<PlanReport, PlanError> {
    let ranks = request.ranks / replicas;
    if ranks == 0 {
        return Err(PlanError::Input(format!(
            "{} need as many ranks, and there are {}; use fewer replicas",
            counted(replicas, "replica"),
            counted(request.ranks, "rank")
        )));
    }
    let profile = &with_all_ranks(profile, request);
    let divisions = divisions_of(profile, request, replicas);
    if divisions.is_empty() {
        return Err(PlanError::Input(format!(
            "{} cannot share {}; use a number of microbatches that is a multiple of the replicas",
            counted(replicas, "replica"),
            counted(request.microbatches, "microbatch")
        )));
    }
    let (mut best, mut failure, mut simulated): (Option<(PlanReport, &Division)>, _, _) = (None, None, 0);
    let tried = divisions.len().min(DIVISIONS_OF_REPLICAS);
    for division in divisions.iter().take(tried) {
        let own = PlanRequest {
            ranks: ranks * replicas,
            microbatches: division.microbatches,
            microbatch_rows: division.mean,
            larger_microbatches: false,
            data_parallel: Some(replicas),
            effort: request.effort / tried as u64,
            ..request.clone()
        };
        let merged = profile.of_replicas(&division.replicas, &division.rows);
        match plan_pipelines(&merged, &own, keep_going) {
            Ok(report) => {
                simulated += report.simulated;
                let is_better = |(best, _): &(PlanReport, _)| report.plans[0].step_s < best.plans[0].step_s;
                if best.as_ref().is_none_or(is_better) {
                    best = Some((report, division));
                }
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    let Some((mut report, division)) = best else { return Err(failure.unwrap_or(PlanError::Stopped)) };
    report.plans.iter_mut().for_each(|plan| division.name_ranks(plan));
    report.lower_bound_s = replicas_bound(profile, request, replicas);
    report.simulated = simulated;
    report.machines = replica_uses(profile, request, &report.plans[0], keep_going);
    Ok(report)
}

/// Returns the profile with a section for each rank, which says its memory.
fn with_all_ranks(profile: &Profile, request: &PlanRequest) -> Profile {
    let mut profile = profile.clone();
    profile.ranks.resize(request.ranks as usize, RankProfile::default());
    for rank in &mut profile.ranks {
        rank.memory_bytes = rank.memory_bytes.or(request.memory);
    }
    profile
}

impl Division {
    /// Names the ranks and the shares of a plan of the merged replicas.
    fn name_ranks(&self, plan: &mut Plan) {
        let used = |replica: &Vec<Rank>| match plan.machines.as_slice() {
            [] => replica.clone(),
            places => places.iter().map(|place| replica[place.index()]).collect(),
        };
        plan.machines = self.replicas.iter().flat_map(used).collect();
        plan.batch_shares = shares_of(&self.rows);
    }
}

/// Returns the smallest numbers with the ratio of these; none if they are equal.
fn shares_of(rows: &[u32]) -> Vec<u32> {
    if rows.iter().all(|own| *own == rows[0]) {
        return Vec::new();
    }
    let common = rows.iter().fold(0, |common, &own| greatest_common_divisor(common, own.into()));
    rows.iter().map(|&own| own / common as u32).collect()
}

/// Returns the divisions, the most promising first.
fn divisions_of(profile: &Profile, request: &PlanRequest, replicas: u32) -> Vec<Division> {
    let times = times_of(profile);
    let ranks = request.ranks / replicas;
    let may_group = |&rows: &u32| rows == 1 || request.larger_microbatches;
    let mut divisions = Vec::new();
    for group in divisors(request.microbatches).into_iter().filter(may_group) {
        let (microbatches, mean) =
            (request.microbatches / group, request.microbatch_rows.saturating_mul(group));
        if !microbatches.is_multiple_of(replicas) {
            continue;
        }
        for replicas in groupings(&times, replicas as usize, ranks as usize) {
            let rows = rows_of(&times, &replicas, mean);
            let own = f64::from(microbatches) / replicas.len() as f64;
            let estimate = f64::from(mean) / f64::from(profile.rows) * (own + f64::from(ranks) - 1.0)
                / places(&times, &replicas, &rows, mean);
            divisions.push(Division { replicas, rows, mean, microbatches, estimate });
        }
    }
    divisions.sort_by(|one, other| one.estimate.total_cmp(&other.estimate));
    divisions
}

/// Returns ways to divide the fastest ranks into replicas of equally many ranks.
fn groupings(times: &[f64], replicas: usize, ranks: usize) -> Vec<Vec<Vec<Rank>>> {
    let mut fastest: Vec<usize> = (0..times.len()).collect();
    fastest.sort_by(|&one, &other| times[one].total_cmp(&times[other]));
    fastest.truncate(replicas * ranks);
    let mut in_order = fastest.clone();
    in_order.sort_unstable();
    let rank = |order: &[usize], at: usize| Rank::new(order[at] as u32);
    let mut groupings: Vec<Vec<Vec<Rank>>> = Vec::new();
    for order in [fastest, in_order] {
        let alike =
            |replica: usize| (0..ranks).map(|place| rank(&order, place * replicas + replica)).collect();
        let in_a_row =
            |replica: usize| (0..ranks).map(|place| rank(&order, replica * ranks + place)).collect();
        for grouping in [(0..replicas).map(alike).collect(), (0..replicas).map(in_a_row).collect()] {
            if !groupings.contains(&grouping) {
                groupings.push(grouping);
            }
        }
    }
    groupings
}

/// Returns a time that no step with so many replicas is below.
fn replicas_bound(profile: &Profile, request: &PlanRequest, replicas: u32) -> f64 {
    let mesh = Mesh { pipeline: request.ranks, data: replicas, ..Mesh::default() };
    let fastest = Profile { link: profile.fastest_link(request.ranks), ..profile.clone() };
    let Some(network) = Network::of(&fastest, mesh) else { return 0.0 };
    let (rows, ranks) = (request.microbatch_rows, request.ranks / replicas);
    let layers = Layers::of(profile, rows, network, request.state).with_speeds(profile, rows, request.state);
    let step = Step::of(&layers, request.ranks, request.microbatches);
    let speeds = if ranks == 1 { step.mean_speeds() } else { step.speeds() };
    let work = step.microbatches * layers.work(0..layers.count()) / speeds.iter().sum::<f64>();
    let gradients = layers.list.iter().map(|layer| layer.gradient).fold(0, u64::saturating_add);
    let sums = layers.network.replica_sum(gradients / u64::from(ranks));
    let optimizer: f64 = layers.list.iter().map(|layer| layer.optimizer).sum();
    let updates = f64::from(replicas) * optimizer / step.optimizer_speeds().iter().sum::<f64>();
    (work.max(sums) + updates) * (1.0 - ROUNDING)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{LayerProfile, LinkProfile, PairProfile};

    /// Four layers of 3 s with an optimizer of 1 s and gradients of 40 bytes, over links of 10 bytes per second.
    fn profile(speeds: &[f64]) -> Profile {
        let layer = LayerProfile {
            kind: "block".into(),
            count: 4,
            forward_s: 1.0,
            input_backward_s: 1.0,
            weight_backward_s: 1.0,
            optimizer_s: 1.0,
            parameter_bytes: 40,
            ..LayerProfile::default()
        };
        let rank = |&speed: &f64| RankProfile { speed, ..RankProfile::default() };
        let link = LinkProfile::new(0.0, 10.0);
        Profile { link, layers: vec![layer], ranks: speeds.iter().map(rank).collect(), ..Profile::default() }
    }

    fn check(profile: &Profile, replicas: u32, microbatches: u32, expected: f64) {
        let request =
            PlanRequest { ranks: profile.ranks.len() as u32, microbatches, ..PlanRequest::default() };
        let bound = replicas_bound(profile, &request, replicas);
        assert!((bound / expected - 1.0).abs() < 1e-6, "{bound}, and {expected} is expected");
    }

    #[test]
    fn the_bound_has_the_work_the_sums_and_the_updates() {
        // 8 microbatches of 12 s at the speed 4, and 2 updates of 4 s at the speed 4.
        check(&profile(&[3.0, 1.0]), 2, 8, 24.0 + 2.0);
        check(&profile(&[1.0; 4]), 2, 8, 24.0 + 2.0);
        // Two replicas send their 160 bytes once. Each of two ranks sends half of them.
        check(&profile(&[3.0, 1.0]), 2, 2, 16.0 + 2.0);
        check(&profile(&[2.0, 2.0, 1.0, 1.0]), 2, 2, 8.0 + 8.0 / 6.0);
        // The fastest link counts, whatever the profile says of the others.
        let pair = |from, to, bytes_per_s| PairProfile { from, to, latency_s: 0.0, bytes_per_s };
        let fast = Profile { pairs: vec![pair(0, 1, 20.0)], ..profile(&[3.0, 1.0]) };
        check(&fast, 2, 2, 8.0 + 2.0);
        let slow = Profile { pairs: vec![pair(0, 1, 5.0), pair(1, 0, 8.0)], ..profile(&[3.0, 1.0]) };
        check(&slow, 2, 2, 20.0 + 2.0);
    }

    /// The optimizer of merged replicas is faster than their computations, because it does not depend on the rows.
    #[test]
    fn the_bound_of_merged_replicas_has_the_speed_of_their_optimizer() {
        let replicas = [0, 1].map(|rank| vec![Rank::new(rank)]);
        let fast = Profile { link: LinkProfile::new(0.0, 1e12), ..profile(&[1.0, 1.0]) };
        let merged = fast.of_replicas(&replicas, &[3, 1]);
        let request =
            PlanRequest { ranks: 2, microbatches: 8, data_parallel: Some(2), ..PlanRequest::default() };
        let report = plan_pipelines(&merged, &request, &mut || true).expect("a plan");
        let best = &report.plans[0];
        assert!(report.lower_bound_s <= best.step_s, "{} above {}", report.lower_bound_s, best.step_s);
        // 4 microbatches of 12 s with 1.5 times the rows, and 4 s of updates.
        assert!((best.step_s - (72.0 + 4.0)).abs() < 1e-6, "{}", best.step_s);
    }
}
