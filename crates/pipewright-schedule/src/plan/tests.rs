//! Checks the fast evaluation against the simulator, and the bounds against everything that is simulated.

use proptest::prelude::*;

use crate::generate::{ScheduleSpec, generate};
use crate::ids::Rank;
use crate::lower::{TrainingLowering, for_training};
use crate::mesh::DataParallelMode;
use crate::mesh::{Mesh, MeshOrder};
use crate::placement::Placement;
use crate::plan::balance::even;
use crate::plan::bound::{lower_bound, memory_bound, reduction_bound, unlike_bound};
use crate::plan::class::{Class, Path};
use crate::plan::cuts::for_each_cut;
use crate::plan::evaluate::Evaluator;
use crate::plan::families::Family;
use crate::plan::greedy::{Rules, Task, greedy};
use crate::plan::layers::Layers;
use crate::plan::network::Network;
use crate::plan::numbers::Numbers;
use crate::plan::order::{Cell, Kind, Order, first_backward};
use crate::plan::peaks::peaks;
use crate::plan::placed_cut::{PlacedCut, Swaps};
use crate::plan::pool::placement;
use crate::plan::predict::{PlanChoice, predict};
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;
use crate::plan::recompute::{chosen, every_choice};
use crate::plan::request::TrainingState;
use crate::plan::stage_load::{StageLoad, engine_costs, held_in_update, stage_loads, waiting};
use crate::profile::{
    LayerProfile, LinkProfile, NodeProfile, PairProfile, PartProfile, Profile, RankProfile,
};
use crate::recompute::{LayerPart, LayerParts, StageRecompute};
use crate::simulate::{peak_memory, timed};
use crate::trained::{StageBackward, TrainedStages};

/// Returns random layers for a mesh with so many ranks of a pipeline; the ranks may be on nodes, and have
/// tensor-parallel ranks there.
pub(super) fn model(seed: u64, count: usize, ranks: u32, replicas: u32) -> Layers {
    layers_of(seed, [count, ranks as usize, replicas as usize], |_| {})
}

/// Returns the same layers. In every other model, tokens travel to their experts.
fn model_with_exchanges(seed: u64, count: usize, ranks: u32, replicas: u32) -> Layers {
    layers_of(seed, [count, ranks as usize, replicas as usize], |layers| {
        let mut numbers = Numbers(seed ^ 0xe);
        let most = 24 * numbers.below(2);
        layers.iter_mut().for_each(|layer| layer.exchange_s = numbers.below(most + 1) as f64 / 8.0);
    })
}

/// Returns random layers, changed by `change`, for a pipeline with these numbers of layers, ranks and
/// replicas.
fn layers_of(
    seed: u64,
    [count, ranks, replicas]: [usize; 3],
    change: impl FnOnce(&mut [LayerProfile]),
) -> Layers {
    let (ranks, replicas) = (ranks as u32, replicas as u32);
    let mut numbers = Numbers(seed);
    let mut number = |most: usize| numbers.below(most + 1) as f64;
    let layers = (0..count).map(|_| LayerProfile {
        kind: "layer".into(),
        forward_s: number(40) / 8.0,
        input_backward_s: number(40) / 8.0,
        weight_backward_s: number(40) / 8.0,
        output_bytes: number(100) as u64,
        parameter_bytes: number(100) as u64,
        activation_bytes: number(100) as u64,
        temporary_bytes: number(20) as u64,
        recompute_s: Some(number(40) / 8.0),
        ..LayerProfile::default()
    });
    let mut layers: Vec<LayerProfile> = layers.collect();
    for layer in &mut layers {
        for (part, share) in LayerPart::ALL.into_iter().zip([4, 3]) {
            let bytes = layer.activation_bytes / share;
            layer.set_part(part, PartProfile { bytes, recompute_s: number(8) / 8.0 });
        }
    }
    if seed.is_multiple_of(3) {
        freeze(&mut layers, seed);
    }
    change(&mut layers);
    for layer in layers.iter_mut().step_by(2) {
        layer.backward_s = Some(layer.input_backward_s + layer.weight_backward_s / 2.0);
    }
    let link = LinkProfile::new(number(4) / 16.0, 100.0);
    let node = NodeProfile { ranks: 1 << number(3) as u32, latency_s: number(4) / 64.0, bytes_per_s: 400.0 };
    let order = [MeshOrder::Replicas, MeshOrder::Pipeline][number(1) as usize];
    let tensor = if number(1) == 0.0 { 1 } else { node.ranks.min(2) };
    let (stage_bytes, rank_bytes) = (number(3) as u64, number(3) as u64);
    let mut profile =
        Profile { stage_bytes, rank_bytes, link, layers, node: Some(node), ..Profile::default() };
    let network =
        Network::of(&profile, Mesh { tensor, data: replicas, pipeline: ranks, order, ..Mesh::default() });
    let network = network.filter(|_| number(2) > 0.0).unwrap_or_else(|| {
        profile.node = None;
        Network::of(&profile, Mesh { data: replicas, pipeline: ranks, order, ..Mesh::default() })
            .expect("without nodes, there is a network")
    });
    let groups =
        [DataParallelMode::Replicated, DataParallelMode::Sharded, DataParallelMode::Hybrid { shards: 2 }]
            [number(2) as usize];
    let (window, post_validation) = (1 + number(2) as u32, number(1) > 0.0);
    let state = TrainingState { groups, window, post_validation, copy: 0.5, ..TrainingState::default() };
    Layers::of(&profile, 1, network, state)
}

