//! The pass `wait-send` with a budget: moves waits for sends to earlier places, so that a rank has at most a
//! given number of sends in flight. The result equals that of `max_outstanding_sends` of PyTorch 2.15.
//!
//! Rules: (1) every send gets a wait first, as by [`wait_send`]; (2) before a send that exceeds the limit, the
//! wait for a pending send moves to this place: the wait for the oldest send whose receive must have been
//! posted by then, which takes no time; (3) if no pending send has such a receive, the oldest send whose wait
//! cannot cause a deadlock is waited for; (4) if there is none, the limit cannot hold.
//!
//! The pass keeps an order of the actions of all ranks that agrees with every dependency: the rows, each
//! receive after its send, and the action behind a wait after the receive. A receive must have been posted if
//! a chain of dependencies leads from it to the send of rule 2. A wait causes a deadlock if a chain leads from
//! that send to the receive. A search for a chain visits only actions that the order places between its ends.
//! A move of rule 3 adds a dependency, so the actions between its ends change their places in the order
//! (Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic graphs, 2007).
//!
//! Each wait depends on where the receives are, so this pass comes after [`super::defer_recv`]. A program that
//! is sound with blocking sends stays sound under any limit. With deferred receives, a small limit may be
//! impossible.
//!
//! The order leaves out waits for the updates of overlapping batches. The validator counts them, and the passes end with it
//! (`passes.rs`, `named_passes.rs`), so a wait that such an update makes impossible is an error and not a deadlock.
//!
//! Time: each send that exceeds the limit visits the actions between the oldest pending receive and itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroU32;

use crate::action::Action;
use crate::ids::Rank;
use crate::lower::error::LowerError;
use crate::lower::wait_send::wait_send;
use crate::schedule::Program;
use crate::transfer::Transfer;
use crate::words::counted;

/// Adds a wait for every send that lacks one, and moves waits so that each rank has at most `budget` sends in
/// flight.
///
/// # Errors
/// When the ranks of `program` wait for each other, or when a wait at every possible place would cause a
/// deadlock. The message names the rank, its send and the sends in flight.
pub fn limit_sends(program: Program, budget: NonZeroU32) -> Result<Program, LowerError> {
    let program = wait_send(program);
    let mut order = ActionOrder::over(&program)?;
    let ranks = program.placement().all_ranks();
    let rows = ranks.map(|rank| limit_row(&mut order, &program, rank, budget)).collect::<Result<_, _>>()?;
    let limited = Program::made(program.placement().clone(), program.numbering(), rows);
    Ok(limited.with_trained(program.trained().clone()))
}

/// A send in flight, and the node of its receive; `None` if the program has no receive.
#[derive(Clone, Copy)]
struct Pending {
    send: Action,
    receive: Option<Node>,
}

fn limit_row(
    order: &mut ActionOrder,
    program: &Program,
    rank: Rank,
    budget: NonZeroU32,
) -> Result<Vec<Action>, LowerError> {
    let row = program.row(rank);
    let mut lowered = Vec::with_capacity(row.len());
    let mut pending: Vec<Pending> = Vec::new();
    let mut moved: HashSet<Action> = HashSet::new();
    let mut node = order.first[rank.index()];
    for &action in row {
        if action.kind().is_wait_for_send() {
            if !moved.remove(&action) {
                pending.retain(|it| it.send.wait_of_send() != Some(action));
                lowered.push(action);
            }
            continue;
        }
        if action.kind().is_send() {
            while pending.len() >= budget.get() as usize {
                let index = order.choose(&pending, node).ok_or_else(|| impossible(rank, action, &pending))?;
                let Pending { send, receive } = pending.remove(index);
                if let Some(receive) = receive {
                    order.place_wait(receive, node);
                }
                let earlier = send.wait_of_send();
                moved.extend(earlier);
                lowered.extend(earlier);
            }
            pending.push(Pending { send: action, receive: order.other_end[node as usize] });
        }
        lowered.push(action);
        node += 1;
    }
    Ok(lowered)
}

