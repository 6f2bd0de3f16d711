//! Impossible settings of a builder are errors before a rank starts, and the errors keep their cause.

use std::error::Error;

use burn::tensor::Tensor;
use pipewright::graph::{Graph, GraphError};
use pipewright::mesh::DataParallelMode;
use pipewright::pipeline::{BuildError, Layers, Pipeline, PipelineBuilder, PipelineError};
use pipewright_schedule::csv::parse_schedule;
use pipewright_schedule::{
    GenerateError, LowerConfig, PartitionError, TrainedStages, lower::Messages, lower::ReduceWait,
};

use crate::model::Shared;
use crate::support::{Block, LAYERS, batch, loss, optimizer};

fn complete() -> PipelineBuilder {
    Pipeline::builder(Layers::new(LAYERS, Block::new)).ranks(2).loss(loss).optimizer(optimizer())
}

fn check(builder: PipelineBuilder, message: &str) {
    let error = builder.launch().map(drop).expect_err(message);
    let is_setting = matches!(error, BuildError::Settings(_) | BuildError::Launch(PipelineError::Setup(_)));
    assert!(is_setting && error.to_string().contains(message), "{error}");
}

/// Checks the cause of an error that comes from another module.
fn check_source<E: Error + 'static>(builder: PipelineBuilder, message: &str) {
    let error = builder.launch().map(drop).expect_err(message);
    let source = error.source().unwrap_or_else(|| panic!("`{error}` has lost its cause"));
    assert!(source.is::<E>(), "{source:?}");
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn sizes_that_do_not_exist() {
    check_source::<GenerateError>(complete().ranks(0), "0 ranks with 1 stage each have no stage");
    check_source::<GenerateError>(complete().microbatches(0), "at least one microbatch");
    check_source::<GenerateError>(complete().stages_per_rank(2), "`1f1b` runs 1 stage on each rank");
    check_source::<PartitionError>(complete().ranks(9), "8 layers cannot fill 9 stages");
    check_source::<PartitionError>(complete().boundaries([9]), "boundary 9 is above the last of 8 layers");
    check(complete().data_parallel(0), "0 replicas");
    let groups = complete().data_parallel(2).data_parallel_mode(DataParallelMode::Hybrid { shards: 3 });
    check(groups, "2 replicas cannot form groups of 3");
}

#[test]
fn an_unknown_schedule_is_offered_the_nearest() {
    check_source::<GenerateError>(complete().schedule("zbvzerobuble"), "did you mean `zbvzerobubble`?");
}

#[test]
fn microbatches_that_do_not_divide() {
    let replicas = complete().data_parallel(2).microbatches(7);
    check(replicas, "7 microbatches cannot be shared equally by 2 replicas: use 6 or 8");
    let mut pipeline = complete().microbatches(4).launch().expect("it starts");
    let rows = || batch(0, 3);
    let error = pipeline.step(rows(), rows(), 1e-2).expect_err("9 rows are not 4 microbatches");
    assert!(matches!(error, PipelineError::Batch(_)), "{error:?}");
    assert!(error.to_string().contains("9 rows do not divide into 4 microbatches"), "{error}");
}

#[test]
fn what_training_needs() {
    let layers = || Layers::new(LAYERS, Block::new);
    let no_loss = Pipeline::builder(layers()).optimizer(optimizer());
    check(no_loss, "there is no loss: give one with `loss`");
    let no_optimizer = Pipeline::builder(layers()).loss(loss);
    check(no_optimizer, "there is no optimizer: give one with `optimizer`");
    let mut evaluates =
        Pipeline::builder(layers()).schedule("forwardonly").launch().expect("it needs neither");
    let outputs = evaluates.eval(batch(0, 2), None::<Tensor<2>>).expect("an evaluation").outputs;
    assert_eq!(outputs.len(), 2);
}

