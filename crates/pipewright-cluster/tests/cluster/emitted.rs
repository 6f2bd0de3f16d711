//! Plans for clusters in the options of other systems: each system runs what is searched for it, what is written is
//! read back as the plan, and what a system cannot run is refused with the reason.

use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::emit::emit;
use pipewright_cluster::implementation::{Graphs, KernelFusion, Loss, NumberFormat, Optimizer, StateFormats};
use pipewright_cluster::layout::{Layout, Modules, Precision, Recompute, Scores, ShardedState};
use pipewright_cluster::search::{ClusterPlan, Fixed, Request, SearchError, search};
use pipewright_cluster::systems::refusal;
use pipewright_schedule::emit::{Emission, ReadPlan, Release, SystemFile};
use pipewright_schedule::plan::{Refusal, System};
use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
use pipewright_shapes::model::{Mamba2, Mixer, Model};
use pipewright_shapes::reader;

const DENSE: &str = include_str!("llama_405b.json");
const EXPERTS: &str = include_str!("deepseek_v3.json");

fn model(config: &str) -> Model {
    reader::read(config).expect("a model").model
}

/// Returns the model with experts without its block that predicts a further token.
fn plain_experts() -> String {
    let plain = EXPERTS.replace("\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0");
    assert_ne!(plain, EXPERTS);
    plain
}

fn request(config: &str, gpus: u32, system: System) -> Request {
    let machine = by_name("h100").expect("a machine");
    let request = Request::new(model(config), machine, gpus, 128, 8192, Precision::Half);
    Request { system: Some(system), plans: 1, simulations: 4, ..request }
}

fn best(request: &Request) -> ClusterPlan {
    search(request).expect("a plan").plans.remove(0)
}

/// Reads the files of a plan back, for a model with as many blocks.
fn read(emission: &Emission, request: &Request) -> ReadPlan {
    let layer = |kind: &str, count: usize| LayerProfile {
        kind: kind.to_owned(),
        count: count as u32,
        forward_s: 1.0,
        ..LayerProfile::default()
    };
    let layers = vec![layer("embedding", 1), layer("block", request.model.blocks.len()), layer("head", 1)];
    let profile = Profile { layers, link: LinkProfile::new(0.0, 1.0), ..Profile::default() };
    let file = SystemFile::parse(&emission.files[0].text).expect("a file of the system");
    assert_eq!(file.system(), emission.system);
    let table = file.table().map(|_| emission.files[1].text.as_str());
    // A configuration of DeepSpeed says no tensor-parallel ranks.
    let ranks = (emission.system != System::Deepspeed).then_some(request.gpus);
    file.plan(&profile, table, ranks).expect("the plan can be read")
}

/// Checks that the best plan for a system is read back as it is.
fn check(request: &Request) -> (ClusterPlan, Emission) {
    let system = request.system.expect("a system");
    let plan = best(request);
    let layout = &plan.layout;
    assert_eq!(refusal(system, layout, &request.model), None, "{layout:?}");
    let emission = emit(system, Release::Numbered, request, &plan, "out").expect("files");
    let back = read(&emission, request);
    let boundaries: Vec<usize> = plan.prediction.boundaries().iter().map(|block| block + 1).collect();
    assert_eq!(back.choice.boundaries, boundaries, "{system}: {layout:?}");
    assert_eq!(back.choice.microbatch_rows, layout.microbatch, "{system}: {layout:?}");
    assert_eq!(back.schedule.microbatches(), layout.microbatches(), "{system}: {layout:?}");
    if system != System::Deepspeed {
        assert_eq!(back.choice.mesh.data, layout.data(), "{system}: {layout:?}");
        assert_eq!(back.choice.mesh.tensor, layout.tensor, "{system}: {layout:?}");
    }
    let recomputes = back.choice.recompute.iter().all(Option::is_some);
    assert_eq!(recomputes, layout.recompute == Recompute::Full, "{system}: {layout:?}");
    (plan, emission)
}

#[test]
fn what_is_searched_for_a_system_is_read_back() {
    for system in System::ALL {
        for (config, bytes) in [(DENSE, 640e9), (DENSE, 240e9), (EXPERTS, 400e9)] {
            check(&Request { memory: Some(bytes), ..request(config, 64, system) });
        }
    }
}

