//! Modules with parameters of every kind.

use std::convert::Infallible;

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear as PlainLinear};
use burn::tensor::{Device, Tensor};
use pipewright::nn::{Embedding, Linear, RmsNorm, TiedHead};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright_schedule::StageIndex;

use crate::support::{WIDTH, ending_in_loss, numbers};

/// Layers of every kind: Burn's, whose gradients come from the tape, and ours, whose gradients are deferred.
#[derive(Module, Debug)]
struct Mixed {
    norm: LayerNorm,
    plain: PlainLinear,
    scale: RmsNorm,
    deferred: Linear,
    batch_norm: BatchNorm,
    /// Not trained.
    frozen: Linear,
    #[module(skip)]
    stage: StageIndex,
}

impl StageModule for Mixed {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let hidden = self.frozen.forward(self.plain.forward(self.norm.forward(input.clone())));
        let hidden = self.batch_norm.forward::<2>(hidden);
        let hidden = self.deferred.forward(self.scale.forward(hidden).tanh());
        let squares = |weight: &Param<Tensor<2>>| weight.val().powf_scalar(2.0).mean();
        context.auxiliary_loss("weights", 1e-2, squares(&self.plain.weight));
        // A weight whose gradient is deferred in one use and comes from the tape in another.
        context.auxiliary_loss("weights", 1e-2, squares(&self.deferred.weight));
        input + hidden
    }

    fn parameter_path(&self, local: &str) -> String {
        format!("stages.{}.{local}", self.stage)
    }
}

pub(crate) fn mixed(stage: StageIndex, stages: u32) -> Result<Stage, Infallible> {
    let device = Device::flex().autodiff();
    let seed = u64::from(stage.get());
    let matrix = |seed| Param::from_data(numbers(seed, [WIDTH, WIDTH]), &device);
    let vector = |seed| Param::from_data(numbers(seed, [WIDTH]), &device);
    let mut plain = burn::nn::LinearConfig::new(WIDTH, WIDTH).init(&device);
    (plain.weight, plain.bias) = (matrix(seed), Some(vector(50 + seed)));
    let module = Mixed {
        norm: LayerNormConfig::new(WIDTH).init(&device),
        plain,
        scale: RmsNorm { weight: vector(60 + seed), epsilon: 1e-5 },
        deferred: Linear { weight: matrix(70 + seed), bias: None },
        batch_norm: BatchNormConfig::new(WIDTH).init(&device),
        frozen: Linear { weight: matrix(80 + seed).set_require_grad(false), bias: None },
        stage,
    };
    ending_in_loss(stage.get() + 1 == stages, module)
}

/// A table that the first and the last stage share.
#[derive(Module, Debug)]
struct Ends {
    embedding: Option<Embedding>,
    head: Option<TiedHead>,
}

impl StageModule for Ends {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let hidden = match &self.embedding {
            Some(embedding) => {
                let ids = input.clone().slice(burn::tensor::s![.., 0..1]).abs().mul_scalar(10.0).int() % 5;
                input + embedding.forward(ids).squeeze_dim::<2>(1)
            }
            None => input,
        };
        match &self.head {
            Some(head) => head.forward(hidden.clone()).slice(burn::tensor::s![.., 0..1]) + hidden,
            None => hidden.tanh(),
        }
    }

    fn parameter_path(&self, _local: &str) -> String {
        "table".to_owned()
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec!["table".to_owned()]
    }
}

pub(crate) fn ends(stage: StageIndex, stages: u32) -> Result<Stage, Infallible> {
    let table = || Param::from_data(numbers(3, [5, WIDTH]), &Device::flex().autodiff());
    let is_last = stage.get() + 1 == stages;
    let embedding = (stage.get() == 0).then(|| Embedding { weight: table() });
    let module = Ends { embedding, head: is_last.then(|| TiedHead { weight: table() }) };
    ending_in_loss(is_last, module)
}
