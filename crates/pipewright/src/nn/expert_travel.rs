//! Tests of mixtures whose experts several replicas hold together: every number is the one that a replica with
//! all experts computes.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData};

use super::check::{numbers, on_replicas};
use super::deferred::{Deferred, WeightTask};
use super::expert::{Expert, ExpertForm};
use super::expert_parallel::ExpertParallel;
use super::experts::mix_held;
use super::held_matrix::HeldLinear;
use super::linear::Linear;

const WIDTH: usize = 6;
/// Not a multiple of the numbers that an instruction computes at once.
const INNER: usize = 5;
const EXPERTS: usize = 8;

/// A case of a test.
#[derive(Clone, Copy)]
struct Case {
    tokens: usize,
    /// The experts of a token of a replica.
    choose: fn(u32, usize) -> [usize; 2],
    has_gate: bool,
    dtype: DType,
}

/// The numbers that a replica computes.
#[derive(Debug, PartialEq)]
struct Numbers {
    y: TensorData,
    /// The gradients of the tokens and of the weights of their experts.
    gradients: [TensorData; 2],
    /// The operands of the weight gradients, by expert, matrix of the expert, and source.
    products: HashMap<(usize, usize, usize), [TensorData; 2]>,
}

fn id_of(layer: &HeldLinear) -> ParamId {
    layer.weight.as_ref().expect("it is not quantised").id
}

/// Computes a mixture on a replica whose place in its group is `replicas`; `replica` numbers its tokens.
fn run(case: Case, replica: u32, replicas: &ExpertParallel) -> Numbers {
    let Case { tokens, choose, has_gate, dtype } = case;
    let linear = |shape: [usize; 2], scale: usize| {
        let weight = numbers(shape, 0.3 + scale as f32 / 10.0).cast(dtype);
        Linear { weight: Param::from_tensor(weight.autodiff()), bias: None }
    };
    let expert = |index: usize| Expert {
        gate_proj: has_gate.then(|| linear([WIDTH, INNER], 3 * index).into()),
        up_proj: linear([WIDTH, INNER], 3 * index + 1).into(),
        down_proj: linear([INNER, WIDTH], 3 * index + 2).into(),
        adapter: None,
        form: ExpertForm::default(),
    };
    let held = replicas.experts(EXPERTS);
    let experts: Vec<_> = (0..EXPERTS).map(|index| held.contains(&index).then(|| expert(index))).collect();
    let matrices = experts.iter().enumerate().flat_map(|(index, expert)| {
        let layers = expert.iter().flat_map(Expert::layers).enumerate();
        layers.map(move |(layer, linear)| (id_of(linear), (index, layer)))
    });
    let matrices: HashMap<ParamId, (usize, usize)> = matrices.collect();
    let leaf = |shape, scale| numbers::<2>(shape, scale).cast(dtype).autodiff().require_grad();
    let x = leaf([tokens, WIDTH], 1.0 + replica as f32 / 7.0);
    let weights = leaf([tokens, 2], 0.8 - replica as f32 / 9.0);
    let chosen: Vec<usize> = (0..tokens).flat_map(|token| choose(replica, token)).collect();
    let deferred = Deferred::new(Arc::new(matrices.keys().copied().collect()));
    let y = deferred.collect(|| mix_held(x.clone(), weights.clone(), &chosen, &experts, replicas));
    let upstream = (numbers(y.dims(), 1.0 + replica as f32) + 0.3).cast(dtype).autodiff();
    let gradients = (y.clone() * upstream).sum().backward();
    let gradient = |leaf: &Tensor<2>| leaf.grad(&gradients).expect("a gradient").into_data();
    let mut products = HashMap::new();
    for task in deferred.take() {
        let WeightTask::Product { weight, source, x, gradient } = task else { panic!("{task:?}") };
        let (expert, layer) = matrices[&weight];
        let former = products.insert((expert, layer, source), [x.into_data(), gradient.into_data()]);
        assert!(former.is_none(), "one product for each source");
    }
    Numbers { gradients: [&x, &weights].map(gradient), y: y.into_data(), products }
}

/// Checks that groups of 2 and 4 replicas compute the numbers of replicas that hold all experts.
fn check(case: Case) {
    for of in [2, 4] {
        let alone: Vec<Numbers> =
            (0..of).map(|replica| run(case, replica, &ExpertParallel::default())).collect();
        let found = on_replicas(of, |replicas| run(case, replicas.rank().index, &replicas));
        for (replica, found) in found.iter().enumerate() {
            assert_eq!(found.y, alone[replica].y, "the results of replica {replica} of {of}");
            assert_eq!(
                found.gradients, alone[replica].gradients,
                "the gradients of replica {replica} of {of}"
            );
            let layers = if case.has_gate { 3 } else { 2 };
            assert_eq!(found.products.len(), EXPERTS * layers, "all sources of the own experts");
            for ((expert, layer, source), product) in &found.products {
                let expected = &alone[*source].products[&(*expert, *layer, 0)];
                assert_eq!(product, expected, "matrix {layer} of expert {expert}, from replica {source}");
            }
        }
    }
}

fn spread(replica: u32, token: usize) -> [usize; 2] {
    let first = (7 * token + 3 * replica as usize) % EXPERTS;
    [first, (first + 1 + token % 3) % EXPERTS]
}

#[test]
fn replicas_that_hold_experts_together_compute_what_each_would_alone() {
    for (has_gate, dtype) in
        [(true, DType::F32), (false, DType::F32), (true, DType::BF16), (false, DType::F16)]
    {
        for tokens in [1, 9, 40] {
            check(Case { tokens, choose: spread, has_gate, dtype });
        }
    }
}

#[test]
fn all_tokens_may_choose_experts_of_one_replica() {
    let choose = |_, _| [5, 4];
    check(Case { tokens: 13, choose, has_gate: true, dtype: DType::F32 });
    // The tokens of some replicas choose the experts of others.
    let choose = |replica, _| if replica == 0 { [0, 1] } else { [7, 0] };
    check(Case { tokens: 6, choose, has_gate: false, dtype: DType::F32 });
}

/// The replicas without trained parameters take part in the backward of the others.
#[test]
fn the_experts_of_one_replica_may_be_trained_alone() {
    let products = on_replicas(2, |replicas| {
        let linear = |shape: [usize; 2]| Linear {
            weight: Param::from_tensor(numbers(shape, 0.5).autodiff()),
            bias: None,
        };
        let expert = || Expert {
            gate_proj: None,
            up_proj: linear([WIDTH, INNER]).into(),
            down_proj: linear([INNER, WIDTH]).into(),
            adapter: None,
            form: ExpertForm::default(),
        };
        let is_trained = replicas.rank().index == 1;
        let own = if is_trained { expert() } else { expert().no_grad() };
        let ids = own.layers().into_iter().map(id_of).collect();
        let mut experts = vec![None, None];
        experts[replicas.rank().index as usize] = Some(own);
        let constant = |shape| numbers::<2>(shape, 1.0).autodiff();
        let deferred = Deferred::new(Arc::new(ids));
        let y = deferred
            .collect(|| mix_held(constant([4, WIDTH]), constant([4, 1]), &[0, 1, 1, 0], &experts, &replicas));
        assert!(y.is_tracked());
        y.sum().backward();
        deferred.take().len()
    });
    assert_eq!(products, [0, 4], "two matrices, and the tokens of two replicas");
}
