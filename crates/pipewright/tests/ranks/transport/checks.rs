//! The conformance suite of transports: programs that all ranks of a world run together.
//!
//! A check gets its rank's endpoint and the number of its first step. Step numbers increase within a world.

use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor};
use pipewright::collective::{CollectiveError, Communicator, Group};
use pipewright::failure::{Cause, StepError};
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload, Tag};
use pipewright::tensor::{Values, pack, unpack};
use pipewright::transport::{Endpoint, Waited};
use pipewright_schedule::{Microbatch, StageIndex};

/// A check: its name and the function that each rank runs.
pub(crate) type Check = (&'static str, fn(&mut Endpoint, u64));

/// All checks. The check that fails the world comes last, because a failed world cannot be used again.
pub(crate) const CHECKS: [Check; 11] = [
    ("tags_decide_not_arrival", tags_decide_not_arrival),
    ("every_pair_of_ranks_can_talk", every_pair_of_ranks_can_talk),
    ("tensors_arrive_as_they_left", tensors_arrive_as_they_left),
    ("large_messages_cross_each_other", large_messages_cross_each_other),
    ("a_message_leaves_before_it_is_taken", a_message_leaves_before_it_is_taken),
    (
        "collectives_return_the_right_tensors_on_every_rank",
        collectives_return_the_right_tensors_on_every_rank,
    ),
    ("groups_act_by_themselves", groups_act_by_themselves),
    ("a_collective_names_the_missing_rank", a_collective_names_the_missing_rank),
    ("a_wait_ends_at_its_deadline", a_wait_ends_at_its_deadline),
    ("messages_of_another_step_are_dropped", messages_of_another_step_are_dropped),
    ("a_failure_wakes_every_rank", a_failure_wakes_every_rank),
];

/// The number of steps that a check may use.
pub(crate) const STEPS: u64 = 10;

pub(crate) fn tag(direction: Direction, stage: u32, microbatch: u32) -> Tag {
    Tag::Boundary { direction, stage: StageIndex::new(stage), microbatch: Microbatch::new(microbatch) }
}

pub(crate) fn scalar(value: f32) -> Payload {
    let tensor = Tensor::<1>::from_floats([value], &Device::flex());
    Payload::Tensors(pack(tensor).into_iter().map(Some).collect())
}

fn value(payload: Payload) -> f32 {
    let Payload::Tensors(tensors) = payload else { panic!("tensors were sent") };
    let tensor: Tensor<1> = unpack(tensors.into_iter().flatten().collect()).expect("one of rank 1");
    tensor.into_scalar()
}

/// Waits for a message as a driver does.
pub(crate) fn receive(end: &mut Endpoint, from: WorldRank, tag: Tag) -> Payload {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(message) = end.try_take(from, tag) {
            return message.into_payload();
        }
        assert_eq!(end.wait(until), Waited::Arrived, "{tag}");
    }
}

fn all_ranks(end: &Endpoint) -> impl Iterator<Item = WorldRank> + use<> {
    (0..end.ranks()).map(WorldRank::new)
}

/// Returns the next and the previous rank in a ring.
fn neighbours(end: &Endpoint) -> (WorldRank, WorldRank) {
    let (rank, ranks) = (end.rank().get(), end.ranks());
    (WorldRank::new((rank + 1) % ranks), WorldRank::new((rank + ranks - 1) % ranks))
}

/// Returns when every rank has called it.
pub(crate) fn barrier(end: &mut Endpoint, microbatch: u32) {
    for to in all_ranks(end) {
        end.send(to, tag(Direction::Forward, StageIndex::LARGEST, microbatch), scalar(0.0));
    }
    for from in all_ranks(end) {
        receive(end, from, tag(Direction::Forward, StageIndex::LARGEST, microbatch));
    }
}

fn tags_decide_not_arrival(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let (next, previous) = neighbours(end);
    for microbatch in 0..20 {
        end.send(next, tag(Direction::Forward, 1, microbatch), scalar(microbatch as f32));
        end.send(next, tag(Direction::Backward, 1, microbatch), scalar(-1.0));
    }
    for microbatch in (0..20).rev() {
        let found = value(receive(end, previous, tag(Direction::Forward, 1, microbatch)));
        assert_eq!(found, microbatch as f32);
    }
    assert!(end.try_take(previous, tag(Direction::Forward, 1, 0)).is_none(), "a message is taken once");
}

fn every_pair_of_ranks_can_talk(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let own = end.rank();
    for to in all_ranks(end) {
        end.send(to, tag(Direction::Forward, own.get(), 0), scalar(own.get() as f32));
    }
    for from in all_ranks(end) {
        let found = value(receive(end, from, tag(Direction::Forward, from.get(), 0)));
        assert_eq!(found, from.get() as f32);
    }
}

