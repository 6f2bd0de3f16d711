//! Stages with several inputs and outputs of any shape and kind; evaluation without a tape.

use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor};
use pipewright::batch::merge;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{self, Mlp, ROWS, WIDTH, batch, config, program, stage};

/// The tensors of a boundary: hidden rows, a second float tensor, ids, a mask, and an unused float tensor.
type Edge = (Tensor<2>, Tensor<1>, Tensor<1, Int>, (Tensor<2, Bool>, Tensor<3>));

/// Layers that pass more tensors than the hidden rows.
#[derive(Module, Debug)]
struct Wide {
    layers: Vec<Mlp>,
}

impl StageModule for Wide {
    type Input = Edge;
    type Output = Edge;

    fn forward(&self, input: Edge, context: &StageContext) -> Edge {
        self.layers.iter().fold(input, |(hidden, scale, ids, (mask, unused)), layer| {
            assert_eq!(ids.dims(), [hidden.dims()[0]], "ids travel with their rows");
            let hidden = layer.forward(hidden, context);
            // The scale affects the loss through the rows and directly.
            let scaled = hidden.clone() * scale.clone().unsqueeze_dim::<2>(1);
            (hidden.mask_where(mask.clone(), scaled), scale * 1.01, ids, (mask, unused))
        })
    }

    fn parameter_path(&self, local: &str) -> String {
        let (place, inner) =
            local.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).expect("a layer's");
        self.layers[place.parse::<usize>().expect("a place")].parameter_path(inner)
    }
}

fn edge_loss(output: Edge, target: Tensor<2>) -> Tensor<1> {
    let (hidden, scale, ids, _) = output;
    let weights = (scale + ids.float()).unsqueeze_dim::<2>(1);
    (hidden - target).powf_scalar(2.0).mul(weights).mean()
}

fn wide(index: StageIndex, stages: u32) -> Result<Stage, std::convert::Infallible> {
    let count = support::LAYERS / stages as usize;
    let first = index.index() * count;
    let module = Wide { layers: (first..first + count).map(|layer| Mlp::new(layer, 1)).collect() };
    Ok(if index.get() + 1 == stages { Stage::with_loss(module, edge_loss) } else { Stage::new(module) })
}

fn edge(microbatches: u32) -> Edge {
    let device = Device::flex();
    let rows = ROWS * microbatches as usize;
    let ids = Tensor::<1, Int>::arange(0..rows as i64, &device);
    let mask = ids.clone().greater_elem(2).unsqueeze_dim::<2>(1).repeat_dim(1, WIDTH);
    let scale = ids.clone().float() * 0.01 + 0.9;
    (batch(0, microbatches), scale, ids, (mask, Tensor::zeros([rows, 2, 2], &device)))
}

fn losses(ranks: u32) -> Vec<(Vec<f64>, f64)> {
    let mut pipeline =
        Pipeline::launch(program("1f1b", ranks, 8), World::local(ranks), &config(), move |index| {
            wide(index, ranks)
        })
        .expect("the pipeline starts");
    let mut step = || {
        let report = pipeline.step(edge(8), batch(100, 8), 1e-2).expect("a step");
        (report.losses, report.gradient_norm)
    };
    vec![step(), step(), step()]
}

#[test]
fn many_tensors_of_every_kind_cross_every_boundary() {
    let expected = losses(1);
    assert_ne!(expected[0], expected[2], "it learns");
    for ranks in [2, 4, 8] {
        assert_eq!(losses(ranks), expected, "{ranks} ranks");
    }
}

#[test]
fn evaluation_returns_outputs_and_losses() {
    let microbatches = 4;
    let config = PipelineConfig { optimizer: None, ..config() };
    let evaluate = |ranks| {
        let program = program("forwardonly", ranks, microbatches);
        let mut pipeline =
            Pipeline::launch(program, World::local(ranks), &config, move |index| stage(index, ranks))
                .expect("the pipeline starts");
        let quiet = pipeline.eval(batch(0, microbatches), None::<()>).expect("it evaluates");
        assert!(quiet.losses.is_empty());
        let report =
            pipeline.eval(batch(0, microbatches), Some(batch(100, microbatches))).expect("it evaluates");
        let merged: Tensor<2> = unpack(merge(report.outputs).expect("they join")).expect("one tensor");
        (report.losses, merged.into_data())
    };
    let module = Mlp::new(0, support::LAYERS).valid();
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let expected = module.forward(batch(0, microbatches), &context).into_data();
    for ranks in [1, 2, 4] {
        let (losses, outputs) = evaluate(ranks);
        assert_eq!(losses.len(), microbatches as usize);
        outputs.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-6));
    }
}

#[test]
fn a_program_of_slices_is_refused() {
    let launched =
        Pipeline::launch(program("seq1f1b", 1, 2), World::local(1), &config(), |index| stage(index, 1));
    let error = launched.map(drop).expect_err("its stage does not run slices");
    assert_eq!(
        error.to_string(),
        "step 0: rank 0: the stage cannot be made: stage 0: its module cannot run microbatches in 2 slices: it does not say \
         that it can (`StageModule::refuses_slices`); use a schedule of whole microbatches, such as `1f1b`"
    );
}

#[test]
fn a_forward_only_program_does_not_train() {
    let config = PipelineConfig { optimizer: None, ..config() };
    let mut only =
        Pipeline::launch(program("forwardonly", 1, 2), World::local(1), &config, |index| stage(index, 1))
            .expect("the pipeline starts");
    let error = only.step(batch(0, 2), batch(100, 2), 1e-2).expect_err("it is forward-only");
    assert_eq!(
        error.to_string(),
        "the program is forward-only: call `eval`, or launch the pipeline with a program that trains"
    );
}

#[test]
fn packing_and_unpacking_keep_order_and_kind() {
    let values = pack(edge(2));
    assert_eq!(values.len(), 5);
    let (_, _, ids, _): Edge = unpack(values.clone()).expect("the same type");
    assert_eq!(ids.dims(), [2 * ROWS]);
    let error = unpack::<(Tensor<2>, Tensor<1>)>(values.clone()).expect_err("three are left over");
    assert!(error.to_string().starts_with("3 tensors left over after 2"), "{error}");
    let error = unpack::<(Tensor<2>, Tensor<1, Int>)>(values).expect_err("the second is a float");
    assert!(
        error.to_string().starts_with("expected a int tensor of rank 1, found a float tensor of shape"),
        "{error}"
    );
}
