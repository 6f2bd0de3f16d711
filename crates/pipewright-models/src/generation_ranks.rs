//! Generation on several ranks: each is a thread with one stage of the model on a device of its own.
//!
//! Every prompt is a microbatch. Its tokens go to the first rank, the result of each rank goes to the next
//! one, and the logits of the last rank come back here, where the next token is chosen and sent to the first
//! rank. With at least as many prompts as ranks, all ranks compute at the same time. A text is the same on
//! any number of ranks, to the bit.
//!
//! ```
//! use std::time::Duration;
//!
//! use burn::tensor::Device;
//! use pipewright_models::ModelFamily;
//! use pipewright_models::decoder::DecoderConfig;
//! use pipewright_models::generation::Request;
//! use pipewright_models::generation_ranks::{GenerationRanks, RankStage};
//! use pipewright_models::llama::LlamaConfig;
//!
//! let config = LlamaConfig::from(DecoderConfig::new(256, 4));
//! let stages = [0..2, 2..4].map(|layers| RankStage { layers, device: Device::flex() });
//! let mut ranks = GenerationRanks::start(stages.into(), Duration::from_secs(60), move |stage| {
//!     Ok(Box::new(config.init_stage(stage.layers.clone(), 42, stage.device.clone())?))
//! })?;
//! let requests = [[116, 111], [111, 116]];
//! let requests = requests.each_ref().map(|prompt| Request { prompt, tokens: 3, ..Request::default() });
//! let texts = ranks.generate(&requests, &mut |_text, _token| {})?;
//! assert_eq!(texts.iter().map(|text| text.tokens.len()).collect::<Vec<_>>(), [3, 3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use burn::tensor::Device;
use pipewright::tensor::BoundaryError;
use pipewright_schedule::error_text::panic_message;
use thiserror::Error;

use crate::generation::{GenerateError, Generated, GrowingText, Request};
use crate::generation_stage::{GenerationStage, RowPart, StageRow};
use crate::hf::HfError;

/// The stage of a rank.
#[derive(Clone, Debug)]
pub struct RankStage {
    /// Its layers.
    pub layers: Range<usize>,
    /// The device that computes it.
    pub device: Device,
}

/// Ranks that generate texts together.
#[derive(Debug)]
pub struct GenerationRanks {
    /// The way to the first rank; `None` once the ranks have to end.
    first: Option<Sender<Message>>,
    reports: Receiver<Report>,
    ranks: Vec<RankThread>,
    deadline: Duration,
    /// Whether the model can continue a row.
    has_cache: bool,
    /// Whether texts are in work, so that the ranks may be computing.
    is_busy: bool,
    /// The number that the next text gets.
    next_text: usize,
    has_failed: bool,
}

#[derive(Debug)]
struct RankThread {
    thread: JoinHandle<()>,
    state: Arc<RankState>,
    parameters: usize,
}

/// What a rank does, for the thread that waits for it.
#[derive(Debug, Default)]
struct RankState {
    /// The number of messages that the rank has begun to use, and of those that it has used.
    begun: AtomicUsize,
    done: AtomicUsize,
}

/// A message to a rank: a part of the text with this number.
struct Message {
    text: usize,
    content: Content,
}

enum Content {
    /// A text begins.
    Begin { uses_cache: bool },
    /// The next tokens, for the first rank.
    Tokens(Vec<u32>),
    /// The result of the previous rank.
    Part(RowPart),
    /// The text is complete.
    End,
}

/// What a rank tells the thread that waits.
enum Report {
    /// The stage is made.
    Ready {
        rank: usize,
        parameters: usize,
        has_cache: bool,
    },
    /// The last rank has the logits after the latest tokens of a text.
    Logits {
        text: usize,
        logits: Vec<f32>,
    },
    Failed(RanksError),
}

/// Why ranks cannot generate texts.
#[derive(Error)]
pub enum RanksError {
    /// A request cannot be fulfilled.
    #[error("request {index}")]
    Request {
        /// The index of the request.
        index: usize,
        /// The reason.
        source: GenerateError,
    },
    /// A stage cannot be made.
    #[error("rank {rank}: the layers from {} up to, but not including, {} cannot be loaded", layers.start, layers.end)]
    Stage {
        /// The rank.
        rank: usize,
        /// The layers of the stage.
        layers: Range<usize>,
        /// The reason.
        source: Box<HfError>,
    },
    /// The last stage does not have the model's head.
    #[error("rank {rank}: the last stage does not have the head of the model: give it the last layers")]
    NoHead {
        /// The rank.
        rank: usize,
    },
    /// A stage does not take the result of the previous rank.
    #[error("rank {rank}: the stage does not take the result of the previous rank")]
    Boundary {
        /// The rank.
        rank: usize,
        /// The reason.
        source: BoundaryError,
    },
    /// The code of a stage panicked.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// The rank.
        rank: usize,
        /// The message.
        message: String,
    },
    /// No rank made progress within the deadline.
    #[error(
        "no rank has made progress for {} s, and {}: give a longer deadline, or find out what blocks the device",
        deadline.as_secs_f64(),
        busy_ranks(busy)
    )]
    Silent {
        /// The deadline.
        deadline: Duration,
        /// The ranks that are computing.
        busy: Vec<usize>,
    },
    /// A thread cannot be started.
    #[error("the thread of rank {rank} cannot be started")]
    Thread {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An earlier call has failed, and its ranks have ended.
    #[error("the ranks have ended after a failure: start them again")]
    Ended,
}

