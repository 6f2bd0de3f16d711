//! A linear layer of a block, which may have a low-rank adapter ([`LoraConfig`](crate::lora::LoraConfig)).
//!
//! Both matrices of the adapter are linear layers of `pipewright::nn`, so every schedule can defer their
//! gradients. The gradient of the magnitudes is as small as that of a bias, and belongs to `I` like it. The
//! base's gradient is not computed if its stage freezes it.

#![expect(
    non_snake_case,
    reason = "the fields `lora_A` and `lora_B` have the names of the parameters in PEFT"
)]

use std::cell::OnceCell;
use std::collections::BTreeSet;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use pipewright::nn::{
    Branches, Dropout, HeldMatrix, Linear, LowRank, Region, TensorParallel, adapted_product, at_least_single,
    held_linear, matrix_product, sum_dim,
};
use pipewright::random::RandomStream;
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;
use pipewright::train::REFERENCE_PASS;
use pipewright_shapes::matrix::Division;
use pipewright_shapes::training::AdaptedLayer;

use crate::error::ModelError;
use crate::file_layout::{FileLayout, OutputParts};
use crate::lora::{HEAD, LoraConfig, is_of_adapter, is_table, layer_of_first, layer_of_second, name_of};
use crate::parameter::{Builder, ParameterKind, ParameterSpec, SplitLinear};
use crate::split::require_groups;

/// Columns of a quantised matrix that are decoded at a time for their norms.
const DECODED_COLUMNS: usize = 128;

/// A linear layer with an adapter, or without one.
#[derive(Module, Debug)]
pub(crate) struct Projection {
    weight: HeldMatrix,
    bias: Option<Param<Tensor<1>>>,
    /// The adapter's first matrix, `[inputs, rank]`.
    lora_A: Option<Linear>,
    /// The adapter's second matrix, `[rank, outputs]`.
    lora_B: Option<Linear>,
    /// The adapter's magnitudes, `[outputs]`, with DoRA.
    lora_magnitude_vector: Option<Param<Tensor<1>>>,
    #[module(skip)]
    adapter: Option<Adaptation>,
}

