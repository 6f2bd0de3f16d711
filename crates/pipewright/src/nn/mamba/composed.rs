//! The operation composed of Burn's operations, for devices other than the CPU back end: the same chunks,
//! with all chunks of all sequences in one product.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData, activation};

use super::super::recomputed::recomputed;
use super::mixer::MambaSizes;

/// Tokens in a chunk.
pub(crate) const CHUNK: usize = 64;

/// Returns what [`composed`] returns. The tape keeps `projected` and the parameters alone.
pub(super) fn on_device(
    sizes: MambaSizes,
    projected: Tensor<2>,
    weight: Tensor<3>,
    others: [Tensor<1>; 5],
    sequence: usize,
    documents: Option<Arc<[u32]>>,
) -> Tensor<2> {
    let (wide, shape) = (wide_type(projected.dtype()), weight.dims());
    let lengths = others.each_ref().map(|other| other.dims()[0]);
    let channels = weight.reshape([shape.iter().product::<usize>()]).cast(wide);
    let vectors = [channels].into_iter().chain(others.map(|other| other.cast(wide)));
    let parameters = Tensor::cat(vectors.collect(), 0).unsqueeze::<2>();
    let composition = move |[projected, parameters]: [Tensor<2>; 2]| {
        let mut start = 0;
        let mut next = |length: usize| {
            let part = parameters.clone().narrow(1, start, length).reshape([length]);
            start += length;
            part
        };
        let weight = next(shape.iter().product()).reshape(shape);
        let others = lengths.map(&mut next);
        composed(&sizes, projected, weight, others, sequence, documents.as_deref())
    };
    recomputed([projected, parameters], Arc::new(composition))
}

