//! The selective scan of Mamba-2: in chunks, as the mixer computes it, against the recurrence token by token.
//!
//! The recurrence is written twice: in tensors, as a model in Burn or PyTorch has it without a kernel,
//! forward and backward; and as a plain loop over the elements of the state, forward only, which is the best
//! case of a recurrence. The mixer's projections are as narrow as they can be, but its convolution, gate and
//! norm are in its time.

use std::hint::black_box;

use burn::module::Param;
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use pipewright::nn::{DepthwiseConvolution, GroupNormWeight, Linear, Mamba2, MambaSizes};

use crate::harness::{Figures, Outcome, seconds};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 512)]
    sequence: usize,
    /// Heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Channels of a head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Width of the state.
    #[arg(long, default_value_t = 64)]
    state: usize,
    /// Measurements; the first is not counted.
    #[arg(long, default_value_t = 6)]
    repetitions: usize,
}

/// Measures on one thread.
pub(crate) fn run(options: &Options) -> Outcome {
    let mixer = mixer(options);
    let x = Tensor::<2>::random([options.sequence, 1], Distribution::Normal(0.0, 1.0), &Device::flex());
    let mut figures = Figures::default();
    for repetition in 0..options.repetitions.max(2) {
        let chunks = seconds(|| Ok(forward_and_backward(&mixer, &x)))?;
        let tensors = seconds(|| Ok(recurrence_in_tensors(options)))?;
        let chunks_forward = seconds(|| Ok(mixer.forward(x.clone(), options.sequence, None).into_data()))?;
        let plain = seconds(|| Ok(black_box(recurrence_in_a_loop(options))))?;
        if repetition > 0 {
            figures.add("recurrence in tensors / chunks, forward and backward", tensors / chunks);
            let name = "recurrence in a loop / chunks with convolution, gate and norm, forward";
            figures.add(name, plain / chunks_forward);
        }
    }
    let Options { sequence, heads, head_dim, state, .. } = options;
    println!("{sequence} tokens, {heads} heads of {head_dim}, state of {state}");
    print!("{figures}");
    Ok(())
}

fn mixer(options: &Options) -> Mamba2 {
    let &Options { heads, head_dim, state, .. } = options;
    let (groups, taps, limits) = (1, 4, (0.0, f64::INFINITY));
    let sizes = MambaSizes { heads, head_dim, groups, state, taps, limits, epsilon: 1e-5 };
    let device = Device::flex().autodiff();
    let linear = |shape: [usize; 2]| {
        let weight = Tensor::random(shape, Distribution::Normal(0.0, 0.5), &device);
        Linear { weight: Param::from_tensor(weight), bias: None }
    };
    let vector = |len: usize, value: f32| Param::from_tensor(Tensor::<1>::full([len], value, &device));
    Mamba2 {
        in_proj: linear([1, sizes.projected()]),
        conv1d: DepthwiseConvolution {
            weight: Param::from_tensor(Tensor::full([sizes.convolved(), 1, taps], 0.3, &device)),
            bias: Some(vector(sizes.convolved(), 0.1)),
        },
        dt_bias: vector(heads, -2.0),
        A_log: vector(heads, 0.5),
        D: vector(heads, 1.0),
        norm: GroupNormWeight { weight: vector(sizes.width(), 1.0) },
        out_proj: linear([sizes.width(), 1]),
        sizes,
    }
}

fn forward_and_backward(mixer: &Mamba2, x: &Tensor<2>) -> Option<TensorData> {
    let x = x.clone().autodiff().require_grad();
    let sequence = x.dims()[0];
    let gradients = mixer.forward(x.clone(), sequence, None).sum().backward();
    x.grad(&gradients).map(Tensor::into_data)
}

/// Computes `S = exp(δ A) S + (δ x) b`, `y = S c`, with a few operations for each token, forward and
/// backward.
fn recurrence_in_tensors(options: &Options) -> Option<TensorData> {
    let &Options { sequence, heads, head_dim, state, .. } = options;
    let device = Device::flex().autodiff();
    let normal = |shape: [usize; 3]| {
        Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad()
    };
    let x = normal([sequence * heads, head_dim, 1]);
    let (b, c) = (normal([sequence, 1, state]), normal([sequence, state, 1]));
    let decay = Tensor::<3>::full([heads, 1, 1], 0.9, &device).require_grad();
    let mut states = Tensor::<3>::zeros([heads, head_dim, state], &device);
    let mut outputs = Vec::with_capacity(sequence);
    for t in 0..sequence {
        let x = x.clone().narrow(0, t * heads, heads);
        states = states * decay.clone() + x.matmul(b.clone().narrow(0, t, 1).repeat_dim(0, heads));
        outputs.push(states.clone().matmul(c.clone().narrow(0, t, 1).repeat_dim(0, heads)));
    }
    let gradients = Tensor::cat(outputs, 0).sum().backward();
    x.grad(&gradients).map(Tensor::into_data)
}

/// Computes the forward of the recurrence in single precision, with a state that stays in the cache.
fn recurrence_in_a_loop(options: &Options) -> Vec<f32> {
    let &Options { sequence, heads, head_dim, state, .. } = options;
    let number = |i: usize| (i * 7919 % 2003) as f32 / 1001.5 - 1.0;
    let x: Vec<f32> = (0..sequence * heads * head_dim).map(number).collect();
    let b: Vec<f32> = (0..sequence * state).map(number).collect();
    let c: Vec<f32> = (0..sequence * state).map(|i| number(i + 5)).collect();
    let decay = black_box(0.9f32);
    let mut states = vec![0f32; heads * head_dim * state];
    let mut y = Vec::with_capacity(x.len());
    for t in 0..sequence {
        let (b, c) = (&b[t * state..][..state], &c[t * state..][..state]);
        let x = &x[t * heads * head_dim..][..heads * head_dim];
        for (x, states) in x.iter().zip(states.chunks_exact_mut(state)) {
            for (s, b) in states.iter_mut().zip(b) {
                *s = *s * decay + x * b;
            }
            let mut lanes = [0f32; 16];
            for (s, c) in states.chunks_exact(16).zip(c.chunks_exact(16)) {
                for ((lane, s), c) in lanes.iter_mut().zip(s).zip(c) {
                    *lane += s * c;
                }
            }
            y.push(lanes.iter().sum());
        }
    }
    y
}
