//! [`InjectedFaults`]: faults that the variable `PIPEWRIGHT_FAULT` asks for, to try how a run continues
//! after them.
//!
//! The variable has one or more faults with commas between them, each `KIND:RANK:STEP` or
//! `KIND:RANK:STEP:TIMES`. The kind is `panic`, or `hang`, which never ends. Without a number of times, a
//! fault happens once in a process. With the kind `slow`, each computing action of the rank takes [`DELAY`]
//! longer, from the step on for as many steps as the number of times. Several such faults of a rank add up. With the kind `half`,
//! an action takes twice as long. With the kind `flip`, the rank computes a wrong bit in each element of the gradients that it
//! sends for the first microbatch, in as many computations of the step as the number of times. With the kind `infinite`, the
//! first element of these gradients is infinite. A tensor rank sends only some of the elements. A rank that has the first stage
//! alone sends no gradients and is refused. With the kinds `kill-in-update` and `stop-in-update`, the process of the rank kills or
//! stops itself when the rank has the gradient norm and has not updated its parameters. With the kinds `panic-in-move` and
//! `kill-in-move`, the rank panics or its process kills itself when layers begin to move after the step.
//!
//! A fault of any kind but `slow` and `half` may have `file=PATH` instead of the step and the number of times. It then happens
//! when the file exists, and removes it. So it happens once, although the run starts again.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor, TensorData};
use pipewright::hook::{ActionHook, BackwardRun};
use pipewright::ids::{StepNumber, WorldRank};
use pipewright::stage::StageError;
use pipewright::tensor::{pack, unpack};
use pipewright_schedule::Action;
use rustix::process::{Signal, getpid, kill_process};

use crate::error::RunError;

/// The name of the variable.
const VARIABLE: &str = "PIPEWRIGHT_FAULT";

/// The time by which an action of a slow rank takes longer.
const DELAY: Duration = Duration::from_millis(20);

/// The faults that are still to happen, and the step of each rank.
#[derive(Debug)]
pub(crate) struct InjectedFaults {
    faults: Vec<InjectedFault>,
    /// The step that each rank runs, from 1. Ranks may be in two steps at the same time.
    steps: Mutex<BTreeMap<WorldRank, u64>>,
}

#[derive(Debug)]
struct InjectedFault {
    kind: Kind,
    rank: WorldRank,
    moment: Moment,
}

#[derive(Debug)]
enum Moment {
    Step {
        step: u64,
        /// How often the fault is still to happen; the number of steps of a slow rank.
        left: AtomicU32,
    },
    /// When this file exists.
    File(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Panic,
    Hang,
    Slow,
    Half,
    Flip,
    Infinite,
    KillInUpdate,
    StopInUpdate,
    PanicInMove,
    KillInMove,
}

/// The names of the kinds.
const KINDS: [(&str, Kind); 10] = [
    ("panic", Kind::Panic),
    ("hang", Kind::Hang),
    ("slow", Kind::Slow),
    ("half", Kind::Half),
    ("flip", Kind::Flip),
    ("infinite", Kind::Infinite),
    ("kill-in-update", Kind::KillInUpdate),
    ("stop-in-update", Kind::StopInUpdate),
    ("panic-in-move", Kind::PanicInMove),
    ("kill-in-move", Kind::KillInMove),
];

impl Kind {
    fn is_wrong_gradient(self) -> bool {
        matches!(self, Self::Flip | Self::Infinite)
    }

    /// Flips the highest bit of the exponent of each element that is 0, which makes the element larger, or makes the
    /// first element infinite. The elements keep their type, and all of their other bits.
    fn changed(self, gradient: Tensor<3>) -> Tensor<3> {
        let device = gradient.device();
        let (bytes, shape, dtype) = gradient.into_data().into_parts();
        let mut bytes = bytes.to_vec();
        for element in bytes.chunks_exact_mut(dtype.size()) {
            if self == Self::Infinite {
                element.copy_from_slice(infinity(dtype));
                break;
            }
            flip(element, dtype);
        }
        Tensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype), (&device, dtype))
    }
}

/// Flips a bit of the exponent of a number in the order of bytes of this machine.
fn flip(element: &mut [u8], dtype: DType) {
    // The sign and the exponent are in the two highest bytes.
    let first = if cfg!(target_endian = "little") { element.len() - 2 } else { 0 };
    let half = &mut element[first..first + 2];
    let bits = u16::from_ne_bytes([half[0], half[1]]);
    let exponent: u16 = match dtype {
        DType::F16 => 0x7c00,
        DType::F64 => 0x7ff0,
        _ => 0x7f80,
    };
    // A number that is not finite has no such bit, and gets another sign.
    let bit = (exponent & !bits).checked_ilog2().unwrap_or(15);
    half.copy_from_slice(&(bits ^ (1 << bit)).to_ne_bytes());
}

