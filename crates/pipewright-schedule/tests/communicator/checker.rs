//! A second judge, which shares no code with the crate's: it marks every operation of a program as done that
//! can be, by the definition of the communicators, until nothing changes.

use pipewright_schedule::communicator::{Communicator, Groups, Sends, Streams};
use pipewright_schedule::{Action, Microbatch, Program, StageIndex};

/// A send or a receive of a row.
#[derive(Clone, Copy)]
struct Operation {
    position: usize,
    is_send: bool,
    is_gradient: bool,
    peer: usize,
    /// The stages and the microbatch of its message: the lower stage of the two.
    boundary: u32,
    microbatch: u32,
    group: usize,
    is_done: bool,
}

pub(crate) struct Judgement {
    pub(crate) is_crossed: bool,
    pub(crate) hangs: bool,
}

/// Judges a program whose messages all have two ends.
pub(crate) fn judge(program: &Program, communicator: &Communicator) -> Judgement {
    let mut rows: Vec<Vec<Operation>> =
        (0..program.ranks()).map(|rank| operations(program, rank as usize, communicator)).collect();
    let mut passed = vec![0; rows.len()];
    loop {
        let mut has_changed = false;
        for (rank, passed) in passed.iter_mut().enumerate() {
            while can_pass(program, &rows, rank, *passed, communicator) {
                *passed += 1;
                has_changed = true;
            }
        }
        for rank in 0..rows.len() {
            for index in 0..rows[rank].len() {
                if !rows[rank][index].is_done && can_complete(&rows, &passed, (rank, index), communicator) {
                    rows[rank][index].is_done = true;
                    has_changed = true;
                    let operation = rows[rank][index];
                    if !is_eager(&operation, communicator)
                        && let Some(other) = counterpart(&rows, rank, &operation)
                        && (operation.is_send || !is_eager(&rows[operation.peer][other], communicator))
                    {
                        rows[operation.peer][other].is_done = true;
                    }
                }
            }
        }
        if !has_changed {
            break;
        }
    }
    let is_at_end = |(rank, passed): (usize, &usize)| *passed == program.rows()[rank].len();
    let all_done = rows.iter().flatten().all(|operation| operation.is_done);
    Judgement {
        is_crossed: communicator.streams != Streams::Buffered && is_crossed(&rows),
        hangs: !all_done || !passed.iter().enumerate().all(is_at_end),
    }
}

fn operations(program: &Program, rank: usize, communicator: &Communicator) -> Vec<Operation> {
    let owner = |stage: u32| program.placement().owner(StageIndex::new(stage)).expect("a stage").index();
    let mut group = 0;
    let mut operations = Vec::new();
    for (position, &action) in program.rows()[rank].iter().enumerate() {
        let (is_send, is_gradient, boundary, other) = match action {
            Action::SendForward { stage, .. } => (true, false, stage.get(), stage.get() + 1),
            Action::RecvForward { stage, .. } => (false, false, stage.get() - 1, stage.get() - 1),
            Action::SendBackward { stage, .. } => (true, true, stage.get() - 1, stage.get() - 1),
            Action::RecvBackward { stage, .. } => (false, true, stage.get(), stage.get() + 1),
            _ => {
                group += 1;
                continue;
            }
        };
        let microbatch = action.microbatch().expect("a message has a microbatch").get();
        if communicator.groups == Groups::Single {
            group += 1;
        }
        let peer = owner(other);
        operations.push(Operation {
            position,
            is_send,
            is_gradient,
            peer,
            boundary,
            microbatch,
            group,
            is_done: false,
        });
    }
    operations
}

fn is_same_message(one: &Operation, other: &Operation) -> bool {
    (one.is_gradient, one.boundary, one.microbatch) == (other.is_gradient, other.boundary, other.microbatch)
}

fn is_eager(operation: &Operation, communicator: &Communicator) -> bool {
    let is_small = |limit: u64, messages: &[u64]| {
        let bytes = messages.get(operation.boundary as usize).or(messages.last());
        bytes.is_some_and(|bytes| *bytes <= limit)
    };
    operation.is_send
        && match &communicator.sends {
            Sends::Rendezvous => false,
            Sends::Eager => true,
            Sends::EagerUpTo { limit, messages } => is_small(*limit, messages),
        }
}

