//! A rank that generates: it computes its stage for the rows of all texts, in the order in which their parts
//! arrive.
//!
//! The first rank gets its messages from the thread that chooses tokens. The other ranks of the first stage
//! get copies of them from the first rank, before it computes, and each rank of a later stage gets them from
//! the rank with the same place in the previous stage. So the ranks that compute a stage together see the same
//! messages in the same order.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender};

use pipewright::failure::Cause;
use pipewright::ids::WorldRank;
use pipewright::rank_link::RankLink;
use pipewright::stage::StageError;
use pipewright::tensor::{BoundaryError, Values};
use pipewright_schedule::error_text::{panic_message, with_causes};
use serde::{Deserialize, Serialize};

use super::error::{RankFailure, RanksError};
use crate::error::ModelError;
use crate::generation_stage::{GenerationStage, RowPart, StageRow};
use crate::split::Place;

/// Makes the stage of a rank from its layers and its place among the tensor ranks.
pub(super) type MakeStage =
    dyn Fn(Range<usize>, &Place) -> Result<Box<dyn GenerationStage>, ModelError> + Send + Sync;

/// A message to a rank: a part of the text with this number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) text: usize,
    pub(super) content: Content,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Content {
    /// A text begins.
    Begin { uses_cache: bool },
    /// Only this number of tokens of the text remain.
    Shorten { tokens: usize },
    /// The next tokens, for the first stage.
    Tokens(Vec<u32>),
    /// The tensors with the message are the result of the previous stage for the tokens from `first` on.
    Part { first: usize },
    /// The text is complete.
    End,
    /// No further text follows.
    Close,
}

/// What a rank tells the thread that chooses tokens.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RankReport {
    /// The stage is made.
    Ready { rank: usize, parameters: usize, cache: CacheKind },
    /// A rank of the last stage has the logits after the latest tokens of a text: the part `part` of `parts`
    /// along the vocabulary.
    Logits { text: usize, part: usize, parts: usize, logits: Vec<f32> },
}

/// What the cache of a stage can do. A later kind can do what an earlier one can.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum CacheKind {
    /// The stage has no cache.
    Missing,
    /// A row can continue.
    Grows,
    /// A row can also lose its last tokens.
    GrowsAndShrinks,
}

impl CacheKind {
    fn of(stage: &dyn GenerationStage) -> Self {
        match stage.cache() {
            None => Self::Missing,
            Some(cache) if cache.can_be_shortened() => Self::GrowsAndShrinks,
            Some(_) => Self::Grows,
        }
    }
}

/// A report, or the failure of a rank.
pub(super) type Report = Result<RankReport, RanksError>;
/// A report of a rank of another process.
pub(super) type RemoteReport = Result<RankReport, RankFailure>;

/// Where a rank gets its messages.
pub(super) enum Inbox {
    /// From the thread that chooses tokens.
    Chooser(Receiver<Message>),
    /// From another rank.
    Rank(WorldRank),
}

/// Where a rank reports.
#[derive(Clone)]
pub(super) enum ReportRoute {
    /// To the thread that chooses tokens.
    Thread(Sender<Report>),
    /// To the process of that thread.
    Process,
}

/// A rank with its place among all ranks.
pub(super) struct Worker {
    pub(super) link: RankLink,
    pub(super) layers: Range<usize>,
    pub(super) place: Place,
    /// The number of stages.
    pub(super) stages: usize,
    pub(super) inbox: Inbox,
    pub(super) report: ReportRoute,
}

/// Why a rank ended.
enum Ended {
    Failed(RankFailure),
    /// Another rank failed first.
    Aborted,
}

impl From<RankFailure> for Ended {
    fn from(failure: RankFailure) -> Self {
        Self::Failed(failure)
    }
}