fn tensors_arrive_as_they_left(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let (next, previous) = neighbours(end);
    let device = Device::flex();
    let floats = Tensor::<2>::from_floats([[1.5, -2.0], [0.25, f32::MIN_POSITIVE]], &device);
    let ids = Tensor::<1, Int>::from_ints([3, -4], &device);
    let sent = pack((floats.clone(), ids.clone()));
    let mut tensors: Vec<_> = sent.into_iter().map(Some).collect();
    tensors.insert(1, None);
    end.send(next, tag(Direction::Backward, 0, 7), Payload::Tensors(tensors));
    let Payload::Tensors(mut found) = receive(end, previous, tag(Direction::Backward, 0, 7)) else {
        panic!("tensors were sent")
    };
    assert!(found.remove(1).is_none(), "a tensor without gradient arrives as such");
    type Pair = (Tensor<2>, Tensor<1, Int>);
    let (found_floats, found_ids): Pair = unpack(found.into_iter().flatten().collect()).expect("two tensors");
    assert_eq!(found_floats.into_data(), floats.into_data());
    assert_eq!(found_ids.into_data(), ids.into_data());
}

/// Every rank sends megabytes to every other before it takes any.
fn large_messages_cross_each_other(end: &mut Endpoint, step: u64) {
    const ELEMENTS: usize = 1 << 20;
    end.begin_step(step);
    let own = end.rank();
    for to in all_ranks(end) {
        let tensor = Tensor::<1>::full([ELEMENTS], (own.get() * 100 + to.get()) as f32, &Device::flex());
        let payload = Payload::Tensors(pack(tensor).into_iter().map(Some).collect());
        end.send(to, tag(Direction::Forward, 0, 0), payload);
    }
    for from in all_ranks(end) {
        let Payload::Tensors(found) = receive(end, from, tag(Direction::Forward, 0, 0)) else {
            panic!("tensors were sent")
        };
        let found: Tensor<1> = unpack(found.into_iter().flatten().collect()).expect("one of rank 1");
        let expected = Tensor::<1>::full([ELEMENTS], (from.get() * 100 + own.get()) as f32, &Device::flex());
        // At once: a loop over the elements is slow, because tests are not optimised.
        assert!(found.into_data() == expected.into_data(), "the message of rank {from}");
    }
}

/// Every rank waits until its message has left, as `WAIT_SEND` does, before it takes any.
fn a_message_leaves_before_it_is_taken(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let (next, previous) = neighbours(end);
    let sent = tag(Direction::Forward, 1, 0);
    assert!(end.is_sent(next, sent), "there is no such message yet");
    let tensor = Tensor::<1>::ones([1 << 20], &Device::flex());
    end.send(next, sent, Payload::Tensors(pack(tensor).into_iter().map(Some).collect()));
    let until = Instant::now() + PATIENCE;
    while !end.is_sent(next, sent) {
        assert_eq!(end.wait(until), Waited::Arrived, "the message has left, or another one has arrived");
        // A message that arrived ends the wait at once until the endpoint has looked at it.
        assert!(end.try_take(previous, tag(Direction::Backward, 1, 0)).is_none());
    }
    receive(end, previous, sent);
    assert!(end.is_sent(next, sent));
}

const PATIENCE: Duration = Duration::from_secs(20);

fn floats(values: &[f32]) -> Values {
    pack(Tensor::<1>::from_floats(values, &Device::flex()))
}

fn read(values: Values) -> Vec<Vec<f32>> {
    let tensors = values.into_iter().map(|value| unpack::<Tensor<1>>(vec![value]).expect("one of rank 1"));
    tensors.map(|tensor| tensor.into_data().iter::<f32>().collect()).collect()
}

fn collectives_return_the_right_tensors_on_every_rank(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let (rank, ranks) = (end.rank().get() as f32, end.ranks());
    let group = Group::of_world(end);
    let mut all = Communicator::new(end, group, 0, PATIENCE);
    all.barrier().expect("all come");

    for root in (0..ranks).map(WorldRank::new) {
        let found = all.broadcast(root, floats(&[rank, 7.0])).expect("all take part");
        assert_eq!(read(found), [[root.get() as f32, 7.0]]);
    }

    // Integers can be gathered too.
    let numbers = Tensor::<1, Int>::from_data([rank as i64], &Device::flex());
    let gathered = all.all_gather(pack((numbers, Tensor::<1>::from_floats([rank], &Device::flex()))));
    for (place, tensors) in gathered.expect("all take part").into_iter().enumerate() {
        let (numbers, floats): (Tensor<1, Int>, Tensor<1>) = unpack(tensors).expect("two of rank 1");
        assert_eq!(
            (numbers.into_scalar::<i64>() as usize, floats.into_scalar::<f32>() as usize),
            (place, place)
        );
    }

    let parts = (0..ranks).map(|to| floats(&[rank, to as f32])).collect();
    let sums = all.reduce_scatter(parts).expect("all take part");
    let sum_of_ranks = (ranks * (ranks - 1) / 2) as f32;
    assert_eq!(read(sums), [[sum_of_ranks, rank * ranks as f32]]);

    // More and fewer elements than ranks, and a sum whose bits depend on the order: neighbours are added
    // first.
    let values: Vec<f32> = (0..11).map(|place| 1.0 / (1.0 + rank + place as f32)).collect();
    let expected = |place: usize| {
        let mut sums: Vec<f32> = (0..ranks).map(|rank| 1.0 / (1.0 + rank as f32 + place as f32)).collect();
        while sums.len() > 1 {
            sums = sums.chunks(2).map(|pair| pair.iter().copied().sum()).collect();
        }
        sums[0]
    };
    let sums = all.all_reduce([floats(&values), floats(&[rank])].concat()).expect("all take part");
    let sums = read(sums);
    assert_eq!(sums[0], (0..11).map(expected).collect::<Vec<f32>>());
    assert_eq!(sums[1], [sum_of_ranks]);
}