/// Freezes random layers, but not all: often the first ones.
fn freeze(layers: &mut [LayerProfile], seed: u64) {
    let mut numbers = Numbers(seed ^ 0xf0);
    let trained = numbers.below(layers.len());
    let below = numbers.below(2) * trained;
    let rest = numbers.below(2);
    for (index, layer) in layers.iter_mut().enumerate().filter(|&(index, _)| index != trained) {
        if index < below || rest + numbers.below(2) == 0 {
            layer.trained_bytes = Some(0);
        } else if layer.parameter_bytes > 8 {
            layer.trained_bytes = Some(layer.parameter_bytes / 8);
        }
    }
}

/// Checks that the evaluation of an order gives the numbers of the simulator, and that no bound is above
/// them.
fn check(
    layers: &Layers,
    order: &Order,
    layout: &PlacedCut,
    recompute: &[Option<StageRecompute>],
) -> Result<(), TestCaseError> {
    let loads = stage_loads(layers, &order.placement, &layout.starts, recompute);
    let found = Evaluator::default().time(order, &loads, &layers.network);
    let replicas = layers.network.mesh.data;
    let trained: Vec<bool> = loads.iter().map(|load| load.computes == StageBackward::Whole).collect();
    let trained = TrainedStages::of(&trained);
    let lowering = TrainingLowering { replicas, trained, ..TrainingLowering::default() };
    let lowering = lowering.with_exchanges(layers.has_exchanges);
    let program = for_training(&order.schedule(), &lowering).expect("a sound order");
    let run = timed(program.as_program(), &engine_costs(layers, &loads)).expect("no deadlock");
    prop_assert_eq!(found, Some(run.timeline().makespan()));
    for share in [0.5, 0.9, 0.999, 1.0, 1.001] {
        let before = share * run.timeline().makespan();
        let early = Evaluator::default().time_before(order, &loads, &layers.network, before);
        prop_assert_eq!(early, found.filter(|&time| time < before), "before {}", before);
    }
    let step = Step::of(layers, order.placement.ranks(), order.microbatches);
    let memory = peaks(order, &loads, layers.sharding).into_iter().max().unwrap_or(0);
    let memory = u128::from(memory) * u128::from(step.ranks);
    let (bound, time) = (memory_bound(step, memory), run.timeline().makespan() * (1.0 + 1e-9));
    prop_assert!(bound <= time, "the bound {bound} for {memory} bytes of a step that takes {time}");
    // What an action needs while it runs is compared in a test of its own: here all need the same.
    let temporary = loads.iter().map(|load| load.temporary).max().unwrap_or(0);
    let loads: Vec<StageLoad> = loads.into_iter().map(|load| StageLoad { temporary, ..load }).collect();
    let held = |rank: Rank| -> u64 {
        let own = || order.placement.stages_of(rank).iter().map(|stage| &loads[stage.index()]);
        let state = layers.sharding.held(own().map(|load| load.state)).total();
        let waiting = waiting(order.placement.stages_of(rank), &loads);
        state + layers.rank_bytes + layers.stage_bytes * own().count() as u64 + waiting + temporary
    };
    // After the last action, a rank holds its gradients and what can undo its update.
    let updating = |rank: Rank| held_in_update(order.placement.stages_of(rank), &loads, layers.sharding);
    let sizes: Vec<_> = engine_costs(layers, &loads).sizes;
    let expected: Vec<u64> = peak_memory(run.timeline(), &sizes)
        .into_iter()
        .zip(order.placement.all_ranks())
        .map(|(peak, rank)| (peak + held(rank)).max(updating(rank)))
        .collect();
    prop_assert_eq!(peaks(order, &loads, layers.sharding), expected);

    let cut_time = step.cut_time(&layout.rank_of, &layout.starts);
    prop_assert!(cut_time <= time, "the bound {cut_time} of a cut that takes {time}");
    // In every placement of these tests, each round visits every rank, and the first one in order.
    let (ranks, chunks) = (order.placement.ranks(), order.placement.stages() / order.placement.ranks());
    let class = Class { ranks, chunks, path: Path::Loop };
    let bound = lower_bound(step, &[class]).max(reduction_bound(step));
    prop_assert!(bound <= time, "the bound {bound} of {class:?} that takes {time}");
    Ok(())
}

