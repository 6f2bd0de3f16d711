//! The families of models: the keys of their files, and what their files do not state.
//!
//! The numbers of parameters that follow from these tables are compared with published ones, with transformers'
//! own models and with the models that training builds.

mod dense;
mod hybrids;
mod keys;
mod mixtures;

use serde_json::Value;

use crate::key_table::KeyTable;
use crate::vectors::{Biases, QueryKeyNorm, Vectors};
pub use dense::{
    GEMMA2, GEMMA3, GPT2, GRANITE, LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3, STARCODER2,
};
pub use hybrids::{HYBRID, NEMOTRON_H};
pub use mixtures::{DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE};

/// The value of a key that files leave out.
#[derive(Clone, Copy, Debug)]
pub enum AbsentKey {
    /// A number of something.
    Count(u32),
    /// A number.
    Number(f64),
    /// A flag.
    Flag(bool),
    /// A table, as JSON.
    Table(&'static str),
}

impl From<AbsentKey> for Value {
    fn from(key: AbsentKey) -> Self {
        match key {
            AbsentKey::Count(count) => count.into(),
            AbsentKey::Number(number) => number.into(),
            AbsentKey::Flag(flag) => flag.into(),
            AbsentKey::Table(table) => serde_json::from_str(table).expect("the table of a family is JSON"),
        }
    }
}

/// Families of one form.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The values of `model_type`.
    pub names: &'static [&'static str],
    /// The meaning of each key, in a family that training knows.
    pub keys: &'static KeyTable,
    /// The values of keys that a file leaves out, where they differ from the values that the configuration
    /// type fills in.
    pub absent: &'static [(&'static str, AbsentKey)],
    /// Older names of keys, each with the name that it stands for. If a file has both, the older one counts,
    /// as in transformers.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Further sizes that a file may leave out, which the configuration type fills in.
    pub usual: &'static [(&'static str, u64)],
    /// The values of keys that all models of the family share and no file has.
    pub fixed: &'static [(&'static str, u64)],
    /// Keys of other families, which have no meaning in files of this one.
    pub foreign: &'static [&'static str],
    /// Whether a size of 0 says the same as a missing key.
    pub zero_is_missing: bool,
    /// Whether a second product gates the first in feed-forward parts; `None` if the activation decides.
    pub gated: Option<bool>,
    /// Whether feed-forward parts are four times as wide as the hidden states, unless the file says otherwise.
    pub four_times: bool,
    /// Whether dropout follows each residual branch, and positions are not rotary.
    pub gpt: bool,
    /// Whether `attention_bias` includes the product behind attention.
    pub output_bias_is_given: bool,
    /// The rows of the table of positions in addition to the positions; `None` without such a table.
    pub more_positions: Option<u64>,
    /// Norms and biases.
    pub vectors: Vectors,
    /// Every how many blocks one sees all tokens, if the others have a window and the file does not say it.
    pub whole_every: Option<u64>,
    /// Why models of this form have no costs.
    pub refused: Option<&'static str>,
}

/// Llama without keys, which other families are changes of.
const BASE: Family = Family {
    names: &[],
    keys: &KeyTable { computes: &[], ignored: &[], refused: &[] },
    absent: &[],
    renamed: &[],
    usual: &[],
    fixed: &[],
    foreign: &[],
    zero_is_missing: false,
    gated: None,
    four_times: false,
    gpt: false,
    output_bias_is_given: true,
    more_positions: None,
    vectors: Vectors::LLAMA,
    whole_every: None,
    refused: None,
};

const GPT: Family = Family {
    absent: TIED,
    gated: Some(false),
    four_times: true,
    gpt: true,
    more_positions: Some(0),
    vectors: Vectors::GPT,
    ..BASE
};

const TIED: &[(&str, AbsentKey)] = &[("tie_word_embeddings", AbsentKey::Flag(true))];
const HEAD_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::Head, ..Vectors::LLAMA };
const ALL_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::All, ..Vectors::LLAMA };
const BIASED: Vectors =
    Vectors { biases: Biases { query_key_value: true, ..Biases::NONE }, ..Vectors::LLAMA };
const SANDWICH: Vectors = Vectors { norms_per_part: 2, ..Vectors::LLAMA };

/// The families that training knows.
pub const TRAINED: &[Family] = &[
    LLAMA,
    MISTRAL,
    MIXTRAL,
    SMOLLM3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    OLMO2,
    PHI3,
    STARCODER2,
    GPT2,
    NEMOTRON_H,
    HYBRID,
];

