//! Measures a mixture of experts against the dense feed-forward layer with the same operations in its
//! products: as wide as the experts of a token together. Both run forward and backward, with the gradients of
//! inputs and weights, in turn.

use burn::module::Param;
use burn::tensor::{Device, Distribution, Tensor};
use pipewright::nn::{Expert, ExpertActivation, ExpertForm, Linear, Routing, mix_experts};

use crate::harness::{Outcome, compare, seconds};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Tokens of a microbatch.
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Width of the hidden states.
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Inner width of an expert.
    #[arg(long, default_value_t = 688)]
    inner: usize,
    /// Experts.
    #[arg(long, default_value_t = 8)]
    experts: usize,
    /// Experts of a token.
    #[arg(long, default_value_t = 2)]
    chosen: usize,
    /// Give all layers biases, and the experts bounded gates, as in gpt-oss.
    #[arg(long)]
    biases: bool,
    /// Rounds that count.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { tokens, width, inner, experts, chosen, biases, rounds } = options;
    let device = Device::flex();
    let random = |shape: [usize; 2], deviation| {
        Tensor::<2>::random(shape, Distribution::Normal(0.0, deviation), &device).autodiff()
    };
    let linear = |inputs, outputs| {
        let bias = || Param::from_tensor(random([1, outputs], 0.02).reshape([outputs]));
        Linear { weight: Param::from_tensor(random([inputs, outputs], 0.02)), bias: biases.then(bias) }
    };
    let activation =
        if biases { ExpertActivation::Clamped { alpha: 1.702, limit: 7.0 } } else { ExpertActivation::Usual };
    let form = ExpertForm { activation, ..ExpertForm::default() };
    let expert = |inner| Expert {
        adapter: None,
        gate_proj: Some(linear(width, inner).into()),
        up_proj: linear(width, inner).into(),
        down_proj: linear(inner, width).into(),
        form,
    };
    let mixture: Vec<Expert> = (0..experts).map(|_| expert(inner)).collect();
    let wide = expert(chosen * inner);
    let x = random([tokens, width], 1.0).require_grad();
    let logits = random([tokens, experts], 1.0).require_grad();

    let sparse = || mix_experts(x.clone(), &Routing::new(logits.clone(), chosen, true), &mixture);
    let dense = || wide.forward(x.clone());
    let timed = |layer: &dyn Fn() -> Tensor<2>| seconds(|| Ok(layer().sum().backward()));
    println!("{tokens} tokens of {width}, {chosen} of {experts} experts of {inner}, forward and backward");
    compare(rounds, ["experts", "dense"], [&mut || timed(&sparse), &mut || timed(&dense)])
}
