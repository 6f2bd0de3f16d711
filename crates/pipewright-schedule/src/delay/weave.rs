//! Finds the repeating row of each rank: a simulation of several batches in which a rank never waits while it may compute the
//! next batch, and batches that are merged.
//!
//! Rules: (1) a rank computes each batch in the order of its schedule; (2) when it is free, it takes the next
//! computation of its older batch if that is ready and not a `W`, else the one of the next batch, else a `W` of the
//! older one: a `W` can wait, and a forward of the next batch keeps other ranks busy; (3) a forward of the next batch
//! waits while the rank keeps as many activations as at the peak of the schedule alone, unless its stage runs forward only and
//! keeps none, and the last computation of the next batch waits for the end of the older one; (4) a batch waits
//! for the update that it needs ([`crate::delay`]); (5) costs are whole ticks, so equal times are equal.
//!
//! There are three kinds of candidates. Woven rows are a late repetition of such a simulation. Variants of rule 2 always
//! take the next batch first, or the computation that is due first (`due.rs`). For merged rows, each computation of one batch
//! starts as early as its rank is free in a given
//! period, apart from the computations of other batches one period before and after. Streams (`stream.rs`) do not follow rule 1:
//! they repeat the computations of one microbatch, and keep few activations. Some wait if messages are late or costs are not
//! equal, so those are the last resort. All candidates are run as they
//! repeat. A candidate counts if every rank keeps at most as many activations as rule 3 allows, and if it ends for as many
//! batches as prove that any number ends. The one with the shortest period wins.
//!
//! If ranks still wait, the limit of rule 3 is raised by 1, 2, 4 and so on activations up to twice the largest peak; orders by
//! due times are tried at the larger limits only. Some
//! pipelines are never full: two periods hold at least a whole batch, because of rule 4.

use std::num::NonZeroU32;

use super::delayed_action::{DelayError, DelayedAction};
use super::due::{RULES, due};
use super::stream::{SLACKS, is_uniform, streamed};
use super::weaver::{Due, Order, Rules, Weaver, in_order, merged};
use crate::costs::Costs;
use crate::schedule::Schedule;

/// In which order a rank computes a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchOrder {
    /// In the order of its schedule.
    Kept,
    /// In any order that has each microbatch's computations on a stage after the ones of the microbatch before.
    Free,
}

/// The number of batches that are simulated.
const BATCHES: usize = 12;

/// A pipeline is full if its period is longer than the work of its slowest rank by at most this part of it.
const FULL: u64 = 200;

/// Streams that late messages slow are taken only if the period of other rows is longer than the work by more than this part, or if
/// these keep a quarter more activations than the schedule.
const NEARLY_FULL: u64 = 40;

/// By how many percent of the work the periods are longer in which rows are merged.
const PERCENT: [u64; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32];

/// After so many simulated computations, nothing else is tried. The rows depend on this number, but never on a clock.
const MOST_SIMULATED: u64 = 50_000_000;

