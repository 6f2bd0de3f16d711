//! The generators of Burn's back ends, for layers that draw from them: Burn's own `Dropout`, or `Tensor::random` in a
//! forward.
//!
//! A back end has one generator for the whole process, so what a layer draws from it depends on the layers that other
//! ranks run at the same time. [`LayerDraws`] makes the numbers of such a layer depend on the seed, the step, the
//! microbatch and the layer's name only: it seeds the generators before the layer's forward, and until the forward ends,
//! no other layer of the process that draws from them runs. A second forward of the same microbatch gets the same
//! numbers.
//!
//! Whether a layer draws is found in its first forward in training and in its first forward in an evaluation: the
//! generators are seeded, and afterwards their next number is not the first one. Layers that do not draw run at the same
//! time as all others. After each layer that draws, the generators continue from a number that they gave before it. So
//! the program's own draws between two steps do not repeat, and depend on the program's own seed only.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use burn::tensor::{Device, Distribution, Tensor};

use super::StreamKey;
use crate::device::computes_behind;

/// Held while the generators are used for one layer.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls `run` while no other call of this function runs in this process.
pub(crate) fn alone<R>(run: impl FnOnce() -> R) -> R {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    run()
}

/// Calls `run` with the processor's generator seeded with `seed`, while no other call of [`alone`] runs. Afterwards the
/// generator continues from a number that it gave before.
pub(crate) fn seeded<R>(seed: u64, run: impl FnOnce() -> R) -> R {
    alone(|| Generators(vec![Device::flex()]).seeded(seed, run))
}

