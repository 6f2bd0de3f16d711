//! Settings that few published runs have: copies of shards, gathered parameters that stay, offload down the ranks and up
//! again, predictors away from the head, uneven experts, and stacks with measured blocks.

use pipewright_cluster::attention::attention_time;
use pipewright_cluster::collective::Group;
use pipewright_cluster::implementation::{Implementation, NumberFormat, Stack, StateFormats, USUAL_LOAD};
use pipewright_cluster::layout::{Cut, Layout, Modules, Recompute, Scores, ShardedState};
use pipewright_cluster::measured::read as read_measured;
use pipewright_cluster::memory::{Parameters, table_parameters};
use pipewright_cluster::parts::Parts;
use pipewright_cluster::predict::Prediction;
use pipewright_cluster::published::{Run, read};
use pipewright_cluster::setting::Setting;
use pipewright_cluster::stage_time::StageTime;
use pipewright_document::GIB;
use pipewright_shapes::model::{Indexer, Latent, Mixer};
use pipewright_shapes::operations::AttentionCount;

use crate::data::{predicted, run};

fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-6, "{found} instead of {expected}");
}

/// A dense model on 64 GPUs without a pipeline, whose communication is not hidden.
fn sharded(change: impl Fn(&mut Layout)) -> Run {
    let mut run = run("llama3-8B", "H100 96");
    run.machine.measured.overlap = Some(0.0);
    run.layout = Layout {
        gpus: 64,
        batch: 128,
        sharding: ShardedState::Parameters,
        implementation: Implementation::usual(Stack::Torchtitan),
        recompute: Recompute::Full,
        ..Layout::on_one_gpu(8192, run.layout.precision)
    };
    change(&mut run.layout);
    run
}

/// The parameters of the model of [`sharded`].
fn parameters(run: &Run) -> f64 {
    run.model.parameters() as f64
}

#[test]
fn copies_of_shards_sum_their_gradients() {
    let (one, eight) = (sharded(|_| ()), sharded(|layout| layout.shards = Some(8)));
    let all = parameters(&one);
    let [one, eight] = [one, eight].map(|run| (predicted(&run), run));
    let per_step = |run: &Run| f64::from(run.layout.step_microbatches());
    let expected = |run: &Run, shards: u32| {
        let group = Group { ranks: shards, stride: 1 };
        let copies = Group { ranks: 64 / shards, stride: shards };
        let gathers = 2.0 * group.gather(&run.machine, 2.0 * all);
        let reduced = group.gather(&run.machine, 4.0 * all);
        let summed = copies.all_reduce(&run.machine, 4.0 * all / f64::from(shards));
        (gathers + reduced + summed) * per_step(run)
    };
    near(one.0.parts.data, expected(&one.1, 64));
    near(eight.0.parts.data, expected(&eight.1, 8));
    near(eight.0.memory[0].optimizer, 8.0 * one.0.memory[0].optimizer);
}

#[test]
fn without_a_pipeline_each_microbatch_reduces_its_gradients() {
    let with = |reshards| {
        let run = sharded(|layout| layout.implementation.reshards = reshards);
        (predicted(&run), run)
    };
    let ((dropped, run), (kept, _)) = (with(true), with(false));
    let all = parameters(&run);
    let gather = Group { ranks: 64, stride: 1 }.gather(&run.machine, 2.0 * all);
    near(dropped.parts.data - kept.parts.data, gather * f64::from(run.layout.step_microbatches()));
    near(kept.memory[0].gradients, dropped.memory[0].gradients);
    assert!(kept.memory[0].parameters > dropped.memory[0].parameters + 10.0 * GIB);
}

#[test]
fn adapters_of_sharded_models_are_in_single_precision() {
    let format = |weights, main_weights| {
        let usual =
            StateFormats::usual(ShardedState::Parameters, run("llama3-8B", "H100 96").layout.precision);
        let state = Some(StateFormats { weights, main_weights, ..usual });
        sharded(|layout| layout.implementation.state = state).layout.adapter_format()
    };
    assert_eq!(sharded(|_| ()).layout.adapter_format(), NumberFormat::F32);
    assert_eq!(format(NumberFormat::F32, None), NumberFormat::F32);
    assert_eq!(format(NumberFormat::Bf16, Some(NumberFormat::F32)), NumberFormat::F32);
    assert_eq!(format(NumberFormat::Bf16, None), NumberFormat::Bf16);
}

