//! The dependencies of the times of a simulated program, so that it can be run at other costs without the rules of
//! the simulation.

use std::collections::HashMap;
use std::num::NonZeroU32;

use crate::action::Action;
use crate::communicator::{Communicator, Streams};
use crate::costs::Costs;
use crate::ids::Rank;
use crate::schedule::Program;
use crate::simulate::boundary_tensors::Tensor;
use crate::simulate::error::SimulateError;
use crate::simulate::queues::Line;
use crate::simulate::tape::{CostOf, Node};
use crate::simulate::timed::{Need, Recorded, buffered, simulated};
use crate::slices::Slices;
use crate::timeline::{Event, Timeline};

/// The times of a program's events as sums and maxima of costs.
pub struct Dependencies {
    slices: Slices,
    /// How each time depends on earlier ones, with the rank that it belongs to.
    pub(crate) nodes: Vec<(Rank, Node)>,
    /// The events of each rank.
    pub(crate) events: Vec<Vec<Dependent>>,
}

/// An event, with what may delay it.
pub(crate) struct Dependent {
    pub(crate) event: Event,
    /// The nodes of its start and its end.
    pub(crate) nodes: [NonZeroU32; 2],
    /// The messages from other ranks that a computation needs.
    pub(crate) messages: Vec<NeededMessage>,
    /// The time at which an operation was given to its queue, and the events of its rank that are in front.
    pub(crate) in_line: Option<(NonZeroU32, Vec<usize>)>,
}

/// A message that a computation needs.
pub(crate) struct NeededMessage {
    /// The rank and the index of the event that makes the tensor.
    pub(crate) maker: (Rank, usize),
    pub(crate) tensor: Tensor,
    pub(crate) arrival: NonZeroU32,
    /// The indices of the send, among the events of the maker's rank, and of the receive, if there are queues.
    pub(crate) ends: Option<(usize, usize)>,
}

/// Simulates `program` at `costs` on `communicator`, and keeps what each time depends on. If halves of overlaps
/// alternate ([`Costs::has_exchanges`]), the result is for these costs only.
///
/// # Errors
/// When [`timed_on`](super::timed_on) fails.
pub fn dependencies(
    program: &Program,
    costs: &Costs,
    communicator: &Communicator,
) -> Result<Dependencies, SimulateError> {
    // The program of a recorded run has second forwards, which have no place on other communicators.
    let run = if communicator.streams == Streams::Buffered {
        buffered(program, costs, true)?
    } else {
        simulated(program, costs, communicator, true)?
    };
    let Recorded { tape, events, needs, lines } = run.into_recorded();
    let indices = indices(&events);
    let dependent = |(event, nodes)| Dependent { event, nodes, messages: Vec::new(), in_line: None };
    let of_rank =
        |(events, nodes): (Vec<Event>, Vec<_>)| events.into_iter().zip(nodes).map(dependent).collect();
    let mut events: Vec<Vec<Dependent>> = events.into_iter().zip(tape.events).map(of_rank).collect();
    for Need { rank, event, tensor, arrival } in needs {
        let Some(stage) = tensor.source(&costs.skips) else { continue };
        let Some(maker) = program.placement().owner(stage).filter(|&maker| maker != rank) else { continue };
        let (made, sent, received) = tensor.actions(stage);
        let find = |rank, action| indices.get(&(rank, action)).copied();
        let Some(made) = made.iter().find_map(|&action| find(maker, action)) else { continue };
        let ends = find(maker, sent).zip(find(rank, received));
        let ends = ends.filter(|_| !lines.is_empty() && tensor.meaning() != Tensor::Skip);
        let (tensor, arrival) = (tensor.meaning(), arrival.node);
        let message = NeededMessage { maker: (maker, made), tensor, arrival, ends };
        events[rank.index()][event].messages.push(message);
    }
    for Line { rank, event, given, behind } in lines {
        events[rank.index()][event].in_line = Some((given.node, behind));
    }
    Ok(Dependencies { slices: program.slices(), nodes: tape.nodes, events })
}

/// Returns the index of the first event of each action of each rank. A forward that is computed again has sent
/// its tensors the first time.
fn indices(events: &[Vec<Event>]) -> HashMap<(Rank, Action), usize> {
    let mut indices = HashMap::new();
    for (rank, events) in (0..).map(Rank::new).zip(events) {
        for (index, event) in events.iter().enumerate() {
            indices.entry((rank, event.action)).or_insert(index);
        }
    }
    indices
}

impl Dependencies {
    /// Returns the events at other costs. `seconds` changes a cost.
    ///
    /// ```
    /// use pipewright_schedule::communicator::Communicator;
    /// use pipewright_schedule::simulate::{CostOf, dependencies};
    /// use pipewright_schedule::{Costs, csv};
    /// let program = csv::parse_program("0F0,0SEND_F0\n1RECV_F0,1F0\n")?;
    /// let costs = Costs::default();
    /// let dependencies = dependencies(&program, &costs, &Communicator::default())?;
    /// let slow = dependencies.timeline(|of, seconds| if of == CostOf::Latency { 3.0 } else { seconds });
    /// assert_eq!(slow.makespan(), 5.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn timeline(&self, seconds: impl Fn(CostOf, f64) -> f64) -> Timeline {
        let mut times: Vec<f64> = Vec::with_capacity(self.nodes.len());
        for (_, node) in &self.nodes {
            let time = match node {
                Node::Start => 0.0,
                Node::After { node, cost, seconds: base } => times[index(*node)] + seconds(*cost, *base),
                Node::Latest(nodes) => nodes.iter().map(|&node| times[index(node)]).fold(0.0, f64::max),
            };
            times.push(time);
        }
        let events = self.events.iter().flatten().map(|&Dependent { event, nodes, .. }| {
            let [start, end] = nodes.map(|node| times[index(node)]);
            Event { start, end, ..event }
        });
        Timeline::new(self.events.len() as u32, events.collect()).with_slices(self.slices)
    }
}

/// Returns the index of a node, which is numbered from 1.
pub(crate) fn index(node: NonZeroU32) -> usize {
    node.get() as usize - 1
}
