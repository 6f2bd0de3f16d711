//! Passes by name, and lists of passes over the rows of a file.
//!
//! [`lower`](fn@crate::lower::lower) has a fixed order of passes. [`apply`] runs a list of the user's choice, on rows
//! that may be a fragment of a program. It does not prove the result sound; validate it.
//!
//! ```
//! use pipewright_schedule::csv;
//! use pipewright_schedule::lower::{Pass, PassInput, apply};
//! let rows = csv::parse_rows("0F0,,0I0,0W0\n,1F0,1I0,1W0\n")?;
//! let passes = Pass::parse_list("merge-bw,send-recv")?;
//! let program = apply(PassInput { rows, stage_to_rank: None, microbatches: None }, &passes)?;
//! assert_eq!(csv::print_program(&program), "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::action::Action;
use crate::communicator::{Communicator, Groups, Sends, Streams};
use crate::ids::Rank;
use crate::lower::error::LowerError;
use crate::lower::offload::{OffloadConfig, offload};
use crate::lower::reduce_grad::{ReduceWait, reduce_grad};
use crate::lower::send_early::{Overlaps, send_early};
use crate::lower::send_recv::send_recv_cells;
use crate::lower::unshard::{UnshardConfig, UnshardLookahead, unshard};
use crate::lower::{defer_recv, limit_sends, merge_bw, order_safe, send_recv, wait_send};
use crate::placement::Placement;
use crate::recompute::Recompute;
use crate::schedule::{Numbering, Program, ScheduleError, check_sizes, infer_sizes};

/// A pass with its setting, in the order of [`lower`](fn@crate::lower::lower). The documentation of each
/// variant begins with its text form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pass {
    /// `merge-bw`
    MergeBw,
    /// `unshard`, `unshard=W` with a window of `W` stages, or `unshard=W:L` with a lookahead
    /// ([`UnshardLookahead`]): `unshard=3:2`, `unshard=3:auto`, `unshard=3:1/2/3` with a number for each
    /// rank.
    Unshard(UnshardConfig),
    /// `reduce-grad`, or with the place of the wait ([`ReduceWait`]): `reduce-grad=deferred`,
    /// `reduce-grad=at-end`.
    ReduceGrad(ReduceWait),
    /// `send-early`, or `send-early=keep-overlaps` to leave overlaps whole.
    SendEarly(Overlaps),
    /// `send-recv`
    SendRecv,
    /// `wait-send`, or `wait-send=K` with at most `K` sends in flight. It runs after `defer-recv`, also if it
    /// is listed before that.
    WaitSend(Option<NonZeroU32>),
    /// `defer-recv`
    DeferRecv,
    /// `order-safe` for one queue per rank, or `order-safe=pair:eager` for another communicator
    /// ([`Communicator`]).
    OrderSafe(Communicator),
    /// `offload`, or `offload=K` to leave the first `K` microbatches in flight of each stage in memory. All
    /// forwards are taken to be computed again.
    Offload(u32),
}

const NAMES: [&str; 9] = [
    "merge-bw",
    "unshard",
    "reduce-grad",
    "send-early",
    "send-recv",
    "wait-send",
    "defer-recv",
    "order-safe",
    "offload",
];

/// The communicator for which `order-safe` orders messages by default. A program that is sound on it is sound
/// on the others.
const STRICTEST: Communicator =
    Communicator { streams: Streams::Rank, sends: Sends::Rendezvous, groups: Groups::Single };

/// Returns the form of a pass with its settings, for an error message.
fn form(pass: &str) -> &'static str {
    match pass {
        "unshard" => "use `unshard`, `unshard=3`, `unshard=3:2`, `unshard=3:auto` or `unshard=3:1/2/3`",
        "reduce-grad" => "use `reduce-grad`, `reduce-grad=deferred` or `reduce-grad=at-end`",
        "send-early" => "use `send-early` or `send-early=keep-overlaps`",
        "wait-send" => "use `wait-send` or `wait-send=2`",
        "offload" => "use `offload` or `offload=1`",
        "order-safe" => {
            "use `order-safe`, or `order-safe=edge`, `pair` or `rank`, with `:eager`, `:eager=LIMIT/BYTES` or `:grouped`"
        }
        _ => "it has none",
    }
}

