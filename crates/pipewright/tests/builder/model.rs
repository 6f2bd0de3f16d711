//! Layers of every kind that a builder accepts.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::{Device, Int, Tensor};
use pipewright::graph::GraphLayer;
use pipewright::nn::{Embedding, Linear};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use crate::support::{Block, WIDTH, numbers, path_in_model};

/// Keeps tests that draw random parameters from running at the same time: the generator belongs to the whole
/// process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a layer with random parameters.
pub(crate) fn random_block(_place: usize) -> Block {
    Block { linear: LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff()).into() }
}

/// The stage that a user writes who does not use the builder.
#[derive(Module, Debug)]
pub(crate) struct ByHand {
    layers: Vec<Block>,
    #[module(skip)]
    first: usize,
}

impl ByHand {
    pub(crate) fn new(layers: std::ops::Range<usize>) -> Self {
        Self { first: layers.start, layers: layers.map(Block::new).collect() }
    }
}

impl StageModule for ByHand {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.layers.iter().fold(input, |x, layer| layer.forward(x, context))
    }

    fn parameter_path(&self, local: &str) -> String {
        path_in_model(local, self.first)
    }
}

/// A layer that scales by a parameter that all layers share.
#[derive(Module, Debug)]
pub(crate) struct Shared {
    block: Block,
    scale: Param<Tensor<1>>,
}

impl Shared {
    pub(crate) fn new(place: usize) -> Self {
        let scale = Param::from_data(numbers(7, [WIDTH]), &Device::flex().autodiff());
        let mut block = Block::new(place);
        block.linear.bias = None;
        Self { block, scale }
    }
}

impl StageModule for Shared {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.block.forward(input, context) * self.scale.val().unsqueeze()
    }

    fn parameter_path(&self, local: &str) -> String {
        if local == "scale" { "shared.scale".to_owned() } else { local.to_owned() }
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec!["shared.scale".to_owned()]
    }
}

/// Layers of several kinds.
#[derive(Module, Debug)]
pub(crate) enum Kind {
    Embedding(Embedding),
    Hidden(Hidden),
    Head(Hidden),
}

/// A linear map.
#[derive(Module, Debug)]
pub(crate) struct Hidden {
    linear: Linear,
}

impl Hidden {
    fn new(width: usize, outputs: usize) -> Self {
        Self { linear: LinearConfig::new(width, outputs).init(&Device::flex().autodiff()).into() }
    }
}

impl Kind {
    /// Returns an embedding of token ids, four layers and a head.
    pub(crate) fn language_model(place: usize) -> Result<Self, Infallible> {
        Ok(match place {
            0 => {
                Self::Embedding(burn::nn::EmbeddingConfig::new(9, 4).init(&Device::flex().autodiff()).into())
            }
            5 => Self::Head(Hidden::new(4, 3)),
            _ => Self::Hidden(Hidden::new(4, 4)),
        })
    }

    /// Returns a layer of a graph, which adds up its inputs.
    pub(crate) fn sum(_name: &str, _number: &u32) -> Self {
        Self::Hidden(Hidden::new(WIDTH, WIDTH))
    }
}

impl GraphLayer for Kind {
    fn forward(&self, inputs: Values, _context: &StageContext) -> Result<Values, BoundaryError> {
        Ok(match self {
            Self::Embedding(embedding) => pack(embedding.forward(unpack::<Tensor<2, Int>>(inputs)?)),
            Self::Head(head) => pack(head.linear.forward(unpack::<Tensor<3>>(inputs)?)),
            // Rows of a batch, or of a sequence.
            Self::Hidden(hidden) if inputs.len() == 1 && is_sequence(&inputs) => {
                pack(hidden.linear.forward(unpack::<Tensor<3>>(inputs)?).tanh())
            }
            Self::Hidden(hidden) => {
                let inputs = inputs.into_iter().map(|input| unpack::<Tensor<2>>(vec![input]));
                let inputs = inputs.collect::<Result<Vec<_>, _>>()?.into_iter();
                let sum =
                    inputs.reduce(|sum, input| sum + input).ok_or(BoundaryError::Missing { index: 0 })?;
                pack(hidden.linear.forward(sum).tanh())
            }
        })
    }
}

fn is_sequence(inputs: &Values) -> bool {
    unpack::<Tensor<3>>(inputs.clone()).is_ok()
}
