//! How a model is trained: the mesh, the batch, and what is recomputed, sharded and fused.

pub use pipewright_schedule::emit::Modules;
use pipewright_schedule::generate::{StageRule, find};
pub use pipewright_schedule::mesh::ShardedState;
use pipewright_schedule::mesh::{Mesh, MeshOrder};
use pipewright_schedule::simulate::ClosedForm;
use pipewright_schedule::words::counted;

pub use crate::implementation::Precision;
use crate::implementation::{Implementation, NumberFormat, Stack, StateFormats};
use crate::layout_error::Fault;
pub use crate::layout_error::LayoutError;
pub use crate::recompute::{Recompute, Scores};
use crate::size_names::{
    BATCH, CHUNKS, CONTEXT, DOCUMENT, EXPERT, EXPERT_TENSOR, GPUS, GivenSizes, MICROBATCH, Names, PASS,
    PIPELINE, SEQUENCE, SHARDS, Size, TENSOR,
};
use pipewright_shapes::matrix::{Division, Matrix};
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
    /// The blocks of each stage, from its first one, that are computed again whole if `recompute` is
    /// [`Recompute::Full`]; `None` for all.
    pub recompute_layers: Option<u32>,
    /// The blocks of a rank, from its first one, whose activations go to the host until their backward.
    pub offload_layers: u32,
    /// How scores are computed.
    pub scores: Scores,
    /// The tensors that replicas divide among themselves.
    pub sharding: ShardedState,
    /// The replicas that divide these tensors; `None` for all. Further replicas have copies.
    pub shards: Option<u32>,
    /// The microbatches of one run of the schedule; `None` for all of a step. Between two runs, the pipeline
    /// is empty.
    pub pass_microbatches: Option<u32>,
    /// The tokens of a document, if attention does not cross from one document of a row to another.
    pub document_tokens: Option<u32>,
    /// How the stack trains.
    pub implementation: Implementation,
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
    Given {
        /// The blocks of each stage.
        blocks: Vec<u32>,
        /// The stage of the blocks that predict further tokens.
        predictors: u32,
    },
}

impl Layout {
    /// Returns the layout of one row on one GPU, which divides nothing and recomputes nothing.
    pub fn on_one_gpu(sequence: u32, precision: Precision) -> Self {
        Self {
            gpus: 1,
            tensor: 1,
            pipeline: 1,
            chunks: 1,
            context: 1,
            expert: 1,
            expert_tensor: 1,
            microbatch: 1,
            batch: 1,
            sequence,
            schedule: None,
            cut: Cut::Even,
            precision,
            recompute: Recompute::None,
            recompute_layers: None,
            offload_layers: 0,
            sequence_parallel: false,
            scores: Scores::Fused,
            sharding: ShardedState::Optimizer,
            shards: None,
            pass_microbatches: None,
            document_tokens: None,
            implementation: Implementation::usual(Stack::default()),
        }
    }

    /// Returns the mesh. Its replicas are as many as the GPUs allow.
    pub fn mesh(&self) -> Mesh {
        Mesh {
            pipeline: self.pipeline,
            data: self.data(),
            tensor: self.tensor,
            context: self.context,
            experts: self.expert,
            shards: self.sharding.shards(self.shards.unwrap_or(self.data())),
            order: MeshOrder::Replicas,
        }
    }

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

    /// Returns the number of ranks that divide what is sharded, experts not included.
    pub fn shards(&self) -> u32 {
        self.shards.map_or(self.replicas(), |shards| shards.saturating_mul(self.context))
    }

    /// Returns the groups of replicas that each hold all of what is sharded: 1 if nothing is.
    pub fn shard_groups(&self) -> u32 {
        if self.sharding == ShardedState::Nothing {
            1
        } else {
            (self.replicas() / self.shards().max(1)).max(1)
        }
    }

    /// Returns the groups of ranks that each hold all of what is sharded of the same experts.
    pub fn expert_shard_groups(&self) -> u32 {
        self.shard_groups().min(self.expert_replicas())
    }

    /// Returns the number of ranks that divide what is sharded of experts.
    pub fn expert_shards(&self) -> u32 {
        (self.expert_replicas() / self.expert_shard_groups()).max(1)
    }

