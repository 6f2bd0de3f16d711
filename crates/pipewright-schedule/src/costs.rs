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

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use thiserror::Error;

use crate::ids::{Rank, StageIndex};
use crate::recompute::Recompute;
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
    /// The share of `F` and `I` in which tokens attend to keys, from 0 to 1. If microbatches are cut into
    /// slices of equal length, this share of the time grows from slice to slice, because a slice attends to
    /// the keys of the slices before it ([`StageCosts::of_slice`]). With 0, all slices take equally long.
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
    /// The exchanges inside the actions, which the times above do not include.
    pub exchanges: StageExchanges,
}

/// The exchanges in the actions of a stage: the tokens of a microbatch travel to the ranks of their experts
/// and back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageExchanges {
    /// The exchanges in `F`.
    pub forward: Exchanges,
    /// The exchanges in `I`, and in `B`. `W` has none, because the rank of an expert keeps what it needs.
    pub backward: Exchanges,
    /// The exchanges in a forward, or its part that the stage recomputes, that is computed again; `None` for
    /// the exchanges in `F`.
    pub recompute: Option<Exchanges>,
}

/// The exchanges in an action. They divide its computation into `count + 1` parts of equal length, and each
/// exchange takes `seconds / count`. A part begins when the exchange before it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Exchanges {
    /// The number of exchanges, at most [`MAX_EXCHANGES`].
    pub count: u32,
    /// The time of all of them together, in seconds.
    pub seconds: f64,
}

/// The largest number of exchanges in an action.
pub const MAX_EXCHANGES: u32 = 100_000;

/// The bytes that a stage holds or sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageSizes {
    /// The output for one microbatch. Its gradient has the same size.
    pub output: u64,
    /// The tensors that a forward saves for one microbatch, from `F` to `B` or `I`.
    pub activation: u64,
    /// The tensors that `I` saves for `W`, for one microbatch.
    pub stash: u64,
    /// The gradients of the stage's weights, from the first weight gradient to the end of the step.
    pub gradient: u64,
    /// The sizes of a forward that is computed again; if they are not known, it keeps nothing, and its
    /// backward holds the whole activation.
    pub recompute: Option<RecomputeSizes>,
    /// The keys and values of one microbatch, which are part of `activation`. They count only if microbatches
    /// are cut into slices: then there are also their gradients
    /// ([`memory_curve`](crate::simulate::memory_curve)).
    pub keys_values: u64,
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

/// The errors of costs.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum CostsError {
    /// A part of the text is not `NAME=NUMBER`.
    #[error("`{part}` is not a cost; write `F=1,I=1,W=1,B=2,hop=0.1`, and leave out what is not needed")]
    NotACost {
        /// The part, shortened if it is very long.
        part: String,
    },
    /// A cost that is given twice.
    #[error("the cost `{name}` is given twice; leave one out")]
    Twice {
        /// The cost, in lower case.
        name: String,
    },
    /// A cost that is negative, not a number, or above [`MAX_SECONDS`].
    #[error("the cost `{name}` is {value}; use a number of seconds from 0 to {MAX_SECONDS:e}")]
    OutOfRange {
        /// The cost.
        name: &'static str,
        /// Its value, as text.
        value: String,
    },
    /// A share of attention that is not a share.
    #[error("the cost `attention` is {value}; use a share of `F` and `I` from 0 to 1")]
    Attention {
        /// The share, as text.
        value: String,
    },
    /// An action has too many exchanges.
    #[error("an action has {count} exchanges; use at most {MAX_EXCHANGES}")]
    Exchanges {
        /// The number of exchanges.
        count: u32,
    },
    /// A bandwidth below 1 byte per second.
    #[error("a link's bandwidth is {value}; use at least 1 byte a second")]
    Bandwidth {
        /// The bandwidth, as text.
        value: String,
    },
    /// A skip connection does not lead from a stage to a later one.
    #[error(
        "a skip connection from stage {from} to stage {to} of {stages}; let it lead to a later stage that exists"
    )]
    Skip {
        /// The stage that sends.
        from: StageIndex,
        /// The stage that receives.
        to: StageIndex,
        /// The number of stages.
        stages: u32,
    },
    /// A stage that is to be recomputed does not exist.
    #[error("stage {stage} of {stages} is to be recomputed; name stages that exist")]
    RecomputedStage {
        /// The stage.
        stage: StageIndex,
        /// The number of stages.
        stages: u32,
    },
    /// A stage is to recompute a part of its layers, and nothing says how long that takes.
    #[error(
        "stage {stage} is to recompute its first layers, and these costs do not say how long that takes; use a profile, which \
         has the costs of layers, or recompute the whole stage"
    )]
    RecomputedLayers {
        /// The stage.
        stage: StageIndex,
    },
    /// There are more or fewer entries than stages.
    #[error("{} for the {what} of {}; give one for all, or one each", counted(*.entries, "entry"), counted(*.stages, "stage"))]
    Entries {
        /// The name of the list.
        what: &'static str,
        /// The number of entries.
        entries: usize,
        /// The number of stages.
        stages: u32,
    },
}

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
            exchanges: StageExchanges::default(),
        }
    }

    /// Returns the time of a forward that is computed again, without its exchanges.
    pub(crate) fn again(&self) -> f64 {
        self.recompute.unwrap_or(self.forward)
    }

    fn named(&self) -> [(&'static str, f64); 10] {
        let [forward, backward, again] = self.exchanges.all().map(|exchanges| exchanges.seconds);
        [
            ("F", self.forward),
            ("I", self.input_backward),
            ("W", self.weight_backward),
            ("B", self.backward),
            ("recompute", self.again()),
            ("UNSHARD", self.unshard),
            ("REDUCE_GRAD", self.reduce_grad),
            ("exchange", forward),
            ("exchange", backward),
            ("exchange", again),
        ]
    }
}