thread_local! {
    /// Whether this thread runs a layer. Layers inside of it share its random numbers.
    static IN_LAYER: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run` as the forward of a layer of this thread.
fn in_layer<R>(run: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_LAYER.set(false);
        }
    }
    IN_LAYER.set(true);
    let _leave = Leave;
    run()
}

/// Runs the layers of one stage, and knows which of them draw from the generators of back ends.
#[derive(Debug)]
pub(crate) struct LayerDraws {
    generators: Generators,
    /// Whether several ranks compute the stage together. They exchange tensors inside a layer, so none of them may keep the
    /// others from running.
    is_split: bool,
    in_training: Known,
    in_evaluation: Known,
    /// How often a layer of ranks that compute together seems to have drawn, one forward after another.
    suspected: Mutex<HashMap<Arc<str>, u32>>,
}

/// The forwards after which a layer of ranks that compute together counts as one that draws. Another thread of the process
/// may have drawn during some of them.
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
        }
    }

    /// Forgets which layers draw, after the module has changed.
    pub(crate) fn forget(&self) {
        for known in [&self.in_training, &self.in_evaluation] {
            known.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// Calls `run`, the forward of the layer `name` for the microbatch of `key`.
    ///
    /// # Errors
    /// When several ranks compute the stage together, and each of the first [`SUSPECTED`] forwards of the layer has drawn
    /// from a generator.
    pub(crate) fn run<R>(
        &self,
        name: &str,
        key: StreamKey,
        is_training: bool,
        run: impl FnOnce() -> R,
    ) -> Result<R, DrawsTogether> {
        let known = if is_training { &self.in_training } else { &self.in_evaluation };
        let draws = known.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        if draws == Some(false) || IN_LAYER.get() {
            return Ok(run());
        }
        let run = || in_layer(run);
        let seed =
            key.hash_with(name).as_bytes().iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte));
        let (result, drew) = match (draws, self.is_split) {
            (Some(_), _) => (alone(|| self.generators.seeded(seed, run)), true),
            (None, false) => alone(|| self.generators.watched(seed, run)),
            (None, true) => self.generators.watched_together(run),
        };
        if drew && self.is_split {
            let mut suspected = self.suspected.lock().unwrap_or_else(PoisonError::into_inner);
            let times = suspected.entry(name.into()).or_default();
            *times += 1;
            return if *times < SUSPECTED { Ok(result) } else { Err(DrawsTogether) };
        }
        let before = known.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), drew);
        if drew && before.is_none() {
            tracing::info!(
                "`{name}` draws from the generator of its device, which the ranks of this process share: its forwards run \
                 one at a time; `pipewright::nn::Dropout` and `StageContext::random` have generators of their own"
            );
        }
        Ok(result)
    }
}

/// The generators that a layer may draw from: that of its device's back end, and that of the processor's.
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
        let draw = |device: &Device| {
            let numbers = Tensor::<1>::random([4], Distribution::Default, device).into_data();
            let hash = blake3::hash(numbers.as_bytes());
            hash.as_bytes().iter().take(8).fold(0, |drawn, byte| drawn << 8 | u64::from(*byte))
        };
        self.0.iter().map(draw).collect()
    }

    /// Continues each generator from a number that it has given.
    fn go_on(&self, drawn: Vec<u64>) {
        self.0.iter().zip(drawn).for_each(|(device, seed)| device.seed(seed));
    }

    /// Calls `run` with seeded generators.
    fn seeded<R>(&self, seed: u64, run: impl FnOnce() -> R) -> R {
        let before = self.draw();
        self.seed(seed);
        let result = run();
        self.go_on(before);
        result
    }

    /// Like [`Generators::seeded`]; also returns whether `run` has drawn.
    fn watched<R>(&self, seed: u64, run: impl FnOnce() -> R) -> (R, bool) {
        let before = self.draw();
        self.seed(seed);
        let first = self.draw();
        self.seed(seed);
        let result = run();
        let drew = self.draw() != first;
        self.go_on(before);
        (result, drew)
    }

    /// Calls `run` while other threads may do the same, and returns whether `run`, or that of another thread, has drawn. All
    /// of them use one seed, so the generators change only if one of them draws.
    fn watched_together<R>(&self, run: impl FnOnce() -> R) -> (R, bool) {
        static MARK: OnceLock<u64> = OnceLock::new();
        let (mark, first) = alone(|| {
            let mark = *MARK.get_or_init(|| self.draw()[0]);
            self.seed(mark);
            let first = self.draw();
            self.seed(mark);
            (mark, first)
        });
        let result = run();
        let drew = alone(|| {
            let drew = self.draw() != first;
            self.seed(mark);
            drew
        });
        (result, drew)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number() -> f32 {
        Tensor::<1>::random([1], Distribution::Default, &Device::flex()).into_scalar()
    }

    #[test]
    fn what_a_layer_draws_depends_on_its_key_and_name() {
        let draws = LayerDraws::new(&Device::flex(), false);
        let key = StreamKey { seed: 1, step: 2.into(), microbatch: 3 };
        let drawn = |name: &str, key| draws.run(name, key, true, number).expect("it may draw");
        // The first forward of a layer is watched, and later ones are not.
        let first = drawn("a", key);
        assert_eq!([drawn("a", key), drawn("a", key)], [first; 2]);
        assert_ne!(drawn("b", key), first);
        assert_ne!(drawn("a", StreamKey { microbatch: 4, ..key }), first);
        draws.forget();
        assert_eq!(drawn("a", key), first);
    }

    #[test]
    fn a_layer_inside_of_another_has_its_numbers() {
        let draws = LayerDraws::new(&Device::flex(), false);
        let inner = || draws.run("inner", StreamKey::default(), true, number).expect("it may draw");
        let outer = || draws.run("outer", StreamKey::default(), true, inner).expect("it may draw");
        assert_eq!(
            [outer(), outer()],
            [draws.run("outer", StreamKey::default(), true, number).expect("it may draw"); 2]
        );
    }

    #[test]
    fn a_layer_may_draw_in_training_only() {
        let draws = LayerDraws::new(&Device::flex(), false);
        let key = StreamKey::default();
        draws.run("a", key, false, || ()).expect("it draws nothing");
        let first = draws.run("a", key, true, number).expect("it may draw");
        assert_eq!(draws.run("a", key, true, number).expect("it may draw"), first);
    }

    #[test]
    fn the_draws_of_the_program_go_on_from_its_seed() {
        let draws = LayerDraws::new(&Device::flex(), false);
        let after = |seed| {
            alone(|| Device::flex().seed(seed));
            draws.run("a", StreamKey::default(), true, number).expect("it may draw");
            alone(number)
        };
        let [first, second] = [after(1), after(2)];
        assert_ne!(first, second);
        assert_ne!(after(1), draws.run("a", StreamKey::default(), true, number).expect("it may draw"));
    }

    #[test]
    fn a_seed_for_parameters_leaves_the_draws_of_the_program() {
        // The unit tests of other modules may draw at the same time, so equal numbers would be chance.
        let drawn = || seeded(7, number);
        let [first, between, second] = [drawn(), alone(number), drawn()];
        assert_eq!(first, second);
        assert_ne!(alone(number), between, "a seed starts the program's draws again");
    }

    #[test]
    fn ranks_that_compute_a_layer_together_may_not_draw() {
        let draws = LayerDraws::new(&Device::flex(), true);
        draws.run("a", StreamKey::default(), true, || ()).expect("it draws nothing");
        let error = (0..SUSPECTED).find_map(|_| draws.run("b", StreamKey::default(), true, number).err());
        error.expect("it draws each time");
    }
}
