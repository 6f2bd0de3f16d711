//! Measures the operations of the bench model other than matrix products against the rate at which this
//! machine copies memory. That rate bounds them.
//!
//! Each operation has a number of bytes per token that it must read and write. It runs on operands that
//! together are larger than the caches, so each comes from memory, as what a stage keeps of other
//! microbatches does. One thread runs operations in single precision and in bfloat16 in turn, and the best of
//! many repetitions counts: others on the machine make a repetition slower, never faster. Rotary embeddings
//! and the softmax of attention are computed in blocks that stay in the caches, so they are not listed.

use std::hint::black_box;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, bf16};
use pipewright::nn::add;
use pipewright_kernel::cross_entropy::Smoothing;
use pipewright_kernel::element::Element;
use pipewright_kernel::half::Half;
use pipewright_kernel::{cross_entropy, rms_norm, swiglu};
use rayon::ThreadPoolBuilder;

use crate::harness::Outcome;
use crate::model::{INTERMEDIATE, LAYERS, SEQUENCE, VOCABULARY, WIDTH};
use crate::product_rates::alternate;

/// The measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Rows of the layer's input: tokens.
    #[arg(long, default_value_t = SEQUENCE)]
    rows: usize,
    /// Milliseconds for each operation.
    #[arg(long, default_value_t = 500)]
    milliseconds: u64,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let pool = ThreadPoolBuilder::new().num_threads(1).build()?;
    pool.install(|| {
        println!("one thread, {} rows; bytes per token, GB/s, and the share of a copy's rate", options.rows);
        println!("{:<28} {:>9} {:>6} {:>6} {:>9} {:>6} {:>6}", "", "f32", "", "", "bf16", "", "");
        Table::measure(options, OPERANDS).print();
    });
    Ok(())
}

/// The memory that the operands of an operation take together: more than the caches of a processor.
const OPERANDS: usize = 256 << 20;

/// The element types, in the order of the columns.
const SIZES: [usize; 2] = [size_of::<f32>(), size_of::<bf16>()];

/// An operation of the model.
struct Row {
    name: &'static str,
    /// How often the operation runs in a forward and a backward of the whole model.
    count: usize,
    /// The bytes of a token that it reads and writes, in each element type.
    bytes: [usize; 2],
    /// The highest rates, in 10⁹ bytes per second.
    rates: [f64; 2],
}

struct Table {
    /// The rates of a copy of memory.
    copy: [f64; 2],
    rows: Vec<Row>,
}

impl Table {
    /// Measures operations whose operands take `operands` bytes.
    fn measure(&Options { rows, milliseconds }: &Options, operands: usize) -> Self {
        let bench = Bench { rows, operands, time: Duration::from_millis(milliseconds) };
        let copied = SIZES.map(|size| 2 * WIDTH * size);
        let copy =
            bench.rates(WIDTH, copied, |[x]| drop(black_box(x.clone())), |[x]| drop(black_box(x.clone())));
        let rows = bench.of_layers().into_iter().chain(bench.of_loss()).collect();
        Self { copy, rows }
    }

    fn print(&self) {
        print("copy", SIZES.map(|size| 2 * WIDTH * size), self.copy, [0.0; 2]);
        for row in &self.rows {
            print(&format!("{} x {}", row.count, row.name), row.bytes, row.rates, self.copy);
        }
        let (bytes, seconds) = self.totals();
        let rates = [0, 1].map(|i| bytes[i] as f64 / seconds[i] / 1e9);
        print("all, forward and backward", bytes, rates, self.copy);
        let [single, half] = seconds.map(|seconds| seconds * 1e6);
        println!("microseconds per token: {single:.1} in f32, {half:.1} in bf16");
    }

    /// Returns the bytes and the seconds of a token in the whole model, for each element type.
    fn totals(&self) -> ([usize; 2], [f64; 2]) {
        let (mut bytes, mut seconds) = ([0; 2], [0.0; 2]);
        for row in &self.rows {
            for i in [0, 1] {
                bytes[i] += row.count * row.bytes[i];
                seconds[i] += (row.count * row.bytes[i]) as f64 / row.rates[i] / 1e9;
            }
        }
        (bytes, seconds)
    }
}

