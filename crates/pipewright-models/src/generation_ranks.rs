//! Generation on several ranks. A rank is a thread or a process, and computes a stage of the model on a device
//! of its own, alone or together with tensor ranks.
//!
//! Every prompt is a microbatch. Its tokens go to the first stage, the result of each stage goes to the next
//! one, and the logits of the last stage come back here, where the next token is chosen and sent to the first
//! stage. With at least as many prompts as stages, all ranks compute at the same time. A text is the same on
//! any number of stages, to the bit.
//!
//! ```
//! use std::time::Duration;
//!
//! use burn::tensor::Device;
//! use pipewright_models::ModelFamily;
//! use pipewright_models::decoder::DecoderConfig;
//! use pipewright_models::generation::Request;
//! use pipewright_models::generation_ranks::{GenerationRanks, RankStage, RanksConfig};
//! use pipewright_models::llama::LlamaConfig;
//!
//! let config = LlamaConfig::from(DecoderConfig::new(256, 4));
//! let stages = [0..2, 2..4].map(|layers| RankStage { layers, device: Device::flex() });
//! let ranks = RanksConfig::new(stages.into(), Duration::from_secs(60));
//! let mut ranks = GenerationRanks::start(&ranks, move |layers, place| {
//!     Ok(Box::new(config.init_stage(layers, 42, place.clone())?))
//! })?;
//! let requests = [[116, 111], [111, 116]];
//! let requests = requests.each_ref().map(|prompt| Request { prompt, tokens: 3, ..Request::default() });
//! let texts = ranks.generate(&requests, &mut |_text, _token| {})?;
//! assert_eq!(texts.iter().map(|text| text.tokens.len()).collect::<Vec<_>>(), [3, 3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod kept_text;
mod worker;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use burn::tensor::Device;
pub use error::{RankFailure, RanksError};
use pipewright::failure::Cause;
use pipewright::ids::WorldRank;
use pipewright::rank_link::RankLink;
use pipewright::transport::World;
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::words::counted;

use crate::error::ModelError;
use crate::generation::{Generated, GrowingText, Request};
use crate::generation_ranks::kept_text::{KeptText, PartialLogits, common_tokens};
use crate::generation_ranks::worker::{
    CacheKind, Content, Inbox, MakeStage, Message, RankReport, RemoteReport, Report, ReportRoute, Worker,
    lost,
};
use crate::generation_stage::GenerationStage;
use crate::split::Place;

/// The stage of a rank.
#[derive(Clone, Debug)]
pub struct RankStage {
    /// Its layers.
    pub layers: Range<usize>,
    /// The device that computes it. A process uses only the devices of its own ranks.
    pub device: Device,
}

/// The ranks that generate texts together.
#[derive(Clone, Debug)]
pub struct RanksConfig {
    /// The stage of each rank, in the order of the layers. Ranks that compute a stage together follow each
    /// other.
    pub stages: Vec<RankStage>,
    /// The number of ranks that compute each stage together.
    pub tensor_ranks: u32,
    /// Whether each of them holds whole experts of a mixture
    /// ([`PipelineConfig::whole_experts`](pipewright::pipeline::PipelineConfig::whole_experts)).
    pub whole_experts: bool,
    /// How long to wait for ranks that make no progress. Making a stage is part of it.
    pub deadline: Duration,
}

impl RanksConfig {
    /// Returns ranks that each compute a stage alone.
    pub fn new(stages: Vec<RankStage>, deadline: Duration) -> Self {
        Self { stages, tensor_ranks: 1, whole_experts: false, deadline }
    }

    fn tensor_ranks(&self) -> usize {
        self.tensor_ranks.max(1) as usize
    }
}

/// Ranks that generate texts together, and the thread that chooses the tokens.
#[derive(Debug)]
pub struct GenerationRanks {
    /// The way to the first rank; `None` once the ranks have to end.
    first: Option<Sender<Message>>,
    reports: Receiver<Report>,
    /// The threads of this process: its ranks, and the one that takes the reports of other processes.
    threads: Vec<JoinHandle<()>>,
    /// Whether the thread for the reports of other processes ends.
    ends: Arc<AtomicBool>,
    /// Whether ranks run in other processes.
    is_distributed: bool,
    link: RankLink,
    /// The number of parameters that each rank has.
    parameters: Vec<usize>,
    stages: usize,
    deadline: Duration,
    /// The abilities of the caches of all ranks.
    cache: CacheKind,
    /// The text that the next one may continue.
    kept: Option<KeptText>,
    /// Whether texts are in work, so that the ranks may be computing.
    is_busy: bool,
    /// The number that the next text gets.
    next_text: usize,
    has_failed: bool,
}

