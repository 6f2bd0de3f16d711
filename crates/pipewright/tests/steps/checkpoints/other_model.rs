//! Checkpoints that are restored into a model with other parameters, and frozen parameters in checkpoints.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor};
use pipewright::mesh::DataParallelMode;
use pipewright::nn::Linear;
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder, PipelineConfig};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright::transport::World;

use super::{MICROBATCHES, folder, newest, parameters, save, take_steps};
use crate::support::{WIDTH, config, loss, program, stage};

/// A linear layer, with or without an adapter.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    adapter: Option<Linear>,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let output = self.linear.forward(input.clone()).tanh();
        match &self.adapter {
            Some(adapter) => output + adapter.forward(input),
            None => output,
        }
    }
}

fn builder(has_adapters: bool, layers: usize) -> PipelineBuilder {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&Device::flex().autodiff()).into();
    let block = move |_| Block { linear: linear(), adapter: has_adapters.then(linear) };
    Pipeline::builder(Layers::new(layers, block))
        .ranks(2)
        .microbatches(MICROBATCHES)
        .loss(loss)
        .optimizer(AdamWConfig::new().init())
}

fn launch(has_adapters: bool, layers: usize) -> Pipeline {
    builder(has_adapters, layers).launch().expect("it starts")
}

fn words(paths: &[std::sync::Arc<str>]) -> Vec<&str> {
    paths.iter().map(|path| &**path).collect()
}

#[test]
fn what_the_checkpoint_and_the_model_do_not_share_is_named() {
    let folder = folder();
    let mut plain = launch(false, 3);
    take_steps(&mut plain, 0..2);
    save(&mut plain, 2, folder.path(), 1).expect("it is saved");
    let trained = parameters(&mut plain);

    let mut adapted = launch(true, 2);
    adapted.restore(&newest(folder.path())).expect_err("it has no adapters");
    let mut adapted = launch(true, 2);
    let unmatched = adapted.restore_matching(&newest(folder.path())).expect("parameters may be missing");
    let adapters = [
        "layers.0.adapter.bias",
        "layers.0.adapter.weight",
        "layers.1.adapter.bias",
        "layers.1.adapter.weight",
    ];
    assert_eq!(words(&unmatched.missing), adapters);
    let unused = unmatched.unused.expect("all ranks are in this process");
    assert_eq!(words(&unused), ["layers.2.linear.bias", "layers.2.linear.weight"]);
    for (path, bits) in parameters(&mut adapted).iter().filter(|(path, _)| path.contains("linear")) {
        assert!(trained.contains(&(path.clone(), bits.clone())), "{path} is restored");
    }
    take_steps(&mut adapted, 2..4);
}

#[test]
fn a_head_of_another_shape_is_still_an_error() {
    let folder = folder();
    let mut plain = launch(false, 2);
    save(&mut plain, 1, folder.path(), 1).expect("it is saved");
    let wide = |_| Block {
        linear: LinearConfig::new(WIDTH, WIDTH + 1).init(&Device::flex().autodiff()).into(),
        adapter: None,
    };
    let mut wide = Pipeline::builder(Layers::new(2, wide))
        .loss(loss)
        .optimizer(AdamWConfig::new().init())
        .launch()
        .expect("it starts");
    let error = wide.restore_matching(&newest(folder.path())).expect_err("another shape").to_string();
    assert!(error.contains("layers.0.linear"), "{error}");
}

