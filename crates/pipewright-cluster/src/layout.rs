//! How a model is trained: the mesh, the batch, and what is recomputed, sharded and fused.

pub use crate::layout_error::LayoutError;
use pipewright_shapes::matrix::Division;
use pipewright_shapes::model::{Mixer, Model};

/// The configuration of a training run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
    /// The groups of ranks that divide the experts among them.
    pub expert: u32,
    /// The ranks that divide each expert: a whole tensor group, or 1. With 1, each rank of a tensor group
    /// has whole experts, and the ranks of `expert` are drawn from tensor groups, too.
    pub expert_tensor: u32,
    /// The rows of a microbatch.
    pub microbatch: u32,
    /// The rows of a step.
    pub batch: u32,
    /// The tokens of a row.
    pub sequence: u32,
    /// The schedule of the pipeline; `None` for 1F1B, interleaved if there are several chunks.
    pub schedule: Option<String>,
    /// How blocks are divided among the stages.
    pub cut: Cut,
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

/// How blocks are divided among the stages of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Equal numbers of blocks. If the stages do not divide the blocks, the embedding and the head count as
    /// a block each.
    Even,
    /// The stage that takes longest is as short as possible, by the predicted times of the blocks, the
    /// embedding and the head.
    Balanced,
    /// These numbers of blocks.
    Given(Vec<u32>),
}

/// The precision of the products with parameters. Everything else is in a format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f16 or bf16.
    Half,
    /// FP8, except for the head.
    Fp8,
}

/// The part of the forward that the backward computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scores {
    /// In one kernel, which keeps no scores and skips pairs that are masked.
    Fused,
    /// By two products of matrices with a softmax between them, for all pairs.
    Unfused,
}

/// The tensors that the replicas of a stage divide among themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Nothing.
    Replicated,
    /// The state of the optimizer.
    Optimizer,
    /// Gradients and the state of the optimizer.
    Gradients,
    /// Parameters, gradients and the state of the optimizer.
    Parameters,
}

/// How kernels of elementwise operations are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// By hand or by a compiler: a chain of operations reads its inputs once and writes its outputs once.
    Fused,
    /// One kernel per operation.
    Separate,
}

impl Precision {
    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Half => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

impl Recompute {
    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

impl Sharding {
    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Replicated => "none",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Parameters => "parameters",
        }
    }
}

impl Layout {
    /// Returns the number of replicas.
    pub fn data(&self) -> u32 {
        (self.gpus / self.gpus_of_replica()).max(1)
    }

    /// Returns the number of ranks that have the same parameters, experts not included.
    pub fn replicas(&self) -> u32 {
        self.data().saturating_mul(self.context)
    }

    /// Returns the number of ranks that have the same experts.
    pub fn expert_replicas(&self) -> u32 {
        (self.expert_ranks() / self.expert.max(1)).max(1)
    }

    /// Returns the number of ranks, or of tensor groups if they divide each expert, among which experts can
    /// be divided.
    pub fn expert_ranks(&self) -> u32 {
        self.replicas().saturating_mul(self.tensor / self.expert_tensor.max(1))
    }

    /// Returns the GPUs of one replica.
    pub fn gpus_of_replica(&self) -> u32 {
        self.tensor.saturating_mul(self.pipeline).saturating_mul(self.context).max(1)
    }

    /// Returns the name of the schedule.
    pub fn schedule_name(&self) -> &str {
        let usual = if self.chunks > 1 { "interleaved1f1b" } else { "1f1b" };
        self.schedule.as_deref().unwrap_or(usual)
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

    /// Returns the elements per token of a linear layer's input and output that one rank of a tensor group
    /// keeps.
    pub(crate) fn widths_of(&self, [input, output]: [u64; 2], division: Division) -> [f64; 2] {
        let (tensor, sequence) = (f64::from(self.tensor), self.sequence_division());
        let [input_ranks, output_ranks] = match division {
            Division::Columns => [sequence, tensor],
            Division::Rows => [tensor, sequence],
            Division::Whole => [sequence, sequence],
        };
        [input as f64 / input_ranks, output as f64 / output_ranks]
    }

    /// Returns the inputs and outputs of a linear layer's matrix that one rank of a tensor group has.
    pub(crate) fn matrix_of(&self, [input, output]: [u64; 2], division: Division) -> [f64; 2] {
        let tensor = f64::from(self.tensor);
        let [input_ranks, output_ranks] = match division {
            Division::Columns => [1.0, tensor],
            Division::Rows => [tensor, 1.0],
            Division::Whole => [1.0, 1.0],
        };
        [input as f64 / input_ranks, output as f64 / output_ranks]
    }

    /// Checks that the layout fits itself and the model.
    ///
    /// # Errors
    /// When a size is 0, or does not divide what it divides, or a tensor group divides layers whose adapters
    /// have dropout.
    pub fn check(&self, model: &Model) -> Result<(), LayoutError> {
        self.check_parts(model)?;
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
        divides("replica", u64::from(self.expert_ranks()), self.expert, "expert")
    }

    /// Checks what holds for any number of GPUs and of rows: no size is 0, and the parts divide the model.
    pub(crate) fn check_parts(&self, model: &Model) -> Result<(), LayoutError> {
        self.check_sizes()?;
        self.check_cut(model)?;
        self.check_divisions(model)
    }

    fn check_cut(&self, model: &Model) -> Result<(), LayoutError> {
        let (blocks, stages) = (model.blocks.len(), self.stages());
        // The embedding and the head may have stages of their own.
        if blocks == 0 || blocks + 2 < stages as usize {
            return Err(LayoutError::Stages { blocks, stages });
        }
        let Cut::Given(sizes) = &self.cut else { return Ok(()) };
        let (cut_stages, cut_blocks) = (sizes.len(), sizes.iter().map(|&size| u64::from(size)).sum());
        if cut_stages != stages as usize || cut_blocks != blocks as u64 {
            return Err(LayoutError::Cut { cut_stages, cut_blocks, stages, blocks });
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), LayoutError> {
        let sizes = [
            ("gpus", self.gpus),
            ("tp", self.tensor),
            ("pp", self.pipeline),
            ("vp", self.chunks),
            ("cp", self.context),
            ("ep", self.expert),
            ("etp", self.expert_tensor),
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
        divides("token", u64::from(self.sequence), self.context, "context")?;
        let &Self { expert_tensor, tensor, .. } = self;
        if expert_tensor != 1 && expert_tensor != tensor && model.has_experts() {
            return Err(LayoutError::ExpertTensor { expert_tensor, tensor });
        }
        if tensor > 1 && model.has_dropout() {
            return Err(LayoutError::Dropout { tensor });
        }
        for block in &model.blocks {
            let heads = match block.mixer {
                Mixer::Attention(attention) => attention.heads,
                Mixer::Latent(latent) => latent.heads,
                Mixer::Mamba2(mamba) => mamba.heads,
                Mixer::None => 0,
            };
            divides("head", heads, self.tensor, "tensor")?;
            if let Some(experts) = block.feed_forward.experts() {
                divides("expert", experts.count, self.expert, "expert")?;
            }
        }
        Ok(())
    }
}

/// Checks that ranks can divide a number of parts. `what` is one part.
fn divides(what: &'static str, count: u64, ranks: u32, group: &'static str) -> Result<(), LayoutError> {
    if count.is_multiple_of(u64::from(ranks)) {
        Ok(())
    } else {
        Err(LayoutError::Division { what, count, ranks, group })
    }
}