    /// Returns the formats of the training state.
    pub fn state_formats(&self) -> StateFormats {
        self.implementation.state.unwrap_or_else(|| StateFormats::usual(self.sharding, self.precision))
    }

    /// Returns the format in which sharded parameters are gathered.
    pub fn gathered_format(&self) -> NumberFormat {
        match self.state_formats().weights {
            narrow @ (NumberFormat::Fp8 | NumberFormat::Nvfp4) => narrow,
            NumberFormat::F32 | NumberFormat::Bf16 | NumberFormat::Int8 => self.precision.element_format(),
        }
    }

    /// Returns the rows of the expert rank that has most, divided by the mean: 1 if each rank has all experts.
    pub fn expert_load(&self) -> f64 {
        if self.expert > 1 { f64::from(self.implementation.expert_load) / 100.0 } else { 1.0 }
    }

    /// Returns the rows of a matrix's input for each token: 1, or the experts of a token on the rank that has most.
    pub(crate) fn rows_per_token(&self, matrix: &Matrix) -> f64 {
        matrix.of_experts.map_or(1.0, |share| share.used as f64 * self.expert_load())
    }

    /// Returns whether ranks exchange the tokens of experts while another microbatch is computed.
    pub fn overlaps_experts(&self, model: &Model) -> bool {
        self.implementation.overlaps_experts && self.expert > 1 && model.has_experts()
    }

    /// Returns whether gathered parameters stay until their backward: in a pipeline, until the step ends, as in the
    /// stages of PyTorch and Megatron.
    pub fn keeps_gathered(&self) -> bool {
        self.pipeline > 1 || !self.implementation.reshards
    }

    /// Returns whether whole gradients are summed over the microbatches of a step before replicas reduce them, with
    /// sharded parameters. Without a pipeline, each microbatch reduces its own.
    pub fn sums_gradients(&self) -> bool {
        self.pipeline > 1
    }

    /// Returns the format of adapters: of the copy that the optimizer updates, or of the weights without a copy.
    pub fn adapter_format(&self) -> NumberFormat {
        let formats = self.state_formats();
        formats.main_weights.unwrap_or(formats.weights)
    }

    /// Returns the runs of the schedule in a step.
    pub fn passes(&self) -> u32 {
        self.pass_microbatches.map_or(1, |of_pass| self.step_microbatches().div_ceil(of_pass.max(1)))
    }

    /// Returns the name of the schedule.
    pub fn schedule_name(&self) -> &str {
        let usual = if self.chunks > 1 { "interleaved1f1b" } else { "1f1b" };
        self.schedule.as_deref().unwrap_or(usual)
    }

    /// Returns the microbatches of a pipeline in a step.
    pub fn step_microbatches(&self) -> u32 {
        (self.batch / self.data().saturating_mul(self.microbatch).max(1)).max(1)
    }

    /// Returns the microbatches of a pipeline in one run of the schedule.
    pub fn microbatches(&self) -> u32 {
        let all = self.step_microbatches();
        self.pass_microbatches.map_or(all, |of_pass| of_pass.clamp(1, all))
    }

    /// Returns the tokens that attention sees at most: of a row, or of a document of it.
    pub fn attention_tokens(&self) -> u32 {
        self.document_tokens.map_or(self.sequence, |tokens| tokens.min(self.sequence))
    }

    /// Returns the stages of a pipeline.
    pub fn stages(&self) -> u32 {
        self.pipeline.saturating_mul(self.chunks)
    }

    /// Returns the stages of each rank of a pipeline, in a loop over the ranks, or down the ranks and up again.
    pub(crate) fn stages_of_rank(&self) -> Vec<Vec<usize>> {
        self.stages_by_rank(&self.rank_of_stage())
    }

    /// Returns the same from the rank of each stage.
    pub(crate) fn stages_by_rank(&self, rank_of_stage: &[usize]) -> Vec<Vec<usize>> {
        let mut stages_of_rank = vec![Vec::with_capacity(self.chunks as usize); self.pipeline as usize];
        for (stage, &rank) in rank_of_stage.iter().enumerate() {
            stages_of_rank[rank].push(stage);
        }
        stages_of_rank
    }

