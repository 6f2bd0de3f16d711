//! Models as graphs: skip connections over any number of stages change no bit, on any route.

mod mistakes;
mod unet;

use std::collections::BTreeSet;

use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use pipewright::batch::split;
use pipewright::graph::{Graph, GraphError};
use pipewright::pipeline::{Pipeline, PipelineConfig, SeededPipeline};
use pipewright::stage::{Stage, StageContext};
use pipewright::tensor::{pack, unpack};
use pipewright::transport::World;
use pipewright_schedule::costs::{SkipTransfer, StageSizes};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{
    Costs, MessageEnd, Placement, Rank, Recompute, SkipAction, SkipMessage, StageIndex, Timeline,
};

use crate::support::{ROWS, WIDTH, batch, config, lose_each, optimizer, program, take_steps};
use unet::{
    Kind, Layer, MICROBATCHES, Outcome, STEPS, brought, ids, in_stages, launch, launch_with, loss, make,
    sorted, stage, train, train_on,
};

fn one_stage(replicas: u32) -> Outcome {
    train(program("gpipe", 1, MICROBATCHES / replicas), World::local(replicas))
}

fn check(schedule: &str, ranks: u32) {
    check_replicas(schedule, ranks, 1);
}

/// Compares with the same number of replicas of the model in one stage.
fn check_replicas(schedule: &str, ranks: u32, replicas: u32) {
    let program = program(schedule, ranks, MICROBATCHES / replicas);
    let stages = program.placement().stages();
    let (found, expected) = (train(program, World::local(ranks * replicas)), one_stage(replicas));
    let place = format!("{schedule}, {stages} stages on {ranks} ranks, replicas {replicas}");
    assert_eq!(found.0, expected.0, "{place}");
    assert_eq!(found.1.len(), expected.1.len(), "{place}");
    let differs = found.1.iter().zip(&expected.1).find(|(found, expected)| found != expected);
    assert!(differs.is_none(), "{place}: {:?}", differs.map(|((path, _), _)| path));
}

#[test]
fn skips_over_one_to_eleven_stages_change_no_bit() {
    for ranks in 2..=12 {
        check("gpipe", ranks);
    }
}

#[test]
fn every_schedule_takes_skips() {
    for (schedule, ranks) in [
        ("1f1b", 4),
        ("1f1b", 6),
        ("interleaved1f1b", 2),
        ("interleaved1f1b", 4),
        ("zb-h1", 4),
        ("zbvzerobubble", 2),
        ("zbvzerobubble", 4),
        ("dualpipev", 2),
        ("dualpipev", 4),
        ("v-half", 4),
    ] {
        check(schedule, ranks);
    }
}

#[test]
fn replicas_take_skips() {
    for (schedule, ranks, replicas) in
        [("zbvzerobubble", 2, 2), ("1f1b", 2, 2), ("1f1b", 4, 2), ("1f1b", 3, 3), ("interleaved1f1b", 2, 3)]
    {
        check_replicas(schedule, ranks, replicas);
    }
}

#[test]
fn skips_arrive_in_any_order() {
    let expected = one_stage(1).0[0].clone();
    for (schedule, ranks) in [("1f1b", 4), ("zbvzerobubble", 2), ("dualpipev", 2)] {
        for seed in 0..30 {
            let program = program(schedule, ranks, MICROBATCHES);
            let placement = program.placement().clone();
            let graph = in_stages(placement.stages());
            assert!(!graph.place(&placement).expect("it fits").direct().is_empty(), "some go straight");
            let make = |index| stage(&graph, &placement, index);
            let mut pipeline = SeededPipeline::new(program, &config(), seed, make).expect("it starts");
            let report = pipeline.step_batch(brought(0), 1e-2).expect("a step");
            assert_eq!((report.losses, report.gradient_norm), expected, "{schedule}, seed {seed}");
        }
    }
}

/// Returns the messages of skip connections in a timeline, at both ends.
fn skips_of(timeline: &Timeline) -> BTreeSet<(Rank, SkipAction)> {
    let skips: BTreeSet<_> = timeline.skips().iter().map(|skip| (skip.rank, skip.action)).collect();
    assert_eq!(skips.len(), timeline.skips().len(), "each once");
    skips
}

