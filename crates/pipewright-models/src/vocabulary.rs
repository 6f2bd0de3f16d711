//! The layers that have a row for each token id: the table of the token embeddings and the output head. Each
//! of the ranks that compute a stage together holds the rows of a part of the vocabulary.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use pipewright::nn::{Embedding, Linear, TensorParallel, TiedHead};
use pipewright::tensor::Placement;

use crate::head_form::{HeadForm, prediction_path};
use crate::norm::Norm;
use crate::parameter::{Builder, ParameterKind, ParameterSource, SplitLinear};
use crate::split::{SplitStage, ids_of_part, require_parts, shard_of_table};

/// The path of an output head that has a matrix of its own.
pub(crate) const HEAD: &str = "lm_head";

/// The table of the token embeddings: whole, a rank's shard of it, or the shards of the parts of the embedding
/// and of a tied head. All shards have the path of the table.
#[derive(Module, Debug)]
pub(crate) struct TokenTable {
    /// In the order of the token ids; `None` for shards that only other layers have. [`shard_of_table`] reads
    /// the name of this field.
    shards: Vec<Option<Embedding>>,
}

/// A copy of the table of the token embeddings on a layer behind the embedding. A model directory does not
/// hold it. Each prediction holds a copy of the table, so that sums of gradients do not depend on the cut.
#[derive(Module, Debug)]
pub(crate) struct TableCopy {
    table: TokenTable,
}

impl TokenTable {
    /// Returns a table without any of its shards.
    pub(crate) fn empty(shards: u32) -> Self {
        Self { shards: vec![None; shards as usize] }
    }

    /// Returns the indices of the shards that this layer has, in order.
    pub(crate) fn held(&self) -> impl Iterator<Item = usize> {
        (0..self.shards.len()).filter(|&index| self.shards[index].is_some())
    }

    /// Adds a shard to a table that has several.
    pub(crate) fn add(&mut self, index: usize, shard: Embedding) {
        self.shards[index] = Some(shard);
    }

    /// Returns the row of each id that the shards of this layer have. Other ids have the rows that earlier
    /// parts of the embedding have found, or zeros. Shapes: ids `[batch, sequence]`, rows and result `[batch,
    /// sequence, hidden]`.
    ///
    /// # Panics
    /// When an id is outside the vocabulary, or a whole table gets rows of earlier parts.
    pub(crate) fn forward(
        &self,
        earlier: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        split: &SplitStage,
    ) -> Tensor<3> {
        if let [Some(table)] = self.shards.as_slice() {
            assert!(earlier.is_none(), "the first stage takes token ids, not hidden states");
            return table.forward_split(ids, split.vocabulary, &split.tensor);
        }
        let rows = self.held().fold(earlier, |earlier, index| {
            Some(self.forward_shard(index, earlier, ids.clone(), split.vocabulary))
        });
        rows.expect("a table has a shard")
    }

    /// Like [`TokenTable::forward`], but for one shard of several.
    ///
    /// # Panics
    /// As [`TokenTable::forward`], and when the layer does not have the shard.
    pub(crate) fn forward_shard(
        &self,
        index: usize,
        earlier: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        vocabulary: usize,
    ) -> Tensor<3> {
        let shard = self.shards[index].as_ref().expect("the shard is one of this layer's");
        let own = ids_of_part(index as u32, self.shards.len() as u32, vocabulary);
        match earlier {
            Some(earlier) => shard.forward_part_onto(earlier, ids, vocabulary, own),
            None => shard.forward_part(ids, vocabulary, own),
        }
    }
}

