//! Messages between ranks: a tag that says what the message is for, and tensors or bytes as its content.
//!
//! The receiver knows from the tag what it expects. A message may come from another process, so its content
//! can differ from that: [`Message::into_tensors`] and `Message::read` then return an error that names the
//! tag and the sender.

use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::{Microbatch, StageIndex};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ids::{Attempt, WorldRank};
use crate::tensor::OptionalTensors;

/// The direction of a message through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Direction {
    /// Activations, towards the loss.
    Forward,
    /// Gradients, towards the input.
    Backward,
}

/// The purpose of a message. Tag and sender together are unique within an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tag {
    /// The tensors of one boundary for one microbatch.
    Boundary {
        /// The direction of the tensors.
        direction: Direction,
        /// The stage that receives them.
        stage: StageIndex,
        /// The microbatch of the tensors.
        microbatch: Microbatch,
    },
    /// Tensors of a skip connection that go directly from one stage to another, or their gradients on the way
    /// back.
    Skip {
        /// The direction of the tensors.
        direction: Direction,
        /// The stage that sends them.
        source: StageIndex,
        /// The stage that receives them.
        stage: StageIndex,
        /// The microbatch of the tensors.
        microbatch: Microbatch,
    },
    /// The parameter lists of some ranks, from which shared parameters are found: up the tree of a replica,
    /// at launch.
    Parameters,
    /// The parameters that several stages share: down the tree of a replica, at launch.
    SharedParameters,
    /// The gradient of one copy of a shared parameter.
    SharedGradient {
        /// The parameter's index among the shared ones.
        parameter: u32,
        /// The stage that holds the copy.
        stage: StageIndex,
        /// The index of the copy among that stage's parameters.
        index: u32,
    },
    /// The sum of the gradients of a shared parameter that more than two ranks own.
    SharedGradientSum {
        /// The parameter's index among the shared ones.
        parameter: u32,
    },
    /// A shard of a stage's gradients, for the replica that sums that shard.
    GradientShard {
        /// The stage.
        stage: StageIndex,
        /// Whether the parameters are experts that only some replicas hold.
        of_experts: bool,
    },
    /// The sum of a shard over all replicas that hold the parameters.
    GradientSum {
        /// The stage.
        stage: StageIndex,
        /// Whether the parameters are experts that only some replicas hold.
        of_experts: bool,
    },
    /// A replica's part of a stage's parameters, where they are sharded.
    ParameterShard {
        /// The stage.
        stage: StageIndex,
        /// The number of times that the stage was gathered before in this step.
        round: u32,
    },
    /// The parameters of a stage that a replica's forwards have changed: running statistics.
    Statistics {
        /// The stage.
        stage: StageIndex,
    },
    /// The sums of squares of the gradients' parts that replicas hold, where parameters are sharded: up the
    /// tree of the replicas.
    ReplicaSquares,
    /// A round of a communicator's collectives.
    Collective {
        /// The communicator's number.
        communicator: u32,
        /// The number of earlier rounds of the communicator.
        round: u32,
    },
    /// An exchange between the ranks that compute a stage together.
    TensorGroup {
        /// The half of an overlap that exchanges; `None` for everything else.
        half: Option<Direction>,
        /// The number of earlier exchanges of such halves, or of everything else, in this attempt.
        round: u32,
    },
    /// The rank has the messages of an action, which the ranks that compute a stage together begin together.
    GroupReady {
        /// The number of earlier actions of the rank's row.
        position: u32,
    },
    /// An exchange between the replicas that hold the experts of a stage together.
    ExpertGroup {
        /// The half of an overlap that exchanges; `None` for an action that runs alone. The halves run by turns, and
        /// replicas may change turns at different exchanges.
        half: Option<Direction>,
        /// The number of earlier exchanges of such halves, or of actions that run alone, in this attempt.
        round: u32,
    },
    /// The sums of squares of the gradients of some ranks, for the gradient norm: up the tree of the replicas
    /// that hold the model together.
    Squares,
    /// Replicas have summed their gradients and found them finite: up the tree of the replicas, where
    /// parameters are not sharded.
    Ready,
    /// The gradient norm over all ranks: down both trees.
    GlobalNorm,
    /// The hash of what some ranks know of the batch of a step, if they know the same: up the tree of all
    /// ranks, before the step.
    StepDigest,
    /// Whether all ranks know the same of the batch: down the tree of all ranks, before the step.
    SameStep,
    /// The knowledge of some ranks about the batch of a step, if not all ranks know the same: up the tree of
    /// all ranks, before the step.
    StepForms,
    /// The batch on which all processes agree, or why they do not: down the tree of all ranks, before the
    /// step.
    AgreedStep,
    /// The checksums of the results of some ranks: up the tree of all ranks, in a repeated step.
    Checksums,
    /// The first result of a repeated step whose bits differ, if there is one: down the tree of all ranks.
    Verdict,
    /// The reports of some ranks on a finished step: up the tree of all ranks.
    Report,
    /// The reports of all ranks without their events: down the tree of all ranks.
    Summary,
    /// The program and the settings of a process, for the first rank.
    Hello,
    /// Whether all processes have the same program and settings, from the first rank.
    Welcome,
    /// A choice of the first rank's process for all processes.
    Chosen {
        /// The number of its earlier choices.
        round: u32,
    },
    /// The bytes that the first rank's process passes to all, between two steps: down the tree of all ranks.
    Shared,
    /// The state of layers that move from one stage to another, between two steps.
    Layers {
        /// The stage that has had them.
        from: StageIndex,
        /// The stage that gets them.
        to: StageIndex,
    },
    /// A message of a rank that belongs to no pipeline ([`RankLink`](crate::rank_link::RankLink)).
    Ordered {
        /// The number of earlier messages from its sender to its receiver.
        number: u32,
    },
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Boundary { direction: Direction::Forward, stage, microbatch } => {
                write!(f, "the activations of microbatch {microbatch} for stage {stage}")
            }
            Self::Boundary { direction: Direction::Backward, stage, microbatch } => {
                write!(f, "the gradients of microbatch {microbatch} for stage {stage}")
            }
            Self::Skip { direction: Direction::Forward, source, stage, microbatch } => {
                write!(
                    f,
                    "the skip connection of microbatch {microbatch} from stage {source} to stage {stage}"
                )
            }
            Self::Skip { direction: Direction::Backward, source, stage, microbatch } => {
                write!(
                    f,
                    "the gradients of microbatch {microbatch}'s skip connection from stage {source} to stage {stage}"
                )
            }
            Self::Parameters => f.write_str("the list of its parameters"),
            Self::SharedParameters => f.write_str("the shared parameters of all ranks"),
            Self::SharedGradient { parameter, stage, .. } => {
                write!(f, "the gradient of shared parameter {parameter} from stage {stage}")
            }
            Self::SharedGradientSum { parameter } => {
                write!(f, "the sum of the gradients of shared parameter {parameter}")
            }
            Self::GradientShard { stage, of_experts } => {
                write!(f, "its part of the gradients of {}stage {stage}", experts_of(*of_experts))
            }
            Self::GradientSum { stage, of_experts } => {
                write!(f, "its sum of gradients of {}stage {stage}", experts_of(*of_experts))
            }
            Self::ParameterShard { stage, round } => {
                write!(f, "its part of the parameters of stage {stage}, gathering {round}")
            }
            Self::Statistics { stage } => write!(f, "its running statistics of stage {stage}"),
            Self::ReplicaSquares => f.write_str("its part of the squares of gradients"),
            Self::Collective { communicator, round } => {
                write!(f, "round {round} of communicator {communicator}")
            }
            Self::TensorGroup { half, round } => {
                write!(f, "its tensors for exchange {round} of the ranks that compute the stage together")?;
                f.write_str(of_half(*half))
            }
            Self::GroupReady { position } => {
                write!(f, "whether it has the messages of action {position} of its row")
            }
            Self::ExpertGroup { half, round } => {
                write!(f, "its tokens for exchange {round} of the replicas that hold the experts together")?;
                f.write_str(of_half(*half))
            }
            Self::Squares => f.write_str("its squares of gradients"),
            Self::GlobalNorm => f.write_str("the gradient norm of all ranks"),
            Self::Ready => f.write_str("whether its replica is ready to update"),
            Self::StepDigest => f.write_str("the hash of what it knows of the batch"),
            Self::SameStep => f.write_str("whether all processes know the same of the batch"),
            Self::StepForms => f.write_str("what it knows of the batch"),
            Self::AgreedStep => f.write_str("whether all processes take the same step"),
            Self::Checksums => f.write_str("the checksums of its results"),
            Self::Verdict => f.write_str("the comparison of all checksums"),
            Self::Report => f.write_str("its report of the step"),
            Self::Summary => f.write_str("the summary of the step"),
            Self::Hello => f.write_str("the description of its run"),
            Self::Welcome => f.write_str("whether all processes run the same"),
            Self::Chosen { round } => write!(f, "choice {round} of the first process"),
            Self::Shared => f.write_str("what the first process passes to all"),
            Self::Layers { from, to } => {
                write!(f, "the layers that move from stage {from} to stage {to}")
            }
            Self::Ordered { number } => write!(f, "its message {number}"),
        }
    }
}

