//! The text form of an action, `[stage][action][microbatch]`: `2F0`, `1UNSHARD`, `3SEND_F1`, Reads an
//! overlap, such as `(0F7;7B3)OVERLAP_F_B`.
//!
//! Parsing reads back what printing writes. It matches the whole text, and an error gives the byte at which
//! the text is wrong: `1F0xyz` is an error, not `1F0`. Rows and files of actions are in [`crate::csv`].

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, StageIndex};
use crate::overlap::{MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE, Overlap};
use crate::words::nearest;

/// The error of a text that is not an action, with the place of the mistake.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{problem}")]
pub struct ParseActionError {
    /// The byte of the mistake, counted from 1.
    pub column: usize,
    /// What is wrong, and what to write instead.
    pub problem: String,
}

crate::error_text::message_as_debug!(ParseActionError);

/// The names of all kinds, in the order of [`ActionKind::ALL`].
const NAMES: [&str; 17] = [
    "F",
    "I",
    "W",
    "B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "WAIT_REDUCE_GRAD",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "WAIT_SEND_F",
    "WAIT_SEND_B",
    "OVERLAP_F_B",
    "OFFLOAD",
    "RELOAD",
];

impl ActionKind {
    /// Returns the name in the text form, such as `SEND_F`.
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Overlap(overlap) = self {
            let (forward, backward) = (overlap.forward(), overlap.backward());
            return write!(f, "({}F{};{}B{})OVERLAP_F_B", forward.0, forward.1, backward.0, backward.1);
        }
        write!(f, "{}{}", self.stage(), self.kind().name())?;
        self.microbatch().map_or(Ok(()), |microbatch| write!(f, "{microbatch}"))
    }
}

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut cursor = Cursor { text, at: 0 };
        let action = match text.as_bytes().first() {
            None => return Err(cursor.error("no action; write one such as `0F0`")),
            Some(b'(') => cursor.overlap()?,
            Some(_) => cursor.single()?,
        };
        if cursor.at < text.len() {
            return Err(cursor.error("unexpected text after the action; a cell holds exactly one"));
        }
        Ok(action)
    }
}

