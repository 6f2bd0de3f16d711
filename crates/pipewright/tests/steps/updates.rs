//! From gradients to parameters: groups with optimizers and learning rates of their own, groups that are
//! clipped by themselves, and gradient hooks. Each is compared with plain Burn, or with the formula.

use std::sync::{Arc, Mutex};

use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Gradients, Tensor};
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::{ClipGroup, OptimizerGroup, ParameterGradient};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

use crate::support::{
    self, Float, LAYERS, Mlp, Parameters, WIDTH, assert_close, batch, config, floats, launch, loss,
    parameters, program,
};

const MICROBATCHES: u32 = 4;
const RATE: f64 = 0.05;

fn sgd() -> PipelineConfig {
    PipelineConfig { optimizer: Some(SgdConfig::new().init()), clip_norm: None, ..config() }
}

/// Takes steps and returns the parameters after them.
fn trained(program: ValidatedProgram, config: &PipelineConfig, steps: u64) -> Parameters {
    let microbatches = program.microbatches() * config.data_parallel;
    let mut pipeline = launch(program, config);
    for step in 0..steps {
        pipeline.step(batch(step, microbatches), batch(100 + step, microbatches), RATE).expect("a step");
    }
    parameters(&mut pipeline)
}

fn read(module: &Mlp, gradients: Option<&Gradients>) -> Parameters {
    let floats = floats(module, gradients).into_iter();
    let of = |float: Float| if gradients.is_some() { float.gradient } else { float.values };
    floats.map(|(path, float)| (path, of(float))).collect()
}

/// The gradients of a step of the whole model on one tape.
fn gradients(module: &Mlp, step: u64, microbatches: u32) -> Gradients {
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let output = module.forward(batch(step, microbatches).autodiff(), &context);
    loss(output, batch(100 + step, microbatches).autodiff()).backward()
}

/// The path, the stage and the elements of a gradient.
type Seen = (String, u32, Vec<f32>);

/// One step of gradient descent from the initial parameters; `change` makes the gradient of a path.
fn descended(change: impl Fn(&str, &[f32]) -> Vec<f32>) -> Parameters {
    let module = Mlp::new(0, LAYERS);
    let gradients = read(&module, Some(&gradients(&module, 0, MICROBATCHES)));
    let mut values = read(&module, None);
    for (path, values) in &mut values {
        let gradient = change(path, &gradients[path]);
        values.iter_mut().zip(gradient).for_each(|(value, gradient)| *value -= RATE as f32 * gradient);
    }
    values
}

const CUTS: [(&str, u32); 4] = [("gpipe", 1), ("1f1b", 4), ("zbvzerobubble", 2), ("zb-h1", 4)];

#[test]
fn groups_have_their_own_optimizer_rate_and_decay() {
    const STEPS: u64 = 3;
    let momentum = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).build();
    let biases = AdamWConfig::new().with_weight_decay(0.0);
    let config = PipelineConfig {
        clip_norm: None,
        optimizer_groups: vec![
            OptimizerGroup::new(|path| path.ends_with("bias"), biases.build()).rate(0.25),
            // The last group counts for the bias of layer 3.
            OptimizerGroup::new(|path| path.starts_with("layers.3."), momentum()),
            OptimizerGroup::new(|path| path == "layers.6.weight", AdamWConfig::new().build())
                .clip(GradientClipping::Value(1e-4)),
        ],
        ..config()
    };

    let group = |pattern: &str| ParamGroup::from_regex(pattern).expect("a pattern");
    let (bias, third, sixth) = ("bias$", "^layers\\.3\\.", "^layers\\.6\\.weight$");
    let mut optimizer: ModuleOptimizer = support::optimizer()
        .with_group(group(bias), biases.build(), None)
        .with_group(group(third), momentum(), None)
        .with_group(group(sixth), AdamWConfig::new().build(), Some(GradientClipping::Value(1e-4)));
    let rates =
        ModuleLrScheduler::new(RATE).with_group(group(bias), RATE * 0.25).with_group(group(third), RATE);
    let mut module = Mlp::new(0, LAYERS);
    for step in 0..STEPS {
        let gradients = GradientsParams::from_grads(gradients(&module, step, MICROBATCHES), &module);
        module = optimizer.step(rates.clone().step(), module, gradients);
    }
    let expected = read(&module, None);

    let [first, others @ ..] = CUTS.map(|(schedule, ranks)| {
        let found = trained(program(schedule, ranks, MICROBATCHES), &config, STEPS);
        assert_close(&found, &expected, 3e-6, schedule);
        found
    });
    assert!(others.iter().all(|found| *found == first), "the cut changes no bit");
    let plain = trained(
        program("1f1b", 4, MICROBATCHES),
        &PipelineConfig { clip_norm: None, ..support::config() },
        STEPS,
    );
    let differ = first.iter().filter(|(path, values)| plain[*path] != **values).count();
    assert_eq!(differ, 2 * LAYERS, "groups change the parameters of other layers through the loss");
}

