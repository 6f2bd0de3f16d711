//! The errors of generating a schedule.

use std::fmt;

use thiserror::Error;

use crate::costs::CostsError;
use crate::generate::advice::{Advice, Alternatives};
use crate::generate::settings::Setting;
use crate::ids::StageIndex;
use crate::overlap::{MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE};
use crate::placement::MAX_STAGES;
use crate::slices::Slices;
use crate::words::counted;

/// The largest number of cells of a generated schedule, idle cells included. Lowering about triples it, and
/// the result must fit into the memory of a large machine.
pub const MAX_COMPUTE_ACTIONS: u128 = 1 << 28;

/// A schedule that does not exist at a size or with a setting, and what to use instead.
///
/// Each piece of advice is a size with settings that the schedule accepts: it was tried.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{}{kind}{}", of_replicas(*.replicas), alternatives(kind, advice, *.replicas))]
pub struct GenerateError {
    /// The problem.
    pub kind: GenerateErrorKind,
    /// The advice, the smallest change first. If there are several, one is enough.
    pub advice: Vec<Advice>,
    /// The number of replicas that share the microbatches. The problem counts the microbatches of one of
    /// them; the message advises numbers for all.
    pub replicas: u32,
}

/// The kinds of errors of generating a schedule.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum GenerateErrorKind {
    /// There is no schedule of this name.
    #[error("unknown schedule `{name}`; {}", suggest(.suggestion, .known))]
    UnknownSchedule {
        /// The name, shortened if it is very long.
        name: String,
        /// The nearest known name, if one is similar.
        suggestion: Option<&'static str>,
        /// The names of all schedules.
        known: Vec<&'static str>,
    },
    /// There is no rank or no stage.
    #[error("{} with {} each have no stage", counted(*.ranks, "rank"), counted(*.stages_per_rank, "stage"))]
    NoStages {
        /// The requested number of ranks.
        ranks: u32,
        /// The number of stages on each rank.
        stages_per_rank: u32,
    },
    /// There is nothing to run.
    #[error("a schedule needs at least one microbatch")]
    NoMicrobatches,
    /// A model has fewer layers than the schedule has stages.
    #[error(
        "{} cannot fill {}; use at most {}, not {} with {} each",
        counted(*.layers, "layer"), counted(*.stages, "stage"), counted(*.layers, "stage"),
        counted(*.ranks, "rank"), counted(*.stages_per_rank, "stage")
    )]
    TooManyStages {
        /// The number of ranks.
        ranks: u32,
        /// The number of stages on each rank.
        stages_per_rank: u32,
        /// The number of stages.
        stages: u64,
        /// The number of layers.
        layers: u32,
    },
    /// More cells than [`MAX_COMPUTE_ACTIONS`], or more stages than a placement holds.
    #[error(
        "{} and {} are too many: a schedule has at most {MAX_STAGES} stages and {MAX_COMPUTE_ACTIONS} actions",
        counted(*.stages, "stage"), sliced(*.microbatches, *.slices)
    )]
    TooLarge {
        /// The number of stages.
        stages: u64,
        /// The number of microbatches.
        microbatches: u32,
        /// The number of slices of each microbatch.
        slices: Slices,
    },
    /// There are more stages or microbatches than an overlap can name.
    #[error(
        "`{schedule}` runs at most {} stages and {} microbatches, not {stages} and {microbatches}",
        MAX_OVERLAPPED_STAGE + 1,
        MAX_OVERLAPPED_MICROBATCH + 1
    )]
    TooManyToOverlap {
        /// The schedule.
        schedule: &'static str,
        /// The number of stages.
        stages: u32,
        /// The number of microbatches.
        microbatches: u32,
    },
    /// The search would take too long.
    #[error(
        "`{schedule}` tries out a dozen orders, which takes too long for {} and {}",
        counted(*.stages, "stage"), counted(*.microbatches, "microbatch")
    )]
    TooLargeToSearch {
        /// The schedule.
        schedule: &'static str,
        /// The number of stages.
        stages: u32,
        /// The number of microbatches.
        microbatches: u32,
        /// The most actions, forwards and backwards, of a search.
        most_actions: u64,
        /// A similar schedule that does not search.
        other: &'static str,
    },
    /// The order of the schedule does not exist for so few microbatches.
    #[error(
        "`{schedule}` needs at least as many microbatches as its {}, not {microbatches}", counted(*.stages, "stage")
    )]
    TooFewMicrobatches {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of microbatches.
        microbatches: u32,
        /// The number of stages.
        stages: u32,
    },
    /// The schedule needs another number of stages on each rank.
    #[error("`{schedule}` runs {} on each rank, not {requested}", counted(*.supported, "stage"))]
    StagesPerRank {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of stages on each rank.
        requested: u32,
        /// The number that the schedule runs.
        supported: u32,
    },
    /// The schedule runs down and up the ranks, so every rank has an even number of stages.
    #[error("`{schedule}` runs an even number of stages on each rank, not {requested}")]
    OddStagesPerRank {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of stages on each rank.
        requested: u32,
    },
    /// The microbatches cannot be divided into rounds of equal size.
    #[error(
        "`{schedule}` runs {} in {} of equal size, and {rounds} does not divide {microbatches}",
        counted(*.microbatches, "microbatch"), counted(*.rounds, "round")
    )]
    UnevenRounds {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of microbatches.
        microbatches: u32,
        /// The number of rounds: the number of microbatches divided by the number of ranks.
        rounds: u32,
    },
    /// The group size is out of range. A group is the microbatches that a chunk runs before the next chunk.
    #[error(
        "groups of {} are not possible with {} and {}: the group size is {}",
        counted(*.group_size, "microbatch"), counted(*.ranks, "rank"), counted(*.microbatches, "microbatch"),
        range(*.smallest, *.largest)
    )]
    GroupSize {
        /// The requested group size.
        group_size: u32,
        /// The number of ranks.
        ranks: u32,
        /// The number of microbatches.
        microbatches: u32,
        /// The smallest group size.
        smallest: u32,
        /// The largest group size.
        largest: u32,
    },
    /// The microbatches cannot be divided into groups of equal size.
    #[error("{} cannot be divided into groups of {group_size}", counted(*.microbatches, "microbatch"))]
    UnevenGroups {
        /// The requested number of microbatches.
        microbatches: u32,
        /// The size of a group.
        group_size: u32,
    },
    /// A setting that the schedule does not have.
    #[error("`{schedule}` has no setting `{setting}`")]
    UnusedSetting {
        /// The schedule.
        schedule: &'static str,
        /// The setting.
        setting: Setting,
    },
    /// A list with one entry for each stage has the wrong length.
    #[error(
        "the setting `{setting}` has {} for {}; give one to each stage",
        counted(*.found, "entry"), counted(*.stages, "stage")
    )]
    EntryCount {
        /// The setting.
        setting: Setting,
        /// The number of entries.
        found: usize,
        /// The number of stages.
        stages: u32,
    },
    /// The memory limit of a stage is 0.
    #[error("the memory limit of stage {stage} is 0 microbatches, and a stage needs room for one")]
    NoMemory {
        /// The stage.
        stage: StageIndex,
    },
    /// The costs do not fit the stages, or are out of range.
    #[error(transparent)]
    Costs(#[from] CostsError),
}

