//! The rows of a microbatch at a stage, and what its layers make of them: each is made for the first layer that
//! needs it.

use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::{CausalAttention, TokenScope};
use pipewright::stage::StageContext;

use crate::boundary::StageTensors;
use crate::decoder::{BlockAttentions, MicrobatchAttentions};
use crate::documents::given_scope;
use crate::hybrid::{Choice, HybridConfig, Tokens};
use crate::split::SplitStage;
use crate::valid_tokens::reach;

/// The rows of a microbatch, or of a slice of it, or the next tokens of a row in generation.
pub(crate) struct Rows<'a> {
    pub(crate) context: &'a StageContext,
    pub(crate) split: &'a SplitStage,
    /// The number of rows, and the tokens of each.
    pub(crate) shape: [usize; 2],
    /// The position of the first token of each row.
    first: usize,
    /// How mixtures of depths choose their tokens.
    pub(crate) choice: Choice,
    device: Device,
    attentions: &'a BlockAttentions,
    made: RefCell<MicrobatchAttentions>,
    scope: OnceCell<Option<TokenScope>>,
    /// The configuration and the ids of a hybrid; `None` behind a part of its head that needs no ids.
    hybrid: Option<(&'a HybridConfig, Tensor<2, Int>)>,
    tokens: OnceCell<Tokens>,
}

impl<'a> Rows<'a> {
    /// Returns the rows of `input` for a stage with these attentions. `hybrid` is the configuration of a hybrid.
    pub(crate) fn new(
        input: &StageTensors,
        (attentions, hybrid): (&'a BlockAttentions, Option<&'a HybridConfig>),
        split: &'a SplitStage,
        context: &'a StageContext,
    ) -> Self {
        let (shape, device) = match (&input.ids, input.floats.first()) {
            (Some(ids), _) => (ids.dims(), ids.device()),
            (None, Some(hidden)) => {
                let [rows, share, _] = hidden.dims();
                let shares = if split.tensor.shares_tokens() { split.tensor.ranks() as usize } else { 1 };
                ([rows, share * shares], hidden.device())
            }
            (None, None) => panic!("a stage takes token ids or hidden states"),
        };
        Self {
            context,
            split,
            shape,
            first: context.slice().0.get() as usize * shape[1],
            choice: Choice::Largest,
            device,
            attentions,
            made: RefCell::default(),
            scope: OnceCell::new(),
            hybrid: hybrid.zip(input.ids.clone()),
            tokens: OnceCell::new(),
        }
    }

    /// Returns the next tokens of a row in generation, from the token `first` on. Later tokens are not known.
    pub(crate) fn in_generation(self, first: usize) -> Self {
        Self { first, choice: Choice::Positive, ..self }
    }

    /// Returns the rows with the documents, positions and relations of `tokens`.
    pub(crate) fn with_tokens(self, tokens: Tokens) -> Self {
        Self { tokens: tokens.into(), ..self }
    }

    /// Returns the tokens of each row whose hidden states this rank has: all, or its share.
    pub(crate) fn own_tokens(&self) -> Range<usize> {
        let (tensor, [_, length]) = (&self.split.tensor, self.shape);
        if tensor.shares_tokens() { tensor.range(length) } else { 0..length }
    }

    /// Returns the documents of the tokens, if the step says which they are, with their positions.
    pub(crate) fn scope(&self) -> Option<&TokenScope> {
        self.scope.get_or_init(|| given_scope(self.context, self.shape)).as_ref()
    }

    /// Returns the tokens of a hybrid's rows.
    pub(crate) fn tokens(&self) -> Option<&Tokens> {
        let (config, ids) = self.hybrid.as_ref()?;
        Some(self.tokens.get_or_init(|| Tokens::new(config, ids, self.context)))
    }

    /// Returns the position of each token.
    pub(crate) fn positions(&self) -> Vec<u32> {
        let ([rows, length], first) = (self.shape, self.first as u32);
        match self.scope() {
            Some(scope) => scope.positions.to_vec(),
            None => (0..rows).flat_map(|_| first..first + length as u32).collect(),
        }
    }

    /// Multiplies queries by the factors of their positions, in a model that has such factors.
    pub(crate) fn grown(&self, q: Tensor<2>) -> Tensor<2> {
        let Some(factors) = self.attentions.query_factors(|| self.positions()) else { return q };
        let shape = [factors.len(), 1];
        let factors = Tensor::<2>::from_data(TensorData::new(factors, shape), &self.device);
        let dtype = q.dtype();
        q * factors.cast(dtype)
    }

    /// Returns a block's attention over the whole rows.
    pub(crate) fn attention(&self, block: usize) -> Arc<CausalAttention> {
        self.attentions.of_microbatch(block, &mut self.made.borrow_mut(), || {
            let ([batch, sequence], slices) = (self.shape, self.context.slice().1);
            let length = sequence * slices.get() as usize;
            let reach = if self.attentions.depend_on_length() && slices.is_one() {
                reach(self.context, self.scope(), [batch, sequence])
            } else {
                length
            };
            let positions = self.attentions.positions(reach);
            let whole = self.attentions.get(block, length, &positions, &self.device);
            match self.scope() {
                Some(scope) => Arc::new(whole.with_scope(scope)),
                None => whole,
            }
        })
    }
}
