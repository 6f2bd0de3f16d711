//! What travels: a tag that says what it is, and tensors or a rank's contribution to a sum over all ranks.

use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::{Microbatch, Rank, StageIndex};
use serde::{Deserialize, Serialize};

use crate::tensor::OptionalTensors;

/// Which way a message goes through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Direction {
    /// Activations, towards the loss.
    Forward,
    /// Gradients, towards the input.
    Backward,
}

/// What a message is. With its sender it is unique within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Tag {
    /// The tensors of one boundary for one microbatch.
    Boundary {
        /// Which way they go.
        direction: Direction,
        /// The stage that takes them.
        stage: StageIndex,
        /// Their microbatch.
        microbatch: Microbatch,
    },
    /// Tensors of a skip connection that go straight from one stage to another, or their gradients on the way back.
    Skip {
        /// Which way they go.
        direction: Direction,
        /// The stage that sends them,
        source: StageIndex,
        /// and the stage that takes them.
        stage: StageIndex,
        /// Their microbatch.
        microbatch: Microbatch,
    },
    /// The list of a rank's parameters.
    Parameters,
    /// The gradient of one copy of a shared parameter.
    SharedGradient {
        /// The parameter's place among the shared ones.
        parameter: u32,
        /// The stage that holds the copy,
        stage: StageIndex,
        /// and the copy's place among that stage's parameters.
        place: u32,
    },
    /// A shard of a stage's gradients, for the replica that sums that shard.
    GradientShard {
        /// The stage.
        stage: StageIndex,
    },
    /// The sum of a shard over all replicas.
    GradientSum {
        /// The stage.
        stage: StageIndex,
    },
    /// A replica's part of a stage's parameters, where they are sharded.
    ParameterShard {
        /// The stage.
        stage: StageIndex,
        /// How often the stage was gathered before, in this step.
        round: u32,
    },
    /// The sums of squares of a replica's part of the gradients, where they are sharded.
    SquaredNorms,
    /// A round of a communicator's collectives.
    Collective {
        /// The communicator's number.
        communicator: u32,
        /// Its rounds before this one.
        round: u32,
    },
    /// A rank's part of the gradient norm, which ends the step's program.
    GradientNorm,
    /// All ranks of a replica have contributed to the gradient norm.
    Ready,
    /// What a rank has to say about the step that it has done, for the first rank.
    Report,
    /// What the first rank makes of all reports, for every other rank.
    Summary,
    /// What a process is about to run, for the first rank.
    Hello,
    /// Whether all processes are about to run the same, from the first rank.
    Welcome,
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
            Self::SharedGradient { parameter, stage, .. } => {
                write!(f, "the gradient of shared parameter {parameter} from stage {stage}")
            }
            Self::GradientShard { stage } => write!(f, "its part of the gradients of stage {stage}"),
            Self::GradientSum { stage } => write!(f, "its sum of gradients of stage {stage}"),
            Self::ParameterShard { stage, round } => {
                write!(f, "its part of the parameters of stage {stage}, gathering {round}")
            }
            Self::SquaredNorms => f.write_str("its part of the squares of gradients"),
            Self::Collective { communicator, round } => {
                write!(f, "round {round} of communicator {communicator}")
            }
            Self::GradientNorm => f.write_str("its part of the gradient norm"),
            Self::Ready => f.write_str("whether its replica is ready to update"),
            Self::Report => f.write_str("its report of the step"),
            Self::Summary => f.write_str("the summary of the step"),
            Self::Hello => f.write_str("what it is about to run"),
            Self::Welcome => f.write_str("whether all are about to run the same"),
        }
    }
}

/// A rank's part of the global gradient norm: the sum of squares of each parameter's gradient, by path.
pub type Contribution = Vec<(Arc<str>, f64)>;

/// A parameter that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedParameter {
    /// The stage that holds it.
    pub stage: StageIndex,
    /// Its place among the stage's parameters.
    pub place: usize,
    /// Its global path.
    #[serde(with = "text")]
    pub path: Arc<str>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// A hash of its values, if the stage declares the parameter as shared.
    pub hash: Option<u64>,
}

/// A message's content.
#[derive(Debug)]
pub enum Payload {
    /// A boundary's tensors; none where a tensor has no gradient.
    Tensors(OptionalTensors),
    /// What a rank holds.
    Parameters(Vec<OwnedParameter>),
    /// A part of the gradient norm.
    Contribution(Contribution),
    /// What sender and receiver alone read. Cheap to send to many.
    Bytes(Arc<[u8]>),
}

impl Payload {
    /// A value as bytes, for a receiver that knows its type.
    pub(crate) fn of<T: Serialize>(value: &T) -> Self {
        Self::Bytes(encoded(value))
    }

    /// The value that [`Payload::of`] wrote.
    pub(crate) fn read<T: for<'de> Deserialize<'de>>(self) -> Result<T, postcard::Error> {
        match self {
            Self::Bytes(bytes) => postcard::from_bytes(&bytes),
            _ => Err(postcard::Error::DeserializeUnexpectedEnd),
        }
    }
}

/// A value as bytes.
pub(crate) fn encoded<T: Serialize>(value: &T) -> Arc<[u8]> {
    postcard::to_stdvec(value).expect("text and numbers can be written").into()
}

/// A payload on its way.
#[derive(Debug)]
pub struct Message {
    pub(crate) from: Rank,
    pub(crate) step: u64,
    pub(crate) tag: Tag,
    pub(crate) payload: Payload,
    pub(crate) sent: Instant,
}

impl Message {
    /// When it was sent.
    pub fn sent(&self) -> Instant {
        self.sent
    }

    /// What it carries.
    pub fn into_payload(self) -> Payload {
        self.payload
    }
}

/// Shared text as plain text.
mod text {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Arc::from)
    }
}
