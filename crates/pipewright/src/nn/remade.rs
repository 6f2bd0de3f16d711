//! Inputs of matrix products that the backward computes again instead of keeping them.
//!
//! A normalisation and the activation of a feed-forward layer are cheap, and their results take much memory.
//! They keep their own inputs, and the products after them keep their results, for the gradients of the
//! weights. If a stage computes such a part again ([`LayerPart`]), the products keep a function that computes
//! the result from those inputs ([`Remade`]). It runs when the backward of the first product needs the result,
//! and the last product drops it.
//!
//! A product never keeps an input that was gathered from the ranks of a tensor group ([`note_gathered`]): the ranks
//! gather it again. All ranks of the group compute the same backward, so they gather at the same place of it.
//!
//! A stage runs its forward inside [`with_parts`]. A part notes its result there ([`note`]), and a product
//! looks its input up ([`remade`]) by the node of the tape. This is a thread-local variable, because a module's
//! forward has no argument for it. A measurement of layers asks for the times of these computations in the same
//! way ([`timed_parts`]).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::recompute::{LayerPart, LayerParts};

use super::operation::node_of;

thread_local! {
    static CURRENT: RefCell<Option<Noted>> = const { RefCell::new(None) };
    /// The times so far; `None` if nothing is timed.
    static TIMES: Cell<Option<PartTimes>> = const { Cell::new(None) };
}

/// The times in which the results of each part were computed again, in the order of [`LayerPart::ALL`].
pub(crate) type PartTimes = [Duration; LayerPart::ALL.len()];

/// The results of a forward that are computed again.
struct Noted {
    parts: LayerParts,
    results: HashMap<NodeId, Arc<Remade>>,
}

/// A result that is computed again, off the tape.
pub(super) struct Remade {
    /// The part whose result it is; `None` if it was gathered.
    part: Option<LayerPart>,
    device: Device,
    compute: Box<dyn Fn() -> Tensor<2> + Send + Sync>,
    /// The result while products still need it.
    result: Mutex<Option<Tensor<2>>>,
}

impl fmt::Debug for Remade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remade").finish_non_exhaustive()
    }
}

impl Remade {
    /// Returns the result, off the tape. It is computed once, as long as the products that share it call this
    /// and then drop their references.
    pub(super) fn get(self: &Arc<Self>) -> Tensor<2> {
        let mut kept = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        let result = kept.take().unwrap_or_else(|| self.compute());
        if Arc::strong_count(self) > 1 {
            *kept = Some(result.clone());
        }
        result
    }

    fn compute(&self) -> Tensor<2> {
        let (Some(mut times), Some(part)) = (TIMES.get(), self.part) else { return (self.compute)() };
        // Operations that a device has not run yet are not part of the time. An error of the device is reported
        // when its results are read.
        let _ = self.device.sync();
        let start = Instant::now();
        let result = (self.compute)();
        let _ = self.device.sync();
        times[part as usize] += start.elapsed();
        TIMES.set(Some(times));
        result
    }
}

/// Runs `forward`. Its products do not keep the results of these parts.
pub(crate) fn with_parts<R>(parts: LayerParts, forward: impl FnOnce() -> R) -> R {
    let noted = Noted { parts, results: HashMap::new() };
    let _outer = Restore(CURRENT.replace(Some(noted)));
    forward()
}

/// Runs `run`, and returns also the times in which it has computed results of parts again on this thread.
pub(crate) fn timed_parts<R>(run: impl FnOnce() -> R) -> (R, PartTimes) {
    TIMES.set(Some(PartTimes::default()));
    let result = run();
    (result, TIMES.take().unwrap_or_default())
}

/// Notes the result of a part, if this forward computes it again. `compute` returns the function that
/// computes the same bits again, off the tape.
pub(super) fn note<C>(part: LayerPart, result: &Tensor<2>, compute: impl FnOnce() -> C)
where
    C: Fn() -> Tensor<2> + Send + Sync + 'static,
{
    CURRENT.with_borrow_mut(|current| {
        let Some(noted) = current.as_mut().filter(|noted| noted.parts.contains(part)) else { return };
        let Some(node) = node_of(result) else { return };
        let (device, compute) = (result.device(), Box::new(compute()));
        let remade = Remade { part: Some(part), device, compute, result: Mutex::default() };
        noted.results.insert(node, Arc::new(remade));
    });
}

/// Notes that `whole` was gathered from the part `x` of each rank, so that it is gathered again. `kept` has the
/// elements of `x`, off the tape. If `x` is computed again itself, its elements are not kept either.
pub(super) fn note_gathered(
    x: &Tensor<2>,
    whole: &Tensor<2>,
    kept: Tensor<2>,
    gather: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static,
) {
    let Some(node) = node_of(whole) else { return };
    let (device, of_part) = (whole.device(), remade(x));
    let compute: Box<dyn Fn() -> Tensor<2> + Send + Sync> = match of_part {
        Some(part) => Box::new(move || gather(part.get())),
        None => Box::new(move || gather(kept.clone())),
    };
    let remade = Remade { part: None, device, compute, result: Mutex::default() };
    CURRENT.with_borrow_mut(|current| {
        current.as_mut().map(|noted| noted.results.insert(node, Arc::new(remade)));
    });
}

