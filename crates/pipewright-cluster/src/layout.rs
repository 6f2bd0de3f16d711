//! How a model is trained: the mesh, the batch, and what is recomputed, sharded and fused.

use thiserror::Error;

use crate::model::{FeedForward, Mixer, Model};

/// The configuration of a training run.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// All GPUs.
    pub gpus: u32,
    /// The ranks of a tensor group.
    pub tensor: u32,
    /// The ranks of a pipeline.
    pub pipeline: u32,
    /// The chunks of a rank of a pipeline.
    pub chunks: u32,
    /// The ranks that divide each sequence.
    pub context: u32,
    /// The ranks that divide the experts; they are replicas.
    pub expert: u32,
    /// The rows of a microbatch.
    pub microbatch: u32,
    /// The rows of a step.
    pub batch: u32,
    /// The tokens of a row.
    pub sequence: u32,
    /// The schedule of the pipeline; `None` for 1F1B, interleaved if there are several chunks.
    pub schedule: Option<String>,
    /// The precision of the products.
    pub precision: Precision,
    /// The part of the forward that the backward computes again.
    pub recompute: Recompute,
    /// Whether the ranks of a tensor group divide the sequence between their products.
    pub sequence_parallel: bool,
    /// How scores are computed.
    pub scores: Scores,
    /// The tensors that replicas divide among themselves.
    pub sharding: Sharding,
    /// How kernels of elementwise operations are made.
    pub kernels: Kernels,
}

/// The precision of the products with parameters. Everything else is in a format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// f16 or bf16.
    Half,
    /// FP8, except for the head.
    Fp8,
}

/// The part of the forward that the backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// With unfused attention, the scores (arXiv 2205.05198). Fused attention keeps no scores. There,
    /// elementwise operations and every second product are computed again, as torchtitan's selective
    /// checkpoints do.
    Selective,
    /// All of a block.
    Full,
}

/// How scores of attention are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// In one kernel, which keeps no scores and skips pairs that are masked.
    Fused,
    /// By two products of matrices with a softmax between them, for all pairs.
    Unfused,
}

/// The tensors that the replicas of a stage divide among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// Nothing.
    Replicated,
    /// The state of the optimizer.
    Optimizer,
    /// Parameters, gradients and the state of the optimizer.
    Parameters,
}

/// How kernels of elementwise operations are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// By hand or by a compiler: a chain of operations reads its inputs once and writes its outputs once.
    Fused,
    /// One kernel per operation.
    Separate,
}

/// The errors of a layout.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A size is 0.
    #[error("`{name}` is 0; use at least 1")]
    Zero {
        /// The size.
        name: &'static str,
    },
    /// The GPUs are not a multiple of the mesh.
    #[error(
        "{gpus} GPUs are not a multiple of {of}, the product of tp = {tensor}, pp = {pipeline} and cp = {context}; use {} GPUs, or another mesh",
        near_multiple(*.gpus, *.of)
    )]
    Mesh {
        /// The GPUs.
        gpus: u32,
        /// The GPUs of a replica.
        of: u32,
        /// The ranks of a tensor group.
        tensor: u32,
        /// The ranks of a pipeline.
        pipeline: u32,
        /// The ranks of a sequence.
        context: u32,
    },
    /// The rows of a step are not a multiple of the rows that all replicas compute at once.
    #[error(
        "{batch} rows of a step are not a multiple of {of}, the rows of a microbatch on each of {data} replicas; use {} rows",
        near_multiple(*.batch, *.of)
    )]
    Batch {
        /// The rows of a step.
        batch: u32,
        /// The rows of all replicas.
        of: u32,
        /// The replicas.
        data: u32,
    },
    /// There are fewer blocks than stages.
    #[error("{blocks} blocks are fewer than the {stages} stages of pp x vp; use fewer stages")]
    Stages {
        /// The blocks of the model.
        blocks: usize,
        /// The stages.
        stages: u32,
    },
    /// A part of the model does not divide among ranks.
    #[error(
        "{count} {what} do not divide among {ranks} {group} ranks; use a number of ranks that divides {count}"
    )]
    Division {
        /// The parts.
        what: &'static str,
        /// Their number.
        count: u64,
        /// The ranks.
        ranks: u32,
        /// The kind of group.
        group: &'static str,
    },
}

