//! The costs of actions: seconds of computation, links between ranks, and bytes of memory.
//!
//! Generators that optimise for measured costs and the timed simulation share this type.
//!
//! ```
//! use pipewright_schedule::Costs;
//! let costs: Costs = "F=1,I=1.5,W=1,hop=0.1".parse()?;
//! assert_eq!(costs.stages[0].backward, 2.5);
//! assert_eq!(costs.link.latency, 0.1);
//! # Ok::<(), pipewright_schedule::costs::CostsError>(())
//! ```

mod exchanges;

use std::collections::BTreeMap;

use thiserror::Error;

pub use exchanges::{Exchanges, MAX_EXCHANGES, MAX_PROGRAM_EXCHANGES, StageExchanges};

use crate::action::Action;
use crate::ids::{Rank, StageIndex};
use crate::recompute::Recompute;
use crate::schedule::Program;
use crate::slices::Slices;
use crate::words::counted;

/// The largest cost in seconds. It is far above the time of any action, and small enough that sums of costs
/// do not overflow.
pub const MAX_SECONDS: f64 = 1e12;

/// The costs of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// The times of each stage; a single entry applies to every stage.
    pub stages: Vec<StageCosts>,
    /// The sizes of each stage; a single entry applies to every stage. If empty, messages take only the
    /// latency of their link, and memory is counted in activations.
    pub sizes: Vec<StageSizes>,
    /// The link between any two ranks, in each direction.
    pub link: Link,
    /// The links that differ from [`Costs::link`], by sender and receiver.
    pub links: BTreeMap<(Rank, Rank), Link>,
    /// The messages of skip connections, which bypass the stages between two stages.
    pub skips: Vec<SkipTransfer>,
    /// The stages that compute their forward again before their backward.
    pub recompute: Recompute,
    /// The link of each rank to the place to which `OFFLOAD` moves tensors, and from which `RELOAD` brings
    /// them back. It moves the tensors of one microbatch after another, and is occupied during its latency
    /// too.
    pub offload: Link,
    /// The share of `F` and `I` in which tokens attend to keys, from 0 to 1. If microbatches are cut into
    /// slices of equal length, this share of the time grows from slice to slice, because a slice attends to
    /// the keys of the slices before it ([`StageCosts::for_slice`]). With 0, all slices take equally long.
    pub attention: f64,
}

/// A message that a stage sends directly to a later stage for each microbatch, in addition to the messages
/// between neighbours.
///
/// It leaves when the forward of `from` ends, and the forward of `to` waits for it. A gradient of the same
/// size leaves when the backward of `to` for its inputs ends, and the backward of `from` waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SkipTransfer {
    /// The stage that sends.
    pub from: StageIndex,
    /// The stage that receives; it comes after `from`.
    pub to: StageIndex,
    /// The size of the message for one microbatch.
    pub bytes: u64,
}

/// The computation times of a stage for one microbatch, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageCosts {
    /// `F`.
    pub forward: f64,
    /// `I`.
    pub input_backward: f64,
    /// `W`.
    pub weight_backward: f64,
    /// `B`.
    pub backward: f64,
    /// A forward, or its part that the stage recomputes, that is computed again before its backward; `None`
    /// for the time of `F`.
    pub recompute: Option<f64>,
    /// `UNSHARD`, for each call.
    pub unshard: f64,
    /// `REDUCE_GRAD`, for each call.
    pub reduce_grad: f64,
    /// `OFFLOAD`; `None` for the time that the bytes take on [`Costs::offload`].
    pub offload: Option<f64>,
    /// `RELOAD`; `None` for the same time.
    pub reload: Option<f64>,
    /// The exchanges inside the actions, which the times above do not include.
    pub exchanges: StageExchanges,
}

