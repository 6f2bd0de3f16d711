//! Measures the matrix products of a layer of the bench model with its weights, each against the highest rate
//! of its instructions on this processor.
//!
//! Products of single precision and of bfloat16, and the instructions alone, are measured in turn on one
//! thread. Products of bfloat16 use AMX, AVX512-BF16 or single precision, whichever the processor has. The
//! best of many short repetitions counts: others on the machine make a repetition slower, never faster.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::tensor::bf16;
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
    let mut peaks = [0.0; 2];
    alternate(time, &mut peaks, [&mut || peak::run_single(ROUNDS), &mut || peak::run_bf16(ROUNDS)]);
    println!("one thread, {rows} rows, GFLOP/s and the share of the instructions' rate");
    let half =
        bf16_product::instruction().map_or("bf16".into(), |instruction| format!("bf16 ({instruction})"));
    println!("{:<28} {:>18} {half:>18}", "", "f32");
    print("instructions", peaks, [0.0; 2]);
    let mut shapes = weight_shapes().to_vec();
    shapes.sort_unstable();
    let (mut operations, mut seconds) = (0.0, [0.0; 2]);
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
fn print(name: &str, rates: [f64; 2], peaks: [f64; 2]) {
    let cell = |(rate, peak): (f64, f64)| match (rate > 0.0, peak > 0.0) {
        (true, true) => format!("{rate:.0} ({:.2})", rate / peak),
        (true, false) => format!("{rate:.0}"),
        _ => "-".into(),
    };
    let [single, half] = [0, 1].map(|i| cell((rates[i], peaks[i])));
    println!("{name:<28} {single:>18} {half:>18}");
}

/// Runs both functions in turn for `time`, and returns the highest rate of each. A function returns the
/// number of its operations or bytes, or `None` if the processor has no such instruction.
pub(crate) fn alternate(
    time: Duration,
    best: &mut [f64; 2],
    mut functions: [&mut dyn FnMut() -> Option<f64>; 2],
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
) -> [(&'static str, [f64; 2]); 3] {
    let numbers = |count: usize| (0..count).map(|i| (i % 31) as f32 / 16.0 - 1.0).collect::<Vec<_>>();
    let (x, w, g) = (numbers(rows * inputs), numbers(inputs * outputs), numbers(rows * outputs));
    let [half_x, half_w, half_g] = [&x, &w, &g].map(|numbers| bf16::narrowed(numbers));
    let (x, w, g) =
        (Matrix::new(&x, rows, inputs), Matrix::new(&w, inputs, outputs), Matrix::new(&g, rows, outputs));
    let (half_x, half_w, half_g) = (
        Matrix::new(&half_x, rows, inputs),
        Matrix::new(&half_w, inputs, outputs),
        Matrix::new(&half_g, rows, outputs),
    );
    let operations = Some((2 * rows * inputs * outputs) as f64);
    let rates = |single: &mut dyn FnMut(), half: &mut dyn FnMut()| {
        let mut best = [0.0; 2];
        let mut single = || {
            single();
            operations
        };
        let mut half = || {
            half();
            operations
        };
        alternate(time, &mut best, [&mut single, &mut half]);
        best
    };
    let mut sums = [(); 2].map(|()| vec![0f32; inputs * outputs]);
    let [sum, half_sum] = &mut sums;
    let forward = rates(&mut || drop(black_box(product::product(x, w))), &mut || {
        black_box(bf16_product::product(half_x, half_w));
    });
    let input = rates(&mut || drop(black_box(product::product(g, w.transposed()))), &mut || {
        black_box(bf16_product::product(half_g, half_w.transposed()));
    });
    let weight = rates(&mut || product::add_product(sum, outputs, x.transposed(), g), &mut || {
        bf16_product::add_product(half_sum, outputs, half_x.transposed(), half_g);
    });
    [("x w", forward), ("g wᵀ", input), ("xᵀ g", weight)]
}