#[test]
fn given_parts_are_in_the_options() {
    let dense = |fixed| (DENSE, Fixed { pipeline: Some(8), tensor: Some(8), ..fixed });
    let experts = |fixed| (EXPERTS, Fixed { pipeline: Some(8), ..fixed });
    let none = Fixed::default();
    let context = Fixed { context: Some(2), ..none.clone() };
    let full = Fixed { recompute: Some(Recompute::Full), ..none.clone() };
    let whole =
        Fixed { sharding: Some(ShardedState::Nothing), tensor: Some(8), pipeline: Some(16), ..none.clone() };
    let expert = Fixed { expert: Some(8), tensor: Some(1), ..none.clone() };
    let one = Fixed { pipeline: Some(1), sharding: Some(ShardedState::Parameters), ..none.clone() };
    let plain = plain_experts();
    let cases = [
        (System::Megatron, dense(context.clone()), "--context-parallel-size 2\n"),
        (System::Megatron, dense(full.clone()), "--recompute-method uniform\n--recompute-num-layers 1\n"),
        (System::Megatron, dense(none.clone()), "--use-distributed-optimizer\n--overlap-grad-reduce\n"),
        (
            System::Megatron,
            experts(expert.clone()),
            "--expert-model-parallel-size 8\n--expert-tensor-parallel-size 1\n",
        ),
        (System::Megatron, experts(expert.clone()), "mL\n"),
        (System::Megatron, (DENSE, one.clone()), "--data-parallel-sharding-strategy optim_grads_params\n"),
        (System::Torchtitan, dense(context.clone()), "--parallelism.context_parallel_degree 2\n"),
        (System::Torchtitan, dense(full.clone()), "activation-checkpoint:full\n"),
        (
            System::Torchtitan,
            (plain.as_str(), Fixed { pipeline: Some(8), ..expert }),
            "--parallelism.expert_parallel_degree 8\n",
        ),
        (System::Torchtitan, dense(context), "--parallelism.fsdp_reshard_after_forward never\n"),
        (System::Torchtitan, (DENSE, one), "--parallelism.fsdp_reshard_after_forward always\n"),
        (System::Deepspeed, dense(full), "\"activation_checkpoint_interval\": 1"),
        (System::Deepspeed, dense(none.clone()), "\"zero_optimization\": {\n    \"stage\": 1\n  }"),
        (System::Deepspeed, dense(none), "\"grad_accum_dtype\": \"fp32\""),
        (System::Deepspeed, (DENSE, whole), "\"train_batch_size\": 128"),
    ];
    for (system, (config, fixed), option) in cases {
        let request = Request { fixed, memory: Some(1e15), ..request(config, 128, system) };
        let (plan, emission) = check(&request);
        let text = &emission.files[0].text;
        assert!(text.contains(option), "{system}: {:?}: {option} is not in\n{text}", plan.layout);
    }
}

/// Checks why a system does not run a layout that is changed from one that it runs.
fn check_refused(system: System, config: &str, change: impl FnOnce(&mut Layout), words: &str) {
    let model = model(config);
    let machine = by_name("h100").expect("a machine");
    let request = Request::new(model.clone(), machine, 128, 128, 8192, Precision::Half);
    let fixed = Fixed { pipeline: Some(8), sharding: Some(ShardedState::Nothing), ..Fixed::default() };
    let request = Request { fixed, system: Some(system), simulations: 1, memory: Some(1e15), ..request };
    let mut layout = best(&request).layout;
    assert_eq!(refusal(system, &layout, &model), None, "{layout:?}");
    change(&mut layout);
    let refused = refusal(system, &layout, &model).map(|refusal| refusal.to_string()).unwrap_or_default();
    assert!(refused.contains(words), "{system}: {layout:?}: {refused:?}");
}