/// Notes that `result` has the elements of `x`, so that it is computed again like `x`.
pub(super) fn note_same(x: &Tensor<2>, result: &Tensor<2>) {
    if let (Some(remade), Some(node)) = (remade(x), node_of(result)) {
        CURRENT.with_borrow_mut(|current| {
            current.as_mut().map(|noted| noted.results.insert(node, remade));
        });
    }
}

/// Returns how the input of a product is computed again; `None` if the product must keep it.
pub(super) fn remade(x: &Tensor<2>) -> Option<Arc<Remade>> {
    CURRENT.with_borrow(|current| {
        let noted = current.as_ref().filter(|noted| !noted.results.is_empty())?;
        noted.results.get(&node_of(x)?).cloned()
    })
}

/// Restores the outer forward's results, also if a forward panics.
struct Restore(Option<Noted>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::module::ParamId;
    use burn::tensor::{DType, TensorData};

    use super::super::check::numbers;
    use super::super::layout::Layout;
    use super::super::product::multiply;
    use super::super::{rms_norm, swiglu};
    use super::*;

    /// Returns the gradients of the input, of two projections of a normalisation, of its factors, and of the
    /// product after a gated activation.
    fn gradients(parts: LayerParts, dtype: DType) -> Vec<TensorData> {
        let leaf =
            |shape: [usize; 2], scale| numbers::<2>(shape, scale).cast(dtype).autodiff().require_grad();
        let x = leaf([5, 6], 1.0);
        let factors = numbers::<1>([6], 1.0).cast(dtype).autodiff().require_grad();
        let weights = [leaf([6, 8], 1.0), leaf([6, 8], 2.0), leaf([8, 6], 1.5)];
        let product =
            |x: Tensor<2>, at: usize| multiply(x, weights[at].clone(), Layout::Plain, ParamId::new());
        let y = with_parts(parts, || {
            let normalised = rms_norm(x.clone(), factors.clone(), 1e-5);
            product(swiglu(product(normalised.clone(), 0), product(normalised, 1)), 2)
        });
        let gradients = (y.square()).sum().backward();
        let of = |tensor: &Tensor<2>| tensor.grad(&gradients).expect("a leaf").into_data();
        let of_factors = factors.grad(&gradients).expect("a leaf").into_data();
        std::iter::once(of(&x)).chain(weights.iter().map(of)).chain([of_factors]).collect()
    }

    /// In double precision, the operations are the same as on devices.
    #[test]
    fn gradients_keep_their_bits() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let expected = gradients(LayerParts::NONE, dtype);
            for parts in LayerParts::every() {
                assert_eq!(gradients(parts, dtype), expected, "{parts}, {dtype:?}");
            }
        }
    }

    #[test]
    fn each_part_has_a_time_of_its_own() {
        for parts in LayerParts::every() {
            let ((), times) = timed_parts(|| drop(gradients(parts, DType::F32)));
            let timed = LayerPart::ALL.into_iter().filter(|&part| times[part as usize] > Duration::ZERO);
            assert_eq!(timed.collect::<LayerParts>(), parts);
        }
        drop(gradients(LayerParts::ALL, DType::F32));
        assert_eq!(TIMES.get(), None, "nothing is timed outside");
    }

    #[test]
    fn products_that_share_a_result_compute_it_once() {
        let calls = Arc::new(AtomicUsize::new(0));
        let x = numbers([2, 3], 1.0).autodiff().require_grad() * 2.0;
        let shared = with_parts(LayerPart::Norms.into(), || {
            note(LayerPart::Norms, &x, || {
                let calls = calls.clone();
                move || {
                    calls.fetch_add(1, Ordering::Relaxed);
                    numbers([2, 3], 2.0)
                }
            });
            note(LayerPart::FeedForward, &(x.clone() + 1.0), || || panic!("this part is kept"));
            [(); 3].map(|()| remade(&x).expect("it was noted"))
        });
        assert!(remade(&x).is_none(), "the forward is over");
        let last = Arc::downgrade(&shared[0]);
        for remade in shared {
            assert_eq!(remade.get().into_data(), numbers([2, 3], 2.0).into_data());
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert!(last.upgrade().is_none());
    }

    #[test]
    fn a_part_that_is_kept_is_not_noted() {
        let x = numbers([2, 3], 1.0).autodiff().require_grad() * 2.0;
        for parts in [LayerParts::NONE, LayerPart::FeedForward.into()] {
            with_parts(parts, || {
                note(LayerPart::Norms, &x, || || panic!("nothing computes it"));
                assert!(remade(&x).is_none());
            });
        }
    }
}