impl StageExchanges {
    /// Returns the exchanges of a stage whose forward and whose backward have these exchanges.
    pub fn both(exchanges: Exchanges) -> Self {
        Self { forward: exchanges, backward: exchanges, recompute: None }
    }

    /// Returns the exchanges of each of `stages` equal stages that together have these.
    #[must_use]
    pub fn shared(self, stages: u32) -> Self {
        let stages = stages.max(1);
        let part = |exchanges: Exchanges| Exchanges {
            count: exchanges.count.div_ceil(stages),
            seconds: exchanges.seconds / f64::from(stages),
        };
        Self {
            forward: part(self.forward),
            backward: part(self.backward),
            recompute: self.recompute.map(part),
        }
    }

    /// Returns the exchanges in a forward that is computed again.
    pub(crate) fn again(&self) -> Exchanges {
        self.recompute.unwrap_or(self.forward)
    }

    /// Returns whether any action has an exchange that takes time.
    pub(crate) fn take_time(&self) -> bool {
        self.all().iter().any(Exchanges::take_time)
    }

    fn all(&self) -> [Exchanges; 3] {
        [self.forward, self.backward, self.again()]
    }
}

impl Exchanges {
    /// Returns the time of all exchanges; 0 if there are none.
    pub fn total(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.seconds }
    }

    /// Returns these exchanges and others of the same action.
    #[must_use]
    pub(crate) fn plus(self, other: Self) -> Self {
        Self { count: self.count.saturating_add(other.count), seconds: self.total() + other.total() }
    }

    /// Returns whether there are exchanges that take time.
    pub(crate) fn take_time(&self) -> bool {
        self.total() > 0.0
    }
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
            attention: 0.0,
        }
    }
}

impl Costs {
    /// The costs of `stage`.
    pub(crate) fn stage(&self, stage: StageIndex) -> &StageCosts {
        &self.stages[stage.index().min(self.stages.len() - 1)]
    }

    /// Returns whether actions have exchanges that take time. Then an overlap takes less time than its halves
    /// one after the other.
    pub fn has_exchanges(&self) -> bool {
        self.stages.iter().any(|stage| stage.exchanges.take_time())
    }

    /// Returns the bytes of the output of `stage` for one microbatch; 0 if they are not known.
    pub fn output_bytes(&self, stage: StageIndex) -> u64 {
        let last = self.sizes.len().saturating_sub(1);
        self.sizes.get(stage.index().min(last)).map_or(0, |sizes| sizes.output)
    }

    /// Returns how long a message of `bytes` occupies the link, and how long it travels after that.
    pub(crate) fn transfer(&self, from: Rank, to: Rank, bytes: u64) -> (f64, f64) {
        let link = self.links.get(&(from, to)).unwrap_or(&self.link);
        (bytes as f64 / link.bandwidth, link.latency)
    }

    /// Checks that the costs fit `stages` stages and are in range.
    pub(crate) fn check(&self, stages: u32) -> Result<(), CostsError> {
        let fits = |entries: usize| entries == 1 || entries == stages as usize;
        if !fits(self.stages.len()) {
            return Err(CostsError::Entries { what: "costs", entries: self.stages.len(), stages });
        }
        if !self.sizes.is_empty() && !fits(self.sizes.len()) {
            return Err(CostsError::Entries { what: "sizes", entries: self.sizes.len(), stages });
        }
        if let Some(stage) = self.recompute.largest_stage().filter(|stage| stage.get() >= stages) {
            return Err(CostsError::RecomputedStage { stage, stages });
        }
        if let Some(stage) = self.recompute.in_part().find(|&stage| self.stage(stage).recompute.is_none()) {
            return Err(CostsError::RecomputedLayers { stage });
        }
        let misled = |skip: &&SkipTransfer| skip.from >= skip.to || skip.to.get() >= stages;
        if let Some(&SkipTransfer { from, to, .. }) = self.skips.iter().find(misled) {
            return Err(CostsError::Skip { from, to, stages });
        }
        let links = self.links.values().chain([&self.link]);
        let latencies = links.clone().map(|link| ("hop", link.latency));
        let mut all = self.stages.iter().flat_map(StageCosts::named).chain(latencies);
        all.try_for_each(|(name, value)| check_range(name, value))?;
        let mut counts = self.stages.iter().flat_map(|stage| stage.exchanges.all());
        if let Some(Exchanges { count, .. }) = counts.find(|exchanges| exchanges.count > MAX_EXCHANGES) {
            return Err(CostsError::Exchanges { count });
        }
        if !(0.0..=1.0).contains(&self.attention) {
            return Err(CostsError::Attention { value: self.attention.to_string() });
        }
        match links.map(|link| link.bandwidth).find(|&bandwidth| bandwidth.is_nan() || bandwidth < 1.0) {
            Some(bandwidth) => Err(CostsError::Bandwidth { value: bandwidth.to_string() }),
            None => Ok(()),
        }
    }
}

