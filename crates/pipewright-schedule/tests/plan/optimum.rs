//! Plans and bounds for unlike ranks against the fastest possible steps of small clusters, over all assignments of
//! layers to ranks and all orders of their computations.

use pipewright_schedule::plan::{PlanRequest, plan};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile, RankProfile};

use crate::instances::{Numbers, block};

/// The computations of one layer and one microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Forward,
    Input,
    Weight,
}

/// The model on given ranks.
struct Task<'a> {
    profile: &'a Profile,
    rank_of: Vec<usize>,
    microbatches: usize,
}

/// A computation.
#[derive(Debug, Clone, Copy)]
struct Cell {
    kind: Kind,
    layer: usize,
    microbatch: usize,
}

impl Task<'_> {
    fn takes(&self, cell: Cell) -> f64 {
        let layer = &self.profile.layers[cell.layer];
        let time = match cell.kind {
            Kind::Forward => layer.forward_s,
            Kind::Input => layer.input_backward_s,
            Kind::Weight => layer.weight_backward_s,
        };
        time / self.profile.ranks[self.rank_of[cell.layer]].speed
    }

    /// Returns the time of the message with the output of a layer, or its gradient.
    fn message(&self, layer: usize) -> f64 {
        let LinkProfile { latency_s, bytes_per_s, .. } = self.profile.link;
        let bytes = self.profile.layers[layer].output_bytes as f64;
        if self.rank_of[layer] == self.rank_of[layer + 1] { 0.0 } else { latency_s + bytes / bytes_per_s }
    }

    /// Returns the time of the optimizer, which begins when all ranks have finished.
    fn optimizer(&self) -> f64 {
        let own = |rank: usize| -> f64 {
            let layers = self.profile.layers.iter().zip(&self.rank_of).filter(|&(_, &of)| of == rank);
            layers.map(|(layer, _)| layer.optimizer_s).sum::<f64>() / self.profile.ranks[rank].speed
        };
        (0..self.profile.ranks.len()).map(own).fold(0.0, f64::max)
    }

    fn cells(&self) -> Vec<Cell> {
        let layers = 0..self.rank_of.len();
        let kinds = [Kind::Forward, Kind::Input, Kind::Weight];
        let of_layer = |layer| {
            let microbatches = 0..self.microbatches;
            microbatches.flat_map(move |microbatch| kinds.map(move |kind| Cell { kind, layer, microbatch }))
        };
        layers.flat_map(of_layer).collect()
    }

    /// Returns the computation that comes directly before another one, and the time of the message in between.
    fn before(&self, cell: Cell) -> Option<(Cell, f64)> {
        let Cell { kind, layer, .. } = cell;
        match kind {
            Kind::Forward if layer == 0 => None,
            Kind::Forward => Some((Cell { layer: layer - 1, ..cell }, self.message(layer - 1))),
            Kind::Input if layer + 1 == self.rank_of.len() => {
                Some((Cell { kind: Kind::Forward, ..cell }, 0.0))
            }
            Kind::Input => Some((Cell { layer: layer + 1, ..cell }, self.message(layer))),
            Kind::Weight => Some((Cell { kind: Kind::Input, ..cell }, 0.0)),
        }
    }
}

/// The search for the fastest order: each order in which no computation could be earlier without another one being
/// later (Giffler and Thompson, "Algorithms for solving production-scheduling problems", 1960).
struct Orders<'a> {
    task: &'a Task<'a>,
    cells: Vec<Cell>,
    /// The cell that comes directly before each one, with the time of the message.
    before: Vec<Option<(usize, f64)>>,
    takes: Vec<f64>,
    /// The time from the start of each cell to the end of the last cell that depends on it.
    tails: Vec<f64>,
    ends: Vec<Option<f64>>,
    free: Vec<f64>,
    /// The work of each rank that has not run.
    left: Vec<f64>,
    best: f64,
}

impl<'a> Orders<'a> {
    fn of(task: &'a Task<'a>, best: f64) -> Self {
        let cells = task.cells();
        let index = |of: Cell| {
            let is_cell =
                |cell: &Cell| (cell.kind, cell.layer, cell.microbatch) == (of.kind, of.layer, of.microbatch);
            cells.iter().position(is_cell).expect("a cell")
        };
        let before: Vec<Option<(usize, f64)>> = cells
            .iter()
            .map(|&cell| task.before(cell).map(|(other, message)| (index(other), message)))
            .collect();
        let takes: Vec<f64> = cells.iter().map(|&cell| task.takes(cell)).collect();
        let mut tails = takes.clone();
        // Paths have at most two computations for each layer, and one weight gradient.
        for _ in 0..2 * task.rank_of.len() + 1 {
            for (cell, before) in before.iter().enumerate() {
                if let &Some((other, message)) = before {
                    tails[other] = tails[other].max(takes[other] + message + tails[cell]);
                }
            }
        }
        let ranks = task.profile.ranks.len();
        let mut left = vec![0.0; ranks];
        for (cell, takes) in cells.iter().zip(&takes) {
            left[task.rank_of[cell.layer]] += takes;
        }
        let ends = vec![None; cells.len()];
        Self { task, cells, before, takes, tails, ends, free: vec![0.0; ranks], left, best }
    }

    fn rank(&self, cell: usize) -> usize {
        self.task.rank_of[self.cells[cell].layer]
    }

