//! All layers of `pipewright::nn` with parameters in one model: a split backward has the bits of a whole one, and
//! defers all gradients except those that the documents name.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::mesh::DataParallelMode::{Replicated, Sharded};
use pipewright::nn::{
    DepthwiseConvolution, Embedding, Expert, ExpertActivation, ExpertForm, GroupNormWeight, HeldMatrix,
    Linear, LowRank, Mamba2, MambaSizes, RmsNorm, Routing, TiedHead, adapted_product, add_bias, mix_experts,
};
use pipewright::pipeline::{Layers, Pipeline, PipelineBuilder};
use pipewright::stage::{StageContext, StageModule};
use pipewright_schedule::{Level, LowerConfig};

use crate::support::{loss, numbers};

const WIDTH: usize = 8;
const ROWS: usize = 24;
const MICROBATCHES: u32 = 4;
const LAYERS: usize = 4;
const SIZES: MambaSizes = MambaSizes {
    heads: 2,
    head_dim: 4,
    groups: 1,
    state: 2,
    taps: 2,
    limits: (0.0, f64::INFINITY),
    epsilon: 1e-5,
};

#[derive(Module, Debug)]
struct Every {
    embedding: Embedding,
    norm: RmsNorm,
    linear: Linear,
    mixer: Mamba2,
    router: Linear,
    experts: Vec<Expert>,
    /// Its last bias is shared by two ranks.
    expert: Expert,
    frozen: HeldMatrix,
    down: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    shift: Param<Tensor<1>>,
    head: TiedHead,
    last: Linear,
}

impl Every {
    fn new(layer: usize) -> Self {
        let mut seed = 100 * layer as u64;
        let mut next = move || {
            seed += 1;
            seed
        };
        let expert = |next: &mut dyn FnMut() -> u64, bias_share| Expert {
            adapter: None,
            gate_proj: Some(linear(next(), WIDTH, 6).into()),
            up_proj: linear(next(), WIDTH, 6).into(),
            down_proj: linear(next(), 6, WIDTH).into(),
            form: ExpertForm { activation: ExpertActivation::Usual, bias_share },
        };
        let convolved = SIZES.convolved();
        let mixer = Mamba2 {
            in_proj: linear(next(), WIDTH, SIZES.projected()),
            conv1d: DepthwiseConvolution {
                weight: parameter(next(), [convolved, 1, SIZES.taps]),
                bias: Some(parameter(next(), [convolved])),
            },
            dt_bias: parameter(next(), [SIZES.heads]),
            A_log: parameter(next(), [SIZES.heads]),
            D: parameter(next(), [SIZES.heads]),
            norm: GroupNormWeight { weight: parameter(next(), [SIZES.width()]) },
            out_proj: linear(next(), SIZES.width(), WIDTH),
            sizes: SIZES,
        };
        Self {
            embedding: Embedding { weight: parameter(next(), [5, WIDTH]) },
            norm: RmsNorm { weight: parameter(next(), [WIDTH]), epsilon: 1e-5 },
            linear: linear(next(), WIDTH, WIDTH),
            mixer,
            router: linear(next(), WIDTH, 3),
            experts: (0..3).map(|_| expert(&mut next, 1.0)).collect(),
            expert: expert(&mut next, 0.5),
            frozen: parameter(next(), [WIDTH, WIDTH]).set_require_grad(false).into(),
            down: parameter(next(), [WIDTH, 2]),
            up: parameter(next(), [2, WIDTH]),
            shift: parameter(next(), [WIDTH]),
            head: TiedHead { weight: parameter(next(), [7, WIDTH]) },
            last: linear(next(), 7, WIDTH),
        }
    }
}

fn parameter<const D: usize>(seed: u64, shape: [usize; D]) -> Param<Tensor<D>> {
    Param::from_data(numbers(seed, shape), &Device::flex().autodiff())
}