pipewright_schedule::message_as_debug!(RanksError);

fn busy_ranks(busy: &[usize]) -> String {
    let names: Vec<String> = busy.iter().map(ToString::to_string).collect();
    match names.as_slice() {
        [] => "none computes".to_owned(),
        [rank] => format!("rank {rank} still computes"),
        _ => format!("ranks {} still compute", names.join(", ")),
    }
}

impl GenerationRanks {
    /// Starts a rank for each stage, in the order of the layers. Each makes its own stage, on its own thread,
    /// so that no rank ever has the parameters of another one.
    ///
    /// Waiting fails when no rank makes progress within `deadline`, which includes making a stage.
    ///
    /// # Errors
    /// When a thread cannot be started, or a stage cannot be made.
    pub fn start(
        stages: Vec<RankStage>,
        deadline: Duration,
        make: impl Fn(&RankStage) -> Result<Box<dyn GenerationStage>, HfError> + Send + Sync + 'static,
    ) -> Result<Self, RanksError> {
        let (report, reports) = channel();
        let (first, mut inbox) = channel();
        let make = Arc::new(make);
        let mut ranks = Vec::with_capacity(stages.len());
        let last = stages.len().saturating_sub(1);
        for (rank, stage) in stages.into_iter().enumerate() {
            let (next, next_inbox) = channel();
            let worker = Worker {
                rank,
                inbox: std::mem::replace(&mut inbox, next_inbox),
                next: (rank < last).then_some(next),
                report: report.clone(),
                state: Arc::default(),
            };
            let (state, make) = (Arc::clone(&worker.state), Arc::clone(&make));
            let thread =
                Builder::new().name(format!("rank {rank}")).spawn(move || worker.run(&stage, &*make));
            let thread = thread.map_err(|source| RanksError::Thread { rank, source })?;
            ranks.push(RankThread { thread, state, parameters: 0 });
        }
        let first = Some(first);
        let mut started = Self {
            first,
            reports,
            ranks,
            deadline,
            has_cache: false,
            is_busy: true,
            next_text: 0,
            has_failed: false,
        };
        for _ in 0..started.ranks.len() {
            if let Report::Ready { rank, parameters, has_cache } = started.wait()? {
                started.ranks[rank].parameters = parameters;
                started.has_cache = has_cache;
            }
        }
        started.is_busy = false;
        Ok(started)
    }

    /// Returns the number of parameters that each rank has.
    pub fn parameters(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().map(|rank| rank.parameters)
    }

