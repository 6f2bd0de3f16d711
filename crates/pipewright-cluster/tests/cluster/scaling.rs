//! How costs and memory grow with the sizes of groups, by their formulas.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::collective::{Group, places_reached};
use pipewright_cluster::implementation::Dispatcher::{AllToAll, DeepEp, HybridEp};
use pipewright_cluster::implementation::{Graphs, Optimizer};
use pipewright_cluster::layout::{Cut, Layout, Precision, ShardedState};
use pipewright_cluster::machine::{Machine, Switch};
use pipewright_cluster::memory::{
    Parameters, block_activations, block_parameters, state, whole_block_activations,
};
use pipewright_cluster::product::Product;
use pipewright_cluster::published::Run;
use pipewright_cluster::setting::Setting;
use pipewright_cluster::stage_time::StageTime;
use pipewright_shapes::model::{Delta, Dense, Experts, FeedForward, Mamba2, Mixer, StateDecay};

use crate::data::{on, predicted, run};

const EXPERTS: Experts = Experts {
    count: 64,
    per_token: 4,
    expert: Dense { inner: 2048, gated: true },
    shared_inner: 0,
    groups: 1,
    groups_per_token: 1,
};

/// A run on 64 GPUs whose blocks have experts.
fn with_experts(layout: impl Fn(&mut Layout)) -> Run {
    let mut run = run("llama3-70B", "H100 80");
    run.model.blocks.iter_mut().for_each(|block| block.feed_forward = FeedForward::Experts(EXPERTS));
    (run.layout.tensor, run.layout.pipeline, run.layout.chunks) = (1, 1, 1);
    (run.layout.expert_tensor, run.layout.sequence_parallel) = (1, false);
    run.layout.implementation.expert_load = 100;
    layout(&mut run.layout);
    run.layout.check(&run.model).expect("a layout that fits");
    run
}

fn block(run: &Run) -> StageTime {
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
    setting.block(&run.model.blocks[0])
}

fn near(one: f64, other: f64) {
    assert!((one / other - 1.0).abs() < 1e-9, "{one} and {other}");
}

/// The H100 with links without latency, at their full bandwidth.
fn ideal() -> Machine {
    let mut machine = by_name("h100").expect("a machine");
    (machine.node_latency, machine.network_latency, machine.constants.link) = (0.0, 0.0, 1.0);
    machine
}

/// Of 64 heads of queries, 8 ranks have 8 each. With 2 heads of keys and values, each rank has one of them, as
/// with 8, and with 16, each has two.
#[test]
fn a_rank_has_a_head_of_keys_and_values_at_least() {
    let sizes = |key_value_heads: u64| {
        let mut run = run("llama3-70B", "H100 80");
        (run.layout.tensor, run.layout.expert_tensor, run.layout.gpus) = (8, 8, 128);
        for block in &mut run.model.blocks {
            let Mixer::Attention(attention) = &mut block.mixer else { panic!("attention") };
            attention.key_value_heads = key_value_heads;
        }
        let (block_of_run, layout) = (&run.model.blocks[0], &run.layout);
        let parameters = block_parameters(block_of_run, &run.model, layout).total();
        (block(&run), parameters, block_activations(block_of_run, &run.model, layout))
    };
    assert_eq!(sizes(2), sizes(8));
    let (few, more) = (sizes(8), sizes(16));
    assert_eq!(more.1 - few.1, 2.0 * 128.0 * 8192.0);
    assert!(more.2 > few.2 && more.0.forward.products > few.0.forward.products);
}

#[test]
fn a_rank_has_a_group_of_mamba_at_least() {
    let sizes = |groups: u64| {
        let mut run = run("llama3-70B", "H100 80");
        (run.layout.tensor, run.layout.expert_tensor, run.layout.gpus) = (8, 8, 128);
        let mamba = Mamba2 { heads: 256, head_size: 64, state: 128, groups, convolution: 4, chunk: 256 };
        run.model.blocks.iter_mut().for_each(|block| block.mixer = Mixer::Mamba2(mamba));
        (block(&run), block_parameters(&run.model.blocks[0], &run.model, &run.layout))
    };
    assert_eq!(sizes(1), sizes(8));
    assert_ne!(sizes(8), sizes(16));
}

