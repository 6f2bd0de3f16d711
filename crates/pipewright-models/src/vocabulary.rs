//! Builds the layers that have a row for each token id: the table of the token embeddings and the output head. Each of the
//! ranks that compute a stage together holds the rows of a part of the vocabulary.

use burn::module::Param;
use burn::tensor::Tensor;
use pipewright::nn::Linear;
use pipewright::tensor::Placement;

use crate::error::ConfigError;
use crate::parameter::{Builder, ParameterKind, ParameterSource, SplitLinear};
use crate::split::require_parts;

/// The path of an output head that has a matrix of its own.
pub(crate) const HEAD: &str = "lm_head";

impl<S> Builder<'_, S>
where
    S: ParameterSource,
    S::Error: From<ConfigError>,
{
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
    pub(crate) fn head(&mut self, vocabulary: usize, hidden: usize) -> Result<Linear, S::Error> {
        let shards = self.tensor_ranks();
        require_parts(HEAD, "weight", ("vocab_size", vocabulary), shards)?;
        self.split_linear(false, HEAD, [hidden, vocabulary], SplitLinear::Outputs { shards })
    }
}