fn impossible(rank: Rank, send: Action, pending: &[Pending]) -> LowerError {
    let sends: Vec<String> = pending.iter().map(|it| it.send.to_string()).collect();
    LowerError::Refused(format!(
        "rank {rank} cannot start {send} with {} in flight ({}), because a wait for any of them would cause a deadlock; \
         allow more sends in flight, or leave defer-recv out",
        counted(pending.len(), "send"),
        sends.join(", ")
    ))
}

/// An action that is not a wait for a send: its number, counted over the rows of all ranks.
type Node = u32;

/// The dependencies between the actions of all ranks, and an order that agrees with them.
struct ActionOrder {
    /// The first node of each rank, then the number of nodes.
    first: Vec<Node>,
    /// Whether a node begins a row.
    begins_row: Vec<bool>,
    /// The receive of a send, and the send of a receive.
    other_end: Vec<Option<Node>>,
    is_receive: Vec<bool>,
    /// For a receive, the node directly behind the wait for its send.
    behind_wait: Vec<Option<Node>>,
    /// For a node, the receives whose sends are waited for directly before it.
    awaited: HashMap<Node, Vec<Node>>,
    /// The position of each node in the order.
    position: Vec<u32>,
}

/// The direction in which a search follows dependencies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SearchDirection {
    Later,
    Earlier,
}

impl ActionOrder {
    fn over(program: &Program) -> Result<Self, LowerError> {
        let is_node = |action: &&Action| !action.kind().is_wait_for_send();
        let mut first = vec![0];
        let mut messages: HashMap<Action, Node> = HashMap::new();
        let (mut begins_row, mut is_receive) = (Vec::new(), Vec::new());
        for row in program.rows() {
            for (index, &action) in row.iter().filter(is_node).enumerate() {
                if action.is_communication() {
                    messages.insert(action, begins_row.len() as Node);
                }
                begins_row.push(index == 0);
                is_receive.push(action.kind().is_receive());
            }
            first.push(begins_row.len() as Node);
        }
        let nodes = begins_row.len();
        let mut order = Self {
            first,
            begins_row,
            other_end: vec![None; nodes],
            is_receive,
            behind_wait: vec![None; nodes],
            awaited: HashMap::new(),
            position: Vec::new(),
        };
        for (rank, row) in program.rows().iter().enumerate() {
            let mut behind = order.first[rank + 1];
            let end = behind;
            for &action in row.iter().rev() {
                let transfer = Transfer::of(program.placement(), action);
                let ends = transfer.map(|it| [it.send, it.receive].map(|end| messages.get(&end).copied()));
                if action.kind().is_wait_for_send() {
                    if let Some([_, Some(receive)]) = ends
                        && behind < end
                    {
                        order.set_wait(receive, behind);
                    }
                    continue;
                }
                behind -= 1;
                order.other_end[behind as usize] =
                    ends.and_then(|[send, receive]| if action.kind().is_receive() { send } else { receive });
            }
        }
        order.sort()?;
        Ok(order)
    }

    /// Gives every node a position behind all nodes that it depends on.
    fn sort(&mut self) -> Result<(), LowerError> {
        let nodes = 0..self.begins_row.len() as Node;
        // Counted along the same direction as below, because rows with mistakes may send twice.
        let mut missing = vec![0_u32; self.begins_row.len()];
        for later in nodes.clone().flat_map(|node| self.next_to(node, SearchDirection::Later)) {
            missing[later as usize] += 1;
        }
        let mut ready: VecDeque<Node> = nodes.filter(|&node| missing[node as usize] == 0).collect();
        self.position = vec![u32::MAX; missing.len()];
        let mut sorted = 0;
        while let Some(node) = ready.pop_front() {
            self.position[node as usize] = sorted;
            sorted += 1;
            for later in self.next_to(node, SearchDirection::Later) {
                missing[later as usize] -= 1;
                if missing[later as usize] == 0 {
                    ready.push_back(later);
                }
            }
        }
        if sorted as usize == self.position.len() {
            return Ok(());
        }
        let problem = "the ranks wait for each other, so their sends cannot be limited; validate the program to see where";
        Err(LowerError::Refused(problem.to_owned()))
    }

