//! Measures the matrix products of a step alone: no implementation with these products is faster.
//!
//! The products of the bench model, forward and backward, are computed by the same library on as many threads
//! as there are ranks, each with its share of the layers. Operands are in the caches as the previous product
//! leaves them, as in training.

use std::time::Instant;

use pipewright_kernel::product::{Matrix, product_into};
use rayon::ThreadPoolBuilder;

use crate::harness::Outcome;
use crate::model::{HEADS, LAYERS, SEQUENCE, WIDTH, weight_shapes};

/// Features of a head.
const HEAD: usize = WIDTH / HEADS;
/// The number of tokens that a token sees on average.
const SEEN: usize = SEQUENCE / 2;

/// One product: `rows x inner` times `inner x columns`.
#[derive(Clone, Copy)]
struct Size {
    rows: usize,
    inner: usize,
    columns: usize,
    /// Whether the left matrix is transposed, as for a weight gradient.
    turned: bool,
}

/// Returns the products of one layer and microbatch: for each weight, the products for the output, the input
/// gradient and the weight gradient; for each head of the attention, two forward and four backward.
fn of_layer(weights: &[[usize; 2]]) -> Vec<Size> {
    let products_of = |&[inputs, outputs]: &[usize; 2]| {
        let [forward, input] = [[inputs, outputs], [outputs, inputs]].map(|[inner, columns]| Size {
            rows: SEQUENCE,
            inner,
            columns,
            turned: false,
        });
        [forward, input, Size { rows: inputs, inner: SEQUENCE, columns: outputs, turned: true }]
    };
    let wide = Size { rows: SEQUENCE, inner: HEAD, columns: SEEN, turned: false };
    let narrow = Size { rows: SEQUENCE, inner: SEEN, columns: HEAD, turned: false };
    let attention = [wide, narrow, wide, narrow, narrow, narrow];
    let heads = attention.into_iter().cycle().take(HEADS * attention.len());
    weights.iter().flat_map(products_of).chain(heads).collect()
}

/// The floating point operations per second of all threads together, and the microbatches per second of the
/// whole model.
pub(crate) struct Ceiling {
    pub(crate) operations: f64,
    pub(crate) microbatches: f64,
}

/// Measures the products of `microbatches` microbatches on `ranks` threads.
pub(crate) fn ceiling(ranks: usize, microbatches: usize) -> Outcome<Ceiling> {
    let layers = LAYERS / ranks;
    let start = Instant::now();
    let operations: f64 = std::thread::scope(|scope| {
        let work = |_| scope.spawn(move || on_one_thread(layers, microbatches));
        let threads: Vec<_> = (0..ranks).map(work).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked").flatten())
            .sum::<Result<f64, _>>()
    })?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Ceiling { operations: operations / seconds, microbatches: microbatches as f64 / seconds })
}

/// Runs the products without the help of other threads.
fn on_one_thread(layers: usize, microbatches: usize) -> Result<f64, &'static str> {
    let pool = ThreadPoolBuilder::new().num_threads(1).build().map_err(|_| "no thread starts")?;
    Ok(pool.install(|| run(layers, microbatches)))
}

/// Runs the products, and returns the number of operations.
fn run(layers: usize, microbatches: usize) -> f64 {
    let sizes = of_layer(&weight_shapes());
    let most = |of: fn(&Size) -> usize| sizes.iter().map(of).max().unwrap_or_default();
    let left = vec![0.5f32; most(|size| size.rows * size.inner)];
    let right = vec![0.25f32; most(|size| size.inner * size.columns)];
    let mut out = vec![0f32; most(|size| size.rows * size.columns)];
    let mut operations = 0.0;
    for size in std::iter::repeat_n(&sizes, layers * microbatches).flatten() {
        multiply(&mut out, &left, &right, *size);
        operations += 2.0 * (size.rows * size.inner * size.columns) as f64;
    }
    operations
}

fn multiply(out: &mut [f32], left: &[f32], right: &[f32], Size { rows, inner, columns, turned }: Size) {
    let left =
        if turned { Matrix::new(left, inner, rows).transposed() } else { Matrix::new(left, rows, inner) };
    product_into(out, columns, left, Matrix::new(right, inner, columns));
}