    /// Generates a text for each request, and passes each token at once to `each`, with the index of its
    /// request.
    ///
    /// One more text than there are ranks is in work at a time, so that a token is chosen while all ranks
    /// compute. The texts do not depend on each other.
    ///
    /// # Errors
    /// When a request does not fit the model, the model's output is not finite, or a rank fails.
    pub fn generate(
        &mut self,
        requests: &[Request<'_>],
        each: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Generated>, RanksError> {
        let refused = |index| move |source| RanksError::Request { index, source };
        let texts = requests.iter().enumerate();
        let texts = texts.map(|(index, request)| GrowingText::new(*request).map_err(refused(index)));
        let mut texts: Vec<GrowingText<'_>> = texts.collect::<Result<_, _>>()?;
        let start = self.next_text;
        self.next_text += texts.len();
        self.is_busy = true;
        let mut waiting = 0..texts.len();
        let mut in_work = 0;
        loop {
            while in_work <= self.ranks.len()
                && let Some(index) = waiting.next()
            {
                let content = Content::Begin { uses_cache: requests[index].uses_cache };
                self.send(start + index, content)?;
                in_work += usize::from(self.continue_text(start + index, &texts[index])?);
            }
            if in_work == 0 {
                self.is_busy = false;
                return Ok(texts.into_iter().map(|text| text.finish(self.has_cache)).collect());
            }
            if let Report::Logits { text, logits } = self.wait()?
                && let Some(index) = text.checked_sub(start).filter(|index| *index < texts.len())
            {
                let token = match texts[index].choose(logits) {
                    Ok(token) => token,
                    Err(error) => {
                        // The caches of the texts in work would stay in the ranks.
                        (0..waiting.start).try_for_each(|index| self.send(start + index, Content::End))?;
                        return Err(refused(index)(error));
                    }
                };
                token.into_iter().for_each(|token| each(index, token));
                in_work -= usize::from(!self.continue_text(text, &texts[index])?);
            }
        }
    }

    /// Sends the next tokens of a text to the first rank, or ends it. Returns whether it continues.
    fn continue_text(&mut self, text: usize, growing: &GrowingText<'_>) -> Result<bool, RanksError> {
        let tokens = growing.unknown_tokens();
        let content = tokens.map_or(Content::End, |tokens| Content::Tokens(tokens.to_vec()));
        self.send(text, content)?;
        Ok(tokens.is_some())
    }

    fn send(&mut self, text: usize, content: Content) -> Result<(), RanksError> {
        let first = self.first.as_ref().ok_or(RanksError::Ended)?;
        if first.send(Message { text, content }).is_err() {
            // The rank has ended, and its report says why.
            while !matches!(self.wait()?, Report::Failed(_)) {}
        }
        Ok(())
    }

    /// Waits for a report. A failure ends all ranks.
    fn wait(&mut self) -> Result<Report, RanksError> {
        let mut done = self.done();
        let error = loop {
            match self.reports.recv_timeout(self.deadline) {
                Ok(Report::Failed(error)) => break error,
                Ok(report) => return Ok(report),
                Err(RecvTimeoutError::Disconnected) => break RanksError::Ended,
                Err(RecvTimeoutError::Timeout) => {
                    let progress = std::mem::replace(&mut done, self.done());
                    if progress == done {
                        break RanksError::Silent { deadline: self.deadline, busy: self.busy() };
                    }
                }
            }
        };
        (self.first, self.has_failed) = (None, true);
        Err(error)
    }

    /// Returns the number of messages that the ranks have used.
    fn done(&self) -> usize {
        self.ranks.iter().map(|rank| rank.state.done.load(Ordering::Relaxed)).sum()
    }

    fn busy(&self) -> Vec<usize> {
        let is_busy =
            |state: &RankState| state.done.load(Ordering::Relaxed) < state.begun.load(Ordering::Relaxed);
        (0..self.ranks.len()).filter(|&rank| is_busy(&self.ranks[rank].state)).collect()
    }
}

impl Drop for GenerationRanks {
    /// Ends the ranks. After a failure, or while they may be computing, a rank may not respond, so none is
    /// waited for.
    fn drop(&mut self) {
        self.first = None;
        if !self.has_failed && !self.is_busy {
            self.ranks.drain(..).for_each(|rank| {
                // A panic was caught in the thread.
                let _ = rank.thread.join();
            });
        }
    }
}

/// The thread of a rank.
struct Worker {
    rank: usize,
    inbox: Receiver<Message>,
    /// The way to the next rank; `None` at the last one.
    next: Option<Sender<Message>>,
    report: Sender<Report>,
    state: Arc<RankState>,
}

impl Worker {
    /// Makes the stage, and computes it until the rank before this one ends.
    fn run(self, stage: &RankStage, make: impl Fn(&RankStage) -> Result<Box<dyn GenerationStage>, HfError>) {
        let rank = self.rank;
        // `AssertUnwindSafe` holds because nothing of the rank is used after a panic.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            self.state.begun.fetch_add(1, Ordering::Relaxed);
            let layers = stage.layers.clone();
            let refused = |source| RanksError::Stage { rank, layers, source: Box::new(source) };
            let made = make(stage).map_err(refused)?;
            if self.next.is_none() && !made.has_head() {
                return Err(RanksError::NoHead { rank });
            }
            self.state.done.fetch_add(1, Ordering::Relaxed);
            let (parameters, has_cache) = (made.parameters(), made.cache().is_some());
            // If the receiver is gone, the rank ends soon.
            let _ = self.report.send(Report::Ready { rank, parameters, has_cache });
            self.compute(&*made)
        }));
        let failure = match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => RanksError::Panic { rank, message: panic_message(&*payload) },
        };
        // If the receiver is gone, the failure does not matter.
        let _ = self.report.send(Report::Failed(failure));
    }

    fn compute(&self, stage: &dyn GenerationStage) -> Result<(), RanksError> {
        let refused = |source| RanksError::Boundary { rank: self.rank, source };
        let mut rows = HashMap::new();
        while let Ok(Message { text, content }) = self.inbox.recv() {
            self.state.begun.fetch_add(1, Ordering::Relaxed);
            let part = match content {
                Content::Begin { uses_cache } => {
                    rows.insert(text, StageRow::new(stage, uses_cache));
                    self.pass_on(text, Content::Begin { uses_cache });
                    None
                }
                Content::End => {
                    rows.remove(&text);
                    self.pass_on(text, Content::End);
                    None
                }
                Content::Tokens(tokens) => rows.get_mut(&text).map(|row| row.append(&tokens)),
                Content::Part(part) => rows.get_mut(&text).map(|row| row.advance(part)),
            };
            if let Some(part) = part {
                let part = part.map_err(refused)?;
                if self.next.is_some() {
                    self.pass_on(text, Content::Part(part));
                } else {
                    let logits = part.last_logits().map_err(refused)?;
                    // If the receiver is gone, the rank ends soon.
                    let _ = self.report.send(Report::Logits { text, logits });
                }
            }
            self.state.done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends a message to the next rank, if there is one. If that rank has failed, its report says so.
    fn pass_on(&self, text: usize, content: Content) {
        if let Some(next) = &self.next {
            let _ = next.send(Message { text, content });
        }
    }
}

#[cfg(test)]
mod tests;