/// Returns whether the next action of `rank` has what it needs.
fn can_pass(
    program: &Program,
    rows: &[Vec<Operation>],
    rank: usize,
    passed: usize,
    communicator: &Communicator,
) -> bool {
    let Some(&action) = program.rows()[rank].get(passed) else { return false };
    action.parts().all(|part| {
        let (is_send, is_gradient, boundary) = match part {
            Action::Forward { stage, .. } => (false, false, stage.get().checked_sub(1)),
            Action::Backward { stage, .. } | Action::InputBackward { stage, .. } => {
                (false, true, Some(stage.get()))
            }
            Action::WaitSendForward { stage, .. } => (true, false, Some(stage.get())),
            Action::WaitSendBackward { stage, .. } => (true, true, stage.get().checked_sub(1)),
            _ => return true,
        };
        let needs = rows[rank].iter().find(|operation| {
            operation.is_send == is_send
                && operation.is_gradient == is_gradient
                && Some(operation.boundary) == boundary
                && Some(operation.microbatch) == part.microbatch().map(Microbatch::get)
        });
        needs
            .is_none_or(|needs| needs.is_done || (communicator.streams == Streams::Buffered && needs.is_send))
    })
}

/// Returns whether an operation has been given, and every operation before it in its stream is done or in its
/// group.
fn runs(
    rows: &[Vec<Operation>],
    passed: &[usize],
    rank: usize,
    operation: &Operation,
    streams: Streams,
) -> bool {
    let shares_stream = |other: &Operation| match streams {
        Streams::Buffered => false,
        Streams::Edge => other.peer == operation.peer && other.is_send == operation.is_send,
        Streams::Pair => other.peer == operation.peer,
        Streams::Rank => true,
    };
    let waits_for = |other: &Operation| {
        other.position < operation.position
            && !other.is_done
            && other.group != operation.group
            && shares_stream(other)
    };
    operation.position < passed[rank] && !rows[rank].iter().any(waits_for)
}

/// Returns the index of the operation that meets `operation` of `rank`: the one with the same number, by
/// direction.
fn counterpart(rows: &[Vec<Operation>], rank: usize, operation: &Operation) -> Option<usize> {
    let number = rows[rank]
        .iter()
        .filter(|other| other.peer == operation.peer && other.is_send == operation.is_send)
        .position(|other| other.position == operation.position)?;
    let is_counterpart = |other: &Operation| other.peer == rank && other.is_send != operation.is_send;
    let mut others = rows[operation.peer].iter().enumerate().filter(|(_, other)| is_counterpart(other));
    others.nth(number).map(|(index, _)| index)
}

fn can_complete(
    rows: &[Vec<Operation>],
    passed: &[usize],
    (rank, index): (usize, usize),
    communicator: &Communicator,
) -> bool {
    let operation = rows[rank][index];
    let streams = communicator.streams;
    if streams == Streams::Buffered {
        let is_sent =
            |other: &Operation| is_same_message(other, &operation) && other.position < passed[operation.peer];
        return operation.position < passed[rank]
            && (operation.is_send || rows[operation.peer].iter().any(is_sent));
    }
    if !runs(rows, passed, rank, &operation, streams) {
        return false;
    }
    if is_eager(&operation, communicator) {
        return true;
    }
    let Some(other) = counterpart(rows, rank, &operation).map(|other| rows[operation.peer][other]) else {
        return false;
    };
    if is_eager(&other, communicator) {
        return other.is_done;
    }
    runs(rows, passed, operation.peer, &other, streams)
}

fn is_crossed(rows: &[Vec<Operation>]) -> bool {
    rows.iter().enumerate().any(|(rank, row)| {
        row.iter().filter(|operation| operation.is_send).any(|send| {
            let receive = counterpart(rows, rank, send).map(|index| rows[send.peer][index]);
            receive.is_none_or(|receive| !is_same_message(send, &receive))
        })
    })
}