#[test]
fn predicted_and_measured_timelines_have_the_same_skips() {
    for (schedule, ranks) in
        [("1f1b", 4), ("interleaved1f1b", 4), ("zbvzerobubble", 4), ("dualpipev", 4), ("gpipe", 6)]
    {
        let program = program(schedule, ranks, MICROBATCHES);
        let placement = program.placement().clone();
        let graph = in_stages(placement.stages());
        let bytes = (ROWS * WIDTH * 4) as u64;
        let costs = graph.place(&placement).expect("it fits").costs(Costs::default(), |_value| bytes);
        let predicted = timed(program.as_program(), &costs).expect("no deadlock");
        let measured = launch(program, World::local(ranks)).step_batch(brought(0), 1e-2).expect("a step");
        let (predicted, measured) = (predicted.timeline(), measured.timeline);
        let expected = skips_of(predicted);
        // Each skip connection between ranks sends forwards and gradients of every microbatch, seen at two
        // ends.
        let crosses = |skip: &&SkipTransfer| placement.rank_of(skip.from) != placement.rank_of(skip.to);
        let connections = costs.skips.iter().filter(crosses).count();
        assert!(connections > 0, "{schedule}: some go straight to another rank");
        assert_eq!(expected.len(), connections * MICROBATCHES as usize * 4, "{schedule}");
        assert_eq!(skips_of(&measured), expected, "{schedule}");
        for skip in measured.skips() {
            let known = measured.message(skip.rank, MessageEnd::Skip(skip.action)).expect("its message");
            let SkipMessage { from, to, .. } = skip.action.message();
            let peer = if matches!(skip.action, SkipAction::Send(_)) { to } else { from };
            let elements = known.tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>() as u64);
            // Ids have no gradients, so a message that goes back may be empty.
            assert_eq!(known.bytes, 4 * elements.sum::<u64>(), "{schedule}: {known}");
            assert_eq!(known.peer, placement.rank_of(peer), "{schedule}: {known}");
        }
        for sent in measured.skips() {
            let SkipAction::Send(message) = sent.action else { continue };
            let received = measured.skips().iter().find(|skip| skip.action == SkipAction::Receive(message));
            assert!(received.is_some_and(|received| received.end >= sent.start), "{sent:?}, {received:?}");
        }
    }
}

#[test]
fn the_bytes_of_a_graph_are_those_of_its_messages() {
    let graph = in_stages(4);
    let placement = Placement::explicit([0, 1, 2, 3].map(Into::into).to_vec()).expect("a placement");
    let placed = graph.place(&placement).expect("it fits");
    // Each value has another power of ten, so that a sum names its values.
    let bytes = |value: &str| match value {
        "image" => 1,
        "ids" => 10,
        "d0" => 100,
        "d2:0" => 1_000,
        "d2:1" => 10_000,
        "d3" => 100_000,
        "d1" => 1_000_000,
        _ => 0,
    };
    let given = StageSizes { activation: 7, ..StageSizes::default() };
    let costs = placed.costs(Costs { sizes: vec![given], ..Costs::default() }, bytes);
    let skips: Vec<(u32, u32, u64)> =
        costs.skips.iter().map(|skip| (skip.from.get(), skip.to.get(), skip.bytes)).collect();
    let direct: Vec<(u32, u32, usize)> =
        placed.direct().iter().map(|(from, to, tensors)| (from.get(), to.get(), *tensors)).collect();
    assert_eq!(skips.len(), direct.len());
    assert!(costs.sizes.iter().all(|sizes| sizes.activation == 7) && costs.sizes.len() == 4);
    // Stage 1 passes `d2:0` and `m0` on to the last stage.
    assert_eq!(skips, [(0, 2, 1_000_000), (0, 3, 11), (1, 3, 1_000)]);
    assert_eq!(costs.sizes[0].output, 11_100, "`d0` and both outputs of `d2`");
}

#[test]
fn a_report_names_the_rank_that_waits_for_a_lost_skip_connection() {
    let launch = || {
        let program = program("gpipe", 4, MICROBATCHES);
        let placement = program.placement().clone();
        let graph = in_stages(placement.stages());
        let make = |index| stage(&graph, &placement, index);
        SeededPipeline::new(program, &config(), 0, make).expect("it starts")
    };
    let lost = lose_each(launch, || brought(0));
    assert!(lost.contains("the skip connection of microbatch 3 from stage "), "{lost}");
    assert!(lost.contains("the gradients of microbatch 3's skip connection from stage "), "{lost}");
}