#[test]
fn what_a_system_does_not_run_is_refused() {
    use System::{Deepspeed, Megatron, Torchtitan};
    let named = |name: &'static str| move |layout: &mut Layout| layout.schedule = Some(name.to_owned());
    check_refused(Megatron, DENSE, named("zb-h1"), "Megatron does not run this schedule");
    check_refused(Deepspeed, DENSE, |layout| layout.chunks = 2, "DeepSpeed does not run this schedule");
    check_refused(
        Torchtitan,
        DENSE,
        |layout| layout.sharding = ShardedState::Optimizer,
        "does not shard the optimizer's state alone",
    );
    check_refused(
        Megatron,
        DENSE,
        |layout| layout.sharding = ShardedState::Parameters,
        "does not shard parameters in a pipeline; it can shard the optimizer's state, or nothing",
    );
    check_refused(
        Deepspeed,
        DENSE,
        |layout| layout.sharding = ShardedState::Gradients,
        "does not shard gradients in a pipeline",
    );
    let gradients = |layout: &mut Layout| layout.sharding = ShardedState::Gradients;
    check_refused(
        Torchtitan,
        DENSE,
        gradients,
        "does not shard gradients without the parameters in a pipeline",
    );
    let several = |layout: &mut Layout| {
        (layout.pipeline, layout.schedule, layout.chunks, layout.sharding) =
            (1, None, 1, ShardedState::Gradients);
        (layout.microbatch, layout.batch) = (1, 4 * layout.data());
    };
    check_refused(Torchtitan, DENSE, several, "gradients without the parameters over several microbatches");
    check_refused(Deepspeed, DENSE, |layout| layout.context = 2, "do not divide sequences");
    check_refused(Torchtitan, DENSE, |layout| layout.context = 2, "each has all of them");
    let odd = |layout: &mut Layout| (layout.context, layout.sequence) = (2, 8194);
    check_refused(Megatron, DENSE, odd, "4 pieces do not divide 8194 tokens");
    let selective = |layout: &mut Layout| layout.recompute = Recompute::Selective;
    check_refused(Megatron, DENSE, selective, "does not recompute the elementwise operations");
    check_refused(Deepspeed, DENSE, selective, "does not recompute the elementwise operations");
    let plain =
        |layout: &mut Layout| (layout.expert, layout.tensor, layout.sequence_parallel) = (8, 2, false);
    check_refused(Megatron, EXPERTS, plain, "Megatron needs sequence parallelism");
    let undivided =
        |layout: &mut Layout| (layout.expert, layout.tensor, layout.sequence_parallel) = (1, 2, false);
    check_refused(Megatron, EXPERTS, undivided, "Megatron needs sequence parallelism");
    let one_rank = |layout: &mut Layout| (layout.pipeline, layout.chunks) = (1, 2);
    check_refused(
        Megatron,
        DENSE,
        one_rank,
        "has several stages per rank only in pipelines of several ranks",
    );
    let few = |layout: &mut Layout| (layout.chunks, layout.batch) = (2, 2);
    check_refused(Megatron, DENSE, few, "in groups of at least as many as the ranks");
    check_refused(Torchtitan, DENSE, |layout| layout.tensor = 16, "8 heads of keys and values");
    let short = |layout: &mut Layout| {
        (layout.tensor, layout.sequence_parallel, layout.sequence) = (8, true, 8194);
    };
    check_refused(Torchtitan, DENSE, short, "8 pieces do not divide 8194 tokens");
    let halves = |layout: &mut Layout| (layout.expert, layout.tensor, layout.expert_tensor) = (8, 2, 2);
    check_refused(Torchtitan, &plain_experts(), halves, "divides experts among all ranks of a stage");
    let unfused =
        |layout: &mut Layout| (layout.scores, layout.recompute) = (Scores::Unfused, Recompute::Selective);
    check_refused(Torchtitan, DENSE, unfused, "does not recompute the scores of attention alone");
    check_refused(Deepspeed, DENSE, unfused, "does not recompute the scores of attention alone");
    let mut model = model(DENSE);
    let layout = Layout { pipeline: 2, ..best(&request(DENSE, 128, Torchtitan)).layout };
    model.predictors = 1;
    let refused = |layout| refusal(Torchtitan, layout, &model).map(|why| why.to_string()).unwrap_or_default();
    assert!(refused(&layout).contains("no blocks that predict further tokens"));
    let context = Layout { pipeline: 1, context: 2, ..layout.clone() };
    assert!(refused(&context).contains("no blocks that predict further tokens"));
    model.predictors = 0;
    model.tied = true;
    assert!(
        refusal(Torchtitan, &layout, &model)
            .is_some_and(|why| why.to_string().contains("table of the embedding"))
    );
    let mut layout = best(&request(DENSE, 128, Megatron)).layout;
    unfused(&mut layout);
    assert_eq!(refusal(Megatron, &layout, &model), None);
}