/// The families that only costs are known of.
const OTHERS: &[Family] = &[
    Family {
        names: &[
            "ministral",
            "ministral3",
            "granitemoe",
            "granitemoehybrid",
            "bamba",
            "kimi_k2",
            "ernie4_5",
            "seed_oss",
            "helium",
            "mamba2",
            "arcee",
            "minicpm3",
        ],
        ..BASE
    },
    Family { names: &["dots1", "exaone4"], vectors: HEAD_NORM, ..BASE },
    Family { names: &["gemma"], absent: TIED, gated: Some(true), ..BASE },
    Family { names: &["glm"], vectors: BIASED, output_bias_is_given: false, ..BASE },
    Family { names: &["glm4"], vectors: SANDWICH, output_bias_is_given: false, ..BASE },
    Family { names: &["glm4_moe"], output_bias_is_given: false, ..BASE },
    Family { names: &["olmo"], vectors: Vectors { norm_parameters: 0, ..Vectors::LLAMA }, ..BASE },
    Family { names: &["olmo3", "olmoe"], vectors: ALL_NORM, ..BASE },
    Family {
        names: &["llama4_text"],
        gated: Some(true),
        whole_every: Some(4),
        fixed: &[("n_shared_experts", 1)],
        ..BASE
    },
    Family {
        names: &["nemotron"],
        gated: Some(false),
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..BASE
    },
    Family { names: &["stablelm"], vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA }, ..BASE },
    Family {
        names: &["cohere", "cohere2"],
        absent: TIED,
        gated: Some(true),
        vectors: Vectors { shares_norm: true, ..Vectors::LLAMA },
        whole_every: Some(4),
        ..BASE
    },
    Family {
        names: &["falcon"],
        absent: TIED,
        gated: Some(false),
        four_times: true,
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..BASE
    },
    Family { names: &["gpt_bigcode"], ..GPT },
    Family { names: &["gpt_neox"], absent: &[], more_positions: None, ..GPT },
    Family { names: &["opt"], more_positions: Some(2), ..GPT },
    Family {
        names: &["phi"],
        absent: &[],
        more_positions: None,
        vectors: Vectors { shares_norm: true, ..Vectors::GPT },
        ..GPT
    },
    refused(&["jamba", "mamba", "falcon_mamba"], "the costs of Mamba-1 blocks are not known"),
    refused(&["zamba", "zamba2"], "the costs of blocks that share parameters are not known"),
    refused(&["falcon_h1"], "the costs of blocks with attention next to Mamba-2 are not known"),
    refused(&["t5", "mt5", "bart", "t5gemma"], "it has an encoder, and only decoders have costs"),
    refused(
        &["bert", "roberta", "deberta_v2", "modernbert"],
        "it is an encoder, and only decoders have costs",
    ),
    refused(&["rwkv", "recurrent_gemma", "minimax"], "the costs of its recurrence are not known"),
];

const fn refused(names: &'static [&'static str], why: &'static str) -> Family {
    Family { names, refused: Some(why), ..BASE }
}

/// Sizes that training assumes and costs do not: a window would make a prediction too low, and a table of
/// positions is a small part of a model.
const NOT_ASSUMED: [&str; 2] = ["sliding_window", "n_positions"];

impl Family {
    /// Returns the family of a `model_type`, if it is known.
    pub(crate) fn named(model_type: &str) -> Option<Self> {
        all().find(|family| family.names.contains(&model_type)).copied()
    }

    /// Returns the form of families that are not known.
    pub(crate) fn unknown() -> Self {
        BASE
    }

    /// Returns whether the head uses the table of the embedding if the file does not say it.
    pub(crate) fn is_tied(&self) -> bool {
        self.absent.iter().any(|entry| matches!(entry, ("tie_word_embeddings", AbsentKey::Flag(true))))
    }

    /// Returns the size with one of these names that files leave out, with its name.
    pub(crate) fn usual_size(&self, names: &[&str]) -> Option<(&'static str, u64)> {
        let absent = self.absent.iter().filter_map(|&(name, value)| match value {
            AbsentKey::Count(count) if count > 0 => Some((name, u64::from(count))),
            _ => None,
        });
        let mut usual = absent.chain(self.usual.iter().copied());
        usual.find(|(name, _)| names.contains(name) && !NOT_ASSUMED.contains(name))
    }
}

fn all() -> impl Iterator<Item = &'static Family> {
    TRAINED.iter().chain(OTHERS)
}

/// Returns the values of `model_type` whose norms, biases and windows are known.
pub fn known_families() -> Vec<&'static str> {
    let known = all().filter(|family| family.refused.is_none());
    known.flat_map(|family| family.names.iter().copied()).collect()
}
