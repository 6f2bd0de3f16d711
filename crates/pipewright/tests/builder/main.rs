//! A builder gives the same bits as the separate calls, for every cut of the model and every kind of layer.

mod bad_input;
mod lists;
mod model;
mod order;
mod setters;
#[path = "../support/mod.rs"]
mod support;

use burn::optim::SgdConfig;
use burn::tensor::{Int, Tensor};
use pipewright::graph::Graph;
use pipewright::pipeline::{Layers, Pipeline, PipelineConfig};
use pipewright::transport::World;
use pipewright_schedule::{
    Level, LowerConfig, Method, ScheduleSpec, StageIndex, generate, lower, partition, validate,
};

use model::{ByHand, Kind, Shared, alone, random_block};
use support::{Block, LAYERS, config, ending_in_loss, loss, optimizer, take_steps};

/// The losses and gradient norms of some steps, and the parameters after them by path.
pub(crate) type Run = (Vec<(Vec<f64>, f64)>, Vec<(String, Vec<f32>)>);

pub(crate) const MICROBATCHES: u32 = 8;

pub(crate) fn train(pipeline: Pipeline) -> Run {
    train_for(3, pipeline)
}

pub(crate) fn train_for(steps: u64, mut pipeline: Pipeline) -> Run {
    let steps = take_steps(&mut pipeline, 0..steps, MICROBATCHES);
    let parameters = pipeline.parameters().expect("every rank answers").into_iter();
    let mut parameters: Vec<_> = parameters
        .map(|parameter| (parameter.path.to_string(), parameter.data.iter::<f32>().collect()))
        .collect();
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    (steps, parameters)
}

/// Trains with the separate calls that the builder replaces, with the passes of a training run.
fn long_way(schedule: &str, ranks: u32) -> Run {
    let spec = ScheduleSpec { ranks, microbatches: MICROBATCHES, ..ScheduleSpec::default() };
    let passes = LowerConfig { send_early: true, ..LowerConfig::from(Level::Comms) };
    let program = lower(&generate(schedule, &spec).expect("a schedule"), &passes).expect("it lowers");
    let program = validate(program, Level::Comms).expect("it is sound");
    let stages = program.placement().stages();
    let cut = partition(&[1; LAYERS], stages, &Method::Even).expect("it cuts");
    let make = move |stage: StageIndex| {
        let part = ByHand::new(cut.range(stage));
        ending_in_loss(stage.get() + 1 == stages, part)
    };
    train(Pipeline::launch(program, World::local(ranks), &config(), make).expect("it starts"))
}

fn short_way(schedule: &str, ranks: u32) -> Run {
    let builder = Pipeline::builder(Layers::new(LAYERS, Block::new)).config(config());
    let builder = builder.ranks(ranks).schedule(schedule).microbatches(MICROBATCHES).loss(loss);
    train(builder.launch().expect("it starts"))
}

#[test]
fn the_bits_are_those_of_the_long_way() {
    for (schedule, ranks) in
        [("1f1b", 1), ("1f1b", 2), ("interleaved1f1b", 2), ("zbvzerobubble", 2), ("dualpipev", 2)]
    {
        let (found, expected) = (short_way(schedule, ranks), long_way(schedule, ranks));
        assert_eq!(found, expected, "{schedule} on {ranks}");
        assert_ne!(found.0[0].0, found.0[2].0, "it learns");
    }
}

/// Layers that draw their own initial parameters, as Burn's do.
fn cut_as(schedule: &str, ranks: u32, method: Method) -> Run {
    let builder = Pipeline::builder(Layers::new(LAYERS, random_block)).partition(method);
    let builder = builder.ranks(ranks).schedule(schedule).microbatches(MICROBATCHES);
    train(builder.loss(loss).optimizer(optimizer()).launch().expect("it starts"))
}

#[test]
fn any_cut_gives_the_same_losses_and_paths() {
    let _alone = alone();
    let expected = cut_as("1f1b", 1, Method::Even);
    assert_eq!(expected.1[0].0, "layers.0.linear.bias");
    assert_eq!(expected.1.last().expect("parameters").0, "layers.7.linear.weight");
    for (schedule, ranks) in [("1f1b", 2), ("gpipe", 8), ("interleaved1f1b", 2), ("zbvzerobubble", 4)] {
        assert_eq!(cut_as(schedule, ranks, Method::Even), expected, "{schedule} on {ranks}");
    }
    let boundaries = vec![1, 2, 7];
    assert_eq!(cut_as("1f1b", 4, Method::Explicit { boundaries }), expected);
}