    /// Returns the rank of each stage of a pipeline, in the same order.
    pub(crate) fn rank_of_stage(&self) -> Vec<usize> {
        let generator = self.schedule.as_deref().and_then(|name| find(name).ok());
        let is_v =
            generator.is_some_and(|generator| matches!(generator.stages, StageRule::V | StageRule::Vs));
        let ranks = self.pipeline.max(1) as usize;
        let rank = |stage: usize| {
            let (chunk, place) = (stage / ranks, stage % ranks);
            if is_v && !chunk.is_multiple_of(2) { ranks - 1 - place } else { place }
        };
        (0..self.stages() as usize).map(rank).collect()
    }

    /// Returns the stage of the blocks that predict further tokens.
    pub(crate) fn predictor_stage(&self) -> usize {
        let last = self.stages().saturating_sub(1) as usize;
        match self.cut {
            Cut::Given { predictors, .. } => (predictors as usize).min(last),
            Cut::Even | Cut::Balanced => last,
        }
    }

    /// Returns the hidden states of a token that a stage passes on: from the stage of the predictors on, one for each
    /// predictor and one for the next token.
    pub(crate) fn passed_states(&self, stage: usize, model: &Model) -> f64 {
        if stage < self.predictor_stage() { 1.0 } else { 1.0 + f64::from(model.predictors) }
    }

    /// Returns the blocks of each stage that are computed again whole, if not all of them are.
    pub(crate) fn recomputed_blocks(&self) -> Option<u32> {
        self.recompute_layers.filter(|_| self.recompute == Recompute::Full)
    }

