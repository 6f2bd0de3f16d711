//! The errors of configuring a model and of cutting it into stages.

use crate::quantisation::advice;

/// An error of configuring a model, or of cutting it into stages.
#[derive(thiserror::Error)]
pub enum ConfigError {
    /// No family has this name.
    #[error("{}", unknown_family(found, nearest, refused, known))]
    UnknownFamily {
        /// The name that was found; empty if there is none.
        found: Box<str>,
        /// The family that is most like it: by its experts and state spaces, and then by its name.
        nearest: &'static str,
        /// The keys of the file that this family cannot compute.
        refused: Vec<RefusedKey>,
        /// The names of all families.
        known: &'static [&'static str],
    },
    /// A model of an unknown family takes more than text.
    #[error(
        "`{family}` is a model of text and other inputs (`{key}`), and only models of text can be run: write its text part as a \
         model of its own, and name that"
    )]
    OtherInputs {
        /// The name of the family.
        family: Box<str>,
        /// The key that describes the other inputs.
        key: &'static str,
    },
    /// The family cannot compute what a key asks for.
    #[error(transparent)]
    Refused(Box<RefusedKey>),
    /// The family cannot compute what several keys ask for.
    #[error("{} keys are not supported: {}", keys.len(), listed(keys))]
    SeveralRefused {
        /// The keys.
        keys: Vec<RefusedKey>,
    },
    /// The weights are quantised.
    #[error(
        "`quantization_config` says that the weights are quantised ({method}), and training needs them whole: {}",
        advice(method)
    )]
    Quantised {
        /// The method, as the file names it.
        method: String,
    },
    /// A key is missing.
    #[error(transparent)]
    Parse(#[from] serde_json::Error),
    /// A key has a value of another type.
    #[error("the value of `{key}` cannot be used")]
    Value {
        /// The key.
        key: String,
        /// The reason.
        source: serde_json::Error,
    },
    /// The family does not support a value.
    #[error("`{key} = {value}` is not supported: only {supported} is")]
    NotSupported {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The value or values that work.
        supported: &'static str,
    },
    /// A table has a key that means nothing there.
    #[error(
        "`{table}.{key}` is not a key of the type `{rope_type}`, whose keys are {}: correct it, or remove it", known.join(", ")
    )]
    UnknownEntry {
        /// The key of the table.
        table: &'static str,
        /// The key in the table.
        key: Box<str>,
        /// The type of the positions.
        rope_type: &'static str,
        /// The keys of that type.
        known: Box<[&'static str]>,
    },
    /// A value is outside its range.
    #[error("`{key} = {value}` is out of range: it must be {range}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The range of the value.
        range: &'static str,
    },
    /// A key of a table is missing, or its value is not a number.
    #[error("`{key}` is missing or is not a number")]
    NotANumber {
        /// The key.
        key: &'static str,
    },
    /// A key of a table is missing, or its value is not a list of positive numbers.
    #[error("`{key}` is missing or is not a list of positive numbers")]
    NotAList {
        /// The key.
        key: &'static str,
    },
    /// A list has another number of entries than its table needs.
    #[error("`{key}` has {}: it must have {expected}, one for each pair of rotated elements", pipewright_schedule::words::counted(*.found, "number"))]
    ListLength {
        /// The key.
        key: &'static str,
        /// The number of entries.
        found: usize,
        /// The number of entries that are needed.
        expected: usize,
    },
    /// A key belongs to other families.
    #[error("`{key}` is not a key of `{family}`: only {} {} it", .families.join(", "), if .families.len() == 1 { "has" } else { "have" })]
    ForeignKey {
        /// The key.
        key: String,
        /// The family.
        family: String,
        /// The families that have the key.
        families: Vec<&'static str>,
    },
    /// Two values do not fit together.
    #[error("`{key} = {value}` is not divisible by `{by} = {divisor}`")]
    NotDivisible {
        /// The key of the dividend.
        key: &'static str,
        /// The dividend.
        value: usize,
        /// The key of the divisor.
        by: &'static str,
        /// The divisor.
        divisor: usize,
    },
    /// Two sizes make a layer that is too wide.
    #[error("`{key} = {value}` times `{by} = {factor}` is too wide: it must be at most {largest}")]
    TooWide {
        /// The key of the first size.
        key: &'static str,
        /// The first size.
        value: usize,
        /// The key of the second size.
        by: &'static str,
        /// The second size.
        factor: usize,
        /// The largest product.
        largest: usize,
    },
    /// The list of blocks, or the pattern, names a kind of block that the family does not have.
    #[error("`{key}`: block {index} is `{found}`, counted from 0; the kinds of blocks are {known}")]
    Block {
        /// The key.
        key: &'static str,
        /// The block's index, counted from 0.
        index: usize,
        /// Its kind.
        found: String,
        /// The kinds that there are.
        known: &'static str,
    },
    /// A part of a pattern has no letters.
    #[error("`pattern = {pattern:?}`: stage {stage} has no block")]
    EmptyStage {
        /// The pattern.
        pattern: String,
        /// The stage, counted from 0.
        stage: usize,
    },
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

