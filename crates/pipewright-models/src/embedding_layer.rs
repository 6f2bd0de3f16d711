//! The layer of the embeddings: of the tokens, of their positions, and in the hybrid family further ones.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::Embedding;

use crate::boundary::StageTensors;
use crate::decoder::scaled;
use crate::hybrid::{FurtherEmbeddings, RelationBias, with_zero_gradient};
use crate::rows::Rows;
use crate::table_adapter::TableAdapter;
use crate::vocabulary::TokenTable;

/// The embeddings of a model.
#[derive(Module, Debug)]
pub(crate) struct EmbeddingLayer {
    tokens: TokenTable,
    /// The adapter of the table, if it has one.
    pub(crate) adapter: Option<TableAdapter>,
    /// The vectors of positions, in a family that has them.
    pub(crate) positions: Option<Embedding>,
    pub(crate) further: Option<FurtherEmbeddings>,
    pub(crate) relation_bias: Option<RelationBias>,
    /// The factor of the token embeddings.
    #[module(skip)]
    pub(crate) factor: f64,
}

impl EmbeddingLayer {
    /// Returns the embeddings of the tokens alone.
    pub(crate) fn new(tokens: TokenTable) -> Self {
        Self { tokens, adapter: None, positions: None, further: None, relation_bias: None, factor: 1.0 }
    }

    /// Returns the hidden states `[batch, sequence, hidden]` of token ids, or of the rank's share of them. If the
    /// embedding is in parts, the input also has the rows of the table that earlier parts have found.
    ///
    /// # Panics
    /// When the input has no token ids, an id is outside the vocabulary, or a position has no vector.
    pub(crate) fn forward(&self, input: StageTensors, rows: &Rows<'_>) -> Tensor<3> {
        let ids = input.ids.expect("the first stage takes token ids, not hidden states");
        let mut x = self.tokens.forward(input.floats.into_iter().next(), ids.clone(), rows.split);
        if let Some(adapter) = &self.adapter {
            x = adapter.add(x, ids.clone(), rows);
        }
        if let Some(table) = &self.relation_bias {
            // The attentions have copies of the table, which are all that is read.
            x = with_zero_gradient(x, table.table());
        }
        x = scaled(x, self.factor);
        if let (Some(further), Some(tokens)) = (&self.further, rows.tokens()) {
            x = further.forward(x, &ids, tokens, rows.context);
        }
        let Some(table) = &self.positions else { return x };
        let (positions, [count, _]) = (rows.positions(), table.weight.dims());
        // Devices do not check the rows that they select.
        assert!(
            positions.iter().all(|&position| (position as usize) < count),
            "a position lies outside the table of {count} (`n_positions`): use shorter rows"
        );
        let positions: Vec<i32> = positions.into_iter().map(|position| position as i32).collect();
        let positions = Tensor::<2, Int>::from_data(TensorData::new(positions, rows.shape), &x.device());
        let own = rows.own_tokens();
        x + table.forward(positions.narrow(1, own.start, own.len()))
    }
}