#[test]
fn an_all_to_all_sends_the_share_of_each_other_rank() {
    let machine = ideal();
    let inside = Group { ranks: 8, stride: 1 };
    near(inside.all_to_all(&machine, 8e9), 7e9 / 450e9);
    // Of 16 ranks in two nodes, 8 are reached through the network.
    let outside = Group { ranks: 16, stride: 1 };
    near(outside.all_to_all(&machine, 16e9), 8e9 / 50e9);
}

/// Experts of which a token uses `per_token`, from `groups_per_token` of their groups.
fn routed(per_token: u64, groups: u64, groups_per_token: u64) -> Experts {
    let expert = Dense { inner: 2048, gated: true };
    Experts { count: 256, per_token, expert, shared_inner: 0, groups, groups_per_token }
}

/// Of 32 ranks in four nodes, a token with two experts reaches 4 (1 - (3/4)^2) = 1.75 nodes.
#[test]
fn tokens_are_sent_once_to_each_node() {
    let machine = ideal();
    let group = Group { ranks: 32, stride: 1 };
    let send =
        |group: Group, copies, dispatcher| group.dispatch(&machine, 1e9, &routed(copies, 1, 1), dispatcher);
    near(send(group, 2, DeepEp), 1e9 * 1.75 * 0.75 / 50e9);
    assert!(send(group, 8, DeepEp) < group.all_to_all(&machine, 8e9));
    let inside = Group { ranks: 8, stride: 1 };
    near(send(inside, 2, AllToAll), inside.all_to_all(&machine, 2e9));
    // Eight experts are on 8 (1 - (7/8)^8) = 5.25 of eight ranks. Each gets the token once.
    let ranks = 8.0 * (1.0 - (7.0_f64 / 8.0).powi(8));
    near(send(inside, 8, HybridEp), 1e9 * ranks * 7.0 / 8.0 / 450e9);
}

/// DeepSeek-V3 chooses 4 of 8 groups, and 8 experts from these.
#[test]
fn groups_of_experts_limit_the_nodes_of_a_token() {
    let check = |groups_per_token: u64, places: f64, expected: f64| {
        let reached = places_reached(&routed(8, 8, groups_per_token), places);
        assert!((reached - expected).abs() < 0.005, "{groups_per_token} groups, {places} nodes: {reached}");
    };
    check(8, 8.0, 5.25);
    check(4, 8.0, 3.60);
    check(1, 8.0, 1.0);
    // Two groups on each of four nodes: a node has one or two of the chosen groups, or none.
    check(4, 4.0, 4.0 * (4.0 / 7.0 * (1.0 - 0.75_f64.powi(8)) + 3.0 / 14.0 * (1.0 - 0.5_f64.powi(8))));
    // A group on two nodes: eight candidates.
    check(4, 16.0, 8.0 * (1.0 - (7.0_f64 / 8.0).powi(8)));
    check(4, 1.0, 1.0);
}

#[test]
fn tokens_travel_once_for_each_of_their_experts_in_a_node() {
    let mut run = with_experts(|layout| layout.expert = 8);
    (run.machine, run.layout.implementation.dispatcher) = (ideal(), AllToAll);
    let bytes = 2.0 * run.layout.tokens() * run.model.hidden as f64 * 4.0;
    // To the experts and back.
    near(block(&run).forward.experts, 2.0 * bytes * 7.0 / 8.0 / 450e9);
    let mut twice = run.clone();
    twice.model.blocks.iter_mut().for_each(|block| {
        block.feed_forward = FeedForward::Experts(Experts { per_token: 8, ..EXPERTS });
    });
    near(block(&twice).forward.experts, 2.0 * block(&run).forward.experts);
}

