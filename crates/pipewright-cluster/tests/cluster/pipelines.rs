//! The simulated pipeline, and the closed form for pipelines that are too large to simulate.

use pipewright_cluster::layout::Layout;
use pipewright_cluster::pipeline::{PipelineCosts, Programs, closed_form};
use pipewright_schedule::costs::{Link, StageCosts, StageSizes};

use crate::data::run;

/// A layout of one replica, and the costs of its stages, which take equally long. `activation` returns the
/// bytes of a stage.
fn pipeline(
    ranks: u32,
    chunks: u32,
    microbatches: u32,
    activation: fn(u32) -> u64,
) -> (Layout, PipelineCosts) {
    let mut layout = run("gpt3-175B", "A100").layout;
    (layout.pipeline, layout.chunks) = (ranks, chunks);
    layout.gpus = layout.tensor * ranks;
    layout.batch = microbatches * layout.microbatch;
    let size = |stage| StageSizes { output: 1000, activation: activation(stage), ..StageSizes::default() };
    let costs = PipelineCosts {
        stages: vec![StageCosts::new(1.0, 1.0, 1.0); layout.stages() as usize],
        sizes: (0..layout.stages()).map(size).collect(),
        trained: pipewright_schedule::TrainedStages::ALL,
        link: Link { latency: 0.001, bandwidth: 1e6 },
        links: std::collections::BTreeMap::new(),
    };
    (layout, costs)
}

/// Compares the closed form with the simulation for stages that are equal.
fn check(ranks: u32, chunks: u32, microbatches: u32) {
    let (layout, costs) = pipeline(ranks, chunks, microbatches, |_| 1_000_000);
    let simulated = Programs::default().run(&layout, &costs).expect("a run");
    let formula = closed_form(&layout, &costs);
    let ratio = formula.makespan / simulated.makespan;
    assert!((ratio - 1.0).abs() < 0.01, "p {ranks}, v {chunks}, m {microbatches}: {ratio}");
    assert_eq!(formula.activations, simulated.activations, "p {ranks}, v {chunks}");
    assert_eq!(formula.stages_of_rank, simulated.stages_of_rank);
}

#[test]
fn the_closed_form_agrees_with_the_simulation() {
    for (pipeline, chunks, microbatches) in [(1, 1, 4), (4, 1, 16), (8, 1, 64), (4, 2, 32), (8, 3, 64)] {
        check(pipeline, chunks, microbatches);
    }
}

/// Rounds of more microbatches than ranks, one round of fewer, and chunks that keep different numbers of
/// bytes.
#[test]
fn the_closed_form_holds_the_activations_of_the_simulation() {
    let falls = |stage| 1_000_000 / (u64::from(stage) + 1);
    let varies = |stage| 1_000_000 + u64::from(stage) * 7_919 % 31 * 100_000;
    let mut compared = 0;
    for (ranks, microbatches) in [
        (1, 1),
        (1, 5),
        (2, 1),
        (2, 3),
        (3, 8),
        (4, 2),
        (4, 4),
        (4, 6),
        (4, 7),
        (4, 8),
        (4, 10),
        (5, 20),
        (8, 15),
    ] {
        for chunks in 1..6 {
            for activation in [falls, varies] {
                let (layout, costs) = pipeline(ranks, chunks, microbatches, activation);
                let simulated = Programs::default().run(&layout, &costs).expect("a run");
                let formula = closed_form(&layout, &costs);
                assert_eq!(
                    formula.activations, simulated.activations,
                    "p {ranks}, v {chunks}, m {microbatches}"
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 130);
}