impl TableCopy {
    /// Returns the row of each id; see [`TokenTable::forward`].
    pub(crate) fn forward(&self, ids: Tensor<2, Int>, split: &SplitStage) -> Tensor<3> {
        self.table.forward(None, ids, split)
    }
}

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds the table of the token embeddings, `[vocabulary, hidden]`, at `path`, or its last shard if other
    /// layers are the parts before it.
    pub(crate) fn token_table(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<TokenTable, S::Error> {
        if !self.embedding_is_cut() {
            return self.whole_table(path, [vocabulary, hidden]);
        }
        let mut table = TokenTable::empty(self.table_parts());
        let last = table.shards.len() - 1;
        table.add(last, self.table_shard(path, [vocabulary, hidden], last as u32)?);
        Ok(table)
    }

    /// Builds all shards of the table.
    fn whole_table(&mut self, path: &str, shape: [usize; 2]) -> Result<TokenTable, S::Error> {
        let ranks = self.tensor_ranks();
        require_parts(&self.named(path), "weight", ("vocab_size", shape[0]), ranks)?;
        let shards = (0..self.table_parts()).map(|index| self.table_shard(path, shape, index).map(Some));
        Ok(TokenTable { shards: shards.collect::<Result<_, S::Error>>()? })
    }

    /// Builds a shard of the table with this shape, or the rank's share of a table with one shard.
    pub(crate) fn table_shard(
        &mut self,
        path: &str,
        shape: [usize; 2],
        index: u32,
    ) -> Result<Embedding, S::Error> {
        let (ranks, parts) = (self.tensor_ranks(), self.table_parts());
        let placement =
            if parts > 1 { Placement::of_layer(0, index, parts) } else { Placement::split(0, ranks) };
        let weight = self.placed(path, "weight", shape, ParameterKind::Table, placement)?;
        Ok(Embedding { weight })
    }

    /// Builds a copy of the table of the token embeddings, which is at `path`.
    pub(crate) fn table_copy(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<TableCopy, S::Error> {
        Ok(TableCopy { table: self.whole_table(path, [vocabulary, hidden])? })
    }
}

/// The matrix of an output head, or of a part of one.
#[derive(Module, Debug)]
pub(crate) enum HeadMatrix {
    /// A matrix of the head's own.
    Own(Linear),
    /// A copy of the table of the token embeddings, or of some of its rows.
    Tied(TiedHead),
}

impl HeadMatrix {
    /// Builds the matrix of a whole head, or a rank's part of it.
    fn whole<S: ParameterSource>(form: &HeadForm, builder: &mut Builder<'_, S>) -> Result<Self, S::Error> {
        let (shards, size) = (builder.tensor_ranks(), ("vocab_size", form.vocabulary));
        if form.is_tied {
            require_parts(&builder.named(form.embedding), "weight", size, shards)?;
            return Self::tied(form, Placement::split(0, shards), builder);
        }
        require_parts(HEAD, "weight", size, shards)?;
        let (shape, split) = ([form.width, form.vocabulary], SplitLinear::Outputs { shards });
        builder.split_linear(false, HEAD, shape, split).map(Self::Own)
    }

    /// Builds the matrix of the part `index` of `parts`.
    pub(crate) fn part<S: ParameterSource>(
        form: &HeadForm,
        index: u32,
        parts: u32,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let placement = Self::placement_of_part(form, index, parts);
        if form.is_tied {
            return Self::tied(form, placement, builder);
        }
        let shape = [form.width, form.vocabulary];
        let weight = builder.placed(HEAD, "weight", shape, ParameterKind::Matrix, placement)?;
        Ok(Self::Own(Linear { weight, bias: None }))
    }

    fn tied<S: ParameterSource>(
        form: &HeadForm,
        placement: Placement,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let shape = [form.vocabulary, form.width];
        let weight = builder.placed(form.embedding, "weight", shape, ParameterKind::Table, placement)?;
        Ok(Self::Tied(TiedHead { weight }))
    }

    /// Returns the shard of the whole matrix that a part has: some columns of a matrix of the head's own, or
    /// some rows of a table.
    pub(crate) fn placement_of_part(form: &HeadForm, index: u32, parts: u32) -> Placement {
        Placement::of_layer(if form.is_tied { 0 } else { 1 }, index, parts)
    }

    /// Returns the products `[tokens, ids]` of hidden states `[tokens, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Own(matrix) => matrix.forward(x),
            Self::Tied(table) => table.forward(x),
        }
    }

    /// Returns the path in a directory of the parameter at `local`. `embedding` is the path of the embedding.
    pub(crate) fn path(local: &str, embedding: &str) -> String {
        let is_tied = local.split('.').any(|name| name == "Tied");
        format!("{}.weight", if is_tied { embedding } else { HEAD })
    }
}