impl FromStr for Costs {
    type Err = CostsError;

    /// Reads `F=1,I=1,W=1,B=2,hop=0.1`, in any order and without regard to case. Defaults: `F`, `I` and `W`
    /// are 1, `B` is `I + W`, and `hop`, the latency of every link, is 0. If `B` is given, `I` and `W` are
    /// half of it each, or one of them is what the other leaves, because a lowered program may have both in
    /// place of `B`. `F=1:1:2` gives each stage a time of its own; the number of entries is compared with the
    /// number of stages when the costs are used. `attention=0.3` is [`Costs::attention`], by default 0.
    /// `exchange=0.5` is the time of the exchanges in `F`, and of those in the backward, by default 0, and
    /// `exchanges=8` is their number in each of the two, by default 2.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut costs = Self::default();
        let [mut forward, mut input, mut weight] = [const { Vec::new() }; 3];
        let mut backward = Vec::new();
        let (mut exchange, mut count) = (Vec::new(), 2);
        let mut given = BTreeSet::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let no_cost = || CostsError::NotACost { part: part.chars().take(64).collect() };
            let (name, values) = part.split_once('=').ok_or_else(no_cost)?;
            let values = values.split(':').map(|value| value.trim().parse());
            let values = values.collect::<Result<Vec<f64>, _>>().map_err(|_not_a_number| no_cost())?;
            let name = name.trim().to_ascii_lowercase();
            if given.contains(&name) {
                return Err(CostsError::Twice { name });
            }
            match (name.as_str(), values.as_slice()) {
                ("f", _) => forward = values,
                ("i", _) => input = values,
                ("w", _) => weight = values,
                ("b", _) => backward = values,
                ("exchange", _) => exchange = values,
                ("exchanges", &[number]) if number.fract() == 0.0 && (1.0..=1e9).contains(&number) => {
                    count = number as u32;
                }
                ("hop", &[latency]) => costs.link.latency = latency,
                ("attention", &[share]) => costs.attention = share,
                _ => return Err(no_cost()),
            }
            given.insert(name);
        }
        let lists = [&forward, &input, &weight, &backward, &exchange];
        let stages = lists.iter().map(|list| list.len()).max().unwrap_or(1).max(1);
        if let Some(list) = lists.iter().find(|list| list.len() > 1 && list.len() != stages) {
            return Err(CostsError::Entries { what: "costs", entries: list.len(), stages: stages as u32 });
        }
        // Before others follow from them.
        backward.iter().try_for_each(|&value| check_range("B", value))?;
        let of_stage =
            |list: &[f64], stage: usize| list.get(stage.min(list.len().saturating_sub(1))).copied();
        costs.stages = (0..stages)
            .map(|stage| {
                let [forward, input, weight, backward] =
                    [&forward, &input, &weight, &backward].map(|list| of_stage(list, stage));
                let (input, weight) = halves(input, weight, backward);
                let costs = StageCosts::new(forward.unwrap_or(1.0), input, weight);
                let seconds = of_stage(&exchange, stage).unwrap_or(0.0);
                let count = if seconds == 0.0 { 0 } else { count };
                let exchanges = StageExchanges::both(Exchanges { count, seconds });
                StageCosts { backward: backward.unwrap_or(costs.backward), exchanges, ..costs }
            })
            .collect();
        costs.check(stages as u32)?;
        Ok(costs)
    }
}

/// Refuses a time that is out of range.
fn check_range(name: &'static str, value: f64) -> Result<(), CostsError> {
    if (0.0..=MAX_SECONDS).contains(&value) {
        return Ok(());
    }
    // Large numbers are printed with an exponent.
    let value = if value.abs() < 1e15 { value.to_string() } else { format!("{value:e}") };
    Err(CostsError::OutOfRange { name, value })
}

/// Returns the times of `I` and `W`, from the given ones.
fn halves(input: Option<f64>, weight: Option<f64>, backward: Option<f64>) -> (f64, f64) {
    let rest = |half: f64| backward.map_or(1.0, |backward| (backward - half).max(0.0));
    match (input, weight) {
        (Some(input), weight) => (input, weight.unwrap_or_else(|| rest(input))),
        (None, Some(weight)) => (rest(weight), weight),
        (None, None) => {
            let half = backward.map_or(1.0, |backward| backward / 2.0);
            (half, half)
        }
    }
}

#[cfg(test)]
mod tests;