#[test]
fn frozen_parameters_are_saved_and_stay_frozen() {
    for mode in [None, Some(DataParallelMode::Sharded)] {
        let launch = || {
            let builder = builder(true, 2);
            let builder = match mode {
                Some(mode) => builder.data_parallel(2).data_parallel_mode(mode),
                None => builder,
            };
            builder.launch().expect("it starts")
        };
        let folder = folder();
        let mut first = launch();
        first.freeze(|path| path.contains("linear")).expect("they are frozen");
        take_steps(&mut first, 0..2);
        let writers = if mode.is_some() { 4 } else { 2 };
        save_of(&mut first, folder.path(), writers);
        let checkpoint = newest(folder.path());
        assert_eq!(checkpoint.frozen().count(), 4, "{mode:?}");
        let mut resumed = launch();
        resumed.restore(&checkpoint).expect("it is restored");
        let before = parameters(&mut resumed);
        assert_eq!(take_steps(&mut resumed, 2..4), take_steps(&mut first, 2..4), "{mode:?}");
        let after = parameters(&mut resumed);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            assert_eq!(before == after, path.contains("linear"), "{path} {mode:?}");
        }
        assert_eq!(resumed.unfreeze(|_| true).expect("they are trained"), if mode.is_some() { 8 } else { 4 });
    }
}

/// Saves the state of `writers` ranks.
fn save_of(pipeline: &mut Pipeline, folder: &std::path::Path, writers: u32) {
    use pipewright::checkpoint::{CheckpointFolder, CheckpointWriter};
    let owned = CheckpointFolder::own(folder).expect("nobody else has it");
    let mut writer = CheckpointWriter::start(owned, 1, writers, super::DEADLINE).expect("a writer");
    writer.save(super::state(pipeline, 2)).expect("it is saved");
    writer.wait().expect("it is written");
}

/// Launches stages whose weights are the base, so that only biases are trained.
fn launch_on_base(schedule: &str, ranks: u32, config: &PipelineConfig) -> Pipeline {
    let program = program(schedule, ranks, MICROBATCHES);
    let stages = program.placement().stages();
    let make =
        move |index| stage(index, stages).map(|stage| stage.with_base(|path| path.ends_with("weight")));
    Pipeline::launch(program, World::local(ranks), config, make).expect("it starts")
}

#[test]
fn a_base_is_neither_trained_nor_stored() {
    for precision in [Precision::F32, Precision::Bf16] {
        let config = PipelineConfig { precision, ..config() };
        let mut whole = launch_on_base("zb-h1", 2, &config);
        let first = parameters(&mut whole);
        take_steps(&mut whole, 0..4);
        let trained = parameters(&mut whole);
        for ((path, before), (_, after)) in first.iter().zip(&trained) {
            assert_eq!(before == after, path.ends_with("weight"), "{path}");
        }
        let folder = folder();
        let mut pipeline = launch_on_base("1f1b", 2, &config);
        take_steps(&mut pipeline, 0..2);
        assert_eq!(pipeline.unfreeze(|_| true).expect("every rank answers"), 0, "the base stays frozen");
        save(&mut pipeline, 2, folder.path(), 1).expect("it is saved");
        let checkpoint = newest(folder.path());
        assert!(checkpoint.parameters().all(|stored| stored.path.ends_with("bias")));
        assert_eq!(checkpoint.frozen().count(), 0);
        let mut resumed = launch_on_base("zb-h1", 4, &config);
        assert!(resumed.restore_matching(&checkpoint).expect("it is restored").missing.is_empty());
        take_steps(&mut resumed, 2..4);
        assert_eq!(parameters(&mut resumed), trained);
    }
}

/// A base in half precision has as many bytes as its computing copy.
#[test]
fn a_base_is_held_in_the_precision_in_which_it_computes() {
    let types = |precision| {
        let mut pipeline = launch_on_base("1f1b", 2, &PipelineConfig { precision, ..config() });
        let all = pipeline.parameters().expect("every rank answers");
        let of = |ending: &str| {
            let own = all.iter().filter(|parameter| parameter.path.ends_with(ending));
            own.map(|parameter| parameter.data.dtype()).collect::<std::collections::HashSet<_>>()
        };
        [of("weight"), of("bias")]
    };
    assert_eq!(types(Precision::F32), [[DType::F32].into(), [DType::F32].into()]);
    assert_eq!(types(Precision::Bf16), [[DType::BF16].into(), [DType::F32].into()]);
}