/// Returns the repeating row of each rank. As many batches as `enough` prove any number of them.
pub(super) fn weave(
    schedule: &Schedule,
    costs: &Costs,
    enough: NonZeroU32,
    order: BatchOrder,
) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
    let alone = Weaver::over(schedule, costs, 1).run()?;
    let work = alone.ranks.iter().map(|state| alone.work(state)).max().unwrap_or(0);
    let peaks: Vec<u32> = alone.ranks.iter().map(|state| state.peak).collect();
    let most = peaks.iter().copied().max().unwrap_or(0);
    let end = alone.ranks.iter().map(|state| state.free_at).max().unwrap_or(0);
    // One batch after another is sound and needs no more activations than the schedule.
    let mut best = Rows { period: end, peaks: peaks.clone(), cells: merged(&alone.timed_rows(), end) };
    let mut search = Search { schedule, costs, computations: alone.sequence.len() as u64, simulated: 0 };
    let mut placed: Option<Vec<Rows>> = None;
    let mut last_resort = Vec::new();
    let dues: Vec<Due> = RULES.iter().map(|rule| due(rule, &alone, work)).collect();
    let powers = (0..u32::BITS).map(|power| 1 << power).take_while(|more| *more < most);
    for more in std::iter::once(0).chain(powers).chain([most]) {
        let caps: Vec<u32> = peaks.iter().map(|peak| peak + more).collect();
        let mut candidates = Vec::new();
        for order in [Order::OlderFirst, Order::NextFirst] {
            let rows = search.woven(&caps, order)?;
            candidates.extend(search.repeated(rows, 0));
        }
        if candidates.iter().all(|rows| !rows.is_full(work)) {
            let placed = placed.get_or_insert_with(|| {
                let mut placed = search.merged(&alone, work);
                let (early, late) = search.streams(&alone, work, order);
                placed.extend(early);
                last_resort = late;
                placed
            });
            candidates.extend(placed.iter().cloned());
            let fills = |rows: &Rows| rows.is_full(work) && rows.fit(&caps);
            let is_tried = more == 0 || more >= most / 8;
            for times in dues.iter().filter(|_| is_tried) {
                if candidates.iter().any(fills) || search.is_over() {
                    break;
                }
                let rows = search.woven(&caps, Order::Due(times))?;
                candidates.extend(search.repeated(begun_later(rows), 0));
            }
        }
        candidates.retain(|rows| rows.fit(&caps) && rows.period < best.period);
        // The first of several with one period comes first. At the limit, one more is proved, here and as the last resort.
        candidates.sort_by_key(|rows| rows.period);
        for rows in candidates {
            if search.is_sound(&rows, enough) {
                best = rows;
                break;
            }
            if search.is_over() {
                break;
            }
        }
        if best.is_full(work) || search.is_over() {
            break;
        }
    }
    let keeps_much = best.most_kept() > most + most / 4;
    if best.period > work + work / NEARLY_FULL || keeps_much {
        let caps: Vec<u32> = peaks.iter().map(|peak| peak + most).collect();
        let is_better = |rows: &Rows| (rows.period, rows.most_kept()) < (best.period, best.most_kept());
        last_resort.retain(|rows| is_better(rows) && rows.fit(&caps));
        last_resort.sort_by_key(|rows| (rows.period.max(work + work / FULL), rows.most_kept() > most));
        for rows in last_resort {
            if search.is_sound(&rows, enough) {
                best = rows;
                break;
            }
            if search.is_over() {
                break;
            }
        }
    }
    Ok(best.cells)
}

/// Runs candidates, and counts what it simulates.
struct Search<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// The number of computations of a batch.
    computations: u64,
    /// The number of computations that have been simulated.
    simulated: u64,
}

impl<'a> Search<'a> {
    fn is_over(&self) -> bool {
        self.simulated > MOST_SIMULATED
    }

    fn run<'b>(&mut self, rules: Rules<'b>, batches: usize, late: u64) -> Result<Weaver<'b>, DelayError>
    where
        'a: 'b,
    {
        self.simulated += self.computations * batches as u64;
        Weaver::over(self.schedule, self.costs, batches).by(rules).late_by(late).run()
    }

    /// Returns the woven rows of ranks that keep at most so many activations.
    fn woven(&mut self, caps: &[u32], order: Order<'_>) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
        Ok(self.run(Rules::Free { caps, order }, BATCHES, 0)?.closed_rows())
    }

    /// Runs merged rows.
    fn merged(&mut self, alone: &Weaver<'_>, work: u64) -> Vec<Rows> {
        let mut found = Vec::new();
        for period in periods(work) {
            if self.is_over() {
                break;
            }
            found.extend(alone.merged_within(period).and_then(|cells| self.repeated(cells, 0)));
        }
        found
    }

    /// Runs streams. Returns the streams that are full although messages are late, and the others.
    fn streams(&mut self, alone: &Weaver<'_>, work: u64, order: BatchOrder) -> (Vec<Rows>, Vec<Rows>) {
        // A stream adds gradients in the order of microbatches. In another order, sums would have other bits.
        let slacks = if self.schedule.adds_in_order() && is_uniform(alone) { &SLACKS[..] } else { &[] };
        let (mut streams, late) = (Vec::new(), alone.mean_duration() / 4);
        for &slack in slacks {
            if self.is_over() {
                break;
            }
            let streamed = periods(work).into_iter().find_map(|period| streamed(alone, period, slack));
            let is_in_order = |cells: &Vec<Vec<DelayedAction>>| {
                cells.iter().zip(&alone.rows).all(|(row, own)| in_order(row).eq(own.iter().copied()))
            };
            let allowed = streamed.filter(|cells| order == BatchOrder::Free || is_in_order(cells));
            let rows = allowed.and_then(|cells| self.repeated(cells, 0));
            streams.extend(rows.and_then(|rows| Some((self.repeated(rows.cells.clone(), late)?, rows))));
        }
        // If several are equally fast, the one that late messages slow the least comes first.
        streams.sort_by_key(|(late, _)| late.period);
        // Rows in this order were chosen before, if the order is kept.
        let is_early = |late: &Rows| order == BatchOrder::Kept || late.is_full(work);
        let (early, others): (Vec<_>, Vec<_>) = streams.into_iter().partition(|(late, _)| is_early(late));
        let rows = |streams: Vec<(Rows, Rows)>| streams.into_iter().map(|(_, rows)| rows).collect();
        (rows(early), rows(others))
    }

    /// Runs rows as they repeat, with messages that are late; `None` if the ranks wait for each other.
    fn repeated(&mut self, cells: Vec<Vec<DelayedAction>>, late: u64) -> Option<Rows> {
        let run = self.run(Rules::Given(&cells), BATCHES, late).ok()?;
        let peaks = run.ranks.iter().map(|state| state.peak).collect();
        Some(Rows { period: run.period(), peaks, cells })
    }

    /// Returns whether any number of repetitions ends ([`crate::delay`]).
    fn is_sound(&mut self, rows: &Rows, enough: NonZeroU32) -> bool {
        let batches = enough.get() as usize;
        batches <= BATCHES || self.run(Rules::Given(&rows.cells), batches, 0).is_ok()
    }
}