impl Pass {
    /// Reads passes separated by commas.
    ///
    /// # Errors
    /// At the first text that is not a pass.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, LowerError> {
        text.split(',').map(|pass| pass.trim().parse()).collect()
    }

    /// Returns the name, without the setting.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MergeBw => "merge-bw",
            Self::Unshard(_) => "unshard",
            Self::ReduceGrad(_) => "reduce-grad",
            Self::SendEarly(_) => "send-early",
            Self::SendRecv => "send-recv",
            Self::WaitSend(_) => "wait-send",
            Self::DeferRecv => "defer-recv",
            Self::OrderSafe(_) => "order-safe",
            Self::Offload(_) => "offload",
        }
    }

    fn run(&self, program: Program) -> Result<Program, LowerError> {
        Ok(match self {
            Self::MergeBw => merge_bw(program),
            Self::Unshard(config) => unshard(program, config)?,
            Self::ReduceGrad(wait) => reduce_grad(program, *wait),
            Self::SendEarly(overlaps) => send_early(program, *overlaps),
            Self::SendRecv => send_recv(program)?,
            Self::WaitSend(None) => wait_send(program),
            Self::WaitSend(Some(budget)) => limit_sends(program, *budget)?,
            Self::DeferRecv => defer_recv(program),
            Self::OrderSafe(communicator) => order_safe(program, communicator)?,
            &Self::Offload(keep) => {
                offload(program, &OffloadConfig { keep, ..OffloadConfig::all(Recompute::Stage) })
            }
        })
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Unshard(UnshardConfig { window, lookahead: UnshardLookahead::Full, .. }) => {
                write!(f, "={window}")
            }
            Self::Unshard(UnshardConfig { window, lookahead, .. }) => write!(f, "={window}:{lookahead}"),
            Self::SendEarly(Overlaps::Keep) => f.write_str("=keep-overlaps"),
            Self::ReduceGrad(wait) if *wait != ReduceWait::default() => write!(f, "={wait}"),
            Self::WaitSend(Some(budget)) => write!(f, "={budget}"),
            Self::Offload(keep) if *keep > 0 => write!(f, "={keep}"),
            Self::OrderSafe(communicator) if *communicator != STRICTEST => write!(f, "={communicator}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for Pass {
    type Err = LowerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, setting) = match text.split_once('=') {
            Some((name, setting)) => (name, Some(setting)),
            None => (text, None),
        };
        let shortened = |text: &str| text.chars().take(64).collect::<String>();
        let Some(pass) = NAMES.into_iter().find(|&known| known == name) else {
            let (name, names) = (shortened(name), NAMES.join(", "));
            return Err(LowerError::Refused(format!("unknown pass `{name}`; the passes are {names}")));
        };
        with_setting(pass, setting).ok_or_else(|| {
            let setting = shortened(setting.unwrap_or_default());
            LowerError::Refused(format!("`{setting}` is not a setting of the pass `{pass}`; {}", form(pass)))
        })
    }
}

/// Returns the pass called `pass` with its setting; `None` if it does not have that setting.
fn with_setting(pass: &str, setting: Option<&str>) -> Option<Pass> {
    Some(match (pass, setting) {
        ("unshard", None) => Pass::Unshard(UnshardConfig::default()),
        ("unshard", Some(setting)) => Pass::Unshard(match setting.split_once(':') {
            Some((window, lookahead)) => UnshardConfig {
                window: window.parse().ok()?,
                lookahead: lookahead.parse().ok()?,
                frozen: false,
            },
            None => UnshardConfig { window: setting.parse().ok()?, ..UnshardConfig::default() },
        }),
        ("merge-bw", None) => Pass::MergeBw,
        ("send-early", None) => Pass::SendEarly(Overlaps::TakeApart),
        ("send-early", Some("keep-overlaps")) => Pass::SendEarly(Overlaps::Keep),
        ("reduce-grad", None) => Pass::ReduceGrad(ReduceWait::default()),
        ("reduce-grad", Some(place)) => {
            Pass::ReduceGrad(ReduceWait::ALL.into_iter().find(|wait| wait.name() == place)?)
        }
        ("send-recv", None) => Pass::SendRecv,
        ("defer-recv", None) => Pass::DeferRecv,
        ("order-safe", None) => Pass::OrderSafe(STRICTEST),
        ("order-safe", Some(communicator)) => Pass::OrderSafe(communicator.parse().ok()?),
        ("offload", None) => Pass::Offload(0),
        ("offload", Some(keep)) => Pass::Offload(keep.parse().ok()?),
        ("wait-send", None) => Pass::WaitSend(None),
        ("wait-send", Some(budget)) => Pass::WaitSend(Some(budget.parse().ok()?)),
        _ => return None,
    })
}

/// The input of a list of passes: the rows of a file, and sizes that the file may not determine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassInput {
    /// A row for each rank, at any level, with or without bubbles.
    pub rows: Vec<Vec<Option<Action>>>,
    /// The rank of each stage; `None` to infer it from the rows.
    pub stage_to_rank: Option<Vec<Rank>>,
    /// The number of microbatches; `None` to infer it from the rows.
    pub microbatches: Option<u32>,
}