#[test]
fn models_that_cannot_be_cut() {
    let no_layers = Pipeline::builder(Vec::<Block>::new()).loss(loss).optimizer(optimizer());
    check(no_layers, "no layers");
    let weights = Pipeline::builder(Layers::new(LAYERS, Block::new).with_weights([1, 2]));
    check(weights.loss(loss).optimizer(optimizer()), "2 weights are given for 8 layers");
}

#[test]
fn a_schedule_of_ones_own_has_its_own_size() {
    let own = || parse_schedule("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n").expect("a schedule");
    let builder = || Pipeline::builder(Layers::new(LAYERS, Block::new)).loss(loss).optimizer(optimizer());
    check(
        builder().schedule(own()).ranks(3),
        "has 2 ranks, and the builder was asked for 3: leave `ranks` out",
    );
    check(builder().schedule(own()).microbatches(3), "has 2 microbatches, and the builder was asked for 3");
    check(
        builder().schedule(own()).stages_per_rank(2),
        "has 1 stages_per_rank, and the builder was asked for 2",
    );
    builder().schedule(own()).ranks(2).microbatches(2).launch().expect("it agrees");
}

#[test]
fn a_schedule_that_is_unsound() {
    let own = parse_schedule("0F0,0B0\n1B0,1F0\n").expect("a schedule");
    let builder = Pipeline::builder(Layers::new(LAYERS, Block::new)).loss(loss).optimizer(optimizer());
    let error = builder.schedule(own).launch().map(drop).expect_err("a backward comes before its forward");
    assert!(matches!(error, BuildError::Unsound(_)), "{error:?}");
    assert!(error.to_string().contains("1B0 needs 1F0"), "{error}");
    assert!(error.source().is_some(), "{error:?}");
}

#[test]
fn a_program_that_cannot_run_on_several_ranks() {
    let passes = LowerConfig {
        trained: TrainedStages::ALL,
        delayed: false,
        merge_bw: false,
        unshard: None,
        reduce_grad: None::<ReduceWait>,
        send_early: false,
        keep_overlaps: false,
        communicate: None::<Messages>,
        offload: None,
    };
    check(complete().lower(passes), "without communication");
}

#[test]
fn a_layer_that_cannot_be_made_is_named() {
    let make = |place| match place {
        5 => Err("no such file: layer5.bin"),
        _ => Ok(Block::new(place)),
    };
    let builder = Pipeline::builder(Layers::try_new(LAYERS, make)).ranks(2).loss(loss).optimizer(optimizer());
    let error = builder.launch().map(drop).expect_err("layer 5 cannot be made");
    assert!(matches!(error, BuildError::Launch(PipelineError::Step(_))), "{error:?}");
    assert!(error.to_string().contains("layer 5: no such file: layer5.bin"), "{error}");
}

#[test]
fn layers_that_do_not_fit_each_other_are_named() {
    let builder =
        Pipeline::builder(Layers::new(2, Shared::new)).loss(|output: Tensor<3>, _: Tensor<2>| output.mean());
    let mut pipeline = builder.optimizer(optimizer()).launch().expect("it starts");
    let error = pipeline.step(batch(0, 2), batch(1, 2), 1e-2).expect_err("the loss takes another rank");
    assert!(error.to_string().contains("the loss cannot take the model's outputs"), "{error}");
    let three = Tensor::<3>::ones([2, 2, 2], &burn::tensor::Device::flex());
    let error = pipeline.step(three, batch(1, 2), 1e-2).expect_err("a layer takes another rank");
    assert!(error.to_string().contains("the layer `layers.0` cannot take its inputs"), "{error}");
}

/// A builder cuts graphs to fit, so no model causes this error.
#[test]
fn a_graph_error_keeps_its_cause() {
    let error = Graph::<()>::builder().build().map(drop).expect_err("it has no output");
    let graph = BuildError::Graph(error);
    let source = graph.source().expect("it has a cause");
    assert!(source.is::<GraphError>(), "{source:?}");
}
