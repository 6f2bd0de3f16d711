//! Lists of layers of different types.

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor};
use pipewright::nn::{Embedding, Linear, cross_entropy};
use pipewright::pipeline::{BuildError, LayerList, Pipeline, PipelineBuilder};
use pipewright::stage::{StageContext, StageModule};
use pipewright_schedule::Recompute;

use crate::model::alone;

const TOKENS: usize = 11;
const WIDTH: usize = 6;

/// A layer of the type that `$forward` has.
macro_rules! layer {
    ($name:ident { $field:ident: $part:ty }, $input:ty => $output:ty) => {
        #[derive(Module, Debug)]
        struct $name {
            $field: $part,
        }

        impl StageModule for $name {
            type Input = $input;
            type Output = $output;

            fn forward(&self, input: $input, _context: &StageContext) -> $output {
                self.$field.forward(input)
            }
        }
    };
}

layer!(Tokens { embedding: Embedding }, Tensor<2, Int> => Tensor<3>);
layer!(Hidden { linear: Linear }, Tensor<3> => Tensor<3>);
layer!(Flat { linear: Linear }, Tensor<2> => Tensor<2>);

fn device() -> Device {
    Device::flex().autodiff()
}

fn tokens() -> Tokens {
    Tokens { embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(&device()).into() }
}

fn hidden(to: usize) -> Hidden {
    Hidden { linear: LinearConfig::new(WIDTH, to).init(&device()).into() }
}

fn flat() -> Flat {
    Flat { linear: LinearConfig::new(WIDTH, WIDTH).init(&device()).into() }
}

fn list() -> LayerList {
    LayerList::new().layer(tokens).layers(3, |_| hidden(WIDTH)).layer(|| hidden(TOKENS))
}

fn builder(list: LayerList) -> PipelineBuilder {
    Pipeline::builder(list)
        .microbatches(4)
        .loss(|logits: Tensor<3>, targets: Tensor<2, Int>| {
            cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        })
        .optimizer(SgdConfig::new().init())
}

fn train(builder: PipelineBuilder) -> (Vec<Vec<f64>>, Vec<String>) {
    let mut pipeline = builder.launch().expect("it starts");
    let ids =
        Tensor::<1, Int>::arange(0..20, &Device::flex()).remainder_scalar(TOKENS as i64).reshape([4, 5]);
    let mut step = || pipeline.step(ids.clone(), ids.clone(), 0.5).expect("a step").losses;
    let losses = vec![step(), step(), step()];
    let parameters = pipeline.parameters().expect("every rank answers");
    (losses, parameters.iter().map(|parameter| parameter.path.to_string()).collect())
}

#[test]
fn layers_of_different_types_train_alike_under_every_cut() {
    let _alone = alone();
    let (losses, mut paths) = train(builder(list()));
    assert!(losses[2] < losses[0], "{losses:?}");
    paths.sort();
    assert_eq!(paths[..2], ["layers.0.embedding.weight", "layers.1.linear.bias"]);
    let of_two = train(builder(list()).ranks(2).recompute(Recompute::Block)).0;
    let schedule = "zbvzerobubble".to_owned();
    let of_four = train(builder(list()).ranks(2).schedule(&schedule)).0;
    assert_eq!(of_four, train(builder(list()).ranks(1).schedule(&schedule)).0);
    assert_eq!((of_two, of_four), (losses.clone(), losses));
}

#[test]
fn a_layer_of_a_list_is_found_by_its_type() {
    let _alone = alone();
    let mut pipeline = builder(list()).ranks(2).launch().expect("it starts");
    let shape = pipeline.module(4, |head: &Hidden| head.linear.weight.dims()).expect("it is a `Hidden`");
    assert_eq!(shape, Some([WIDTH, TOKENS]));
    pipeline.change_module(1, |_: Hidden| hidden(WIDTH)).expect("it is replaced");
    let error = pipeline.module(0, |_: &Hidden| ()).expect_err("it is another type").to_string();
    assert!(error.contains("Tokens"), "{error}");
}

#[track_caller]
fn refused(list: LayerList, expected: &str) {
    let error = builder(list).launch().map(drop).expect_err("the types do not fit");
    assert!(matches!(error, BuildError::Settings(_)), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn types_that_do_not_fit_are_named_before_anything_starts() {
    refused(
        LayerList::new().layer(tokens).layer(flat).layer(|| hidden(TOKENS)),
        "layer 0 returns Tensor<3>, and the next layer takes Tensor<2>",
    );
    refused(
        LayerList::new().layer(tokens).layer(tokens),
        "layer 0 returns Tensor<3>, and the next layer takes Tensor<2, Int>",
    );
    refused(
        LayerList::new().layers(2, |_| flat()),
        "layer 1, the last one, returns Tensor<2>, and the loss takes Tensor<3>",
    );
}

#[test]
fn a_layer_that_cannot_be_made_is_named() {
    let list = LayerList::new().layer(tokens).try_layers(1, |_| Err::<Hidden, _>("no file"));
    let error = builder(list).launch().map(drop).expect_err("the layer is not made").to_string();
    assert!(error.contains("layer 1") && error.contains("no file"), "{error}");
}
