//! The generators of Burn's back ends, for layers that draw from them: Burn's own `Dropout`, or
//! `Tensor::random` in a forward.
//!
//! A back end has one generator for the whole process, so what a layer draws from it depends on the layers
//! that other ranks run at the same time. [`LayerDraws`] makes the numbers of such a layer depend on the
//! seed, the step, the microbatch and the layer's name only: it seeds the generators before the layer's
//! forward, and until the forward ends, no other layer of the process that draws from them runs. A second
//! forward of the same microbatch gets the same numbers. After each such layer, the generators continue from
//! a number that they gave before it. So the program's own draws between two steps do not repeat, and depend
//! on the program's own seed only.
//!
//! # Which layers draw
//!
//! The first forward of a layer in training and its first forward in an evaluation run alone: the generators
//! are seeded, and afterwards their next number is not the first one if the layer has drawn. Later forwards
//! of a layer that has not drawn run at the same time as all others. The processor's generator is then
//! compared before and after the forward ([`Watch`]). If it has moved, one of the layers that ran at the time
//! may have drawn, and the next forward of each of them runs alone again. No other thread is stopped for the
//! comparison. It is left out while a layer runs alone or another thread compares, so a layer may be noticed
//! some forwards later.
//!
//! Ranks that compute a stage together exchange tensors inside a layer, so none of them may keep the others
//! from running. Their stages run each segment once without exchanges ([`LayerDraws::probe`]) before its
//! first forward.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use burn::tensor::{Device, Distribution, Tensor};

use super::stream::StreamKey;
use crate::device::computes_behind;

/// Held while the generators are used for one layer.
static ALONE: Mutex<Watch> = Mutex::new(Watch { seed: 0, first: None, moves: 0 });

/// Calls `run` with the processor's generator seeded with `seed`, while no layer runs alone. Afterwards the
/// generator continues from a number that it gave before.
pub(crate) fn seeded<R>(seed: u64, run: impl FnOnce() -> R) -> R {
    Generators(vec![Device::flex()]).run_seeded(&mut alone(), seed, run)
}

fn alone() -> MutexGuard<'static, Watch> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The known state of the processor's generator.
struct Watch {
    /// The seed with which it started last.
    seed: u64,
    /// Its first number after that; `None` before the first seed.
    first: Option<u64>,
    /// The number of times that it was found to have given numbers since.
    moves: u64,
}