fn norm<'a>(gradients: impl IntoIterator<Item = &'a Vec<f32>>) -> f64 {
    gradients.into_iter().flatten().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

#[test]
fn groups_are_clipped_by_their_own_norm_over_all_ranks() {
    let module = Mlp::new(0, LAYERS);
    let gradients = read(&module, Some(&gradients(&module, 0, MICROBATCHES)));
    let is_bias = |path: &str| path.ends_with("bias");
    let is_early = |path: &str| path.starts_with("layers.0.") || path.starts_with("layers.1.");
    let of =
        |part: &dyn Fn(&str) -> bool| norm(gradients.iter().filter(|(path, _)| part(path)).map(|(_, g)| g));
    let (biases, early) = (of(&|path| is_bias(path) && !is_early(path)), of(&is_early));
    let rest = of(&|path| !is_bias(path) && !is_early(path));
    // The first and the last limit are below the norms, the one between is above.
    let (rest_limit, biases_limit, early_limit) = (rest / 3.0, biases * 2.0, early / 5.0);
    let config = PipelineConfig {
        clip_norm: Some(rest_limit),
        clip_groups: vec![ClipGroup::new(is_bias, biases_limit), ClipGroup::new(is_early, early_limit)],
        ..sgd()
    };
    let expected = descended(|path, gradient| {
        let factor = match (is_early(path), is_bias(path)) {
            (true, _) => early_limit / (early + 1e-6),
            (false, true) => 1.0,
            (false, false) => rest_limit / (rest + 1e-6),
        };
        gradient.iter().map(|x| x * factor as f32).collect()
    });
    for (schedule, ranks) in CUTS {
        let mut pipeline = launch(program(schedule, ranks, MICROBATCHES), &config);
        let inputs = (batch(0, MICROBATCHES), batch(100, MICROBATCHES));
        let summary = pipeline.step(inputs.0, inputs.1, RATE).expect("a step");
        let whole = norm(gradients.values());
        assert!((summary.gradient_norm - whole).abs() < 1e-5 * whole, "{} {whole}", summary.gradient_norm);
        assert_close(&parameters(&mut pipeline), &expected, 3e-6, schedule);
    }
}

#[test]
fn a_hook_gets_the_mean_gradient_of_each_parameter_once() {
    let module = Mlp::new(0, LAYERS);
    let expected = read(&module, Some(&gradients(&module, 0, MICROBATCHES)));
    for (schedule, ranks) in CUTS {
        let program = program(schedule, ranks, MICROBATCHES);
        let stages = program.placement().stages();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let sink = seen.clone();
        let hook = move |gradient: &mut ParameterGradient<'_>| {
            let values: Vec<f32> = match gradient.shape().len() {
                2 => gradient.tensor::<2>().expect("a matrix").into_data().iter().collect(),
                _ => gradient.tensor::<1>().expect("a bias").into_data().iter().collect(),
            };
            assert!(gradient.tensor::<3>().is_err(), "it has not three dimensions");
            let entry = (gradient.path().to_owned(), gradient.stage().get(), values);
            sink.lock().expect("no panic").push(entry);
        };
        let found = trained(program, &PipelineConfig { gradient_hook: Some(Arc::new(hook)), ..sgd() }, 1);
        assert_close(&found, &descended(|_, gradient| gradient.to_vec()), 3e-6, "a hook that only reads");
        let mut seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        seen.sort_by(|a, b| a.0.cmp(&b.0));
        for (path, stage, _) in &seen {
            let layer: u32 = path.split('.').nth(1).and_then(|place| place.parse().ok()).expect("a layer");
            assert_eq!(*stage, layer * stages / LAYERS as u32, "{schedule}: {path}");
        }
        assert_eq!(seen.len(), expected.len(), "{schedule}");
        let seen = seen.into_iter().map(|(path, _, values)| (path, values)).collect();
        assert_close(&seen, &expected, 3e-6, schedule);
    }
}