/// The bytes that a stage holds or sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageSizes {
    /// The output for one microbatch. Its gradient has the same size.
    pub output: u64,
    /// The tensors that a forward saves for one microbatch, from `F` to `B` or `I`.
    pub activation: u64,
    /// The tensors that `I` saves for `W`, for one microbatch.
    pub stash: u64,
    /// The gradients of the stage's weights, from the end of the first weight backward to the end of the step.
    pub gradient: u64,
    /// The sizes of a forward that is computed again; if they are not known, it keeps nothing, and its
    /// backward holds the whole activation.
    pub recompute: Option<RecomputeSizes>,
    /// The keys and values of one microbatch, which are part of `activation`. They count only if microbatches
    /// are cut into slices: then there are also their gradients
    /// ([`memory_curve`](crate::simulate::memory_curve)).
    pub keys_values: u64,
    /// The results that each `B` and `I` computes again because `activation` does not have them
    /// ([`LayerParts`](crate::recompute::LayerParts)), for one microbatch. They are held until it ends.
    pub parts: u64,
    /// The tensors that an `OFFLOAD` moves out of memory, for one microbatch: the inputs of the layers that
    /// are computed again. They are a part of [`RecomputeSizes::kept`].
    pub offload: u64,
    /// The frozen matrices that are in memory from `UNSHARD` to `RESHARD`; 0 if the stage always holds them.
    pub streamed: u64,
}

/// The bytes of a forward that is computed again, for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecomputeSizes {
    /// The inputs that it keeps until its backward ends, and the activations of the layers that are not
    /// computed again. If microbatches are cut into slices, keys and values are left out, because they are
    /// added for all layers.
    pub kept: u64,
    /// The activations that its backward holds at once, in addition to what is kept.
    pub recomputed: u64,
}

impl StageSizes {
    /// Returns what a forward keeps that is computed again, and what its backward holds in addition.
    pub(crate) fn of_recomputed(&self) -> RecomputeSizes {
        self.recompute.unwrap_or(RecomputeSizes { kept: 0, recomputed: self.activation })
    }
}

/// The connection from one rank to another. It carries one message at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// The time from the departure of the last byte to its arrival, in seconds. The link is free during this
    /// time.
    pub latency: f64,
    /// Bytes per second, at least 1; infinite if the size of a message does not matter.
    pub bandwidth: f64,
}

/// A mistake in costs, as a sentence with what to do.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct CostsError(pub(crate) String);

crate::error_text::message_as_debug!(CostsError);

impl StageCosts {
    /// Makes costs from the times of `F`, `I` and `W` in seconds. `B` takes as long as `I` and `W` together,
    /// and everything else takes no time.
    pub fn new(forward: f64, input_backward: f64, weight_backward: f64) -> Self {
        let backward = input_backward + weight_backward;
        Self {
            forward,
            input_backward,
            weight_backward,
            backward,
            recompute: None,
            unshard: 0.0,
            reduce_grad: 0.0,
            offload: None,
            reload: None,
            exchanges: StageExchanges::default(),
        }
    }

    /// Returns the times of each of `stages` equal stages that together take these.
    #[must_use]
    pub fn shared(self, stages: u32) -> Self {
        let part = |time: f64| time / f64::from(stages.max(1));
        Self {
            forward: part(self.forward),
            input_backward: part(self.input_backward),
            weight_backward: part(self.weight_backward),
            backward: part(self.backward),
            recompute: self.recompute.map(part),
            unshard: part(self.unshard),
            reduce_grad: part(self.reduce_grad),
            offload: self.offload.map(part),
            reload: self.reload.map(part),
            exchanges: self.exchanges.shared(stages),
        }
    }

    /// Returns the time of a forward that is computed again, without its exchanges.
    pub(crate) fn again(&self) -> f64 {
        self.recompute.unwrap_or(self.forward)
    }

    fn named(&self) -> [(&'static str, f64); 12] {
        let [forward, backward, again] = self.exchanges.all().map(|exchanges| exchanges.seconds());
        [
            ("F", self.forward),
            ("I", self.input_backward),
            ("W", self.weight_backward),
            ("B", self.backward),
            ("recompute", self.again()),
            ("UNSHARD", self.unshard),
            ("REDUCE_GRAD", self.reduce_grad),
            ("OFFLOAD", self.offload.unwrap_or(0.0)),
            ("RELOAD", self.reload.unwrap_or(0.0)),
            ("exchange", forward),
            ("exchange", backward),
            ("exchange", again),
        ]
    }
}

/// How long a message occupies its link, and how long it travels after that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransferCost {
    pub(crate) occupied: f64,
    pub(crate) latency: f64,
    /// Whether the latency is that of most links.
    pub(crate) is_common: bool,
}

