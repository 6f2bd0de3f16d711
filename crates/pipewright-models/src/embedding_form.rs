//! The embedding of the tokens, cut along the vocabulary into parts, and the description of the parts as
//! layers.
//!
//! Each part has the rows of the table for some token ids. All parts but the last one only look up rows: they
//! take the token ids with the rows that earlier parts have found, and pass both on. The last part is the
//! embedding layer of the family, with its share of the table. It also has what the family does with the sum
//! of all embeddings, such as the vectors of positions.

use std::ops::Range;

use pipewright_schedule::{EMBEDDING_PART, LayerDesc, ModelDesc};

use crate::cost::{ELEMENT, TABLE_PASSES, TOKEN_ID};
use crate::error::ModelError;
use crate::head_form::{CutHead, HeadForm};
use crate::split::ids_of_part;

/// An embedding that is cut along the vocabulary into parts, each of them a layer. Every part has a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CutEmbedding {
    /// The form of the head, which has the path and the size of the table.
    form: HeadForm,
    parts: u32,
}

/// Element-wise passes of the rows that a part takes from the parts before it: they are copied with other rows
/// in their places, and so are their gradients.
const PASSED_PASSES: u64 = 4;

impl CutEmbedding {
    /// Returns the embedding in this number of parts, at least 2.
    ///
    /// # Errors
    /// When a part would have no token.
    pub(crate) fn new(form: HeadForm, parts: u32) -> Result<Self, ModelError> {
        let embedding = Self { form, parts };
        if parts == 0 || embedding.ids(parts - 1).is_empty() {
            return Err(ModelError::new(format!(
                "{parts} parts of a vocabulary of {} tokens leave a part of the embedding without a token; use a smaller \
                 `pipeline.embedding_parts`",
                form.vocabulary
            )));
        }
        Ok(embedding)
    }

    /// Returns the number of parts.
    pub(crate) fn parts(&self) -> u32 {
        self.parts
    }

    /// Returns the path and the size of the table.
    pub(crate) fn form(&self) -> &HeadForm {
        &self.form
    }

    /// Returns the token ids whose rows a part has.
    fn ids(&self, part: u32) -> Range<usize> {
        ids_of_part(part, self.parts, self.form.vocabulary)
    }

    /// Returns `model` with a layer for each part instead of the embedding. `tokens` is the number of tokens
    /// of a row.
    fn describe(&self, mut model: ModelDesc, tokens: u64) -> ModelDesc {
        if !model.layers.is_empty() {
            let whole = model.layers.remove(0);
            let parts = (0..self.parts).map(|part| self.layer(part, &whole, tokens));
            model.layers.splice(0..0, parts.collect::<Vec<_>>());
        }
        model
    }

    fn layer(&self, part: u32, whole: &LayerDesc, tokens: u64) -> LayerDesc {
        let (width, ids) = (self.form.width as u64, self.ids(part).len() as u64);
        let vocabulary = self.form.vocabulary as u64;
        // A token whose id the part has reads its row.
        let row = ELEMENT * TABLE_PASSES * width;
        let found = row * ids / vocabulary;
        let passed = if part == 0 { 0 } else { ELEMENT * PASSED_PASSES * width };
        let own = LayerDesc {
            path: format!("{} {}/{}", whole.path, part + 1, self.parts),
            kind: EMBEDDING_PART.to_owned(),
            ..whole.clone()
        };
        if part + 1 == self.parts {
            return LayerDesc {
                parameters: whole.parameters.saturating_sub(width * (vocabulary - ids)),
                weight: whole.weight.saturating_sub(row) + found + passed,
                ..own
            };
        }
        LayerDesc {
            parameters: width * ids,
            weight: found + passed,
            activation_bytes: tokens * TOKEN_ID,
            device_activation_bytes: None,
            // The ids go with the rows.
            output_bytes: whole.output_bytes + tokens * TOKEN_ID,
            ..own
        }
    }
}

/// How the embedding and the head of a model are cut along the vocabulary. By default both are whole.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VocabularyCut {
    /// The embedding, if it has several parts.
    pub(crate) embedding: Option<CutEmbedding>,
    /// The head, if it has several parts.
    pub(crate) head: Option<CutHead>,
}

impl VocabularyCut {
    /// Returns why the parts cannot run slices of microbatches; `None` if they can.
    pub(crate) fn refuses_slices(&self) -> Option<String> {
        self.head.map(|_| "the parts of its head take the targets of whole microbatches".to_owned())
    }

    /// Returns the number of layers that are parts of the embedding and come before the family's embedding
    /// layer.
    pub(crate) fn layers_before(&self) -> usize {
        self.embedding.map_or(0, |embedding| embedding.parts() as usize - 1)
    }

    /// Returns the number of shards in which stages hold the table of the token embeddings, so that each part
    /// of the embedding and of a tied head has one shard.
    pub(crate) fn table_parts(&self) -> u32 {
        match (&self.embedding, &self.head) {
            (Some(embedding), _) => embedding.parts(),
            (None, Some(head)) => head.table_parts(),
            (None, None) => 1,
        }
    }

    /// Returns `model` with a layer for each part. `tokens` is the number of tokens of a row.
    pub(crate) fn describe(&self, mut model: ModelDesc, tokens: u64) -> ModelDesc {
        if let Some(head) = &self.head {
            model = head.describe(model, tokens);
        }
        match &self.embedding {
            Some(embedding) => embedding.describe(model, tokens),
            None => model,
        }
    }

    /// Returns the number of layers of a model with so many layers between its embedding and its head.
    pub(crate) fn layers(&self, inner: usize) -> usize {
        self.layers_before() + 1 + inner + self.head.map_or(1, |head| head.parts() as usize)
    }

    /// Returns an error if several ranks compute the parts together.
    pub(crate) fn require_one_rank(&self, ranks: u32) -> Result<(), ModelError> {
        let (head, embedding) = (self.head.map(|head| head.parts()), self.embedding.map(|part| part.parts()));
        require_one_rank(head.unwrap_or(1), embedding.unwrap_or(1), ranks)
    }

    /// Returns an error if the parts of the embedding and of a tied head cannot share the shards of one table.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        let Some(embedding) = &self.embedding else { return Ok(()) };
        let (parts, head_parts) = (embedding.parts(), self.head.map_or(1, |head| head.parts()));
        if embedding.form().is_tied && parts != head_parts {
            return Err(ModelError::new(format!(
                "the embedding and the tied head have one table, which cannot have {parts} parts and {head_parts}: set \
                 `pipeline.embedding_parts` to 1, or `pipeline.head_parts` to {parts}"
            )));
        }
        Ok(())
    }
}

/// Returns an error if several ranks compute the stages of a model whose head or embedding is in parts.
///
/// # Errors
/// When there are several ranks and several parts.
pub fn require_one_rank(head_parts: u32, embedding_parts: u32, ranks: u32) -> Result<(), ModelError> {
    let parts = [("head", head_parts), ("embedding", embedding_parts)];
    match parts.into_iter().find(|(_, parts)| ranks > 1 && *parts > 1) {
        None => Ok(()),
        Some((end, parts)) => Err(ModelError::new(format!(
            "the {end} is cut into {parts} parts, and {ranks} tensor ranks split the vocabulary already: set \
             `pipeline.{end}_parts` or `mesh.tensor_parallel` to 1"
        ))),
    }
}