impl GenerationRanks {
    /// Starts a thread for each rank. Each makes its own stage, so that no rank ever has the parameters of
    /// another one.
    ///
    /// # Errors
    /// When a thread cannot be started, or a stage cannot be made.
    pub fn start(
        config: &RanksConfig,
        make: impl Fn(Range<usize>, &Place) -> Result<Box<dyn GenerationStage>, ModelError>
        + Send
        + Sync
        + 'static,
    ) -> Result<Self, RanksError> {
        let started = Self::start_in(World::local(config.stages.len() as u32), config, make)?;
        started.ok_or_else(|| other_count(0, config.stages.len()))
    }

    /// Starts the ranks of this process in a world with as many ranks as there are stages. The process of the
    /// first rank chooses the tokens, and gets the ranks. Any other process computes in this call until the
    /// first one drops them, and gets `None`.
    ///
    /// # Errors
    /// As [`GenerationRanks::start`], and when the numbers of ranks do not fit together. In a process that
    /// does not choose tokens, also when any rank fails or a process is lost.
    pub fn start_in(
        world: World,
        config: &RanksConfig,
        make: impl Fn(Range<usize>, &Place) -> Result<Box<dyn GenerationStage>, ModelError>
        + Send
        + Sync
        + 'static,
    ) -> Result<Option<Self>, RanksError> {
        let (found, expected) = (world.ranks() as usize, config.stages.len());
        if found != expected || expected == 0 {
            return Err(other_count(found, expected));
        }
        let tensor = config.tensor_ranks();
        if !expected.is_multiple_of(tensor) {
            let (ranks, tensor) = (counted(expected, "rank"), counted(tensor, "tensor rank"));
            let message = format!("{ranks} are not a multiple of {tensor}: give each stage as many");
            return Err(RankFailure::of_all(message).into());
        }
        let links = RankLink::of_world(world, config.tensor_ranks, config.deadline);
        let make: Arc<MakeStage> = Arc::new(make);
        if let [link] = links.as_slice()
            && link.rank() != WorldRank::new(0)
        {
            let inbox = inbox(link, tensor, None);
            return worker(link, config, inbox, ReportRoute::Process).run(&*make).map(|()| None);
        }
        Self::start_threads(links, config, &make).map(Some)
    }

    /// Starts a thread for each rank of this process, and waits until all ranks of the world are ready.
    fn start_threads(
        links: Vec<RankLink>,
        config: &RanksConfig,
        make: &Arc<MakeStage>,
    ) -> Result<Self, RanksError> {
        let tensor = config.tensor_ranks();
        let (report, reports) = channel();
        let (first, messages) = channel();
        let mut messages = Some(messages);
        let mut threads = Vec::with_capacity(links.len() + 1);
        // The ranks that have started, here and in other processes, would wait for the rest.
        let refused = |link: &RankLink, error: io::Error| {
            let rank = link.rank().index();
            let message = format!("the thread of rank {rank} cannot be started: {}", with_causes(&error));
            let error = RankFailure::of(rank, message).into();
            give_up(link, &error);
            error
        };
        for link in &links {
            let rank = link.rank().index();
            let inbox = inbox(link, tensor, messages.take());
            let worker = worker(link, config, inbox, ReportRoute::Thread(report.clone()));
            let make = Arc::clone(make);
            let run = move || {
                // A failure is reported to the thread that waits.
                let _ = worker.run(&*make);
            };
            let thread = Builder::new().name(format!("rank {rank}")).spawn(run);
            threads.push(thread.map_err(|source| refused(link, source))?);
        }
        let (link, ends) = (links[0].clone(), Arc::new(AtomicBool::new(false)));
        let is_distributed = links.len() < config.stages.len();
        if is_distributed {
            let (report_link, ends) = (link.clone(), Arc::clone(&ends));
            let thread = Builder::new().name("reports".to_owned());
            let thread = thread.spawn(move || pass_reports(&report_link, &report, &ends));
            threads.push(thread.map_err(|source| refused(&link, source))?);
        }
        let mut started = Self {
            first: Some(first),
            reports,
            threads,
            ends,
            is_distributed,
            link,
            parameters: vec![0; config.stages.len()],
            stages: config.stages.len() / tensor,
            deadline: config.deadline,
            cache: CacheKind::GrowsAndShrinks,
            kept: None,
            is_busy: true,
            next_text: 0,
            has_failed: false,
        };
        for _ in 0..config.stages.len() {
            if let RankReport::Ready { rank, parameters, cache } = started.wait()? {
                started.parameters[rank] = parameters;
                started.cache = started.cache.min(cache);
            }
        }
        started.is_busy = false;
        Ok(started)
    }

