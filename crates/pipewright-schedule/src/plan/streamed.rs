//! Plans whose frozen base stays in its files: each rank reads its stages ahead of their use and drops them
//! ([`unshard`](crate::lower::unshard())).
//!
//! The named schedules are simulated, with several numbers of stages per rank up to one layer per stage, with the usual cuts,
//! without recomputation and with that of whole stages. For each of them the window is the largest that fits into the memory,
//! because a stage that stays in memory is not read again. A read costs its bytes at the disk's rate, which the ranks of a host
//! share equally, and takes place while the rank computes. So an order whose stages serve several microbatches before the next
//! one is read costs less where the disk limits the step. Among plans that are nearly as fast as the fastest one, the one that
//! reads the fewest bytes comes first, because other programs use the disk too.
//!
//! A tensor-parallel rank reads its rows of the matrices that are divided by outputs, and whole matrices of the others.
//!
//! Unlike ranks and searched orders are not planned with a base in files.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::action::Action;
use crate::costs::Costs;
use crate::generate::{Generator, Setting, catalogue};
use crate::lower::for_training;
use crate::plan::bound::simple_bound;
use crate::plan::families::Family;
use crate::plan::planner::no_shape;
use crate::plan::pool::usual_cuts;
use crate::plan::predict::{PlanChoice, Prediction, StreamChoice, predict_on};
use crate::plan::report::{
    Outcome, OutcomeKind, Plan, PlanError, PlanReport, PlanSettings, PlanStream, Shortage,
};
use crate::plan::request::PlanRequest;
use crate::plan::shape::Shape;
use crate::plan::stage_load::{StageLoad, stage_loads};
use crate::profile::{LayerProfile, Profile};
use crate::recompute::StageRecompute;
use crate::schedule::Schedule;

/// The bytes of the room into which a rank reads, before it copies what it has read.
pub const READ_ROOM: u64 = 4 << 20;

/// The bytes per second of a disk that was not measured.
const ASSUMED_RATE: f64 = 1e9;

/// The share by which a plan may be slower than the fastest one if it reads less.
const NEAR: f64 = 0.01;

/// Returns whether the parameters alone are too large for the memory in all divisions of the ranks.
pub(super) fn never_fits(profile: &Profile, request: &PlanRequest) -> bool {
    let is_too_large = |shape: &Shape| {
        let total = shape.memory.as_ref().map(|memory| memory.total(shape.ranks));
        total.is_some_and(|total| shape.fixed_bytes() > total)
    };
    Shape::all(profile, request).iter().all(is_too_large)
}

/// Plans a profile of equal ranks, whose layers say what may stay in files.
pub(super) fn plan_streamed(
    profile: &Profile,
    request: &PlanRequest,
    keep_going: &mut dyn FnMut() -> bool,
) -> Result<PlanReport, PlanError> {
    let profile = &in_files(profile);
    let mut shapes = Shape::all(profile, request);
    shapes.retain(|shape| shape.layers.sharding.shards == 1 && !shape.layers.is_unlike());
    if shapes.is_empty() {
        return Err(no_shape(profile, request));
    }
    let bounds = shapes.iter().map(|shape| simple_bound(shape.step()));
    let bound = bounds.fold(f64::INFINITY, f64::min);
    let (best, shortages) = (BTreeMap::new(), BTreeMap::new());
    let mut search = Search { profile, request, bound, best, shortages, simulated: 0, stopped: false };
    for shape in &shapes {
        for family in families(shape) {
            search.try_family(shape, &family, keep_going);
            if search.stopped {
                return search.finish();
            }
        }
    }
    search.finish()
}

/// Returns a profile whose layers hold what they need if their base stays in its files, with all that they read.
fn in_files(profile: &Profile) -> Profile {
    let layer = |layer: &LayerProfile| {
        let held = layer.unstreamed_bytes.saturating_add(layer.streamed_bytes);
        let held_bytes = if layer.streamed_bytes > 0 { Some(held) } else { layer.held_bytes };
        LayerProfile { held_bytes, ..layer.clone() }
    };
    let rank_bytes = profile.rank_bytes.saturating_add(READ_ROOM);
    Profile { layers: profile.layers.iter().map(layer).collect(), rank_bytes, ..profile.clone() }
}