/// Returns the type in which the operation computes.
fn wide_type(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns the mixed channels of `projected`, the result of the input projection. `others` are the bias of
/// the convolution, `dt_bias`, `A_log`, `D` and the weight of the norm. Half precision is computed in single
/// precision.
pub(super) fn composed(
    sizes: &MambaSizes,
    projected: Tensor<2>,
    weight: Tensor<3>,
    others: [Tensor<1>; 5],
    sequence: usize,
    documents: Option<&[u32]>,
) -> Tensor<2> {
    let dtype = projected.dtype();
    let wide = wide_type(dtype);
    let projected = projected.cast(wide);
    let [bias, dt_bias, rates, skip, norm] = others.map(|other| other.cast(wide));
    let batch = projected.dims()[0] / sequence;
    let (width, heads) = (sizes.width(), sizes.heads);
    let masks = Masks::new(batch, sequence, documents, &projected.device());

    let parts = projected.reshape([batch, sequence, sizes.projected()]);
    let z = parts.clone().narrow(2, 0, width);
    let v = parts.clone().narrow(2, width, sizes.convolved());
    let raw = parts.narrow(2, width + sizes.convolved(), heads);
    let u = activation::silu(convolve(sizes.taps, v, weight.cast(wide), bias, &masks));
    let steps = activation::softplus(raw + dt_bias.unsqueeze(), 1.0);
    let steps = match sizes.limits {
        (low, high) if high.is_finite() => steps.clamp(low, high),
        (low, _) => steps.clamp_min(low),
    };
    let y = scan(sizes, u, steps, rates.exp().neg(), skip, &masks);
    gated_norm(sizes, y, z, norm).cast(dtype)
}

/// Which tokens see each other: constants, made on the host.
pub(crate) struct Masks {
    documents: Vec<u32>,
    batch: usize,
    sequence: usize,
    device: Device,
}

impl Masks {
    pub(crate) fn new(batch: usize, sequence: usize, documents: Option<&[u32]>, device: &Device) -> Self {
        let documents = documents.map_or_else(|| vec![0; batch * sequence], <[u32]>::to_vec);
        Self { documents, batch, sequence, device: device.clone() }
    }

    /// Returns the document of a token; tokens after the end belong to the last document.
    fn document(&self, row: usize, t: usize) -> u32 {
        self.documents[row * self.sequence + t.min(self.sequence - 1)]
    }

    fn flags<const D: usize>(&self, shape: [usize; D], flags: Vec<bool>) -> Tensor<D> {
        let flags: Vec<f32> = flags.into_iter().map(|flag| f32::from(u8::from(flag))).collect();
        Tensor::from_data(TensorData::new(flags, shape), &self.device)
    }

    /// Returns 1 where a token and the one `back` before it are of one document, `[batch, sequence, 1]`.
    fn behind(&self, back: usize) -> Tensor<3> {
        let same = |row, t: usize| {
            t.checked_sub(back).is_some_and(|r| self.document(row, t) == self.document(row, r))
        };
        let flags = (0..self.batch).flat_map(|row| (0..self.sequence).map(move |t| same(row, t)));
        self.flags([self.batch, self.sequence, 1], flags.collect())
    }

    fn chunks(&self) -> usize {
        self.sequence.div_ceil(CHUNK)
    }

    /// Returns 1 where `holds(row, chunk, token of the chunk)`, `[batch, 1, chunks, CHUNK, 1]`.
    fn tokens(&self, holds: impl Fn(usize, usize, usize) -> bool) -> Tensor<5> {
        let mut flags = Vec::new();
        for row in 0..self.batch {
            for chunk in 0..self.chunks() {
                flags.extend((0..CHUNK).map(|index| holds(row, chunk, chunk * CHUNK + index)));
            }
        }
        self.flags([self.batch, 1, self.chunks(), CHUNK, 1], flags)
    }

    /// Returns 1 where the token's document began before its chunk.
    pub(crate) fn entered(&self) -> Tensor<5> {
        self.tokens(|row, chunk, t| {
            chunk > 0 && self.document(row, chunk * CHUNK - 1) == self.document(row, t)
        })
    }

    /// Returns 1 where the token's document reaches the end of its chunk.
    pub(crate) fn left(&self) -> Tensor<5> {
        self.tokens(|row, chunk, t| self.document(row, (chunk + 1) * CHUNK - 1) == self.document(row, t))
    }

    /// Returns 1 where the second token is not seen by the first, `[batch, 1, chunks, CHUNK, CHUNK]`.
    pub(crate) fn hidden(&self) -> Tensor<5> {
        let mut flags = Vec::new();
        for row in 0..self.batch {
            for t in 0..self.chunks() * CHUNK {
                let first = t / CHUNK * CHUNK;
                let document = self.document(row, t);
                flags.extend((first..first + CHUNK).map(|r| r > t || self.document(row, r) != document));
            }
        }
        self.flags([self.batch, 1, self.chunks(), CHUNK, CHUNK], flags)
    }
}

/// Returns the sums of a convolution before its activation. Shapes: `v` and result `[batch, sequence, channels]`.
pub(crate) fn convolve(
    taps: usize,
    v: Tensor<3>,
    weight: Tensor<3>,
    bias: Tensor<1>,
    masks: &Masks,
) -> Tensor<3> {
    let [batch, sequence, channels] = v.dims();
    let dtype = v.dtype();
    let mut sum = bias.unsqueeze::<3>().expand([batch, sequence, channels]);
    for back in (0..taps.min(sequence)).rev() {
        let tap = weight.clone().narrow(2, taps - 1 - back, 1).reshape([1, 1, channels]);
        let before = Tensor::zeros([batch, back, channels], (&v.device(), dtype));
        let earlier = match back {
            0 => v.clone(),
            _ => Tensor::cat(vec![before, v.clone().narrow(1, 0, sequence - back)], 1),
        };
        sum = sum + earlier * masks.behind(back).cast(dtype) * tap;
    }
    sum
}

/// Returns the result of the scan. Shapes: `u [batch, sequence, channels]`, `steps [batch, sequence, heads]`,
/// `rates` and `skip` `[heads]`, result `[batch, sequence, heads * head_dim]`.
fn scan(
    sizes: &MambaSizes,
    u: Tensor<3>,
    steps: Tensor<3>,
    rates: Tensor<1>,
    skip: Tensor<1>,
    masks: &Masks,
) -> Tensor<3> {
    let &MambaSizes { heads, head_dim, groups, state, .. } = sizes;
    let [batch, sequence, _] = u.dims();
    let (chunks, dtype) = (masks.chunks(), u.dtype());
    let padded = |x: Tensor<3>| {
        let missing = chunks * CHUNK - sequence;
        let [_, _, channels] = x.dims();
        match missing {
            0 => x,
            _ => Tensor::cat(
                vec![x.clone(), Tensor::zeros([batch, missing, channels], (&x.device(), dtype))],
                1,
            ),
        }
    };
    // To [batch, heads, chunks, CHUNK, channels of a head].
    let split = |x: Tensor<3>, parts: usize, channels: usize| {
        padded(x).reshape([batch, chunks, CHUNK, parts, channels]).permute([0, 3, 1, 2, 4])
    };
    let shared = |x: Tensor<3>| {
        let x = split(x, groups, state).reshape([batch, groups, 1, chunks * CHUNK * state]);
        x.repeat_dim(2, heads / groups).reshape([batch, heads, chunks, CHUNK, state])
    };
    let directions = groups * state;
    let x = split(u.clone().narrow(2, 0, sizes.width()), heads, head_dim);
    let b = shared(u.clone().narrow(2, sizes.width(), directions));
    let c = shared(u.narrow(2, sizes.width() + directions, directions));
    // A step of 0 after the end keeps the state.
    let steps = split(steps, heads, 1);
    let per_head = |of: Tensor<1>| of.reshape([1, heads, 1, 1, 1]);

    let sums = (steps.clone() * per_head(rates)).cumsum(3);
    let end = sums.clone().narrow(3, CHUNK - 1, 1);
    let hidden = masks.hidden().cast(dtype).greater_elem(0.5);
    let hidden = hidden.expand([batch, heads, chunks, CHUNK, CHUNK]);
    let decays = (sums.clone() - sums.clone().transpose()).mask_fill(hidden, f32::NEG_INFINITY).exp();
    let weighted = x.clone() * steps;
    let mut y = (c.clone().matmul(b.clone().transpose()) * decays).matmul(weighted.clone());

    let given = weighted * (end.clone() - sums.clone()).exp() * masks.left().cast(dtype);
    let brought = b.transpose().matmul(given);
    let enter = sums.exp() * masks.entered().cast(dtype);
    let pass = enter.clone().narrow(3, CHUNK - 1, 1);
    let mut before = Tensor::zeros([batch, heads, 1, state, head_dim], (&y.device(), dtype));
    let mut states = Vec::with_capacity(chunks);
    for chunk in 0..chunks {
        states.push(before.clone());
        before = before * pass.clone().narrow(2, chunk, 1) + brought.clone().narrow(2, chunk, 1);
    }
    y = y + c.matmul(Tensor::cat(states, 2)) * enter + x * per_head(skip);
    y.permute([0, 2, 3, 1, 4]).reshape([batch, chunks * CHUNK, sizes.width()]).narrow(1, 0, sequence)
}

fn gated_norm(sizes: &MambaSizes, y: Tensor<3>, z: Tensor<3>, weight: Tensor<1>) -> Tensor<2> {
    let [batch, sequence, width] = y.dims();
    let rows = batch * sequence;
    let v = (y * activation::silu(z)).reshape([rows, sizes.groups, width / sizes.groups]);
    let root = (v.clone().square().mean_dim(2) + sizes.epsilon).sqrt();
    (v / root).reshape([rows, width]) * weight.unsqueeze()
}
