//! Finds the repeating row of each rank: a simulation of several batches in which a rank never waits while it may compute the
//! next batch, and batches that are merged.
//!
//! Rules: (1) a rank computes each batch in the order of its schedule; (2) when it is free, it takes the next
//! computation of its older batch if that is ready and not a `W`, else the one of the next batch, else a `W` of the
//! older one: a `W` can wait, and a forward of the next batch keeps other ranks busy; (3) a forward of the next batch
//! waits while the rank keeps as many activations as at the peak of the schedule alone, and the last computation of
//! the next batch waits for the end of the older one; (4) a batch waits
//! for the update that it needs ([`crate::delay`]); (5) costs are whole ticks, so equal times are equal.
//!
//! There are two kinds of candidates. Woven rows are a late repetition of such a simulation. Variants of rule 2 always
//! take the next batch first, or the computation that is due first (`due.rs`). For merged rows, each computation of one batch
//! starts as early as its rank is free in a given
//! period, apart from the computations of other batches one period before and after. All candidates are run as they
//! repeat. A candidate counts if every rank keeps at most as many activations as rule 3 allows, and if it ends for as many
//! batches as prove that any number ends. The one with the shortest period wins.
//!
//! If ranks still wait, the limit of rule 3 is raised by 1, 2, 4 and so on activations up to twice the largest peak; orders by
//! due times are tried at the larger limits only. Some
//! pipelines are never full: two periods hold at least a whole batch, because of rule 4. With whole backwards, GPipe needs
//! almost two periods for a batch if there are as many microbatches as ranks, so hardly any computation can be later than that.

use std::num::NonZeroU32;

use super::delayed_action::{DelayError, DelayedAction};
use super::due::{RULES, due};
use super::weaver::{Due, Order, Rules, Weaver};
use crate::costs::Costs;
use crate::schedule::Schedule;

/// The number of batches that are simulated.
const BATCHES: usize = 12;

/// A pipeline is full if its period is longer than the work of its slowest rank by at most this part of it.
const FULL: u64 = 200;

/// By how many percent of the work the periods are longer in which rows are merged.
const PERCENT: [u64; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 32];

/// After so many simulated computations, nothing else is tried. The rows depend on this number, but never on a clock.
const MOST_SIMULATED: u64 = 50_000_000;

/// Returns the repeating row of each rank. As many batches as `enough` prove any number of them.
pub(super) fn weave(
    schedule: &Schedule,
    costs: &Costs,
    enough: NonZeroU32,
) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
    let alone = Weaver::over(schedule, costs, 1).run()?;
    let work = alone.ranks.iter().map(|state| alone.work(state)).max().unwrap_or(0);
    let peaks: Vec<u32> = alone.ranks.iter().map(|state| state.peak).collect();
    let most = peaks.iter().copied().max().unwrap_or(0);
    let end = alone.ranks.iter().map(|state| state.free_at).max().unwrap_or(0);
    // One batch after another is sound and needs no more activations than the schedule.
    let mut best = Rows { period: end, peaks: peaks.clone(), cells: alone.merged(&alone.starts(), end) };
    let mut search = Search { schedule, costs, computations: alone.sequence.len() as u64, simulated: 0 };
    let mut merged: Option<Vec<Rows>> = None;
    let dues: Vec<Due> = RULES.iter().map(|rule| due(rule, &alone, work)).collect();
    let powers = (0..u32::BITS).map(|power| 1 << power).take_while(|more| *more < most);
    for more in std::iter::once(0).chain(powers).chain([most]) {
        let caps: Vec<u32> = peaks.iter().map(|peak| peak + more).collect();
        let mut candidates = Vec::new();
        for order in [Order::OlderFirst, Order::NextFirst] {
            let rows = search.woven(&caps, order)?;
            candidates.extend(search.repeated(rows));
        }
        if candidates.iter().all(|rows| !rows.is_full(work)) {
            let merge = |percent| search.repeated(alone.merged_within(work + work * percent / 100)?);
            let merged = merged.get_or_insert_with(|| PERCENT.into_iter().filter_map(merge).collect());
            candidates.extend(merged.iter().cloned());
            let fills = |rows: &Rows| rows.is_full(work) && rows.fit(&caps);
            let is_tried = more == 0 || more >= most / 8;
            for times in dues.iter().filter(|_| is_tried) {
                if candidates.iter().any(fills) || search.is_over() {
                    break;
                }
                let rows = search.woven(&caps, Order::Due(times))?;
                candidates.extend(search.repeated(begun_later(rows)));
            }
        }
        candidates.retain(|rows| rows.fit(&caps) && rows.period < best.period);
        // The first of several with one period comes first.
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

    fn run<'b>(&mut self, rules: Rules<'b>, batches: usize) -> Result<Weaver<'b>, DelayError>
    where
        'a: 'b,
    {
        self.simulated += self.computations * batches as u64;
        Weaver::over(self.schedule, self.costs, batches).by(rules).run()
    }

    /// Returns the woven rows of ranks that keep at most so many activations.
    fn woven(&mut self, caps: &[u32], order: Order<'_>) -> Result<Vec<Vec<DelayedAction>>, DelayError> {
        Ok(self.run(Rules::Free { caps, order }, BATCHES)?.closed_rows())
    }

    /// Runs rows as they repeat; `None` if the ranks wait for each other.
    fn repeated(&mut self, cells: Vec<Vec<DelayedAction>>) -> Option<Rows> {
        let run = self.run(Rules::Given(&cells), BATCHES).ok()?;
        let peaks = run.ranks.iter().map(|state| state.peak).collect();
        Some(Rows { period: run.period(), peaks, cells })
    }

    /// Returns whether any number of repetitions ends ([`crate::delay`]).
    fn is_sound(&mut self, rows: &Rows, enough: NonZeroU32) -> bool {
        let batches = enough.get() as usize;
        batches <= BATCHES || self.run(Rules::Given(&rows.cells), batches).is_ok()
    }
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
        let run = search.repeated(cells).expect("no deadlock");
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