/// Returns the schedules of a shape, those with the most stages per rank first.
fn families(shape: &Shape) -> Vec<Family> {
    let most = shape.layers.count() as u32 / shape.ranks.max(1);
    let mut chunks: Vec<u32> = (0..).map(|power| 1 << power).take_while(|&count| count < most).collect();
    chunks.push(most.max(1));
    let named = |chunks: u32| {
        let usable = |generator: &&Generator| {
            let settings = generator.settings;
            generator.trains && !settings.contains(&Setting::Costs) && !settings.contains(&Setting::Slices)
        };
        catalogue().iter().filter(usable).map(move |generator| Family {
            name: generator.name,
            settings: PlanSettings::default(),
            ranks: shape.ranks,
            chunks,
            microbatches: shape.microbatches,
            is_made_to_measure: false,
        })
    };
    chunks.into_iter().rev().flat_map(named).collect()
}

/// The state of the search.
struct Search<'a> {
    profile: &'a Profile,
    request: &'a PlanRequest,
    bound: f64,
    /// The best plan of each schedule.
    best: BTreeMap<&'static str, Plan>,
    /// The smallest shortage of each schedule, with the name of the plan.
    shortages: BTreeMap<&'static str, (Shortage, String)>,
    simulated: u64,
    stopped: bool,
}

/// A schedule with everything but the window.
struct Draft<'a> {
    shape: &'a Shape,
    family: &'a Family,
    schedule: &'a Schedule,
    loads: Vec<StageLoad>,
    choice: PlanChoice,
}

