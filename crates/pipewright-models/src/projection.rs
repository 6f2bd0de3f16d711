//! A linear layer of a block, which may have a low-rank adapter ([`LoraConfig`](crate::lora::LoraConfig)).
//!
//! Both matrices of the adapter are linear layers of `pipewright::nn`, so every schedule can defer their
//! gradients. The base's gradient is not computed if its stage freezes it.

#![expect(
    non_snake_case,
    reason = "the fields `lora_A` and `lora_B` are the names of the parameters in PEFT"
)]

use std::cell::OnceCell;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use pipewright::nn::{Dropout, Linear, TensorParallel, linear};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;

use crate::error::ConfigError;
use crate::file_layout::{FileLayout, OutputParts};
use crate::parameter::{Builder, ParameterKind, ParameterSource, SplitLinear};
use crate::split::require_groups;

/// A linear layer with an adapter, or without one. Fields have the names in a Hugging Face directory, because
/// parameter paths consist of them.
#[derive(Module, Debug)]
pub(crate) struct Projection {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
    /// The adapter's first matrix, `[inputs, rank]`.
    lora_A: Option<Linear>,
    /// The adapter's second matrix, `[rank, outputs]`.
    lora_B: Option<Linear>,
    #[module(skip)]
    adapter: Option<Adaptation>,
}

/// The input of several projections. In half precision their adapters share its copy in single precision,
/// which is made for the first one.
pub(crate) struct SharedInput {
    x: Tensor<2>,
    in_single: OnceCell<Tensor<2>>,
}

/// How a layer uses its adapter.
#[derive(Clone, Debug)]
struct Adaptation {
    /// The path of the layer, which names its random numbers.
    path: String,
    scale: f64,
    dropout: f64,
}

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds a linear layer that is split, like [`Builder::split_linear`], with an adapter if the source has
    /// one for it.
    pub(crate) fn projection(
        &mut self,
        bias: bool,
        path: &str,
        [inputs, outputs]: [usize; 2],
        split: SplitLinear,
    ) -> Result<Projection, S::Error> {
        self.projection_of_parts(bias, path, [inputs, outputs], split, None)
    }

    /// Like [`Builder::projection`], for outputs that may consist of several parts.
    fn projection_of_parts(
        &mut self,
        bias: bool,
        path: &str,
        [inputs, outputs]: [usize; 2],
        split: SplitLinear,
        parts: Option<OutputParts>,
    ) -> Result<Projection, S::Error> {
        let layout = FileLayout { inputs_first: self.inputs_first(), parts, entry: None };
        let stored = |_: &str| layout.clone();
        let Linear { weight, bias } = self.linear_in(bias, path, [inputs, outputs], split, stored)?;
        let mut projection = Projection { weight, bias, lora_A: None, lora_B: None, adapter: None };
        let named = self.named(path);
        let Some(lora) = self.lora().filter(|lora| lora.adapts(&named)) else { return Ok(projection) };
        let (rank, ranks) = (lora.rank as usize, self.tensor_ranks());
        let adapter = Adaptation { path: named, scale: lora.scale(), dropout: lora.dropout };
        if ranks > 1 && adapter.dropout > 0.0 {
            return Err(ConfigError::LoraDropout { ranks }.into());
        }
        let (first, second) = match split {
            // Each rank computes what its outputs contribute to the gradient of the first matrix.
            SplitLinear::Outputs { shards } => (Placement::REPLICATED_PARTIAL, Placement::split(1, shards)),
            // The ranks add the results of the first matrix, so all have the whole gradient of the second
            // one.
            SplitLinear::Inputs | SplitLinear::InputsOfSum => {
                (Placement::split(0, ranks), Placement::REPLICATED)
            }
            SplitLinear::Whole => (Placement::REPLICATED, Placement::REPLICATED),
            SplitLinear::OneRank => (Placement::ON_ONE_RANK, Placement::ON_ONE_RANK),
        };
        let mut matrix = |name: &str, shape, parts, placement| {
            let layer = format!("{path}.{name}");
            let kind = (ParameterKind::Matrix, FileLayout { parts, ..FileLayout::default() });
            let weight = self.stored(&layer, "weight", shape, kind, placement);
            weight.map(|weight| Some(Linear { weight, bias: None }))
        };
        projection.lora_A = matrix("lora_A", [inputs, rank], None, first)?;
        projection.lora_B = matrix("lora_B", [rank, outputs], parts, second)?;
        projection.adapter = Some(adapter);
        Ok(projection)
    }
}

