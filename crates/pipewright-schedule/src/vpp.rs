//! Tables of interleaved (virtual) pipelines: the stages of each rank, the order of microbatches and chunks,
//! and the number of forwards before the first backward.
//!
//! They follow the rules of Megatron-Core. [`mod@crate::generate`] makes whole schedules. With `p` ranks, `v`
//! chunks, `m` microbatches and groups of `g` microbatches:
//!
//! - stage ids: chunk `c` of rank `r` is stage `c * p + r`;
//! - table: the microbatches are taken in groups of `g` (the last may be short), each group through all
//!   chunks before the next group begins;
//! - warm-up: `2 (p - r - 1) + (v - 1) g` forwards, at most `m v`; forward-only, all.
//!
//! ```
//! use pipewright_schedule::vpp::{VirtualPipeline, tables};
//! let pipeline = VirtualPipeline { ranks: 2, chunks: 2, microbatches: 3, group_size: None };
//! let tables = tables(&pipeline)?;
//! assert_eq!(tables.stage_ids, [[0, 2], [1, 3]]);
//! assert_eq!(tables.table, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]);
//! assert_eq!(tables.warmup, [(4, 2, false), (2, 4, false)]);
//! # Ok::<(), pipewright_schedule::vpp::VppError>(())
//! ```

use serde::Serialize;
use thiserror::Error;

use crate::placement::MAX_STAGES;
use crate::words::counted;

/// The largest number of entries in a table.
const MAX_ENTRIES: u64 = 1 << 24;

/// The size of an interleaved pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualPipeline {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of chunks, that is of stages on each rank.
    pub chunks: u32,
    /// The number of microbatches in a step.
    pub microbatches: u32,
    /// The number of microbatches that a chunk runs before the next chunk; `None` for the number of ranks.
    pub group_size: Option<u32>,
}

/// The tables of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VppTables {
    /// For each rank, its stages by chunk.
    pub stage_ids: Vec<Vec<u32>>,
    /// The microbatch and the chunk of each forward of a rank, in order; the same on every rank.
    pub table: Vec<(u32, u32)>,
    /// For each rank, the forwards before its first backward, the forwards after that, and whether all
    /// forwards come first.
    pub warmup: Vec<(u64, u64, bool)>,
    /// The same as `warmup`, for a step without backwards.
    pub warmup_forward_only: Vec<(u64, u64, bool)>,
}

/// The errors of making tables.
#[derive(Clone, Copy, PartialEq, Eq, Error)]
pub enum VppError {
    /// A number is 0 that must be at least 1.
    #[error("{what} is 0; use at least 1")]
    Zero {
        /// The name of the number.
        what: &'static str,
    },
    /// A table would be too large.
    #[error(
        "{}, {} and {} make tables too large; {}",
        counted(*.ranks, "rank"), counted(*.chunks, "chunk"), counted(*.microbatches, "microbatch"),
        smaller(*.ranks, *.chunks, *.microbatches)
    )]
    TooLarge {
        /// The number of ranks.
        ranks: u32,
        /// The number of chunks.
        chunks: u32,
        /// The number of microbatches.
        microbatches: u32,
    },
}

crate::error_text::message_as_debug!(VppError);

