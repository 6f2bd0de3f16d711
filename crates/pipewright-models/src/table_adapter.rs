//! The adapter of the table of the token embeddings: a token has the row `w[id] + scale * a[id] b`, with `a
//! [vocabulary, rank]` and `b [rank, hidden]`.
//!
//! `a` starts as zeros and `b` as normal numbers. In PEFT both are parameters and not layers, so their names have no
//! `weight`. A head that multiplies by the table (`tie_word_embeddings`) multiplies by `w`, as in PEFT without
//! `ensure_weight_tying`. As there, nothing is dropped.
#![expect(
    non_snake_case,
    reason = "the fields `lora_embedding_A` and `lora_embedding_B` have the names of the parameters in PEFT"
)]

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use pipewright::nn::{Embedding, Linear};
use pipewright::tensor::Placement;
use pipewright::train::REFERENCE_PASS;

use crate::error::ModelError;
use crate::lora::TABLE_MATRICES;
use crate::parameter::{Builder, ParameterKind};
use crate::rows::Rows;

/// The adapter of a table.
#[derive(Module, Debug)]
pub(crate) struct TableAdapter {
    lora_embedding_A: Embedding,
    lora_embedding_B: Linear,
    #[module(skip)]
    scale: f64,
}

impl Builder<'_> {
    /// Builds the adapter of the table `[vocabulary, hidden]` at `path`, if the source has one.
    ///
    /// # Errors
    /// When such an adapter does not work with other settings.
    pub(crate) fn table_adapter(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<Option<TableAdapter>, ModelError> {
        let named = self.named(path);
        let Some(lora) = self.lora().filter(|lora| lora.adapts(&named)) else { return Ok(None) };
        let (rank, scale) = (lora.rank as usize, lora.scale());
        if lora.dora {
            return Err(ModelError::new(format!(
                "`adapter.targets`: `{named}` is a table, and tables have no magnitudes: leave it out, or set `adapter.dora` to \
                 false"
            )));
        }
        if self.embedding_is_cut() {
            return Err(ModelError::new(format!(
                "`adapter.targets`: the adapter of `{named}` needs the embedding in one part: set `pipeline.embedding_parts` to 1"
            )));
        }
        let [first, second] = TABLE_MATRICES;
        let (split, kind) = (Placement::split(0, self.tensor_ranks()), ParameterKind::Matrix);
        let first = self.placed(path, first, [vocabulary, rank], kind, split)?;
        let second = self.placed(path, second, [rank, hidden], kind, self.of_tokens())?;
        Ok(Some(TableAdapter {
            lora_embedding_A: Embedding { weight: first },
            lora_embedding_B: Linear { weight: second, bias: None },
            scale,
        }))
    }
}

impl TableAdapter {
    /// Adds the adapter's part to the rows `x` of token ids, or to the rank's share of them. Shapes: `x [batch, tokens,
    /// hidden]`, ids `[batch, sequence]`.
    pub(crate) fn add(&self, x: Tensor<3>, ids: Tensor<2, Int>, rows: &Rows<'_>) -> Tensor<3> {
        // The reference of preference training is the base.
        if rows.context.value::<bool>(REFERENCE_PASS).is_ok() {
            return x;
        }
        let split = rows.split;
        let low = self.lora_embedding_A.forward_split(ids, split.vocabulary, &split.tensor);
        let (shape, precision) = (x.dims(), x.dtype());
        let low = low.flatten::<2>(0, 1) * self.scale;
        x + self.lora_embedding_B.forward(low).reshape(shape).cast(precision)
    }
}
