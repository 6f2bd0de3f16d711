//! The errors of configuring a model and of cutting it into stages.

use pipewright_shapes::ShapeError;

/// An error of configuring a model, or of cutting it into stages.
#[derive(thiserror::Error)]
pub enum ConfigError {
    /// The `config.json`, or a set of its keys, does not describe a model.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A layer cannot be split over the ranks that compute a stage together.
    #[error(
        "`{layer}` cannot be split over {ranks} tensor ranks: `{parameter}` is split by `{key} = {size}`, which {rule}; use \
         another `mesh.tensor_parallel`"
    )]
    Split {
        /// The layer.
        layer: Box<str>,
        /// A parameter of the layer.
        parameter: Box<str>,
        /// The key of the size that is split.
        key: &'static str,
        /// The size.
        size: usize,
        /// The number of ranks.
        ranks: u32,
        /// The fault of the size, as a verb with its object.
        rule: &'static str,
    },
    /// The ranks that compute a stage together should each hold whole experts, and there are fewer experts
    /// than ranks.
    #[error(
        "`{layer}` cannot be divided among {ranks} tensor ranks that hold whole experts (`mesh.whole_experts`): \
         `{parameter}` belongs to one of `{key} = {count}`, so some rank would get nothing; use another `mesh.tensor_parallel`, or \
         set `mesh.whole_experts` to false"
    )]
    FewExperts {
        /// The layer.
        layer: Box<str>,
        /// A parameter of its first expert.
        parameter: Box<str>,
        /// The key of the number of experts.
        key: &'static str,
        /// The number of experts.
        count: usize,
        /// The number of ranks.
        ranks: u32,
    },
    /// Replicas should hold the experts of a mixture together, and not all of them would hold as many.
    #[error(
        "the experts of `{layer}` cannot be divided among {replicas} replicas (`mesh.expert_parallel`): `{key} = {count}` is \
         not a multiple of that; set `mesh.expert_parallel` to a divisor of {count}"
    )]
    UnevenExperts {
        /// The layer.
        layer: Box<str>,
        /// The key of the number of experts.
        key: &'static str,
        /// The number of experts.
        count: usize,
        /// The number of replicas.
        replicas: u32,
    },
    /// Replicas should hold the experts of a mixture together, and the experts have a form whose tokens cannot
    /// be sent.
    #[error(
        "the experts of `{layer}` have biases or a bounded activation, and {replicas} replicas cannot hold such experts \
         together: set `mesh.expert_parallel` to 1, or divide them among tensor ranks (`mesh.tensor_parallel` with \
         `mesh.whole_experts`)"
    )]
    ComposedExperts {
        /// The layer.
        layer: Box<str>,
        /// The number of replicas.
        replicas: u32,
    },
    /// A part of the head would have no token.
    #[error(
        "{parts} parts of a vocabulary of {vocabulary} tokens leave a part without a token; use a smaller \
         `pipeline.head_parts`"
    )]
    HeadParts {
        /// The number of parts.
        parts: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// A part of the embedding would have no token.
    #[error(
        "{parts} parts of a vocabulary of {vocabulary} tokens leave a part of the embedding without a token; use a smaller \
         `pipeline.embedding_parts`"
    )]
    EmbeddingParts {
        /// The number of parts.
        parts: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },
    /// The head uses the table of the embedding, and both are cut into other numbers of parts.
    #[error(
        "the embedding and the tied head have one table, which cannot have {parts} parts and {head_parts}: set \
         `pipeline.embedding_parts` to 1, or `pipeline.head_parts` to {parts}"
    )]
    TiedParts {
        /// The number of parts of the embedding.
        parts: u32,
        /// The number of parts of the head.
        head_parts: u32,
    },
    /// Several ranks compute the stages of a model whose embedding is cut.
    #[error(
        "the embedding is cut into {parts} parts, and {ranks} tensor ranks split the vocabulary already: set \
         `pipeline.embedding_parts` or `mesh.tensor_parallel` to 1"
    )]
    EmbeddingPartsOfRanks {
        /// The number of parts.
        parts: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// Several ranks compute the stages of a model whose head is cut.
    #[error(
        "the head is cut into {parts} parts, and {ranks} tensor ranks split the vocabulary already: set `pipeline.head_parts` \
         or `mesh.tensor_parallel` to 1"
    )]
    HeadPartsOfRanks {
        /// The number of parts.
        parts: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The family's layers cannot have adapters.
    #[error(
        "`{family}` cannot have adapters: its layers are not all linear layers of a decoder; use a model of one of the families \
         {}, or remove the section [adapter]", .families.join(", ")
    )]
    NoLora {
        /// The family.
        family: String,
        /// The families whose layers can have adapters.
        families: Vec<&'static str>,
    },
    /// A target is not a layer of the model.
    #[error(
        "`adapter.targets`: `{target}` is not a linear layer of the model: write names of {}, or \"all-linear\"", .names.join(", ")
    )]
    LoraTarget {
        /// The target.
        target: String,
        /// The names of the layers that can have an adapter.
        names: Vec<String>,
    },
    /// A target is not a valid pattern.
    #[error("`adapter.targets`: `{target}` is not a pattern: correct it, or write the name of a layer")]
    LoraPattern {
        /// The target.
        target: String,
        /// The mistake.
        source: globset::Error,
    },
    /// Several ranks compute the layers of an adapter with dropout.
    #[error(
        "`adapter.dropout` needs layers that one rank computes, and {ranks} tensor ranks compute each: set `adapter.dropout` to 0 \
         or `mesh.tensor_parallel` to 1"
    )]
    LoraDropout {
        /// The number of ranks.
        ranks: u32,
    },
    /// The rows have more tokens than the model has positions.
    #[error(
        "rows of {tokens} tokens (`data.seq_len`) are longer than the {positions} positions that the model has vectors for \
         (`n_positions`): set `data.seq_len` to at most {positions}, or use a model with more positions"
    )]
    LongRows {
        /// The tokens of a row.
        tokens: usize,
        /// The positions of the model.
        positions: usize,
    },
    /// A profile has the layers of another model.
    #[error("the profile has {} and the model {expected}: give a profile of this model", pipewright_schedule::words::counted(*.found, "layer"))]
    ProfileLayers {
        /// The number of layers of the profile, with repetitions.
        found: u64,
        /// The number of layers of the model.
        expected: usize,
    },
    /// The range of layers is not a stage of the model.
    #[error("layers {start}..{end} are not a stage of a model of {layers} layers")]
    LayerRange {
        /// The first layer.
        start: usize,
        /// The layer after the last one.
        end: usize,
        /// The number of layers of the model.
        layers: usize,
    },
}

pipewright_schedule::message_as_debug!(ConfigError);

impl ConfigError {
    /// Returns the keys of `config.json` that caused the error, the most probable cause first; none if no key
    /// of that file did.
    pub fn keys(&self) -> &[String] {
        match self {
            Self::Shape(error) => error.keys(),
            _ => &[],
        }
    }
}

/// The error for a model that several ranks compute together. Each of them has shards of the parameters or
/// some of the experts, so none can predict a token by itself.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the model is split over {ranks} ranks, and one of them cannot predict a token: save a checkpoint, and read the \
     whole model from it with `ModelConfig::whole`"
)]
pub struct SplitModel {
    /// The number of ranks.
    pub ranks: u32,
}

pipewright_schedule::message_as_debug!(SplitModel);
