//! The simulated pipeline, and the closed form for pipelines that are too large to simulate.

use pipewright_cluster::pipeline::{PipelineCosts, Programs, closed_form};
use pipewright_schedule::costs::{Link, StageCosts, StageSizes};

use crate::data::run;

/// Compares the closed form with the simulation for stages that take equally long.
fn check(pipeline: u32, chunks: u32, microbatches: u32) {
    let mut layout = run("gpt3-175B", "A100").layout;
    (layout.pipeline, layout.chunks) = (pipeline, chunks);
    layout.gpus = layout.tensor * pipeline;
    layout.batch = microbatches * layout.microbatch;
    let costs = PipelineCosts {
        stages: vec![StageCosts::new(1.0, 1.0, 1.0); layout.stages() as usize],
        sizes: vec![
            StageSizes { output: 1000, activation: 1_000_000, ..StageSizes::default() };
            layout.stages() as usize
        ],
        link: Link { latency: 0.001, bandwidth: 1e6 },
    };
    let simulated = Programs::default().run(&layout, &costs).expect("a run");
    let formula = closed_form(&layout, &costs);
    let ratio = formula.makespan / simulated.makespan;
    assert!((ratio - 1.0).abs() < 0.01, "p {pipeline}, v {chunks}, m {microbatches}: {ratio}");
    assert_eq!(formula.activations, simulated.activations, "p {pipeline}, v {chunks}");
    assert_eq!(formula.stages_of_rank, simulated.stages_of_rank);
}

#[test]
fn the_closed_form_agrees_with_the_simulation() {
    for (pipeline, chunks, microbatches) in [(1, 1, 4), (4, 1, 16), (8, 1, 64), (4, 2, 32), (8, 3, 64)] {
        check(pipeline, chunks, microbatches);
    }
}