#[test]
fn parameters_are_called_after_their_nodes() {
    let (steps, parameters) = one_stage(1);
    assert_ne!(steps[0].0, steps[2].0, "it learns");
    let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 23);
    assert!(names.contains(&"d0.linear.weight") && names.contains(&"out.scale"), "{names:?}");
}

/// The same layers on one tape of plain Burn, microbatch by microbatch, written out by hand.
#[test]
fn one_stage_equals_plain_burn() {
    let graph = in_stages(1);
    let mut module = graph.whole(make);
    let mut optimizer = optimizer();
    let context = StageContext::new(StageIndex::new(0), 0.into());
    let mut losses = Vec::new();
    for step in 0..2 {
        let inputs = split(&pack((batch(step, MICROBATCHES), ids())), MICROBATCHES).expect("it divides");
        let targets = batch(100 + step, MICROBATCHES).chunk(MICROBATCHES as usize, 0);
        let mut of_step = Vec::new();
        let mut total: Option<Tensor<1>> = None;
        for (input, target) in inputs.into_iter().zip(targets) {
            let (image, ids): (Tensor<2>, Tensor<1, Int>) = unpack(input).expect("two tensors");
            let (image, target) = (image.autodiff(), target.autodiff());
            let outputs = module.forward(pack((image.clone(), ids.clone())), &context).expect("they fit");
            let whole = loss(unpack(outputs).expect("two tensors"), target.clone());
            let by_hand = loss(by_hand(image, ids), target);
            let number = |loss: &Tensor<1>| f64::from(loss.clone().into_scalar::<f32>());
            if step == 0 {
                assert_eq!(number(&by_hand), number(&whole));
            }
            of_step.push(number(&whole));
            total = Some(total.map_or(whole.clone(), |total| total + whole));
        }
        let gradients = (total.expect("a microbatch") / MICROBATCHES as f32).backward();
        module = optimizer.step(1e-2, module.clone(), GradientsParams::from_grads(gradients, &module));
        losses.push(of_step);
    }
    // Without clipping, which the plain run does not do, the second step's losses are those after one update.
    let config = PipelineConfig { clip_norm: None, ..config() };
    let stage =
        move |_| -> Result<Stage, GraphError> { Ok(Stage::of_graph_with_loss(graph.whole(make), loss)) };
    let mut pipeline = Pipeline::launch(program("gpipe", 1, MICROBATCHES), World::local(1), &config, stage)
        .expect("it starts");
    for (step, expected) in (0..).zip(losses) {
        let found = pipeline.step_batch(brought(step), 1e-2).expect("a step").losses;
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6 * expected.abs(), "{found} {expected}");
        }
    }
}

/// Returns the U-Net without a graph, with the values of the first step.
fn by_hand(image: Tensor<2>, ids: Tensor<1, Int>) -> (Tensor<2>, Tensor<2>) {
    let mix = |name, inputs: Vec<&Tensor<2>>| {
        let Layer::Mix(mix) = make(name, &Kind::Mix) else { unreachable!("a mix was made") };
        mix.of(inputs.into_iter().cloned())
    };
    let Layer::Halves(halves) = make("d2", &Kind::Halves) else { unreachable!("halves were made") };
    let Layer::Pick(pick) = make("out", &Kind::Pick) else { unreachable!("a pick was made") };
    let d0 = mix("d0", vec![&image]);
    let d1 = mix("d1", vec![&d0]);
    let d2 = (halves.linear.forward(d1.clone()).tanh(), d1.clone() * 0.5);
    let d3 = mix("d3", vec![&d2.0, &d2.1]);
    let m0 = mix("m0", vec![&d3, &d0]);
    let m1 = mix("m1", vec![&m0]);
    let u3 = mix("u3", vec![&m1, &d3]);
    let u2 = mix("u2", vec![&u3, &d2.1, &d0]);
    let u1 = mix("u1", vec![&u2, &d1, &d0]);
    let u0 = mix("u0", vec![&u1, &d0, &image]);
    let end = mix("end", vec![&u0, &u1, &m0]);
    (pick.of(end, ids), d2.0)
}

