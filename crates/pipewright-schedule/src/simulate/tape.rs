//! The times of a simulation, and on request how each depends on earlier times and on costs.
//!
//! Every time is the latest of some earlier times, or a cost after an earlier time. Which times these are does
//! not depend on the costs (except if halves of an overlap alternate, `alternation.rs`). So a simulation that
//! keeps its tape says what each time becomes at other costs, without its rules ([`super::dependencies()`]).

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::action::ActionKind;
use crate::costs::TransferCost;
use crate::ids::{Rank, StageIndex};

/// A time, in seconds, and its node on the tape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) at: f64,
    pub(crate) node: NonZeroU32,
}

/// The purpose of a cost, which says what changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CostOf {
    /// The computation of a stage: `F`, `B`, `I` or `W`.
    Compute(StageIndex, ActionKind),
    /// The latency of the link between ranks that have no link of their own.
    Latency,
    /// Anything else.
    Other,
}

/// How a time depends on earlier times.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    /// The start of the simulation.
    Start,
    /// A cost after an earlier time.
    After { node: NonZeroU32, cost: CostOf, seconds: f64 },
    /// The latest of earlier times.
    Latest(Vec<NonZeroU32>),
}

/// The nodes of all times, each after the nodes on which it depends, with the rank that it belongs to.
pub(super) struct Tape {
    /// Empty if nothing is recorded.
    pub(super) nodes: Vec<(Rank, Node)>,
    /// The nodes of the start and the end of each event of each rank, if the tape records.
    pub(super) events: Vec<Vec<[NonZeroU32; 2]>>,
}

impl Moment {
    /// The start of the simulation, which is the first node of a tape.
    pub(super) const START: Self = Self { at: 0.0, node: NonZeroU32::MIN };

    /// Returns the later of two times. The second one has to be later to win.
    fn or_later(self, other: Self) -> Self {
        if other.at > self.at { other } else { self }
    }
}

impl Default for Moment {
    fn default() -> Self {
        Self::START
    }
}

impl Tape {
    /// Returns a tape of `ranks` ranks that `records` or not.
    pub(super) fn new(records: bool, ranks: u32) -> Self {
        let nodes = if records { vec![(Rank::new(0), Node::Start)] } else { Vec::new() };
        Self { nodes, events: vec![Vec::new(); ranks as usize] }
    }

    pub(super) fn records(&self) -> bool {
        !self.nodes.is_empty()
    }

    /// Returns the start of an event, which is at `at`.
    pub(super) fn start_of(&self, rank: Rank, event: usize, at: f64) -> Moment {
        let nodes = self.events.get(rank.index()).and_then(|events| events.get(event));
        Moment { at, node: nodes.map_or(Moment::START.node, |&[start, _]| start) }
    }

    /// Returns the time `seconds` after another one.
    pub(super) fn after(&mut self, rank: Rank, moment: Moment, cost: CostOf, seconds: f64) -> Moment {
        let at = moment.at + seconds;
        if !self.records() || (cost == CostOf::Other && seconds == 0.0) {
            return Moment { at, ..moment };
        }
        Moment { at, node: self.push(rank, Node::After { node: moment.node, cost, seconds }) }
    }

    /// Returns the latest of some times; the start of the simulation if there are none.
    pub(super) fn latest(&mut self, rank: Rank, moments: impl IntoIterator<Item = Moment>) -> Moment {
        if !self.records() {
            return moments.into_iter().fold(Moment::START, Moment::or_later);
        }
        let (mut latest, mut nodes) = (Moment::START, Vec::new());
        for moment in moments {
            latest = latest.or_later(moment);
            // No time is before the start.
            if moment.node != Moment::START.node && !nodes.contains(&moment.node) {
                nodes.push(moment.node);
            }
        }
        match nodes.as_slice() {
            [] => latest,
            &[node] => Moment { node, ..latest },
            _ => Moment { node: self.push(rank, Node::Latest(nodes)), ..latest },
        }
    }

    fn push(&mut self, rank: Rank, node: Node) -> NonZeroU32 {
        self.nodes.push((rank, node));
        let number = u32::try_from(self.nodes.len()).ok().and_then(NonZeroU32::new);
        number.expect("a program has fewer actions than there are numbers")
    }
}

/// The links between ranks, one for each ordered pair. Each carries one message after another.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// The time from which each link that has been used is free.
    free: BTreeMap<(Rank, Rank), Moment>,
}

/// The times of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transit {
    /// When it begins to occupy its link.
    pub(super) start: Moment,
    /// When it ceases to occupy its link.
    pub(super) left: Moment,
    /// When it has arrived.
    pub(super) arrival: Moment,
}

impl Links {
    /// Puts a message on a link once the link is free, not before the latest of `ready`.
    pub(super) fn occupy(
        &mut self,
        tape: &mut Tape,
        link: (Rank, Rank),
        cost: TransferCost,
        ready: &[Moment],
    ) -> Transit {
        let free = self.free.entry(link).or_default();
        let start = tape.latest(link.0, [*free].into_iter().chain(ready.iter().copied()));
        let left = tape.after(link.0, start, CostOf::Other, cost.occupied);
        *free = left;
        let latency = if cost.is_common { CostOf::Latency } else { CostOf::Other };
        Transit { start, left, arrival: tape.after(link.0, left, latency, cost.latency) }
    }
}