/// Stages 0 and 3 are on the first rank. It has three blocks, and all of them go to the host.
#[test]
fn offload_counts_the_blocks_of_a_rank() {
    let mut run = sharded(|_| ());
    run.machine.host_bandwidth = Some(64e9);
    run.model.blocks.truncate(8);
    run.layout = Layout {
        gpus: 2,
        pipeline: 2,
        chunks: 2,
        batch: 8,
        offload_layers: 3,
        schedule: Some("zbvzerobubble".to_owned()),
        // Scores are most of what a block keeps, so the peak follows them.
        scores: Scores::Unfused,
        cut: Cut::Given { blocks: vec![1, 3, 2, 2], predictors: 3 },
        ..Layout::on_one_gpu(8192, run.layout.precision)
    };
    let mut activations = |offload_layers| {
        run.layout.offload_layers = offload_layers;
        predicted(&run).memory.iter().map(|rank| rank.activations).collect::<Vec<_>>()
    };
    let (three, all) = (activations(3), activations(8));
    near(three[0], all[0]);
    assert!(three[1] > all[1] + GIB, "{three:?} and {all:?}");
}

/// DeepSeek-V3 with a predictor, in a pipeline of four.
fn with_predictor(stage: u32) -> (Run, Prediction) {
    let published = read(include_str!("runs2.toml")).expect("runs");
    let run = published.runs.iter().find(|run| run.model.predictors == 1).expect("a run with a predictor");
    let mut run = run.clone();
    let blocks = run.model.blocks.len() as u32;
    run.layout = Layout {
        gpus: 4,
        pipeline: 4,
        chunks: 1,
        tensor: 1,
        expert: 1,
        context: 1,
        expert_tensor: 1,
        batch: 8,
        microbatch: 1,
        schedule: None,
        recompute: Recompute::Full,
        cut: Cut::Given { blocks: vec![16, 16, 16, blocks - 48], predictors: stage },
        ..run.layout
    };
    let prediction = predicted(&run);
    (run, prediction)
}

#[test]
fn predictors_away_from_the_head_have_a_table() {
    let ((run, last), (_, third), (_, first)) = (with_predictor(3), with_predictor(2), with_predictor(0));
    let of_parameter = |prediction: &Prediction, rank: usize| prediction.memory[rank].parameters;
    let moved = of_parameter(&third, 2) - of_parameter(&last, 2);
    near(of_parameter(&last, 3) - of_parameter(&third, 3), moved);
    // The first rank has the embedding's table.
    let table = table_parameters(&run.model, &run.layout);
    let per_parameter = of_parameter(&last, 0) / {
        let blocks = run.model.blocks[..16].iter();
        let own = blocks.map(|block| block.parameters(&run.model)).sum::<u128>() as f64;
        own + table
    };
    near(of_parameter(&first, 0) - of_parameter(&third, 0), moved - per_parameter * table);
}

/// The outputs of the predictor's stage and of later ones are two hidden states for each token. Messages take nearly all
/// of the time.
#[test]
fn outputs_of_predictors_travel_to_the_head() {
    let seconds = |stage| {
        let (mut run, _) = with_predictor(stage);
        (run.machine.node_bandwidth, run.layout.batch, run.layout.gpus) = (1e5, 1, 4);
        predicted(&run).seconds
    };
    // Of three messages there and three back, all are twice as long, or one of each.
    assert!((seconds(0) / seconds(3) - 2.0).abs() < 0.05, "{} and {}", seconds(0), seconds(3));
    assert!((seconds(2) / seconds(3) - 4.0 / 3.0).abs() < 0.05, "{} and {}", seconds(2), seconds(3));
}

fn block_of(run: &Run) -> StageTime {
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
    let block = run.model.blocks.iter().find(|block| block.feed_forward.experts().is_some());
    setting.block(block.expect("a block with experts"))
}

#[test]
fn the_fullest_rank_of_experts_decides() {
    let (run, _) = with_predictor(3);
    let with = |expert: u32, load: u32| {
        let mut run = run.clone();
        (run.layout.gpus, run.layout.batch, run.layout.expert) = (4 * expert, 8 * expert, expert);
        run.layout.implementation.expert_load = load;
        block_of(&run)
    };
    // A rank that has all experts has all rows.
    near(with(1, USUAL_LOAD).total(), with(1, 100).total());
    let (even, uneven) = (with(64, 100), with(64, USUAL_LOAD));
    let exchanged = |time: &StageTime| time.forward.experts;
    assert!(exchanged(&uneven) > 1.2 * exchanged(&even));
    assert!(uneven.forward.elementwise > even.forward.elementwise);
    assert_eq!(Implementation::usual(Stack::Megatron).expert_load, USUAL_LOAD);
}

