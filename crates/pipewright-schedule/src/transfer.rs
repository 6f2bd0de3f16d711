//! Messages between stages: the send and the receive of each, and their ranks.
//!
//! The forward send of stage `s` matches the forward receive of stage `s + 1`; the backward send of stage `s`
//! matches the backward receive of stage `s - 1`. Neighbours on the same rank pass tensors on without a
//! message.

use crate::action::{Action, ActionKind};
use crate::ids::Rank;
use crate::placement::Placement;

/// A message: its two actions and their ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) send: Action,
    pub(crate) receive: Action,
    pub(crate) sender: Rank,
    pub(crate) receiver: Rank,
}

impl Transfer {
    /// Returns the message that `action` sends, receives or waits for. `None` if it does not communicate, if
    /// its stage has no neighbour in that direction, or if the neighbour is on the same rank.
    pub(crate) fn of(placement: &Placement, action: Action) -> Option<Self> {
        let kind = action.kind();
        let send = match kind {
            _ if kind.is_receive() => Self::other_end(action)?,
            _ if kind.is_communication() => {
                action.with_kind(ActionKind::send_of(kind.carries_gradient()?))?
            }
            _ => return None,
        };
        Self::sent_by(placement, send)
    }

    /// Returns the receive of a send or of a wait for a send, and the send of a receive. `None` if `action`
    /// does not communicate or its stage has no neighbour in that direction. The result does not depend on
    /// the placement.
    #[inline]
    pub(crate) fn other_end(action: Action) -> Option<Action> {
        let (stage, microbatch) = (action.stage(), action.microbatch()?);
        Some(match action.kind() {
            ActionKind::SendForward | ActionKind::WaitSendForward => {
                Action::RecvForward { stage: stage.after()?, microbatch }
            }
            ActionKind::SendBackward | ActionKind::WaitSendBackward => {
                Action::RecvBackward { stage: stage.before()?, microbatch }
            }
            ActionKind::RecvForward => Action::SendForward { stage: stage.before()?, microbatch },
            ActionKind::RecvBackward => Action::SendBackward { stage: stage.after()?, microbatch },
            _ => return None,
        })
    }

    /// Returns the message that carries the output of `action` to a neighbouring stage. `action` is a compute
    /// action and not an overlap.
    pub(crate) fn after(placement: &Placement, action: Action) -> Option<Self> {
        let kind = action.kind();
        let is_gradient = kind.carries_gradient().filter(|_| kind.is_compute())?;
        Self::sent_by(placement, action.with_kind(ActionKind::send_of(is_gradient))?)
    }

    fn sent_by(placement: &Placement, send: Action) -> Option<Self> {
        let receive = Self::other_end(send)?;
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