crate::error_text::message_as_debug!(GenerateErrorKind);

crate::error_text::message_as_debug!(GenerateError);

impl From<GenerateErrorKind> for GenerateError {
    fn from(kind: GenerateErrorKind) -> Self {
        Self { kind, advice: Vec::new(), replicas: 1 }
    }
}

impl From<CostsError> for GenerateError {
    fn from(error: CostsError) -> Self {
        GenerateErrorKind::from(error).into()
    }
}

/// Returns the end of a message: the advice, unless there is none.
fn alternatives<'a>(kind: &GenerateErrorKind, advice: &'a [Advice], replicas: u32) -> Alternatives<'a> {
    // Its message already says what is too much.
    let before = if matches!(kind, GenerateErrorKind::TooManyStages { .. }) { ", so " } else { "; " };
    Alternatives { advice, replicas, before }
}

/// Returns the beginning of a message that counts one of several replicas.
fn of_replicas(replicas: u32) -> impl fmt::Display {
    if replicas > 1 { format!("in each of {replicas} replicas, ") } else { String::new() }
}

/// Returns a number of microbatches and of their slices; only the former if microbatches are not cut.
fn sliced(microbatches: u32, slices: Slices) -> String {
    let whole = counted(microbatches, "microbatch");
    if slices.is_one() { whole } else { format!("{whole} of {slices} slices") }
}

