//! The programs that the page can run at other costs: for each event, the times that its own times depend on.
//!
//! The page runs a longest-path pass over them (`view_page/dependencies.js`) and knows no rule of the
//! simulation. All lists are whole numbers. Schedules are periodic, and references are relative, so most of a
//! list repeats an earlier part of it ([`Packed`]).

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use serde::Serialize;

use crate::costs::StageSizes;
use crate::simulate::{
    CostOf, Dependencies, Dependent, MemoryChange, NeededMessage, Node, index, memory_changes,
};
use crate::slices::Slices;
use crate::timeline::Event;

/// A program in the page.
#[derive(Serialize)]
pub(super) struct ProgramData {
    pub(super) microbatches: u32,
    costs: Vec<CostData>,
    /// The nodes of each rank: a cost and the node that it follows, or the negative number of nodes whose latest
    /// time it is and these nodes.
    nodes: Vec<Packed>,
    /// The events of each rank: kind, stage, microbatch, start, end, the changes of memory at both, and the
    /// lists of needed messages and of operations in front.
    events: Vec<Packed>,
}

/// Numbers; some repeat earlier ones.
#[derive(Serialize)]
#[serde(transparent)]
struct Packed(Vec<Piece>);

#[derive(Serialize, Debug, PartialEq)]
#[serde(untagged)]
enum Piece {
    One(i64),
    /// The distance back to numbers that are repeated, and how many.
    Again(usize, usize),
}

/// Returns the data of a program. `sizes` give its memory.
pub(super) fn program_data(
    microbatches: u32,
    dependencies: &Dependencies,
    slices: Slices,
    sizes: &[StageSizes],
) -> ProgramData {
    let ranks = dependencies.events.len();
    let mut places = Vec::with_capacity(dependencies.nodes.len());
    let mut counts = vec![0; ranks];
    for (rank, node) in &dependencies.nodes {
        // The start of the simulation has no place.
        let count = &mut counts[rank.index()];
        places.push((*node != Node::Start).then(|| {
            *count += 1;
            (rank.index() as i64, *count - 1)
        }));
    }
    let numbers = Numbers { places, ranks: ranks as i64 };
    let (costs, nodes) = numbers.nodes(dependencies);
    ProgramData { microbatches, costs, nodes, events: numbers.events(dependencies, slices, sizes) }
}

/// The ranks of nodes, and their indices there.
struct Numbers {
    /// `None` for the start of the simulation.
    places: Vec<Option<(i64, i64)>>,
    ranks: i64,
}

/// Writes the references of a rank as numbers: the other rank relative to this one, and the distance from the
/// last reference to that rank in the same column. In a periodic schedule, both are periodic.
struct References<'a> {
    numbers: &'a Numbers,
    rank: i64,
    last: HashMap<(i64, i64), i64>,
}

impl References<'_> {
    fn node(&mut self, column: i64, node: NonZeroU32) -> i64 {
        let Some(place) = self.numbers.places[index(node)] else { return 0 };
        let number = self.place(column, place);
        if number >= 0 { number + 1 } else { number }
    }

    fn place(&mut self, column: i64, (other, index): (i64, i64)) -> i64 {
        let ranks = self.numbers.ranks;
        let last = self.last.entry((column, other)).or_insert(0);
        let number = (index - *last) * ranks + (other - self.rank).rem_euclid(ranks);
        *last = index;
        number
    }
}

impl Numbers {
    fn references(&self, rank: usize) -> References<'_> {
        References { numbers: self, rank: rank as i64, last: HashMap::new() }
    }

    fn nodes(&self, dependencies: &Dependencies) -> (Vec<CostData>, Vec<Packed>) {
        let (mut costs, mut numbers) = (Vec::new(), BTreeMap::new());
        let ranks = 0..dependencies.events.len();
        let mut lists: Vec<_> = ranks.map(|rank| (Vec::new(), self.references(rank))).collect();
        for (rank, node) in &dependencies.nodes {
            let (list, references) = &mut lists[rank.index()];
            match node {
                Node::Start => {}
                Node::After { node, cost, seconds } => {
                    let number = *numbers.entry((*cost, seconds.to_bits())).or_insert_with(|| {
                        costs.push(cost_data(*cost, *seconds));
                        costs.len() as i64 - 1
                    });
                    list.extend([number, references.node(0, *node)]);
                }
                Node::Latest(nodes) => {
                    list.push(-(nodes.len() as i64));
                    list.extend((1..).zip(nodes).map(|(column, &node)| references.node(column, node)));
                }
            }
        }
        (costs, lists.iter().map(|(list, _)| Packed::of(list)).collect())
    }

    fn events(&self, dependencies: &Dependencies, slices: Slices, sizes: &[StageSizes]) -> Vec<Packed> {
        let of_rank = |(rank, events): (usize, &Vec<Dependent>)| {
            let memory = memory(dependencies, rank, slices, sizes);
            let (mut list, mut microbatch) = (Vec::new(), 0);
            let mut references = self.references(rank);
            for (at, event) in events.iter().enumerate() {
                let action = event.event.action;
                let number = action.microbatch().map_or(-1, |number| i64::from(number.get()));
                let (kind, stage) = (action.kind() as i64, i64::from(action.stage().get()));
                list.extend([kind, stage, number - microbatch]);
                microbatch = number;
                let column = kind * COLUMNS;
                list.extend((column..).zip(event.nodes).map(|(column, node)| references.node(column, node)));
                list.extend(memory[at]);
                write_delays(&mut list, (at, column), event, &mut references);
            }
            Packed::of(&list)
        };
        dependencies.events.iter().enumerate().map(of_rank).collect()
    }
}