impl Worker {
    /// Makes the stage, and computes it until no further text follows.
    ///
    /// # Errors
    /// When this rank fails, which it has reported then, or another one.
    pub(super) fn run(self, make: &MakeStage) -> Result<(), RanksError> {
        let rank = self.rank();
        // `AssertUnwindSafe` holds because nothing of the rank is used after a panic but its connection.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            self.link.begin();
            let made = make(self.layers.clone(), &self.place).map_err(|error| self.refused(&error))?;
            if self.is_last() && !made.has_head() {
                let message = format!(
                    "rank {rank}: the last stage does not have the head of the model: give it the last layers"
                );
                let cause = Cause::Build { message: message.clone() };
                return Err(RankFailure::of(rank, message).with_cause(cause).into());
            }
            self.link.end();
            let (parameters, cache) = (made.parameters(), CacheKind::of(&*made));
            self.report(Ok(RankReport::Ready { rank, parameters, cache }));
            self.compute(&*made)
        }));
        let failure = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(ended)) => ended,
            Err(payload) => match payload.downcast::<Cause>() {
                Ok(cause) => of_exchange(rank, *cause),
                Err(payload) => {
                    let message = panic_message(&*payload);
                    let failure = RankFailure::of(rank, format!("rank {rank} panicked: {message}"));
                    failure.with_cause(Cause::Panic { message }).into()
                }
            },
        };
        match failure {
            Ended::Aborted => Err(lost(&self.link)),
            Ended::Failed(failure) => {
                let error = RanksError::Failed(failure.clone());
                self.report(Err(failure.into()));
                self.link.fail(error.cause());
                Err(error)
            }
        }
    }

    /// Returns the failure of a stage that cannot be made.
    fn refused(&self, error: &ModelError) -> RankFailure {
        let (rank, Range { start, end }, message) = (self.rank(), self.layers.clone(), with_causes(error));
        let text = format!(
            "rank {rank}: the layers from {start} up to, but not including, {end} cannot be loaded: {message}"
        );
        let failure = RankFailure { is_of_model: true, ..RankFailure::of(rank, text) };
        failure.with_cause(Cause::Build { message })
    }

    fn rank(&self) -> usize {
        self.link.rank().index()
    }

    /// Returns the number of ranks that compute the stage together.
    fn tensor_ranks(&self) -> usize {
        self.place.tensor.ranks() as usize
    }

    fn is_last(&self) -> bool {
        self.rank() / self.tensor_ranks() + 1 == self.stages
    }

    fn compute(&self, stage: &dyn GenerationStage) -> Result<(), Ended> {
        let refused = |error: BoundaryError| {
            let (rank, reason) = (self.rank(), with_causes(&error));
            let failure = RankFailure::of(
                rank,
                format!("rank {rank}: the stage does not take the result of the previous rank: {reason}"),
            );
            failure.with_cause(Cause::Stage(StageError::Input(error)))
        };
        let mut rows = HashMap::new();
        loop {
            let (Message { text, content }, tensors) = self.next()?;
            self.link.begin();
            let part = match content {
                Content::Close => {
                    self.pass_on(text, Content::Close, Vec::new());
                    self.link.end();
                    return Ok(());
                }
                Content::Begin { uses_cache } => {
                    rows.insert(text, StageRow::new(stage, uses_cache));
                    self.pass_on(text, content, Vec::new());
                    None
                }
                Content::End => {
                    rows.remove(&text);
                    self.pass_on(text, content, Vec::new());
                    None
                }
                Content::Shorten { tokens } => {
                    if let Some(row) = rows.get_mut(&text) {
                        row.shorten(tokens);
                    }
                    self.pass_on(text, content, Vec::new());
                    None
                }
                Content::Tokens(tokens) => rows.get_mut(&text).map(|row| row.append(&tokens)),
                Content::Part { first } => {
                    rows.get_mut(&text).map(|row| row.advance(RowPart { first, values: tensors }))
                }
            };
            if let Some(part) = part {
                let part = part.map_err(refused)?;
                if self.is_last() {
                    self.report_logits(text, part, stage.splits_logits()).map_err(refused)?;
                } else {
                    self.pass_on(text, Content::Part { first: part.first }, part.values);
                }
            }
            self.link.end();
        }
    }

    /// Returns the next message. The first rank sends it to the other ranks of its stage, which the exchanges
    /// of the stage wait for.
    fn next(&self) -> Result<(Message, Values), Ended> {
        match &self.inbox {
            Inbox::Rank(from) => self.link.receive(*from).map_err(|cause| of_exchange(self.rank(), cause)),
            Inbox::Chooser(messages) => {
                // If the sender is gone, no text follows.
                let message = messages.recv().unwrap_or(Message { text: 0, content: Content::Close });
                for rank in 1..self.tensor_ranks() {
                    self.link.send(WorldRank::new(rank as u32), &message, Vec::new());
                }
                Ok((message, Vec::new()))
            }
        }
    }

    /// Sends a message to the rank with the same place in the next stage, if there is one.
    fn pass_on(&self, text: usize, content: Content, tensors: Values) {
        if !self.is_last() {
            let next = WorldRank::new((self.rank() + self.tensor_ranks()) as u32);
            self.link.send(next, &Message { text, content }, tensors);
        }
    }

    /// Reports the logits after the last token. If the ranks do not divide the vocabulary, the first one
    /// reports all.
    fn report_logits(&self, text: usize, part: RowPart, is_split: bool) -> Result<(), BoundaryError> {
        let index = self.rank() % self.tensor_ranks();
        let parts = if is_split { self.tensor_ranks() } else { 1 };
        if index < parts {
            let logits = part.last_logits()?;
            self.report(Ok(RankReport::Logits { text, part: index, parts, logits }));
        }
        Ok(())
    }

    fn report(&self, report: Report) {
        match &self.report {
            // If the receiver is gone, the rank ends soon.
            ReportRoute::Thread(sender) => {
                let _ = sender.send(report);
            }
            ReportRoute::Process => {
                let report: RemoteReport = report.map_err(RankFailure::from);
                self.link.report(&report);
            }
        }
    }
}

/// Returns the end of a rank for which an exchange with others failed.
fn of_exchange(rank: usize, cause: Cause) -> Ended {
    if matches!(cause, Cause::Aborted { .. }) {
        return Ended::Aborted;
    }
    RankFailure::of(rank, format!("rank {rank}: {}", with_causes(&cause))).with_cause(cause).into()
}

/// Returns the failure of another rank or process.
pub(super) fn lost(link: &RankLink) -> RanksError {
    link.failure().map_or(RanksError::Ended, |error| RanksError::Lost(Box::new(error)))
}