/// Makes the tables of `pipeline`.
///
/// # Errors
/// When a number is zero, or a table would be too large.
pub fn tables(pipeline: &VirtualPipeline) -> Result<VppTables, VppError> {
    let &VirtualPipeline { ranks, chunks, microbatches, group_size } = pipeline;
    let group = group_size.unwrap_or(ranks);
    let numbers =
        [("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches), ("group_size", group)];
    if let Some((what, _)) = numbers.into_iter().find(|&(_, number)| number == 0) {
        return Err(VppError::Zero { what });
    }
    if is_too_large(ranks, chunks, microbatches) {
        return Err(VppError::TooLarge { ranks, chunks, microbatches });
    }
    let all = u64::from(chunks) * u64::from(microbatches);
    let split = |warmup: u64| (warmup.min(all), all - warmup.min(all), warmup >= all);
    Ok(VppTables {
        stage_ids: (0..ranks).map(|rank| (0..chunks).map(|chunk| chunk * ranks + rank).collect()).collect(),
        table: table(microbatches, chunks, group),
        warmup: (0..ranks).map(|rank| split(warmup(ranks, rank, chunks, group))).collect(),
        warmup_forward_only: (0..ranks).map(|_| split(all)).collect(),
    })
}

fn is_too_large(ranks: u32, chunks: u32, microbatches: u32) -> bool {
    u64::from(ranks) * u64::from(chunks) > MAX_STAGES
        || u64::from(chunks) * u64::from(microbatches) > MAX_ENTRIES
}

/// Returns the advice for tables that are too large: fewer of each number that can make them small enough
/// alone. If none can, fewer of all.
fn smaller(ranks: u32, chunks: u32, microbatches: u32) -> String {
    let most =
        |limit: u64, divisor: u32| u32::try_from(limit / u64::from(divisor.max(1))).unwrap_or(u32::MAX);
    let most_ranks = most(MAX_STAGES, chunks).min(ranks);
    let most_microbatches = most(MAX_ENTRIES, chunks).min(microbatches);
    let most_chunks = most(MAX_STAGES, ranks).min(most(MAX_ENTRIES, microbatches)).min(chunks);
    let choices = [
        (most_ranks, chunks, microbatches),
        (ranks, chunks, most_microbatches),
        (ranks, most_chunks, microbatches),
        (most_ranks, chunks, most_microbatches),
        (most(MAX_STAGES, 1).min(ranks), 1, most(MAX_ENTRIES, 1).min(microbatches)),
    ];
    let fits = |&(ranks, chunks, microbatches): &(u32, u32, u32)| {
        ranks.min(chunks).min(microbatches) > 0 && !is_too_large(ranks, chunks, microbatches)
    };
    let (most_ranks, most_chunks, most_microbatches) = choices.into_iter().find(fits).unwrap_or((1, 1, 1));
    let changes = [
        (most_ranks, ranks, "rank"),
        (most_chunks, chunks, "chunk"),
        (most_microbatches, microbatches, "microbatch"),
    ];
    let changes = changes.into_iter().filter(|(most, given, _)| most < given);
    let words: Vec<String> = changes.map(|(most, _, noun)| counted(most, noun)).collect();
    format!("use at most {}", words.join(" and "))
}

fn table(microbatches: u32, chunks: u32, group: u32) -> Vec<(u32, u32)> {
    let groups = (0..microbatches).step_by(group as usize);
    let group_of = |first: u32| {
        let end = first.saturating_add(group).min(microbatches);
        (0..chunks).flat_map(move |chunk| (first..end).map(move |microbatch| (microbatch, chunk)))
    };
    groups.flat_map(group_of).collect()
}

/// Returns the number of forwards of `rank` before its first backward, if there are so many.
fn warmup(ranks: u32, rank: u32, chunks: u32, group: u32) -> u64 {
    2 * u64::from(ranks - rank - 1) + u64::from(chunks - 1) * u64::from(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_error(ranks: u32, chunks: u32, microbatches: u32, group_size: Option<u32>, message: &str) {
        let found = tables(&VirtualPipeline { ranks, chunks, microbatches, group_size });
        assert_eq!(found.map_err(|error| error.to_string()), Err(message.to_owned()));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        check_error(0, 1, 1, None, "ranks is 0; use at least 1");
        check_error(1, 1, 1, Some(0), "group_size is 0; use at least 1");
        check_error(
            4_000_000_000,
            1,
            1,
            None,
            "4000000000 ranks, 1 chunk and 1 microbatch make tables too large; use at most 16777216 ranks",
        );
    }

    #[test]
    fn a_group_may_be_larger_than_the_batch() {
        assert_eq!(table(2, 2, u32::MAX), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }
}
