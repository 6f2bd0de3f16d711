//! x
use std::ops::Range;

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::tensor::{Int, Tensor};
use pipewright::nn::{Embedding, Linear, TensorParallel, cross_entropy};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright_models::{InitialParameters, ParameterKind, ParameterSpec, Place};
use pipewright_run::run_record::metrics;
use pipewright_run::training::load::load_settings;
use pipewright_run::{Run, RunError, RunModel};
use pipewright_schedule::{LayerDesc, ModelDesc};

const BYTES: usize = 256;
const HIDDEN: usize = 8;

#[derive(Module, Debug)]
struct Bytes {
    embedding: Embedding,
}

impl StageModule for Bytes {
    type Input = Tensor<2, Int>;
    type Output = Tensor<3>;

    fn forward(&self, bytes: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
        self.embedding.forward(bytes)
    }
}

#[derive(Module, Debug)]
struct Head {
    linear: Linear,
}

impl StageModule for Head {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, hidden: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        self.linear.forward(hidden)
    }
}

struct NextByte;

impl RunModel for NextByte {
    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "next_byte", "hidden": HIDDEN })
    }

    fn describe(&self, _tokens: usize) -> ModelDesc {
        let layer = |path: &str| LayerDesc {
            path: path.to_owned(),
            kind: path.to_owned(),
            parameters: (BYTES * HIDDEN) as u64,
            weight: 1,
            ..LayerDesc::default()
        };
        ModelDesc { layers: vec![layer("embedding"), layer("linear")] }
    }

    fn outline(&self, layers: Range<usize>, _: &TensorParallel) -> Result<Vec<ParameterSpec>, RunError> {
        let spec = |path: &str, shape, kind| ParameterSpec::new(path.to_owned(), shape, kind);
        let all = [
            spec("embedding.weight", vec![BYTES, HIDDEN], ParameterKind::Table),
            spec("linear.weight", vec![HIDDEN, BYTES], ParameterKind::Matrix),
        ];
        Ok(all[layers].to_vec())
    }

    fn stage(&self, layers: Range<usize>, _: &InitialParameters, place: Place) -> Result<Stage, String> {
        let loss =
            |logits: Tensor<3>, next: Tensor<2, Int>| cross_entropy(logits.flatten(0, 1), next.flatten(0, 1));
        match (layers.start, layers.end) {
            (0, 1) => {
                let embedding = EmbeddingConfig::new(BYTES, HIDDEN).init(&place.device).into();
                Ok(Stage::new(Bytes { embedding }))
            }
            (1, 2) => {
                let linear = LinearConfig::new(HIDDEN, BYTES).with_bias(false).init(&place.device).into();
                Ok(Stage::with_loss(Head { linear }, loss))
            }
            _ => Err("the model has two stages of one layer".to_owned()),
        }
    }

    fn vocab_size(&self) -> usize {
        BYTES
    }
}

#[test]
fn own() -> Result<(), Box<dyn std::error::Error>> {
    let scratch = tempfile::tempdir()?;
    let folder = scratch.path().join("run");
    let settings = [
        "pipeline.ranks=2".to_owned(),
        "pipeline.microbatches=2".to_owned(),
        "data.seq_len=16".to_owned(),
        "run.steps=2".to_owned(),
        format!("run.out={:?}", folder),
    ];
    Run::new(load_settings(None, &settings)?).model(NextByte).train()?;

    // The folder has all that the run needs to continue.
    Run::reopen(&folder).set(["run.steps=4"]).model(NextByte).train()?;
    assert_eq!(metrics(&folder)?.len(), 4);
    Ok(())
}
