//! Mistakes in a graph are named, when it is built and when its stages run.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::failure::Cause;
use pipewright::graph::{Graph, GraphBuilder, GraphError};
use pipewright::pipeline::{Pipeline, PipelineError};
use pipewright::stage::{Stage, StageError};
use pipewright::transport::World;
use pipewright_schedule::{Placement, StageIndex};

use super::unet::{Kind, in_stages, loss, make};
use crate::support::{batch, config, program, program_of_trained};

fn check_error(named: GraphBuilder<Kind>, start: &str) {
    let error = named.build().map(drop).expect_err(start).to_string();
    assert!(error.starts_with(start), "{error}");
}

#[test]
fn mistakes_in_a_graph_are_named() {
    let start = || Graph::builder().input("x").node("a", Kind::Mix, ["x"]);
    check_error(start().node("a", Kind::Mix, ["x"]).output("a"), "two inputs or nodes are called `a`");
    check_error(start().node("x", Kind::Mix, ["a"]).output("x"), "two inputs or nodes are called `x`");
    check_error(start().node("b", Kind::Mix, ["a", "z"]).output("b"), "node `b` takes `z`, which is neither");
    check_error(start().node("b", Kind::Mix, ["a:1"]).output("b"), "node `b` takes `a:1`, which is neither");
    check_error(start().output("a").output("z"), "the graph's output takes `z`, which is neither");
    let cycle = start().node("b", Kind::Mix, ["c", "a"]).node("c", Kind::Mix, ["b"]).output("c");
    check_error(cycle, "the nodes b, c depend on each other in a cycle");
    check_error(start().node("b", Kind::Mix, ["a"]).output("a"), "nothing uses `b`");
    check_error(start().input("y").output("a"), "nothing uses `y`");
    let tied = start().output("a").tie("a.linear.weight", "z.linear.weight");
    check_error(tied, "no node has a parameter `z.linear.weight` to tie");
    check_error(start(), "the graph has no output");
    check_error(start().output("a").split_before("x"), "`x` is not a node");
    check_error(start().output("a").split_before("a"), "the split before `a` leaves a stage without a node");
    let twice = start().node("b", Kind::Mix, ["a"]).output("b").split_before("b").split_before("b");
    check_error(twice, "the split before `b` leaves a stage without a node");
    let error = in_stages(3).place(&Placement::looped(2, 1).expect("a placement")).err();
    let error = error.expect("another number of stages").to_string();
    assert_eq!(error, "the graph is split into 3 stages, the placement has 2");
}

#[test]
fn nodes_may_be_named_in_any_order() {
    let graph =
        Graph::builder().node("b", Kind::Mix, ["a"]).node("a", Kind::Mix, ["x"]).input("x").output("b");
    let graph = graph.split_before("b").build().expect("it is a graph");
    assert_eq!(graph.nodes_of(StageIndex::new(0)).collect::<Vec<_>>(), ["a"]);
    assert_eq!(graph.nodes_of(StageIndex::new(1)).collect::<Vec<_>>(), ["b"]);
}

/// Returns the error of the first step of a two-stage graph whose node `b` does not match its connections.
fn failure(kind: Kind, outputs: u32) -> StageError {
    let graph = Graph::builder()
        .input("x")
        .node("a", Kind::Mix, ["x"])
        .node_with_outputs("b", kind, ["a"], outputs)
        .output("b:0")
        .split_before("b");
    let graph = graph.build().expect("it is a graph");
    let program = program("1f1b", 2, 2);
    let placement = program.placement().clone();
    let make = move |stage: StageIndex| -> Result<Stage, GraphError> {
        let part = graph.place(&placement)?.stage(stage, make);
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        Ok(if stage.get() == 1 { Stage::of_graph_with_loss(part, loss) } else { Stage::of_graph(part) })
    };
    let mut pipeline = Pipeline::launch(program, World::local(2), &config(), make).expect("it starts");
    match pipeline.step(batch(0, 2), batch(1, 2), 1e-2).expect_err("it does not fit") {
        PipelineError::Step(error) => match error.cause {
            Cause::Stage(error) => error,
            cause => panic!("{cause}"),
        },
        error => panic!("{error}"),
    }
}

#[test]
fn a_layer_in_the_wrong_place_is_named() {
    let error = failure(Kind::Pick, 1).to_string();
    assert_eq!(
        error,
        "the layer `b` cannot take its inputs: tensor 1 is missing: the stage before returns fewer tensors than this one \
         takes"
    );
    let error = failure(Kind::Halves, 3).to_string();
    assert!(error.starts_with("the layer `b` returned 2 tensors, and the graph says 3"), "{error}");
}

#[test]
fn skips_are_refused_if_the_program_leaves_out_backwards() {
    let program = program_of_trained("1f1b", 4, &[false, true, true, true]);
    let (placement, graph) = (program.placement().clone(), in_stages(4));
    let make = move |stage: StageIndex| -> Result<Stage, GraphError> {
        let placed = graph.place(&placement)?;
        Ok(match stage.get() {
            0 => Stage::of_graph(placed.stage(stage, |name, kind: &Kind| make(name, kind).no_grad())),
            3 => Stage::of_graph_with_loss(placed.stage(stage, make), loss),
            _ => Stage::of_graph(placed.stage(stage, make)),
        })
    };
    let launched = Pipeline::launch(program, World::local(4), &config(), make);
    let text = launched.err().expect("it has skip connections").to_string();
    assert!(text.contains("a stage with skip connections may need them"), "{text}");
}