/// Runs `passes` over rows, one after another. `wait-send` runs after `defer-recv`, because a limit of sends
/// depends on the places of the receives.
///
/// The first pass drops the bubbles. If it is `send-recv`, a rank skips a sweep for each bubble, so that the
/// order of messages follows the columns of the file.
///
/// # Errors
/// When the rows do not fit together, or a pass fails.
pub fn apply(input: PassInput, passes: &[Pass]) -> Result<Program, LowerError> {
    let PassInput { rows, stage_to_rank, microbatches } = input;
    let (placement, microbatches) = sizes(&rows, stage_to_rank, microbatches)?;
    let (mut program, rest) = match passes {
        [Pass::SendRecv, rest @ ..] => {
            let actions = rows.iter().flatten().flatten().count() as u64;
            check_sizes(&placement, microbatches, rows.len(), actions)?;
            (send_recv_cells(&placement, Numbering::of(microbatches), &rows)?, rest)
        }
        all => {
            let rows = rows.into_iter().map(|row| row.into_iter().flatten().collect()).collect();
            (Program::new(placement, microbatches, rows)?, all)
        }
    };
    let mut in_order: Vec<&Pass> = rest.iter().collect();
    let position = |name| rest.iter().position(|pass| pass.name() == name);
    if let (Some(wait), Some(defer)) = (position("wait-send"), position("defer-recv"))
        && wait < defer
    {
        in_order[wait..=defer].rotate_left(1);
    }
    for pass in in_order {
        program = pass.run(program)?;
    }
    Ok(program)
}

/// Returns the placement and the number of microbatches: as given, otherwise inferred from the rows.
fn sizes(
    rows: &[Vec<Option<Action>>],
    stage_to_rank: Option<Vec<Rank>>,
    microbatches: Option<u32>,
) -> Result<(Placement, u32), ScheduleError> {
    let parts = rows.iter().flatten().flatten().flat_map(|action| action.parts());
    let last = parts.filter_map(Action::microbatch).max();
    let (placement, inferred) = match stage_to_rank {
        Some(ranks) => (Placement::explicit(ranks)?, last.map_or(0, |last| last.get().saturating_add(1))),
        None => infer_sizes(rows.iter().map(|row| row.iter().copied().flatten()))?,
    };
    Ok((placement, microbatches.unwrap_or(inferred)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_rows, print_program};

    fn check(rows: &str, stage_to_rank: Option<&[u32]>, passes: &str, expected: Result<&str, &str>) {
        let rows = parse_rows(rows).expect("rows");
        let stage_to_rank = stage_to_rank.map(|ranks| ranks.iter().copied().map(Rank::new).collect());
        let passes = Pass::parse_list(passes).expect("passes");
        let found = apply(PassInput { rows, stage_to_rank, microbatches: None }, &passes)
            .map(|program| print_program(&program))
            .map_err(|error| error.to_string());
        assert_eq!(found.as_deref().map_err(String::as_str), expected);
    }

    fn check_error(pass: &str, message: &str) {
        assert_eq!(pass.parse::<Pass>().expect_err(pass).to_string(), message);
    }

    #[test]
    fn passes_round_trip() {
        let all = "unshard=3,unshard=5:2,unshard=3:auto,unshard=3:1/2,merge-bw,send-early,send-early=keep-overlaps,reduce-grad,reduce-grad=deferred,reduce-grad=at-end,send-recv,defer-recv,wait-send,wait-send=2,order-safe,order-safe=buffered,order-safe=pair:eager,order-safe=rank:eager=8/9/8:grouped,offload,offload=2";
        let printed: Vec<String> =
            Pass::parse_list(all).expect("passes").iter().map(ToString::to_string).collect();
        assert_eq!(printed.join(","), all);
        assert_eq!("unshard".parse(), Ok(Pass::Unshard(UnshardConfig::default())));
    }

    #[test]
    fn mistakes_are_named() {
        check_error(
            "sendrecv",
            "unknown pass `sendrecv`; the passes are merge-bw, unshard, reduce-grad, send-early, send-recv, wait-send, defer-recv, order-safe, offload",
        );
        check_error(
            "wait-send=0",
            "`0` is not a setting of the pass `wait-send`; use `wait-send` or `wait-send=2`",
        );
        check_error(
            "unshard=3:some",
            "`3:some` is not a setting of the pass `unshard`; use `unshard`, `unshard=3`, `unshard=3:2`, `unshard=3:auto` \
             or `unshard=3:1/2/3`",
        );
        check_error(
            "order-safe=nccl",
            "`nccl` is not a setting of the pass `order-safe`; use `order-safe`, or `order-safe=edge`, `pair` or `rank`, \
             with `:eager`, `:eager=LIMIT/BYTES` or `:grouped`",
        );
        check_error("merge-bw=1", "`1` is not a setting of the pass `merge-bw`; it has none");
    }

    #[test]
    fn bubbles_are_turns_for_messages_alone() {
        check(
            "0F0,0F1\n,,1F0,1F1\n",
            None,
            "send-recv",
            Ok("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n"),
        );
        check(
            "0F0,0F1\n,,1F0,1F1\n",
            None,
            "merge-bw,send-recv",
            Ok("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"),
        );
    }

    #[test]
    fn a_placement_may_name_stages_without_actions() {
        check("0F0\n", Some(&[0, 0]), "unshard", Ok("0UNSHARD,0F0,0RESHARD\n"));
        check("0F0\n", Some(&[0, 1]), "unshard", Err("1 row for 2 ranks; give one row to each rank"));
    }

    #[test]
    fn messages_are_not_added_twice() {
        let twice = "the program already communicates; add sends and receives only once";
        check("0F0,0SEND_F0\n1RECV_F0,1F0\n", None, "send-recv", Err(twice));
    }
}