impl Default for Costs {
    /// One second for each of `F`, `I` and `W`, and messages that take no time.
    fn default() -> Self {
        Self {
            stages: vec![StageCosts::new(1.0, 1.0, 1.0)],
            sizes: Vec::new(),
            link: Link { latency: 0.0, bandwidth: f64::INFINITY },
            links: BTreeMap::new(),
            skips: Vec::new(),
            recompute: Recompute::None,
            offload: Link { latency: 0.0, bandwidth: f64::INFINITY },
            attention: 0.0,
        }
    }
}

impl Costs {
    /// The costs of `stage`.
    pub(crate) fn stage(&self, stage: StageIndex) -> &StageCosts {
        &self.stages[stage.index().min(self.stages.len() - 1)]
    }

    /// Returns the costs of a stage, if the times are of `stages` equal stages together. Links and sizes stay as they
    /// are, and so do costs that have an entry for each stage.
    ///
    /// ```
    /// use pipewright_schedule::Costs;
    /// let of_model: Costs = "F=8,B=16,hop=0.1".parse()?;
    /// assert_eq!(of_model.shared(4), "F=2,B=4,hop=0.1".parse()?);
    /// # Ok::<(), pipewright_schedule::costs::CostsError>(())
    /// ```
    #[must_use]
    pub fn shared(&self, stages: u32) -> Self {
        match self.stages.as_slice() {
            [all] => Self { stages: vec![all.shared(stages)], ..self.clone() },
            _ => self.clone(),
        }
    }

    /// Returns whether actions have exchanges. Then the halves of an overlap run together
    /// ([`TrainingLowering::with_exchanges`](crate::lower::TrainingLowering::with_exchanges)).
    pub fn has_exchanges(&self) -> bool {
        self.stages.iter().any(|stage| stage.exchanges.are_any())
    }

    /// Returns the bytes of the output of `stage` for one microbatch; 0 if they are not known.
    pub fn output_bytes(&self, stage: StageIndex) -> u64 {
        let last = self.sizes.len().saturating_sub(1);
        self.sizes.get(stage.index().min(last)).map_or(0, |sizes| sizes.output)
    }

    /// Returns how long a message of `bytes` occupies the link, and how long it travels after that.
    pub(crate) fn transfer(&self, from: Rank, to: Rank, bytes: u64) -> TransferCost {
        let own = self.links.get(&(from, to));
        let link = own.unwrap_or(&self.link);
        TransferCost {
            occupied: bytes as f64 / link.bandwidth,
            latency: link.latency,
            is_common: own.is_none(),
        }
    }

    /// Returns how long the tensors of a microbatch of `stage`, or of its slice, occupy the link over which
    /// they leave memory, and how long when they come back.
    pub(crate) fn transfer_seconds(&self, stage: StageIndex, slices: Slices) -> [f64; 2] {
        let last = self.sizes.len().saturating_sub(1);
        let bytes = self.sizes.get(stage.index().min(last)).map_or(0, |sizes| slices.share(sizes.offload));
        let by_bytes = self.offload.latency + bytes as f64 / self.offload.bandwidth;
        let StageCosts { offload, reload, .. } = self.stage(stage);
        let share = |seconds: &f64| seconds / f64::from(slices.get());
        [offload, reload].map(|measured| measured.as_ref().map_or(by_bytes, share))
    }

    /// Checks that the costs fit a program and are in range.
    pub(crate) fn check_program(&self, program: &Program) -> Result<(), CostsError> {
        self.check(program.placement().stages())?;
        if !self.has_exchanges() {
            return Ok(());
        }
        let count_of = |part: Action| {
            let exchanges = &self.stage(part.stage()).exchanges;
            let runs_again =
                matches!(part, Action::Forward { .. }) && self.recompute.applies_to(part.stage());
            let again = if runs_again { exchanges.again().count() } else { 0 };
            u64::from(exchanges.of(part).count()) + u64::from(again)
        };
        let parts = program.rows().iter().flatten().flat_map(|action| action.parts());
        let exchanges: u64 = parts.map(count_of).sum();
        if exchanges > MAX_PROGRAM_EXCHANGES {
            return Err(CostsError(format!(
                "the actions of the program have {exchanges} exchanges, and at most {MAX_PROGRAM_EXCHANGES} are simulated; use \
                 fewer microbatches, or fewer exchanges in each action"
            )));
        }
        Ok(())
    }

