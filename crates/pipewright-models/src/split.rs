//! Where a stage is computed, how it is split over the ranks that compute it together, and checks whether its
//! layers can be split.

use std::ops::Range;

use burn::tensor::Device;
use pipewright::nn::TensorParallel;
use pipewright::tensor::{Placement, Precision, TensorRank};

use crate::error::{ModelError, SplitModel};

/// Where a stage is computed. A [`Device`] alone means that one rank computes the whole stage there.
#[derive(Clone, Debug)]
pub struct Place {
    /// The device that holds the parameters.
    pub device: Device,
    /// The rank's position among the ranks that compute the stage together.
    pub tensor: TensorParallel,
    /// The precision in which the stage computes. In half precision, the base of adapters is rounded
    /// parameter by parameter, so that it is never held whole in single precision. Other parameters do not
    /// depend on this.
    pub precision: Precision,
    /// The number of shards in which the stage holds the table of the token embeddings. It is the number of
    /// parts of the embedding or of a tied head, so that each part shares the rows of one shard
    /// ([`CutModel`](crate::CutModel)), and otherwise 1.
    pub table_parts: u32,
    /// Whether the layer of the embedding has only the last of these shards, because the layers before it
    /// have the others.
    pub embedding_is_cut: bool,
    /// Whether a stage for generation reads the matrices of linear layers from their files whenever it uses them. In
    /// training, [`CutModel::with_streamed`](crate::CutModel::with_streamed) says it.
    pub streams: bool,
}

impl From<Device> for Place {
    fn from(device: Device) -> Self {
        Self {
            device,
            tensor: TensorParallel::default(),
            precision: Precision::F32,
            table_parts: 1,
            embedding_is_cut: false,
            streams: false,
        }
    }
}

impl From<&Device> for Place {
    fn from(device: &Device) -> Self {
        device.clone().into()
    }
}

/// A rank's share of a stage that it computes together with others.
#[derive(Clone, Debug, Default)]
pub(crate) struct SplitStage {
    pub(crate) tensor: TensorParallel,
    /// The size of the whole vocabulary.
    pub(crate) vocabulary: usize,
}

impl SplitStage {
    /// Returns an error if other ranks have shards or experts of the stage.
    pub(crate) fn require_whole(&self) -> Result<(), SplitModel> {
        match self.tensor.ranks().max(self.tensor.expert_parallel().ranks()) {
            1 => Ok(()),
            ranks => Err(SplitModel { ranks }),
        }
    }
}

/// Returns the token ids of a part of the vocabulary. All parts have as many, except the last ones.
pub(crate) fn ids_of_part(part: u32, parts: u32, vocabulary: usize) -> Range<usize> {
    // A part has the rows that a tensor rank would have.
    Placement::of_layer(0, part, parts).shard_of(TensorRank { index: 0, of: 1 }).range(vocabulary)
}

/// Requires that each of `ranks` ranks gets a part of a dimension: the size of `key`, along which `parameter`
/// of `layer` is split.
pub(crate) fn require_parts(
    layer: &str,
    parameter: &str,
    (key, size): (&'static str, usize),
    ranks: u32,
) -> Result<(), ModelError> {
    let last = TensorRank { index: ranks.saturating_sub(1), of: ranks };
    if Placement::split(0, ranks).shard_of(last).range(size).is_empty() {
        return Err(error(layer, parameter, (key, size), ranks, "leaves a rank without a part"));
    }
    Ok(())
}

/// Returns the numbers of shards into which the query heads and the key heads of an attention are cut for
/// this number of ranks. If there are fewer key heads than ranks, neighbouring ranks hold the same key head.
pub(crate) fn head_shards(
    layer: &str,
    heads: usize,
    key_heads: usize,
    ranks: u32,
) -> Result<[u32; 2], ModelError> {
    let count = ranks as usize;
    if !heads.is_multiple_of(count) {
        let rule = "is not a multiple of the number of ranks";
        return Err(error(layer, "q_proj.weight", ("num_attention_heads", heads), ranks, rule));
    }
    if !key_heads.is_multiple_of(count) && !count.is_multiple_of(key_heads) {
        let rule = "neither is a multiple of the number of ranks nor divides it";
        return Err(error(layer, "k_proj.weight", ("num_key_value_heads", key_heads), ranks, rule));
    }
    Ok([ranks, ranks.min(key_heads as u32)])
}

/// Requires that `ranks` ranks get the same number of the groups into which the outputs of a joined
/// projection are cut ([`OutputParts`](crate::file_layout::OutputParts)).
pub(crate) fn require_groups(
    layer: &str,
    key: (&'static str, usize),
    groups: usize,
    ranks: u32,
) -> Result<(), ModelError> {
    if groups.is_multiple_of(ranks as usize) {
        return Ok(());
    }
    let rule = if groups == key.1 {
        "is not a multiple of the number of ranks"
    } else {
        "is cut into groups whose number, a power of 2 up to 64, is not a multiple of the number of ranks"
    };
    Err(error(layer, "weight", key, ranks, rule))
}

fn error(
    layer: &str,
    parameter: &str,
    (key, size): (&'static str, usize),
    ranks: u32,
    rule: &str,
) -> ModelError {
    ModelError::new(format!(
        "`{layer}` cannot be split over {ranks} tensor ranks: `{layer}.{parameter}` is split by `{key} = {size}`, which {rule}; \
         use another `mesh.tensor_parallel`"
    ))
}
