//! A rank holds a shared parameter once, with one state of the optimizer, however many of its layers use it.

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};
use pipewright::nn::{Embedding, Linear, TiedHead, cross_entropy};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{LayerList, Pipeline, PipelineConfig, StepSummary};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;

use crate::support::{linear, numbers};

const VOCABULARY: usize = 4096;
const WIDTH: usize = 32;
const MICROBATCHES: usize = 4;
/// Bytes of the table.
const TABLE: f64 = (VOCABULARY * WIDTH * 4) as f64;
const PATH: &str = "table.weight";

#[derive(Module, Debug)]
struct Tokens {
    embedding: Embedding,
}

impl StageModule for Tokens {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn forward(&self, ids: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
        self.embedding.forward(ids)
    }

    fn parameter_path(&self, _local: &str) -> String {
        PATH.to_owned()
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec![PATH.to_owned()]
    }
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        x.clone() + self.linear.forward(x).tanh()
    }
}

#[derive(Module, Debug)]
struct Untied {
    linear: Linear,
}

impl StageModule for Untied {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        self.linear.forward(x)
    }
}

#[derive(Module, Debug)]
struct Tied {
    head: TiedHead,
}

impl StageModule for Tied {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        self.head.forward(x)
    }

    fn parameter_path(&self, _local: &str) -> String {
        PATH.to_owned()
    }

    fn shared_parameters(&self) -> Vec<String> {
        vec![PATH.to_owned()]
    }
}

fn table() -> Param<Tensor<2>> {
    Param::from_data(numbers(1, [VOCABULARY, WIDTH]), &Device::flex().autodiff())
}

/// Returns the losses of three steps, and the peaks of the ranks in the last one in tables.
fn run(is_tied: bool, (schedule, ranks): (&str, u32), config: &PipelineConfig) -> (Vec<f64>, Vec<f64>) {
    let layers = LayerList::new().layer(|| Tokens { embedding: Embedding { weight: table() } });
    let layers = layers.layers(2, |index| Block { linear: linear(index as u64, [WIDTH, WIDTH]) });
    let layers = if is_tied {
        layers.layer(|| Tied { head: TiedHead { weight: table() } })
    } else {
        layers.layer(|| Untied { linear: linear(9, [WIDTH, VOCABULARY]) })
    };
    let builder = Pipeline::builder(layers).config(config.clone()).ranks(ranks).schedule(schedule);
    let builder = builder.microbatches(MICROBATCHES as u32).data_parallel(config.data_parallel);
    let mut pipeline = builder
        .optimizer(AdamW::default().init())
        .loss(|logits: Tensor<3>, targets: Tensor<2, Int>| {
            cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        })
        .launch()
        .expect("it starts");
    let ids = || {
        let ids = Tensor::<1, Int>::arange(0..(MICROBATCHES * 2) as i64, &Device::flex());
        (ids * 97).remainder_scalar(VOCABULARY as i64).reshape([MICROBATCHES, 2])
    };
    let steps: Vec<_> = (0..3).map(|_| pipeline.step(ids(), ids(), 1e-2).expect("a step")).collect();
    let peaks = steps[2].peak_bytes.iter().map(|&bytes| bytes as f64 / TABLE).collect();
    (steps.iter().map(StepSummary::loss).collect(), peaks)
}

/// Checks that a tied model has the same losses under every cut, and that a rank with both ends saves the values
/// and the two moments of a table, compared with an untied model. A tied head in half precision has more temporary
/// tensors, of a quarter of a table. `copy` is the size of rounded values, in tables: one stage saves these too.
fn check(config: &PipelineConfig, copy: f64) {
    let across = run(true, ("1f1b", 2), config).0;
    for (schedule, saved) in [(("1f1b", 1), 3.0 + copy), (("zbvzerobubble", 2), 3.0)] {
        let (losses, tied) = run(true, schedule, config);
        assert_eq!(losses, across, "{schedule:?}");
        let untied = run(false, schedule, config).1;
        assert!(untied[0] - tied[0] > saved - 0.3, "{schedule:?}: {tied:?} {untied:?} tables");
    }
}

#[test]
fn a_tied_model_holds_its_table_once() {
    check(&PipelineConfig::default(), 0.0);
}

#[test]
fn a_stage_rounds_its_table_once() {
    check(&PipelineConfig { precision: Precision::Bf16, ..PipelineConfig::default() }, 0.5);
}

#[test]
fn a_table_that_is_updated_early_is_held_once() {
    let config = PipelineConfig { post_validation: true, ..PipelineConfig::default() };
    check(&config, 0.0);
    let expected = run(true, ("1f1b", 2), &PipelineConfig::default()).0;
    assert_eq!(run(true, ("zbvzerobubble", 2), &config).0, expected);
}