    /// Checks that the costs fit `stages` stages and are in range.
    pub(crate) fn check(&self, stages: u32) -> Result<(), CostsError> {
        check_entries("costs", self.stages.len(), stages)?;
        if !self.sizes.is_empty() {
            check_entries("sizes", self.sizes.len(), stages)?;
        }
        check_recomputed(&self.recompute, stages)?;
        if let Some(stage) = self.recompute.in_part().find(|&stage| self.stage(stage).recompute.is_none()) {
            return Err(CostsError(format!(
                "stage {stage} is to recompute its first layers, and these costs do not say how long that takes; use a profile, \
                 which has the costs of layers, or recompute the whole stage"
            )));
        }
        let misled = |skip: &&SkipTransfer| skip.from >= skip.to || skip.to.get() >= stages;
        if let Some(&SkipTransfer { from, to, .. }) = self.skips.iter().find(misled) {
            return Err(CostsError(format!(
                "a skip connection from stage {from} to stage {to} of {stages}; let it lead to a later stage that exists"
            )));
        }
        let links = self.links.values().chain([&self.link]);
        let latencies = links.clone().map(|link| ("hop", link.latency));
        let latencies = latencies.chain([("offload", self.offload.latency)]);
        let links = links.chain([&self.offload]);
        let mut all = self.stages.iter().flat_map(StageCosts::named).chain(latencies);
        all.try_for_each(|(name, value)| check_range(name, value))?;
        let mut counts = self.stages.iter().flat_map(|stage| stage.exchanges.all());
        if let Some(exchanges) = counts.find(|exchanges| exchanges.count() > MAX_EXCHANGES) {
            return Err(exchange_count(exchanges.count().into()));
        }
        if !(0.0..=1.0).contains(&self.attention) {
            return Err(CostsError(format!(
                "the cost `attention` is {}; use a share of `F` and `I` from 0 to 1",
                self.attention
            )));
        }
        match links.map(|link| link.bandwidth).find(|&bandwidth| bandwidth.is_nan() || bandwidth < 1.0) {
            Some(bandwidth) => {
                Err(CostsError(format!("a link's bandwidth is {bandwidth}; use at least 1 byte a second")))
            }
            None => Ok(()),
        }
    }
}

/// Refuses a time that is out of range.
pub(crate) fn check_range(name: &'static str, value: f64) -> Result<(), CostsError> {
    if (0.0..=MAX_SECONDS).contains(&value) {
        return Ok(());
    }
    // Large numbers are printed with an exponent.
    let value = if value.abs() < 1e15 { value.to_string() } else { format!("{value:e}") };
    Err(CostsError(format!(
        "the cost `{name}` is {value}; use a number of seconds from 0 to {MAX_SECONDS:e}"
    )))
}

/// Checks that there is one entry for all stages, or one each.
pub(crate) fn check_entries(what: &str, entries: usize, stages: u32) -> Result<(), CostsError> {
    if entries == 1 || entries == stages as usize {
        return Ok(());
    }
    let (entries, stages) = (counted(entries, "entry"), counted(stages, "stage"));
    Err(CostsError(format!("{entries} for the {what} of {stages}; give one for all, or one each")))
}

/// Checks that the stages that are to be recomputed are among the first `stages`.
///
/// # Errors
/// If there is another one.
pub fn check_recomputed(recompute: &Recompute, stages: u32) -> Result<(), CostsError> {
    match recompute.largest_stage().filter(|stage| stage.get() >= stages) {
        Some(stage) => {
            Err(CostsError(format!("stage {stage} of {stages} is to be recomputed; name stages that exist")))
        }
        None => Ok(()),
    }
}

/// Returns the error of an action with so many exchanges.
pub(crate) fn exchange_count(count: f64) -> CostsError {
    CostsError(format!("an action has {count} exchanges; use a whole number from 1 to {MAX_EXCHANGES}"))
}

#[cfg(test)]
mod tests;