impl Search<'_> {
    /// Tries the cuts and the recomputation of a schedule. `keep_going` ends the search if a plan was tried.
    fn try_family(&mut self, shape: &Shape, family: &Family, keep_going: &mut dyn FnMut() -> bool) {
        // A schedule may not exist at this size.
        let Ok(schedule) = family.schedule(&Costs::default()) else { return };
        let stages = schedule.placement().stages() as usize;
        for starts in usual_cuts(shape, stages) {
            for recompute in [None, Some(StageRecompute::WHOLE)] {
                if self.simulated > 0 && !keep_going() {
                    self.stopped = true;
                    return;
                }
                let recompute = vec![recompute; stages];
                let loads = stage_loads(&shape.layers, schedule.placement(), &starts, &recompute);
                let choice = PlanChoice {
                    head_parts: Some(shape.head_parts),
                    boundaries: starts[1..starts.len() - 1].to_vec(),
                    recompute: loads.iter().map(StageLoad::choice).collect(),
                    mesh: shape.mesh,
                    microbatch_rows: shape.microbatch_rows,
                    state: self.request.state,
                    ..PlanChoice::default()
                };
                self.try_windows(&Draft { shape, family, schedule: &schedule, loads, choice });
            }
        }
    }

    /// Keeps the plan with the largest window that fits.
    fn try_windows(&mut self, draft: &Draft<'_>) {
        let mut best = None;
        let (mut fits, mut too_large) = (0, draft.family.chunks + 1);
        while fits + 1 < too_large {
            let window = match (fits, too_large == draft.family.chunks + 1) {
                (0, _) => 1,
                (_, true) => draft.family.chunks,
                _ => fits.midpoint(too_large),
            };
            match self.predicted(draft, window) {
                Some(plan) => (fits, best) = (window, Some(plan)),
                None => too_large = window,
            }
        }
        let Some(plan) = best else { return };
        let known = self.best.get(plan.name);
        if known.is_none_or(|known| is_better(&plan, known)) {
            self.best.insert(plan.name, plan);
        }
    }

    /// Returns the plan with a window, unless it does not fit.
    fn predicted(&mut self, draft: &Draft<'_>, window: u32) -> Option<Plan> {
        let Draft { shape, family, schedule, choice, .. } = draft;
        let stream = StreamChoice { window: NonZeroU32::new(window)?, bytes_per_s: self.rate(shape) };
        let choice = PlanChoice { stream: Some(stream), ..choice.clone() };
        let program = for_training(schedule, &choice.lowering(self.profile)).ok()?;
        let prediction = predict_on(&shape.layers, schedule, program, &choice).ok()?;
        self.simulated += 1;
        if let Some(shortage) = draft.shortage(&prediction) {
            let known = self.shortages.get(family.name);
            if known.is_none_or(|(known, _)| missing(&shortage) < missing(known)) {
                let layout = format!("{} stages per rank, window {window}", family.chunks);
                self.shortages.insert(family.name, (shortage, format!("{}, {layout}", family.name)));
            }
            return None;
        }
        Some(Plan {
            name: family.name,
            settings: family.settings,
            schedule: (*schedule).clone(),
            head_parts: shape.head_parts,
            machines: Vec::new(),
            batch_shares: Vec::new(),
            collectives: prediction.collectives,
            step_s: prediction.step_s(),
            bubble_fraction: prediction.run.timeline().bubble_fraction(),
            stream: Some(draft.reads(&prediction, stream)),
            peak_bytes: prediction.peak_bytes,
            boundaries: choice.boundaries,
            recompute: choice.recompute,
            mesh: choice.mesh,
            microbatch_rows: choice.microbatch_rows,
        })
    }

    /// Returns the bytes per second that each rank reads, if the ranks of a host share its disk equally.
    fn rate(&self, shape: &Shape) -> f64 {
        let all = shape.ranks.saturating_mul(shape.mesh.data).saturating_mul(shape.mesh.tensor);
        let of_host = self.profile.node.map_or(all, |node| node.ranks.min(all));
        self.profile.link.read_bytes_per_s.unwrap_or(ASSUMED_RATE) / f64::from(of_host.max(1))
    }

    fn finish(self) -> Result<PlanReport, PlanError> {
        let Self { best, shortages, bound, simulated, stopped, request, .. } = self;
        let mut plans: Vec<Plan> = best.into_values().collect();
        plans.sort_by(|one, other| one.step_s.total_cmp(&other.step_s));
        let Some(fastest) = plans.first().map(|plan| plan.step_s) else {
            let least = shortages.into_values().min_by_key(|(shortage, _)| missing(shortage));
            return Err(least.map_or(PlanError::Stopped, |(shortage, plan)| PlanError::DoesNotFit {
                plan,
                shortage,
                stopped,
            }));
        };
        let near = plans.iter().take_while(|plan| plan.step_s <= fastest * (1.0 + NEAR)).enumerate();
        let first = near.min_by_key(|(_, plan)| read_bytes(plan)).map_or(0, |(index, _)| index);
        plans[..=first].rotate_right(1);
        let mesh = plans[0].division();
        let takes = |plan: &Plan| Outcome {
            name: plan.name,
            result: OutcomeKind::Takes(plan.step_s),
            mesh: Some(plan.division()),
            on_best_mesh_s: (plan.division() == mesh).then_some(plan.step_s),
        };
        let too_large = |(&name, (shortage, _)): (&&'static str, &(Shortage, String))| Outcome {
            name,
            result: OutcomeKind::TooLarge(*shortage),
            mesh: None,
            on_best_mesh_s: None,
        };
        let has_plan = |name: &str| plans.iter().any(|plan| plan.name == name);
        let others = shortages.iter().filter(|(name, _)| !has_plan(name)).map(too_large);
        let outcomes = plans.iter().map(takes).chain(others).collect();
        plans.truncate(request.plans.max(1));
        Ok(PlanReport { plans, lower_bound_s: bound, outcomes, simulated, stopped, machines: Vec::new() })
    }
}

impl Draft<'_> {
    /// Returns what the rank lacks that lacks the most; `None` if all have enough memory.
    fn shortage(&self, prediction: &Prediction) -> Option<Shortage> {
        let memory = self.shape.memory.as_ref()?;
        let placement = self.schedule.placement();
        let ranks = placement.all_ranks().zip(&prediction.peak_bytes);
        let lacks = ranks.map(|(rank, &needed)| {
            let own = placement.stages_of(rank).iter().map(|stage| &self.loads[stage.index()]);
            let streamed = own.clone().map(|load| load.streamed).fold(0, u64::saturating_add);
            let fixed = StageLoad::fixed(own, self.shape.layers.sharding).saturating_sub(streamed);
            Shortage { rank, needed, fixed, memory: memory.of_rank(rank.index()) }
        });
        lacks.filter(|shortage| missing(shortage) > 0).max_by_key(missing)
    }

    fn reads(&self, prediction: &Prediction, stream: StreamChoice) -> PlanStream {
        let of_row = |row: &Vec<Action>| {
            let read = row.iter().filter(|action| matches!(action, Action::Unshard { .. }));
            read.map(|action| self.loads[action.stage().index()].read).fold(0, u64::saturating_add)
        };
        let of_ranks: Vec<u64> = prediction.program.as_program().rows().iter().map(of_row).collect();
        let most = of_ranks.iter().max().copied().unwrap_or(0);
        let all = of_ranks.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        PlanStream {
            window: stream.window,
            step_bytes: all.saturating_mul(self.shape.mesh.tensor.into()),
            read_s: most as f64 / stream.bytes_per_s,
            bytes_per_s: stream.bytes_per_s,
        }
    }
}