/// Returns the words before a stage whose experts' gradients are meant.
fn experts_of(of_experts: bool) -> &'static str {
    if of_experts { "the experts of " } else { "" }
}

/// A message that a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AwaitedMessage {
    /// The sender.
    pub from: WorldRank,
    /// The purpose of the message.
    pub tag: Tag,
}

/// Returns the words for the half of an overlap that exchanges.
fn of_half(half: Option<Direction>) -> &'static str {
    match half {
        None => "",
        Some(Direction::Forward) => " in the forwards of overlaps",
        Some(Direction::Backward) => " in the backwards of overlaps",
    }
}

impl std::fmt::Display for AwaitedMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} from rank {}", self.tag, self.from)
    }
}

/// A message's content.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Tensors of a boundary or of a stage's parameters; `None` for a tensor without a gradient.
    Tensors(OptionalTensors),
    /// An encoded value, which the receiver decodes by its tag. The bytes are shared, so sending them to many
    /// ranks copies nothing.
    Bytes(Arc<[u8]>),
}

impl Payload {
    /// Returns the bytes of the tensors or of the encoded value.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Tensors(tensors) => tensors.iter().flatten().map(|tensor| tensor.bytes() as u64).sum(),
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Encodes a value, which [`Message::read`] decodes.
    pub(crate) fn of<T: Serialize + ?Sized>(value: &T) -> Self {
        Self::Bytes(encoded(value))
    }
}