fn groups_act_by_themselves(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let (rank, ranks) = (end.rank(), end.ranks());
    // Groups of even and odd ranks, the latter in reverse order.
    let members = (0..ranks).map(WorldRank::new).filter(|other| other.get() % 2 == rank.get() % 2);
    let mut members: Vec<WorldRank> = members.collect();
    if rank.get() % 2 == 1 {
        members.reverse();
    }
    let group = Group::new(members.clone(), rank).expect("a rank is in its group");
    let mut half = Communicator::new(end, group, rank.get() % 2, PATIENCE);
    let gathered = half.all_gather(floats(&[rank.get() as f32])).expect("all take part");
    let gathered: Vec<f32> = gathered.into_iter().flat_map(|values| read(values).concat()).collect();
    assert_eq!(gathered, members.iter().map(|rank| rank.get() as f32).collect::<Vec<_>>());
}

fn a_collective_names_the_missing_rank(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    // All start to wait together.
    barrier(end, 0);
    let last = WorldRank::new(end.ranks() - 1);
    if end.rank() != last {
        let group = Group::of_world(end);
        let waited = Duration::from_secs(2);
        let found = Communicator::new(end, group, 5, waited).barrier();
        assert!(matches!(found, Err(CollectiveError::Silent { rank, .. }) if rank == last), "{found:?}");
    }
    // Tensors that do not match.
    end.begin_step(step + 1);
    let group = Group::of_world(end);
    let (own, several) = (end.rank().get() as usize, end.ranks() > 1);
    let mut all = Communicator::new(end, group, 6, PATIENCE);
    let parts = (0..all.group().members().len()).map(|_| floats(&vec![1.0; own + 1])).collect();
    let found = all.reduce_scatter(parts);
    assert_eq!(is_mistake(&found, "tensors that are added have one shape"), several, "{found:?}");
    let expected = all.group().members().len();
    // Two tensors with equally many elements and different shapes.
    let shape = if own == 0 { [2, 3] } else { [3, 2] };
    let found = all.all_reduce(pack(Tensor::<2>::zeros(shape, &Device::flex())));
    assert_eq!(is_mistake(&found, "tensors that are added have one shape"), several, "{found:?}");
    let outsider = WorldRank::new(99);
    let found = all.broadcast(outsider, Values::new());
    assert!(is_mistake(&found, "rank 99 is not in the group"), "{found:?}");
    let found = all.reduce_scatter(Vec::new());
    assert!(is_mistake(&found, &format!("0 parts for {expected} members")), "{found:?}");
}

fn is_mistake<T>(found: &Result<T, CollectiveError>, words: &str) -> bool {
    matches!(found, Err(CollectiveError::Mistake(mistake)) if mistake.contains(words))
}

fn a_wait_ends_at_its_deadline(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    // Messages of an earlier check may still arrive; trying to take a message drops them.
    barrier(end, 0);
    let start = Instant::now();
    while end.wait(start + Duration::from_millis(50)) == Waited::Arrived {
        let _ = end.try_take(end.rank(), tag(Direction::Backward, 0, 0));
    }
    let waited = start.elapsed();
    assert!((50..2000).contains(&waited.as_millis()), "{waited:?}");
    barrier(end, 1);
}

fn messages_of_another_step_are_dropped(end: &mut Endpoint, step: u64) {
    let (next, previous) = neighbours(end);
    for later in 0..3 {
        end.begin_step(step + later);
        end.send(next, tag(Direction::Forward, 1, 0), scalar(later as f32));
    }
    assert_eq!(value(receive(end, previous, tag(Direction::Forward, 1, 0))), 2.0);
}

fn a_failure_wakes_every_rank(end: &mut Endpoint, step: u64) {
    end.begin_step(step);
    let failing = WorldRank::new(end.ranks() - 1);
    let ready = tag(Direction::Backward, 0, 0);
    end.send(failing, ready, scalar(0.0));
    if end.rank() == failing {
        for from in all_ranks(end) {
            receive(end, from, ready);
        }
        thread::sleep(Duration::from_millis(20));
        let cause = Cause::Panic { message: "out of cheese".to_owned() };
        end.fail(StepError { rank: failing, step: step.into(), action: None, cause });
    }
    let start = Instant::now();
    while end.wait(start + Duration::from_secs(8)) == Waited::Arrived {
        let _ = end.try_take(end.rank(), ready);
    }
    let first = end.abort().first().expect("a rank failed");
    assert_eq!(first.rank, failing);
    assert!(first.to_string().contains("out of cheese"), "{first}");
    let waited = start.elapsed();
    assert!(waited < Duration::from_secs(2), "{waited:?}");
}
