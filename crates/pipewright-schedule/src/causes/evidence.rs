//! The evidence in a timeline for the causes of its actions.

use std::collections::HashMap;
use std::ops::Range;

use crate::action::{Action, ActionKind};
use crate::causes::cause::{Cause, Cell, Wait};
use crate::costs::Costs;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::simulate::Tensor;
use crate::skip_event::SkipAction;
use crate::timeline::{Event, QueueWait, Timeline};
use crate::transfer::Transfer;

/// A gap of a recorded timeline that is shorter than this share of the median action is the time of the
/// runtime.
const NOTICEABLE_GAP: f64 = 0.05;

/// The same for a simulated timeline, as a share of its whole time.
const ROUNDING: f64 = 1e-8;

/// The events of a rank.
pub(super) struct Lane<'a> {
    pub(super) rank: Rank,
    /// The events that compute, by start.
    pub(super) cells: Vec<&'a Event>,
    /// The other events that take time, by start.
    bars: Vec<&'a Event>,
    /// The bars that computations may wait for, by end.
    waits: Vec<&'a Event>,
}

/// A timeline with the indices that its causes need.
pub(super) struct Evidence<'a> {
    timeline: &'a Timeline,
    costs: &'a Costs,
    is_recorded: bool,
    /// The number of ranks of a replica.
    ranks: u32,
    start: f64,
    end: f64,
    pub(super) slack: f64,
    lanes: Vec<Lane<'a>>,
    /// The first event of each computed part in each replica. A forward that is computed again for its
    /// backward has sent its tensors the first time.
    made: HashMap<(u32, Action), Cell>,
    in_line: HashMap<(Rank, Action), QueueWait>,
    /// The starts of the receives that take time, if operations waited in line.
    receives: HashMap<(Rank, Action), f64>,
}

impl<'a> Lane<'a> {
    fn of(timeline: &'a Timeline, rank: Rank) -> Self {
        let (cells, mut bars): (Vec<&Event>, Vec<&Event>) =
            timeline.events_of(rank).iter().partition(|event| event.action.is_compute());
        bars.retain(|bar| bar.end > bar.start);
        let is_wait = |bar: &&Event| {
            let kind = bar.action.kind();
            kind.is_wait_for_send() || matches!(kind, ActionKind::Unshard | ActionKind::WaitReduceGrad)
        };
        let mut waits: Vec<&Event> = bars.iter().copied().filter(is_wait).collect();
        waits.sort_by(|one, other| one.end.total_cmp(&other.end));
        Self { rank, cells, bars, waits }
    }
}