fn linear(seed: u64, inputs: usize, outputs: usize) -> Linear {
    let bias = Some(parameter(seed + 50, [outputs]));
    Linear { weight: parameter(seed, [inputs, outputs]), bias }
}

impl StageModule for Every {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let [rows, _] = x.dims();
        let ids: Vec<i64> = (0..rows).map(|row| (row * row % 5) as i64).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, rows]), &x.device());
        let x = x + self.embedding.forward(ids).reshape([rows, WIDTH]);
        let x = x.clone() + self.linear.forward(self.norm.forward(x)).tanh();
        let x = x.clone() + self.mixer.forward(x, rows, None).tanh();
        let routing = Routing::new(self.router.forward(x.clone()), 2, true);
        let x = x.clone() + mix_experts(x, &routing, &self.experts).tanh();
        let x = x.clone() + self.expert.forward(x).tanh();
        let adapter = LowRank { first: &self.down, second: &self.up, scale: 0.5 };
        let adapted = adapted_product(&x, &self.frozen, adapter).expect("it is one operation here");
        let x = x + add_bias(adapted, &self.shift).tanh();
        x.clone() + self.last.forward(self.head.forward(x)).tanh()
    }
}

fn builder(schedule: &str) -> PipelineBuilder {
    Pipeline::builder(Layers::new(LAYERS, Every::new))
        .ranks(2)
        .schedule(schedule)
        .microbatches(MICROBATCHES)
        .loss(loss)
        .optimizer(SgdConfig::new().init())
}

/// The losses of two steps, the parameters after them, and the parameters that the first step names.
type Trained = ((Vec<f64>, Vec<(String, TensorData)>), Vec<String>);

fn train(builder: PipelineBuilder) -> Trained {
    let mut pipeline = builder.launch().expect("it starts");
    let rows = |seed| Tensor::<2>::from_data(numbers(seed, [ROWS, WIDTH]), &Device::flex());
    let mut step = |step: u64| pipeline.step(rows(7000 + step), rows(8000 + step), 0.1).expect("a step");
    let (first, second) = (step(0), step(1));
    let undeferred = first.undeferred.iter().map(|parameter| parameter.path.to_string()).collect();
    let mut all: Vec<_> = pipeline.parameters().expect("every rank answers").into_iter().collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all.dedup_by(|a, b| a.path == b.path);
    let parameters = all.into_iter().map(|parameter| (parameter.path.to_string(), parameter.data));
    ((vec![first.loss(), second.loss()], parameters.collect()), undeferred)
}

#[test]
fn a_split_backward_has_the_bits_of_a_whole_one() {
    let (expected, none) = train(builder("1f1b").lower(LowerConfig::from(Level::Comms)));
    assert!(none.is_empty() && expected.0[0] != expected.0[1], "{none:?} {:?}", expected.0);
    for schedule in ["zb-h1", "zbvzerobubble"] {
        let (found, undeferred) = train(builder(schedule));
        assert_eq!(found.0, expected.0, "{schedule}");
        for ((path, found), (_, expected)) in found.1.iter().zip(&expected.1) {
            assert_eq!(found, expected, "{schedule}: {path}");
        }
        // By-products of the backward of the scan and its norm.
        let of_scan = ["dt_bias", "A_log", "D", "norm.weight"];
        let paths = (0..LAYERS).flat_map(|layer| of_scan.map(|name| format!("layers.{layer}.mixer.{name}")));
        let mut sorted = undeferred;
        sorted.sort();
        let mut paths: Vec<_> = paths.collect();
        paths.sort();
        assert_eq!(sorted, paths, "{schedule}");
    }
}

#[test]
fn sharded_stages_have_the_bits_of_whole_ones() {
    let replicas = || builder("zb-h1").data_parallel(2).lower(LowerConfig::from(Level::Full));
    let whole = train(replicas().data_parallel_mode(Replicated));
    assert_eq!(train(replicas().data_parallel_mode(Sharded)), whole);
}