/// Returns every order of the computations of two ranks, each with the given stages. The backwards of a stage
/// are split, or also whole if no other rank waits for their gradients: those of `first`, the first stage
/// that runs backward, and those that follow another stage of the rank.
fn every_order(
    stages_of: [&[u32]; 2],
    first: u32,
    microbatches: u32,
) -> impl Iterator<Item = Vec<Vec<Cell>>> {
    let rows = stages_of.map(|stages| {
        let is_sent = |stage: u32| stage > first && !stages.contains(&(stage - 1));
        let choices_of = |&stage: &u32, is_whole: bool| {
            let kinds: &[Kind] = if is_whole {
                &[Kind::Forward, Kind::Backward]
            } else {
                &[Kind::Forward, Kind::Input, Kind::Weight]
            };
            let chain = move |microbatch| {
                kinds
                    .iter()
                    .map(|&kind| Cell { kind, stage, microbatch, overlaps: false })
                    .collect::<Vec<_>>()
            };
            (0..microbatches).map(chain)
        };
        let choices = every_choice(&vec![1; stages.len()])
            .map(|choice| choice.iter().map(Option::is_some).collect::<Vec<bool>>())
            .collect::<Vec<_>>();
        let choices = choices.into_iter().filter(|choice| {
            stages.iter().zip(choice).all(|(&stage, &is_whole)| !is_whole || !is_sent(stage))
        });
        let rows = choices.flat_map(|choice| {
            let chains = stages.iter().zip(choice).flat_map(|(stage, is_whole)| choices_of(stage, is_whole));
            merged(&chains.collect::<Vec<_>>(), &mut vec![0; stages.len() * microbatches as usize])
        });
        rows.collect::<Vec<_>>()
    });
    let [first, second] = rows;
    first
        .into_iter()
        .flat_map(move |row| second.clone().into_iter().map(move |other| vec![row.clone(), other]))
}

/// Returns every row with the computations of all chains, each in its order. `used` has the number of
/// computations of each chain that come before the row.
fn merged(chains: &[Vec<Cell>], used: &mut Vec<usize>) -> Vec<Vec<Cell>> {
    let mut rows = Vec::new();
    for chain in 0..chains.len() {
        let Some(&cell) = chains[chain].get(used[chain]) else { continue };
        used[chain] += 1;
        rows.extend(merged(chains, used).into_iter().map(|rest| [vec![cell], rest].concat()));
        used[chain] -= 1;
    }
    if rows.is_empty() { vec![Vec::new()] } else { rows }
}

