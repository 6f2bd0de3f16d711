//! Boundary messages between two processes, over receives that are posted before the messages are sent: their
//! contents, the buffers that they use, other sizes, and training steps.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;
use pipewright::message::{Direction, Payload};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::StageError;
use pipewright::tensor::{CheckMetadata, OptionalTensors, pack, unpack};
use pipewright::transport::{Endpoint, World};
use pipewright_schedule::{Action, Level, LowerConfig, ScheduleSpec, generate, lower, validate};

use crate::checks::{receive, tag};
use crate::linear::{FEATURES, launch, rows};
use crate::mpirun;

/// The messages of each process.
const MESSAGES: u32 = 5_000;
/// The messages before buffers are counted.
const FIRST: u32 = 100;
/// The elements of a message.
const ELEMENTS: usize = 4 << 10;
/// The least size of a buffer that holds a message with its head. A tensor alone takes less.
const FRAME: usize = 4 * ELEMENTS + 64;
const DEADLINE: Duration = Duration::from_secs(20);

/// Counts the blocks that have room for a message.
struct Counting;

static MADE: AtomicU64 = AtomicU64::new(0);
static HELD: AtomicI64 = AtomicI64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn note(before: usize, after: usize) {
    let frames = |bytes: usize| if bytes >= FRAME { bytes as i64 } else { 0 };
    HELD.fetch_add(frames(after) - frames(before), Ordering::Relaxed);
    if frames(after) > frames(before) {
        MADE.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(0, layout.size());
        // SAFETY: the caller's contract is the inner allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(0, layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(layout.size(), new_size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Returns the tensor of a message, which depends on its number.
fn tensor(message: u32, elements: usize) -> Tensor<1> {
    let values: Vec<f32> = (0..elements).map(|place| (place as u32 ^ message) as f32).collect();
    Tensor::from_floats(values.as_slice(), &Device::flex())
}

/// Both processes send messages with these numbers of elements to each other, one after the other, and
/// compare what arrives. Returns the number of messages that arrived in receives that were posted for them.
fn exchange(end: &mut Endpoint, step: u64, messages: u32, elements: impl Fn(u32) -> usize) -> u64 {
    end.begin_step(step);
    let (before, own) = (end.posted_receives(), end.rank().get());
    let other = WorldRank::new(1 - own);
    for message in 0..messages {
        let values = tensor(message, elements(message));
        let payload = Payload::Tensors(pack(values.clone()).into_iter().map(Some).collect());
        end.send(other, tag(Direction::Forward, own, message), payload);
        let Payload::Tensors(found) = receive(end, other, tag(Direction::Forward, 1 - own, message)) else {
            panic!("tensors were sent")
        };
        let found: Tensor<1> = unpack(found.into_iter().flatten().collect()).expect("one of rank 1");
        assert_eq!(found.into_data(), values.into_data(), "message {message}");
    }
    end.posted_receives() - before
}

/// Exchanges ten thousand messages, and then messages of other sizes.
pub(crate) fn reuse_buffers() {
    let world = World::mpi(DEADLINE).expect("mpirun started this process");
    let mut end = world.into_endpoints().pop().expect("a process has a rank");
    exchange(&mut end, 1, FIRST, |_| ELEMENTS);
    let (made, held) = (MADE.load(Ordering::Relaxed), HELD.load(Ordering::Relaxed));
    let posted = exchange(&mut end, 2, MESSAGES, |_| ELEMENTS);
    // The other process may have sent the first message before this one began to count.
    assert!(posted >= u64::from(MESSAGES) - 1, "{posted} of {MESSAGES} receives were posted");
    let (made, held) = (MADE.load(Ordering::Relaxed) - made, HELD.load(Ordering::Relaxed) - held);
    // A frame that is sent while another thread has the buffer of the last one takes a new one, which is
    // kept.
    assert!(made < 32, "{made} buffers were allocated for {MESSAGES} messages");
    assert!(held <= 32 * FRAME as i64, "{held} bytes more are held");
    // The last microbatches may have fewer rows.
    let posted = exchange(&mut end, 3, 50, |message| if message % 4 == 3 { 5 } else { ELEMENTS });
    assert!(posted >= 49, "a shorter message fits too: {posted}");
    // A longer message is announced until the other process knows that there is room for it.
    let posted = exchange(&mut end, 4, 200, |message| if message % 4 == 3 { 5 } else { 3 * ELEMENTS });
    assert!((50..200).contains(&posted), "{posted} of 200 longer messages");
    let posted = exchange(&mut end, 5, 50, |_| 3 * ELEMENTS);
    assert!(posted >= 49, "there is room for them: {posted}");
    if end.rank().get() == 0 {
        mpirun::report("receives that are posted reuse their buffers");
    }
}

/// Sends tensors with twice the columns when it is on.
#[derive(Default)]
struct Wider {
    is_on: AtomicBool,
}

impl ActionHook for Wider {
    fn message(
        &self,
        _rank: WorldRank,
        action: Action,
        tensors: &mut OptionalTensors,
    ) -> Result<(), StageError> {
        if self.is_on.load(Ordering::Relaxed) && matches!(action, Action::SendForward { .. }) {
            let sent: Tensor<2> = unpack(tensors.drain(..).flatten().collect()).expect("one of rank 2");
            *tensors = pack(Tensor::cat(vec![sent.clone(), sent], 1)).into_iter().map(Some).collect();
        }
        Ok(())
    }
}

fn two_stages(world: World, hook: Option<Arc<dyn ActionHook>>) -> Pipeline {
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let program = lower(&generate("1f1b", &spec).expect("a schedule"), &LowerConfig::from(Level::Comms));
    let program = validate(program.expect("it lowers"), Level::Comms).expect("it is sound");
    let check_metadata = CheckMetadata::Always;
    launch(
        program,
        world,
        PipelineConfig { deadline: DEADLINE, check_metadata, hook, ..PipelineConfig::default() },
    )
}

/// Checks that the losses are the losses of one process.
pub(crate) fn train() {
    let world = World::mpi(DEADLINE).expect("mpirun started this process");
    let is_first = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let steps = |mut pipeline: Pipeline| -> Vec<Vec<f64>> {
        let data = || rows(4 * 1024);
        (0..6).map(|_| pipeline.step(data(), data(), 1e-3).expect("a step").losses).collect()
    };
    let found = steps(two_stages(world, None));
    assert_eq!(found, steps(two_stages(World::local(2), None)));
    if is_first {
        mpirun::report("steps with posted receives have the losses of one process");
    }
}

/// A tensor of another shape, which is longer than the receive that is posted, is an error with both sides.
pub(crate) fn refuse_longer() {
    let world = World::mpi(DEADLINE).expect("mpirun started this process");
    let is_first = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let hook = Arc::new(Wider::default());
    let mut pipeline = two_stages(world, Some(hook.clone()));
    for _ in 0..3 {
        pipeline.step(rows(64), rows(64), 1e-3).expect("a step");
    }
    hook.is_on.store(true, Ordering::Relaxed);
    let error = pipeline.step(rows(64), rows(64), 1e-3).map(drop).expect_err("the width differs");
    let expected =
        format!("stage 0 on rank 0 sent F32 [16, {}], stage 1 on rank 1 expects F32", 2 * FEATURES);
    assert!(error.to_string().contains(&expected), "{error}");
    if is_first {
        mpirun::report("a message that is longer than its receive is refused with both sides");
    }
}
