//! Refuses lists of passes in which a pass would have no effect.

use thiserror::Error;

use crate::action::Action;
use crate::lower::named_passes::Pass;

/// The reason why a pass of a list would have no effect.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum PassListError {
    /// A pass is in the list twice.
    #[error("the passes name {pass} twice; a pass runs once, leave one out")]
    Twice {
        /// The pass.
        pass: &'static str,
    },
    /// A pass comes before one that must run before it.
    #[error("the passes run {second} before {first}; name {first} first")]
    Order {
        /// The pass that must run first.
        first: &'static str,
        /// The pass that must run after it.
        second: &'static str,
    },
    /// Computations are to be split for messages that exist already.
    #[error(
        "the rows have messages already, and the pass send-early must run before they are added; start from rows \
         without messages, or leave send-early out"
    )]
    HasMessages,
    /// A pass changes messages, and there are none.
    #[error(
        "the rows have no messages, so the pass {pass} has no effect; name send-recv before it, or leave it out"
    )]
    NoMessages {
        /// The pass.
        pass: &'static str,
    },
}

crate::error_text::message_as_debug!(PassListError);

/// Refuses a list that contains a pass twice, or that has an order in which a pass would have no effect.
///
/// # Errors
/// The first mistake.
pub fn check_order(passes: &[Pass]) -> Result<(), PassListError> {
    const ORDERS: [(&str, &str); 6] = [
        ("send-early", "send-recv"),
        ("send-recv", "defer-recv"),
        ("send-recv", "wait-send"),
        ("send-recv", "order-safe"),
        ("defer-recv", "order-safe"),
        ("send-recv", "offload"),
    ];
    let position = |name: &str| passes.iter().position(|pass| pass.name() == name);
    let again = passes.iter().enumerate().find(|(index, pass)| position(pass.name()) != Some(*index));
    if let Some((_, pass)) = again {
        return Err(PassListError::Twice { pass: pass.name() });
    }
    let wrong = ORDERS.into_iter().find(
        |&(first, second)| matches!((position(first), position(second)), (Some(one), Some(other)) if other < one),
    );
    wrong.map_or(Ok(()), |(first, second)| Err(PassListError::Order { first, second }))
}

/// Refuses a pass that must run before the messages of the rows were added, or that has no messages to work
/// on.
///
/// # Errors
/// The first mistake.
pub fn check_messages(rows: &[Vec<Option<Action>>], passes: &[Pass]) -> Result<(), PassListError> {
    let has_messages = rows.iter().flatten().flatten().any(|action| action.is_communication());
    let has = |name: &str| passes.iter().any(|pass| pass.name() == name);
    if has_messages && has("send-early") {
        return Err(PassListError::HasMessages);
    }
    let idle = ["wait-send", "defer-recv", "order-safe"].into_iter().find(|name| has(name));
    match idle.filter(|_| !has_messages && !has("send-recv")) {
        Some(pass) => Err(PassListError::NoMessages { pass }),
        None => Ok(()),
    }
}