/// Returns the bytes of an infinite number.
fn infinity(dtype: DType) -> &'static [u8] {
    const HALF: [u8; 2] = 0x7c00_u16.to_ne_bytes();
    const BRAIN: [u8; 2] = 0x7f80_u16.to_ne_bytes();
    const SINGLE: [u8; 4] = f32::INFINITY.to_ne_bytes();
    const DOUBLE: [u8; 8] = f64::INFINITY.to_ne_bytes();
    match dtype {
        DType::F16 => &HALF,
        DType::BF16 => &BRAIN,
        DType::F64 => &DOUBLE,
        _ => &SINGLE,
    }
}

impl InjectedFaults {
    /// Reads the variable; `None` if it is not set.
    pub(crate) fn of_environment() -> Result<Option<Arc<Self>>, RunError> {
        let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let text = text.to_string_lossy();
        let faults: Option<Vec<InjectedFault>> = text.split(',').map(InjectedFault::read).collect();
        let faults = faults.ok_or_else(|| {
            let kinds = KINDS.map(|(name, _)| name).join(", ");
            RunError::input(format!(
                "{VARIABLE}={text}: write KIND:RANK:STEP or KIND:RANK:STEP:TIMES with one of the kinds {kinds}, such as \
                 panic:1:3, and a step and a number of times from 1; or KIND:RANK:file=PATH with another kind than slow and half"
            ))
        })?;
        Ok(Some(Arc::new(Self { faults, steps: Mutex::default() })))
    }

