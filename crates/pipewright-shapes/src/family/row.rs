//! The row of a family in the tables.

use serde_json::Value;

use crate::key_table::KeyTable;
use crate::vectors::{Biases, QueryKeyNorm, Vectors};

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

/// The linear attention of a family's models, in blocks of the kind `linear_attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearKind {
    /// None.
    None,
    /// Gated DeltaNet.
    Gated,
    /// Kimi Delta Attention.
    Channel {
        /// Whether decays and gates are made by two products each.
        has_ranks: bool,
    },
    /// Lightning attention.
    Lightning,
}

/// Families of one form.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The values of `model_type`.
    pub names: &'static [&'static str],
    /// The entry of `architectures`, in a family that training knows.
    pub class: &'static str,
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
    /// Types of positions that mean `longrope` in files of the family.
    pub longrope_names: &'static [&'static str],
    /// Keys without an effect in tables of positions.
    pub ignored_positions: &'static [&'static str],
    /// The values of keys that all models of the family share and no file has.
    pub fixed: &'static [(&'static str, u64)],
    /// Keys of other families, which have no meaning in files of this one.
    pub foreign: &'static [&'static str],
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
    /// Every how many blocks one sees all tokens, if the others have a window or linear attention and the file does
    /// not say it.
    pub whole_every: Option<u64>,
    /// The linear attention of the other blocks.
    pub linear: LinearKind,
    /// Whether attention has a gate of its outputs, as wide as all queries, unless the file says otherwise. Latent
    /// attention has one for each head.
    pub gate: bool,
    /// Every how many blocks one has no positions, unless the file says otherwise.
    pub without_positions_every: Option<u64>,
    /// The share of a head that has rotary positions, unless the file says otherwise.
    pub rotary: f64,
    /// Why models of this form have no costs.
    pub refused: Option<&'static str>,
}

/// Llama without keys, which other families are changes of.
pub(super) const BASE: Family = Family {
    names: &[],
    class: "",
    keys: &KeyTable { computes: &[], ignored: &[], refused: &[] },
    absent: &[],
    renamed: &[],
    usual: &[],
    longrope_names: &[],
    ignored_positions: &[],
    fixed: &[],
    foreign: &[],
    gated: None,
    four_times: false,
    gpt: false,
    output_bias_is_given: true,
    more_positions: None,
    vectors: Vectors::LLAMA,
    whole_every: None,
    linear: LinearKind::None,
    gate: false,
    without_positions_every: None,
    rotary: 1.0,
    refused: None,
};

pub(super) const GPT: Family = Family {
    absent: TIED,
    gated: Some(false),
    four_times: true,
    gpt: true,
    more_positions: Some(0),
    vectors: Vectors::GPT,
    ..BASE
};

pub(super) const TIED: &[(&str, AbsentKey)] = &[("tie_word_embeddings", AbsentKey::Flag(true))];
pub(super) const HEAD_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::Head, ..Vectors::LLAMA };
pub(super) const ALL_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::All, ..Vectors::LLAMA };
pub(super) const BIASED: Vectors =
    Vectors { biases: Biases { query_key_value: true, ..Biases::NONE }, ..Vectors::LLAMA };
pub(super) const SANDWICH: Vectors = Vectors { norms_per_part: 2, ..Vectors::LLAMA };