#[test]
fn a_list_of_layers_is_a_model() {
    let launch = |replicas| {
        let layers: Vec<Block> = (0..LAYERS).map(Block::new).collect();
        let builder = Pipeline::builder(layers).ranks(2).microbatches(MICROBATCHES).data_parallel(replicas);
        builder.loss(loss).config(PipelineConfig { data_parallel: replicas, ..config() }).launch()
    };
    let expected = short_way("1f1b", 2);
    assert_eq!(train(launch(1).expect("it starts")), expected);
    // Each replica has its own parameters, and all stay equal.
    let (steps, parameters) = train(launch(2).expect("it starts"));
    let pairs: Vec<_> = parameters.chunks(2).collect();
    assert!(pairs.iter().all(|pair| pair[0] == pair[1]), "{pairs:?}");
    for (found, expected) in steps.iter().zip(&expected.0) {
        assert!((found.1 - expected.1).abs() < 1e-6 * expected.1, "{found:?} {expected:?}");
    }
}

#[test]
fn layers_of_several_kinds_take_each_others_tensors() {
    let _alone = alone();
    let launch = |ranks| {
        let builder = Pipeline::builder(Layers::mixed(6, Kind::language_model)).ranks(ranks);
        let loss = |output: Tensor<3>, target: Tensor<3>| (output - target).square().mean();
        builder.microbatches(4).loss(loss).optimizer(SgdConfig::new().init()).launch().expect("it starts")
    };
    let mut outcomes = [1, 3].map(|ranks| {
        let mut pipeline = launch(ranks);
        let ids = Tensor::<2, Int>::ones([8, 5], &burn::tensor::Device::flex());
        let target = Tensor::<3>::ones([8, 5, 3], &burn::tensor::Device::flex());
        let losses: Vec<_> =
            (0..3).map(|_| pipeline.step(ids.clone(), target.clone(), 0.1).expect("a step").losses).collect();
        assert!(losses[2][0] < losses[0][0], "it learns: {losses:?}");
        let parameters = pipeline.parameters().expect("every rank answers");
        let paths: Vec<_> = parameters.into_iter().map(|parameter| parameter.path.to_string()).collect();
        (losses, paths)
    });
    outcomes.iter_mut().for_each(|(_, paths)| paths.sort());
    assert_eq!(outcomes[0], outcomes[1]);
    let paths = &outcomes[0].1;
    assert_eq!(paths[0], "layers.0.weight", "the variant is left out");
    assert!(paths.contains(&"layers.5.linear.weight".to_owned()), "{paths:?}");
}

#[test]
fn a_graph_is_cut_like_a_list() {
    let _alone = alone();
    let graph = |splits: &[&str]| {
        let named = Graph::builder()
            .input("image")
            .node("down", 0, ["image"])
            .node("middle", 1, ["down"])
            .node("up", 2, ["middle", "down"])
            .output("up");
        splits.iter().fold(named, |named, split| named.split_before(split)).build().expect("it is a graph")
    };
    let builder = |graph, ranks| {
        let builder = Pipeline::builder(Layers::graph(graph, Kind::sum)).ranks(ranks);
        builder.microbatches(MICROBATCHES).loss(loss).optimizer(optimizer())
    };
    let expected = train(builder(graph(&[]), 1).launch().expect("it starts"));
    assert_eq!(expected.1[0].0, "down.linear.bias", "parameters are named after nodes");
    assert_eq!(train(builder(graph(&[]), 3).launch().expect("it starts")), expected);
    assert_eq!(train(builder(graph(&[]), 2).boundaries([1]).launch().expect("it starts")), expected);
    let stages = |builder: pipewright::pipeline::PipelineBuilder| -> Vec<u32> {
        let parameters = builder.launch().expect("it starts").parameters().expect("every rank answers");
        parameters.into_iter().filter(|it| it.path.ends_with("weight")).map(|it| it.stage.get()).collect()
    };
    assert_eq!(stages(builder(graph(&["up"]), 2)), [0, 0, 1], "its own split holds");
    assert_eq!(stages(builder(graph(&["middle"]), 2)), [0, 1, 1]);
    assert_eq!(stages(builder(graph(&["middle"]), 2).boundaries([2])), [0, 0, 1], "unless another is given");
}

#[test]
fn shared_parameters_keep_their_path() {
    let run = |ranks| {
        let builder = Pipeline::builder(Layers::new(4, Shared::new)).ranks(ranks);
        train(builder.microbatches(MICROBATCHES).loss(loss).config(config()).launch().expect("it starts"))
    };
    let (one, two) = (run(1), run(2));
    assert_eq!(one.0, two.0);
    let paths: Vec<_> = two.1.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths.iter().filter(|path| **path == "shared.scale").count(), 4);
    assert_eq!(paths.iter().filter(|path| path.starts_with("layers.")).count(), 4);
}