/// A text, and the position up to which it has been read.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Reads an action that is not an overlap, such as `2F0` or `1UNSHARD`.
    fn single(&mut self) -> Result<Action, ParseActionError> {
        let stage = self.stage()?;
        let name_at = self.at;
        let name = self.take_while(|byte| byte.is_ascii_alphabetic() || byte == b'_');
        let kind = ActionKind::ALL.into_iter().find(|kind| kind.name() == name);
        let Some(kind) = kind else {
            self.at = name_at;
            return Err(self.error(unknown_action(name)));
        };
        if kind == ActionKind::Overlap {
            self.at = 0;
            self.expect("(")?;
        }
        if let Some(action) = Action::of_stage(kind, stage) {
            return Ok(action);
        }
        let microbatch = self.microbatch(kind)?;
        Ok(Action::of_microbatch(kind, stage, microbatch).expect("every other kind has a microbatch"))
    }

    /// Reads an overlap, such as `(0F7;7B3)OVERLAP_F_B`.
    fn overlap(&mut self) -> Result<Action, ParseActionError> {
        self.expect("(")?;
        let forward = self.overlap_part(ActionKind::Forward)?;
        self.expect(";")?;
        let backward = self.overlap_part(ActionKind::Backward)?;
        self.expect(")OVERLAP_F_B")?;
        let overlap = Overlap::new(forward, backward);
        overlap.map(Action::Overlap).ok_or_else(|| {
            self.at = 0;
            self.error(format!(
                "number too large in an overlap: stages are at most {MAX_OVERLAPPED_STAGE}, microbatches \
                 {MAX_OVERLAPPED_MICROBATCH}"
            ))
        })
    }

    /// Reads one half of an overlap, which must be of the given kind.
    fn overlap_part(&mut self, kind: ActionKind) -> Result<(StageIndex, Microbatch), ParseActionError> {
        let stage = self.stage()?;
        self.expect(kind.name())?;
        Ok((stage, self.microbatch(kind)?))
    }

    fn microbatch(&mut self, kind: ActionKind) -> Result<Microbatch, ParseActionError> {
        let missing =
            || format!("missing microbatch: `{kind}` ends with its microbatch's number, such as `0{kind}0`");
        self.number(missing, u32::MAX).map(Microbatch::new)
    }

    /// Reads the stage at the start of an action.
    fn stage(&mut self) -> Result<StageIndex, ParseActionError> {
        let missing = || "missing stage: an action begins with its stage's number, such as `0F0`".to_owned();
        self.number(missing, StageIndex::LARGEST).map(StageIndex::new)
    }

    /// Reads a number that is at most `most`. `missing` is the error if there is no digit.
    fn number(&mut self, missing: impl FnOnce() -> String, most: u32) -> Result<u32, ParseActionError> {
        let start = self.at;
        let digits = self.take_while(|byte| byte.is_ascii_digit());
        if digits.is_empty() {
            return Err(self.error(missing()));
        }
        digits.parse().ok().filter(|&number| number <= most).ok_or_else(|| {
            self.at = start;
            self.error(format!("number too large: at most {most}"))
        })
    }

    /// Reads past `expected`, which must come next.
    fn expect(&mut self, expected: &'static str) -> Result<(), ParseActionError> {
        if !self.text.as_bytes()[self.at..].starts_with(expected.as_bytes()) {
            let form = "an overlap is written `(0F7;7B3)OVERLAP_F_B`";
            return Err(self.error(format!("expected `{expected}`: {form}")));
        }
        self.at += expected.len();
        Ok(())
    }

    /// Reads the longest run of ASCII bytes that satisfy `wanted`.
    fn take_while(&mut self, wanted: impl Fn(u8) -> bool) -> &'a str {
        let start = self.at;
        let rest = &self.text.as_bytes()[start..];
        self.at += rest.iter().position(|&byte| !wanted(byte)).unwrap_or(rest.len());
        &self.text[start..self.at]
    }

    fn error(&self, problem: impl Into<String>) -> ParseActionError {
        ParseActionError { column: self.at + 1, problem: problem.into() }
    }
}

