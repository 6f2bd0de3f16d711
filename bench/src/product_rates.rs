//! Measures the matrix products of a layer of the bench model with its weights, each against the highest rate
//! of its instructions on this processor.
//!
//! Products of single precision, by the kernels and by the `gemm` crate, and of bfloat16, and the instructions alone, are
//! measured in turn on one thread. Products of bfloat16 use AMX, AVX512-BF16 or single precision, whichever the processor has. The
//! best of many short repetitions counts: others on the machine make a repetition slower, never faster.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::bf16;
use gemm::Parallelism;
use pipewright_kernel::half::Half;
use pipewright_kernel::product::Matrix;
use pipewright_kernel::{bf16_product, peak, product};
use rayon::ThreadPoolBuilder;

use crate::harness::Outcome;
use crate::model::{SEQUENCE, weight_shapes};

/// The measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Rows of the layer's input.
    #[arg(long, default_value_t = SEQUENCE)]
    rows: usize,
    /// Milliseconds for each product.
    #[arg(long, default_value_t = 300)]
    milliseconds: u64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let pool = ThreadPoolBuilder::new().num_threads(1).build()?;
    pool.install(|| measure(options));
    Ok(())
}

/// The rounds of a measurement of the instructions: about 0.1 ms, or 0.5 ms with AMX.
const ROUNDS: usize = 20_000;

fn measure(&Options { rows, milliseconds }: &Options) {
    let time = Duration::from_millis(milliseconds);
    let mut rates = [0.0; 2];
    alternate(time, &mut rates, [&mut || peak::run_single(ROUNDS), &mut || peak::run_bf16(ROUNDS)]);
    let peaks = [rates[0], rates[0], rates[1]];
    println!("one thread, {rows} rows, GFLOP/s and the share of the instructions' rate");
    let half =
        bf16_product::instruction().map_or("bf16".into(), |instruction| format!("bf16 ({instruction})"));
    println!("{:<28} {:>18} {:>18} {half:>18} {:>10}", "", "f32", "f32 (gemm)", "f32 / gemm");
    print("instructions", peaks, [0.0; 3]);
    let mut shapes = weight_shapes().to_vec();
    shapes.sort_unstable();
    let (mut operations, mut seconds) = (0.0, [0.0; 3]);
    for shapes in shapes.chunk_by(|a, b| a == b) {
        for (name, rates) in measure_weight(rows, shapes[0], time) {
            print(&format!("{name} {} x {}", shapes[0][0], shapes[0][1]), rates, peaks);
            let work = (2 * rows * shapes[0][0] * shapes[0][1] * shapes.len()) as f64 / 1e9;
            operations += work;
            seconds.iter_mut().zip(rates).for_each(|(seconds, rate)| *seconds += work / rate);
        }
    }
    print("all products with weights", seconds.map(|seconds| operations / seconds), peaks);
}

/// Prints rates in 10⁹ operations per second, and their shares of `peaks` that are known.
fn print(name: &str, rates: [f64; 3], peaks: [f64; 3]) {
    let cell = |(rate, peak): (f64, f64)| match (rate > 0.0, peak > 0.0) {
        (true, true) => format!("{rate:.0} ({:.2})", rate / peak),
        (true, false) => format!("{rate:.0}"),
        _ => "-".into(),
    };
    let [single, gemm, half] = [0, 1, 2].map(|i| cell((rates[i], peaks[i])));
    println!("{name:<28} {single:>18} {gemm:>18} {half:>18} {:>10.2}", rates[0] / rates[1]);
}

/// Runs the functions in turn for `time`, and returns the highest rate of each. A function returns the
/// number of its operations or bytes, or `None` if the processor has no such instruction.
pub(crate) fn alternate<const N: usize>(
    time: Duration,
    best: &mut [f64; N],
    mut functions: [&mut dyn FnMut() -> Option<f64>; N],
) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        for (best, function) in best.iter_mut().zip(&mut functions) {
            let start = Instant::now();
            let rate = function().map_or(0.0, |operations| operations / start.elapsed().as_secs_f64() / 1e9);
            *best = best.max(rate);
        }
    }
}

