//! The settings with which a schedule is lowered for training. The command line, benches, tests and users
//! share them.
//!
//! Rules, in the order of the passes: (1) the backwards of frozen stages are removed as far as nothing needs
//! them ([`drop_frozen`](super::drop_frozen())), and if weights are delayed, each rank gets an order in which
//! batches overlap; (2) if parameters are sharded over the replicas, they are gathered before their stage computes,
//! and frozen matrices in a file are read before it; (3) if there are several replicas, the gradients of a stage are
//! reduced as soon as they are complete, and waited for at the end of the row, unless the caller chooses another
//! place; (4) input gradients leave their rank before it computes the weight gradients of the same backward
//! ([`send_early`](super::send_early)); (5) sends and receives are added; (6) if forwards are computed again, the
//! tensors that they keep may leave memory ([`offload`](super::offload())).

use std::num::NonZeroU32;

use crate::costs::Costs;
use crate::level::Level;
use crate::lower::error::LowerError;
use crate::lower::offload::OffloadConfig;
use crate::lower::passes::{LowerConfig, lower};
use crate::lower::reduce_grad::ReduceWait;
use crate::lower::source::Lowered;
use crate::lower::unshard::{UnshardConfig, UnshardLookahead};
use crate::schedule::Schedule;
use crate::trained::TrainedStages;
use crate::validate::ValidatedProgram;

/// How a schedule is lowered for training.
///
/// ```
/// use pipewright_schedule::lower::{TrainingLowering, for_training};
/// use pipewright_schedule::{ScheduleSpec, csv, generate};
/// let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() })?;
/// let program = for_training(&schedule, &TrainingLowering::default())?;
/// let rank_1 = "1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1W0,1F1,1I1,1SEND_B1,1W1";
/// assert_eq!(csv::print_program(program.as_program()).lines().nth(1), Some(rank_1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainingLowering {
    /// The number of replicas of the pipeline. Each of them runs the program.
    pub replicas: u32,
    /// How many stages of a rank are gathered at once, if parameters are sharded over the replicas; `None` if
    /// every replica holds all parameters. Ignored with one replica.
    pub unshard_window: Option<NonZeroU32>,
    /// How many of a rank's next stages are fetched before they are needed, if parameters are sharded.
    pub unshard_lookahead: UnshardLookahead,
    /// How many stages of a rank are in memory at once, if the frozen matrices of each stage are read from a file before it
    /// computes; `None` if they stay in memory. Parameters that are sharded have their own window.
    pub stream_window: Option<NonZeroU32>,
    /// Where a rank waits for the reduction of a stage's gradients. Ignored with one replica.
    pub reduce_wait: ReduceWait,
    /// Whether an overlap stays one action. Set it if a hook runs both halves together;
    /// [`TrainingLowering::with_exchanges`] sets it for exchanges. Otherwise a rank runs the halves one after
    /// the other, so an overlap becomes its forward and its backward, and the forward's output leaves before
    /// the backward begins.
    pub keep_overlaps: bool,
    /// The stages that are trained.
    pub trained: TrainedStages,
    /// The forwards whose kept tensors leave memory; `None` if all stay.
    pub offload: Option<OffloadConfig>,
    /// Whether batches overlap, because weights are delayed by one update ([`LowerConfig::delayed`]).
    pub delayed: bool,
}

impl Default for TrainingLowering {
    /// One replica, and overlaps taken apart. With more replicas, waits for reductions at the end of the row.
    fn default() -> Self {
        Self {
            replicas: 1,
            unshard_window: None,
            unshard_lookahead: UnshardLookahead::Full,
            stream_window: None,
            reduce_wait: ReduceWait::AtEnd,
            keep_overlaps: false,
            trained: TrainedStages::ALL,
            offload: None,
            delayed: false,
        }
    }
}

impl TrainingLowering {
    /// Returns these settings for ranks that exchange tokens inside of their stages, or do not.
    ///
    /// Runs, predictions and plans decide here which overlaps stay whole. If ranks exchange tokens, a rank
    /// computes one half of an overlap while the other half waits for its exchange, so all overlaps stay whole,
    /// also those of stages without exchanges. Otherwise none does. In either case, an overlap is taken apart
    /// if the stage of its backward has no trained parameters ([`drop_frozen`](super::drop_frozen())).
    ///
    /// A run exchanges tokens if several replicas hold its experts together. [`Costs::has_exchanges`] and
    /// [`Profile::has_exchanges`](crate::profile::Profile::has_exchanges) say it for predictions.
    #[must_use]
    pub fn with_exchanges(self, has_exchanges: bool) -> Self {
        Self { keep_overlaps: has_exchanges, ..self }
    }
}

/// Lowers `schedule` to the program that each replica runs in training, and proves it sound.
///
/// The level of the program is [`Level::Full`] if parameters are sharded, otherwise [`Level::Comms`].
///
/// # Errors
/// When the schedule is unsound.
pub fn for_training(schedule: &Schedule, config: &TrainingLowering) -> Result<ValidatedProgram, LowerError> {
    let passes = LowerConfig::from(config.clone());
    Ok(Lowered::by(&passes, lower(schedule, &passes)?).validated()?)
}

impl LowerConfig {
    /// Returns the passes of the program that one replica runs in training at `costs`.
    pub fn training_at(costs: &Costs) -> Self {
        TrainingLowering::default().with_exchanges(costs.has_exchanges()).into()
    }
}