    /// Returns the size of the pipeline for 1F1B without a simulation.
    pub(crate) fn closed_form(&self) -> ClosedForm {
        ClosedForm { ranks: self.pipeline, microbatches: self.microbatches(), chunks: self.chunks }
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

    /// Describes the layout of a model. Groups of one rank are left out.
    pub fn text(&self, model: &Model) -> String {
        let groups = [
            ("tensor", self.tensor),
            ("pipeline", self.pipeline),
            ("data", self.data()),
            ("context", self.context),
            ("expert", self.expert),
        ];
        let groups = groups.into_iter().filter(|(_, ranks)| *ranks > 1);
        let mut mesh = groups.map(|(name, ranks)| format!("{name} {ranks}")).collect::<Vec<_>>().join(" x ");
        if mesh.is_empty() {
            mesh.push_str("one GPU");
        }
        if self.sequence_parallel && self.tensor > 1 {
            mesh.push_str(", sequence parallel");
        }
        if self.tensor > 1 && model.has_experts() {
            mesh.push_str(&format!(", each expert on {}", counted(self.expert_tensor, "rank")));
        }
        if self.pipeline > 1 || self.chunks > 1 || self.schedule.is_some() {
            let chunks = counted(self.chunks, "stage");
            mesh.push_str(&format!("; {} with {chunks} per rank", self.schedule_name()));
        }
        let groups = match self.shards {
            Some(shards) if self.shard_groups() > 1 => {
                format!(" in groups of {}", counted(shards, "replica"))
            }
            _ => String::new(),
        };
        let overlap =
            if self.overlaps_experts(model) { "; experts' exchange behind another microbatch" } else { "" };
        format!(
            "{mesh}; {} of {}; recompute {}; shard {}{groups}{overlap}",
            counted(self.microbatches(), "microbatch"),
            counted(self.microbatch, "row"),
            self.recompute.name(),
            self.sharding.name()
        )
    }

    /// Checks that the layout fits itself and the model.
    ///
    /// # Errors
    /// When a size is 0, or does not divide what it divides, or a tensor group divides layers whose adapters
    /// have dropout.
    pub fn check(&self, model: &Model) -> Result<(), LayoutError> {
        let given = || GivenSizes {
            names: Names::Keys,
            sizes: self.sizes().to_vec(),
            gpus_per_node: 1,
            is_mixed: false,
        };
        self.find_fault(model).map_err(|fault| fault.error(&given()))
    }

    /// Does the same without a sentence.
    pub(crate) fn find_fault(&self, model: &Model) -> Result<(), Fault> {
        self.check_parts(model)?;
        let (gpus, of) = (self.gpus, self.gpus_of_replica());
        if !gpus.is_multiple_of(of) {
            return Err(Fault::Mesh { gpus, of: of.into() });
        }
        let (batch, data) = (self.batch, self.data());
        let of = self.microbatch.saturating_mul(data);
        if !batch.is_multiple_of(of) {
            return Err(Fault::Batch { batch, of, data });
        }
        if let Some(of_pass) = self.pass_microbatches {
            divides("microbatch", u64::from(self.step_microbatches()), PASS, of_pass)?;
        }
        if let Some(shards) = self.shards {
            divides("replica", u64::from(data), SHARDS, shards)?;
        }
        divides("replica", u64::from(self.expert_ranks()), EXPERT, self.expert)
    }

    /// Checks what is true of any number of GPUs and of rows: no size is 0, and the parts divide the model.
    pub(crate) fn check_parts(&self, model: &Model) -> Result<(), Fault> {
        let given = [(PASS, self.pass_microbatches), (SHARDS, self.shards), (DOCUMENT, self.document_tokens)];
        let given = given.into_iter().filter_map(|(size, value)| Some((size, value?)));
        if let Some((size, _)) = self.sizes().into_iter().chain(given).find(|&(_, value)| value == 0) {
            return Err(Fault::Zero(size));
        }
        self.check_cut(model)?;
        self.check_divisions(model)
    }

    fn check_cut(&self, model: &Model) -> Result<(), Fault> {
        let (blocks, stages) = (model.blocks.len(), self.stages());
        // The embedding and the head may have stages of their own.
        if blocks == 0 || blocks + 2 < stages as usize {
            return Err(Fault::Stages { blocks, stages });
        }
        let Cut::Given { blocks: sizes, predictors } = &self.cut else { return Ok(()) };
        let (cut_stages, cut_blocks) = (sizes.len(), sizes.iter().map(|&size| u64::from(size)).sum());
        if cut_stages != stages as usize || cut_blocks != blocks as u64 {
            return Err(Fault::Cut { cut_stages, cut_blocks, stages, blocks });
        }
        if *predictors >= stages {
            return Err(Fault::Predictors { stage: *predictors, stages });
        }
        Ok(())
    }

    /// Returns all sizes.
    pub(crate) fn sizes(&self) -> [(Size, u32); 10] {
        [
            (GPUS, self.gpus),
            (TENSOR, self.tensor),
            (PIPELINE, self.pipeline),
            (CHUNKS, self.chunks),
            (CONTEXT, self.context),
            (EXPERT, self.expert),
            (EXPERT_TENSOR, self.expert_tensor),
            (MICROBATCH, self.microbatch),
            (BATCH, self.batch),
            (SEQUENCE, self.sequence),
        ]
    }

    fn check_divisions(&self, model: &Model) -> Result<(), Fault> {
        divides("token", u64::from(self.sequence), CONTEXT, self.context)?;
        let &Self { expert_tensor, tensor, .. } = self;
        if expert_tensor != 1 && expert_tensor != tensor && model.has_experts() {
            return Err(Fault::ExpertTensor { expert_tensor, tensor });
        }
        if tensor > 1 && model.has_dropout() {
            return Err(Fault::Dropout(tensor));
        }
        for block in &model.blocks {
            if let Some(heads) = heads(&block.mixer) {
                divides("head", heads, TENSOR, self.tensor)?;
            }
            if let Some(experts) = block.feed_forward.experts() {
                divides("expert", experts.count, EXPERT, self.expert)?;
            }
        }
        Ok(())
    }
}

/// Returns the heads of a mixer, which the ranks of a tensor group divide.
pub(crate) fn heads(mixer: &Mixer) -> Option<u64> {
    match mixer {
        Mixer::Attention(attention) => Some(attention.heads),
        Mixer::Latent(latent) => Some(latent.heads),
        Mixer::Mamba2(mamba) => Some(mamba.heads),
        Mixer::Delta(delta) => Some(delta.key_heads),
        Mixer::None => None,
    }
}

/// Checks that ranks can divide a number of parts. `what` is one part.
fn divides(what: &'static str, count: u64, group: Size, ranks: u32) -> Result<(), Fault> {
    if count.is_multiple_of(u64::from(ranks)) {
        Ok(())
    } else {
        Err(Fault::Division { what, count, group, ranks })
    }
}
