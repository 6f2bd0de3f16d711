//! Which send belongs to which receive, and between which ranks a stage's tensors travel.
//!
//! A forward send of stage `s` meets the forward receive of stage `s + 1`; a backward send of stage `s` meets
//! the backward receive of stage `s - 1`. Neighbours that share a rank hand tensors over without either.

use crate::action::Action;
use crate::ids::Rank;
use crate::placement::Placement;

/// The two ends of a message, of which at least one was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) send: Action,
    pub(crate) receive: Action,
    pub(crate) sender: Rank,
    pub(crate) receiver: Rank,
}

impl Transfer {
    /// The message that `action` sends, receives or waits for. `None` where it does not communicate, its
    /// stage has no neighbour there, or the neighbour shares its rank.
    pub(crate) fn of(placement: &Placement, action: Action) -> Option<Self> {
        match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => Self::sent_by(placement, action),
            Action::WaitSendForward { stage, microbatch } => {
                Self::sent_by(placement, Action::SendForward { stage, microbatch })
            }
            Action::WaitSendBackward { stage, microbatch } => {
                Self::sent_by(placement, Action::SendBackward { stage, microbatch })
            }
            Action::RecvForward { stage, microbatch } => {
                let stage = placement.previous(stage)?;
                Self::sent_by(placement, Action::SendForward { stage, microbatch })
            }
            Action::RecvBackward { stage, microbatch } => {
                let stage = placement.next(stage)?;
                Self::sent_by(placement, Action::SendBackward { stage, microbatch })
            }
            _ => None,
        }
    }

    /// The other end of the message that `action` sends or receives, where its stage has a neighbour there: a
    /// send's receive, a receive's send, and for a wait the receive.
    #[inline]
    pub(crate) fn other_end(action: Action) -> Option<Action> {
        Some(match action {
            Action::SendForward { stage, microbatch } | Action::WaitSendForward { stage, microbatch } => {
                Action::RecvForward { stage: stage.after()?, microbatch }
            }
            Action::SendBackward { stage, microbatch } | Action::WaitSendBackward { stage, microbatch } => {
                Action::RecvBackward { stage: stage.before()?, microbatch }
            }
            Action::RecvForward { stage, microbatch } => {
                Action::SendForward { stage: stage.before()?, microbatch }
            }
            Action::RecvBackward { stage, microbatch } => {
                Action::SendBackward { stage: stage.after()?, microbatch }
            }
            _ => return None,
        })
    }

    /// The message that carries what `action`, a compute action and no overlap, leaves for a neighbouring
    /// stage.
    pub(crate) fn after(placement: &Placement, action: Action) -> Option<Self> {
        match action {
            Action::Forward { stage, microbatch } => {
                Self::sent_by(placement, Action::SendForward { stage, microbatch })
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                Self::sent_by(placement, Action::SendBackward { stage, microbatch })
            }
            _ => None,
        }
    }

    fn sent_by(placement: &Placement, send: Action) -> Option<Self> {
        let receive = match send {
            Action::SendForward { stage, microbatch } => {
                Action::RecvForward { stage: placement.next(stage)?, microbatch }
            }
            Action::SendBackward { stage, microbatch } => {
                Action::RecvBackward { stage: placement.previous(stage)?, microbatch }
            }
            _ => return None,
        };
        let (sender, receiver) = (placement.owner(send.stage())?, placement.owner(receive.stage())?);
        (sender != receiver).then_some(Self { send, receive, sender, receiver })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(action: &str, expected: Option<(&str, u32, &str, u32)>) {
        let placement = Placement::v(2, 2).expect("four stages on two ranks");
        let found = Transfer::of(&placement, action.parse().expect("an action"));
        let found =
            found.map(|it| (it.send.to_string(), it.sender.get(), it.receive.to_string(), it.receiver.get()));
        let found = found.as_ref().map(|it| (it.0.as_str(), it.1, it.2.as_str(), it.3));
        assert_eq!(found, expected, "{action}");
    }

    #[test]
    fn both_ends_name_the_same_message() {
        check("0SEND_F5", Some(("0SEND_F5", 0, "1RECV_F5", 1)));
        check("1RECV_F5", Some(("0SEND_F5", 0, "1RECV_F5", 1)));
        check("3WAIT_SEND_B5", Some(("3SEND_B5", 0, "2RECV_B5", 1)));
        check("2RECV_B5", Some(("3SEND_B5", 0, "2RECV_B5", 1)));
    }

    #[test]
    fn ends_and_turns_have_no_message() {
        check("3SEND_F0", None);
        check("0RECV_F0", None);
        check("0SEND_B0", None);
        check("1SEND_F0", None);
        check("9RECV_B0", None);
    }
}