/// Two ranks with one or two stages each: no order of any cut is faster than the bound.
#[test]
fn no_order_of_a_tiny_model_is_faster_than_the_bound() {
    for seed in 0..24 {
        // One stage per rank and two microbatches, or two stages in a loop or a V and one microbatch.
        let (chunks, microbatches, rank_of) =
            [(1, 2, vec![0, 1]), (2, 1, vec![0, 1, 0, 1]), (2, 1, vec![0, 1, 1, 0])][seed as usize % 3]
                .clone();
        let layers = model(seed / 3 * 3 + u64::from(seed % 6 == 0), rank_of.len() + 1, 2, 1);
        let step = Step::of(&layers, 2, microbatches);
        let class = Class { ranks: 2, chunks, path: Path::Loop };
        let bound = lower_bound(step, &[class]);
        let of_rank = |rank: u32| -> Vec<u32> {
            (0..).zip(&rank_of).filter(|&(_, &of)| of == rank).map(|(stage, _)| stage).collect()
        };
        let stages_of = [of_rank(0), of_rank(1)];
        let ranks = rank_of.iter().copied().map(Rank::new).collect();
        let placement = Placement::explicit(ranks).expect("both ranks have a stage");
        let mut least = f64::INFINITY;
        for_each_cut(layers.count(), rank_of.len(), &mut |starts| {
            let loads = stage_loads(&layers, &placement, starts, &vec![None; rank_of.len()]);
            for rows in every_order([&stages_of[0], &stages_of[1]], first_backward(&loads), microbatches) {
                let order = Order { placement: placement.clone(), microbatches, rows };
                let time = Evaluator::default().time(&order, &loads, &layers.network);
                least = least.min(time.unwrap_or(f64::INFINITY));
            }
        });
        assert!(least.is_finite() && bound <= least, "seed {seed}: the bound {bound} of {least}");
        assert!(bound >= 0.6 * least, "seed {seed}: the bound {bound} of {least}");
    }
}

/// Checks the time of one microbatch over slow links, and that the bounds are not above it. Layers with the
/// flag true are trained; each is a stage in a loop, and `F`, `I` and `W` take 1, a message 10.
fn check_slow_links(trained: &[bool], ranks: u32, expected: f64) {
    let layer = |&is_trained: &bool| LayerProfile {
        forward_s: 1.0,
        input_backward_s: 1.0,
        weight_backward_s: 1.0,
        trained_bytes: (!is_trained).then_some(0),
        ..LayerProfile::default()
    };
    let link = LinkProfile::new(10.0, f64::INFINITY);
    let profile = Profile { link, layers: trained.iter().map(layer).collect(), ..Profile::default() };
    let mesh = Mesh { pipeline: ranks, order: MeshOrder::Replicas, ..Mesh::default() };
    let network = Network::of(&profile, mesh).expect("a network");
    let layers = Layers::of(&profile, 1, network, TrainingState::default());
    let starts: Vec<usize> = (0..=trained.len()).collect();
    let class = Class { ranks, chunks: trained.len() as u32 / ranks, path: Path::Loop };
    let placement = class.placement();
    let loads = stage_loads(&layers, &placement, &starts, &vec![None; trained.len()]);
    let task = Task {
        placement: &placement,
        microbatches: 1,
        loads: &loads,
        network: &layers.network,
        sharding: layers.sharding,
        memory: None,
    };
    let rules = Rules::all(ranks, trained.len() as u32)[0];
    let (order, time) = greedy(&task, rules, f64::INFINITY, &mut 0).expect("an order");
    assert_eq!(
        (time, Evaluator::default().time(&order, &loads, &layers.network)),
        (expected, Some(expected))
    );
    let step = Step::of(&layers, ranks, 1);
    let bounds = [step.cut_time(&class.ranks_of(), &starts), lower_bound(step, &[class])];
    assert!(
        bounds.iter().all(|bound| (0.5 * expected..=expected).contains(bound)),
        "{bounds:?} of {expected}"
    );
}

#[test]
fn gradients_do_not_travel_to_frozen_ranks() {
    check_slow_links(&[true, true, true], 3, 3.0 + 2.0 * 20.0 + 3.0 + 1.0);
    check_slow_links(&[false, true, true], 3, 3.0 + 20.0 + 10.0 + 2.0 + 1.0);
    check_slow_links(&[false, false, true], 3, 3.0 + 20.0 + 1.0 + 1.0);
    check_slow_links(&[false, true, false], 3, 3.0 + 20.0 + 10.0 + 2.0 + 1.0);
    check_slow_links(&[true, false, false], 3, 3.0 + 2.0 * 20.0 + 3.0 + 1.0);
    check_slow_links(&[false, false, true, true], 2, 4.0 + 30.0 + 10.0 + 2.0 + 1.0);
    check_slow_links(&[false, false, false, true], 2, 4.0 + 30.0 + 1.0 + 1.0);
    check_slow_links(&[false; 7].iter().chain(&[true]).copied().collect::<Vec<_>>(), 2, 8.0 + 70.0 + 2.0);
}

