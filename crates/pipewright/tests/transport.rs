//! What every transport must do. A new one adds a function that makes its world, and a line a check.

use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use pipewright::boundary::{pack, unpack};
use pipewright::failure::{Cause, StepError};
use pipewright::transport::{Direction, Endpoint, Payload, Tag, Waited, World};
use pipewright_schedule::{Microbatch, Rank, StageIndex};

/// Makes a world whose messages arrive by themselves.
type MakeWorld = fn(u32) -> Vec<Endpoint>;

fn local(ranks: u32) -> Vec<Endpoint> {
    World::local(ranks).into_endpoints()
}

/// Held messages, let go of by a thread of their own, the latest first.
fn held(ranks: u32) -> Vec<Endpoint> {
    let (world, limbo) = World::held(ranks);
    thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            limbo.release(limbo.len().wrapping_sub(1));
            thread::yield_now();
        }
    });
    world.into_endpoints()
}

macro_rules! conformance {
    ($transport:ident) => {
        mod $transport {
            #[test]
            fn tags_decide_not_arrival() {
                super::tags_decide_not_arrival(super::$transport);
            }
            #[test]
            fn every_pair_of_ranks_can_talk() {
                super::every_pair_of_ranks_can_talk(super::$transport);
            }
            #[test]
            fn tensors_arrive_as_they_left() {
                super::tensors_arrive_as_they_left(super::$transport);
            }
            #[test]
            fn a_wait_ends_at_its_deadline() {
                super::a_wait_ends_at_its_deadline(super::$transport);
            }
            #[test]
            fn a_failure_wakes_every_rank() {
                super::a_failure_wakes_every_rank(super::$transport);
            }
            #[test]
            fn messages_of_another_step_are_dropped() {
                super::messages_of_another_step_are_dropped(super::$transport);
            }
        }
    };
}

conformance!(local);
conformance!(held);

fn tag(direction: Direction, stage: u32, microbatch: u32) -> Tag {
    Tag::Boundary { direction, stage: StageIndex::new(stage), microbatch: Microbatch::new(microbatch) }
}

fn scalar(value: f32) -> Payload {
    let tensor = Tensor::<1>::from_floats([value], &Device::flex());
    Payload::Tensors(pack(tensor).into_iter().map(Some).collect())
}

fn value(payload: Payload) -> f32 {
    let Payload::Tensors(tensors) = payload else { panic!("tensors were sent") };
    let tensor: Tensor<1> = unpack(tensors.into_iter().flatten().collect()).expect("one of rank 1");
    tensor.into_scalar()
}

/// Waits for a message as a driver does.
fn receive(endpoint: &mut Endpoint, from: Rank, tag: Tag) -> Payload {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(message) = endpoint.try_take(from, tag) {
            return message.into_payload();
        }
        assert_eq!(endpoint.wait(until), Waited::Arrived, "{tag}");
    }
}

fn tags_decide_not_arrival(world: MakeWorld) {
    let mut ends = world(2);
    let (a, b) = (Rank::new(0), Rank::new(1));
    for microbatch in 0..20 {
        ends[0].send(b, tag(Direction::Forward, 1, microbatch), scalar(microbatch as f32));
        ends[0].send(b, tag(Direction::Backward, 1, microbatch), scalar(-1.0));
    }
    for microbatch in (0..20).rev() {
        let found = value(receive(&mut ends[1], a, tag(Direction::Forward, 1, microbatch)));
        assert_eq!(found, microbatch as f32);
    }
    assert!(ends[1].try_take(a, tag(Direction::Forward, 1, 0)).is_none(), "a message is taken once");
}