/// Returns the path of the first projection that has the same input as the one at a path: queries, keys and
/// values have the same, and so have gate and up, and the matrices that make latents.
pub(crate) fn input_of(projection: &str) -> String {
    let (block, name) = projection.rsplit_once('.').unwrap_or_default();
    match name {
        "k_proj" | "v_proj" => format!("{block}.q_proj"),
        "up_proj" => format!("{block}.gate_proj"),
        "kv_a_proj_with_mqa" => format!("{block}.q_a_proj"),
        _ => projection.to_owned(),
    }
}

/// Returns the outputs `[tokens, outputs]` of a joined projection that belong to a part, of all groups that
/// the rank has.
pub(crate) fn part_of(outputs: Tensor<2>, parts: OutputParts, part: usize) -> Tensor<2> {
    let ([tokens, width], own) = (outputs.dims(), parts.widths[part]);
    let groups = width / parts.group();
    let start = parts.widths[..part].iter().sum();
    outputs.reshape([tokens, groups, parts.group()]).narrow(2, start, own).reshape([tokens, groups * own])
}

impl SharedInput {
    /// Shares `x`, of the shape `[tokens, inputs]`.
    pub(crate) fn new(x: Tensor<2>) -> Self {
        Self { x, in_single: OnceCell::new() }
    }

    fn in_single(&self) -> Tensor<2> {
        self.in_single.get_or_init(|| self.x.clone().cast(DType::F32)).clone()
    }
}

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds a linear layer whose outputs are several parts. Each rank has the outputs of some groups.
    ///
    /// # Errors
    /// When the ranks do not have as many groups each. The error names the size of `key`.
    pub(crate) fn joined_projection(
        &mut self,
        bias: bool,
        path: &str,
        inputs: usize,
        (key, parts): ((&'static str, usize), OutputParts),
    ) -> Result<Projection, S::Error> {
        let shards = self.tensor_ranks();
        require_groups(&self.named(path), key, parts.groups, shards)?;
        let (sizes, split) = ([inputs, parts.outputs()], SplitLinear::Outputs { shards });
        self.projection_of_parts(bias, path, sizes, split, Some(parts))
    }
}

impl Projection {
    /// Returns the matrix with what the adapter adds to it, `[inputs, outputs]`, for a layer without a bias.
    pub(crate) fn matrix(&self) -> Tensor<2> {
        let weight = self.weight.val();
        let (Some(first), Some(second), Some(adapter)) = (&self.lora_A, &self.lora_B, &self.adapter) else {
            return weight;
        };
        let precision = weight.dtype();
        weight + (first.weight.val().matmul(second.weight.val()) * adapter.scale).cast(precision)
    }

    /// Returns `x w + b`, with the adapter's output. Every rank has all inputs and some of the outputs.
    /// Shapes: `x [tokens, inputs]`, result `[tokens, outputs]`.
    pub(crate) fn forward(&self, x: &SharedInput, context: &StageContext) -> Tensor<2> {
        // One rank holds all inputs.
        self.forward_split_inputs(x, &TensorParallel::default(), context)
    }

    /// Like [`Projection::forward`], for a layer whose inputs are split over the ranks of `tensor`. The
    /// result is equal on all ranks.
    pub(crate) fn forward_split_inputs(
        &self,
        x: &SharedInput,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let y = linear(x.x.clone(), &self.weight, self.bias.as_ref(), tensor);
        let (Some(first), Some(second), Some(adapter)) = (&self.lora_A, &self.lora_B, &self.adapter) else {
            return y;
        };
        // In half precision, the matrices of an adapter keep single precision.
        let mut x = x.in_single();
        if adapter.dropout > 0.0 {
            x = Dropout::new(adapter.dropout).forward(x, context.random(&adapter.path));
        }
        // The narrow tensor is scaled, because it is the smallest.
        let low = first.forward_split_inputs(x, tensor) * adapter.scale;
        let added = second.forward(low);
        let precision = y.dtype();
        y + added.cast(precision)
    }
}