/// Returns the rates of the three products of a weight `[inputs, outputs]`.
fn measure_weight(
    rows: usize,
    [inputs, outputs]: [usize; 2],
    time: Duration,
) -> [(&'static str, [f64; 3]); 3] {
    let numbers = |count: usize| (0..count).map(|i| (i % 31) as f32 / 16.0 - 1.0).collect::<Vec<_>>();
    let elements = [numbers(rows * inputs), numbers(inputs * outputs), numbers(rows * outputs)];
    let [half_x, half_w, half_g] = elements.each_ref().map(|numbers| bf16::narrowed(numbers));
    let [all_x, all_w, all_g] = &elements;
    let (x, w, g) = (
        Matrix::new(all_x, rows, inputs),
        Matrix::new(all_w, inputs, outputs),
        Matrix::new(all_g, rows, outputs),
    );
    let (half_x, half_w, half_g) = (
        Matrix::new(&half_x, rows, inputs),
        Matrix::new(&half_w, inputs, outputs),
        Matrix::new(&half_g, rows, outputs),
    );
    let operations = Some((2 * rows * inputs * outputs) as f64);
    let mut gemm_out = vec![0f32; (rows * inputs.max(outputs)).max(inputs * outputs)];
    let mut rates = |single: &mut dyn FnMut(), of_gemm: OfGemm<'_>, half: &mut dyn FnMut()| {
        let mut best = [0.0; 3];
        let mut single = || {
            single();
            operations
        };
        let mut by_gemm = || {
            of_gemm.compute(&mut gemm_out);
            operations
        };
        let mut half = || {
            half();
            operations
        };
        alternate(time, &mut best, [&mut single, &mut by_gemm, &mut half]);
        best
    };
    let mut sums = [(); 2].map(|()| vec![0f32; inputs * outputs]);
    let [sum, half_sum] = &mut sums;
    let size = [rows, outputs, inputs];
    let of_gemm =
        OfGemm { a: all_x, a_strides: [inputs, 1], b: all_w, b_strides: [outputs, 1], size, is_added: false };
    let forward = rates(&mut || drop(black_box(product::product(x, w))), of_gemm, &mut || {
        black_box(bf16_product::product(half_x, half_w));
    });
    let size = [rows, inputs, outputs];
    let of_gemm = OfGemm { a: all_g, a_strides: [outputs, 1], b_strides: [1, outputs], size, ..of_gemm };
    let input = rates(&mut || drop(black_box(product::product(g, w.transposed()))), of_gemm, &mut || {
        black_box(bf16_product::product(half_g, half_w.transposed()));
    });
    let of_gemm = OfGemm {
        a: all_x,
        a_strides: [1, inputs],
        b: all_g,
        b_strides: [outputs, 1],
        size: [inputs, outputs, rows],
        is_added: true,
    };
    let weight = rates(&mut || product::add_product(sum, outputs, x.transposed(), g), of_gemm, &mut || {
        bf16_product::add_product(half_sum, outputs, half_x.transposed(), half_g);
    });
    [("x w", forward), ("g wᵀ", input), ("xᵀ g", weight)]
}

/// A product of the `gemm` crate. Strides are of rows and of columns.
#[derive(Clone, Copy)]
struct OfGemm<'a> {
    a: &'a [f32],
    a_strides: [usize; 2],
    b: &'a [f32],
    b_strides: [usize; 2],
    /// Rows, columns and the inner dimension.
    size: [usize; 3],
    is_added: bool,
}

impl OfGemm<'_> {
    fn compute(&self, out: &mut [f32]) {
        let Self { a, a_strides, b, b_strides, size: [m, n, k], is_added } = *self;
        assert!(out.len() >= m * n && a.len() >= m * k && b.len() >= k * n);
        let ([a_row, a_column], [b_row, b_column]) =
            (a_strides.map(usize::cast_signed), b_strides.map(usize::cast_signed));
        // SAFETY: the assertion bounds every element that the strides reach, and `out` is borrowed exclusively.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                n.cast_signed(),
                is_added,
                a.as_ptr(),
                a_column,
                a_row,
                b.as_ptr(),
                b_column,
                b_row,
                1f32,
                1f32,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}