/// Encodes a value.
pub(crate) fn encoded<T: Serialize + ?Sized>(value: &T) -> Arc<[u8]> {
    postcard::to_stdvec(value).expect("text and numbers can always be encoded").into()
}

/// Decodes what [`encoded`] wrote into the content of `tag` from `from`.
pub(crate) fn decoded<T: DeserializeOwned>(
    from: WorldRank,
    tag: Tag,
    bytes: &[u8],
) -> Result<T, MessageError> {
    postcard::from_bytes(bytes).map_err(|source| MessageError::Unreadable { from, tag, source })
}

/// An error in the content of a message.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The message has the other kind of content.
    #[error("rank {from} sent {tag} without {expected}: it runs another version of the program")]
    Kind {
        /// The sender.
        from: WorldRank,
        /// The purpose of the message.
        tag: Tag,
        /// The expected kind: tensors or bytes.
        expected: &'static str,
    },
    /// The bytes are not an encoding of the expected value.
    #[error(
        "rank {from} sent {tag} in a form that cannot be read ({source}): it runs another version of the program"
    )]
    Unreadable {
        /// The sender.
        from: WorldRank,
        /// The purpose of the message.
        tag: Tag,
        /// Why decoding failed.
        source: postcard::Error,
    },
    /// The number of values in the message differs from the number of parameters that it belongs to.
    #[error(
        "{tag} has {found} numbers for {expected} parameters: the ranks run different versions of the program"
    )]
    Count {
        /// The purpose of the message.
        tag: Tag,
        /// The number of values that arrived.
        found: usize,
        /// The number of parameters.
        expected: usize,
    },
}

pipewright_schedule::message_as_debug!(MessageError);

/// A message that is sent or has arrived.
#[derive(Clone, Debug)]
pub struct Message {
    pub(crate) from: WorldRank,
    pub(crate) attempt: Attempt,
    pub(crate) tag: Tag,
    pub(crate) payload: Payload,
    pub(crate) sent: Instant,
    /// The time of its arrival at the receiver; before it, the time at which it was sent.
    pub(crate) arrived: Instant,
}

impl Message {
    /// Returns the time at which the message was sent.
    pub fn sent(&self) -> Instant {
        self.sent
    }

    /// Returns the time at which the message arrived.
    pub(crate) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Returns the content, of either kind.
    pub fn into_payload(self) -> Payload {
        self.payload
    }

    /// Returns the tensors.
    ///
    /// # Errors
    /// When the message has bytes instead.
    pub fn into_tensors(self) -> Result<OptionalTensors, MessageError> {
        match self.payload {
            Payload::Tensors(tensors) => Ok(tensors),
            Payload::Bytes(_) => {
                Err(MessageError::Kind { from: self.from, tag: self.tag, expected: "tensors" })
            }
        }
    }

    /// Returns the bytes.
    ///
    /// # Errors
    /// When the message has tensors instead.
    pub fn into_bytes(self) -> Result<Arc<[u8]>, MessageError> {
        match self.payload {
            Payload::Bytes(bytes) => Ok(bytes),
            Payload::Tensors(_) => {
                Err(MessageError::Kind { from: self.from, tag: self.tag, expected: "bytes" })
            }
        }
    }

    /// Decodes the value that [`Payload::of`] encoded.
    pub(crate) fn read<T: DeserializeOwned>(self) -> Result<T, MessageError> {
        let (from, tag) = (self.from, self.tag);
        decoded(from, tag, &self.into_bytes()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: Payload) -> Message {
        let now = Instant::now();
        Message {
            from: WorldRank::new(3),
            attempt: Attempt::new(1),
            tag: Tag::Squares,
            payload,
            sent: now,
            arrived: now,
        }
    }

    #[test]
    fn content_of_another_kind_or_type_is_refused_with_tag_and_sender() {
        let squares = || message(Payload::of(&[0.5, f64::NAN][..]));
        let errors = [
            squares().into_tensors().map(drop).expect_err("it has bytes"),
            message(Payload::Tensors(Vec::new())).read::<f64>().map(drop).expect_err("it has tensors"),
            squares().read::<bool>().map(drop).expect_err("it has numbers"),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("rank 3 sent its squares of gradients "), "{error}");
        }
        let found: Vec<u64> =
            squares().read::<Vec<f64>>().expect("numbers").into_iter().map(f64::to_bits).collect();
        assert_eq!(found, [0.5f64.to_bits(), f64::NAN.to_bits()]);
    }
}