/// Returns a random choice of what stages recompute: in about a third of the stages, some layers or all.
fn drawn(starts: &[usize], numbers: &mut Numbers) -> Vec<Option<StageRecompute>> {
    let stages = starts.windows(2);
    let choice = |range: &[usize]| {
        let count = range[1] - range[0];
        let layers = numbers.below(count + 1);
        let parts = LayerPart::ALL.into_iter().filter(|_| numbers.below(2) == 0).collect();
        chosen(layers, count, parts).filter(|_| numbers.below(3) == 0)
    };
    stages.map(choice).collect()
}

/// Returns random boundaries.
fn cut(layers: usize, stages: usize, numbers: &mut Numbers) -> Vec<usize> {
    let mut layout = PlacedCut { starts: even(layers, stages), rank_of: vec![0; stages] };
    for _ in 0..4 * stages {
        layout.shake(stages, Swaps::None, numbers);
    }
    layout.starts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn named_orders_have_the_numbers_of_the_simulator(
        seed in any::<u64>(), ranks in 1..5u32, microbatches in 1..9u32, count in 4..24usize, replicas in 1..3u32,
    ) {
        prop_assume!(ranks as usize <= count);
        let layers = model_with_exchanges(seed, count, ranks, replicas);
        let mut numbers = Numbers(seed);
        for family in Family::all(ranks, microbatches, count, true) {
            let stages = (ranks * family.chunks) as usize;
            let starts = cut(count, stages, &mut numbers);
            let placement = Placement::looped(stages as u32, 1).expect("a placement");
            let loads = stage_loads(&layers, &placement, &starts, &vec![None; stages]);
            let Ok(order) = family.order(&engine_costs(&layers, &loads), layers.has_exchanges) else { continue };
            let order = order.split(first_backward(&loads));
            let rank_of = crate::plan::evaluate::ranks_of_stages(&order);
            let mut recompute = drawn(&starts, &mut numbers);
            for choice in recompute.iter_mut().flatten().filter(|choice| choice.has_second_forwards()) {
                choice.keep = numbers.below(3) as u32;
            }
            check(&layers, &order, &PlacedCut { starts, rank_of }, &recompute)?;
        }
    }

    #[test]
    fn searched_orders_are_sound_and_keep_to_their_memory(
        seed in any::<u64>(), ranks in 1..5u32, microbatches in 1..9u32, count in 4..24usize, room in 0..3000u64,
    ) {
        prop_assume!(ranks as usize <= count);
        let layers = model_with_exchanges(seed, count, ranks, 1);
        let mut numbers = Numbers(seed);
        for class in Class::all(ranks, count) {
            let mut layout = PlacedCut { starts: cut(count, class.stages(), &mut numbers), rank_of: class.ranks_of() };
            layout.shake(ranks as usize, Swaps::Rounds, &mut numbers);
            let recompute = drawn(&layout.starts, &mut numbers);
            let ranks_of = layout.rank_of.iter().copied().map(Rank::new).collect();
            let placement = Placement::explicit(ranks_of).expect("every rank has a stage");
            let loads: Vec<StageLoad> = stage_loads(&layers, &placement, &layout.starts, &recompute);
            let all = Rules::all(ranks, class.stages() as u32);
            let rules = all[numbers.below(all.len())];
            let sharding = layers.sharding;
            for memory in [None, Some(room)] {
                let limit = memory.map(RankMemory::Equal);
                let (network, memory_of) = (&layers.network, limit.as_ref());
                let task = Task { placement: &placement, microbatches, loads: &loads, network, sharding, memory: memory_of };
                let mut work = 0;
                let Some((order, end)) = greedy(&task, rules, f64::INFINITY, &mut work) else {
                    prop_assert!(memory.is_some(), "without a limit there is always an order");
                    continue;
                };
                prop_assert_eq!(Evaluator::default().time(&order, &loads, &layers.network), Some(end));
                // The order is sound even if all stages are trained.
                let program = for_training(&order.schedule(), &TrainingLowering::default());
                prop_assert!(program.is_ok(), "{:?}", program.err());
                if let Some(memory) = memory {
                    prop_assert!(peaks(&order, &loads, sharding).iter().all(|&peak| peak <= memory));
                }
                check(&layers, &order, &layout, &recompute)?;
            }
        }
    }
}