fn range(smallest: u32, largest: u32) -> String {
    if smallest == largest { smallest.to_string() } else { format!("from {smallest} to {largest}") }
}

/// Returns the end of the message for an unknown schedule.
fn suggest(suggestion: &Option<&'static str>, known: &[&str]) -> String {
    match suggestion {
        Some(name) => format!("did you mean `{name}`?"),
        None => format!("the schedules are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Limits, PerStage, ScheduleSpec, catalogue, generate, generate_within};

    /// Checks the message for a size of ranks, stages on each rank and microbatches.
    fn check(name: &str, (ranks, stages_per_rank, microbatches): (u32, Option<u32>, u32), message: &str) {
        let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        check_spec(name, &spec, Limits::default(), message);
    }

    fn check_spec(name: &str, spec: &ScheduleSpec, limits: Limits, message: &str) {
        let error = generate_within(name, spec, limits).expect_err(name);
        assert_eq!(error.to_string(), message, "{name} {spec:?}");
    }

    #[test]
    fn empty_sizes_are_refused() {
        check("gpipe", (0, None, 4), "0 ranks with 1 stage each have no stage; use 1 rank");
        check("hanayo", (0, None, 4), "0 ranks with 2 stages each have no stage; use 1 rank");
        let stage = "4 ranks with 0 stages each have no stage; use";
        check("loopedbfs", (4, Some(0), 4), &format!("{stage} 1 stage on each rank"));
        check("hanayo", (4, Some(0), 4), &format!("{stage} 2 stages on each rank"));
        let none = "a schedule needs at least one microbatch; use";
        check("1f1b", (4, None, 0), &format!("{none} 1 microbatch"));
        check("dualpipev", (4, None, 0), &format!("{none} 8 microbatches"));
    }

    #[test]
    fn numbers_of_stages_that_a_schedule_has_not_are_refused() {
        check("gpipe", (4, Some(2), 4), "`gpipe` runs 1 stage on each rank, not 2; use 1 stage on each rank");
        check(
            "v-min",
            (4, Some(3), 8),
            "`v-min` runs 2 stages on each rank, not 3; use 2 stages on each rank",
        );
        let odd = "`hanayo` runs an even number of stages on each rank, not";
        check(
            "hanayo",
            (4, Some(3), 4),
            &format!("{odd} 3; use 4 stages on each rank, or use 2 stages on each rank"),
        );
        check("hanayo", (1, Some(1), 1), &format!("{odd} 1; use 2 stages on each rank"));
        check(
            "dualpipev",
            (2, Some(1), 3),
            "`dualpipev` runs 2 stages on each rank, not 1; use 2 stages on each rank and 4 microbatches",
        );
    }

    #[test]
    fn a_model_with_too_few_layers_is_the_first_cause() {
        let spec = ScheduleSpec { ranks: 9, microbatches: 8, ..ScheduleSpec::default() };
        let limits = Limits { layers: Some(6), ..Limits::default() };
        let message = "6 layers cannot fill 9 stages; use at most 6 stages, not 9 ranks with 1 stage each, so use 6 ranks";
        check_spec("1f1b", &spec, limits, message);
        let message = "6 layers cannot fill 18 stages; use at most 6 stages, not 9 ranks with 2 stages each, so use 3 ranks";
        check_spec("dualpipev", &spec, limits, message);
    }

    #[test]
    fn numbers_are_those_of_all_replicas() {
        let spec = ScheduleSpec { ranks: 4, microbatches: 7, ..ScheduleSpec::default() };
        let limits = Limits { replicas: 3, ..Limits::default() };
        let message = "in each of 3 replicas, `dualpipev` needs at least as many microbatches as its 8 stages, not 7; use \
                       24 microbatches";
        check_spec("dualpipev", &spec, limits, message);
    }

    #[test]
    fn uneven_rounds_and_groups_are_refused() {
        let message = "`interleaved1f1b` runs 7 microbatches in 3 rounds of equal size, and 3 does not divide 7; use 6 \
                       microbatches, or use 8 microbatches, or use a group size of 2";
        check("interleaved1f1b", (2, None, 7), message);
        let spec = ScheduleSpec { ranks: 4, microbatches: 9, group_size: Some(3), ..ScheduleSpec::default() };
        let range =
            "groups of 3 microbatches are not possible with 4 ranks and 9 microbatches: the group size is";
        check_spec(
            "interleaved1f1b",
            &spec,
            Limits::default(),
            &format!("{range} from 4 to 9; use a group size of 4"),
        );
        let spec = ScheduleSpec { microbatches: 10, ..spec };
        let message =
            "10 microbatches cannot be divided into groups of 3; use 9 microbatches, or use 12 microbatches";
        check_spec("group-interleaved", &spec, Limits::default(), message);
    }

    #[test]
    fn absurd_sizes_are_refused_before_allocating() {
        for generator in catalogue() {
            for (ranks, stages_per_rank, microbatches) in [
                (4_000_000_000, None, 4_000_000_000),
                (4_000_000_000, None, 1),
                (4_000_000_000, Some(4_000_000_000), 4_000_000_000),
                (1, Some(4_000_000_000), 1),
                (1, None, 4_000_000_000),
            ] {
                let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
                let error = generate(generator.name, &spec).expect_err(generator.name);
                let expected = matches!(
                    error.kind,
                    GenerateErrorKind::TooLarge { .. } | GenerateErrorKind::StagesPerRank { .. }
                );
                // Its microbatches divide into groups of at least half as many as there are ranks.
                let has_advice = !error.advice.is_empty() || generator.name == "group-interleaved";
                assert!(expected && has_advice, "{} {spec:?}: {error}", generator.name);
            }
        }
    }

    #[test]
    fn sizes_that_are_too_large_have_a_largest_one() {
        let most = "a schedule has at most 16777216 stages and 268435456 actions; use";
        // Idle cells count: each row of a million ranks with one microbatch would have two million of them.
        check(
            "loopedbfs",
            (1_000_000, None, 1),
            &format!("2000000 stages and 1 microbatch are too many: {most} 4729 ranks"),
        );
        check(
            "gpipe",
            (1024, None, 1_000_000),
            &format!(
                "1024 stages and 1000000 microbatches are too many: {most} 87381 microbatches, or use 89 ranks"
            ),
        );
    }

    #[test]
    fn long_searches_are_refused() {
        let message = "`zb-greedy` tries out a dozen orders, which takes too long for 1024 stages and 5462 microbatches; use \
                       5461 microbatches, or use 1023 ranks, or use `zb-h1`";
        check("zb-greedy", (1024, None, 5462), message);
    }

    #[test]
    fn more_than_an_overlap_can_name_is_refused() {
        let limit = "`dualpipev` runs at most 4096 stages and 65536 microbatches, not";
        check("dualpipev", (2, None, 65_537), &format!("{limit} 4 and 65537; use 65536 microbatches"));
        check("dualpipev", (2049, None, 4_098), &format!("{limit} 4098 and 4098; use 2048 ranks"));
        let spec = ScheduleSpec { ranks: 1, microbatches: 65_536, ..ScheduleSpec::default() };
        assert!(generate("dualpipev", &spec).is_ok());
    }

    #[test]
    fn memory_limits_of_nothing_are_refused() {
        let memory_limit = Some(PerStage::Each(vec![2, 0]));
        let spec = ScheduleSpec { ranks: 2, microbatches: 4, memory_limit, ..ScheduleSpec::default() };
        let message = "the memory limit of stage 1 is 0 microbatches, and a stage needs room for one; use a memory limit of \
                       1 microbatch";
        check_spec("zb-greedy", &spec, Limits::default(), message);
    }
}