    /// Checks that a run with this many ranks has the ranks of all faults, and that a rank sends gradients if a
    /// bit of them is to be wrong.
    pub(crate) fn require(
        &self,
        ranks: u32,
        sends_gradients: impl Fn(WorldRank) -> bool,
    ) -> Result<(), RunError> {
        let missing = self.faults.iter().map(|fault| fault.rank).find(|rank| rank.get() >= ranks);
        if let Some(rank) = missing {
            return Err(RunError::input(format!(
                "{VARIABLE} names rank {rank}, and the run has the ranks 0 to {}",
                ranks.saturating_sub(1)
            )));
        }
        let mut wrong = self.faults.iter().filter(|fault| fault.kind.is_wrong_gradient());
        match wrong.find(|fault| !sends_gradients(fault.rank)) {
            Some(InjectedFault { rank, .. }) => Err(RunError::input(format!(
                "{VARIABLE} changes the gradients that rank {rank} sends, and it sends none, because it has the first \
                 stage alone: name a rank with a later stage"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the step that a rank runs; 0 before its first one.
    fn step_of(&self, rank: WorldRank) -> u64 {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.get(&rank).copied().unwrap_or_default()
    }
}

impl InjectedFault {
    fn read(text: &str) -> Option<Self> {
        let mut parts = text.trim().splitn(3, ':');
        let name = parts.next()?;
        let kind = KINDS.iter().find(|(known, _)| *known == name)?.1;
        let rank = WorldRank::new(parts.next()?.parse().ok()?);
        let moment = Moment::read(parts.next()?)?;
        let lasts = matches!(kind, Kind::Slow | Kind::Half);
        let happens = !lasts || matches!(moment, Moment::Step { .. });
        happens.then_some(Self { kind, rank, moment })
    }

    /// Returns whether the fault ends the action of this rank in this step, and counts it.
    fn happens(&self, rank: WorldRank, step: u64) -> bool {
        matches!(self.kind, Kind::Panic | Kind::Hang) && self.takes(rank, step)
    }

    /// Returns whether the fault changes a gradient of this rank in this step, and counts it.
    fn changes_gradient(&self, rank: WorldRank, step: u64) -> bool {
        self.kind.is_wrong_gradient() && self.takes(rank, step)
    }

    /// Returns the signal that the fault sends to the process of this rank in the update of this step, and counts
    /// the fault.
    fn signals_update(&self, rank: WorldRank, step: u64) -> Option<Signal> {
        let signal = match self.kind {
            Kind::KillInUpdate => Signal::KILL,
            Kind::StopInUpdate => Signal::STOP,
            _ => return None,
        };
        self.takes(rank, step).then_some(signal)
    }

    fn takes(&self, rank: WorldRank, step: u64) -> bool {
        self.rank == rank && self.moment.takes(step)
    }

    /// Returns whether the fault makes this rank slow in this step, in the way of this kind.
    fn slows(&self, kind: Kind, rank: WorldRank, step: u64) -> bool {
        self.kind == kind && self.rank == rank && self.moment.lasts(step)
    }
}

impl Moment {
    fn read(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("file=") {
            return (!path.is_empty()).then(|| Self::File(path.into()));
        }
        let (step, times) = text.split_once(':').unwrap_or((text, "1"));
        let (step, times): (u64, u32) = (step.parse().ok()?, times.parse().ok()?);
        (step > 0 && times > 0).then(|| Self::Step { step, left: AtomicU32::new(times) })
    }

    /// Returns whether a fault happens in this step, and counts it.
    fn takes(&self, step: u64) -> bool {
        match self {
            Self::Step { step: due, left } => {
                let take = |left: u32| left.checked_sub(1);
                *due == step && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
            }
            // Only one process can remove it.
            Self::File(path) => fs::remove_file(path).is_ok(),
        }
    }

    /// Returns whether a fault that lasts several steps has begun and not ended in this step.
    fn lasts(&self, step: u64) -> bool {
        let Self::Step { step: first, left } = self else { return false };
        let steps = u64::from(left.load(Ordering::SeqCst));
        step.checked_sub(*first).is_some_and(|since| since < steps)
    }
}

impl ActionHook for InjectedFaults {
    fn begin_step(&self, rank: WorldRank, step: StepNumber) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, step.get());
    }

    fn begin_update(&self, rank: WorldRank) {
        let step = self.step_of(rank);
        if let Some(signal) = self.faults.iter().find_map(|fault| fault.signals_update(rank, step)) {
            // A process may always send a signal to itself.
            let _ = kill_process(getpid(), signal);
        }
    }

    fn begin_move(&self, rank: WorldRank) {
        let step = self.step_of(rank);
        let happens = |kind| self.faults.iter().any(|fault| fault.kind == kind && fault.takes(rank, step));
        if happens(Kind::KillInMove) {
            // A process may always send a signal to itself.
            let _ = kill_process(getpid(), Signal::KILL);
        }
        assert!(!happens(Kind::PanicInMove), "{VARIABLE} asks for this panic");
    }

    fn around(&self, rank: WorldRank, action: Action, run: &mut dyn FnMut()) {
        let step = self.step_of(rank);
        if action.is_compute() {
            let slow = self.faults.iter().filter(|fault| fault.slows(Kind::Slow, rank, step));
            slow.for_each(|_| std::thread::sleep(DELAY));
        }
        match self.faults.iter().find(|fault| fault.happens(rank, step)).map(|fault| fault.kind) {
            Some(Kind::Panic) => panic!("{VARIABLE} asks for this panic"),
            Some(Kind::Hang) => loop {
                std::thread::sleep(Duration::from_secs(3600));
            },
            _ => {
                let began = Instant::now();
                run();
                if action.is_compute() && self.faults.iter().any(|fault| fault.slows(Kind::Half, rank, step))
                {
                    std::thread::sleep(began.elapsed());
                }
            }
        }
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        let step = self.step_of(run.rank());
        if run.microbatch().get() > 0 || !run.gradients().iter().any(Option::is_some) {
            return Ok(());
        }
        if let Some(fault) = self.faults.iter().find(|fault| fault.changes_gradient(run.rank(), step)) {
            let mut gradients = run.gradients().clone();
            // The first one is the gradient of the hidden states, `[batch, sequence, hidden]`.
            if let Some(first) = gradients.iter_mut().flatten().next() {
                let hidden = unpack::<Tensor<3>>(vec![first.clone()]);
                let hidden = hidden.map_err(|error| StageError::function(error.to_string()))?;
                *first = pack(fault.kind.changed(hidden)).swap_remove(0);
            }
            run.set_gradients(gradients);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_step_of_its_own() {
        let faults = InjectedFaults { faults: Vec::new(), steps: Mutex::default() };
        let [first, second] = [0, 1].map(WorldRank::new);
        faults.begin_step(second, StepNumber::new(4));
        assert_eq!([first, second].map(|rank| faults.step_of(rank)), [0, 4]);
        faults.begin_step(first, StepNumber::new(3));
        assert_eq!([first, second].map(|rank| faults.step_of(rank)), [3, 4]);
    }

    #[test]
    fn a_fault_has_a_kind_a_rank_a_step_and_a_number_of_times() {
        let fault = InjectedFault::read("hang:1:3:2").expect("a fault");
        let rank = WorldRank::new(1);
        assert_eq!(fault.kind, Kind::Hang);
        assert!(!fault.happens(WorldRank::new(0), 3) && !fault.happens(rank, 2), "another rank or step");
        assert_eq!([(); 3].map(|()| fault.happens(rank, 3)), [true, true, false]);
        let slow = InjectedFault::read("slow:1:3:2").expect("a fault");
        assert_eq!([2, 3, 4, 5].map(|step| slow.slows(Kind::Slow, rank, step)), [false, true, true, false]);
        assert!(
            !slow.happens(rank, 3)
                && !slow.slows(Kind::Slow, WorldRank::new(0), 3)
                && !slow.slows(Kind::Half, rank, 3),
            "another kind or rank"
        );
        let flip = InjectedFault::read("flip:1:3").expect("a fault");
        assert!(!flip.happens(rank, 3) && !flip.changes_gradient(rank, 2), "another kind or step");
        assert_eq!([(); 2].map(|()| flip.changes_gradient(rank, 3)), [true, false]);
        assert!(InjectedFault::read("infinite:1:3").is_some_and(|fault| fault.changes_gradient(rank, 3)));
        for (text, signal) in [("kill-in-update:1:3", Signal::KILL), ("stop-in-update:1:3", Signal::STOP)] {
            let fault = InjectedFault::read(text).expect("a fault");
            assert!(
                !fault.happens(rank, 3) && fault.signals_update(rank, 2).is_none(),
                "another kind or step"
            );
            assert_eq!([(); 2].map(|()| fault.signals_update(rank, 3)), [Some(signal), None], "{text}");
        }
        let faults = InjectedFaults {
            faults: vec![InjectedFault::read("flip:1:3").expect("a fault")],
            steps: Mutex::default(),
        };
        assert!(faults.require(2, |rank| rank.get() == 1).is_ok());
        assert!(faults.require(2, |rank| rank.get() == 0).is_err() && faults.require(1, |_| true).is_err());
        for wrong in
            ["", "panic", "panic:1", "panic:1:x", "panic:1:2:3:4", "sleep:1:2", "panic:1:0", "panic:1:2:0"]
        {
            assert!(InjectedFault::read(wrong).is_none(), "{wrong}");
        }
    }

    /// Returns the bytes of the elements 1, -0.375 and 3 of this type after a fault has changed them.
    fn changed(kind: Kind, dtype: DType) -> Vec<u8> {
        let options = (&burn::tensor::Device::flex(), dtype);
        let gradient = Tensor::<3>::from_data([[[1.0_f32, -0.375, 3.0]]], options);
        let data = kind.changed(gradient).into_data();
        assert_eq!(data.dtype(), dtype);
        data.as_bytes().to_vec()
    }

    #[test]
    fn a_flip_changes_one_bit_of_each_element_in_its_own_precision() {
        let bits = |numbers: [u16; 3]| numbers.map(u16::to_ne_bytes).concat();
        for (dtype, flipped, infinite) in [
            (DType::F16, [0x7c00, 0xf600, 0x6200], [0x7c00, 0xb600, 0x4200]),
            (DType::BF16, [0x7f80, 0xfec0, 0x6040], [0x7f80, 0xbec0, 0x4040]),
        ] {
            assert_eq!(changed(Kind::Flip, dtype), bits(flipped), "{dtype:?}");
            assert_eq!(changed(Kind::Infinite, dtype), bits(infinite), "{dtype:?}");
        }
        let single = |numbers: [u32; 3]| numbers.map(u32::to_ne_bytes).concat();
        assert_eq!(changed(Kind::Flip, DType::F32), single([0x7f80_0000, 0xfec0_0000, 0x6040_0000]));
        assert_eq!(changed(Kind::Infinite, DType::F32), single([0x7f80_0000, 0xbec0_0000, 0x4040_0000]));
    }

    #[test]
    fn a_fault_happens_once_for_each_file() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = folder.path().join("a:b");
        let with_file = |kind: &str| InjectedFault::read(&format!("{kind}:1:file={}", file.display()));
        let fault = with_file("panic").expect("a fault");
        let happens = |rank: u32| fault.happens(WorldRank::new(rank), 7);
        assert!(!happens(1), "there is no file");
        for _ in 0..2 {
            fs::write(&file, "").expect("the folder takes files");
            assert_eq!([0, 1, 1].map(happens), [false, true, false]);
        }
        assert!(with_file("slow").is_none() && InjectedFault::read("panic:1:file=").is_none());
    }
}