/// The norms in front of an output head: the last norm of the model, and the norm of each further
/// prediction.
#[derive(Module, Debug)]
pub(crate) struct HeadNorms {
    last: Norm,
    further: Vec<Norm>,
}

impl HeadNorms {
    pub(crate) fn build<S: ParameterSource>(
        form: &HeadForm,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let mut norm = |path: &str| builder.form_norm(path, form.width, form.form);
        let last = norm(form.norm)?;
        let further = (1..=form.further.depth).map(|depth| norm(&format!("{}.norm", prediction_path(depth))));
        Ok(Self { last, further: further.collect::<Result<_, S::Error>>()? })
    }

    /// Returns the normalised states of each prediction, `[tokens, hidden]`, from the states of all,
    /// `[predictions * tokens, hidden]`.
    fn each(&self, states: Tensor<2>) -> Vec<Tensor<2>> {
        if self.further.is_empty() {
            return vec![self.last.forward(states)];
        }
        let norms = std::iter::once(&self.last).chain(&self.further);
        let states = states.chunk(1 + self.further.len(), 0);
        norms.zip(states).map(|(norm, states)| norm.forward(states)).collect()
    }

    /// Returns the normalised states of all predictions: `[predictions * tokens, hidden]` in and out.
    pub(crate) fn forward(&self, states: Tensor<2>) -> Tensor<2> {
        let mut each = self.each(states);
        if each.len() == 1 { each.remove(0) } else { Tensor::cat(each, 0) }
    }

    /// Returns the path in a directory of the parameter at `local`. `norm` is the path of the last norm.
    pub(crate) fn path(local: &str, norm: &str) -> Option<String> {
        if let Some(name) = local.strip_prefix("last.") {
            return Some(format!("{norm}.{name}"));
        }
        let (index, name) = local.strip_prefix("further.")?.split_once('.')?;
        Some(format!("{}.norm.{name}", prediction_path(index.parse::<usize>().ok()? + 1)))
    }
}

/// The last norm and the output head of a model. It is the field `head` of a stage; [`vocabulary_path`] gives
/// its parameters the paths of a Hugging Face directory.
#[derive(Module, Debug)]
pub(crate) struct OutputHead {
    norms: HeadNorms,
    matrix: HeadMatrix,
    #[module(skip)]
    form: HeadForm,
}

impl OutputHead {
    pub(crate) fn build<S: ParameterSource>(
        form: &HeadForm,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let norms = HeadNorms::build(form, builder)?;
        Ok(Self { norms, matrix: HeadMatrix::whole(form, builder)?, form: *form })
    }

    /// Returns the logits `[tokens, vocabulary]` of the next token from the hidden states `[tokens, hidden]`
    /// after the last block, for this rank's part of the vocabulary.
    pub(crate) fn forward(&self, hidden: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        self.logits(self.norms.last.forward(hidden), tensor)
    }

    /// Returns the logits of each prediction, from the states of all, `[predictions * tokens, hidden]`.
    pub(crate) fn forward_each(&self, states: Tensor<2>, tensor: &TensorParallel) -> Vec<Tensor<2>> {
        self.norms.each(states).into_iter().map(|normalised| self.logits(normalised, tensor)).collect()
    }

    fn logits(&self, normalised: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        let x = tensor.enter(self.form.scaled(normalised));
        self.form.bounded(self.matrix.forward(x))
    }
}

/// Returns the path in a directory of a parameter of a stage, which Burn has at `local`, if it belongs to the
/// table of the token embeddings or to the head. `norm` and `embedding` are the paths of the last norm and of
/// the embedding.
pub(crate) fn vocabulary_path(local: &str, norm: &str, embedding: &str) -> Option<String> {
    if shard_of_table(local).is_some() {
        return Some(format!("{embedding}.weight"));
    }
    let local = local.strip_prefix("head.")?;
    match local.strip_prefix("norms.") {
        Some(local) => HeadNorms::path(local, norm),
        None => Some(HeadMatrix::path(local, embedding)),
    }
}