    /// Returns the nodes that depend on `node`, or the nodes that it depends on.
    fn next_to(&self, node: Node, direction: SearchDirection) -> impl Iterator<Item = Node> {
        let index = node as usize;
        let (in_row, message, waits): (_, _, &[Node]) = match direction {
            SearchDirection::Later => {
                let is_last = self.begins_row.get(index + 1).is_none_or(|&begins| begins);
                let message =
                    if self.is_receive[index] { self.behind_wait[index] } else { self.other_end[index] };
                ((!is_last).then_some(node + 1), message, &[])
            }
            SearchDirection::Earlier => {
                let in_row = (!self.begins_row[index]).then(|| node - 1);
                let message = self.other_end[index].filter(|_| self.is_receive[index]);
                (in_row, message, self.awaited.get(&node).map_or(&[], Vec::as_slice))
            }
        };
        in_row.into_iter().chain(message).chain(waits.iter().copied())
    }

    /// Returns `start` and all nodes that depend on it, or that it depends on, whose positions are not beyond
    /// `limit`.
    fn search(&self, start: Node, direction: SearchDirection, limit: u32) -> HashSet<Node> {
        let is_within = |node: &Node| match direction {
            SearchDirection::Later => self.position[*node as usize] <= limit,
            SearchDirection::Earlier => self.position[*node as usize] >= limit,
        };
        let mut reached = HashSet::from([start]);
        let mut open = vec![start];
        while let Some(node) = open.pop() {
            let further = self.next_to(node, direction).filter(is_within);
            open.extend(further.filter(|&further| reached.insert(further)));
        }
        reached
    }

    /// Returns the index of the pending send whose wait comes directly before `node`; `None` if every wait
    /// would cause a deadlock.
    fn choose(&self, pending: &[Pending], node: Node) -> Option<usize> {
        let positions = || pending.iter().filter_map(|it| it.receive).map(|it| self.position[it as usize]);
        let earlier = self.search(node, SearchDirection::Earlier, positions().min().unwrap_or(u32::MAX));
        let posted = pending.iter().position(|it| it.receive.is_some_and(|it| earlier.contains(&it)));
        posted.or_else(|| {
            let later = self.search(node, SearchDirection::Later, positions().max().unwrap_or(0));
            pending.iter().position(|it| it.receive.is_none_or(|it| !later.contains(&it)))
        })
    }

    fn set_wait(&mut self, receive: Node, behind: Node) {
        self.behind_wait[receive as usize] = Some(behind);
        self.awaited.entry(behind).or_default().push(receive);
    }