fn clamped(gradient: &mut ParameterGradient<'_>) {
    if gradient.path().ends_with("weight") {
        gradient.map(|flat| flat.clamp(-1e-3, 1e-3));
    }
}

#[test]
fn a_hook_changes_gradients_before_the_norm() {
    let expected = descended(|path, gradient| {
        if path.ends_with("weight") {
            gradient.iter().map(|x| x.clamp(-1e-3, 1e-3)).collect()
        } else {
            gradient.to_vec()
        }
    });
    let config = PipelineConfig { gradient_hook: Some(Arc::new(clamped)), ..sgd() };
    for (schedule, ranks) in CUTS {
        assert_close(&trained(program(schedule, ranks, MICROBATCHES), &config, 1), &expected, 3e-6, schedule);
    }
    let mut pipeline = launch(program("1f1b", 2, MICROBATCHES), &config);
    let summary = pipeline.step(batch(0, MICROBATCHES), batch(100, MICROBATCHES), 0.0).expect("a step");
    let largest = (LAYERS * WIDTH * WIDTH) as f64 * 1e-6;
    let module = Mlp::new(0, LAYERS);
    let plain = read(&module, Some(&gradients(&module, 0, MICROBATCHES)));
    let biases = norm(plain.iter().filter(|(path, _)| path.ends_with("bias")).map(|(_, g)| g));
    assert!(summary.gradient_norm <= (largest + biases * biases).sqrt() + 1e-6);
    assert!(summary.gradient_norm < 0.9 * norm(plain.values()));
}

#[test]
fn replicas_and_shards_change_and_clip_the_same() {
    let configured = |mode| PipelineConfig {
        data_parallel: 2,
        data_parallel_mode: mode,
        gradient_hook: Some(Arc::new(clamped)),
        clip_groups: vec![ClipGroup::new(|path| path.ends_with("bias"), 1e-3)],
        optimizer_groups: vec![
            OptimizerGroup::new(|path| path.ends_with("bias"), SgdConfig::new().build()).rate(0.5),
        ],
        ..config()
    };
    let run = |mode| trained(program("1f1b", 2, MICROBATCHES), &configured(mode), 3);
    assert_eq!(run(DataParallelMode::Sharded), run(DataParallelMode::Replicated));
}

#[test]
fn a_hook_that_fails_changes_no_parameter() {
    let before = parameters(&mut launch(program("1f1b", 2, MICROBATCHES), &sgd()));
    let check = |hook: fn(&mut ParameterGradient<'_>), words: &[&str]| {
        let config = PipelineConfig { gradient_hook: Some(Arc::new(hook)), ..sgd() };
        let mut pipeline = launch(program("1f1b", 2, MICROBATCHES), &config);
        for _ in 0..2 {
            let step = pipeline.step(batch(0, MICROBATCHES), batch(100, MICROBATCHES), RATE);
            let error = step.expect_err("the hook fails").to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert_eq!(parameters(&mut pipeline), before);
    };
    check(
        |gradient| {
            if gradient.path() == "layers.5.bias" {
                gradient.map(|flat| flat.narrow(0, 0, 2));
            }
        },
        &["layers.5.bias", "6 elements", "[2]"],
    );
    check(
        |gradient| assert_ne!(gradient.path(), "layers.2.weight", "a parameter that is not liked"),
        &["the gradient hook panicked at `layers.2.weight`: ", "not liked"],
    );
}

#[test]
fn a_hook_does_not_hide_that_a_gradient_is_not_finite() {
    // The slope of the root at 0 is infinite, and the loss is 0.
    let steep = |output: Tensor<2>, _: Tensor<2>| (output.clone() - output.detach()).sqrt().mean();
    let make = move |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Mlp::of_stage(index, 2);
        Ok(if index.get() == 1 { Stage::with_loss(module, steep) } else { Stage::new(module) })
    };
    let zero = |gradient: &mut ParameterGradient<'_>| gradient.map(|flat| flat.zeros_like());
    let config = PipelineConfig { gradient_hook: Some(Arc::new(zero)), ..sgd() };
    let program = program("1f1b", 2, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(2), &config, make).expect("it starts");
    let before = parameters(&mut pipeline);
    let error = pipeline.step(batch(0, MICROBATCHES), batch(100, MICROBATCHES), RATE);
    let error = error.expect_err("gradients are infinite").to_string();
    assert!(error.contains("the gradient of `layers.0.bias` is not finite"), "{error}");
    assert_eq!(parameters(&mut pipeline), before);
}
