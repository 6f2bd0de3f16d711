//! Justifies an order: moves all computations as late as possible, and then as early as possible
//! (forward-backward improvement).
//!
//! The late pass visits the computations in decreasing order of their ends. It moves each one to the latest
//! free time of its rank from which its output still arrives in time. The earlier a computation then starts,
//! the more urgent it is. The early pass visits them in the order of these starts, and moves each one to the
//! earliest free time after its inputs arrive. If messages do not wait for each other on a link, no forward
//! is computed again, and no gradients are summed over replicas, neither pass makes the step longer. Together
//! they often make it shorter (Li and Willis, "An iterative scheduling technique for resource-constrained
//! project scheduling", 1992; Valls, Ballestín and Quintanilla, "Justification and RCPSP: a technique that
//! pays", 2005).
//!
//! The passes ignore queues on links, memory limits and sums over replicas, and a second forward counts as
//! part of its backward. So the caller evaluates the result. Computations that frozen stages drop have no
//! part in the passes, and follow at the end of the rows.
//!
//! **Time.** A sort of all computations, and for each of them a search of the gaps of its rank.

use std::cmp::Ordering;

use crate::plan::evaluate::{Ended, ranks_of_stages};
use crate::plan::links::Links;
use crate::plan::network::Network;
use crate::plan::order::{Cell, Kind, Order};
use crate::plan::stage_load::StageLoad;
use crate::plan::tuning::ROUNDING;
use crate::trained::StageBackward;

/// Returns the order after both passes. `ended` has the ends of the computations of `order`.
pub(super) fn justified(
    order: &Order,
    ended: &[Vec<Ended>],
    loads: &[StageLoad],
    network: &Network,
) -> Order {
    let passes = Passes {
        stages: stages(order, loads, network),
        ranks: order.rows.len(),
        microbatches: order.microbatches as usize,
    };
    let mut items: Vec<Item> = Vec::with_capacity(order.computations());
    for (row, ended) in order.rows.iter().zip(ended) {
        // In reverse, because the sort is faster if the rows are already in the order of the late pass.
        let kept = row.iter().zip(ended).rev().filter(|(cell, _)| !cell.is_dropped(loads));
        items.extend(kept.map(|(&cell, ended)| passes.item(cell, -ended.at, Pass::Late)));
    }
    items.sort_by(compare);
    let before_end = passes.starts(&items, Pass::Late);
    for item in &mut items {
        *item = passes.item(item.cell, -before_end[passes.index_of(item.cell)], Pass::Early);
    }
    items.sort_unstable_by(compare);
    let starts = passes.starts(&items, Pass::Early);
    let mut rows: Vec<Vec<Item>> = order.rows.iter().map(|row| Vec::with_capacity(row.len())).collect();
    for item in items {
        let start = starts[passes.index_of(item.cell)];
        rows[passes.stages[item.cell.stage as usize].rank as usize].push(Item { key: start, ..item });
    }
    let cells = |mut row: Vec<Item>| {
        row.sort_by(compare);
        row.into_iter().map(|item| item.cell).collect()
    };
    let rows = rows.into_iter().map(cells).collect();
    Order::completed(order.placement.clone(), order.microbatches, rows, loads)
}

#[derive(Debug, Clone, Copy)]
enum Pass {
    /// From the end of the step. Times count back from it.
    Late,
    Early,
}

/// A computation, with what a pass orders it by.
#[derive(Debug, Clone, Copy)]
struct Item {
    /// The time by which it is ordered; negative in a late pass.
    key: f64,
    /// Its time without a second forward.
    takes: f64,
    /// The order of computations with the same times: in an early pass, a computation comes after all
    /// computations that it needs, and in a late one before them.
    tie: i64,
    cell: Cell,
}

/// Orders the computations of a pass. If two have the same key, the shorter one comes first: one that takes
/// no time finds its place before the other one takes it. This keeps the order of two computations that
/// depend on each other, because the first one of them in the pass then takes no time. Second forwards do not
/// count in it: in the given order, a backward right after its forward has no second forward.
fn compare(one: &Item, other: &Item) -> Ordering {
    let by_time = one.key.total_cmp(&other.key).then(one.takes.total_cmp(&other.takes));
    by_time.then(one.tie.cmp(&other.tie))
}