fn every_pair_of_ranks_can_talk(world: MakeWorld) {
    const RANKS: u32 = 4;
    let threads = world(RANKS).into_iter().map(|mut end| {
        thread::spawn(move || {
            let me = end.rank();
            for to in (0..RANKS).map(Rank::new) {
                end.send(to, tag(Direction::Forward, me.get(), 0), scalar(me.get() as f32));
            }
            for from in (0..RANKS).map(Rank::new) {
                let found = value(receive(&mut end, from, tag(Direction::Forward, from.get(), 0)));
                assert_eq!(found, from.get() as f32);
            }
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no rank panics"));
}

fn tensors_arrive_as_they_left(world: MakeWorld) {
    let device = Device::flex();
    let mut ends = world(2);
    let floats = Tensor::<2>::from_floats([[1.5, -2.0], [0.25, f32::MIN_POSITIVE]], &device);
    let ids = Tensor::<1, burn::tensor::Int>::from_ints([3, -4], &device);
    let sent = pack((floats.clone(), ids.clone()));
    let mut tensors: Vec<_> = sent.into_iter().map(Some).collect();
    tensors.insert(1, None);
    ends[0].send(Rank::new(1), tag(Direction::Backward, 0, 7), Payload::Tensors(tensors));
    let Payload::Tensors(mut found) = receive(&mut ends[1], Rank::new(0), tag(Direction::Backward, 0, 7))
    else {
        panic!("tensors were sent")
    };
    assert!(found.remove(1).is_none(), "a tensor without gradient arrives as such");
    type Pair = (Tensor<2>, Tensor<1, burn::tensor::Int>);
    let (found_floats, found_ids): Pair = unpack(found.into_iter().flatten().collect()).expect("two tensors");
    assert_eq!(found_floats.into_data(), floats.into_data());
    assert_eq!(found_ids.into_data(), ids.into_data());
}

fn a_wait_ends_at_its_deadline(world: MakeWorld) {
    let mut ends = world(2);
    let start = Instant::now();
    assert_eq!(ends[0].wait(start + Duration::from_millis(50)), Waited::TimedOut);
    assert!((50..2000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
}

fn a_failure_wakes_every_rank(world: MakeWorld) {
    let mut ends = world(3);
    let failing = ends.remove(1);
    let waiting: Vec<_> = ends
        .into_iter()
        .map(|mut end| thread::spawn(move || (end.wait(Instant::now() + Duration::from_secs(8)), end)))
        .collect();
    thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    failing.fail(StepError {
        rank: Rank::new(1),
        step: 1,
        action: None,
        cause: Cause::Panic { message: "out of cheese".to_owned() },
    });
    for thread in waiting {
        let (waited, end) = thread.join().expect("no rank panics");
        assert_eq!(waited, Waited::Aborted);
        assert_eq!(end.abort().first().map(|first| first.rank), Some(Rank::new(1)));
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

fn messages_of_another_step_are_dropped(world: MakeWorld) {
    let mut ends = world(2);
    let (a, b) = (Rank::new(0), Rank::new(1));
    ends[0].begin_step(1);
    ends[0].send(b, tag(Direction::Forward, 1, 0), scalar(1.0));
    ends[0].begin_step(2);
    ends[0].send(b, tag(Direction::Forward, 1, 0), scalar(2.0));
    ends[1].begin_step(2);
    assert_eq!(value(receive(&mut ends[1], a, tag(Direction::Forward, 1, 0))), 2.0);
}

#[test]
fn a_local_message_is_moved_not_copied() {
    use burn::backend::Flex;

    let pointer = |tensor: &Tensor<1>| {
        let primitive = tensor.clone().try_into_primitive::<Flex>().expect("a tensor of the CPU back end");
        primitive.bytes().as_ptr()
    };
    let mut ends = local(2);
    let tensor = Tensor::<1>::zeros([1024], &Device::flex());
    let before = pointer(&tensor);
    let payload = Payload::Tensors(pack(tensor).into_iter().map(Some).collect());
    ends[0].send(Rank::new(1), tag(Direction::Forward, 1, 0), payload);
    let Payload::Tensors(found) = receive(&mut ends[1], Rank::new(0), tag(Direction::Forward, 1, 0)) else {
        panic!("tensors were sent")
    };
    let found: Tensor<1> = unpack(found.into_iter().flatten().collect()).expect("one of rank 1");
    assert_eq!(pointer(&found), before);
}
