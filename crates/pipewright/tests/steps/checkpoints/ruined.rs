//! Checkpoints of parameters that are not finite: none is written, and one that exists says so.

use std::fs;
use std::path::Path;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Tensor};
use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointWriter, Manifest, NotFinite,
};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::{DEADLINE, MICROBATCHES, adamw, batch, folder, launch, newest, save, state, take_steps};
use crate::support::{Mlp, config, loss, program};

/// Takes a step that makes parameters infinite or NaN.
pub(super) fn ruin(pipeline: &mut Pipeline) {
    let (inputs, targets) = (batch(9, MICROBATCHES), batch(109, MICROBATCHES));
    pipeline.step(inputs, targets, 1e300).expect("the losses and gradients are finite");
}

#[test]
fn the_last_good_checkpoint_stays() {
    for (schedule, ranks) in [("gpipe", 1), ("1f1b", 4)] {
        let scratch = folder();
        let mut pipeline = launch(schedule, ranks, adamw());
        take_steps(&mut pipeline, 0..1);
        save(&mut pipeline, 1, scratch.path(), 1).expect("it is saved");
        ruin(&mut pipeline);
        let error = save(&mut pipeline, 2, scratch.path(), 1).expect_err("a ruined parameter");
        let text = error.to_string();
        assert!(matches!(error, CheckpointError::NotFinite { step: 2, .. }), "{text}");
        assert!(text.contains("after this step the parameter `layers."), "{text}");
        let left: Vec<_> = CheckpointFolder::list(scratch.path()).expect("a folder");
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(newest(scratch.path()).step(), 1);
        assert_eq!(newest(scratch.path()).not_finite().count(), 0);
    }
}

#[test]
fn a_step_after_a_ruined_update_names_the_parameter() {
    for (schedule, ranks) in [("gpipe", 1), ("1f1b", 4)] {
        let mut pipeline = launch(schedule, ranks, adamw());
        ruin(&mut pipeline);
        let (inputs, targets) = (batch(10, MICROBATCHES), batch(110, MICROBATCHES));
        let text = pipeline.step(inputs, targets, 1e-2).expect_err("the loss is not finite").to_string();
        assert!(text.contains("since an earlier step, whose update has ruined it"), "{text}");
        assert!(!text.contains("the parameters are still those"), "{text}");
    }
}

/// Layers with a mask that is not trained and has infinite numbers.
#[derive(Module, Debug)]
struct Masked {
    mask: Param<Tensor<1>>,
    layers: Mlp,
}

impl StageModule for Masked {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        self.layers.forward(input + self.mask.val().exp().unsqueeze(), context)
    }

    fn parameter_path(&self, local: &str) -> String {
        local
            .strip_prefix("layers.")
            .map_or_else(|| local.to_owned(), |layer| self.layers.parameter_path(layer))
    }
}

#[test]
fn an_infinite_number_in_a_parameter_that_is_not_trained_is_kept() {
    let scratch = folder();
    let make = |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let mask = Tensor::full([1], f32::NEG_INFINITY, &Device::flex().autodiff());
        let mask = Param::initialized(ParamId::new(), mask).set_require_grad(false);
        Ok(Stage::with_loss(Masked { mask, layers: Mlp::of_stage(index, 1) }, loss))
    };
    let config = PipelineConfig { optimizer: Some(adamw()), ..config() };
    let program = program("gpipe", 1, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(1), &config, make).expect("it starts");
    take_steps(&mut pipeline, 0..1);
    save(&mut pipeline, 1, scratch.path(), 1).expect("a mask may be infinite");
    let found: Vec<_> = newest(scratch.path()).not_finite().map(|(path, _)| path.to_owned()).collect();
    assert_eq!(found, ["mask"]);
}

#[test]
fn a_parameter_of_another_process_ends_the_checkpoint_at_once() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    ruin(&mut pipeline);
    let (mut first, mut second) = (state(&mut pipeline, 1), state(&mut pipeline, 1));
    first.ranks.clear();
    second.ranks.remove(0);
    let owned = CheckpointFolder::own(scratch.path()).expect("no other process owns it");
    let mut owner = CheckpointWriter::start(owned, 1, 2, DEADLINE).expect("a thread");
    let mut other = CheckpointWriter::join(scratch.path(), DEADLINE).expect("a thread");
    let began = std::time::Instant::now();
    other.save(second).and_then(|_| other.wait()).expect_err("it finds the parameter");
    let error = owner.save(first).and_then(|_| owner.wait()).expect_err("it is told");
    assert!(matches!(error, CheckpointError::NotFinite { step: 1, .. }), "{error}");
    assert!(began.elapsed() < DEADLINE);
}

/// Writes NaN and infinity over the first elements of a file's first tensor, and corrects the manifest, as a
/// program would that does not look.
fn ruin_file(checkpoint: &Path, numbers: &[f32]) {
    let path = checkpoint.join("rank-0000.safetensors");
    let mut bytes = fs::read(&path).expect("a file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let data = 8 + usize::try_from(header).expect("a length");
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes[data..data + numbers.len()].copy_from_slice(&numbers);
    fs::write(&path, &bytes).expect("a file");
    let mut manifest = Manifest::read(checkpoint).expect("a manifest");
    let file = &mut manifest.files[0];
    let text = fs::read_to_string(checkpoint.join("manifest.json")).expect("a manifest");
    let text = text.replace(&file.hash, blake3::hash(&bytes).to_hex().as_str());
    let (body, _) = text.rsplit_once(",\n  \"hash\"").expect("the manifest's own hash");
    let sealed = format!("{body},\n  \"hash\": \"{}\"\n}}\n", blake3::hash(body.as_bytes()).to_hex());
    fs::write(checkpoint.join("manifest.json"), sealed).expect("a file");
}

#[test]
fn a_checkpoint_that_exists_names_its_parameters() {
    let scratch = folder();
    let mut pipeline = launch("1f1b", 2, adamw());
    let path = save(&mut pipeline, 1, scratch.path(), 1).expect("it is saved");
    ruin_file(&path, &[f32::NAN, 1.0, f32::INFINITY, f32::NAN]);
    let checkpoint = Checkpoint::open(&path).expect("its hashes are right");
    let found: Vec<_> = checkpoint.not_finite().collect();
    assert!(matches!(found[..], [(_, NotFinite { nan: 2, infinite: 1 })]), "{found:?}");
    assert!(checkpoint.parameters().any(|parameter| parameter.path == found[0].0));
}