#[test]
fn an_evaluation_takes_skips_too() {
    for (schedule, ranks) in [("1f1b", 6), ("dualpipev", 2)] {
        let program = program(schedule, ranks, MICROBATCHES);
        let mut pipeline = launch(program, World::local(ranks));
        let evaluated = pipeline.eval_batch(brought(0)).expect("an evaluation");
        let trained = pipeline.step_batch(brought(0), 1e-2).expect("a step");
        assert_eq!(evaluated.losses, trained.losses, "{schedule}");
        assert_eq!(evaluated.outputs[0].len(), 2);
    }
}

/// Returns the losses, norms and parameters of a model in `stages` stages whose last layer shares the first
/// one's weight.
fn tied(stages: u32) -> Outcome {
    let named = Graph::builder().input("x").node("a", Kind::Mix, ["x"]).node("b", Kind::Mix, ["a"]);
    let named = named.node("c", Kind::Mix, ["b", "a"]).output("c").tie("c.linear.weight", "a.linear.weight");
    let splits = if stages == 3 { vec!["b", "c"] } else { Vec::new() };
    let named = splits.iter().fold(named, |named, split| named.split_before(split));
    let graph = named.build().expect("it is a graph");
    let program = program("1f1b", stages, MICROBATCHES);
    let placement = program.placement().clone();
    let make = move |stage: StageIndex| -> Result<Stage, GraphError> {
        // Copies start equal: `c` is made as `a` is.
        let part = graph
            .place(&placement)?
            .stage(stage, |name, kind| make(if name == "c" { "a" } else { name }, kind));
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        Ok(if stage.get() + 1 == stages {
            Stage::of_graph_with_loss(part, loss)
        } else {
            Stage::of_graph(part)
        })
    };
    let mut pipeline = Pipeline::launch(program, World::local(stages), &config(), make).expect("it starts");
    let steps = take_steps(&mut pipeline, 0..STEPS, MICROBATCHES);
    (steps, sorted(pipeline.parameters().expect("they are there")))
}

#[test]
fn tied_parameters_stay_equal_for_every_cut() {
    let (whole, parts) = (tied(1), tied(3));
    assert!(whole == parts, "a cut changes nothing");
    let copies: Vec<_> = whole.1.iter().filter(|(path, _)| path == "a.linear.weight").collect();
    assert_eq!(copies.len(), 2);
    assert_eq!(copies[0], copies[1]);
}

/// Returns five nodes in a row, a stage each, and one skip connection from the first to the last.
fn row() -> Graph<Kind> {
    let named = Graph::builder().input("x").node("a", Kind::Mix, ["x"]).node("b", Kind::Mix, ["a"]);
    let named =
        named.node("c", Kind::Mix, ["b"]).node("d", Kind::Mix, ["c"]).node("e", Kind::Mix, ["d", "a"]);
    let named = ["b", "c", "d", "e"].iter().fold(named.output("e"), |named, split| named.split_before(split));
    named.build().expect("it is a graph")
}

fn check_route(ranks: [u32; 5], straight: &[(u32, u32)]) {
    let placement = Placement::explicit(ranks.map(Into::into).to_vec()).expect("a placement");
    let graph = row();
    let placed = graph.place(&placement).expect("five stages");
    let expected: Vec<_> =
        straight.iter().map(|&(from, to)| (StageIndex::new(from), StageIndex::new(to), 1)).collect();
    assert_eq!(placed.direct(), expected, "{ranks:?}");
}

#[test]
fn a_value_takes_the_route_with_fewer_moves() {
    // Three moves along the ranks from stage 1, which also uses the value, or one direct move.
    check_route([0, 1, 2, 3, 4], &[(1, 4)]);
    // The user is on the rank that made the value: no move.
    check_route([0, 1, 1, 1, 0], &[(0, 4)]);
    // One move on either route: no direct message.
    check_route([0, 0, 0, 1, 1], &[]);
    check_route([0, 0, 0, 0, 0], &[]);
    check_route([0, 0, 1, 1, 2], &[(1, 4)]);
}

#[test]
fn stages_that_compute_their_forward_again_take_skips() {
    for (schedule, ranks) in [("gpipe", 4), ("1f1b", 3), ("zbvzerobubble", 2), ("interleaved1f1b", 2)] {
        let program = program(schedule, ranks, MICROBATCHES);
        let expected = train(program.clone(), World::local(ranks));
        for recompute in [Recompute::Stage, Recompute::Block] {
            let pipeline = launch_with(program.clone(), World::local(ranks), recompute);
            assert!(train_on(pipeline) == expected, "{schedule} on {ranks} ranks");
        }
    }
}
