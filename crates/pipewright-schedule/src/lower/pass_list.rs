//! Refuses lists of passes in which a pass would have no effect.

use crate::action::Action;
use crate::lower::error::LowerError;
use crate::lower::named_passes::Pass;

/// Refuses a list that contains a pass twice, or that has an order in which a pass would have no effect.
///
/// # Errors
/// The first mistake.
pub fn check_order(passes: &[Pass]) -> Result<(), LowerError> {
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
        let advice = "a pass runs once, leave one out";
        return Err(LowerError::Refused(format!("the passes name {} twice; {advice}", pass.name())));
    }
    let wrong = ORDERS.into_iter().find(
        |&(first, second)| matches!((position(first), position(second)), (Some(one), Some(other)) if other < one),
    );
    let problem = |(first, second)| format!("the passes run {second} before {first}; name {first} first");
    wrong.map_or(Ok(()), |pair| Err(LowerError::Refused(problem(pair))))
}

/// Refuses a pass that must run before the messages of the rows were added, or that has no messages to work
/// on.
///
/// # Errors
/// The first mistake.
pub fn check_messages(rows: &[Vec<Option<Action>>], passes: &[Pass]) -> Result<(), LowerError> {
    let has_messages = rows.iter().flatten().flatten().any(|action| action.is_communication());
    let has = |name: &str| passes.iter().any(|pass| pass.name() == name);
    if has_messages && has("send-early") {
        let problem = "the rows have messages already, and the pass send-early must run before they are added; start from \
                       rows without messages, or leave send-early out";
        return Err(LowerError::Refused(problem.to_owned()));
    }
    let idle = ["wait-send", "defer-recv", "order-safe"].into_iter().find(|name| has(name));
    match idle.filter(|_| !has_messages && !has("send-recv")) {
        Some(pass) => Err(LowerError::Refused(format!(
            "the rows have no messages, so the pass {pass} has no effect; name send-recv before it, or leave it out"
        ))),
        None => Ok(()),
    }
}
