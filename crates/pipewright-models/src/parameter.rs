//! Parameters by global path: the source of their values, and the layers that are built from them.
//!
//! A global path is the parameter's name in a Hugging Face directory, such as
//! `model.layers.3.mlp.up_proj.weight`, whatever the cut of the model. The builder records the path of each
//! parameter, so the paths do not depend on how the modules of a stage are nested.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use pipewright::memory::StreamedMatrix;
use pipewright::nn::{Embedding, HeldLinear, Linear, RmsNorm, TensorParallel};
use pipewright::tensor::{Placement, TensorShard};
use pipewright_kernel::quantised::QuantisedMatrix;

use crate::error::ModelError;
use crate::file_layout::FileLayout;
use crate::lora::{LoraConfig, MAGNITUDES};
pub(crate) use crate::parameter_spec::is_in;
pub use crate::parameter_spec::{FirstCopies, ParameterKind, ParameterSpec};
use crate::path_names::PathNames;
use crate::split::Place;

/// The source of the values of a stage's parameters.
pub trait ParameterSource {
    /// Returns the settings of the adapters that the model's layers have; `None` if they have none. The
    /// source has the parameters of the adapters too.
    fn lora(&self) -> Option<&LoraConfig> {
        None
    }

    /// Returns the elements of a parameter, row-major in `spec.shape`.
    ///
    /// # Errors
    /// When the source does not have the parameter, or has it in another shape.
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError>;