/// A change of the cut can take the trained layers from a stage whose backwards are whole.
#[test]
fn a_stage_that_becomes_frozen_has_each_backward_once() {
    let layer = |trained_bytes| LayerProfile { trained_bytes, ..LayerProfile::default() };
    let layers = vec![layer(Some(0)), layer(None), layer(Some(0))];
    let profile = Profile { link: LinkProfile::new(0.0, 1.0), layers, ..Profile::default() };
    let network = Network::of(&profile, Mesh { pipeline: 3, order: MeshOrder::Replicas, ..Mesh::default() });
    let layers = Layers::of(&profile, 1, network.expect("a network"), TrainingState::default());
    let loads =
        stage_loads(&layers, &Placement::looped(3, 1).expect("a placement"), &[0, 1, 2, 3], &[None; 3]);
    let rows = "0F0,0B0\n1F0,1B0\n2F0,2B0\n";
    let Order { placement, microbatches, rows } =
        Order::of(&crate::csv::parse_schedule(rows).expect("a schedule"));
    let completed = Order::completed(placement, microbatches, rows, &loads);
    let program = for_training(&completed.schedule(), &TrainingLowering::default());
    assert!(program.is_ok(), "{:?}", program.err());
}

#[test]
fn slices_have_no_times_in_a_profile() {
    let layers = vec![LayerProfile { kind: "layer".into(), forward_s: 1.0, ..LayerProfile::default() }; 2];
    let profile = Profile { link: LinkProfile::new(0.0, 1e9), layers, ..Profile::default() };
    let spec = ScheduleSpec { ranks: 2, microbatches: 2, ..ScheduleSpec::default() };
    let schedule = generate("seq1f1b", &spec).expect("a schedule");
    let error = predict(&profile, &schedule, &PlanChoice::default()).map(drop).expect_err("slices");
    let message = "the schedule cuts microbatches into 2 slices, and a profile has the times of whole microbatches; \
                   simulate it at costs of your own (`--cost`), or choose another schedule, such as `1f1b`";
    assert_eq!(error.to_string(), message);
}

#[test]
fn a_stage_recomputes_only_the_parts_that_its_layers_have() {
    let with_norms =
        LayerProfile { activation_bytes: 9, norms_bytes: 4, norms_s: 0.5, ..LayerProfile::default() };
    let layers = vec![with_norms, LayerProfile::default()];
    let profile = Profile { link: LinkProfile::new(0.0, 1.0), layers, ..Profile::default() };
    let mesh = Mesh { pipeline: 2, order: MeshOrder::Replicas, ..Mesh::default() };
    let network = Network::of(&profile, mesh).expect("a network");
    let layers = Layers::of(&profile, 1, network, TrainingState::default());
    let placement = Placement::looped(2, 1).expect("a placement");
    let loads = stage_loads(&layers, &placement, &[0, 1, 2], &[StageRecompute::of_parts(LayerParts::ALL); 2]);
    let choices: Vec<_> = loads.iter().map(StageLoad::choice).collect();
    assert_eq!(choices, [StageRecompute::of_parts(LayerPart::Norms.into()), None]);
    let costs: Vec<_> = loads.iter().map(|load| (load.kept, load.remade, load.input)).collect();
    assert_eq!(costs, [(5, 4, 0.5), (0, 0, 0.0)]);
}