#[test]
fn settings_that_a_system_does_not_have_are_refused() {
    use System::{Deepspeed, Megatron, Torchtitan};
    let modules = |layout: &mut Layout| layout.recompute = Recompute::Modules(Modules::NORMS);
    check_refused(
        Torchtitan,
        DENSE,
        modules,
        "recompute parts of a block by their names, and this plan recomputes layernorm",
    );
    check_refused(Deepspeed, DENSE, modules, "recompute parts of a block by their names");
    let latent = |layout: &mut Layout| layout.recompute = Recompute::Modules(Modules::LATENT);
    check_refused(Megatron, DENSE, latent, "`mla_up_proj` in models with latent attention only");
    let no_module = |layout: &mut Layout| layout.recompute = Recompute::Modules(Modules::default());
    check_refused(Megatron, DENSE, no_module, "this plan names none");
    let some = |layout: &mut Layout| (layout.recompute, layout.recompute_layers) = (Recompute::Full, Some(1));
    check_refused(Torchtitan, DENSE, some, "does not recompute some blocks of a stage only");
    let groups = |layout: &mut Layout| {
        (layout.tensor, layout.shards, layout.sharding) = (1, Some(4), ShardedState::Optimizer);
    };
    check_refused(Deepspeed, DENSE, groups, "this plan has 4 groups that each have all of it");
    let of_experts = |layout: &mut Layout| {
        groups(layout);
        (layout.expert, layout.expert_tensor, layout.pipeline) = (8, 1, 8);
    };
    check_refused(Megatron, EXPERTS, of_experts, "4 groups do not divide 2 replicas");
    let overlap = |layout: &mut Layout| {
        layout.implementation.overlaps_experts = true;
        (layout.expert, layout.expert_tensor, layout.tensor, layout.chunks) = (8, 1, 1, 1);
    };
    check_refused(Megatron, EXPERTS, overlap, "Megatron combines the forward of a microbatch");
    let sharded = |layout: &mut Layout| {
        overlap(layout);
        (layout.sharding, layout.expert, layout.microbatch) = (ShardedState::Parameters, layout.data(), 1);
    };
    check_refused(Torchtitan, &plain_experts(), sharded, "torchtitan does not do so");
    check_refused(Deepspeed, &plain_experts(), overlap, "DeepSpeed does not send tokens to experts while");
    let narrow = |layout: &mut Layout| layout.precision = Precision::Nvfp4;
    check_refused(Torchtitan, DENSE, narrow, "has products in FP8 and MXFP8");
}

/// Checks the lines of options that a change of a plan adds.
fn check_written(system: System, config: &str, change: impl FnOnce(&mut Layout), options: &[&str]) {
    check_added(system, config, |_| {}, change, options);
}

/// Checks the lines of options that a changed plan has and another change of the plan does not have.
fn check_added(
    system: System,
    config: &str,
    before: impl FnOnce(&mut Layout),
    after: impl FnOnce(&mut Layout),
    options: &[&str],
) {
    let text = |(_, emission): (Request, Result<Emission, Refusal>)| {
        emission.unwrap_or_else(|refusal| panic!("{system}: {refusal}")).files.swap_remove(0).text
    };
    let (before, after) = (text(written(system, config, before)), text(written(system, config, after)));
    let added: Vec<&str> = after.lines().filter(|line| before.lines().all(|other| other != *line)).collect();
    assert_eq!(added, options, "{system}");
}

/// Writes a plan without a pipeline whose layout is changed.
fn written(
    system: System,
    config: &str,
    change: impl FnOnce(&mut Layout),
) -> (Request, Result<Emission, Refusal>) {
    let fixed = Fixed {
        pipeline: Some(1),
        tensor: Some(1),
        context: Some(1),
        microbatch: Some(1),
        recompute: Some(Recompute::None),
        ..Fixed::default()
    };
    let request = Request { fixed, memory: Some(1e15), ..request(config, 64, system) };
    let mut plan = best(&request);
    change(&mut plan.layout);
    let emission = emit(system, Release::Numbered, &request, &plan, "out");
    (request, emission)
}

