//! Wrong shapes inside a stage: the error names the layer and, if the layer knows it, the shape that it
//! takes.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::{Device, Int, Tensor};
use pipewright::graph::{Graph, GraphLayer};
use pipewright::nn::{Embedding, Linear, RmsNorm};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

use crate::support::optimizer;

#[derive(Module, Debug)]
enum Layer {
    Ours(Linear),
    Burns(burn::nn::Linear),
    Norm(RmsNorm),
}

fn linear(inputs: usize, outputs: usize) -> burn::nn::Linear {
    LinearConfig::new(inputs, outputs).init(&Device::flex().autodiff())
}

impl StageModule for Layer {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        match self {
            Self::Ours(linear) => linear.forward(input),
            Self::Burns(linear) => linear.forward(input),
            Self::Norm(norm) => norm.forward(input),
        }
    }
}

impl GraphLayer for Layer {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        Ok(pack(StageModule::forward(self, unpack(inputs)?, context)))
    }
}

/// The layer that does not take the four features of those before it.
#[derive(Clone, Copy)]
enum Wrong {
    Ours,
    Burns,
    Norm,
}

impl Wrong {
    fn layer(self) -> Layer {
        let weight = burn::module::Param::from_tensor(Tensor::ones([5], &Device::flex().autodiff()));
        match self {
            Self::Ours => Layer::Ours(linear(5, 4).into()),
            Self::Burns => Layer::Burns(linear(5, 4)),
            Self::Norm => Layer::Norm(RmsNorm { weight, epsilon: 1e-5 }),
        }
    }
}

fn error_of(layers: Layers) -> String {
    let builder = Pipeline::builder(layers)
        .ranks(2)
        .microbatches(2)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(optimizer());
    let mut pipeline = builder.launch().expect("it starts");
    let data = || Tensor::<2>::ones([4, 4], &Device::flex());
    pipeline.step(data(), data(), 1e-2).map(drop).expect_err("a layer takes five features").to_string()
}

fn check(wrong: Wrong, expected: &str) {
    let make = move |place| if place == 2 { wrong.layer() } else { Layer::Ours(linear(4, 4).into()) };
    let error = error_of(Layers::new(4, make));
    let place =
        "step 1: rank 1, stage 1, microbatch 0, action 1F0: the stage panicked: the layer `layers.2`: ";
    assert!(error.starts_with(&format!("{place}{expected}")), "{error}");
    let mixed = Layers::mixed(4, move |place| Ok::<_, std::convert::Infallible>(make(place)));
    assert!(error_of(mixed).starts_with(&format!("{place}{expected}")));
}

#[test]
fn a_layer_says_what_it_takes() {
    check(Wrong::Ours, "Linear takes 5 features, got 4: its input has the shape [2, 4]");
    check(Wrong::Norm, "RmsNorm takes 5 features, got 4: its input has the shape [2, 4]");
    check(Wrong::Burns, "");
}

#[test]
fn a_node_of_a_graph_is_named() {
    let graph = Graph::builder().input("x").node("first", false, ["x"]).node("second", true, ["first"]);
    let graph = graph.output("second").build().expect("a graph");
    let make = |_: &str, is_wrong: &bool| {
        if *is_wrong { Wrong::Ours.layer() } else { Layer::Ours(linear(4, 4).into()) }
    };
    let error = error_of(Layers::graph(graph, make));
    assert!(error.contains("the layer `second`: Linear takes 5 features, got 4"), "{error}");
}

#[test]
#[should_panic(expected = "an id lies outside the table of 3: got 7")]
fn an_id_outside_a_table_is_shown() {
    let table = burn::nn::EmbeddingConfig::new(3, 2).init(&Device::flex());
    Embedding::from(table).forward(Tensor::<2, Int>::from_data([[0, 7]], &Device::flex()));
}