#[test]
fn a_ring_is_fastest_for_large_tensors_and_a_tree_for_small_ones() {
    let machine = Machine { node_switch: Switch::None, ..by_name("h100").expect("a machine") };
    let group = Group { ranks: 512, stride: 1 };
    let (hop, bandwidth) = (machine.network_latency, group.bandwidth(&machine));
    let transfer = |bytes: f64| bytes * 511.0 / 512.0 / bandwidth;
    near(group.gather(&machine, 1e12), 511.0 * hop + transfer(1e12));
    near(group.gather(&machine, 1e6), 9.0 * hop + transfer(1e6) / 0.92);
    near(group.all_reduce(&machine, 1e6), 2.0 * group.gather(&machine, 1e6));
}

/// The MI300X has 7 links of 64 GB/s, one to each other GPU of its node.
#[test]
fn few_ranks_of_a_mesh_use_few_links() {
    let mut machine = by_name("mi300x").expect("a machine");
    (machine.node_latency, machine.network_latency, machine.constants.link) = (0.0, 0.0, 1.0);
    for (ranks, links) in [(2, 1.0), (4, 3.0), (8, 7.0)] {
        let group = Group { ranks, stride: 1 };
        let count = f64::from(ranks);
        near(group.bandwidth(&machine), links * 64e9);
        near(group.gather(&machine, 8e9), 8e9 * (count - 1.0) / count / (links * 64e9));
        near(group.all_to_all(&machine, 8e9), 8e9 / count / 64e9);
        near(group.ring_exchange(&machine, 8e9, 1.0), 8e9 / 64e9);
    }
    // Eight ranks in each of two nodes, and one in each of eight.
    near(Group { ranks: 16, stride: 1 }.bandwidth(&machine), 400e9);
    near(Group { ranks: 8, stride: 8 }.bandwidth(&machine), 50e9);
}

#[test]
fn a_switch_that_reduces_sends_each_byte_once() {
    let mut machine = ideal();
    let group = Group { ranks: 8, stride: 1 };
    near(group.all_reduce(&machine, 8e9), 9e9 / 450e9);
    machine.node_switch = Switch::Forwards;
    near(group.all_reduce(&machine, 8e9), 14e9 / 450e9);
    near(group.gather(&machine, 8e9), 7e9 / 450e9);
}

#[test]
fn a_ring_of_a_sequence_has_one_link_between_nodes() {
    let machine = ideal();
    let group = Group { ranks: 16, stride: 1 };
    near(group.ring_exchange(&machine, 1e9, 15.0), 15.0 * 1e9 / 50e9);
}

#[test]
fn experts_are_divided_among_their_ranks_only() {
    let parameters = |expert: u32| {
        let run = with_experts(|layout| layout.expert = expert);
        block_parameters(&run.model.blocks[0], &run.model, &run.layout)
    };
    near(parameters(1).experts, 64.0 * 3.0 * 8192.0 * 2048.0);
    near(parameters(8).experts, parameters(1).experts / 8.0);
    near(parameters(8).outside_experts(), parameters(1).outside_experts());
}

/// With 64 replicas and 8 groups of experts, 8 ranks have the same experts.
#[test]
fn only_ranks_with_the_same_experts_divide_their_state() {
    let run = with_experts(|layout| {
        (layout.expert, layout.precision, layout.implementation.state) = (8, Precision::Half, None);
    });
    let parameters = Parameters { matrices: 600.0, tables: 40.0, experts: 80.0 };
    let memory = state(parameters, Parameters::default(), &run.layout);
    near(memory.optimizer, 12.0 * (640.0 / 64.0 + 80.0 / 8.0));
    let mut muon = run.layout.clone();
    muon.implementation.optimizer = Optimizer::Muon;
    let of_tables = 12.0 * 40.0 / 64.0;
    near(
        state(parameters, Parameters::default(), &muon).optimizer,
        8.0 * (600.0 / 64.0 + 80.0 / 8.0) + of_tables,
    );
    near(memory.gradients, 4.0 * 720.0);
    let gradients = Layout { sharding: ShardedState::Gradients, ..run.layout };
    near(state(parameters, Parameters::default(), &gradients).gradients, 4.0 * (10.0 + 10.0));
}