/// The columns of references of an event: its start, its end, makers, arrivals, and times at which operations
/// are given.
pub(super) const COLUMNS: i64 = 5;

/// Writes the messages that an event needs, and the operations in front of it in its queue.
fn write_delays(
    list: &mut Vec<i64>,
    (at, column): (usize, i64),
    event: &Dependent,
    references: &mut References<'_>,
) {
    list.push(event.messages.len() as i64);
    for NeededMessage { maker: (maker, made), tensor, arrival, ends } in &event.messages {
        list.push(*tensor as i64);
        list.push(references.place(column + 2, (maker.index() as i64, *made as i64)));
        list.push(references.node(column + 3, *arrival));
        // An end is not the computation itself, so no distance is 0.
        let (sent, received) = ends.unwrap_or((*made, at));
        list.extend([*made as i64 - sent as i64, at as i64 - received as i64]);
    }
    let Some((given, behind)) = &event.in_line else { return list.push(0) };
    list.push(behind.len() as i64);
    list.push(references.node(column + 4, *given));
    list.extend(behind.iter().map(|&other| at as i64 - other as i64));
}

/// A cost: seconds, the stage or -1, and the letter of the computation, `hop`, or nothing.
type CostData = (f64, i64, &'static str);

/// Returns the changes of memory at the start and at the end of each event of a rank.
fn memory(dependencies: &Dependencies, rank: usize, slices: Slices, sizes: &[StageSizes]) -> Vec<[i64; 2]> {
    let events = &dependencies.events[rank];
    let mut order: Vec<usize> = (0..events.len()).collect();
    order.sort_by(|&one, &other| events[one].event.start.total_cmp(&events[other].event.start));
    let sorted: Vec<Event> = order.iter().map(|&at| events[at].event).collect();
    let mut changes = vec![[0; 2]; order.len()];
    for MemoryChange { event, is_at_end, more, less } in memory_changes(&sorted, slices, sizes) {
        changes[order[event]][usize::from(is_at_end)] += more as i64 - less as i64;
    }
    changes
}

fn cost_data(cost: CostOf, seconds: f64) -> CostData {
    match cost {
        CostOf::Compute(stage, kind) => (seconds, i64::from(stage.get()), kind.name()),
        CostOf::Latency => (seconds, -1, "hop"),
        CostOf::Other => (seconds, -1, ""),
    }
}

impl Packed {
    /// Replaces numbers that repeat earlier ones, at least [`Packed::LEAST`] of them at a time.
    fn of(numbers: &[i64]) -> Self {
        let (mut pieces, mut at) = (Vec::new(), 0);
        // The last place of each hash of as many numbers, plus 1.
        let mut seen = vec![0; 1 << 14];
        while at < numbers.len() {
            let earlier = Self::hash(numbers, at).and_then(|hash| usize::checked_sub(seen[hash], 1));
            let repeats = earlier.map_or(0, |earlier| {
                let pairs = numbers[earlier..].iter().zip(&numbers[at..]);
                pairs.take_while(|(one, other)| one == other).count()
            });
            let length = match earlier.filter(|_| repeats >= Self::LEAST) {
                Some(earlier) => {
                    pieces.push(Piece::Again(at - earlier, repeats));
                    repeats
                }
                None => {
                    pieces.push(Piece::One(numbers[at]));
                    1
                }
            };
            for passed in at..at + length {
                if let Some(hash) = Self::hash(numbers, passed) {
                    seen[hash] = passed + 1;
                }
            }
            at += length;
        }
        Self(pieces)
    }

    /// The fewest numbers that are replaced.
    const LEAST: usize = 5;

    fn hash(numbers: &[i64], at: usize) -> Option<usize> {
        let mix = |hash: u64, number: &i64| {
            (hash ^ *number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
        };
        Some((numbers.get(at..at + Self::LEAST)?.iter().fold(0, mix) >> 50) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_numbers_are_replaced() {
        let numbers: Vec<i64> = (0..4).chain((0..100).map(|at| at % 7)).chain([9]).collect();
        let Packed(pieces) = Packed::of(&numbers);
        assert!(pieces.len() < 20, "{pieces:?}");
        let mut found: Vec<i64> = Vec::new();
        for piece in pieces {
            match piece {
                Piece::One(number) => found.push(number),
                Piece::Again(distance, count) => (0..count).for_each(|_| {
                    let number = found[found.len() - distance];
                    found.push(number);
                }),
            }
        }
        assert_eq!(found, numbers);
    }
}