    /// Returns the earliest start of a cell; `None` if it has run, or not all that it needs has.
    fn start(&self, cell: usize) -> Option<f64> {
        if self.ends[cell].is_some() {
            return None;
        }
        let ready = match self.before[cell] {
            None => 0.0,
            Some((other, message)) => self.ends[other]? + message,
        };
        Some(ready.max(self.free[self.rank(cell)]))
    }

    fn search(&mut self) {
        let starts: Vec<Option<f64>> = (0..self.cells.len()).map(|cell| self.start(cell)).collect();
        let ready = || starts.iter().enumerate().filter_map(|(cell, &start)| Some((cell, start?)));
        let ends = ready().map(|(cell, start)| (start + self.takes[cell], cell));
        let Some((end, first)) = ends.min_by(|one, other| one.0.total_cmp(&other.0)) else {
            self.best = self.best.min(self.free.iter().copied().fold(0.0, f64::max));
            return;
        };
        let is_slow = |limit: f64| limit >= self.best * (1.0 - 1e-12);
        if self.free.iter().zip(&self.left).any(|(free, left)| is_slow(free + left))
            || ready().any(|(cell, start)| is_slow(start + self.tails[cell]))
        {
            return;
        }
        let rank = self.rank(first);
        let choices: Vec<(usize, f64)> =
            ready().filter(|&(cell, start)| self.rank(cell) == rank && start < end).collect();
        for &(cell, start) in &choices {
            // Microbatches are alike.
            let Cell { kind, layer, microbatch } = self.cells[cell];
            let comes_later = |&(other, _): &(usize, f64)| {
                let other = self.cells[other];
                (other.kind, other.layer) == (kind, layer) && other.microbatch < microbatch
            };
            if layer == 0 && kind == Kind::Forward && choices.iter().any(comes_later) {
                continue;
            }
            let free = self.free[rank];
            self.free[rank] = start + self.takes[cell];
            self.ends[cell] = Some(self.free[rank]);
            self.left[rank] -= self.takes[cell];
            self.search();
            self.left[rank] += self.takes[cell];
            self.ends[cell] = None;
            self.free[rank] = free;
        }
    }
}

/// Returns the shortest step over all assignments and orders.
fn optimum(profile: &Profile, microbatches: u32) -> f64 {
    let (ranks, layers) = (profile.ranks.len(), profile.layers.len());
    let mut best = f64::INFINITY;
    for code in 0..ranks.pow(layers as u32) {
        let rank_of = (0..layers).map(|layer| code / ranks.pow(layer as u32) % ranks).collect();
        let task = Task { profile, rank_of, microbatches: microbatches as usize };
        let optimizer = task.optimizer();
        let mut orders = Orders::of(&task, best - optimizer);
        orders.search();
        best = best.min(orders.best + optimizer);
    }
    best
}

fn cluster(seed: u64, ranks: u32, layers: usize) -> Profile {
    let mut numbers = Numbers(seed);
    let layer = |numbers: &mut Numbers| LayerProfile {
        forward_s: 1e-3 * (0.3 + numbers.share()),
        input_backward_s: 1e-3 * (0.3 + numbers.share()),
        weight_backward_s: 1e-3 * (0.3 + numbers.share()),
        ..block("layer", 0.5 + numbers.share())
    };
    let layers = (0..layers).map(|_| layer(&mut numbers)).collect();
    let rank = |_| RankProfile { speed: 0.25 * 4f64.powf(numbers.share()), ..RankProfile::default() };
    let ranks = (0..ranks).map(rank).collect();
    Profile { link: LinkProfile::new(2e-5, 1e10), layers, ranks, ..Profile::default() }
}

/// Checks bounds and plans of clusters of one size. Returns the largest quotients of a plan and the optimum, and of the
/// optimum and the bound.
fn check(seeds: std::ops::Range<u64>, ranks: u32, layers: usize, microbatches: u32) -> [f64; 2] {
    let mut most = [1.0f64; 2];
    for seed in seeds {
        let profile = cluster(seed, ranks, layers);
        let optimum = optimum(&profile, microbatches);
        let request = PlanRequest {
            ranks,
            microbatches,
            larger_microbatches: false,
            effort: PlanRequest::EFFORT / 50,
            ..PlanRequest::default()
        };
        let report = plan(&profile, &request, &mut || true).expect("a plan");
        let (bound, step) = (report.lower_bound_s, report.plans[0].step_s);
        let what = format!("seed {seed}, {ranks} ranks, {layers} layers, {microbatches} microbatches");
        assert!(bound <= optimum * (1.0 + 1e-9), "{what}: the bound {bound} above {optimum}");
        assert!(step >= optimum * (1.0 - 1e-9), "{what}: the plan {step} below {optimum}");
        most = [most[0].max(step / optimum), most[1].max(optimum / bound)];
    }
    most
}

#[test]
fn no_bound_is_above_the_fastest_possible_step() {
    for (ranks, layers, microbatches) in [(2, 3, 1), (2, 3, 2), (3, 3, 2), (2, 4, 2), (3, 4, 1)] {
        let [plan, bound] = check(0..8, ranks, layers, microbatches);
        let what = format!("{ranks} ranks, {layers} layers, {microbatches} microbatches");
        assert!(plan <= 1.02, "{what}: a plan takes {plan} times the optimum");
        assert!(bound <= 1.48, "{what}: the optimum is {bound} times the bound");
    }
}
