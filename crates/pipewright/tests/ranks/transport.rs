//! Runs the conformance suite over the transports of one process. A transport adds a function that makes its
//! world, and one line. Transports of several processes run the same checks under a launcher: see `mpi.rs`.

mod checks;

use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload};
use pipewright::tensor::{pack, unpack};
use pipewright::transport::{Endpoint, World};

use checks::{CHECKS, STEPS, receive, tag};

/// Makes a world whose messages are delivered automatically, for as long as the sender is kept.
type MakeWorld = fn(u32) -> (Vec<Endpoint>, Option<Sender<()>>);

fn local(ranks: u32) -> (Vec<Endpoint>, Option<Sender<()>>) {
    (World::local(ranks).into_endpoints(), None)
}

/// Makes a world with a thread that delivers the messages, starting with the latest.
fn held(ranks: u32) -> (Vec<Endpoint>, Option<Sender<()>>) {
    let (world, in_flight) = World::controlled(ranks);
    let (kept, dropped) = channel();
    thread::spawn(move || {
        while dropped.try_recv() == Err(TryRecvError::Empty) {
            match in_flight.len() {
                // While ranks wait for a deadline, this thread leaves the processors to other tests.
                0 => thread::sleep(Duration::from_micros(50)),
                some => in_flight.release(some - 1),
            }
        }
    });
    (world.into_endpoints(), Some(kept))
}

/// Runs every check in worlds of 1 to 8 ranks, one thread per rank.
fn conforms(world: MakeWorld) {
    for ranks in 1..=8 {
        for (name, check) in CHECKS {
            let (ends, _delivery) = world(ranks);
            let threads = ends.into_iter().map(|mut end| {
                let name = format!("{name}, {ranks} ranks");
                let thread = thread::Builder::new().name(name).spawn(move || check(&mut end, STEPS));
                thread.expect("the system gives threads")
            });
            // Start all ranks before waiting for the first.
            let threads: Vec<_> = threads.collect();
            for thread in threads {
                thread.join().unwrap_or_else(|_| panic!("{name} with {ranks} ranks"));
            }
        }
    }
}

#[test]
fn local_conforms() {
    conforms(local);
}

#[test]
fn held_conforms() {
    conforms(held);
}

#[test]
fn a_local_message_is_moved_not_copied() {
    use burn::backend::Flex;

    let pointer = |tensor: &Tensor<1>| {
        let primitive = tensor.clone().try_into_primitive::<Flex>().expect("a tensor of the CPU back end");
        primitive.bytes().as_ptr()
    };
    let (mut ends, _) = local(2);
    let tensor = Tensor::<1>::zeros([1024], &Device::flex());
    let before = pointer(&tensor);
    let payload = Payload::Tensors(pack(tensor).into_iter().map(Some).collect());
    ends[0].send(WorldRank::new(1), tag(Direction::Forward, 1, 0), payload);
    let Payload::Tensors(found) = receive(&mut ends[1], WorldRank::new(0), tag(Direction::Forward, 1, 0))
    else {
        panic!("tensors were sent")
    };
    let found: Tensor<1> = unpack(found.into_iter().flatten().collect()).expect("one of rank 1");
    assert_eq!(pointer(&found), before);
}
