//! The operation composed of Burn's operations, for devices other than the CPU back end: the rule in chunks (Yang et
//! al., 2024, section 3.3), with all chunks of all sequences in one product.
//!
//! With the running sum `c_t` of the logarithms of the decays in a chunk,
//!
//! ```text
//! L_tr    = β_t (k_t k_r) exp(c_t - c_r) for r < t, and W = (I + L)⁻¹
//! β_t e_t = the rows of W β (V - exp(c) K S_in)
//! ```

use std::sync::Arc;

use burn::tensor::{DType, Tensor, TensorData, activation};

use super::super::mamba::{CHUNK, Masks, convolve};
use super::super::recomputed::recomputed;
use super::rule::DeltaSizes;

/// Returns what [`composed`] returns. The tape keeps the inputs alone.
pub(super) fn on_device(
    sizes: DeltaSizes,
    mixed: Tensor<2>,
    weight: Tensor<3>,
    [strengths, log_decays]: [Tensor<2>; 2],
    sequence: usize,
    documents: Option<Arc<[u32]>>,
) -> Tensor<2> {
    let (dtype, wide) = (mixed.dtype(), strengths.dtype());
    let rows = Tensor::cat(vec![mixed.cast(wide), strengths, log_decays], 1);
    let weight = weight.reshape([sizes.channels(), sizes.taps]).cast(wide);
    let composition = move |[rows, weight]: [Tensor<2>; 2]| {
        let (channels, heads) = (sizes.channels(), sizes.value_heads);
        let mixed = rows.clone().narrow(1, 0, channels);
        let gates = [0, 1].map(|gate| rows.clone().narrow(1, channels + gate * heads, heads));
        composed(
            &sizes,
            mixed,
            weight.reshape([channels, 1, sizes.taps]),
            gates,
            sequence,
            documents.as_deref(),
        )
    };
    recomputed([rows, weight], Arc::new(composition)).cast(dtype)
}

/// Returns the result of the operation. All tensors have one type.
pub(super) fn composed(
    sizes: &DeltaSizes,
    mixed: Tensor<2>,
    weight: Tensor<3>,
    gates: [Tensor<2>; 2],
    sequence: usize,
    documents: Option<&[u32]>,
) -> Tensor<2> {
    let &DeltaSizes { key_heads, value_heads: heads, key_dim, value_dim, taps } = sizes;
    let ([rows, channels], dtype, device) = (mixed.dims(), mixed.dtype(), mixed.device());
    let batch = rows / sequence;
    let masks = Masks::new(batch, sequence, documents, &device);
    let chunks = sequence.div_ceil(CHUNK);
    let bias = Tensor::zeros([channels], (&device, dtype));
    let u =
        activation::silu(convolve(taps, mixed.reshape([batch, sequence, channels]), weight, bias, &masks));
    // To [batch, heads, chunks, CHUNK, channels of a head]. Tokens after the end neither forget nor add.
    let split = |x: Tensor<3>, parts: usize, width: usize| {
        let missing = Tensor::zeros([batch, chunks * CHUNK - sequence, parts * width], (&device, dtype));
        let x = if missing.dims()[1] == 0 { x } else { Tensor::cat(vec![x, missing], 1) };
        x.reshape([batch, chunks, CHUNK, parts, width]).permute([0, 3, 1, 2, 4])
    };
    let shared = |start: usize| {
        let x = split(u.clone().narrow(2, start, key_heads * key_dim), key_heads, key_dim);
        let root = (x.clone().square().sum_dim(4) + 1e-6).sqrt();
        let x = (x / root).reshape([batch, key_heads, 1, chunks * CHUNK * key_dim]);
        x.repeat_dim(2, heads / key_heads).reshape([batch, heads, chunks, CHUNK, key_dim])
    };
    let (q, k) = (shared(0) / (key_dim as f64).sqrt(), shared(key_heads * key_dim));
    let v = split(u.clone().narrow(2, 2 * key_heads * key_dim, sizes.value_width()), heads, value_dim);
    let [strengths, decays] = gates.map(|gate| split(gate.reshape([batch, sequence, heads]), heads, 1));

    let sums = decays.cumsum(3);
    let hidden = masks.hidden().cast(dtype).greater_elem(0.5).expand([batch, heads, chunks, CHUNK, CHUNK]);
    let pairs = (sums.clone() - sums.clone().transpose()).mask_fill(hidden, f32::NEG_INFINITY).exp();
    let enter = sums.clone().exp() * masks.entered().cast(dtype);
    let given = k.clone() * (sums.clone().narrow(3, CHUNK - 1, 1) - sums).exp() * masks.left().cast(dtype);
    let triangle = k.clone().matmul(k.clone().transpose()) * pairs.clone() * strengths.clone();
    let inverse = inverse(triangle);
    let values = inverse.clone().matmul(v * strengths.clone());
    let known = inverse.matmul(k.clone() * strengths * enter.clone());
    let scores = q.clone().matmul(k.transpose()) * pairs;
    let (pass, read) = (enter.clone().narrow(3, CHUNK - 1, 1), q * enter);
    let mut state = Tensor::zeros([batch, heads, 1, key_dim, value_dim], (&device, dtype));
    let mut results = Vec::with_capacity(chunks);
    for chunk in 0..chunks {
        let of = |x: &Tensor<5>| x.clone().narrow(2, chunk, 1);
        let added = of(&values) - of(&known).matmul(state.clone());
        results.push(of(&read).matmul(state.clone()) + of(&scores).matmul(added.clone()));
        state = state * of(&pass) + of(&given).transpose().matmul(added);
    }
    let y = Tensor::cat(results, 2).permute([0, 2, 3, 1, 4]);
    let y = y.reshape([batch, chunks * CHUNK, sizes.value_width()]).narrow(1, 0, sequence);
    y.reshape([rows, sizes.value_width()])
}

/// Returns the inverses of the unit lower triangles whose part below the diagonal equals `triangle` there: the inverses of
/// the blocks on the diagonal make the inverses of blocks of twice the size, as `[[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹ B A⁻¹,
/// C⁻¹]]`. This is as exact as a substitution, and has few steps.
fn inverse(triangle: Tensor<5>) -> Tensor<5> {
    let (device, dtype) = (triangle.device(), triangle.dtype());
    let constant = |holds: &dyn Fn(usize, usize) -> bool| {
        let flags = (0..CHUNK * CHUNK).map(|i| f32::from(u8::from(holds(i / CHUNK, i % CHUNK))));
        let data = TensorData::new(flags.collect::<Vec<_>>(), [1, 1, 1, CHUNK, CHUNK]);
        Tensor::<5>::from_data(data, (&device, DType::F32)).cast(dtype)
    };
    let mut inverse = constant(&|row, column| row == column).expand(triangle.dims());
    for size in (0..CHUNK.ilog2()).map(|level| 1 << level) {
        let below = constant(&|row: usize, column: usize| {
            row / (2 * size) == column / (2 * size) && row / size == column / size + 1
        });
        let product = inverse.clone().matmul(triangle.clone() * below).matmul(inverse.clone());
        inverse = inverse - product;
    }
    inverse
}