impl Watch {
    /// Returns the number of times that the generator has moved, if no layer runs alone. The generator stays
    /// where it is.
    fn moves() -> Option<u64> {
        let mut watch = match ALONE.try_lock() {
            Ok(watch) => watch,
            Err(TryLockError::Poisoned(watch)) => watch.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let next = drawn_on(&Device::flex());
        watch.see(next);
        Device::flex().seed(watch.seed);
        Some(watch.moves)
    }

    /// Notes the next number of the generator. If it is not the first one, the generator has moved, and
    /// starts again from this number.
    fn see(&mut self, next: u64) {
        if self.first != Some(next) {
            self.moves += 1;
            self.start(next);
        }
    }

    fn start(&mut self, seed: u64) {
        Device::flex().seed(seed);
        (self.seed, self.first) = (seed, Some(drawn_on(&Device::flex())));
        Device::flex().seed(seed);
    }
}

/// Draws from the generator of a device.
fn drawn_on(device: &Device) -> u64 {
    let numbers = Tensor::<1>::random([4], Distribution::Default, device).into_data();
    let hash = blake3::hash(numbers.as_bytes());
    hash.as_bytes().iter().take(8).fold(0, |drawn, byte| drawn << 8 | u64::from(*byte))
}

thread_local! {
    /// Whether this thread runs a layer alone. Layers inside of it share its random numbers.
    static IN_LAYER: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread runs a stage to find the layers that draw.
    static PROBING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread runs a layer, and every layer that waits for the generators waits for it.
pub(crate) fn runs_layer_alone() -> bool {
    IN_LAYER.get()
}

/// Returns whether this thread runs a stage to find the layers that draw. Ranks then exchange no tensors.
pub(crate) fn is_probing() -> bool {
    PROBING.get()
}

/// Calls `run` while a flag of this thread is set.
fn flagged<R>(flag: &'static std::thread::LocalKey<Cell<bool>>, run: impl FnOnce() -> R) -> R {
    struct Reset(&'static std::thread::LocalKey<Cell<bool>>);
    impl Drop for Reset {
        fn drop(&mut self) {
            self.0.set(false);
        }
    }
    flag.set(true);
    let _reset = Reset(flag);
    run()
}

/// Runs the layers of one stage, and knows which of them draw from the generators of back ends.
#[derive(Debug)]
pub(crate) struct LayerDraws {
    generators: Generators,
    /// Whether ranks wait for each other inside the stage: tensor ranks, or replicas that hold experts
    /// together.
    is_split: bool,
    in_training: Known,
    in_evaluation: Known,
    /// How often a layer that no probe has run seems to have drawn, on ranks that compute together.
    suspected: Mutex<HashMap<Arc<str>, u32>>,
    /// The number of times that a layer was found to be unknown again.
    forgotten: AtomicU64,
}

/// The forwards after which a layer that no probe has run counts as one that draws. Another thread of the
/// process may have drawn during some of them.
const SUSPECTED: u32 = 8;

/// Whether each layer draws, for the layers that have run.
type Known = Mutex<HashMap<Arc<str>, bool>>;

/// A layer of a stage that several ranks compute together draws from the generator of a back end.
#[derive(Debug)]
pub(crate) struct DrawsTogether;

impl LayerDraws {
    pub(crate) fn new(device: &Device, is_split: bool) -> Self {
        Self {
            generators: Generators::of(device),
            is_split,
            in_training: Mutex::default(),
            in_evaluation: Mutex::default(),
            suspected: Mutex::default(),
            forgotten: AtomicU64::new(0),
        }
    }

    /// Forgets which layers draw, after the module has changed.
    pub(crate) fn forget(&self) {
        [&self.in_training, &self.in_evaluation].into_iter().for_each(|known| locked(known).clear());
        self.forgotten.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a number that changes when layers must be probed again; `None` if the stage needs no probe.
    pub(crate) fn probe_number(&self) -> Option<u64> {
        self.is_split.then(|| self.forgotten.load(Ordering::Relaxed))
    }

    /// Calls `run`, which runs layers of a stage that several ranks compute together, to find the layers that
    /// draw. The ranks exchange no tensors inside the layers.
    pub(crate) fn probe<R>(run: impl FnOnce() -> R) -> R {
        flagged(&PROBING, run)
    }

    /// Calls `run`, the forward of the layer `name` for the microbatch of `key`.
    ///
    /// # Errors
    /// When several ranks compute the stage together, and the layer draws from a generator.
    pub(crate) fn run<R>(
        &self,
        name: &str,
        key: StreamKey,
        is_training: bool,
        run: impl FnOnce() -> R,
    ) -> Result<R, DrawsTogether> {
        if IN_LAYER.get() {
            return Ok(run());
        }
        let known = if is_training { &self.in_training } else { &self.in_evaluation };
        let draws = locked(known).get(name).copied();
        if draws == Some(false) || (self.is_split && !is_probing()) {
            return self.run_with_others(known, name, run);
        }
        let seed =
            key.hash_with(name).as_bytes().iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte));
        let run = || flagged(&IN_LAYER, run);
        if draws == Some(true) && !self.is_split {
            return Ok(self.generators.run_seeded(&mut alone(), seed, run));
        }
        let (result, drew) = self.generators.run_watched(&mut alone(), seed, run);
        let before = locked(known).insert(name.into(), drew);
        if drew && self.is_split {
            return Err(DrawsTogether);
        }
        if drew && before.is_none() {
            tracing::info!(
                "`{name}` draws from the generator of its device, which the ranks of this process share: its forwards run \
                 one at a time; `pipewright::nn::Dropout` and `StageContext::random` have generators of their own"
            );
        }
        Ok(result)
    }

    /// Calls `run` at the same time as other layers. If the processor's generator has moved, the next forward
    /// of the layer runs alone.
    fn run_with_others<R>(
        &self,
        known: &Known,
        name: &str,
        run: impl FnOnce() -> R,
    ) -> Result<R, DrawsTogether> {
        let before = Watch::moves();
        let result = run();
        let after = before.and_then(|_| Watch::moves());
        if after.is_none() || after == before {
            return Ok(result);
        }
        let was_known = locked(known).remove(name).is_some();
        self.forgotten.fetch_add(1, Ordering::Relaxed);
        if was_known || !self.is_split {
            return Ok(result);
        }
        let mut suspected = locked(&self.suspected);
        let times = suspected.entry(name.into()).or_default();
        *times += 1;
        if *times < SUSPECTED { Ok(result) } else { Err(DrawsTogether) }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The generators that a layer may draw from: the generator of its device's back end, and the processor's,
/// which is the first.
#[derive(Debug)]
struct Generators(Vec<Device>);

impl Generators {
    fn of(device: &Device) -> Self {
        let others = computes_behind(device).then(|| device.clone().without_autodiff());
        Self(std::iter::once(Device::flex()).chain(others).collect())
    }

    fn seed(&self, seed: u64) {
        self.0.iter().for_each(|device| device.seed(seed));
    }

    /// Draws from each generator.
    fn draw(&self) -> Vec<u64> {
        self.0.iter().map(drawn_on).collect()
    }

    /// Calls `run` with seeded generators, which then continue from numbers that they have given. It waits for
    /// the devices before `run`.
    fn run_seeded<R>(&self, watch: &mut Watch, seed: u64, run: impl FnOnce() -> R) -> R {
        let before = self.draw();
        watch.see(before[0]);
        self.seed(seed);
        let result = run();
        self.0.iter().zip(&before).for_each(|(device, seed)| device.seed(*seed));
        watch.start(before[0]);
        result
    }

    /// Like [`Generators::run_seeded`], but also returns whether `run` has drawn. It waits for the devices after
    /// `run` too.
    fn run_watched<R>(&self, watch: &mut Watch, seed: u64, run: impl FnOnce() -> R) -> (R, bool) {
        self.run_seeded(watch, seed, || {
            let first = self.draw();
            self.seed(seed);
            let result = run();
            (result, self.draw() != first)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most forwards until a layer that draws is noticed. Each layer that another test runs alone may hide
    /// some of them.
    const ATTEMPTS: u32 = 100_000;

    fn number() -> f32 {
        Tensor::<1>::random([1], Distribution::Default, &Device::flex()).into_scalar()
    }

    /// Calls `run` while no layer runs alone.
    fn undisturbed<R>(run: impl FnOnce() -> R) -> R {
        let _alone = alone();
        run()
    }

    /// Checks that `holds` returns true. Unit tests of other modules make parameters, which draws from the same
    /// generator, and one of them may disturb a call. So the check is repeated.
    fn check(holds: impl Fn() -> bool) {
        assert!((0..100).any(|_| holds()), "it does not hold, with or without other draws");
    }

    fn layer_draws() -> LayerDraws {
        LayerDraws::new(&Device::flex(), false)
    }

    #[test]
    fn what_a_layer_draws_depends_on_its_key_and_name() {
        check(|| {
            let draws = layer_draws();
            let key = StreamKey { seed: 1, step: 2.into(), microbatch: 3 };
            let drawn = |name: &str, key| draws.run(name, key, true, number).expect("it may draw");
            // The first forward of a layer is watched, and later ones are not.
            let first = drawn("a", key);
            let is_equal = [drawn("a", key), drawn("a", key)] == [first; 2];
            let others = [drawn("b", key), drawn("a", StreamKey { microbatch: 4, ..key })];
            // Other draws make numbers differ, and never make them equal.
            assert!(!others.contains(&first), "another key or name has the same numbers");
            draws.forget();
            is_equal && drawn("a", key) == first
        });
    }

    #[test]
    fn a_layer_inside_of_another_has_its_numbers() {
        check(|| {
            let draws = layer_draws();
            let inner = || draws.run("inner", StreamKey::default(), true, number).expect("it may draw");
            let outer = || draws.run("outer", StreamKey::default(), true, inner).expect("it may draw");
            let alone = || draws.run("outer", StreamKey::default(), true, number).expect("it may draw");
            [outer(), outer()] == [alone(); 2]
        });
    }

    #[test]
    fn a_layer_may_draw_in_training_only() {
        check(|| {
            let draws = layer_draws();
            let key = StreamKey::default();
            draws.run("a", key, false, || ()).expect("it draws nothing");
            let [first, second] = [(); 2].map(|()| draws.run("a", key, true, number).expect("it may draw"));
            first == second
        });
    }

    #[test]
    fn the_draws_of_the_program_go_on_from_its_seed() {
        let draws = layer_draws();
        let drawn = || draws.run("a", StreamKey::default(), true, number).expect("it may draw");
        let after = |seed| {
            undisturbed(|| Device::flex().seed(seed));
            drawn();
            undisturbed(number)
        };
        assert_ne!(after(1), after(2));
        assert_ne!(after(1), drawn());
    }

    #[test]
    fn a_seed_for_parameters_leaves_the_draws_of_the_program() {
        check(|| {
            let drawn = || seeded(7, number);
            let [first, between, second] = [drawn(), undisturbed(number), drawn()];
            assert_ne!(undisturbed(number), between, "a seed starts the program's draws again");
            first == second
        });
    }

    #[test]
    fn a_layer_that_begins_to_draw_has_its_numbers_from_the_next_forward_on() {
        check(|| {
            let draws = layer_draws();
            let key = StreamKey::default();
            draws.run("a", key, true, || 0.0).expect("it draws nothing");
            let drawn = || draws.run("a", key, true, number).expect("it may draw");
            let expected = layer_draws().run("a", key, true, number).expect("it may draw");
            (0..ATTEMPTS).any(|_| drawn() == expected) && [drawn(), drawn()] == [expected; 2]
        });
    }

    #[test]
    fn ranks_that_compute_a_layer_together_may_not_draw() {
        check(|| {
            let draws = LayerDraws::new(&Device::flex(), true);
            let key = StreamKey::default();
            let is_accepted = draws.run("a", key, true, || ()).is_ok();
            let probe = |run: fn() -> f32| LayerDraws::probe(|| draws.run("b", key, true, run));
            let is_accepted_by_probe = probe(|| 0.0).is_ok();
            draws.forget();
            // A probe finds a layer that draws at once.
            let is_found = probe(number).is_err();
            let mut forwards = (0..ATTEMPTS).map(|_| draws.run("c", key, true, number));
            is_accepted && is_accepted_by_probe && is_found && forwards.any(|forward| forward.is_err())
        });
    }
}