/// A stage, as the passes see it.
#[derive(Debug, Clone, Copy)]
struct Stage {
    rank: u32,
    /// The gradients that its backward computes.
    computes: StageBackward,
    /// The times of its computations, by kind, without second forwards.
    takes: [f64; 4],
    /// The time of a second forward.
    again: f64,
    /// The times of the messages with its output and with the gradient of its input.
    messages: [f64; 2],
}

fn stages(order: &Order, loads: &[StageLoad], network: &Network) -> Vec<Stage> {
    let rank_of = ranks_of_stages(order);
    let mut links = Links::default();
    links.set(&rank_of, network);
    links.set_sizes(loads);
    let stage_of = |(stage, (load, &rank)): (usize, (&StageLoad, &u32))| {
        let takes = [load.forward_takes(), load.input_takes(), load.weight_apart(), load.backward_takes()];
        let messages = [0, 1].map(|direction| links.route(stage, direction).send(&mut 0.0, 0.0));
        Stage { rank, computes: load.computes, takes, again: load.again_takes(), messages }
    };
    loads.iter().zip(&rank_of).enumerate().map(stage_of).collect()
}

/// The data that both passes share.
struct Passes {
    stages: Vec<Stage>,
    ranks: usize,
    microbatches: usize,
}

impl Passes {
    fn item(&self, cell: Cell, key: f64, pass: Pass) -> Item {
        let stages = self.stages.len() as i64;
        let stage = i64::from(cell.stage);
        let level = match cell.kind {
            Kind::Forward => stage,
            Kind::Input | Kind::Backward => 2 * stages - 1 - stage,
            Kind::Weight => 2 * stages + stage,
        };
        let tie = level * self.microbatches as i64 + i64::from(cell.microbatch);
        let tie = if matches!(pass, Pass::Late) { -tie } else { tie };
        Item { key, takes: self.stages[cell.stage as usize].takes[cell.kind as usize], tie, cell }
    }

    /// Returns the index of a computation in tables of all computations: `F`, `I` or `B`, and `W`.
    fn index_of(&self, cell: Cell) -> usize {
        let kind = if cell.kind == Kind::Backward { Kind::Input } else { cell.kind };
        self.computations_of_kind() * kind as usize
            + self.microbatches * cell.stage as usize
            + cell.microbatch as usize
    }

    fn computations_of_kind(&self) -> usize {
        self.stages.len() * self.microbatches
    }

    /// Places all computations in the order of `items`. Returns the start of each one; for a late pass, the
    /// time from its start to the end of the step.
    fn starts(&self, items: &[Item], pass: Pass) -> Vec<f64> {
        let mut starts = vec![0.0; 3 * self.computations_of_kind()];
        let mut ends = starts.clone();
        let mut free = vec![Free { gaps: Vec::new(), end: 0.0, shortest: f64::INFINITY }; self.ranks];
        for stage in &self.stages {
            let shortest = &mut free[stage.rank as usize].shortest;
            let takes = Kind::ALL.into_iter().zip(stage.takes);
            let takes = takes.filter(|(kind, _)| !kind.is_dropped(stage.computes));
            *shortest = takes.map(|(_, takes)| takes).fold(*shortest, f64::min);
        }
        for &Item { cell, takes, .. } in items {
            let (stage, index) = (&self.stages[cell.stage as usize], self.index_of(cell));
            let others = self.others(cell, pass).into_iter().flatten();
            let since = others.map(|(other, message)| ends[other] + message).fold(0.0, f64::max);
            let is_backward = matches!(cell.kind, Kind::Input | Kind::Backward);
            let takes = if is_backward { takes + stage.again } else { takes };
            starts[index] = free[stage.rank as usize].take(since, takes);
            ends[index] = starts[index] + takes;
        }
        match pass {
            Pass::Early => starts,
            Pass::Late => ends,
        }
    }