/// The prediction of each stack is replaced by what was measured.
#[test]
fn measured_blocks_have_their_times_in_each_stack() {
    let text = "[[layer]]\nsequence = 8192\ntensor_parallel = 4\nprecision = \"fp8\"\nforward_s = 7e-3\nbackward_s = 0.02";
    let mut run = run("llama3-70B", "H100 80");
    let machine = read_measured(text).map(|measured| measured.machine(&run.model, &run.machine));
    run.machine = machine.expect("measurements").expect("a machine");
    for (name, stack) in Stack::NAMES {
        run.layout.implementation = Implementation::usual(stack);
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        let time = setting.block(&run.model.blocks[0]);
        let found = [time.forward.total(), time.backward.total()];
        assert!(
            (found[0] / 7e-3 - 1.0).abs() < 1e-6 && (found[1] / 0.02 - 1.0).abs() < 1e-6,
            "{name}: {found:?}"
        );
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let check = |change: &dyn Fn(&mut Layout), message: &str| {
        let run = sharded(change);
        let error = run.layout.check(&run.model).expect_err("an error").to_string();
        assert!(error.contains(message), "{error}");
    };
    check(&|layout| layout.shards = Some(0), "`shards` is 0");
    check(&|layout| layout.shards = Some(3), "64 replicas cannot be divided among the ranks of shards = 3");
    check(&|layout| layout.document_tokens = Some(0), "`document_tokens` is 0");
    check(&|layout| layout.pass_microbatches = Some(3), "2 microbatches cannot be divided");
    let cut = Cut::Given { blocks: vec![32], predictors: 1 };
    check(
        &|layout| layout.cut = cut.clone(),
        "are in stage 1, and the pipeline has 1 stage; use a stage from 0 to 0",
    );
}

/// The shards of all ranks are as many copies of the parameters as there are groups, also of experts that fewer ranks
/// have than there are groups.
#[test]
fn shards_are_parts_of_all_parameters() {
    let parameters = Parameters { matrices: 64.0, tables: 32.0, experts: 16.0 };
    for (shards, expert) in [(1, 1), (8, 1), (64, 1), (8, 4), (8, 16), (8, 64), (64, 64)] {
        let layout = sharded(|layout| (layout.shards, layout.expert) = (Some(shards), expert)).layout;
        let own = parameters.shards(&layout);
        let groups = f64::from(64 / shards);
        near(64.0 * own.matrices, 64.0 * groups);
        near(64.0 * own.tables, 32.0 * groups);
        let same = f64::from(64 / expert);
        near(same * own.experts, 16.0 * f64::from(layout.expert_shard_groups()));
        assert_eq!(layout.expert_shard_groups(), (64 / shards).min(64 / expert));
    }
    assert_eq!(
        sharded(|layout| (layout.shards, layout.sharding) = (Some(8), ShardedState::Nothing))
            .layout
            .shard_groups(),
        1
    );
}

/// The first and the last stage of a V are on one rank, which has one table for both ends of a tied model.
#[test]
fn a_tied_table_is_held_once_by_each_rank() {
    let of_first = |tied, schedule: Option<&str>| {
        let mut run = sharded(|_| ());
        run.model.tied = tied;
        run.layout = Layout {
            gpus: 2,
            pipeline: 2,
            chunks: 2,
            batch: 8,
            schedule: schedule.map(str::to_owned),
            ..Layout::on_one_gpu(8192, run.layout.precision)
        };
        (predicted(&run).memory[0].parameters, 2.0 * table_parameters(&run.model, &run.layout))
    };
    let (own, table) = of_first(false, Some("zbvzerobubble"));
    near(own - of_first(true, Some("zbvzerobubble")).0, table);
    near(of_first(false, None).0, of_first(true, None).0);
}

#[test]
fn operations_across_documents_do_not_count() {
    let run = sharded(|layout| layout.document_tokens = Some(1024));
    let prediction = predicted(&run);
    let per_token = prediction.operations_per_gpu / prediction.tokens_per_gpu;
    near(per_token, run.model.operations_per_token(1024, AttentionCount::Causal));
}

/// Each rank of a tensor group computes the whole indexer, and a part of the heads.
#[test]
fn tensor_ranks_do_not_divide_an_indexer() {
    let (run, _) = with_predictor(3);
    let Mixer::Latent(latent) = run.model.blocks[0].mixer else { panic!("latent attention") };
    let seconds = |indexer, tensor| {
        let mut run = run.clone();
        (run.layout.tensor, run.machine.constants.launch) = (tensor, 0.0);
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        attention_time(&Mixer::Latent(Latent { indexer, ..latent }), &setting).forward
    };
    near(seconds(None, 1), 8.0 * seconds(None, 8));
    let indexer = Some(Indexer { heads: 64, head_size: 128, keys: u64::MAX });
    let own = |tensor| seconds(indexer, tensor) - seconds(None, tensor);
    near(own(8), own(1));
}

/// Only the named parts are computed again.
#[test]
fn recomputed_modules_take_the_time_of_their_parts() {
    let again = |modules| {
        let run = sharded(|layout| layout.recompute = Recompute::Modules(modules));
        let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
        let time = setting.block(&run.model.blocks[0]);
        (time.again, time.forward)
    };
    assert_eq!(again(Modules::default()).0, Parts::default());
    let (norms, _) = again(Modules::NORMS);
    assert!(norms.elementwise > 0.0 && norms.total() == norms.elementwise, "{norms:?}");
    let (scores, forward) = again(Modules::SCORES);
    assert_eq!(scores, Parts { attention: forward.attention, ..Parts::default() });
    let (dense, forward) = again(Modules::DENSE);
    assert!(dense.products > 0.5 * forward.products && dense.products < forward.products, "{dense:?}");
}