    /// Returns the number of parameters that each rank has.
    pub fn parameters(&self) -> impl Iterator<Item = usize> {
        self.parameters.iter().copied()
    }

    /// Returns the failure of a rank or the loss of a process since the last text, if there is one. Call it
    /// now and then while no text is in work.
    ///
    /// # Errors
    /// The failure, which ends all ranks.
    pub fn check(&mut self) -> Result<(), RanksError> {
        if self.has_failed {
            return Err(RanksError::Ended);
        }
        while self.link.failure().is_some() {
            // The failure is the last report.
            self.wait()?;
        }
        Ok(())
    }

    /// Generates a text for each request, and passes each token at once to `each`, with the index of its
    /// request.
    ///
    /// One more text than there are stages is in work at a time, so that a token is chosen while all ranks
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
        let mut partial = vec![PartialLogits::default(); texts.len()];
        let start = self.next_text;
        self.next_text += texts.len();
        self.is_busy = true;
        let mut waiting = 0..texts.len();
        let mut in_work = 0;
        loop {
            while in_work <= self.stages
                && let Some(index) = waiting.next()
            {
                let content = Content::Begin { uses_cache: requests[index].uses_cache };
                self.send(start + index, content)?;
                in_work += usize::from(self.continue_text(start + index, &texts[index])?);
            }
            if in_work == 0 {
                self.is_busy = false;
                return Ok(texts.into_iter().map(|text| text.finish(self.has_cache())).collect());
            }
            if let RankReport::Logits { text, part, parts, logits } = self.wait()?
                && let Some(index) = text.checked_sub(start).filter(|index| *index < texts.len())
                && let Some(logits) = partial[index].add(part, parts, logits)
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

    /// Generates a text like [`GenerationRanks::generate`], and keeps it in the ranks. If the prompt of the next
    /// call begins with tokens of the text that is kept, the ranks compute only the other tokens: in a chat, the
    /// tokens of the new turn. They compute a whole prompt if the model has no cache, or if the request does not
    /// use it. They also compute it if the prompt lacks tokens of the text that cannot be removed from the
    /// cache, such as tokens in the state of a Mamba-2 layer.
    ///
    /// # Errors
    /// As [`GenerationRanks::generate`].
    pub fn answer(
        &mut self,
        request: &Request<'_>,
        each: &mut dyn FnMut(u32),
    ) -> Result<Generated, RanksError> {
        let refused = |source| RanksError::Request { index: 0, source };
        let mut growing = GrowingText::new(*request).map_err(refused)?;
        self.is_busy = true;
        let text = match self.shorten_kept(request)? {
            Some(KeptText { text, tokens }) => {
                growing.skip(tokens.len());
                text
            }
            None => {
                let text = self.next_text;
                self.next_text += 1;
                self.send(text, Content::Begin { uses_cache: request.uses_cache })?;
                text
            }
        };
        let mut partial = PartialLogits::default();
        while let Some(tokens) = growing.unknown_tokens() {
            self.send(text, Content::Tokens(tokens.to_vec()))?;
            let logits = loop {
                if let RankReport::Logits { text: found, part, parts, logits } = self.wait()?
                    && found == text
                    && let Some(logits) = partial.add(part, parts, logits)
                {
                    break logits;
                }
            };
            match growing.choose(logits) {
                Ok(token) => token.into_iter().for_each(&mut *each),
                Err(error) => {
                    self.send(text, Content::End)?;
                    self.is_busy = false;
                    return Err(refused(error));
                }
            }
        }
        if request.uses_cache && self.has_cache() {
            self.kept = Some(KeptText { text, tokens: growing.known_tokens().to_vec() });
        } else {
            self.send(text, Content::End)?;
        }
        self.is_busy = false;
        Ok(growing.finish(self.has_cache()))
    }

    /// Shortens the text that is kept to the tokens with which the prompt of a request begins, and returns it.
    /// Ends the text and returns `None` if the request cannot continue it.
    fn shorten_kept(&mut self, request: &Request<'_>) -> Result<Option<KeptText>, RanksError> {
        let Some(KeptText { text, mut tokens }) = self.kept.take() else { return Ok(None) };
        let common = common_tokens(&tokens, request.prompt);
        let can_continue = common == tokens.len() || self.cache == CacheKind::GrowsAndShrinks;
        if !request.uses_cache || common == 0 || !can_continue {
            self.send(text, Content::End)?;
            return Ok(None);
        }
        if common < tokens.len() {
            self.send(text, Content::Shorten { tokens: common })?;
            tokens.truncate(common);
        }
        Ok(Some(KeptText { text, tokens }))
    }

    fn has_cache(&self) -> bool {
        self.cache > CacheKind::Missing
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
            loop {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Waits for a report. A failure ends all ranks.
    fn wait(&mut self) -> Result<RankReport, RanksError> {
        // The loss of a process says more than that nobody makes progress.
        let patience = self.deadline.saturating_add(self.link.detection_lag());
        let (mut moves, mut since) = (self.link.moves(), Instant::now());
        let error = loop {
            match self.reports.recv_timeout(self.deadline.min(RankLink::LOOK)) {
                Ok(Ok(report)) => return Ok(report),
                Ok(Err(error)) => break error,
                Err(RecvTimeoutError::Disconnected) => break lost(&self.link),
                Err(RecvTimeoutError::Timeout) => {
                    let earlier = std::mem::replace(&mut moves, self.link.moves());
                    if earlier != moves {
                        since = Instant::now();
                    } else if since.elapsed() >= patience {
                        break self.silent().into();
                    }
                }
            }
        };
        (self.first, self.has_failed) = (None, true);
        give_up(&self.link, &error);
        Err(error)
    }

    /// Returns the failure that no rank made progress within the deadline.
    fn silent(&self) -> RankFailure {
        let names: Vec<String> = self.busy().iter().map(ToString::to_string).collect();
        let report = match names.as_slice() {
            [] => "none computes".to_owned(),
            [rank] => format!("rank {rank} still computes"),
            _ => format!("ranks {} still compute", names.join(", ")),
        };
        let message = format!(
            "no rank has made progress for {} s, and {report}: give a longer deadline, or find out what blocks the device",
            self.deadline.as_secs_f64()
        );
        RankFailure::of_all(message).with_cause(Cause::Deadline { waited: self.deadline, report })
    }

    fn busy(&self) -> Vec<usize> {
        let is_busy = |&rank: &usize| self.link.is_busy(WorldRank::new(rank as u32));
        (0..self.parameters.len()).filter(is_busy).collect()
    }
}

impl Drop for GenerationRanks {
    /// Ends the ranks, and waits for the threads of this process unless a rank may not respond: after a
    /// failure, and within one process also while a text is in work. Other processes must have ended their
    /// texts before this one leaves them, so with them only a failure ends the wait.
    fn drop(&mut self) {
        self.first = None;
        self.ends.store(true, Ordering::Relaxed);
        if !self.has_failed && (self.is_distributed || !self.is_busy) {
            self.threads.drain(..).for_each(|thread| {
                // A panic was caught in the thread.
                let _ = thread.join();
            });
        }
    }
}

/// Returns the error for a world of another number of ranks.
fn other_count(found: usize, expected: usize) -> RanksError {
    let found = counted(found, "rank");
    let message =
        format!("the world has {found}, and the model is distributed over {expected}: make them equal");
    RankFailure::of_all(message).into()
}

/// Tells all ranks that an error ends them. The first failure counts, so the one of a rank that has recorded
/// it itself stays.
fn give_up(link: &RankLink, error: &RanksError) {
    let rank = error.rank().map_or(link.rank(), |rank| WorldRank::new(rank as u32));
    link.give_up(rank, error.cause());
}

/// Returns where a rank gets its messages. The first rank of the world takes `messages`.
fn inbox(link: &RankLink, tensor: usize, messages: Option<Receiver<Message>>) -> Inbox {
    let rank = link.rank().index();
    match messages {
        Some(messages) => Inbox::Chooser(messages),
        // The first rank passes messages on to the other ranks of the first stage.
        None => Inbox::Rank(WorldRank::new(rank.saturating_sub(tensor) as u32)),
    }
}

fn worker(link: &RankLink, config: &RanksConfig, inbox: Inbox, report: ReportRoute) -> Worker {
    let RankStage { layers, device } = config.stages[link.rank().index()].clone();
    let tensor = link.tensor().with_whole_experts(config.whole_experts);
    let stages = config.stages.len() / tensor.ranks() as usize;
    let place = Place { tensor, ..Place::from(device) };
    Worker { link: link.clone(), layers, place, stages, inbox, report }
}

/// Passes the reports of other processes on, until a rank fails or `ends`.
fn pass_reports(link: &RankLink, reports: &Sender<Report>, ends: &AtomicBool) {
    while !ends.load(Ordering::Relaxed) {
        let report = match link.next_report::<RemoteReport>() {
            Ok(Some(report)) => report.map_err(RanksError::Failed),
            Ok(None) => continue,
            Err(_) => Err(lost(link)),
        };
        let has_failed = report.is_err();
        if reports.send(report).is_err() || has_failed {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