impl From<TrainingLowering> for LowerConfig {
    /// Returns the passes of [`for_training`], for callers that change some of them.
    fn from(config: TrainingLowering) -> Self {
        let has_replicas = config.replicas > 1;
        let window = config.unshard_window.filter(|_| has_replicas);
        let lookahead = config.unshard_lookahead;
        let unshard = window.map(|window| UnshardConfig { window, lookahead, frozen: false });
        let stream = config.stream_window.map(|window| UnshardConfig {
            window,
            // Programs that reduce gradients gather for all actions (`validate/sharding.rs`).
            frozen: !has_replicas,
            ..UnshardConfig::default()
        });
        Self {
            trained: config.trained,
            delayed: config.delayed,
            offload: config.offload,
            send_early: true,
            keep_overlaps: config.keep_overlaps,
            reduce_grad: has_replicas.then_some(config.reduce_wait),
            unshard: unshard.or(stream),
            ..Self::from(Level::Comms)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::{parse_schedule, print_program};

    fn check(config: TrainingLowering, rows: &str, level: Level, expected: &str) {
        let schedule = parse_schedule(rows).expect("a schedule");
        let program = for_training(&schedule, &config).expect("a sound program");
        assert_eq!((program.level(), print_program(program.as_program()).as_str()), (level, expected));
    }

    #[test]
    fn stages_that_stream_are_read_without_replicas() {
        let stream = TrainingLowering { stream_window: NonZeroU32::new(2), ..TrainingLowering::default() };
        let rows = "0F0,0F1,1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1,0B0,0B1\n";
        let program = "0UNSHARD,1UNSHARD,0F0,0F1,0RESHARD,2UNSHARD,1F0,1F1,2F0,2F1,2B0,2B1,2RESHARD,0UNSHARD,1B0,1B1,\
                       1RESHARD,0B0,0B1,0RESHARD\n";
        check(stream.clone(), rows, Level::Comms, program);
        let replicas = TrainingLowering { replicas: 2, ..stream };
        let program = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,0WAIT_REDUCE_GRAD\n";
        check(replicas, "0F0,0B0\n", Level::Full, program);
    }

    #[test]
    fn replicas_reduce_and_shards_are_gathered() {
        let replicas = TrainingLowering { replicas: 2, ..TrainingLowering::default() };
        check(
            replicas.clone(),
            "0F0,1F0,1B0,0B0\n",
            Level::Comms,
            "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n",
        );
        let deferred = TrainingLowering { reduce_wait: ReduceWait::Deferred, ..replicas.clone() };
        check(
            deferred,
            "0F0,1F0,1B0,0B0\n",
            Level::Comms,
            "0F0,1F0,1B0,1REDUCE_GRAD,0B0,1WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n",
        );
        let sharded = TrainingLowering { unshard_window: NonZeroU32::new(1), ..replicas };
        check(
            sharded.clone(),
            "0F0,0B0\n",
            Level::Full,
            "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,0WAIT_REDUCE_GRAD\n",
        );
        check(TrainingLowering { replicas: 1, ..sharded.clone() }, "0F0,0B0\n", Level::Comms, "0F0,0B0\n");
        let ahead = TrainingLowering {
            unshard_window: NonZeroU32::new(2),
            stream_window: NonZeroU32::new(5),
            unshard_lookahead: UnshardLookahead::Stages(NonZeroU32::MIN),
            ..sharded
        };
        check(
            ahead,
            "0F0,1F0,1B0,0B0\n",
            Level::Full,
            "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD,1WAIT_REDUCE_GRAD,\
             0WAIT_REDUCE_GRAD\n",
        );
    }

    #[test]
    fn no_gradient_is_sent_to_a_stage_that_runs_forward_only() {
        let frozen = |trained: &[bool]| TrainingLowering {
            trained: TrainedStages::of(trained),
            ..TrainingLowering::default()
        };
        let rows = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
        let above = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1B0,1F1,1B1\n";
        check(frozen(&[false, true]), rows, Level::Comms, above);
        let below = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                     1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1\n";
        check(frozen(&[true, false]), rows, Level::Comms, below);
        let sharded = TrainingLowering {
            replicas: 2,
            unshard_window: NonZeroU32::new(1),
            ..frozen(&[false, true, false])
        };
        check(
            sharded,
            "0F0,1F0,2F0,2B0,1B0,0B0\n",
            Level::Full,
            "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,2UNSHARD,2F0,2I0,2RESHARD,1UNSHARD,1B0,1REDUCE_GRAD,\
             1RESHARD,1WAIT_REDUCE_GRAD\n",
        );
    }

    #[test]
    fn overlaps_stay_if_asked() {
        let rows = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,1B1,1F2,1B2\n";
        let schedule = parse_schedule(rows).expect("a schedule");
        let row_1 = |keep_overlaps| {
            let config = TrainingLowering { keep_overlaps, ..TrainingLowering::default() };
            let program = for_training(&schedule, &config).expect("a sound program");
            print_program(program.as_program()).lines().nth(1).map(str::to_owned)
        };
        let apart =
            "1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1I0,1SEND_B0,1W0,1I1,1SEND_B1,1W1,1F2,1I2,1SEND_B2,1W2";
        assert_eq!(row_1(false).as_deref(), Some(apart));
        let kept = "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1RECV_F2,1I1,1SEND_B1,1W1,1F2,1I2,1SEND_B2,1W2";
        assert_eq!(row_1(true).as_deref(), Some(kept));
    }

    #[test]
    fn an_unsound_schedule_is_refused() {
        let schedule = parse_schedule("0B0,0F0\n").expect("a schedule");
        assert!(for_training(&schedule, &TrainingLowering::default()).is_err());
    }
}
