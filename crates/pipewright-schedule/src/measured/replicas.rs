//! The replicas of the pipeline in a measured timeline, and the program that each of them ran.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::action::Action;
use crate::ids::Rank;
use crate::measured::ranks::moved;
use crate::schedule::{Program, ScheduleError};
use crate::timeline::{Event, Timeline};

/// Why the replicas or the program of a timeline cannot be found.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum MeasuredError {
    /// The number of ranks is not a multiple of the number of replicas.
    #[error("{ranks} ranks cannot be {replicas} replicas of one pipeline; the timeline is incomplete")]
    Replicas {
        /// The number of ranks in the timeline.
        ranks: u32,
        /// The number of ranks that run stage 0.
        replicas: u32,
    },
    /// The actions do not form a program.
    #[error("the actions of the timeline do not form a program")]
    Program(#[from] ScheduleError),
}

crate::error_text::message_as_debug!(MeasuredError);

/// Returns the timeline of each replica, with ranks counted from 0 in each. The ranks of a replica are
/// consecutive, and there are as many replicas as ranks that run stage 0.
///
/// # Errors
/// When the ranks cannot be distributed evenly.
pub fn replicas(timeline: &Timeline) -> Result<Vec<Timeline>, MeasuredError> {
    let runs_first = |event: &&Event| {
        event.action.parts().any(|part| matches!(part, Action::Forward { stage, .. } if stage.get() == 0))
    };
    let first: BTreeSet<Rank> = timeline.events().iter().filter(runs_first).map(|event| event.rank).collect();
    let (ranks, replicas) = (timeline.ranks(), (first.len() as u32).max(1));
    if !ranks.is_multiple_of(replicas) {
        return Err(MeasuredError::Replicas { ranks, replicas });
    }
    let size = ranks / replicas;
    let replica = |index: u32| {
        let place = |_, rank: Rank| {
            let own = rank.get().checked_sub(index * size).filter(|&own| own < size);
            own.map(|own| (Rank::new(own), 0.0))
        };
        moved(std::slice::from_ref(timeline), size, place)
    };
    Ok((0..replicas).map(replica).collect())
}

/// Returns the timeline of all replicas together: the opposite of [`replicas`].
pub fn join_replicas(replicas: &[Timeline]) -> Timeline {
    let size = replicas.first().map_or(0, Timeline::ranks);
    let place = |index: u32, rank: Rank| Some((Rank::new(rank.get() + index * size), 0.0));
    moved(replicas, size * replicas.len() as u32, place)
}

/// Returns the program that one replica ran: the actions of each rank in the order of their starts.
///
/// # Errors
/// When the actions do not form a program, for example because the actions of a stage are missing.
pub fn program_of(replica: &Timeline) -> Result<Program, MeasuredError> {
    let row = |rank| replica.events_of(Rank::new(rank)).iter().map(|event| event.action).collect();
    Ok(Program::infer((0..replica.ranks()).map(row).collect())?.with_slices(replica.slices())?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::csv::{parse_program, print_program};
    use crate::message_record::{MessageEnd, MessageRecord};
    use crate::simulate::logical;
    use crate::timeline::{Scope, ScopeKind};

    #[test]
    fn each_replica_has_its_own_ranks_and_the_same_program() {
        let rows = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
        let one = logical(&parse_program(rows).expect("a program")).expect("no deadlock").timeline(1.0);
        let scope = |rank: u32| Scope {
            rank: rank.into(),
            kind: ScopeKind::Exchange("1F0".parse().expect("an action")),
            start: 0.5,
            end: 1.0,
        };
        let message = |rank: u32, peer: u32| MessageRecord {
            rank: rank.into(),
            end: MessageEnd::Action("0SEND_F0".parse().expect("an action")),
            peer: peer.into(),
            bytes: 8,
            tensors: Arc::default(),
        };
        let one = one.with_scopes(vec![scope(1)]).with_messages(vec![message(0, 1)]);
        let other = |event: &Event| Event { rank: Rank::new(event.rank.get() + 2), ..*event };
        let events = one.events().iter().copied().chain(one.events().iter().map(other));
        let both = Timeline::new(4, events.collect()).with_scopes(vec![scope(1), scope(3)]);
        let both = both.with_messages(vec![message(0, 1), message(2, 3)]);
        let found = replicas(&both).expect("two replicas");
        assert_eq!(found, [one.clone(), one]);
        assert_eq!(join_replicas(&found), both);
        assert_eq!(print_program(&program_of(&found[1]).expect("a program")), rows);
    }

    #[test]
    fn an_incomplete_timeline_is_refused() {
        let event = |rank, action: &str| Event {
            rank: Rank::new(rank),
            action: action.parse().expect("an action"),
            start: 0.0,
            end: 1.0,
        };
        let three = Timeline::new(3, vec![event(0, "0F0"), event(2, "0F0")]);
        assert_eq!(replicas(&three), Err(MeasuredError::Replicas { ranks: 3, replicas: 2 }));
        let gap = Timeline::new(1, vec![event(0, "0F0"), event(0, "2F0")]);
        assert!(matches!(program_of(&gap), Err(MeasuredError::Program(_))));
    }
}
