//! The trainer's batches: the last rows of an epoch, which do not fill a batch, are followed by rows of the
//! next epoch.

use std::num::NonZeroU32;

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::{Embedding, Linear, cross_entropy};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::train::data::{DataConfig, TokenRows, Tokenizer};
use pipewright::train::{LearningRate, Trainer};

const VOCABULARY: usize = 128;
const SEQUENCE: usize = 4;
const BATCH_ROWS: usize = 4;
const RATE: f64 = 1e-2;
/// Six rows, which do not fill two batches. Each row's last token is the target of its last position.
const TEXT: &str = "pipeline parallel trains!";

/// Predicts a token from the one before it.
#[derive(Module, Debug)]
struct Bigrams {
    table: Embedding,
    head: Linear,
}

impl StageModule for Bigrams {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn forward(&self, ids: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
        self.head.forward(self.table.forward(ids))
    }
}

fn launch() -> Pipeline {
    let layers = Layers::new(1, |_| {
        let device = Device::flex().autodiff();
        Bigrams {
            table: EmbeddingConfig::new(VOCABULARY, 8).init(&device).into(),
            head: LinearConfig::new(8, VOCABULARY).init(&device).into(),
        }
    });
    Pipeline::builder(layers)
        .microbatches(2)
        .loss(|logits: Tensor<3>, next: Tensor<2, Int>| {
            cross_entropy(logits.flatten(0, 1), next.flatten(0, 1))
        })
        .optimizer(AdamWConfig::new().init())
        .launch()
        .expect("it starts")
}

fn rows() -> TokenRows {
    let config = DataConfig {
        path: Vec::new(),
        tokenizer: Tokenizer::Bytes,
        seq_len: SEQUENCE,
        shuffle: false,
        seed: 0,
        ..DataConfig::default()
    };
    config.open_text(TEXT, VOCABULARY, BATCH_ROWS).expect("the text has enough rows")
}

fn trainer() -> Trainer {
    let rate = LearningRate::constant(RATE);
    Trainer::new(launch(), rows(), BATCH_ROWS, rate)
}

/// Returns rows of the text, counted from 0, and the tokens that follow.
fn batch(rows: [usize; BATCH_ROWS]) -> [Tensor<2, Int>; 2] {
    let ids = |shift: usize| {
        let rows = rows.iter().flat_map(|row| &TEXT.as_bytes()[row * SEQUENCE + shift..][..SEQUENCE]);
        let ids: Vec<i32> = rows.map(|&byte| i32::from(byte)).collect();
        Tensor::from_data(TensorData::new(ids, [BATCH_ROWS, SEQUENCE]), &Device::flex())
    };
    [ids(0), ids(1)]
}

#[test]
fn a_batch_at_the_end_of_an_epoch_continues_with_the_next_one() {
    let (mut trainer, mut pipeline) = (trainer(), launch());
    assert_eq!(rows().rows(), 6);
    let batches = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]];
    for (rows, epoch) in batches.into_iter().zip([4.0 / 6.0, 8.0 / 6.0, 2.0]) {
        let [inputs, next] = batch(rows);
        let expected = pipeline.step(inputs, next, RATE).expect("a step");
        let (metrics, summary) = trainer.step().expect("a step");
        assert_eq!((metrics.epoch, metrics.loss), (Some(epoch), expected.loss()));
        assert_eq!((summary.losses, metrics.grad_norm), (expected.losses, expected.gradient_norm));
    }
}

#[test]
fn accumulated_batches_at_the_end_of_an_epoch_are_one_step() {
    let mut trainer = trainer().accumulating(NonZeroU32::new(3).expect("not 0"));
    let mut pipeline = launch();
    let whole = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]].map(batch);
    let [inputs, next] =
        [0, 1].map(|part| Tensor::cat(whole.iter().map(|batch| batch[part].clone()).collect(), 0));
    let expected = pipeline.step(inputs, next, RATE).expect("a step");
    let (metrics, summary) = trainer.step().expect("a step");
    assert_eq!((metrics.epoch, metrics.tokens), (Some(2.0), 48));
    assert_eq!(summary.losses.len(), 6);
    assert!((metrics.loss - expected.loss()).abs() < 1e-6, "{} {}", metrics.loss, expected.loss());
}