    /// Returns the indices of the computations that come before `cell` in a pass, with the times of the
    /// messages between: in an early pass the ones that `cell` needs, in a late pass the ones that need
    /// `cell`.
    fn others(&self, cell: Cell, pass: Pass) -> [Option<(usize, f64)>; 2] {
        let (width, kinds) = (self.microbatches, self.computations_of_kind());
        let (stage, index) = (cell.stage as usize, self.index_of(cell));
        let (has_before, has_after) = (stage > 0, stage + 1 < self.stages.len());
        let computes = self.stages[stage].computes;
        let runs_backward = |stage: usize| self.stages[stage].computes != StageBackward::None;
        let output = |stage: usize| self.stages[stage].messages[0];
        let gradient = |stage: usize| self.stages[stage].messages[1];
        match (cell.kind, pass) {
            (Kind::Forward, Pass::Early) => [has_before.then(|| (index - width, output(stage - 1))), None],
            (Kind::Forward, Pass::Late) => {
                let backward = runs_backward(stage).then_some((index + kinds, 0.0));
                [has_after.then(|| (index + width, output(stage))), backward]
            }
            (Kind::Input | Kind::Backward, Pass::Early) => {
                [has_after.then(|| (index + width, gradient(stage + 1))), Some((index - kinds, 0.0))]
            }
            (Kind::Input | Kind::Backward, Pass::Late) => {
                let has_weight = cell.kind == Kind::Input && computes == StageBackward::Whole;
                let is_sent = has_before && runs_backward(stage - 1);
                let sent = is_sent.then(|| (index - width, gradient(stage)));
                [sent, has_weight.then_some((index + kinds, 0.0))]
            }
            (Kind::Weight, Pass::Early) => [Some((index - kinds, 0.0)), None],
            (Kind::Weight, Pass::Late) => [None, None],
        }
    }
}

/// The free times of a rank.
#[derive(Debug, Clone)]
struct Free {
    /// The gaps between computations, in order.
    gaps: Vec<(f64, f64)>,
    /// The end of the last computation.
    end: f64,
    /// The time of the shortest computation. Shorter gaps are not kept.
    shortest: f64,
}

impl Free {
    /// Reserves `takes` in the first gap at or after `since` that is long enough, or after all computations.
    /// Returns the start.
    fn take(&mut self, since: f64, takes: f64) -> f64 {
        let needed = takes * (1.0 - ROUNDING);
        let first = self.gaps.partition_point(|gap| gap.1 < since + needed);
        let fits = |&at: &usize| self.gaps[at].0.max(since) + needed <= self.gaps[at].1;
        let Some(at) = (first..self.gaps.len()).find(fits) else {
            let start = self.end.max(since);
            if self.is_useful(self.end, start) {
                self.gaps.push((self.end, start));
            }
            self.end = start + takes;
            return start;
        };
        let (low, high) = self.gaps[at];
        let start = low.max(since);
        let after = (start + takes, high);
        match (self.is_useful(low, start), self.is_useful(after.0, after.1)) {
            (false, false) => {
                self.gaps.remove(at);
            }
            (true, false) => self.gaps[at] = (low, start),
            (false, true) => self.gaps[at] = after,
            (true, true) => {
                self.gaps[at] = after;
                self.gaps.insert(at, (low, start));
            }
        }
        start
    }

