//! How a stack trains a layout: the formats of the tensors that it holds, the kernels that it has, and the
//! exchanges that products hide.
//!
//! Two stacks with the same layout differ in these settings, in time and in memory. The shares of the hardware
//! that a stack's programs reach are in [`crate::stack_constants`].

use pipewright_schedule::mesh::ShardedState;

/// A system that trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Stack {
    /// Megatron Core with NeMo or Megatron-Bridge.
    #[default]
    Megatron,
    /// torchtitan.
    Torchtitan,
    /// NeMo Automodel: FSDP2 with kernels of Transformer Engine.
    Automodel,
    /// OLMo-core.
    OlmoCore,
    /// DeepSeek's HAI-LLM.
    HaiLlm,
}

/// The format of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NumberFormat {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte, with scales of tensors or blocks.
    Fp8,
    /// 4 bits, with a scale of one byte for 16 numbers.
    Nvfp4,
    /// 1 byte, with a scale of four bytes for 256 numbers, as 8-bit optimizers have.
    Int8,
}

/// The precision of the products with parameters. Everything else is in a format of 16 bits, or of 32 with
/// [`Precision::Single`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f16 or bf16.
    Half,
    /// FP8 with scales of tensors, except for the head.
    Fp8,
    /// FP8 with scales of 32 numbers (MXFP8), except for the head.
    Mxfp8,
    /// 4 bits with scales of 16 numbers (NVFP4), except for the head.
    Nvfp4,
    /// f32, without copies in another precision.
    Single,
}

/// The rule by which parameters are updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Optimizer {
    /// Two moments of each parameter.
    #[default]
    Adam,
    /// One moment of each parameter of a matrix, which products of matrices make orthogonal. Tables and vectors
    /// have two moments.
    Muon,
}

/// The arrays of the loss, which are as large as the logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Loss {
    /// Logits, logarithms of probabilities and their gradients.
    #[default]
    Separate,
    /// Logits, which their gradient replaces.
    Fused,
    /// Logits of some of the tokens at a time, with the head's product.
    Chunked,
}

/// The part of a step whose kernels are launched as one graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Graphs {
    /// Nothing: the host launches each kernel.
    #[default]
    None,
    /// Parts of blocks whose sizes do not depend on the routing of tokens.
    Partial,
    /// The whole step.
    Full,
}

/// The library that sends tokens to the ranks of their experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Dispatcher {
    /// One exchange of all ranks with all ranks: each copy of a token is sent by itself.
    AllToAll,
    /// DeepEP: a token is sent once to each node that has one of its experts.
    #[default]
    DeepEp,
    /// HybridEP: as DeepEP, for nodes of any size, with fewer multiprocessors.
    HybridEp,
}

/// How kernels of elementwise operations are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KernelFusion {
    /// By hand or by a compiler: a chain of operations reads its inputs once and writes its outputs once.
    #[default]
    Fused,
    /// One kernel per operation.
    Separate,
}

/// The formats of the training state of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateFormats {
    /// The weights that products read, or the shards that they are gathered from.
    pub weights: NumberFormat,
    /// The copy that the optimizer updates; `None` if it updates the weights.
    pub main_weights: Option<NumberFormat>,
    /// Each moment of the optimizer.
    pub moments: NumberFormat,
    /// The sums of gradients.
    pub gradients: NumberFormat,
}

/// How a stack trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Implementation {
    /// The stack.
    pub stack: Stack,
    /// The formats of the training state; `None` for the usual ones of the sharding.
    pub state: Option<StateFormats>,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The arrays of the loss.
    pub loss: Loss,
    /// How kernels of elementwise operations are made.
    pub kernels: KernelFusion,
    /// The kernels that are launched as one graph.
    pub graphs: Graphs,
    /// Whether products hide the exchanges of tensor groups; `None` if it is not known.
    pub overlaps_tensor: Option<bool>,
    /// Whether tokens travel to experts and back while another microbatch is computed.
    pub overlaps_experts: bool,
    /// The library that sends tokens to experts.
    pub dispatcher: Dispatcher,
    /// The format of tokens that are sent to experts; `None` for the format of other tensors, in which the results
    /// come back.
    pub dispatched: Option<NumberFormat>,
    /// The rows of the expert rank that has most, as percent of the mean.
    pub expert_load: u32,
    /// Whether gathered parameters are dropped behind a forward and gathered again for the backward.
    pub reshards: bool,
}

/// The rows of the expert rank that has most, as percent of the mean, if nothing forces an even routing. With a
/// loss that balances experts, the rank that has most gets 1.1 to 1.3 times the mean (DeepSeek's EPLB and
/// arXiv 2412.19437, figure 9; arXiv 2101.03961 plans buffers of 1.25 times the mean).
pub const USUAL_LOAD: u32 = 125;