    /// Returns the elements of a shard of the parameter of `spec`.
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`].
    fn shard_of(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<Vec<f32>, ModelError> {
        Ok(shard.cut(self.parameter(spec)?, &spec.shape))
    }

    /// Returns the elements of a parameter or of a shard of it, with their shape.
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`].
    fn data(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<TensorData, ModelError> {
        let values = if shard.is_whole() { self.parameter(spec)? } else { self.shard_of(spec, shard)? };
        Ok(TensorData::new(values, shard.shape(&spec.shape)))
    }

    /// Returns the shard in the form that a stage holds.
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`].
    fn held(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<HeldValues, ModelError> {
        self.data(spec, shard).map(HeldValues::Trained)
    }

    /// Like [`ParameterSource::held`], for the matrix of a linear layer or the table of the tokens, which its stage could hold
    /// quantised.
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`].
    fn held_matrix(&mut self, spec: &ParameterSpec, shard: TensorShard) -> Result<HeldValues, ModelError> {
        self.held(spec, shard)
    }

    /// Returns the shard of a matrix or a table in the quantised form in which the source has it; `None` if it is not
    /// quantised, or the source decodes it. The rows are the outputs or the tokens.
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`], and when the shard ends inside a block.
    fn quantised(
        &mut self,
        _spec: &ParameterSpec,
        _shard: TensorShard,
    ) -> Result<Option<QuantisedMatrix>, ModelError> {
        Ok(None)
    }

    /// Returns the shard of a matrix as one that is read when its stage computes; `None` if it stays in memory.
    ///
    /// # Errors
    /// As [`ParameterSource::quantised`].
    fn streamed(
        &mut self,
        _spec: &ParameterSpec,
        _shard: TensorShard,
    ) -> Result<Option<StreamedMatrix>, ModelError> {
        Ok(None)
    }

    /// Returns the shard of the magnitudes `spec` of an adapter on the layer with the matrix `matrix`
    /// ([`LoraConfig::dora`]).
    ///
    /// # Errors
    /// As [`ParameterSource::parameter`].
    fn magnitudes(
        &mut self,
        spec: &ParameterSpec,
        _matrix: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<HeldValues, ModelError> {
        self.held(spec, shard)
    }
}

/// The values of a parameter, in the form that a stage holds.
#[derive(Debug)]
pub enum HeldValues {
    /// The stage has them for itself.
    Trained(TensorData),
    /// The ranks of a process share them, rounded to an element type if one is given.
    Frozen(TensorData, Option<DType>),
    /// The parameter has a shape and no storage.
    Outline,
}

/// Builds the layers of a stage from a source.
pub(crate) struct Builder<'a> {
    pub(crate) source: &'a mut dyn ParameterSource,
    place: &'a Place,
    /// The names of the parameters in files.
    names: PathNames,
    /// Whether files have the matrices of projections as `[inputs, outputs]`.
    inputs_first: bool,
    built: BuiltParameters,
    pub(crate) frozen: FrozenMatrices,
    /// The quantised tables of the stage, whose layers share them.
    pub(crate) tables: Vec<(String, TensorShard, Arc<QuantisedMatrix>)>,
}

/// The matrices of a stage that are not parameters of its module.
#[derive(Clone, Debug, Default)]
pub(crate) struct FrozenMatrices {
    /// The number of their elements.
    pub(crate) elements: usize,
    /// The ones that are in memory only while the stage computes.
    pub(crate) streamed: Vec<Arc<StreamedMatrix>>,
}

/// The parameters that were built, by the identifiers that Burn gives them.
pub(crate) type BuiltParameters = HashMap<ParamId, BuiltParameter>;

/// A parameter that was built.
#[derive(Clone, Debug)]
pub(crate) struct BuiltParameter {
    /// The description of the whole parameter.
    pub(crate) spec: ParameterSpec,
    /// How the ranks hold it.
    pub(crate) placement: Placement,
    /// Whether it is a copy of a table, which a model directory does not hold.
    pub(crate) is_copy: bool,
}

/// How a linear layer is split over the ranks that compute a stage together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SplitLinear {
    /// Every rank has some of the outputs. If there are fewer shards than ranks, neighbours have the same
    /// shard.
    Outputs { shards: u32 },
    /// Every rank has the weights of some of the inputs, and the whole bias.
    Inputs,
    /// Like `Inputs`, but every rank adds a part of the bias to its part of the result.
    InputsOfSum,
    /// Every rank has the whole layer, and computes the same.
    Whole,
    /// One rank has the whole layer, and the others nothing of it.
    OneRank,
    /// Like `Outputs`, on one replica of an expert group; the others have nothing of it.
    OutputsOnReplica { shards: u32 },
    /// Like `InputsOfSum`, on one replica of an expert group; the others have nothing of it.
    InputsOnReplica,
}

impl<'a> Builder<'a> {
    /// Returns the builder of a model whose files have these names, and the matrices of projections as
    /// `[inputs, outputs]` if `inputs_first`.
    pub(crate) fn new(
        source: &'a mut dyn ParameterSource,
        place: &'a Place,
        names: PathNames,
        inputs_first: bool,
    ) -> Self {
        let (built, frozen, tables) = (HashMap::new(), FrozenMatrices::default(), Vec::new());
        Self { source, place, names, inputs_first, built, frozen, tables }
    }

    /// Returns whether files have the matrices of projections as `[inputs, outputs]`.
    pub(crate) fn inputs_first(&self) -> bool {
        self.inputs_first
    }

    /// Returns the path in files of a path with the usual names.
    pub(crate) fn named(&self, path: &str) -> String {
        self.names.of(path)
    }

    /// Returns this rank's position among the ranks that compute the stage together.
    pub(crate) fn tensor(&self) -> &TensorParallel {
        &self.place.tensor
    }

    /// Returns the settings of the adapters, if the model has some.
    pub(crate) fn lora(&self) -> Option<&LoraConfig> {
        self.source.lora()
    }

    /// Returns the number of ranks that compute the stage together.
    pub(crate) fn tensor_ranks(&self) -> u32 {
        self.tensor().ranks()
    }

    /// Returns the placement of a parameter that every rank has, and that works on the tokens which a rank has
    /// outside of the layers that the ranks compute together.
    pub(crate) fn of_tokens(&self) -> Placement {
        if self.tensor().shares_tokens() { Placement::REPLICATED_PARTIAL } else { Placement::REPLICATED }
    }

    /// Returns the number of shards of the table of the token embeddings; see [`Place::table_parts`].
    pub(crate) fn table_parts(&self) -> u32 {
        self.place.table_parts
    }

    /// Returns the device of the parameters, and the element type of a frozen base.
    pub(crate) fn of_base(&self) -> (&Device, DType) {
        (&self.place.device, self.place.precision.half().unwrap_or(DType::F32))
    }

    /// Returns whether the layer of the embedding has only the last shard; see [`Place::embedding_is_cut`].
    pub(crate) fn embedding_is_cut(&self) -> bool {
        self.place.embedding_is_cut
    }

    /// Returns the parameters that were built, and the matrices that are not parameters.
    pub(crate) fn into_built(self) -> (BuiltParameters, FrozenMatrices) {
        (self.built, self.frozen)
    }

    /// Records that a parameter is a copy of a table.
    pub(crate) fn mark_copy<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        if let Some(built) = self.built.get_mut(&parameter.id) {
            built.is_copy = true;
        }
    }

    /// Builds a linear layer that is split; with one rank it is whole. `inputs` and `outputs` are the sizes
    /// of the whole layer.
    pub(crate) fn split_linear(
        &mut self,
        bias: bool,
        path: &str,
        sizes: [usize; 2],
        split: SplitLinear,
    ) -> Result<HeldLinear, ModelError> {
        self.linear_in(bias, path, sizes, split, |_| FileLayout::default())
    }

    /// Like [`Builder::split_linear`], but files store each parameter as `layout` says for its name.
    pub(crate) fn linear_in(
        &mut self,
        bias: bool,
        path: &str,
        [inputs, outputs]: [usize; 2],
        split: SplitLinear,
        layout: impl Fn(&str) -> FileLayout,
    ) -> Result<HeldLinear, ModelError> {
        let (weight, bias_placement) = self.placements(split);
        let weight = self.held_matrix(path, [inputs, outputs], layout("weight"), weight)?;
        let kind = (ParameterKind::Bias, layout("bias"));
        let bias = bias.then(|| self.stored(path, "bias", [outputs], kind, bias_placement));
        Ok(HeldLinear::new(weight, bias.transpose()?))
    }

    /// Returns how ranks hold the weight and the bias of a linear layer that is split.
    pub(crate) fn placements(&self, split: SplitLinear) -> (Placement, Placement) {
        match split {
            SplitLinear::Outputs { shards } => (Placement::split(1, shards), Placement::split(0, shards)),
            SplitLinear::Inputs => (Placement::split(0, self.tensor_ranks()), self.of_tokens()),
            SplitLinear::InputsOfSum => {
                (Placement::split(0, self.tensor_ranks()), Placement::REPLICATED_PARTIAL)
            }
            SplitLinear::Whole => (Placement::REPLICATED, Placement::REPLICATED),
            SplitLinear::OneRank => (Placement::ON_ONE_RANK, Placement::ON_ONE_RANK),
            SplitLinear::OutputsOnReplica { shards } => {
                (Placement::split(1, shards).on_one_replica(), Placement::split(0, shards).on_one_replica())
            }
            SplitLinear::InputsOnReplica => (
                Placement::split(0, self.tensor_ranks()).on_one_replica(),
                Placement::REPLICATED_PARTIAL.on_one_replica(),
            ),
        }
    }

    /// Builds a linear layer. `path` is the layer's path, to which `.weight` is added.
    pub(crate) fn linear(&mut self, path: &str, inputs: usize, outputs: usize) -> Result<Linear, ModelError> {
        let weight = self.parameter(path, "weight", [inputs, outputs], ParameterKind::Matrix)?;
        Ok(Linear { weight, bias: None })
    }

    /// Builds a table whose rows are added to the hidden states of the tokens that a rank has.
    pub(crate) fn embedding(
        &mut self,
        path: &str,
        rows: usize,
        width: usize,
    ) -> Result<Embedding, ModelError> {
        let weight = self.placed(path, "weight", [rows, width], ParameterKind::Table, self.of_tokens())?;
        Ok(Embedding { weight })
    }

    pub(crate) fn norm(&mut self, path: &str, width: usize, epsilon: f64) -> Result<RmsNorm, ModelError> {
        let weight = self.parameter(path, "weight", [width], ParameterKind::Scale)?;
        Ok(RmsNorm { weight, epsilon })
    }

    /// Builds the parameter `name` of the layer at the path `layer`.
    pub(crate) fn parameter<const D: usize>(
        &mut self,
        layer: &str,
        name: &str,
        shape: [usize; D],
        kind: ParameterKind,
    ) -> Result<Param<Tensor<D>>, ModelError> {
        self.placed(layer, name, shape, kind, Placement::REPLICATED)
    }

    /// Builds the magnitudes of an adapter on the linear layer at the path `layer`, whose matrix has these
    /// inputs and outputs and this layout in files.
    pub(crate) fn magnitudes(
        &mut self,
        layer: &str,
        [inputs, outputs]: [usize; 2],
        layout: &FileLayout,
        placement: Placement,
    ) -> Result<Param<Tensor<1>>, ModelError> {
        let spec = |name: &str, shape: &[usize], kind| {
            let path = self.named(&format!("{layer}.{name}"));
            ParameterSpec { layout: layout.clone(), ..ParameterSpec::new(path, shape.to_vec(), kind) }
        };
        let matrix = spec("weight", &[inputs, outputs], ParameterKind::Matrix);
        let spec = spec(MAGNITUDES, &[outputs], ParameterKind::Scale);
        let values = self.source.magnitudes(&spec, &matrix, self.tensor().shard(placement))?;
        Ok(self.hold(spec, values, placement))
    }

    /// Like [`Builder::parameter`], but the ranks hold the parameter as `placement` says. `shape` is the
    /// shape of the whole parameter.
    pub(crate) fn placed<const D: usize>(
        &mut self,
        layer: &str,
        name: &str,
        shape: [usize; D],
        kind: ParameterKind,
        placement: Placement,
    ) -> Result<Param<Tensor<D>>, ModelError> {
        self.stored(layer, name, shape, (kind, FileLayout::default()), placement)
    }

    /// Like [`Builder::placed`], but files store the parameter in this layout.
    pub(crate) fn stored<const D: usize>(
        &mut self,
        layer: &str,
        name: &str,
        shape: [usize; D],
        (kind, layout): (ParameterKind, FileLayout),
        placement: Placement,
    ) -> Result<Param<Tensor<D>>, ModelError> {
        let path = self.named(&format!("{layer}.{name}"));
        let spec = ParameterSpec { layout, ..ParameterSpec::new(path, shape.to_vec(), kind) };
        let values = self.source.held(&spec, self.tensor().shard(placement))?;
        Ok(self.hold(spec, values, placement))
    }

    /// Returns the parameter of `spec`, and records it.
    pub(crate) fn hold<const D: usize>(
        &mut self,
        spec: ParameterSpec,
        values: HeldValues,
        placement: Placement,
    ) -> Param<Tensor<D>> {
        let device = &self.place.device;
        let parameter = match values {
            HeldValues::Trained(data) => Param::from_data(data, device),
            HeldValues::Frozen(data, precision) => {
                let values = match precision {
                    Some(precision) => Tensor::from_data(data, (device, precision)),
                    None => Tensor::from_data(data, device),
                };
                Param::from_tensor(self.tensor().share_frozen(&spec.path, values))
            }
            HeldValues::Outline => outlined(&self.tensor().shard(placement).shape(&spec.shape), device),
        };
        // All parameters of a stage together may take longer to make or read than the deadline.
        self.tensor().keep_alive();
        self.built.insert(parameter.id, BuiltParameter { spec, placement, is_copy: false });
        parameter
    }
}

/// Returns a parameter without storage.
fn outlined<const D: usize>(shape: &[usize], device: &Device) -> Param<Tensor<D>> {
    let shape = Shape::from(shape.to_vec());
    let own_shape = shape.clone();
    let zeros = move |device: &Device, _requires_grad: bool| Tensor::zeros(own_shape, device);
    Param::uninitialized(ParamId::new(), zeros, device.clone(), true, shape)
}