/// With whole experts on each rank of a tensor group, ranks of experts are drawn from tensor groups.
#[test]
fn whole_experts_need_no_exchange_in_tensor_groups() {
    let divided = with_experts(|layout| {
        (layout.tensor, layout.expert_tensor, layout.expert, layout.sequence_parallel) = (4, 4, 16, true);
    });
    let whole = with_experts(|layout| {
        (layout.tensor, layout.expert_tensor, layout.expert, layout.sequence_parallel) = (4, 1, 64, true);
    });
    assert!(block(&whole).forward.tensor < block(&divided).forward.tensor);
    // Both have a 64th of the experts on a rank, and whole ones have larger products.
    let experts = |run: &Run| block_parameters(&run.model.blocks[0], &run.model, &run.layout).experts;
    near(experts(&whole), experts(&divided));
    assert!(block(&whole).forward.products <= block(&divided).forward.products);
    let mut layout = whole.layout.clone();
    layout.gpus /= 2;
    let refusal = |layout: &Layout| layout.check(&whole.model).expect_err("an error").reason;
    assert!(
        refusal(&layout).ends_with("32 replicas cannot be divided among the ranks of ep = 64"),
        "{}",
        refusal(&layout)
    );
    layout.expert_tensor = 2;
    assert!(refusal(&layout).starts_with("each expert is divided among"), "{}", refusal(&layout));
}

#[test]
fn products_of_experts_fill_waves_together() {
    let mut run = run("llama2-7B", "H100");
    let product = Product { rows: 512.0, columns: 4096.0, inner: 4096.0, output_bytes: 2.0 };
    let mut seconds = |graphs: Graphs, groups: f64| {
        run.layout.implementation.graphs = graphs;
        product.grouped_seconds(groups, &on(&run, &run.machine), Precision::Half)
    };
    let (one, eight) = (seconds(Graphs::Full, 1.0), seconds(Graphs::Full, 8.0));
    assert!(eight > 4.0 * one && eight < 8.0 * one, "{one} and {eight}");
    // Kernels for each of them fill fewer waves.
    let separate = seconds(Graphs::None, 8.0);
    assert!(separate > eight && separate < 8.0 * one, "{one}, {eight} and {separate}");
}

#[test]
fn context_parallelism_divides_attention_and_exchanges_keys() {
    let at = |context: u32, window: Option<u64>| {
        let mut run = run("llama3-70B", "H100 80");
        (run.layout.gpus, run.layout.context) = (1024, context);
        if let Mixer::Attention(attention) = &mut run.model.blocks[0].mixer {
            attention.window = window;
        }
        // A slow network, so that attention does not hide the exchange.
        run.machine.network_bandwidth /= 100.0;
        block(&run)
    };
    assert_eq!(at(1, None).forward.context, 0.0);
    let ratio = at(1, None).forward.attention / at(4, None).forward.attention;
    assert!((3.0..4.0).contains(&ratio), "{ratio}");
    assert!(at(4, None).forward.context > 0.0);
    // A window of a quarter of the row reaches one rank of four.
    assert!(at(4, Some(2048)).forward.context < at(4, None).forward.context / 2.0);
}

#[test]
fn a_state_space_exchanges_its_inputs_and_outputs() {
    let mamba = Mamba2 { heads: 128, head_size: 64, state: 128, groups: 8, convolution: 4, chunk: 256 };
    let mut run = run("llama3-70B", "H100 80");
    run.model.blocks[0].mixer = Mixer::Mamba2(mamba);
    (run.layout.gpus, run.layout.context, run.layout.tensor) = (512, 8, 1);
    run.machine = ideal();
    // Computation that takes no time hides nothing.
    run.machine.constants.attention = 1e9;
    run.machine.constants.launch = 0.0;
    let bytes = 2.0 * (mamba.projected() + mamba.inner()) as f64 * run.layout.tokens();
    let exchange = bytes * 7.0 / 8.0 / 450e9;
    assert!((block(&run).forward.context / exchange - 1.0).abs() < 1e-3);
}