#[test]
fn each_setting_is_written() {
    use System::{Megatron, Torchtitan};
    let modules = Modules::LATENT.with(Modules::NORMS);
    let recompute = |modules| move |layout: &mut Layout| layout.recompute = Recompute::Modules(modules);
    let selective = "--recompute-granularity selective";
    check_written(
        Megatron,
        EXPERTS,
        recompute(modules),
        &[selective, "--recompute-modules mla_up_proj layernorm"],
    );
    let activations = Modules::EXPERT_ACTIVATIONS;
    let grouped = [selective, "--recompute-modules moe_act", "--moe-grouped-gemm"];
    check_written(Megatron, EXPERTS, recompute(activations), &grouped);
    let some = |layout: &mut Layout| (layout.recompute, layout.recompute_layers) = (Recompute::Full, Some(3));
    let block = ["--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 3"];
    check_written(Megatron, DENSE, some, &block);
    check_written(Megatron, DENSE, |layout| layout.offload_layers = 2, &["--cpu-offloading-num-layers 2"]);
    let precision = |precision| move |layout: &mut Layout| layout.precision = precision;
    let mxfp8 = ["--grad-reduce-in-bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"];
    check_written(Megatron, DENSE, precision(Precision::Mxfp8), &mxfp8);
    let nvfp4 = ["--grad-reduce-in-bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"];
    check_written(Megatron, DENSE, precision(Precision::Nvfp4), &nvfp4);
    let narrow = |layout: &mut Layout| {
        layout.precision = Precision::Fp8;
        recompute(Modules::NORMS)(layout);
    };
    let fp8 = [
        "--grad-reduce-in-bf16",
        selective,
        "--recompute-modules layernorm",
        "--fp8-format hybrid",
        "--fp8-recipe tensorwise",
    ];
    check_written(Megatron, DENSE, narrow, &fp8);
    let shards = |layout: &mut Layout| layout.shards = Some(8);
    check_written(Megatron, DENSE, shards, &["--num-distributed-optimizer-instances 8"]);
    let degrees =
        ["--parallelism.data_parallel_replicate_degree 8", "--parallelism.data_parallel_shard_degree 8"];
    check_written(Torchtitan, DENSE, shards, &degrees);
    let overlap = |overlaps| {
        move |layout: &mut Layout| {
            (layout.expert, layout.expert_tensor, layout.implementation.overlaps_experts) = (8, 1, overlaps);
        }
    };
    let flags = ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"];
    check_added(Megatron, EXPERTS, overlap(false), overlap(true), &flags);
}

#[test]
fn a_setting_that_no_file_says_is_refused() {
    use System::{Deepspeed, Megatron, Torchtitan};
    let check = |system, change: fn(&mut Layout), setting: &str| {
        let (_, emission) = written(system, DENSE, change);
        let refused = emission.map(|_| String::new()).unwrap_or_else(|refusal| refusal.to_string());
        let expected = format!("the files for {system} have no option for `{setting}`, which this plan has");
        assert_eq!(refused, expected);
    };
    check(Torchtitan, |layout| layout.pass_microbatches = Some(1), "pass_rows = 1");
    check(Torchtitan, |layout| layout.document_tokens = Some(1024), "document_tokens = 1024");
    check(Torchtitan, |layout| layout.implementation.optimizer = Optimizer::Muon, "optimizer = muon");
    check(Torchtitan, |layout| layout.implementation.graphs = Graphs::Full, "cuda_graphs = full");
    check(Torchtitan, |layout| layout.implementation.loss = Loss::Fused, "loss = fused");
    check(Torchtitan, |layout| layout.implementation.kernels = KernelFusion::Separate, "compiled = false");
    check(Torchtitan, |layout| layout.implementation.overlaps_tensor = Some(true), "tensor_overlap = true");
    check(
        Torchtitan,
        |layout| layout.implementation.dispatched = Some(NumberFormat::Fp8),
        "dispatch_precision = fp8",
    );
    check(Torchtitan, |layout| layout.implementation.reshards = false, "reshard_after_forward = false");
    let moments = |layout: &mut Layout| {
        layout.implementation.state =
            Some(StateFormats { moments: NumberFormat::Bf16, ..layout.state_formats() });
    };
    check(Torchtitan, moments, "moments = bf16");
    check(Megatron, moments, "moments = bf16");
    let gradients = |layout: &mut Layout| {
        layout.implementation.state =
            Some(StateFormats { gradients: NumberFormat::Bf16, ..layout.state_formats() });
    };
    check(Deepspeed, gradients, "gradients = bf16");
    let offloaded = |layout: &mut Layout| layout.offload_layers = 2;
    check(Torchtitan, offloaded, "offload_layers = 2");
    let with_recomputation =
        |layout: &mut Layout| (layout.offload_layers, layout.recompute) = (2, Recompute::Full);
    check(Megatron, with_recomputation, "offload_layers = 2` next to `recompute = full");
}