/// Returns the periods in which rows are placed.
fn periods(work: u64) -> [u64; PERCENT.len()] {
    PERCENT.map(|percent| work + work * percent / 100)
}

/// Moves the first computation of the older batch to the front of each row. A rank whose row begins with the next batch would
/// need that batch when it ends the one before, whose update is not made by then.
fn begun_later(mut rows: Vec<Vec<DelayedAction>>) -> Vec<Vec<DelayedAction>> {
    for row in &mut rows {
        if let Some(first) = row.iter().position(|cell| !cell.is_next) {
            row[..=first].rotate_right(1);
        }
    }
    rows
}

/// Rows that repeat.
#[derive(Clone)]
struct Rows {
    /// The time from one batch to the next.
    period: u64,
    /// The most activations that each rank keeps.
    peaks: Vec<u32>,
    cells: Vec<Vec<DelayedAction>>,
}

impl Rows {
    /// Returns whether the period is hardly longer than `work`.
    fn is_full(&self, work: u64) -> bool {
        self.period <= work + work / FULL
    }

    /// Returns the most activations of a rank.
    fn most_kept(&self) -> u32 {
        self.peaks.iter().copied().max().unwrap_or(0)
    }

    /// Returns whether each rank keeps at most so many activations.
    fn fit(&self, caps: &[u32]) -> bool {
        self.peaks.iter().zip(caps).all(|(peak, cap)| peak <= cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{ScheduleSpec, generate};

    /// Merges batches of a schedule within a period, with actions that take a second each. Returns the period in which the
    /// rows run, in seconds, and the rows.
    fn merged(name: &str, ranks: u32, microbatches: u32, period: u64) -> Option<(f64, Vec<String>)> {
        let schedule = generate(name, &ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() });
        let (schedule, costs) = (schedule.expect("a schedule"), "F=1,I=1,W=1".parse().expect("costs"));
        let alone = Weaver::over(&schedule, &costs, 1).run().expect("no deadlock");
        let second = alone.duration(alone.rows[0][0]);
        let cells = alone.merged_within(period * second)?;
        let row =
            |row: &Vec<DelayedAction>| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let rows = cells.iter().map(row).collect();
        let computations = alone.sequence.len() as u64;
        let mut search = Search { schedule: &schedule, costs: &costs, computations, simulated: 0 };
        let run = search.repeated(cells, 0).expect("no deadlock");
        Some((run.period as f64 / second as f64, rows))
    }

    #[test]
    fn merged_batches_run_in_their_period() {
        // Alone, a batch of two microbatches on two ranks takes 9, and the work of each rank 6.
        let (period, rows) = merged("gpipe", 2, 2, 6).expect("rows");
        assert_eq!(period, 6.0);
        assert_eq!(rows, ["0F0' 0F1' 0B0 0B1", "1F0 1F1 1B0 1B1"]);
        assert_eq!(merged("gpipe", 2, 2, 5), None, "two periods hold a batch, but a rank has work of 6");
        // A batch takes 45.
        assert_eq!(merged("gpipe", 8, 8, 22), None);
        let (found, _) = merged("gpipe", 8, 8, 45).expect("rows");
        assert!(found <= 45.0, "{found}");
    }
}
