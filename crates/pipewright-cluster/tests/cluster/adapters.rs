//! Predictions for adapters: what is frozen has no gradients of weights, no optimizer, and no backward where
//! nothing needs it.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::layout::{Cut, Layout, Precision, Recompute, ShardedState};
use pipewright_cluster::memory::block_activations;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{Prediction, predict};
use pipewright_cluster::search::{Fixed, Request, SearchErrorKind, search};
use pipewright_cluster::setting::Setting;
use pipewright_shapes::model::{Division, Model};
use pipewright_shapes::operations::AttentionCount;
use pipewright_shapes::reader;
use pipewright_shapes::training::{AdaptedLayer, AdapterError, AdapterSizes};

use crate::data::run;

const SIZES: AdapterSizes = AdapterSizes { rank: 16, has_magnitudes: false, has_dropout: false };

fn llama() -> Model {
    reader::read(include_str!("llama_405b.json")).expect("a model").model
}

/// The layer of the output of attention, in these blocks.
fn outputs(model: &Model, blocks: std::ops::Range<usize>) -> Vec<(usize, AdaptedLayer)> {
    let (input, output) = (model.hidden, model.hidden);
    let layer = AdaptedLayer { input, output, division: Division::Rows, shares_input: false };
    blocks.map(|block| (block, layer)).collect()
}

fn adapted(blocks: std::ops::Range<usize>) -> Model {
    let model = llama();
    let layers = outputs(&model, blocks);
    model.with_adapters(SIZES, layers).expect("the blocks exist")
}

/// 1F1B on 7 ranks with 18 blocks each, and 8 ranks in each tensor group.
fn layout(sharding: ShardedState) -> Layout {
    let layout = run("llama3-70B", "H100 80").layout;
    Layout {
        gpus: 7 * 8,
        tensor: 8,
        pipeline: 7,
        chunks: 1,
        context: 1,
        microbatch: 1,
        batch: 16,
        sequence: 1024,
        sequence_parallel: false,
        recompute: Recompute::None,
        precision: Precision::Half,
        cut: Cut::Even,
        schedule: None,
        sharding,
        ..layout
    }
}

fn predicted(model: &Model, sharding: ShardedState) -> Prediction {
    let (machine, layout) = (by_name("h100").expect("a machine"), layout(sharding));
    let setting = Setting { model, layout: &layout, machine: &machine };
    predict(&setting, &mut Programs::default()).expect("a layout that fits")
}

#[test]
fn frozen_parameters_take_two_bytes_and_adapters_sixteen() {
    let (model, whole) = (adapted(0..126), llama());
    assert_eq!(model.trained_parameters(), 126 * 2 * 16 * 16384);
    assert_eq!(whole.trained_parameters(), whole.parameters());
    let memory = &predicted(&model, ShardedState::Nothing).memory[3];
    let before = &predicted(&whole, ShardedState::Nothing).memory[3];
    // The first matrix is divided over the tensor group, and the second one is whole on each rank.
    let own = 18.0 * 16.0 * (16384.0 / 8.0 + 16384.0);
    assert_eq!([memory.gradients, memory.optimizer], [4.0 * own, 8.0 * own]);
    assert_eq!(memory.parameters, before.parameters + 4.0 * own);
}

#[test]
fn stages_before_all_adapters_run_forward_only() {
    let (upper, all) = (adapted(90..126), adapted(0..126));
    let [few, many] = [&upper, &all].map(|model| predicted(model, ShardedState::Nothing));
    assert!(few.seconds < 0.9 * many.seconds, "{} {}", few.seconds, many.seconds);
    for rank in 0..5 {
        assert_eq!(few.memory[rank].activations, 0.0, "{rank}");
        assert_eq!(few.memory[rank].gradients + few.memory[rank].optimizer, 0.0, "{rank}");
    }
    assert!(few.memory[6].activations > 0.0);
    let operations = |model: &Model| model.operations_per_token(1024, AttentionCount::Causal);
    assert!(operations(&upper) < operations(&all));
    assert!(operations(&all) < 0.7 * operations(&llama()));
}

#[test]
fn adapters_take_less_time_than_the_whole_model() {
    let [whole, adapters] = [llama(), adapted(0..126)].map(|model| predicted(&model, ShardedState::Nothing));
    let ratio = adapters.seconds / whole.seconds;
    assert!((0.6..0.85).contains(&ratio), "{ratio}");
}