/// Prints the bytes per token, the rates in 10⁹ bytes per second, and their shares of `copy` where it is
/// known.
fn print(name: &str, bytes: [usize; 2], rates: [f64; 2], copy: [f64; 2]) {
    let share = |i: usize| if copy[i] > 0.0 { format!("{:.2}", rates[i] / copy[i]) } else { String::new() };
    let cell = |i: usize| format!("{:>9} {:>6.1} {:>6}", bytes[i], rates[i], share(i));
    println!("{name:<28} {} {}", cell(0), cell(1));
}

#[derive(Clone, Copy)]
struct Bench {
    rows: usize,
    /// The bytes of all operands of an operation.
    operands: usize,
    time: Duration,
}

impl Bench {
    /// Measures the operations of all layers, with the norm before the head. Each layer has two norms, two
    /// additions to its input, and a gated activation. A backward adds the gradients of an input that several
    /// operations read: five times, for both additions, for queries, keys and values, and for the gate.
    fn of_layers(self) -> [Row; 5] {
        let Self { rows, .. } = self;
        let (weight, scales) = (vec![1f32; WIDTH], vec![1f32; rows]);
        let half_weight = bf16::narrowed(&weight);
        let row = |name, count, width: usize, operands: usize, measured: &dyn Fn([usize; 2]) -> [f64; 2]| {
            let bytes = SIZES.map(|size| operands * width * size);
            Row { name, count, bytes, rates: measured(bytes) }
        };
        [
            row("RMS norm", 2 * LAYERS + 1, WIDTH, 2, &|bytes| {
                let single = |[x]: &mut [Vec<f32>; 1]| drop(black_box(rms_norm::forward(x, &weight, 1e-5)));
                let half =
                    |[x]: &mut [Vec<bf16>; 1]| drop(black_box(rms_norm::forward_bf16(x, &half_weight, 1e-5)));
                self.rates(WIDTH, bytes, single, half)
            }),
            row("RMS norm backward", 2 * LAYERS + 1, WIDTH, 3, &|bytes| {
                let single =
                    |[x, g]: &mut [Vec<f32>; 2]| drop(black_box(rms_norm::backward(x, &weight, &scales, g)));
                let half = |[x, g]: &mut [Vec<bf16>; 2]| {
                    drop(black_box(rms_norm::backward_bf16(x, &half_weight, &scales, g)));
                };
                self.rates(WIDTH, bytes, single, half)
            }),
            row("SwiGLU", LAYERS, INTERMEDIATE, 3, &|bytes| {
                let single = |[gate, up]: &mut [Vec<f32>; 2]| drop(black_box(swiglu::forward(gate, up)));
                let half = |[gate, up]: &mut [Vec<bf16>; 2]| drop(black_box(swiglu::forward_bf16(gate, up)));
                self.rates(INTERMEDIATE, bytes, single, half)
            }),
            row("SwiGLU backward", LAYERS, INTERMEDIATE, 5, &|bytes| {
                let single =
                    |[gate, up, g]: &mut [Vec<f32>; 3]| drop(black_box(swiglu::backward(gate, up, g)));
                let half =
                    |[gate, up, g]: &mut [Vec<bf16>; 3]| drop(black_box(swiglu::backward_bf16(gate, up, g)));
                self.rates(INTERMEDIATE, bytes, single, half)
            }),
            row("addition", 7 * LAYERS, WIDTH, 3, &|bytes| self.additions(bytes)),
        ]
    }

    /// Measures cross entropy, whose backward writes the gradient into the memory of the logits.
    fn of_loss(self) -> [Row; 2] {
        let targets = vec![0; self.rows];
        let normalisers = vec![1f32; self.rows];
        let forward = SIZES.map(|size| VOCABULARY * size);
        let backward = forward.map(|bytes| 2 * bytes);
        let forward_rates = self.rates(
            VOCABULARY,
            forward,
            |[x]: &mut [Vec<f32>; 1]| {
                drop(black_box(cross_entropy::forward(x, &targets, VOCABULARY, Smoothing::NONE)));
            },
            |[x]: &mut [Vec<bf16>; 1]| {
                drop(black_box(cross_entropy::forward_bf16(x, &targets, VOCABULARY, Smoothing::NONE)));
            },
        );
        let backward_rates = self.rates(
            VOCABULARY,
            backward,
            |[x]: &mut [Vec<f32>; 1]| {
                cross_entropy::backward(black_box(x), &targets, &normalisers, Smoothing::NONE, 1.0);
            },
            |[x]: &mut [Vec<bf16>; 1]| {
                cross_entropy::backward_bf16(black_box(x), &targets, &normalisers, Smoothing::NONE, 1.0);
            },
        );
        [
            Row { name: "cross entropy", count: 1, bytes: forward, rates: forward_rates },
            Row { name: "cross entropy backward", count: 1, bytes: backward, rates: backward_rates },
        ]
    }

