//! The layers that have a row for each token id: the table of the token embeddings and the output head. Each
//! of the ranks that compute a stage together holds the rows of a part of the vocabulary.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use pipewright::nn::{Embedding, HeldMatrix, QuantisedTable, Region, TensorParallel, TiedHead, held_linear};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::file_layout::FileLayout;
use crate::head_form::{HeadForm, prediction_path};
use crate::held_matrix::HeldTable;
pub(crate) use crate::lora::HEAD;
use crate::lora::SCORE;
use crate::norm::Norm;
use crate::parameter::{Builder, SplitLinear};
use crate::projection::{Projection, SharedInput};
use crate::split::{SplitStage, ids_of_part, require_parts};

/// The table of the token embeddings: whole, a rank's shard of it, or the shards of the parts of the embedding
/// and of a tied head. All shards have the path of the table.
#[derive(Module, Debug)]
pub(crate) struct TokenTable {
    /// In the order of the token ids; `None` for shards that only other layers have.
    shards: Vec<Option<TableShard>>,
}

/// A shard of the table.
#[expect(clippy::large_enum_variant, reason = "a stage has at most a few of them")]
#[derive(Module, Debug)]
pub(crate) enum TableShard {
    Parameter(Embedding),
    Quantised(QuantisedTable),
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
    pub(crate) fn add(&mut self, index: usize, shard: TableShard) {
        self.shards[index] = Some(shard);
    }

    /// Returns the row of each id that the shards of this layer have. Other ids have the rows that earlier
    /// parts of the embedding have found, or zeros. Shapes: ids `[batch, sequence]`, rows and result `[batch,
    /// sequence, hidden]`, for the rank's share of the sequence if ranks share the tokens.
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
            return match table {
                TableShard::Parameter(table) => table.forward_split(ids, split.vocabulary, &split.tensor),
                TableShard::Quantised(table) => table.forward_split(ids, split.vocabulary, &split.tensor),
            };
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
        match (shard, earlier) {
            (TableShard::Parameter(shard), None) => shard.forward_part(ids, vocabulary, own),
            (TableShard::Quantised(shard), None) => shard.forward_part(ids, vocabulary, own),
            (TableShard::Parameter(shard), Some(earlier)) => {
                shard.forward_part_onto(earlier, ids, vocabulary, own)
            }
            (TableShard::Quantised(shard), Some(earlier)) => {
                shard.forward_part_onto(earlier, ids, vocabulary, own)
            }
        }
    }
}

impl TableCopy {
    /// Returns the row of each id; see [`TokenTable::forward`].
    pub(crate) fn forward(&self, ids: Tensor<2, Int>, split: &SplitStage) -> Tensor<3> {
        self.table.forward(None, ids, split)
    }
}

impl Builder<'_> {
    /// Builds the table of the token embeddings, `[vocabulary, hidden]`, at `path`, or its last shard if other
    /// layers are the parts before it.
    pub(crate) fn token_table(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<TokenTable, ModelError> {
        if !self.embedding_is_cut() {
            return self.whole_table(path, [vocabulary, hidden]);
        }
        let mut table = TokenTable::empty(self.table_parts());
        let last = table.shards.len() - 1;
        table.add(last, self.table_shard(path, [vocabulary, hidden], last as u32)?);
        Ok(table)
    }

    /// Builds all shards of the table.
    fn whole_table(&mut self, path: &str, shape: [usize; 2]) -> Result<TokenTable, ModelError> {
        let ranks = self.tensor_ranks();
        require_parts(&self.named(path), "weight", ("vocab_size", shape[0]), ranks)?;
        let shards = (0..self.table_parts()).map(|index| self.table_shard(path, shape, index).map(Some));
        Ok(TokenTable { shards: shards.collect::<Result<_, ModelError>>()? })
    }

    /// Builds a shard of the table with this shape, or the rank's share of a table with one shard.
    pub(crate) fn table_shard(
        &mut self,
        path: &str,
        shape: [usize; 2],
        index: u32,
    ) -> Result<TableShard, ModelError> {
        let (ranks, parts) = (self.tensor_ranks(), self.table_parts());
        let placement =
            if parts > 1 { Placement::of_layer(0, index, parts) } else { Placement::split(0, ranks) };
        let (device, precision) = self.of_base();
        let device = device.clone();
        Ok(match self.held_table(path, shape, placement)? {
            HeldTable::Parameter(weight) => TableShard::Parameter(Embedding { weight }),
            HeldTable::Quantised(table) => {
                TableShard::Quantised(QuantisedTable::new(table, precision, &device))
            }
        })
    }

    /// Builds a copy of the table of the token embeddings, which is at `path`.
    pub(crate) fn table_copy(
        &mut self,
        path: &str,
        vocabulary: usize,
        hidden: usize,
    ) -> Result<TableCopy, ModelError> {
        let table = self.whole_table(path, [vocabulary, hidden])?;
        for shard in table.shards.iter().flatten() {
            if let TableShard::Parameter(shard) = shard {
                self.mark_copy(&shard.weight);
            }
        }
        Ok(TableCopy { table })
    }
}

