//! A GPT of your own: token ids, causal attention, dropout, a head, data, validation and checkpoints.
//!
//! The model learns its own source code, byte by byte. A second call with the same folder continues from the newest
//! checkpoint, also with other numbers of ranks or another schedule.
//!
//! ```text
//! cargo run --release -p pipewright --example transformer -- runs/gpt
//! cargo run --release -- report runs/gpt
//! ```

use std::error::Error;
use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::nn::{EmbeddingConfig, LayerNorm, LayerNormConfig, LinearConfig};
use burn::tensor::activation::gelu;
use pipewright::nn::{CausalAttention, Dropout, Embedding, Linear, cross_entropy};
use pipewright::prelude::*;
use pipewright::train::TOKENS;

const TEXT: &[u8] = include_bytes!("transformer.rs");
const VOCABULARY: usize = 256;
const WIDTH: usize = 64;
const HEAD: usize = 16;
const CONTEXT: usize = 32;
const ROWS: usize = 16;

/// From token ids `[rows, length]` to vectors `[rows, length, WIDTH]`.
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
}

/// Attention and a feed-forward layer, each with a norm before it and dropout behind it.
#[derive(Module, Debug)]
struct Block {
    norms: [LayerNorm; 2],
    queries_keys_values: [Linear; 3],
    mix: Linear,
    up: Linear,
    down: Linear,
    dropout: Dropout,
    /// The number of the block, which names its random numbers.
    #[module(skip)]
    number: usize,
}

impl StageModule for Block {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, context: &StageContext) -> Tensor<3> {
        let random = |part| context.random(&format!("blocks.{}.{part}", self.number));
        let [rows, length, width] = x.dims();
        let normed = self.norms[0].forward(x.clone()).flatten(0, 1);
        let [q, k, v] = [0, 1, 2].map(|i| self.queries_keys_values[i].forward(normed.clone()));
        let attended = CausalAttention::rotary(length, HEAD, 1e4, &x.device()).forward(q, k, v);
        let mixed = self.mix.forward(attended.reshape([rows, length, width]));
        let x = x + self.dropout.forward(mixed, random("attention"));
        let hidden = gelu(self.up.forward(self.norms[1].forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden), random("feed_forward"))
    }
}

/// From vectors to the logits of the next token, `[rows, length, VOCABULARY]`.
#[derive(Module, Debug)]
struct Head {
    norm: LayerNorm,
    linear: Linear,
}

impl StageModule for Head {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, x: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        self.linear.forward(self.norm.forward(x))
    }
}

fn layers() -> LayerList {
    let device = || Device::flex().autodiff();
    let linear = move |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device()).into();
    let norm = move || LayerNormConfig::new(WIDTH).init(&device());
    LayerList::new()
        .layer(move || Tokens { embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device()).into() })
        .layers(4, move |number| Block {
            norms: [norm(), norm()],
            queries_keys_values: [(); 3].map(|()| linear(WIDTH, WIDTH)),
            mix: linear(WIDTH, WIDTH),
            up: linear(WIDTH, 4 * WIDTH),
            down: linear(4 * WIDTH, WIDTH),
            dropout: Dropout::new(0.1),
            number,
        })
        .layer(move || Head { norm: norm(), linear: linear(WIDTH, VOCABULARY) })
}

/// Returns rows of `text` and the tokens that follow. They depend on the step alone, so that a run can resume at any step.
fn batch(text: &[u8], step: u64) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let start = |row: usize| (step as usize * ROWS + row) * 101 % (text.len() - CONTEXT);
    let rows = |shift: usize| {
        let rows = (0..ROWS).flat_map(|row| &text[start(row) + shift..][..CONTEXT]);
        let ids: Vec<i32> = rows.map(|&byte| i32::from(byte)).collect();
        Tensor::from_data(TensorData::new(ids, [ROWS, CONTEXT]), &Device::flex())
    };
    (rows(0), rows(1))
}

pub(crate) fn run(
    out: &mut impl Write,
    folder: &Path,
    ranks: u32,
    schedule: &str,
    steps: u64,
) -> Result<(), Box<dyn Error>> {
    let mut pipeline = Pipeline::builder(layers())
        .ranks(ranks)
        .schedule(schedule)
        .microbatches(4)
        .loss(|logits: Tensor<3>, next: Tensor<2, Int>| {
            cross_entropy(logits.flatten(0, 1), next.flatten(0, 1))
        })
        .optimizer(AdamWConfig::new().init())
        .clip_norm(1.0)
        .launch()?;
    let (training, validation) = TEXT.split_at(TEXT.len() * 9 / 10);

    let checkpoints = folder.join("checkpoints");
    let mut done = 0;
    if checkpoints.exists() {
        let checkpoint = Arc::new(CheckpointFolder::newest(&checkpoints)?);
        pipeline.restore(&checkpoint)?;
        done = checkpoint.step();
    }
    let mut log = RunLog::open(folder, done)?.counting(TOKENS);
    let checkpoints = CheckpointFolder::own(&checkpoints)?;
    let mut writer = CheckpointWriter::start(checkpoints, 2, ranks, Duration::from_secs(60))?;

    for step in done + 1..=steps {
        let ((inputs, next), rate) = (batch(training, step), 3e-3);
        let summary = pipeline.step(inputs, next, rate)?;
        let mut metrics = log.metrics(&summary, rate, (ROWS * CONTEXT) as u64);
        if step % 10 == 0 || step == steps {
            let (inputs, next) = batch(validation, 0);
            let loss = pipeline.eval(inputs, Some(next))?.loss();
            writeln!(out, "step {step:3}  loss {:.4}  validation {loss:.4}", summary.loss())?;
            metrics.validation_loss = Some(loss);
            let cursor = Cursor { epoch: 0, index: step };
            let (description, ranks) = (Default::default(), pipeline.state()?);
            writer.save(TrainingState { step, cursor, description, ranks })?;
        }
        log.step(&metrics, &summary)?;
    }
    writer.wait()?;
    Ok(log.finish()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "runs/gpt".to_owned());
    run(&mut stdout(), Path::new(&folder), 2, "1f1b", 200)
}