    /// Moves the wait for the send of `receive` directly before `node`, which is before its place and does not
    /// lead to `receive`. The dependency of the wait's former place remains true.
    fn place_wait(&mut self, receive: Node, node: Node) {
        let [start, end] = [node, receive].map(|it| self.position[it as usize]);
        if start < end {
            let in_order = |found: HashSet<Node>| {
                let mut nodes: Vec<Node> = found.into_iter().collect();
                nodes.sort_unstable_by_key(|&it| self.position[it as usize]);
                nodes
            };
            let mut nodes = in_order(self.search(receive, SearchDirection::Earlier, start));
            nodes.extend(in_order(self.search(node, SearchDirection::Later, end)));
            let mut positions: Vec<u32> = nodes.iter().map(|&it| self.position[it as usize]).collect();
            positions.sort_unstable();
            for (node, position) in nodes.into_iter().zip(positions) {
                self.position[node as usize] = position;
            }
        }
        self.set_wait(receive, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_program, print_program};

    fn check(budget: u32, rows: &str, expected: Result<&str, &str>) {
        let program = parse_program(rows).expect("a program");
        let budget = NonZeroU32::new(budget).expect("a budget");
        let found = limit_sends(program, budget)
            .map(|program| print_program(&program))
            .map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn the_oldest_send_is_waited_for_without_a_proof() {
        check(
            1,
            "0SEND_F0,0SEND_F1,0SEND_F2\n1RECV_F0,1RECV_F1,1RECV_F2\n",
            Ok(
                "0SEND_F0,0WAIT_SEND_F0,0SEND_F1,0WAIT_SEND_F1,0SEND_F2,0WAIT_SEND_F2\n1RECV_F0,1RECV_F1,1RECV_F2\n",
            ),
        );
    }

    #[test]
    fn earlier_waits_stay() {
        check(
            2,
            "0SEND_F0,0SEND_F1,0B0,0SEND_F2,0SEND_F3\n1RECV_F0\n",
            Ok(
                "0SEND_F0,0SEND_F1,0B0,0WAIT_SEND_F0,0SEND_F2,0WAIT_SEND_F1,0SEND_F3,0WAIT_SEND_F2,0WAIT_SEND_F3\n\
                1RECV_F0\n",
            ),
        );
    }

    /// Rank 0 knows that its second send has arrived, because it has an answer to it.
    #[test]
    fn a_send_that_has_arrived_comes_first() {
        check(
            2,
            "0SEND_F0,0SEND_F1,0RECV_B1,0SEND_F2\n1RECV_F1,1SEND_B1,1RECV_F0,1RECV_F2\n",
            Ok("0SEND_F0,0SEND_F1,0RECV_B1,0WAIT_SEND_F1,0SEND_F2,0WAIT_SEND_F0,0WAIT_SEND_F2\n\
                1RECV_F1,1SEND_B1,1RECV_F0,1RECV_F2,1WAIT_SEND_B1\n"),
        );
    }

    /// Rank 1 receives the first message after it has the second one.
    #[test]
    fn a_wait_that_would_block_for_ever_is_not_chosen() {
        let rows = "0SEND_F0,0SEND_F1,0SEND_F2\n1RECV_F2,1RECV_F0,1RECV_F1\n";
        let refusal = "rank 0 cannot start 0SEND_F2 with 2 sends in flight (0SEND_F0, 0SEND_F1), because a wait for any of them \
                       would cause a deadlock; allow more sends in flight, or leave defer-recv out";
        check(2, rows, Err(refusal));
        check(
            3,
            rows,
            Ok(
                "0SEND_F0,0SEND_F1,0SEND_F2,0WAIT_SEND_F0,0WAIT_SEND_F1,0WAIT_SEND_F2\n1RECV_F2,1RECV_F0,1RECV_F1\n",
            ),
        );
        check(
            2,
            "0SEND_F0,0SEND_F1,0SEND_F2\n1RECV_F1,1RECV_F2,1RECV_F0\n",
            Ok(
                "0SEND_F0,0SEND_F1,0WAIT_SEND_F1,0SEND_F2,0WAIT_SEND_F0,0WAIT_SEND_F2\n1RECV_F1,1RECV_F2,1RECV_F0\n",
            ),
        );
    }

    /// Rank 0 sends again only after rank 1 has received, and receives after that.
    #[test]
    fn a_wait_of_one_rank_restricts_the_waits_of_another() {
        check(
            1,
            "0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1\n1SEND_B0,1SEND_B1,1RECV_F0,1RECV_F1\n",
            Err(
                "rank 1 cannot start 1SEND_B1 with 1 send in flight (1SEND_B0), because a wait for any of them would cause a \
                 deadlock; allow more sends in flight, or leave defer-recv out",
            ),
        );
        check(
            1,
            "0SEND_F0,0RECV_B0,0RECV_B1\n1SEND_B0,1SEND_B1,1RECV_F0\n",
            Ok(
                "0SEND_F0,0RECV_B0,0RECV_B1,0WAIT_SEND_F0\n1SEND_B0,1WAIT_SEND_B0,1SEND_B1,1RECV_F0,1WAIT_SEND_B1\n",
            ),
        );
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_refused() {
        let problem = "the ranks wait for each other, so their sends cannot be limited; validate the program to see where";
        check(1, "0RECV_B0,0SEND_F0\n1RECV_F0,1SEND_B0\n", Err(problem));
    }

    #[test]
    fn repeated_messages_do_not_break_the_order() {
        check(
            1,
            "0SEND_F0,0SEND_F0\n1RECV_F0,1RECV_F0\n",
            Err(
                "rank 0 cannot start 0SEND_F0 with 1 send in flight (0SEND_F0), because a wait for any of them would cause a \
                 deadlock; allow more sends in flight, or leave defer-recv out",
            ),
        );
    }
}
