//! The layers that have a row for each token id: the table of the token embeddings and the output head. Each
//! of the ranks that compute a stage together holds the rows of a part of the vocabulary.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{Embedding, Linear, TensorParallel, TiedHead};
use pipewright::tensor::Placement;

use crate::head_form::HeadForm;
use crate::norm::Norm;
use crate::parameter::{Builder, ParameterKind, ParameterSource, SplitLinear};
use crate::split::require_parts;

/// The path of an output head that has a matrix of its own.
pub(crate) const HEAD: &str = "lm_head";

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds the table of the token embeddings, `[vocabulary, hidden]`, at `path`.
    pub(crate) fn token_table(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<Param<Tensor<2>>, S::Error> {
        let ranks = self.tensor_ranks();
        require_parts(path, "weight", ("vocab_size", vocabulary), ranks)?;
        self.placed(path, "weight", [vocabulary, hidden], ParameterKind::Table, Placement::split(0, ranks))
    }

    /// Builds an output head with a matrix of its own.
    fn head(&mut self, vocabulary: usize, hidden: usize) -> Result<Linear, S::Error> {
        let shards = self.tensor_ranks();
        require_parts(HEAD, "weight", ("vocab_size", vocabulary), shards)?;
        self.split_linear(false, HEAD, [hidden, vocabulary], SplitLinear::Outputs { shards })
    }
}

/// The last norm and the output head of a model. It is the field `head` of a stage;
/// [`OutputHead::parameter_path`] gives its parameters the paths of a Hugging Face directory.
#[derive(Module, Debug)]
pub(crate) struct OutputHead {
    norm: Norm,
    /// The matrix of a head that is not tied to the embedding.
    lm_head: Option<Linear>,
    /// A copy of the embedding's table, which a tied head uses.
    tied_head: Option<TiedHead>,
    #[module(skip)]
    form: HeadForm,
}

impl OutputHead {
    /// Builds the head. It has a copy of the embedding's table if it is tied, or if `needs_table`.
    pub(crate) fn build<S: ParameterSource>(
        form: &HeadForm,
        needs_table: bool,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let HeadForm { norm, embedding, width, vocabulary, is_tied, .. } = *form;
        let norm = builder.form_norm(norm, width, form.form)?;
        let lm_head = (!is_tied).then(|| builder.head(vocabulary, width)).transpose()?;
        let table = (is_tied || needs_table).then(|| builder.token_table(embedding, vocabulary, width));
        let tied_head = table.transpose()?.map(|weight| TiedHead { weight });
        Ok(Self { norm, lm_head, tied_head, form: *form })
    }

    /// Returns the logits `[tokens, vocabulary]` of the hidden states `[tokens, hidden]` after the last
    /// block, for this rank's part of the vocabulary.
    pub(crate) fn forward(&self, hidden: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        self.logits(self.norm.forward(hidden), tensor)
    }

    /// Returns the logits of hidden states that are normalised.
    pub(crate) fn logits(&self, normalised: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        let x = tensor.enter(self.form.scaled(normalised));
        let products = match (&self.lm_head, &self.tied_head) {
            (Some(head), _) => head.forward(x),
            (None, Some(head)) => head.forward(x),
            (None, None) => unreachable!("a head has a matrix or a copy of the table"),
        };
        self.form.bounded(products)
    }

    /// Returns the copy of the embedding's table.
    pub(crate) fn table(&self) -> Option<Embedding> {
        self.tied_head.as_ref().map(|head| Embedding { weight: head.weight.clone() })
    }

    /// Returns the path in a directory of a parameter of a stage, which Burn has at `local`; `None` if it
    /// does not belong to the head. `norm` and `embedding` are the paths of the last norm and of the
    /// embedding.
    pub(crate) fn parameter_path(local: &str, norm: &str, embedding: &str) -> Option<String> {
        let local = local.strip_prefix("head.")?;
        if let Some(parameter) = local.strip_prefix("norm.") {
            return Some(format!("{norm}.{parameter}"));
        }
        Some(match local {
            "tied_head.weight" => format!("{embedding}.weight"),
            lm_head => lm_head.to_owned(),
        })
    }
}
