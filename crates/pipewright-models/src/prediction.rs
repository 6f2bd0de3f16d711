//! A prediction of a further token (DeepSeek-AI, 2024, arXiv:2412.19437): a layer with a block of its own.
//!
//! The prediction of depth `k` adds, for each token, a state from which the head predicts the token `k`
//! positions after the next one. It makes the state from the state of the depth before, which is the hidden
//! state of the last block for the first, and from the token `k` positions ahead in the same document.
//!
//! States of all depths are rows of one tensor: the states of the last block come first, and then the states
//! of each depth. A prediction appends its rows.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::{Linear, TokenScope};

use crate::block::Block;
use crate::documents::last_of_documents;
use crate::error::ModelError;
use crate::head_form::prediction_path;
use crate::hybrid::HybridConfig;
use crate::norm::{Norm, NormForm};
use crate::parameter::Builder;
use crate::rows::Rows;
use crate::vocabulary::TableCopy;

/// The layer of a prediction.
#[derive(Module, Debug)]
pub(crate) struct Prediction {
    hidden_norm: Norm,
    embed_norm: Norm,
    proj: Linear,
    block: Block,
    table: TableCopy,
    #[module(skip)]
    depth: usize,
}

impl Prediction {
    /// Builds the prediction of a depth, which is counted from 1, with a block. `embedding` is the path of the
    /// token embeddings.
    pub(crate) fn build(
        config: &HybridConfig,
        block: Block,
        depth: usize,
        embedding: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let (path, width) = (prediction_path(depth), config.hidden_size);
        let form = NormForm::usual(config.rms_norm_eps);
        Ok(Self {
            hidden_norm: builder.form_norm(&format!("{path}.hidden_norm"), width, form)?,
            embed_norm: builder.form_norm(&format!("{path}.embed_norm"), width, form)?,
            proj: builder.linear(&format!("{path}.proj"), 2 * width, width)?,
            block,
            table: builder.table_copy(embedding, config.vocab_size, width)?,
            depth,
        })
    }

    /// Returns the block of the prediction.
    pub(crate) fn block_mut(&mut self) -> &mut Block {
        &mut self.block
    }

    /// Appends the states of the prediction to the states of the depths before: `[depths * tokens, hidden]`
    /// in, with one depth more out. The states at the last positions of a document have no meaning: the tokens
    /// ahead are of another document, or are not among the ids. No state with a meaning depends on them.
    pub(crate) fn forward(&self, states: Tensor<2>, ids: &Tensor<2, Int>, rows: &Rows<'_>) -> Tensor<2> {
        let [batch, sequence] = ids.dims();
        let tokens = rows.tokens().expect("a hybrid has tokens");
        let ([all, width], count) = (states.dims(), batch * sequence);
        let before = states.clone().narrow(0, all - count, count);
        let ids = ahead(ids, self.depth, &tokens.scope);
        let embedded = self.table.forward(ids, rows.split).reshape([count, width]);
        let (before, embedded) = (self.hidden_norm.forward(before), self.embed_norm.forward(embedded));
        let x = self.proj.forward(Tensor::cat(vec![before, embedded], 1));
        let x = self.block.forward(x, rows, None);
        Tensor::cat(vec![states, x], 0)
    }
}

/// Returns the ids that are `depth` positions ahead. Positions beyond the end of a document repeat its last id.
fn ahead(ids: &Tensor<2, Int>, depth: usize, scope: &TokenScope) -> Tensor<2, Int> {
    let [rows, sequence] = ids.dims();
    let last = last_of_documents(&scope.documents, sequence);
    let positions = last.iter().enumerate().map(|(token, &last)| (token % sequence + depth).min(last) as i64);
    let positions = TensorData::new(positions.collect::<Vec<_>>(), [rows, sequence]);
    ids.clone().gather(1, Tensor::from_data(positions, &ids.device()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn the_last_id_of_a_document_is_repeated() {
        let ids = Tensor::<2, Int>::from_data([[1, 2, 3], [4, 5, 6]], &Device::flex());
        let check = |documents: [u32; 6], expected: [[i64; 6]; 3]| {
            let scope = TokenScope { documents: documents.into(), ..TokenScope::whole(2, 3) };
            for (depth, expected) in [1, 2, 4].into_iter().zip(expected) {
                let found = ahead(&ids, depth, &scope).into_data().iter::<i64>().collect::<Vec<_>>();
                assert_eq!(found, expected, "depth {depth} of {documents:?}");
            }
        };
        check([0; 6], [[2, 3, 3, 5, 6, 6], [3, 3, 3, 6, 6, 6], [3, 3, 3, 6, 6, 6]]);
        check([0, 0, 1, 0, 1, 1], [[2, 2, 3, 4, 6, 6], [2, 2, 3, 4, 6, 6], [2, 2, 3, 4, 6, 6]]);
    }
}