    /// Returns the rates of the addition of two tensors.
    fn additions(self, bytes: [usize; 2]) -> [f64; 2] {
        let add = |dtype: DType, bytes: usize| {
            let sets = (self.operands / (2 * self.rows * WIDTH * dtype.size())).max(1);
            let tensor = || Tensor::<2>::full([self.rows, WIDTH], 1.5, &Device::flex()).cast(dtype);
            let operands: Vec<[Tensor<2>; 2]> = (0..sets).map(|_| [tensor(), tensor()]).collect();
            let mut turn = 0;
            move || {
                turn += 1;
                let [a, b] = &operands[turn % operands.len()];
                black_box(add(a.clone(), b.clone()));
                Some((self.rows * bytes) as f64)
            }
        };
        let mut best = [0.0; 2];
        alternate(self.time, &mut best, [&mut add(DType::F32, bytes[0]), &mut add(DType::BF16, bytes[1])]);
        best
    }

    /// Returns the highest rates of an operation in single precision and of the same in bfloat16, which run
    /// in turn. Their `K` operands have `width` elements per row.
    fn rates<const K: usize>(
        self,
        width: usize,
        bytes: [usize; 2],
        single: impl Fn(&mut [Vec<f32>; K]),
        half: impl Fn(&mut [Vec<bf16>; K]),
    ) -> [f64; 2] {
        let moved = bytes.map(|bytes| Some((self.rows * bytes) as f64));
        let (mut of_single, mut of_half) = (self.operands(width), self.operands(width));
        let mut best = [0.0; 2];
        let single = &mut || {
            single(of_single.next());
            moved[0]
        };
        let half = &mut || {
            half(of_half.next());
            moved[1]
        };
        alternate(self.time, &mut best, [single, half]);
        best
    }

    fn operands<T: Element, const K: usize>(self, width: usize) -> Operands<T, K> {
        Operands::new(self.rows * width, self.operands)
    }
}

/// Sets of the `K` operands of an operation, which follow each other without end.
struct Operands<T, const K: usize> {
    sets: Vec<[Vec<T>; K]>,
    turn: usize,
}

impl<T: Element, const K: usize> Operands<T, K> {
    /// Makes operands of `elements` elements each, which take `bytes` together.
    fn new(elements: usize, bytes: usize) -> Self {
        let operand = || (0..elements).map(|i| T::rounded((i % 31) as f32 / 16.0 - 1.0)).collect();
        let count = (bytes / (elements * size_of::<T>() * K)).max(1);
        Self { sets: (0..count).map(|_| std::array::from_fn(|_| operand())).collect(), turn: 0 }
    }

    fn next(&mut self) -> &mut [Vec<T>; K] {
        self.turn += 1;
        let index = self.turn % self.sets.len();
        &mut self.sets[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_count_each_operation_as_often_as_it_runs() {
        let row = |count, bytes, rates| Row { name: "", count, bytes, rates };
        let rows = vec![row(2, [8, 4], [1.0, 2.0]), row(1, [12, 6], [4.0, 3.0])];
        let (bytes, seconds) = Table { copy: [1.0; 2], rows }.totals();
        assert_eq!(bytes, [28, 14]);
        assert_eq!(seconds.map(|seconds| (seconds * 1e9).round()), [19.0, 6.0]);
    }

    #[test]
    fn operands_follow_each_other() {
        let mut operands = Operands::<f32, 2>::new(100, 1600);
        let starts = [(); 3].map(|()| operands.next()[0].as_ptr());
        assert!(starts[0] != starts[1] && starts[0] == starts[2]);
    }

    #[test]
    fn each_operation_has_a_rate() {
        let table = Table::measure(&Options { rows: 2, milliseconds: 1 }, 1 << 16);
        assert!(table.copy.iter().all(|&rate| rate > 0.0));
        assert!(table.rows.iter().all(|row| row.rates.iter().all(|&rate| rate > 0.0)));
    }
}
