//! Batches whose element types differ from the types with which the stages compute.

use burn::tensor::{DType, Device, Int, Tensor};
use pipewright::batch::Batch;
use pipewright::nn::cross_entropy;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::tensor::Precision;
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{self, Mlp, WIDTH, config, numbers, program};

const MICROBATCHES: u32 = 2;

fn rows(seed: u64, dtype: DType) -> Tensor<2> {
    Tensor::<2>::from_data(numbers(seed, [4, WIDTH]), &Device::flex()).cast(dtype)
}

fn launch(precision: Precision) -> Pipeline {
    support::launch(program("gpipe", 2, MICROBATCHES), &PipelineConfig { precision, ..config() })
}

fn losses(precision: Precision, x: DType, y: DType) -> Result<Vec<f64>, String> {
    let mut pipeline = launch(precision);
    let step = pipeline.step(rows(0, x), rows(1, y), 1e-2);
    step.map(|summary| summary.losses).map_err(|error| error.to_string())
}

#[test]
fn floats_are_converted_if_nothing_is_lost() {
    for half in [DType::F16, DType::BF16] {
        let found = losses(Precision::F32, half, half).expect("single precision has all its numbers");
        let mut pipeline = launch(Precision::F32);
        let rounded = |seed| rows(seed, half).cast(DType::F32);
        assert_eq!(pipeline.step(rounded(0), rounded(1), 1e-2).expect("a step").losses, found);
        losses(Precision::Bf16, half, half).expect("inputs are rounded after the conversion");
    }
}

#[test]
fn both_types_are_named_if_digits_would_be_lost() {
    let error = losses(Precision::F32, DType::F64, DType::F32).expect_err("digits are lost");
    let expected = "step 1: rank 0, stage 0, microbatch 0, action 0F0: input 0 has elements of type F64, and the stage \
                    computes with F32: a conversion would lose digits, so make it yourself with `cast(DType::F32)`";
    assert_eq!(error, expected);
    let mut pipeline = launch(Precision::F32);
    let error =
        pipeline.eval(rows(0, DType::F64), Some(rows(1, DType::F32))).map(drop).expect_err("digits are lost");
    assert!(error.to_string().contains("input 0 has elements of type F64"), "{error}");
}

#[test]
fn a_loss_gets_targets_with_more_digits_than_the_module() {
    let make = |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let module = Mlp::of_stage(index, 2);
        Ok(match index.get() {
            0 => Stage::new(module),
            _ => Stage::with_loss(module, |output: Tensor<2>, targets: Tensor<2>| {
                assert_eq!(targets.dtype(), DType::F64);
                (output.cast(DType::F64) - targets).powi_scalar(2).mean().cast(DType::F32)
            }),
        })
    };
    let program = program("gpipe", 2, MICROBATCHES);
    let mut pipeline = Pipeline::launch(program, World::local(2), &config(), make).expect("it starts");
    pipeline.step(rows(0, DType::F32), rows(1, DType::F64), 1e-2).expect("the loss converts the output");
}

#[test]
fn integers_are_converted_if_their_values_fit() {
    let step = |dtype: DType, id: i64| {
        let make = |index: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let module = Mlp::of_stage(index, 2);
            Ok(match index.get() {
                0 => Stage::new(module),
                _ => Stage::with_loss(module, |logits: Tensor<2>, targets: Tensor<1, Int>| {
                    // Burn compares integers of one type only.
                    let others = Tensor::<1, Int>::zeros(targets.dims(), &targets.device());
                    let _ = targets.clone().equal(others);
                    cross_entropy(logits, targets)
                }),
            })
        };
        let program = program("gpipe", 2, MICROBATCHES);
        let mut pipeline = Pipeline::launch(program, World::local(2), &config(), make).expect("it starts");
        let targets = Tensor::<1, Int>::from_data([0, 1, 2, id], (&Device::flex(), dtype));
        let batch = Batch::split(rows(0, DType::F32), targets, MICROBATCHES).expect("it splits");
        pipeline.step_batch(batch, 1e-2).map(|summary| summary.losses).map_err(|error| error.to_string())
    };
    let expected = step(DType::I64, 3).expect("a step");
    for dtype in [DType::I32, DType::U8, DType::U64] {
        assert_eq!(step(dtype, 3).as_ref(), Ok(&expected), "{dtype:?}");
    }
}

#[test]
fn a_gradient_has_the_type_of_its_input() {
    let mut pipeline = launch(Precision::F32);
    let batch = Batch::split(rows(0, DType::F16), rows(1, DType::F32), MICROBATCHES).expect("it splits");
    let summary = pipeline.step_batch(batch.keep_input_gradients(), 1e-2).expect("a step");
    assert_eq!(summary.input_gradient::<2>(0).expect("one input").dtype(), DType::F16);
}