/// The matrix of an output head, or of a part of one.
#[expect(clippy::large_enum_variant, reason = "a stage has at most a few of them")]
#[derive(Module, Debug)]
pub(crate) enum HeadMatrix {
    /// A matrix of the head's own, or a quantised table.
    Own(HeldMatrix),
    /// The same with an adapter.
    Adapted(Projection),
    /// A copy of the table of the token embeddings, or of some of its rows.
    Tied(TiedHead),
}

impl HeadMatrix {
    /// Builds the matrix of a whole head, or a rank's part of it.
    fn whole(form: &HeadForm, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let (shards, size) = (builder.tensor_ranks(), ("vocab_size", form.vocabulary));
        if form.is_tied {
            require_parts(&builder.named(form.embedding), "weight", size, shards)?;
            return Self::tied(form, Placement::split(0, shards), builder);
        }
        if let Some(labels) = form.labels {
            // Each rank has all labels.
            let (shape, whole) = ([form.width, labels], Placement::REPLICATED);
            return builder.held_matrix(SCORE, shape, FileLayout::default(), whole).map(Self::Own);
        }
        require_parts(HEAD, "weight", size, shards)?;
        if builder.lora().is_some_and(|lora| lora.adapts(HEAD)) {
            let sizes = [form.width, form.vocabulary];
            return builder
                .projection(false, HEAD, sizes, SplitLinear::Outputs { shards })
                .map(Self::Adapted);
        }
        let (shape, placement) = ([form.width, form.vocabulary], Placement::split(1, shards));
        builder.held_matrix(HEAD, shape, FileLayout::default(), placement).map(Self::Own)
    }

    /// Builds the matrix of the part `index` of `parts`.
    pub(crate) fn part(
        form: &HeadForm,
        index: u32,
        parts: u32,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        if !form.is_tied && builder.lora().is_some_and(|lora| lora.adapts(HEAD)) {
            return Err(ModelError::new(format!(
                "`{HEAD}` has an adapter, which needs the head in one part: set `pipeline.head_parts` to 1"
            )));
        }
        // Some columns of a matrix of the head's own, or some rows of a table.
        let placement = Placement::of_layer(if form.is_tied { 0 } else { 1 }, index, parts);
        if form.is_tied {
            return Self::tied(form, placement, builder);
        }
        let shape = [form.width, form.vocabulary];
        builder.held_matrix(HEAD, shape, FileLayout::default(), placement).map(Self::Own)
    }

    fn tied(form: &HeadForm, placement: Placement, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let shape = [form.vocabulary, form.width];
        Ok(match builder.held_table(form.embedding, shape, placement)? {
            HeldTable::Parameter(weight) => {
                builder.mark_copy(&weight);
                Self::Tied(TiedHead { weight })
            }
            HeldTable::Quantised(table) => Self::Own(HeldMatrix::quantised(table)),
        })
    }

    /// Returns the products `[tokens, ids]` of hidden states `[tokens, hidden]`.
    pub(crate) fn forward(&self, x: Tensor<2>, context: &StageContext) -> Tensor<2> {
        match self {
            Self::Adapted(projection) => projection.forward(&SharedInput::new(x), context),
            Self::Own(matrix) => held_linear(x, matrix, None, &Region::of_whole(&TensorParallel::default())),
            Self::Tied(table) => table.forward(x),
        }
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
    pub(crate) fn build(form: &HeadForm, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let mut norm = |path: &str| builder.form_norm(path, form.width, form.form);
        let last = norm(form.norm)?;
        let further = (1..=form.further.depth).map(|depth| norm(&format!("{}.norm", prediction_path(depth))));
        Ok(Self { last, further: further.collect::<Result<_, ModelError>>()? })
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
}

/// The last norm and the output head of a model.
#[derive(Module, Debug)]
pub(crate) struct OutputHead {
    norms: HeadNorms,
    matrix: HeadMatrix,
    #[module(skip)]
    form: HeadForm,
}

impl OutputHead {
    pub(crate) fn build(form: &HeadForm, builder: &mut Builder<'_>) -> Result<Self, ModelError> {
        let norms = HeadNorms::build(form, builder)?;
        Ok(Self { norms, matrix: HeadMatrix::whole(form, builder)?, form: *form })
    }

    /// Returns the logits `[tokens, vocabulary]` of each prediction, for this rank's part of the vocabulary, from
    /// the states of all predictions, `[predictions * tokens, hidden]`. The tokens of the states are those outside
    /// of `region`.
    pub(crate) fn forward(
        &self,
        states: Tensor<2>,
        region: &Region<'_>,
        context: &StageContext,
    ) -> Vec<Tensor<2>> {
        let logits = |normalised| {
            let x = self.form.scaled(normalised);
            let x = if self.form.labels.is_some() { x } else { region.enter(x) };
            self.form.bounded(self.matrix.forward(x, context))
        };
        self.norms.each(states).into_iter().map(logits).collect()
    }
}