/// The input of several projections. In half precision, adapters that are not one operation with their layer
/// ([`adapted_product`]) share its copy in single precision, which is made for the first one.
pub(crate) struct SharedInput {
    x: Tensor<2>,
    /// The input for each of several layers.
    branches: Option<Branches>,
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

impl Builder<'_> {
    /// Builds a linear layer that is split, like [`Builder::split_linear`], with an adapter if the source has
    /// one for it.
    pub(crate) fn projection(
        &mut self,
        bias: bool,
        path: &str,
        [inputs, outputs]: [usize; 2],
        split: SplitLinear,
    ) -> Result<Projection, ModelError> {
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
    ) -> Result<Projection, ModelError> {
        // Files have the matrix of the head as a linear layer's in every family.
        let inputs_first = self.inputs_first() && path != HEAD;
        let layout = FileLayout { inputs_first, parts, ..FileLayout::default() };
        let (weight, bias_placement) = self.placements(split);
        let weight = self.held_matrix(path, [inputs, outputs], layout.clone(), weight)?;
        let kind = (ParameterKind::Bias, layout.clone());
        let bias = bias.then(|| self.stored(path, "bias", [outputs], kind, bias_placement)).transpose()?;
        let mut projection = Projection {
            weight,
            bias,
            lora_A: None,
            lora_B: None,
            lora_magnitude_vector: None,
            adapter: None,
        };
        let named = self.named(path);
        let Some(lora) = self.lora().filter(|lora| lora.adapts(&named)) else { return Ok(projection) };
        // Plans for clusters know the split of an adapted layer from its path.
        let by_inputs = matches!(split, SplitLinear::Inputs | SplitLinear::InputsOfSum);
        debug_assert_eq!(is_split_by_inputs(&named), by_inputs, "{named}");
        debug_assert_eq!(is_whole(&named), matches!(split, SplitLinear::Whole), "{named}");
        let (rank, ranks, dora) = (lora.rank as usize, self.tensor_ranks(), lora.dora);
        let adapter = Adaptation { path: named, scale: lora.scale(), dropout: lora.dropout };
        if ranks > 1 && adapter.dropout > 0.0 {
            return Err(ModelError::new(format!(
                "`adapter.dropout` needs layers that one rank computes, and {ranks} tensor ranks compute each: set `adapter.dropout` \
                 to 0 or `mesh.tensor_parallel` to 1"
            )));
        }
        let [first, second, magnitudes] = match split {
            // Each rank computes what its outputs contribute to the gradient of the first matrix.
            SplitLinear::Outputs { shards } => {
                [Placement::REPLICATED_PARTIAL, Placement::split(1, shards), Placement::split(0, shards)]
            }
            // The ranks add the results of the first matrix, so all have the gradients of the second one and of the
            // magnitudes for the tokens that they have.
            SplitLinear::Inputs | SplitLinear::InputsOfSum => {
                [Placement::split(0, ranks), self.of_tokens(), self.of_tokens()]
            }
            SplitLinear::Whole => [Placement::REPLICATED; 3],
            SplitLinear::OneRank => [Placement::ON_ONE_RANK; 3],
            // Experts have adapters of their own form.
            SplitLinear::OutputsOnReplica { .. } | SplitLinear::InputsOnReplica => {
                [Placement::ON_ONE_REPLICA; 3]
            }
        };
        let mut matrix = |name: &str, shape, parts, placement| {
            let layer = format!("{path}.{name}");
            let kind = (ParameterKind::Matrix, FileLayout { parts, ..FileLayout::default() });
            let weight = self.stored(&layer, "weight", shape, kind, placement);
            weight.map(|weight| Some(Linear { weight, bias: None }))
        };
        projection.lora_A = matrix("lora_A", [inputs, rank], None, first)?;
        projection.lora_B = matrix("lora_B", [rank, outputs], parts, second)?;
        if dora {
            let sizes = [inputs, outputs];
            projection.lora_magnitude_vector = Some(self.magnitudes(path, sizes, &layout, magnitudes)?);
        }
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

/// Returns whether the ranks of a tensor group divide the projection at a path by its inputs: the last ones
/// of attention and of a feed-forward layer.
fn is_split_by_inputs(projection: &str) -> bool {
    matches!(name_of(projection), "o_proj" | "down_proj" | "c_proj" | "output_linear")
}

/// Returns whether each rank of a tensor group has the whole projection at a path: the ones that make
/// latents, and the ones of linear attention and Mamba-2.
fn is_whole(projection: &str) -> bool {
    let is_of_state = [".linear_attn.", ".mamba."].iter().any(|mixer| projection.contains(mixer));
    is_of_state || matches!(name_of(projection), "q_a_proj" | "kv_a_proj_with_mqa")
}

/// Returns the layers whose adapters are among the parameters `specs`, in their order, each with its path. The
/// second matrix of an adapter comes after its first one. Experts that a router chooses are not among them
/// ([`adapted_experts`]).
pub fn adapted_layers<'a>(
    lora: &LoraConfig,
    specs: impl IntoIterator<Item = &'a ParameterSpec>,
) -> Vec<(String, AdaptedLayer)> {
    let mut layers: Vec<(String, AdaptedLayer)> = Vec::new();
    let mut inputs = BTreeSet::new();
    for spec in specs {
        // Experts have fewer tokens each.
        let (&[rows, columns], None) = (spec.shape.as_slice(), &spec.layout.stack) else { continue };
        if let Some(layer) = layer_of_first(&spec.path) {
            let division = if is_split_by_inputs(layer) {
                Division::Rows
            } else if is_whole(layer) {
                Division::Whole
            } else {
                Division::Columns
            };
            // With dropout, no two adapters have the same input.
            let shares_input = !inputs.insert(input_of(layer)) && lora.dropout == 0.0;
            // A table has ids as its input.
            let input = if is_table(layer) { 0 } else { rows as u64 };
            let adapted = AdaptedLayer { input, output: 0, division, shares_input };
            layers.push((layer.to_owned(), adapted));
        } else if let Some((_, adapted)) =
            layers.last_mut().filter(|(path, _)| layer_of_second(&spec.path) == Some(path))
        {
            adapted.output = columns as u64;
        }
    }
    layers
}

/// Returns the paths of the matrices of all experts of a block whose adapters are among the parameters `specs`.
pub fn adapted_experts<'a>(specs: impl IntoIterator<Item = &'a ParameterSpec>) -> BTreeSet<&'a str> {
    let stacks = specs
        .into_iter()
        .filter(|spec| is_of_adapter(&spec.path))
        .filter_map(|spec| spec.layout.stack.as_ref());
    stacks.filter_map(|stack| Some(stack.tensor.rsplit_once('.')?.0)).collect()
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
    /// Returns the input `x` of one layer, of the shape `[tokens, inputs]`.
    pub(crate) fn new(x: Tensor<2>) -> Self {
        Self { x, branches: None, in_single: OnceCell::new() }
    }

    /// Returns the input `x` of several layers.
    pub(crate) fn of_several(x: Tensor<2>) -> Self {
        Self { branches: Some(Branches::new(x.clone())), ..Self::new(x) }
    }

    /// Returns the input for one layer.
    fn branch(&self) -> Tensor<2> {
        self.branches.as_ref().map_or_else(|| self.x.clone(), Branches::branch)
    }

    fn in_single(&self) -> Tensor<2> {
        self.in_single.get_or_init(|| self.x.clone().cast(DType::F32)).clone()
    }
}