/// A key of `config.json` whose value a family cannot compute.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key} = {value}` is not supported: only {only} is")]
pub struct RefusedKey {
    /// The key.
    pub key: String,
    /// The value, or the part of it that is not supported.
    pub value: String,
    /// The values that are supported.
    pub only: String,
}

pipewright_schedule::message_as_debug!(RefusedKey);

fn listed(keys: &[RefusedKey]) -> String {
    let each =
        keys.iter().map(|RefusedKey { key, value, only }| format!("`{key} = {value}` (only {only} is)"));
    each.collect::<Vec<_>>().join(", ")
}

fn unknown_family(found: &str, nearest: &str, refused: &[RefusedKey], known: &[&str]) -> String {
    let known = known.join(", ");
    if found.is_empty() {
        return format!(
            "no model family is named: `model_type` (or `architectures`) is missing; the families are {known}"
        );
    }
    let difference = match refused {
        [] => "which may compute other things even where the keys are the same".to_owned(),
        keys => {
            let keys = keys.iter().map(|RefusedKey { key, value, .. }| format!("`{key} = {value}`"));
            format!("which cannot compute {}", keys.collect::<Vec<_>>().join(", "))
        }
    };
    format!(
        "model family `{found}` is not supported: the families are {known}; the nearest one is `{nearest}`, {difference}"
    )
}

impl ConfigError {
    /// Returns the key of `config.json` that caused the error; `None` if no key of that file did.
    pub fn key(&self) -> Option<String> {
        match self {
            Self::UnknownFamily { found, .. } => (!found.is_empty()).then(|| "model_type".to_owned()),
            Self::Value { key, .. } => Some(key.clone()),
            Self::UnknownEntry { table, key, .. } => Some(format!("{table}.{key}")),
            Self::Refused(refused) => Some(refused.key.clone()),
            Self::SeveralRefused { keys } => keys.first().map(|refused| refused.key.clone()),
            Self::Quantised { .. } => Some("quantization_config".to_owned()),
            Self::ForeignKey { key, .. } => Some(key.clone()),
            Self::NotSupported { key, .. }
            | Self::OtherInputs { key, .. }
            | Self::NotANumber { key }
            | Self::NotAList { key }
            | Self::ListLength { key, .. }
            | Self::OutOfRange { key, .. }
            | Self::Block { key, .. }
            | Self::TooWide { key, .. }
            | Self::NotDivisible { key, .. } => Some((*key).to_owned()),
            // A refusal of a value comes through the parser as text, such as "`hidden_act = gelu` is not
            // supported".
            Self::Parse(error) => {
                let message = error.to_string();
                Some(message.strip_prefix('`')?.split([' ', '`']).next()?.to_owned())
            }
            Self::EmptyStage { .. } => Some("pattern".to_owned()),
            Self::LayerRange { .. }
            | Self::ProfileLayers { .. }
            | Self::LongRows { .. }
            | Self::Split { .. }
            | Self::FewExperts { .. }
            | Self::UnevenExperts { .. }
            | Self::ComposedExperts { .. }
            | Self::NoLora { .. }
            | Self::LoraTarget { .. }
            | Self::LoraPattern { .. }
            | Self::LoraDropout { .. }
            | Self::HeadParts { .. }
            | Self::HeadPartsOfRanks { .. }
            | Self::EmbeddingParts { .. }
            | Self::TiedParts { .. }
            | Self::EmbeddingPartsOfRanks { .. } => None,
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
