//! The annealing of searched orders.

use crate::plan::balance::{Layout, Numbers};
use crate::plan::evaluate::ranks_of_stages;
use crate::plan::greedy::Rules;
use crate::plan::pool::{Cut, GOOD_ENOUGH, choices, placement};
use crate::plan::report::SEARCHED;
use crate::plan::search::{Choice, Search};
use crate::plan::shape::Shape;

/// The most episodes of annealing.
const EPISODES: usize = 24;
/// The attempts of an episode for each stage.
const TRIES: usize = 20;
/// The share by which a plan may become slower at the beginning of an episode.
const WORSE: f64 = 0.01;

/// Anneals plans with searched orders: changes the layout, the recomputation and the rules at random, and keeps changes
/// that make the plan faster, or at first only a little slower. Episodes begin with the best plan and with the cuts
/// that have the lowest bounds in turn.
pub(super) fn anneal(
    search: &mut Search<'_>,
    shapes: &[Shape],
    at: usize,
    cuts: &[Cut],
    bound: f64,
    reserve: u64,
) {
    let shape = &shapes[at];
    let mut numbers = Numbers(2);
    for episode in 0..EPISODES {
        let best = search.best.get(SEARCHED).filter(|best| best.shape == at).cloned();
        let cut = &cuts[(episode / 2) % cuts.len()];
        let rules = best.as_ref().and_then(|best| best.rules);
        let rules = rules.unwrap_or_else(|| Rules::all(shape.ranks, 1)[0]);
        let start = match best {
            Some(best) if episode % 2 == 0 => State {
                layout: Layout { starts: best.starts.clone(), rank_of: ranks_of_stages(&best.order) },
                recompute: best.recompute.clone(),
                rules,
                time: best.time,
            },
            _ if cut.bound >= search.best_time() => continue,
            _ => {
                let recompute = choices(search, shape, cut).into_iter().nth(1);
                let recompute = recompute.unwrap_or_else(|| vec![false; cut.layout.rank_of.len()]);
                State { layout: cut.layout.clone(), recompute, rules, time: f64::INFINITY }
            }
        };
        if !run_episode(search, shapes, at, start, &mut numbers, bound, reserve) {
            return;
        }
    }
}

/// A plan during annealing.
#[derive(Clone)]
struct State {
    layout: Layout,
    recompute: Vec<bool>,
    rules: Rules,
    time: f64,
}

/// Runs one episode; returns whether another one may follow.
fn run_episode(
    search: &mut Search<'_>,
    shapes: &[Shape],
    at: usize,
    mut now: State,
    numbers: &mut Numbers,
    bound: f64,
    reserve: u64,
) -> bool {
    let shape = &shapes[at];
    let (step, ranks) = (shape.step(), shape.ranks as usize);
    let stages = now.recompute.len();
    let all = Rules::all(shape.ranks, stages as u32);
    let tries = TRIES * stages;
    for attempt in 0..tries {
        if search.best_time() <= bound * (1.0 + GOOD_ENOUGH) || !search.goes_on(reserve) {
            return false;
        }
        let left = (tries - attempt) as f64 / tries as f64;
        let before = now.time * (1.0 + WORSE * left * left);
        let mut next = now.clone();
        if attempt > 0 {
            if numbers.below(6) == 0 {
                next.rules = all[numbers.below(all.len())];
            }
            if search.request.memory.is_some() && numbers.below(4) == 0 {
                let stage = numbers.below(stages);
                next.recompute[stage] = !next.recompute[stage];
            }
            for _ in 0..=numbers.below(2) {
                next.layout.shake(ranks, true, numbers);
            }
        }
        if step.cut_time(&next.layout.rank_of, &next.layout.starts) >= before {
            continue;
        }
        let choice = Choice { shape: at, starts: &next.layout.starts, recompute: &next.recompute };
        if let Some(time) = search.search_order(shapes, &placement(&next.layout), choice, next.rules, before)
        {
            next.time = time;
            now = next;
        }
    }
    true
}