/// The linear attention of Qwen3-Next, in place of the attention of the first block.
const DELTA: Delta = Delta {
    key_heads: 16,
    value_heads: 32,
    key_size: 128,
    value_size: 128,
    convolution: 4,
    decay: StateDecay::Head,
    chunk: 64,
};

fn with_delta(delta: Delta) -> Run {
    let mut run = run("llama3-70B", "H100 80");
    run.model.blocks[0].mixer = Mixer::Delta(delta);
    run.layout.tensor = 1;
    run
}

#[test]
fn linear_attention_exchanges_its_inputs_and_outputs() {
    let mut run = with_delta(DELTA);
    (run.layout.gpus, run.layout.context) = (512, 8);
    run.machine = ideal();
    // Computation that takes no time hides nothing.
    run.machine.constants.attention = 1e9;
    run.machine.constants.launch = 0.0;
    let bytes = 2.0 * (DELTA.scanned() + DELTA.value_width()) as f64 * run.layout.tokens();
    let exchange = bytes * 7.0 / 8.0 / 450e9;
    assert!((block(&run).forward.context / exchange - 1.0).abs() < 1e-3);
}

/// The scan, the kept bytes and the elementwise operations of a token do not depend on the sequence.
#[test]
fn linear_attention_takes_the_same_for_each_token_of_a_longer_sequence() {
    let of = |sequence: u32| {
        let mut run = with_delta(DELTA);
        run.layout.sequence = sequence;
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        let time = setting.block(&run.model.blocks[0]).forward;
        let bytes = whole_block_activations(&run.model.blocks[0], &run.model, &run.layout);
        [time.attention, time.elementwise, bytes].map(|total| total / run.layout.tokens())
    };
    for (short, long) in of(4096).into_iter().zip(of(65_536)) {
        assert!((long / short - 1.0).abs() < 0.02, "{short} {long}");
    }
}

#[test]
fn a_rank_has_a_head_of_keys_at_least() {
    let check = |tensor: u32| {
        let mut run = with_delta(Delta { key_heads: 4, ..DELTA });
        (run.layout.tensor, run.layout.expert_tensor) = (tensor, tensor);
        run.layout.check(&run.model).map_err(|error| error.to_string())
    };
    assert_eq!(check(4), Ok(()));
    assert!(check(8).is_err_and(|error| error.contains("4 heads")), "{:?}", check(8));
}

#[test]
fn a_balanced_cut_is_never_slower_for_a_large_head() {
    let mut run = run("llama3-8B", "H100");
    (run.layout.pipeline, run.layout.sharding) = (8, ShardedState::Optimizer);
    let even = predicted(&run);
    run.layout.cut = Cut::Balanced;
    let balanced = predicted(&run);
    assert!(balanced.seconds < even.seconds, "{} and {}", balanced.seconds, even.seconds);
    assert_eq!(balanced.blocks.iter().sum::<usize>(), 32);
    assert!(balanced.blocks[7] < 4, "{:?}", balanced.blocks);
    run.layout.cut =
        Cut::Given { blocks: balanced.blocks.iter().map(|&blocks| blocks as u32).collect(), predictors: 7 };
    assert_eq!(predicted(&run), balanced);
    run.layout.cut = Cut::Given { blocks: vec![4; 7], predictors: 6 };
    let error = run.layout.check(&run.model).expect_err("a cut that does not fit").to_string();
    assert!(error.starts_with("the cut has 7 stages with 28 blocks"), "{error}");
}

#[test]
fn deferred_weight_gradients_fill_the_bubble() {
    let mut run = run("llama3.1-405B", "H100");
    let usual = predicted(&run);
    run.layout.schedule = Some("zb-h1".into());
    let split = predicted(&run);
    assert!(split.bubble < 0.75 * usual.bubble, "{} and {}", split.bubble, usual.bubble);
    // Collectives that gradients of weights hid are exposed.
    assert!(split.parts.tensor > usual.parts.tensor);
}