pipewright_schedule::message_as_debug!(LayoutError);

/// Returns the smallest multiple that is not below `value`, or the one before it if this one is too large.
fn near_multiple(value: u32, of: u32) -> u32 {
    let before = || value - value.checked_rem(of).unwrap_or(0);
    value.checked_next_multiple_of(of).unwrap_or_else(before)
}

impl Layout {
    /// Returns the number of replicas.
    pub fn data(&self) -> u32 {
        (self.gpus / self.gpus_of_replica()).max(1)
    }

    /// Returns the GPUs of one replica.
    pub fn gpus_of_replica(&self) -> u32 {
        self.tensor.saturating_mul(self.pipeline).saturating_mul(self.context).max(1)
    }

    /// Returns the microbatches of a pipeline.
    pub fn microbatches(&self) -> u32 {
        (self.batch / self.data().saturating_mul(self.microbatch).max(1)).max(1)
    }

    /// Returns the stages of a pipeline.
    pub fn stages(&self) -> u32 {
        self.pipeline.saturating_mul(self.chunks)
    }

    /// Returns the tokens of a microbatch on one rank.
    pub fn tokens(&self) -> f64 {
        f64::from(self.microbatch) * f64::from(self.sequence) / f64::from(self.context)
    }

    /// Returns the tokens of a step of all replicas.
    pub fn step_tokens(&self) -> f64 {
        f64::from(self.batch) * f64::from(self.sequence)
    }

    /// Returns the number of ranks that divide tensors between products: the tensor group's, with sequence
    /// parallelism, or 1.
    pub fn sequence_division(&self) -> f64 {
        if self.sequence_parallel { f64::from(self.tensor) } else { 1.0 }
    }

    /// Checks that the layout fits itself and the model.
    ///
    /// # Errors
    /// When a size is 0, or does not divide what it divides.
    pub fn check(&self, model: &Model) -> Result<(), LayoutError> {
        self.check_sizes()?;
        let of = self.gpus_of_replica();
        if !self.gpus.is_multiple_of(of) {
            let Self { gpus, tensor, pipeline, context, .. } = *self;
            return Err(LayoutError::Mesh { gpus, of, tensor, pipeline, context });
        }
        let (batch, data) = (self.batch, self.data());
        let of = self.microbatch.saturating_mul(data);
        if !batch.is_multiple_of(of) {
            return Err(LayoutError::Batch { batch, of, data });
        }
        let (blocks, stages) = (model.blocks.len(), self.stages());
        if blocks < stages as usize {
            return Err(LayoutError::Stages { blocks, stages });
        }
        self.check_divisions(model)
    }

    fn check_sizes(&self) -> Result<(), LayoutError> {
        let sizes = [
            ("gpus", self.gpus),
            ("tp", self.tensor),
            ("pp", self.pipeline),
            ("vp", self.chunks),
            ("cp", self.context),
            ("ep", self.expert),
            ("mbs", self.microbatch),
            ("gbs", self.batch),
            ("seq", self.sequence),
        ];
        match sizes.into_iter().find(|&(_, size)| size == 0) {
            Some((name, _)) => Err(LayoutError::Zero { name }),
            None => Ok(()),
        }
    }

    fn check_divisions(&self, model: &Model) -> Result<(), LayoutError> {
        let divides = |what, count: u64, ranks: u32, group| {
            if count.is_multiple_of(u64::from(ranks)) {
                Ok(())
            } else {
                Err(LayoutError::Division { what, count, ranks, group })
            }
        };
        divides("tokens of a row", u64::from(self.sequence), self.context, "context")?;
        divides("replicas", u64::from(self.data()), self.expert, "expert")?;
        for block in &model.blocks {
            let heads = match block.mixer {
                Mixer::Attention(attention) => attention.heads,
                Mixer::Latent(latent) => latent.heads,
                Mixer::Mamba2(mamba) => mamba.heads,
                Mixer::None => 0,
            };
            divides("heads", heads, self.tensor, "tensor")?;
            if let FeedForward::Experts(experts) = block.feed_forward {
                divides("experts", experts.count, self.expert, "expert")?;
            }
        }
        Ok(())
    }
}