    fn is_useful(&self, low: f64, high: f64) -> bool {
        high > low && high - low >= self.shortest * (1.0 - ROUNDING)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::csv::parse_schedule;
    use crate::ids::Rank;
    use crate::placement::Placement;
    use crate::plan::balance::even;
    use crate::plan::bound::equal_layers;
    use crate::plan::evaluate::Evaluator;
    use crate::plan::greedy::{Rules, Task, greedy};
    use crate::plan::numbers::Numbers;
    use crate::plan::placed_cut::{PlacedCut, Swaps};
    use crate::plan::stage_load::stage_loads;
    use crate::plan::tests::model;
    use crate::recompute::StageRecompute;

    /// Checks the justified form of an order with one stage per rank and computations that take 1.
    fn check(text: &str, expected: &str) {
        let order = Order::of(&parse_schedule(text).expect("a schedule"));
        let stages = order.rows.len();
        let layers = equal_layers(stages, stages as u32);
        let loads = stage_loads(&layers, &order.placement, &even(stages, stages), &vec![None; stages]);
        let mut evaluator = Evaluator::default();
        evaluator.time(&order, &loads, &layers.network).expect("a possible order");
        let found = justified(&order, evaluator.ended(), &loads, &layers.network);
        assert_eq!(found.rows, Order::of(&parse_schedule(expected).expect("a schedule")).rows);
    }

    #[test]
    fn urgent_computations_come_first() {
        // The last stage delays the second gradient by a weight gradient that nothing needs.
        check(
            "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n",
            "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n",
        );
        // Nothing is faster than this.
        let fastest = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n";
        check(fastest, fastest);
    }

    /// The first forward of a last stage that recomputes ends with its own backward, which takes no time.
    #[test]
    fn a_backward_right_after_its_forward_follows_it() -> Result<(), TestCaseError> {
        check_random(177_527, 4, 3, 4)?;
        check_random(698_163, 3, 3, 6)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        #[test]
        fn justified_orders_are_possible(
            seed in 0u64..1 << 20,
            ranks in 1u32..5,
            chunks in 1u32..4,
            microbatches in 1u32..9,
        ) {
            check_random(seed, ranks, chunks, microbatches)?;
        }
    }

    /// Checks a random order by rules. The ranks compute the same as before, and do not wait for each other.
    /// Without queues on links and without second forwards, the step is not longer.
    fn check_random(seed: u64, ranks: u32, chunks: u32, microbatches: u32) -> Result<(), TestCaseError> {
        let stages = (ranks * chunks) as usize;
        let layers = model(seed, 2 * stages, ranks, 1);
        let (network, sharding) = (&layers.network, layers.sharding);
        let mut numbers = Numbers(seed);
        let rank_of = (0..stages as u32).map(|stage| stage % ranks).collect();
        let mut layout = PlacedCut { starts: even(2 * stages, stages), rank_of };
        for _ in 0..8 {
            layout.shake(ranks as usize, Swaps::Rounds, &mut numbers);
        }
        let placement = Placement::explicit(layout.rank_of.into_iter().map(Rank::new).collect());
        let placement = placement.expect("the first round visits every rank");
        let is_free = seed.is_multiple_of(2);
        let recompute: Vec<Option<StageRecompute>> = (0..stages)
            .map(|_| (!is_free && numbers.below(3) == 0).then_some(StageRecompute::WHOLE))
            .collect();
        let mut loads = stage_loads(&layers, &placement, &layout.starts, &recompute);
        for load in loads.iter_mut().filter(|_| is_free) {
            load.output = 0;
        }
        let task =
            Task { placement: &placement, microbatches, loads: &loads, network, sharding, memory: None };
        let rules = Rules::all(ranks, stages as u32);
        let rules = rules[numbers.below(rules.len())];
        let (order, _) = greedy(&task, rules, f64::INFINITY, &mut 0).expect("an order");
        let mut evaluator = Evaluator::default();
        let before = evaluator.time(&order, &loads, network).expect("a possible order");
        let found = justified(&order, evaluator.ended(), &loads, network);
        for (row, other) in order.rows.iter().zip(&found.rows) {
            // Equal computations of a stage keep their order.
            prop_assert_eq!(by_role(row), by_role(other));
        }
        let time = evaluator.time(&found, &loads, network);
        prop_assert!(time.is_some(), "ranks wait for each other");
        prop_assert!(!is_free || time <= Some(before * (1.0 + 1e-9)), "{:?} after {}", time, before);
        Ok(())
    }

    fn by_role(row: &[Cell]) -> Vec<Cell> {
        let mut row = row.to_vec();
        row.sort_by_key(|cell| (cell.kind as u32, cell.stage));
        row
    }
}