/// Returns random layers on unlike ranks, with a random layout of two stages on each rank in the mean.
pub(super) fn unlike(seed: u64, ranks: u32) -> (Layers, PlacedCut) {
    let mut numbers = Numbers(seed);
    let mut number = |most: usize| numbers.below(most + 1) as f64;
    let count = 3 * ranks as usize;
    let layers = (0..count).map(|at| LayerProfile {
        kind: ["a", "b"][at % 2].into(),
        forward_s: number(40) / 8.0,
        input_backward_s: number(40) / 8.0,
        weight_backward_s: number(40) / 8.0,
        output_bytes: number(100) as u64,
        parameter_bytes: number(100) as u64,
        activation_bytes: number(100) as u64,
        ..LayerProfile::default()
    });
    let mut layers: Vec<LayerProfile> = layers.collect();
    if seed.is_multiple_of(3) {
        freeze(&mut layers, seed);
    }
    let rank = |_| RankProfile {
        speed: (1.0 + number(15)) / 4.0,
        speeds: [("b".to_owned(), (1.0 + number(15)) / 4.0)].into(),
        ..RankProfile::default()
    };
    let own = (0..ranks).map(rank).collect();
    let pair = |from: u32| PairProfile {
        from,
        to: (from + 1) % ranks,
        latency_s: number(4) / 16.0,
        bytes_per_s: 50.0 + number(100),
    };
    let pairs = (0..ranks).filter(|_| ranks > 1 && seed.is_multiple_of(2)).map(pair).collect();
    let link = LinkProfile::new(0.125, 100.0);
    let profile = Profile { link, layers, ranks: own, pairs, ..Profile::default() };
    let network = Network::of(&profile, Mesh { pipeline: ranks, ..Mesh::default() }).expect("a network");
    let state = TrainingState::default();
    let layers = Layers::of(&profile, 1, network, state).with_speeds(&profile, 1, state);
    let rank_of = (0..2 * ranks).map(|stage| stage % ranks).collect();
    let mut layout = PlacedCut { starts: even(count, 2 * ranks as usize), rank_of };
    for _ in 0..20 {
        layout.shake(ranks as usize, Swaps::Any, &mut Numbers(seed ^ numbers.below(1 << 20) as u64));
    }
    (layers, layout)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// The evaluation gives the numbers of the simulator, and no bound is above them.
    #[test]
    fn unlike_ranks_are_bounded(seed in 0u64..1 << 20, ranks in 1u32..6, microbatches in 1u32..9) {
        let (layers, layout) = unlike(seed, ranks);
        let placement = placement(&layout);
        let stages = layout.rank_of.len();
        let loads = stage_loads(&layers, &placement, &layout.starts, &vec![None; stages]);
        let (network, sharding) = (&layers.network, layers.sharding);
        let task =
            Task { placement: &placement, microbatches, loads: &loads, network, sharding, memory: None };
        let rules = Rules::all(ranks, stages as u32);
        let rules = rules[Numbers(seed).below(rules.len())];
        let (order, _) = greedy(&task, rules, f64::INFINITY, &mut 0).expect("an order");
        let time = Evaluator::default().time(&order, &loads, network).expect("no deadlock");
        let trained: Vec<bool> = loads.iter().map(|load| load.computes == StageBackward::Whole).collect();
        let trained = TrainedStages::of(&trained);
        let lowering = TrainingLowering { trained, ..TrainingLowering::default() };
        let program = for_training(&order.schedule(), &lowering).expect("a sound order");
        let run = timed(program.as_program(), &engine_costs(&layers, &loads)).expect("no deadlock");
        prop_assert_eq!(time, run.timeline().makespan());
        let limit = time * (1.0 + 1e-9);
        let step = Step::of(&layers, ranks, microbatches);
        let cut = step.cut_time(&layout.rank_of, &layout.starts);
        prop_assert!(cut <= limit, "the bound {cut} of the cut is above {time}");
        // The plan fits into just the bytes of its parameters, gradients and optimizer state.
        let fixed = |rank: Rank| {
            let own = placement.stages_of(rank).iter().map(|stage| &loads[stage.index()]);
            StageLoad::fixed(own, sharding)
        };
        let memory = RankMemory::Own(placement.all_ranks().map(fixed).collect());
        for memory in [None, Some(&memory)] {
            for is_exact in [false, true] {
                let bound = unlike_bound(step, memory, is_exact);
                prop_assert!(bound <= limit, "the bound {bound} ({is_exact}) with {memory:?} is above {time}");
            }
        }
        let peaks = peaks(&order, &loads, sharding);
        let total = peaks.iter().map(|&peak| u128::from(peak)).sum();
        let bound = memory_bound(step, total);
        prop_assert!(bound <= limit, "the bound {bound} of limited memory is above {time}");
    }
}