fn missing(shortage: &Shortage) -> u64 {
    shortage.needed.saturating_sub(shortage.memory)
}

fn read_bytes(plan: &Plan) -> u64 {
    plan.stream.map_or(0, |stream| stream.step_bytes)
}

/// Returns whether a plan is faster, or nearly as fast and reads less.
fn is_better(plan: &Plan, known: &Plan) -> bool {
    let (ratio, bytes) = (plan.step_s / known.step_s, [read_bytes(plan), read_bytes(known)]);
    ratio < 1.0 - NEAR || ratio <= 1.0 + NEAR && bytes[0] < bytes[1] || ratio < 1.0 && bytes[0] == bytes[1]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::plan;
    use crate::profile::{LinkProfile, NodeProfile, RankProfile};

    /// The bytes of a layer in a file.
    const STREAMED: u64 = 10 << 20;

    /// Returns a profile of eight layers, each of which takes a second for a forward, on a disk that reads one of them in
    /// `read_s`.
    fn profile(read_s: f64) -> Profile {
        let layer = LayerProfile {
            kind: "layer".into(),
            count: 8,
            forward_s: 1.0,
            input_backward_s: 1.0,
            weight_backward_s: 0.1,
            output_bytes: 1000,
            parameter_bytes: STREAMED + 1000,
            trained_bytes: Some(1000),
            activation_bytes: 2 << 20,
            held_bytes: Some(STREAMED + 1000),
            streamed_bytes: STREAMED,
            unstreamed_bytes: 1000,
            ..LayerProfile::default()
        };
        let link = LinkProfile::new(0.0, 1e12);
        let link = LinkProfile { read_bytes_per_s: Some(STREAMED as f64 / read_s), ..link };
        Profile { link, layers: vec![layer], ..Profile::default() }
    }

    fn planned(read_s: f64, memory: u64, change: impl Fn(&mut PlanRequest)) -> Result<Plan, PlanError> {
        let mut request = PlanRequest {
            ranks: 1,
            memory: Some(memory),
            larger_microbatches: false,
            effort: 100_000,
            ..PlanRequest::default()
        };
        change(&mut request);
        plan(&profile(read_s), &request, &mut || true).map(|report| report.plans[0].clone())
    }

    fn stream(plan: &Plan) -> PlanStream {
        plan.stream.unwrap_or_else(|| panic!("{} has its base in memory", plan.name))
    }

    #[test]
    fn the_largest_window_that_fits_is_taken() {
        let window = |memory| stream(&planned(0.1, memory, |_| ()).expect("a plan")).window.get();
        // The room for reads, the activations of a microbatch in each layer, and the layers.
        let windows = [40, 50, 60].map(|mebibytes| window(mebibytes << 20));
        assert!(windows[0] < windows[1] && windows[1] < windows[2], "{windows:?}");
        let base = 8 * STREAMED;
        assert_eq!(planned(0.1, 3 * base, |_| ()).expect("a plan").stream, None);
        let always = planned(0.1, 3 * base, |request| request.always_streams = true).expect("a plan");
        assert_eq!(stream(&always).step_bytes, base, "all layers stay in memory after they are read");
        let error = planned(0.1, STREAMED, |_| ()).expect_err("a layer does not fit");
        assert!(matches!(error, PlanError::DoesNotFit { .. }), "{error}");
    }

    /// Also before a plan fits.
    #[test]
    fn the_search_ends_when_it_is_told_to() {
        let ended = |memory, most: u32| {
            let request = PlanRequest {
                ranks: 1,
                memory: Some(memory),
                always_streams: true,
                larger_microbatches: false,
                ..PlanRequest::default()
            };
            let mut asked = 0;
            let mut keep_going = || {
                asked += 1;
                asked <= most
            };
            let result = plan(&profile(0.1), &request, &mut keep_going);
            (asked, result)
        };
        let (asked, result) = ended(STREAMED, 2);
        assert_eq!(asked, 3);
        assert!(matches!(result, Err(PlanError::DoesNotFit { stopped: true, .. })), "{result:?}");
        let (asked, result) = ended(1 << 30, 0);
        assert!(asked == 1 && result.is_ok_and(|report| report.stopped));
    }

    #[test]
    fn on_a_slow_disk_a_stage_serves_many_microbatches() {
        let (memory, base) = (60 << 20, 8 * STREAMED);
        let slow = planned(3.0, memory, |_| ()).expect("a plan");
        assert!(stream(&slow).step_bytes < 2 * base, "{}: {:?}", slow.name, slow.stream);
        // With a second forward, 8 microbatches take 8 x 3.1 s in each layer, which hides the reads of this order alone.
        let compute = 8.0 * 8.0 * 3.1;
        assert!(slow.step_s < 1.05 * compute, "{} {}", slow.name, slow.step_s);
        let rows = slow.schedule.rows()[0].iter().flatten();
        let stages: Vec<u32> = rows.map(|action| action.stage().get()).collect();
        let changes = stages.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(changes <= 2 * 8, "{}: {changes} changes of the stage", slow.name);
    }

    #[test]
    fn ranks_of_a_host_share_its_disk() {
        let rate = |ranks| {
            let plan =
                planned(1.0, 60 << 20, |request| (request.ranks, request.always_streams) = (ranks, true));
            stream(&plan.expect("a plan")).bytes_per_s
        };
        assert_eq!(rate(1), STREAMED as f64);
        assert_eq!(rate(2), STREAMED as f64 / 2.0);
    }

    #[test]
    fn tensor_ranks_read_whole_matrices_for_their_inputs() {
        let whole = STREAMED / 4;
        let mut of_node = profile(1.0);
        of_node.layers[0].read_whole_bytes = [whole, whole / 2];
        of_node.node = Some(NodeProfile { ranks: 2, latency_s: 0.0, bytes_per_s: 1e12 });
        let planned = |tensor: u32| {
            let request = PlanRequest {
                ranks: 2,
                tensor_parallel: Some(tensor),
                microbatches: 1,
                always_streams: true,
                memory: Some(1 << 30),
                larger_microbatches: false,
                ..PlanRequest::default()
            };
            let report = plan(&of_node, &request, &mut || true).expect("a plan");
            report.plans.iter().min_by_key(|plan| read_bytes(plan)).expect("a plan").clone()
        };
        let [one, two] = [planned(1), planned(2)];
        assert_eq!((one.mesh.tensor, read_bytes(&one)), (1, 8 * STREAMED));
        assert_eq!((two.mesh.tensor, read_bytes(&two)), (2, 8 * (STREAMED + whole)));
        assert_eq!(stream(&two).bytes_per_s, STREAMED as f64 / 2.0, "both ranks use the disk");
        // Half of each layer and of its activations, the room for reads, and the largest matrix that is read for a part.
        let expected = READ_ROOM + (8 * (STREAMED + (2 << 20)) + whole) / 2;
        let more = two.peak_bytes[0].checked_sub(expected);
        assert!(more.is_some_and(|bytes| bytes < 1 << 16), "{} and {expected}", two.peak_bytes[0]);
    }

    #[test]
    fn reads_that_are_not_planned_are_refused() {
        let request = PlanRequest { ranks: 2, always_streams: true, ..PlanRequest::default() };
        let ranks = [1.0, 2.0].map(|speed| RankProfile { speed, ..RankProfile::default() });
        let unlike = Profile { ranks: ranks.to_vec(), ..profile(0.1) };
        let refused = plan(&unlike, &request, &mut || true).expect_err("a refusal").to_string();
        assert!(refused.contains("not planned for unlike ranks: remove [[rank]]"), "{refused}");
    }
}
