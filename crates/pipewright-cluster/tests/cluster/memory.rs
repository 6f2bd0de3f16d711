//! Memory against figures 1 and 7 of arXiv 2205.05198.

use pipewright_cluster::layout::{Layout, Recompute};
use pipewright_cluster::memory::{
    Parameters, block_activations, block_parameters, state, whole_block_activations,
};
use pipewright_cluster::published::Run;
use pipewright_document::GIB;

use crate::data::{predicted, run};

/// A row of figure 1: the model, its chunks, its microbatch, and GiB of parameters and optimizer, of all
/// activations, and of activations with sequence parallelism and selective recomputation.
type Row = (&'static str, u32, u32, [f64; 3]);

const FIGURE_1: [Row; 4] = [
    ("megatron-22B", 1, 4, [45.56, 59.25, 9.56]),
    ("gpt3-175B", 3, 1, [45.56, 66.84, 12.35]),
    ("turing-530B", 3, 1, [31.64, 114.02, 23.08]),
    ("megatron-1T", 1, 1, [32.96, 131.25, 26.56]),
];

fn with(run: &Run, recompute: Recompute, sequence_parallel: bool) -> Run {
    Run { layout: Layout { recompute, sequence_parallel, ..run.layout.clone() }, ..run.clone() }
}

fn near(model: &str, found: f64, published: f64) {
    assert!((found / published - 1.0).abs() < 0.03, "{model}: {found:.2} GiB, published {published}");
}

/// The figure counts blocks only, not the tables of the first and the last rank.
#[test]
fn parameters_and_optimizer_of_figure_1() {
    for (model, _, _, [published, ..]) in FIGURE_1 {
        let run = run(model, "A100");
        let blocks = &run.model.blocks;
        let parameters: f64 =
            blocks.iter().map(|block| block_parameters(block, &run.model, &run.layout).total()).sum();
        let rank = Parameters::of_matrices(parameters / f64::from(run.layout.pipeline));
        near(model, state(rank, Parameters::default(), &run.layout).state() / GIB, published);
    }
}

#[test]
fn activations_of_figure_1_by_the_simulated_schedule() {
    for (model, chunks, microbatch, [_, whole, selected]) in FIGURE_1 {
        let run = run(model, "A100");
        assert_eq!((run.layout.chunks, run.layout.microbatch), (chunks, microbatch));
        let peak =
            |run: &Run| predicted(run).memory.iter().map(|rank| rank.activations).fold(0.0, f64::max) / GIB;
        near(model, peak(&with(&run, Recompute::None, false)), whole);
        near(model, peak(&with(&run, Recompute::Selective, true)), selected);
    }
}

/// Shares of all activations of a block, to the width of a line in the figure: sequence parallelism, selective recomputation, both, full.
#[test]
fn activations_of_figure_7() {
    let figure = [
        ("megatron-22B", [0.6684, 0.4942, 0.1618, 0.0764]),
        ("gpt3-175B", [0.6204, 0.5653, 0.1849, 0.0871]),
        ("turing-530B", [0.5831, 0.6204, 0.2027, 0.0942]),
        ("megatron-1T", [0.5831, 0.6204, 0.2027, 0.0942]),
    ];
    for (model, published) in figure {
        let run = run(model, "A100");
        let block = &run.model.blocks[0];
        let whole = with(&run, Recompute::None, false).layout;
        let whole = whole_block_activations(block, &run.model, &whole);
        let settings = [
            (Recompute::None, true),
            (Recompute::Selective, false),
            (Recompute::Selective, true),
            (Recompute::Full, false),
        ];
        for ((recompute, sequence_parallel), published) in settings.into_iter().zip(published) {
            let layout = with(&run, recompute, sequence_parallel).layout;
            let share = block_activations(block, &run.model, &layout) / whole;
            assert!((share - published).abs() < 0.002, "{model}, {recompute:?}: {share}");
        }
    }
}

#[test]
fn a_sharded_optimizer_is_divided_by_the_replicas() {
    let mut run = run("gpt3-5B", "H100");
    let before = predicted(&run).memory[0].optimizer;
    run.layout.gpus *= 2;
    assert!((predicted(&run).memory[0].optimizer * 2.0 / before - 1.0).abs() < 1e-9);
}

/// A block that predicts a further token has as many parameters as a block and a product more.
#[test]
fn predictors_take_time_and_memory() {
    let run = run("llama2-7B", "H100");
    let mut with = run.clone();
    with.model.predictors = 1;
    let (before, after) = (predicted(&run), predicted(&with));
    let ratio = with.model.parameters() as f64 / run.model.parameters() as f64;
    let state = after.memory[0].state() / before.memory[0].state();
    assert!((state / ratio - 1.0).abs() < 1e-4, "{state} and {ratio}");
    assert!(after.seconds > before.seconds * ratio, "{} and {}", after.seconds, before.seconds);
    assert!(after.memory[0].activations > before.memory[0].activations);
}