/// Returns the problem of a name that no action has, with a similar name or all names.
fn unknown_action(name: &str) -> String {
    let name: String = name.chars().take(32).collect();
    match nearest(&name, NAMES, |_| 2) {
        Some(similar) => format!("unknown action `{name}`; did you mean `{similar}`?"),
        None => format!("unknown action `{name}`; the actions are {}", NAMES.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL_NAMES: &str = "F, I, W, B, UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD, SEND_F, RECV_F, SEND_B, \
                             RECV_B, WAIT_SEND_F, WAIT_SEND_B, OVERLAP_F_B, OFFLOAD, RELOAD";

    fn check(text: &str) {
        let action: Action = text.parse().unwrap_or_else(|error| panic!("`{text}`: {error}"));
        assert_eq!(action.to_string(), text);
    }

    fn check_error(text: &str, column: usize, message: &str) {
        let error = text.parse::<Action>().expect_err(text);
        let found = error.to_string().replace(ALL_NAMES, "...");
        assert_eq!((error.column, found.as_str()), (column, message), "`{text}`");
    }

    #[test]
    fn every_kind_round_trips() {
        for kind in ActionKind::ALL {
            match kind {
                ActionKind::Overlap => check("(0F7;7B3)OVERLAP_F_B"),
                _ if Action::of_stage(kind, StageIndex::new(0)).is_some() => check(&format!("12{kind}")),
                _ => check(&format!("12{kind}345")),
            }
        }
        check("16777215F4294967295");
    }

    #[test]
    fn errors_say_what_is_missing() {
        check_error("", 1, "no action; write one such as `0F0`");
        check_error("F0", 1, "missing stage: an action begins with its stage's number, such as `0F0`");
        check_error("-1F0", 1, "missing stage: an action begins with its stage's number, such as `0F0`");
        check_error("1F", 3, "missing microbatch: `F` ends with its microbatch's number, such as `0F0`");
        check_error(
            "1SEND_F",
            8,
            "missing microbatch: `SEND_F` ends with its microbatch's number, such as `0SEND_F0`",
        );
    }

    #[test]
    fn errors_match_the_whole_text() {
        check_error("1F0xyz", 4, "unexpected text after the action; a cell holds exactly one");
        check_error("1UNSHARD0", 9, "unexpected text after the action; a cell holds exactly one");
        check_error("1F0é", 4, "unexpected text after the action; a cell holds exactly one");
    }

    #[test]
    fn errors_bound_numbers() {
        check_error("16777216F0", 1, "number too large: at most 16777215");
        check_error("99999999999999999999F0", 1, "number too large: at most 16777215");
        check_error("0B99999999999999999999", 3, "number too large: at most 4294967295");
    }

    #[test]
    fn errors_suggest_the_nearest_name() {
        check_error("1UNSHRD", 2, "unknown action `UNSHRD`; did you mean `UNSHARD`?");
        check_error("1send_f0", 2, "unknown action `send_f`; did you mean `SEND_F`?");
        check_error("1RCEV_B0", 2, "unknown action `RCEV_B`; did you mean `RECV_B`?");
        check_error("1QQQ0", 2, "unknown action `QQQ`; the actions are ...");
        check_error("1", 2, "unknown action ``; the actions are ...");
        check_error("1OVERLAP_F_B", 1, "expected `(`: an overlap is written `(0F7;7B3)OVERLAP_F_B`");
    }

    #[test]
    fn errors_point_into_an_overlap() {
        check_error("(0B7;7B3)OVERLAP_F_B", 3, "expected `F`: an overlap is written `(0F7;7B3)OVERLAP_F_B`");
        check_error("(0F7,7B3)OVERLAP_F_B", 5, "expected `;`: an overlap is written `(0F7;7B3)OVERLAP_F_B`");
        let too_large = "number too large in an overlap: stages are at most 4095, microbatches 65535";
        check_error("(0F65536;7B3)OVERLAP_F_B", 1, too_large);
        check_error("(0F6;4096B3)OVERLAP_F_B", 1, too_large);
        check_error("(0F7;7B3)", 9, "expected `)OVERLAP_F_B`: an overlap is written `(0F7;7B3)OVERLAP_F_B`");
    }

    proptest! {
        #[test]
        fn any_action_round_trips(
            kind in 0..ActionKind::ALL.len(),
            stage in 0..=StageIndex::LARGEST,
            microbatch: u32,
            other in 0..=MAX_OVERLAPPED_STAGE,
        ) {
            let (stage, microbatch) = (StageIndex::new(stage), Microbatch::new(microbatch));
            let kind = ActionKind::ALL[kind];
            let action = Action::of_stage(kind, stage)
                .or_else(|| Action::of_microbatch(kind, stage, microbatch))
                .unwrap_or_else(|| {
                    let stages = [stage.get() & MAX_OVERLAPPED_STAGE, other].map(StageIndex::new);
                    let microbatch = Microbatch::new(microbatch.get() & MAX_OVERLAPPED_MICROBATCH);
                    let overlap = Overlap::new((stages[0], microbatch), (stages[1], Microbatch::new(other)));
                    Action::Overlap(overlap.expect("in range"))
                });
            prop_assert_eq!(action.to_string().parse::<Action>(), Ok(action));
        }

        #[test]
        fn what_parses_prints_the_same_up_to_leading_zeros(text in "[0-9]{1,2}[A-Z_]{1,6}[0-9]{0,2}[ -~]?") {
            if let Ok(action) = text.parse::<Action>() {
                prop_assert_eq!(action.to_string().parse::<Action>(), Ok(action));
            }
        }

        #[test]
        fn no_text_panics(text: String) {
            let _outcome = text.parse::<Action>();
        }
    }
}