impl Stack {
    /// The names in files.
    pub const NAMES: [(&str, Self); 5] = [
        ("megatron", Self::Megatron),
        ("torchtitan", Self::Torchtitan),
        ("automodel", Self::Automodel),
        ("olmo-core", Self::OlmoCore),
        ("hai-llm", Self::HaiLlm),
    ];

    /// Returns its name in files.
    pub fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }
}

/// Returns the first name of a value in a list of names.
pub(crate) fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, own)| *own == value).map_or("", |(name, _)| name)
}

impl NumberFormat {
    /// Returns the bytes of a number with its share of scales.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Fp8 => 1.0,
            Self::Nvfp4 => 0.5 + 1.0 / 16.0,
            Self::Int8 => 1.0 + 4.0 / 256.0,
        }
    }
}

impl Precision {
    /// The names in files and options. The first name of a precision is the one that is written.
    pub const NAMES: [(&str, Self); 7] = [
        ("bf16", Self::Half),
        ("f16", Self::Half),
        ("fp16", Self::Half),
        ("fp8", Self::Fp8),
        ("mxfp8", Self::Mxfp8),
        ("nvfp4", Self::Nvfp4),
        ("f32", Self::Single),
    ];

    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }

    /// Returns the bytes of a number in the products' inputs.
    pub fn bytes(self) -> f64 {
        match self {
            Self::Half => NumberFormat::Bf16.bytes(),
            Self::Fp8 | Self::Mxfp8 => NumberFormat::Fp8.bytes(),
            Self::Nvfp4 => NumberFormat::Nvfp4.bytes(),
            Self::Single => NumberFormat::F32.bytes(),
        }
    }

    /// Returns whether products have inputs of 8 or 4 bits, which are cast from a wider format.
    pub(crate) fn is_narrow(self) -> bool {
        self != self.outside_products()
    }

    /// Returns the precision of everything that is not a product with a block's parameters.
    pub(crate) fn outside_products(self) -> Self {
        match self {
            Self::Half | Self::Fp8 | Self::Mxfp8 | Self::Nvfp4 => Self::Half,
            Self::Single => Self::Single,
        }
    }

    /// Returns the format of an element outside the products.
    pub(crate) fn element_format(self) -> NumberFormat {
        match self {
            Self::Half | Self::Fp8 | Self::Mxfp8 | Self::Nvfp4 => NumberFormat::Bf16,
            Self::Single => NumberFormat::F32,
        }
    }

    /// Returns the bytes of an element outside the products.
    pub(crate) fn element_bytes(self) -> f64 {
        self.element_format().bytes()
    }
}

impl StateFormats {
    /// Returns the formats that stacks have if nothing else is said. With sharded parameters, or products in single
    /// precision, the weights or their shards are in single precision and the optimizer updates them. With products
    /// in a narrow format, gradients are summed in bf16, as in the recipes of NeMo and Megatron-Bridge.
    pub fn usual(sharding: ShardedState, precision: Precision) -> Self {
        let is_sharded = sharding == ShardedState::Parameters;
        let is_single = is_sharded || precision == Precision::Single;
        Self {
            weights: if is_single { NumberFormat::F32 } else { NumberFormat::Bf16 },
            main_weights: (!is_single).then_some(NumberFormat::F32),
            moments: NumberFormat::F32,
            gradients: if is_sharded || !precision.is_narrow() {
                NumberFormat::F32
            } else {
                NumberFormat::Bf16
            },
        }
    }

    /// Returns the bytes of the optimizer for a parameter: its copy and `moments` moments.
    pub fn optimizer_bytes(&self, moments: f64) -> f64 {
        self.main_weights.map_or(0.0, NumberFormat::bytes) + moments * self.moments.bytes()
    }
}

impl Optimizer {
    /// The moments of a parameter of a table or a vector.
    pub const TABLE_MOMENTS: f64 = 2.0;

    /// Returns the moments of a parameter of a matrix.
    pub fn moments(self) -> f64 {
        match self {
            Self::Adam => 2.0,
            Self::Muon => 1.0,
        }
    }
}

impl Implementation {
    /// Returns the settings that a stack has if nothing else is said.
    pub fn usual(stack: Stack) -> Self {
        Self {
            stack,
            state: None,
            optimizer: Optimizer::default(),
            loss: Loss::default(),
            kernels: KernelFusion::default(),
            graphs: Graphs::default(),
            overlaps_tensor: None,
            overlaps_experts: false,
            dispatcher: Dispatcher::default(),
            dispatched: None,
            expert_load: USUAL_LOAD,
            reshards: true,
        }
    }

    /// Returns whether the products of a rank's experts are one kernel. Stacks of PyTorch have it, and Megatron
    /// where the whole step is one graph.
    pub fn has_one_grouped_kernel(&self) -> bool {
        match self.stack {
            Stack::Megatron => self.graphs == Graphs::Full,
            Stack::Torchtitan | Stack::Automodel | Stack::OlmoCore | Stack::HaiLlm => true,
        }
    }
}