impl Builder<'_> {
    /// Builds a linear layer whose outputs are several parts. Each rank has the outputs of some groups.
    ///
    /// # Errors
    /// When the groups cannot be divided equally among the ranks. The error names `key` and its size.
    pub(crate) fn joined_projection(
        &mut self,
        bias: bool,
        path: &str,
        inputs: usize,
        (key, parts): ((&'static str, usize), OutputParts),
    ) -> Result<Projection, ModelError> {
        let shards = self.tensor_ranks();
        require_groups(&self.named(path), key, parts.groups, shards)?;
        let (sizes, split) = ([inputs, parts.outputs()], SplitLinear::Outputs { shards });
        self.projection_of_parts(bias, path, sizes, split, Some(parts))
    }
}

fn off_tape(tensor: Tensor<2>) -> Tensor<2> {
    if tensor.is_autodiff() { tensor.inner() } else { tensor }
}

/// The parameters of a layer's adapter.
struct Adapted<'a> {
    first: &'a Linear,
    second: &'a Linear,
    settings: &'a Adaptation,
}

impl Projection {
    fn adapted(&self) -> Option<Adapted<'_>> {
        let (first, second) = (self.lora_A.as_ref()?, self.lora_B.as_ref()?);
        Some(Adapted { first, second, settings: self.adapter.as_ref()? })
    }

    /// Returns the matrix, `[inputs, outputs]`, of a layer without a bias and without an adapter. Stages for
    /// generation have such layers, because adapters are merged into their matrices.
    pub(crate) fn matrix(&self) -> Tensor<2> {
        assert!(self.adapter.is_none(), "the matrix of a layer with an adapter is not the whole layer");
        self.weight.whole()
    }

    /// Returns `x w + b`, with the adapter's output. Every rank has all inputs and some of the outputs.
    /// Shapes: `x [tokens, inputs]`, result `[tokens, outputs]`.
    pub(crate) fn forward(&self, x: &SharedInput, context: &StageContext) -> Tensor<2> {
        // One rank holds all inputs.
        self.forward_region(x, &Region::of_whole(&TensorParallel::default()), context)
    }

    /// Like [`Projection::forward`], for the last layer of a region, whose inputs are split over its ranks. The
    /// result leaves the region.
    pub(crate) fn forward_region(
        &self,
        x: &SharedInput,
        region: &Region<'_>,
        context: &StageContext,
    ) -> Tensor<2> {
        let tensor = region.tensor();
        // The reference of preference training is the base.
        let is_base = context.value::<bool>(REFERENCE_PASS).is_ok();
        let Some(adapted) = self.adapted().filter(|_| !is_base) else {
            return held_linear(x.branch(), &self.weight, self.bias.as_ref(), region);
        };
        let Adaptation { path, dropout, .. } = adapted.settings;
        let random = (*dropout > 0.0).then(|| context.random(path)).filter(RandomStream::is_training);
        let drops = random.is_some();
        if !drops
            && self.lora_magnitude_vector.is_none()
            && tensor.ranks() == 1
            && let Some(y) = adapted_product(&x.x, &self.weight, adapted.low_rank())
        {
            return match &self.bias {
                Some(bias) => y + bias.val().unsqueeze(),
                None => y,
            };
        }
        // In half precision, the matrices of an adapter keep single precision.
        let in_single = x.in_single();
        let dropped = match random {
            Some(random) => Dropout::new(*dropout).forward(in_single, random),
            None => in_single,
        };
        match &self.lora_magnitude_vector {
            None => {
                let y = held_linear(x.x.clone(), &self.weight, self.bias.as_ref(), region);
                let precision = y.dtype();
                y + adapted.forward(dropped, region).cast(precision)
            }
            Some(magnitudes) => {
                let precision = x.x.dtype();
                let base = |x: Tensor<2>| at_least_single(held_linear(x, &self.weight, None, region));
                let whole = base(x.x.clone());
                let factor = self.factor(&adapted, magnitudes, tensor, precision);
                // What the magnitudes change is computed from the input with dropped elements, as in PEFT.
                let y = if drops {
                    let base_of_dropped = base(dropped.clone().cast(precision));
                    let sum = base_of_dropped.clone() + adapted.forward(dropped, region);
                    whole + sum * factor - base_of_dropped
                } else {
                    (whole + adapted.forward(dropped, region)) * factor
                };
                let y = match &self.bias {
                    Some(bias) => y + at_least_single(bias.val()).unsqueeze(),
                    None => y,
                };
                y.cast(precision)
            }
        }
    }

    /// Returns `m / |v|`, `[1, outputs]`, for the magnitudes `m` and the norms of the columns of the matrix
    /// with its adapter. No gradient goes through the norms.
    fn factor(
        &self,
        adapted: &Adapted<'_>,
        magnitudes: &Param<Tensor<1>>,
        tensor: &TensorParallel,
        precision: DType,
    ) -> Tensor<2> {
        let squares = tensor.sum(self.squares(adapted, precision));
        // A column of zeros stays zero.
        let norms = squares.sqrt().clamp_min(f32::MIN_POSITIVE);
        let magnitudes = magnitudes.val().unsqueeze::<2>();
        let norms = match magnitudes.gradient_checkpointing_strategy() {
            Some(strategy) if !norms.is_autodiff() => {
                norms.autodiff().with_gradient_checkpointing_strategy(strategy)
            }
            _ => norms,
        };
        magnitudes / norms
    }

    /// Returns the sums of the squares of the columns of the matrix with its adapter, `[1, outputs]`. Of a
    /// quantised matrix, only some columns at a time are decoded, and rounded as for the products.
    fn squares(&self, adapted: &Adapted<'_>, precision: DType) -> Tensor<2> {
        let of = |columns: Tensor<2>, product: Tensor<2>| {
            sum_dim((at_least_single(columns) + product).square(), 0)
        };
        let [_, outputs] = self.weight.dims();
        if self.weight.parameter().is_some() {
            return of(off_tape(self.weight.columns(0, outputs)), adapted.product());
        }
        let weight = self.weight.loaded();
        let [first, second] = adapted.matrices();
        let device = first.device();
        let some = |start: usize| {
            let count = DECODED_COLUMNS.min(outputs - start);
            let product = matrix_product(first.clone(), second.clone().narrow(1, start, count))
                * adapted.settings.scale;
            let columns = weight.columns(start, count).to_device(&device).cast(precision);
            of(columns, product)
        };
        Tensor::cat((0..outputs).step_by(DECODED_COLUMNS).map(some).collect(), 1)
    }
}

impl<'a> Adapted<'a> {
    fn low_rank(&self) -> LowRank<'a> {
        let [first, second] = [self.first, self.second].map(|matrix| &matrix.weight);
        LowRank { first, second, scale: self.settings.scale }
    }

    /// Returns `scale * a b'`, `[inputs, outputs]`, without gradients.
    fn product(&self) -> Tensor<2> {
        let [first, second] = self.matrices();
        matrix_product(first, second) * self.settings.scale
    }

    /// Returns both matrices off the tape. A tensor that is detached on the tape is a leaf of its own, whose operations keep
    /// their inputs.
    fn matrices(&self) -> [Tensor<2>; 2] {
        [self.first, self.second].map(|matrix| off_tape(matrix.weight.val()))
    }

    /// Returns `scale * x a b'`, for `x [tokens, inputs]` in single precision.
    fn forward(&self, x: Tensor<2>, region: &Region<'_>) -> Tensor<2> {
        // The narrow tensor is scaled, because it is the smallest.
        let low = self.first.forward_region(x, region) * self.settings.scale;
        self.second.forward(low)
    }
}
