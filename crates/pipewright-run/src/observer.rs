//! [`Observer`]: what a run reports while it works. A library never prints, so the caller decides what to show.

use std::io;
use std::path::Path;

use pipewright::pipeline::UndeferredParameter;
use pipewright::train::{CheckpointChoice, Metrics};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::interrupt::Interrupt;
use crate::run_record::RunEvent;

/// Receives what a run reports. Every method has an empty default. If a run has several processes, only the leader
/// reports, except where a method says otherwise.
pub trait Observer: Send + Sync {
    /// Takes a sentence that a person should read. Any process may have one.
    fn note(&self, _sentence: &str) {}

    /// The ranks of this process are about to be started. Every process calls it.
    fn before_ranks(&self) {}

    /// The steps of a run of `steps` steps begin, and the first `done` steps are finished.
    fn begin(&self, _overview: &Overview, _done: u64, _steps: u64) {}

    /// Arranges that events outside the run, such as signals, request the end of the run. Every process calls it
    /// before its steps begin, again after each restart. `is_leader` says whether this process reports.
    ///
    /// # Errors
    /// When the events cannot be watched, which ends the run.
    fn watch(&self, _interrupt: &Interrupt, _is_leader: bool) -> io::Result<()> {
        Ok(())
    }

    /// A step is finished. The first one lists the parameters whose gradients cannot wait for `W`.
    fn step(&self, _metrics: &Metrics, _undeferred: &[UndeferredParameter]) {}

    /// An evaluation that the stop of the run left out is finished.
    fn evaluation(&self, _metrics: &Metrics) {}

    /// The run has chosen after how many steps it saves checkpoints (`checkpoint_every = "auto"`).
    fn checkpoint_interval(&self, _choice: CheckpointChoice) {}

    /// The run has restarted, a rank is slow, or a step was verified.
    fn event(&self, event: &RunEvent) {
        self.note(&event.sentence());
    }

    /// The steps of an attempt have ended, with or without success.
    fn end_steps(&self) {}

    /// The run has ended.
    fn end(&self, _ending: &Ending<'_>) {}

    /// The process ends with an error. A launcher may end the process before [`Run::train`](crate::run::Run::train)
    /// returns it.
    fn failed(&self, _error: &RunError) {}
}

/// An observer that shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}

/// A description of a run: the data of a header, and of `pipewright-run.json` in the folder of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// The model's architecture.
    pub model: String,
    /// The number of the model's layers, including the embedding and the head.
    pub layers: usize,
    /// The number of the model's parameters.
    pub parameters: u64,
    /// The number of ranks of all replicas together.
    pub ranks: u32,
    /// The number of replicas of the pipeline.
    pub replicas: u32,
    /// The number of stages of one replica.
    pub stages: u32,
    /// The schedule's name, or the name of its file.
    pub schedule: String,
    /// Whether the schedule lets weight gradients wait while other microbatches compute, as zero-bubble
    /// schedules do.
    pub defers_weights: bool,
    /// The number of microbatches per step, over all replicas.
    pub microbatches: u32,
    /// The device that the ranks compute on.
    pub device: String,
    /// The loss, in nats, of a model that predicts each token by its frequency in the data; 0 of other data than text.
    pub frequency_loss: f64,
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub struct Ending<'a> {
    /// The last finished step.
    pub done: u64,
    /// Why it is the last one.
    pub reason: Reason,
    /// The newest checkpoint.
    pub saved: Option<&'a Path>,
    /// The step with the lowest validation loss, and that loss.
    pub best: Option<(u64, f64)>,
    /// The folder of the results.
    pub out: &'a Path,
    /// Whether it has the timeline of a step.
    pub has_timeline: bool,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It has taken all its steps.
    Complete,
    /// The validation loss has not fallen for a while.
    LossNoLongerFalls,
    /// The end was requested ([`Interrupt`]).
    Signal,
}