impl<'a> Evidence<'a> {
    pub(super) fn of(timeline: &'a Timeline, ranks: u32, costs: &'a Costs, is_recorded: bool) -> Self {
        let lanes: Vec<Lane<'_>> =
            (0..timeline.ranks()).map(|rank| Lane::of(timeline, Rank::new(rank))).collect();
        let (ranks, start) = (ranks.max(1), timeline.start());
        let mut made = HashMap::new();
        for lane in &lanes {
            for (index, cell) in lane.cells.iter().enumerate() {
                for part in cell.action.parts() {
                    made.entry((lane.rank.get() / ranks, part)).or_insert(Cell { rank: lane.rank, index });
                }
            }
        }
        let mut lengths: Vec<f64> =
            lanes.iter().flat_map(|lane| &lane.cells).map(|cell| cell.end - cell.start).collect();
        lengths.sort_by(f64::total_cmp);
        let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0.0);
        let whole = timeline.makespan();
        let waits = timeline.queue_waits().iter().map(|wait| ((wait.rank, wait.action), *wait));
        let in_line: HashMap<_, _> = waits.collect();
        let bars = lanes.iter().filter(|_| !in_line.is_empty()).flat_map(|lane| &lane.bars);
        let receives = bars
            .filter(|bar| bar.action.kind().is_receive())
            .map(|bar| ((bar.rank, bar.action), bar.start))
            .collect();
        Self {
            timeline,
            costs,
            is_recorded,
            ranks,
            start,
            end: start + whole,
            slack: if is_recorded { NOTICEABLE_GAP * median } else { ROUNDING * whole },
            lanes,
            made,
            in_line,
            receives,
        }
    }

    pub(super) fn lane(&self, rank: Rank) -> &Lane<'a> {
        &self.lanes[rank.index()]
    }

    fn cell(&self, cell: Cell) -> &'a Event {
        self.lane(cell.rank).cells[cell.index]
    }

    /// Returns the end of the computation before the one with this index, or the start of the step.
    fn free_from(&self, rank: Rank, index: usize) -> f64 {
        index.checked_sub(1).map_or(self.start, |before| self.cell(Cell { rank, index: before }).end)
    }

    /// Returns the part that makes a forward's output or the gradients of a backward's inputs.
    fn maker(&self, rank: Rank, is_forward: bool, stage: StageIndex, microbatch: Microbatch) -> Option<Cell> {
        let parts = if is_forward {
            [Some(Action::Forward { stage, microbatch }), None]
        } else {
            [Some(Action::InputBackward { stage, microbatch }), Some(Action::Backward { stage, microbatch })]
        };
        let replica = rank.get() / self.ranks;
        parts.into_iter().flatten().find_map(|part| self.made.get(&(replica, part)).copied())
    }

    /// Returns the cause of the start of a computation.
    pub(super) fn cause_of(&self, cell: Cell) -> Cause {
        let (start, free) = (self.cell(cell).start, self.free_from(cell.rank, cell.index));
        let without = |cause| if cell.index > 0 { cause } else { Cause::Start };
        if start - free <= self.slack {
            return without(Cause::Order);
        }
        let wait = self.wait_before(cell.rank, cell.index);
        let until = wait.map_or(free, |wait| wait.end);
        let message = if wait.is_none() || start - until > self.slack {
            self.message_before(cell, until)
        } else {
            None
        };
        match (message, wait) {
            (Some(message), _) => message,
            (None, Some(wait)) => Cause::Wait(self.wait(cell.rank, wait)),
            (None, None) => without(Cause::Delay),
        }
    }

    /// Returns the last wait in the gap before the computation with this index, or before the end of the step
    /// for the index after the last one.
    fn wait_before(&self, rank: Rank, index: usize) -> Option<&'a Event> {
        let (lane, free) = (self.lane(rank), self.free_from(rank, index));
        let cell = lane.cells.get(index);
        let to = cell.map_or(self.end, |cell| cell.start);
        let is_needed = |bar: &Event| {
            let of_stage = |cell: &&Event| cell.action.parts().any(|part| part.stage() == bar.action.stage());
            bar.action.kind() != ActionKind::Unshard || cell.is_some_and(of_stage)
        };
        let before = lane.waits.partition_point(|bar| bar.end < to + self.slack);
        let in_gap = lane.waits[..before].iter().rev().take_while(|bar| bar.end > free + self.slack);
        let mut needed = in_gap.copied().filter(|bar| is_needed(bar));
        needed.find(|bar| bar.end - bar.start.max(free) > self.slack)
    }

    /// Returns the parts of a computation whose tensors it waits for. A forward that is computed again has its
    /// tensors, so it waits only for the tensors of its backward, which follows it.
    fn parts_to_feed(&self, cell: Cell) -> impl Iterator<Item = Action> {
        let replica = cell.rank.get() / self.ranks;
        self.cell(cell).action.parts().map(move |part| match part {
            Action::Forward { stage, microbatch } if self.made.get(&(replica, part)) != Some(&cell) => {
                Action::Backward { stage, microbatch }
            }
            _ => part,
        })
    }

    /// Returns the computations that make the tensors of a part, and the bytes of the tensors.
    fn producers_of(&self, rank: Rank, part: Action) -> Vec<(Tensor, Cell, u64)> {
        let (stage, Some(microbatch)) = (part.stage(), part.microbatch()) else { return Vec::new() };
        let is_forward = matches!(part, Action::Forward { .. });
        if matches!(part, Action::WeightBackward { .. }) {
            return Vec::new();
        }
        let (neighbour, tensor) = if is_forward {
            (stage.before(), Tensor::Input)
        } else {
            (stage.after(), Tensor::OutputGradient)
        };
        let bytes = self.costs.output_bytes(neighbour.filter(|_| is_forward).unwrap_or(stage));
        let skips = self.costs.skips.iter().filter_map(|skip| {
            let (from, to) = if is_forward { (skip.from, skip.to) } else { (skip.to, skip.from) };
            (to == stage).then_some((Tensor::Skip, from, skip.bytes))
        });
        let all = neighbour.map(|neighbour| (tensor, neighbour, bytes)).into_iter().chain(skips);
        let made = all.filter_map(|(tensor, from, bytes)| {
            Some((tensor, self.maker(rank, is_forward, from, microbatch)?, bytes))
        });
        made.collect()
    }

    /// Returns whether a recorded rank received a tensor of a computation between two times.
    fn receives(&self, cell: Cell, from: f64, to: f64) -> bool {
        let parts: Vec<Action> = self.parts_to_feed(cell).collect();
        let is_own = |is_forward: bool, stage, microbatch| {
            let is_same = |part: &Action| {
                matches!(part, Action::Forward { .. }) == is_forward
                    && (part.stage(), part.microbatch()) == (stage, Some(microbatch))
            };
            parts.iter().any(is_same)
        };
        let least = self.slack.min((to - from) / 2.0);
        let is_long = |start: f64, end: f64| end.min(to) - start.max(from) > least;
        let bars = &self.lane(cell.rank).bars;
        let is_receive = |bar: &Event| match bar.action {
            Action::RecvForward { stage, microbatch } => is_own(true, stage, microbatch),
            Action::RecvBackward { stage, microbatch } => is_own(false, stage, microbatch),
            _ => false,
        };
        let mut in_gap = bars[self.starting(bars, |bar| bar.start, from, to)].iter();
        let events = in_gap.any(|bar| is_receive(bar) && is_long(bar.start, bar.end));
        let skips = self.timeline.skips_of(cell.rank);
        events
            || skips[self.starting(skips, |skip| skip.start, from, to)].iter().any(|skip| match skip.action {
                SkipAction::Receive(message) => {
                    is_own(!message.is_gradient(), skip.action.stage(), message.microbatch)
                        && is_long(skip.start, skip.end)
                }
                SkipAction::Send(_) => false,
            })
    }

    /// Returns the range of the elements that start from about one time on and before another one. They are sorted by
    /// their start.
    fn starting<T>(&self, all: &[T], start: impl Fn(&T) -> f64, from: f64, to: f64) -> Range<usize> {
        let first = all.partition_point(|one| start(one) < from - self.slack);
        let end = all.partition_point(|one| start(one) < to);
        first..end.max(first)
    }

    /// Returns the message that arrived last for a computation whose rank was free from `free` on, if no link made
    /// messages wait. A recorded timeline does not have the time of a message, so the tensor that was made last
    /// counts there. In it, a message is the cause only if the rank was receiving it, or if its tensor was made
    /// so late that it was still on its way at that time.
    fn message_before(&self, cell: Cell, free: f64) -> Option<Cause> {
        let start = self.cell(cell).start;
        let is_received = !self.is_recorded || self.receives(cell, free, start);
        let mut latest =
            if is_received { f64::NEG_INFINITY } else { free - self.slack - self.costs.link.latency };
        let mut last = None;
        for part in self.parts_to_feed(cell) {
            for (tensor, from, bytes) in self.producers_of(cell.rank, part) {
                let made = self.cell(from).end;
                let arrival = if self.is_recorded {
                    made
                } else {
                    let cost = self.costs.transfer(from.rank, cell.rank, self.timeline.slices().share(bytes));
                    made + cost.occupied + cost.latency
                };
                if from.rank != cell.rank && arrival > latest && made <= start + self.slack {
                    latest = arrival;
                    last = Some((part, tensor, from));
                }
            }
        }
        let (part, tensor, from) = last?;
        let in_line = if tensor == Tensor::Skip { None } else { self.wait_in_line(cell, part, from) };
        Some(Cause::Message { from, tensor, in_line })
    }

    /// Returns the wait in line that delayed the message of `part` of a computation, if an operation in front
    /// of it did.
    fn wait_in_line(&self, cell: Cell, part: Action, from: Cell) -> Option<QueueWait> {
        let receive = part.with_kind(ActionKind::receive_of(part.kind().carries_gradient()?))?;
        let send = Transfer::other_end(receive)?;
        let (start, made) = (self.cell(cell).start, self.cell(from).end);
        let mut own = [(from.rank, send), (cell.rank, receive)]
            .into_iter()
            .filter_map(|end| self.in_line.get(&end))
            .peekable();
        own.peek()?;
        // A message that takes no time has no bar.
        let moves = self.receives.get(&(cell.rank, receive)).map_or(start, |&moves| moves.min(start));
        let delays =
            |wait: &&QueueWait| (wait.until - moves).abs() <= self.slack && wait.until > made + self.slack;
        own.find(delays).copied()
    }

    /// Returns the last computation of a rank that has ended at a time.
    fn ended_by(&self, rank: Rank, time: f64) -> Option<Cell> {
        let ended = self.lane(rank).cells.partition_point(|cell| cell.end < time + self.slack);
        Some(Cell { rank, index: ended.checked_sub(1)? })
    }

    /// Returns the computation that made the message of a `WAIT_SEND`.
    fn sent_by(&self, rank: Rank, wait: &Event) -> Option<Cell> {
        let is_forward = wait.action.kind() == ActionKind::WaitSendForward;
        let made = wait
            .action
            .microbatch()
            .and_then(|number| self.maker(rank, is_forward, wait.action.stage(), number));
        made.or_else(|| self.ended_by(rank, wait.start))
    }

    /// Returns the computation after which a simulated collective began. It may have waited for the
    /// collectives before it.
    fn issued_after(&self, rank: Rank, collective: &Event) -> Option<Cell> {
        let start = collective.start;
        let ended = self.ended_by(rank, start);
        if ended.is_some_and(|cell| start - self.cell(cell).end <= self.slack) {
            return ended;
        }
        let is_before = |bar: &&&Event| (bar.end - start).abs() <= self.slack && bar.start < start;
        let before = || self.lane(rank).bars.iter().filter(is_before);
        let is_collective =
            |bar: &&&Event| matches!(bar.action.kind(), ActionKind::Unshard | ActionKind::ReduceGrad);
        if let Some(queued) = before().find(is_collective) {
            return self.issued_after(rank, queued);
        }
        match before().find(|bar| bar.action.kind().is_wait_for_send()) {
            Some(sent) => self.sent_by(rank, sent),
            None => ended,
        }
    }

    /// Returns the `REDUCE_GRAD` of the replica that adds its gradients of a stage last before a time.
    fn last_to_add(&self, rank: Rank, stage: StageIndex, until: f64) -> Option<(Rank, &'a Event)> {
        let is_same = |lane: &&Lane<'_>| lane.rank.get() % self.ranks == rank.get() % self.ranks;
        let is_sum = |bar: &Event| bar.action == Action::ReduceGrad { stage } && bar.start < until;
        let mut last: Option<(Rank, &Event)> = None;
        for lane in self.lanes.iter().filter(is_same) {
            for bar in lane.bars.iter().copied().filter(|bar| is_sum(bar)) {
                if last.is_none_or(|(_, last)| bar.start > last.start) {
                    last = Some((lane.rank, bar));
                }
            }
        }
        last
    }

    /// Returns a wait with the computation that led to its end.
    fn wait(&self, rank: Rank, wait: &'a Event) -> Wait {
        let Event { action, end: until, .. } = *wait;
        let after = if wait.action.kind().is_wait_for_send() {
            self.sent_by(rank, wait)
        } else {
            let began = match action.kind() {
                ActionKind::Unshard => Some((rank, wait)),
                _ => self.last_to_add(rank, action.stage(), until),
            };
            match began {
                None => self.ended_by(rank, wait.start),
                Some((rank, bar)) if self.is_recorded => self.ended_by(rank, bar.start),
                Some((rank, bar)) => self.issued_after(rank, bar),
            }
        };
        Wait { rank, action, until, after }
    }

    /// Returns what a rank waits for after its last computation.
    pub(super) fn wait_at_end(&self, rank: Rank) -> Option<Wait> {
        let wait = self.wait_before(rank, self.lane(rank).cells.len())?;
        Some(self.wait(rank, wait))
    }

    /// Returns the last computation of the step, and the wait that ends the step if it ends after that.
    pub(super) fn end_of_step(&self) -> (Option<Cell>, Option<Wait>) {
        let mut last: Option<(Cell, f64)> = None;
        let mut longest: Option<(Rank, &Event)> = None;
        for lane in &self.lanes {
            if let Some(cell) = lane.cells.last().filter(|cell| last.is_none_or(|(_, end)| cell.end > end)) {
                last = Some((Cell { rank: lane.rank, index: lane.cells.len() - 1 }, cell.end));
            }
            if let Some(wait) =
                lane.waits.last().filter(|wait| longest.is_none_or(|(_, bar)| wait.end > bar.end))
            {
                longest = Some((lane.rank, wait));
            }
        }
        let wait = last.zip(longest).filter(|((_, end), (_, wait))| wait.end - end > self.slack);
        (last.map(|(cell, _)| cell), wait.map(|(_, (rank, wait))| self.wait(rank, wait)))
    }
}