/// `r` numbers of the first matrix's result and a copy of the input, in single precision; with magnitudes
/// also the output.
#[test]
fn adapters_keep_their_inputs() {
    let kept = |model: &Model| block_activations(&model.blocks[0], model, &layout(ShardedState::Nothing));
    let (whole, model) = (llama(), adapted(0..1));
    assert_eq!(kept(&model) - kept(&whole), 1024.0 * 4.0 * (16.0 + 16384.0 / 8.0));
    let sizes = AdapterSizes { has_magnitudes: true, ..SIZES };
    let with_magnitudes = llama().with_adapters(sizes, outputs(&whole, 0..1)).expect("they exist");
    assert_eq!(kept(&with_magnitudes) - kept(&model), 1024.0 * 4.0 * 16384.0);
}

/// Without dropout, two adapters of the same input share its copy. With it, each keeps the input with dropped
/// elements, and the mask.
#[test]
fn with_dropout_each_adapter_keeps_its_input_and_a_mask() {
    let (whole, layout) = (llama(), Layout { tensor: 1, ..layout(ShardedState::Nothing) });
    let (input, output) = (whole.hidden, whole.hidden);
    let first = AdaptedLayer { input, output, division: Division::Columns, shares_input: false };
    let second = AdaptedLayer { shares_input: true, ..first };
    let kept = |has_dropout| {
        let sizes = AdapterSizes { has_dropout, ..SIZES };
        let model = llama().with_adapters(sizes, [(0, first), (0, second)]).expect("the block exists");
        let [adapted, before] =
            [&model, &whole].map(|model| block_activations(&model.blocks[0], model, &layout));
        adapted - before
    };
    assert_eq!(kept(false), 1024.0 * 4.0 * (2.0 * 16.0 + 16384.0));
    assert_eq!(kept(true), 1024.0 * 4.0 * 2.0 * (16.0 + 2.0 * 16384.0));
}

#[test]
fn a_search_with_dropout_has_no_tensor_groups() {
    let (machine, whole) = (by_name("h100").expect("a machine"), llama());
    let searched = |has_dropout, tensor| {
        let sizes = AdapterSizes { has_dropout, ..SIZES };
        let model = llama().with_adapters(sizes, outputs(&whole, 0..126)).expect("the blocks exist");
        let mut request = Request::new(model, machine.clone(), 64, 64, 1024, Precision::Half);
        request.fixed = Fixed { pipeline: Some(1), tensor, ..Fixed::default() };
        search(&request)
    };
    let found = searched(true, None).expect("a plan");
    assert!(found.plans.iter().all(|plan| plan.layout.tensor == 1));
    let found = searched(false, Some(8)).expect("a plan");
    assert!(found.plans.iter().all(|plan| plan.layout.tensor == 8));
    let error = searched(true, Some(8)).expect_err("each layer is divided");
    assert_eq!(
        error.to_string(),
        "tp = 8: `adapter.dropout` needs layers that one rank computes; leave tp out, or set `adapter.dropout` to 0"
    );
}

#[test]
fn a_search_stays_above_its_bound() {
    let machine = by_name("h100").expect("a machine");
    for blocks in [0..126, 100..126] {
        let mut request = Request::new(adapted(blocks), machine.clone(), 64, 64, 1024, Precision::Half);
        request.fixed = Fixed { tensor: Some(8), ..Fixed::default() };
        let found = search(&request).expect("a plan");
        assert!(found.plans.iter().all(|plan| plan.gap >= 0.0), "{:?}", found.plans[0].gap);
        assert!(found.plans[0].prediction.peak_memory() <= request.memory_limit());
    }
    // Eight nodes cannot train the whole model.
    let mut whole = Request::new(llama(), machine, 64, 64, 1024, Precision::Half);
    whole.fixed = Fixed { tensor: Some(8), ..Fixed::default() };
    assert!(matches!(search(&whole).expect_err("too large").kind, SearchErrorKind::Memory(_)));
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let refused =
        |layers: Vec<(usize, AdaptedLayer)>| llama().with_adapters(SIZES, layers).expect_err("refused");
    let model = llama();
    assert_eq!(refused(Vec::new()), AdapterError::NoLayer);
    assert_eq!(refused(outputs(&model, 126..127)), AdapterError::Block { block: 126, blocks: 126 });
    assert_eq!(refused(outputs(&model, 3..4).repeat(9)), AdapterError::Layers { block: 3 });
}