/// The search for Megatron overlaps the exchange of experts by itself.
#[test]
fn a_planned_overlap_is_written() {
    let machine = by_name("h800").expect("a machine");
    let request = Request::new(model(EXPERTS), machine, 512, 1024, 4096, Precision::Half);
    let fixed = Fixed {
        tensor: Some(1),
        context: Some(1),
        expert: Some(64),
        microbatch: Some(1),
        ..Fixed::default()
    };
    let request = Request {
        fixed,
        system: Some(System::Megatron),
        plans: 1,
        simulations: 8,
        memory: Some(1e15),
        ..request
    };
    let (plan, emission) = check(&request);
    assert!(plan.layout.implementation.overlaps_experts, "{:?}", plan.layout);
    assert!(plan.layout.text(&request.model).ends_with("; experts' exchange behind another microbatch"));
    assert!(emission.files[0].text.contains("--overlap-moe-expert-parallel-comm\n"));
}

#[test]
fn a_layout_with_one_microbatch_and_stage_shards_gradients_in_torchtitan() {
    let fixed = Fixed {
        pipeline: Some(1),
        microbatch: Some(1),
        sharding: Some(ShardedState::Gradients),
        tensor: Some(1),
        context: Some(1),
        ..Fixed::default()
    };
    let request = Request { fixed, memory: Some(1e15), ..request(DENSE, 128, System::Torchtitan) };
    let (plan, emission) = check(&request);
    assert_eq!(plan.layout.microbatches(), 1);
    let text = &emission.files[0].text;
    assert!(text.contains("--parallelism.fsdp_reshard_after_forward never\n"), "{text}");
}

#[test]
fn a_pipeline_of_mamba_is_refused_by_megatron() {
    let mut model = model(DENSE);
    let mamba = Mamba2 { heads: 128, head_size: 64, state: 128, groups: 8, convolution: 4, chunk: 256 };
    model.blocks[0].mixer = Mixer::Mamba2(mamba);
    let layout = best(&request(DENSE, 128, System::Megatron)).layout;
    let layout = Layout { pipeline: 1, chunks: 1, ..layout };
    assert_eq!(refusal(System::Megatron, &layout, &model), None);
    let layout = Layout { pipeline: 2, ..layout };
    let refused = refusal(System::Megatron, &layout, &model).expect("a refusal").to_string();
    assert!(refused.starts_with("Megatron cuts models with Mamba-2 into stages"), "{refused}");
}

/// Checks the error of a request that has no plan.
fn check_error(request: &Request, words: &str) -> SearchError {
    let error = search(request).expect_err("no plan");
    assert!(error.to_string().contains(words), "{error}");
    error
}

#[test]
fn a_request_without_a_plan_has_its_own_cause() {
    use System::{Deepspeed, Megatron, Torchtitan};
    let fixed = |fixed: Fixed| Fixed { pipeline: Some(4), ..fixed };
    let with = |system, gpus, given| Request { fixed: fixed(given), ..request(DENSE, gpus, system) };
    // The schedule exists in no size, although torchtitan does not run all shardings of the meshes.
    let schedule = Fixed { schedule: Some("v-half".to_owned()), chunks: Some(3), ..Fixed::default() };
    check_error(&with(Torchtitan, 64, schedule), "has a plan with schedule = v-half");
    // No other schedule could be simulated, but the sharding is the reason.
    let gradients =
        Fixed { sharding: Some(ShardedState::Gradients), microbatch: Some(1), ..Fixed::default() };
    let large = Request { batch: 1 << 17, ..with(Megatron, 64, gradients.clone()) };
    check_error(&large, "Megatron runs no plan with the given parts: Megatron does not shard gradients");
    check_error(
        &with(Torchtitan, 64, gradients.clone()),
        "torchtitan does not shard gradients without the parameters",
    );
    // The system runs none of the interleaved schedules either, which are tried first.
    check_error(&with(Deepspeed, 64, gradients), "DeepSpeed does not shard gradients");
}
