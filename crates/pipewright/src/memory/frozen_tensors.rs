//! The frozen tensors of a launch. Ranks of one process that make the same ones hold them once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pipewright_kernel::quantised::QuantisedMatrix;

use super::rank_memory::{move_lists_to_this_thread, move_to_this_thread};
use super::streamed_matrix::StreamedMatrix;
use crate::ids::WorldRank;
use crate::tensor::Value;

/// The frozen tensors that the ranks of this process have made during a launch, for one of these ranks. The
/// list is dropped at the end of the launch.
#[derive(Clone, Debug, Default)]
pub(crate) struct FrozenTensors {
    /// By path; `None` outside a launch. Ranks of a tensor group have different tensors with one path.
    by_path: Arc<Mutex<Option<ByPath>>>,
    rank: WorldRank,
}

#[derive(Debug, Default)]
struct ByPath {
    tensors: HashMap<String, Vec<Frozen<Value>>>,
    quantised: HashMap<String, Vec<Frozen<Arc<QuantisedMatrix>>>>,
    streamed: HashMap<String, Arc<StreamedMatrix>>,
}

#[derive(Debug)]
struct Frozen<T> {
    tensor: T,
    /// The rank for which the memory of the tensor counts.
    rank: WorldRank,
}

impl FrozenTensors {
    /// Begins a launch.
    pub(crate) fn open() -> Self {
        Self { by_path: Arc::new(Mutex::new(Some(ByPath::default()))), rank: WorldRank::default() }
    }

    /// Returns the same tensors for a rank.
    pub(crate) fn of(&self, rank: WorldRank) -> Self {
        Self { by_path: self.by_path.clone(), rank }
    }

    /// Ends the launch. From then on only the stages hold the tensors.
    pub(crate) fn close(&self) {
        drop(self.by_path.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Returns `tensor`, or a tensor that another rank has made for the same path if it has the same bits. The
    /// memory of a tensor counts for the first of the ranks that share it. Call this on the thread of the rank.
    pub(crate) fn shared(&self, path: &str, tensor: Value) -> Value {
        let mut by_path = self.by_path.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(by_path) = by_path.as_mut() else { return tensor };
        let made = by_path.tensors.entry(path.to_owned()).or_default();
        let Some(same) = made.iter_mut().find(|frozen| frozen.tensor.has_bits_of(&tensor)) else {
            made.push(Frozen { tensor: tensor.clone(), rank: self.rank });
            return tensor;
        };
        if self.rank < same.rank {
            move_to_this_thread(&same.tensor);
            same.rank = self.rank;
        }
        same.tensor.clone()
    }

    /// Like [`FrozenTensors::shared`], for a quantised matrix.
    pub(crate) fn shared_quantised(&self, path: &str, matrix: QuantisedMatrix) -> Arc<QuantisedMatrix> {
        let mut by_path = self.by_path.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(by_path) = by_path.as_mut() else { return Arc::new(matrix) };
        let made = by_path.quantised.entry(path.to_owned()).or_default();
        let Some(same) = made.iter_mut().find(|frozen| *frozen.tensor == matrix) else {
            let tensor = Arc::new(matrix);
            made.push(Frozen { tensor: tensor.clone(), rank: self.rank });
            return tensor;
        };
        if self.rank < same.rank {
            move_lists_to_this_thread(same.tensor.addresses());
            same.rank = self.rank;
        }
        same.tensor.clone()
    }

    /// Returns `matrix`, or the one that another rank has made with the same name. Its memory counts for the rank that
    /// reads it.
    pub(crate) fn shared_streamed(&self, matrix: StreamedMatrix) -> Arc<StreamedMatrix> {
        let mut by_path = self.by_path.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(by_path) = by_path.as_mut() else { return Arc::new(matrix) };
        let made = by_path.streamed.entry(matrix.name().to_owned());
        made.or_insert_with(|| Arc::new(matrix)).clone()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Tensor};
    use pipewright_kernel::quantised::{Form, Fp8};

    use super::*;

    fn value(numbers: [f32; 3]) -> Value {
        Value::of(Tensor::<1>::from_data(numbers, &Device::flex()))
    }

    fn address(value: &Value) -> usize {
        value.storage().expect("it is in the host's memory").address
    }

    #[test]
    fn equal_tensors_of_a_path_are_one() {
        let launch = FrozenTensors::open();
        let [first, second] = [0, 1].map(|rank| launch.of(WorldRank::new(rank)));
        let held = first.shared("a", value([1.0, 2.0, 3.0]));
        assert_eq!(address(&second.shared("a", value([1.0, 2.0, 3.0]))), address(&held));
        // Bits count, not numbers: 0 and -0 are equal.
        let zero = first.shared("a", value([0.0; 3]));
        for other in [value([-0.0, 0.0, 0.0]), value([1.0, 2.0, 4.0]), value([0.0; 3]).cast(DType::F16)] {
            let address_of_other = address(&other);
            assert_eq!(address(&second.shared("a", other)), address_of_other);
        }
        assert_eq!(address(&second.shared("a", value([0.0; 3]))), address(&zero));
        assert_ne!(address(&second.shared("b", value([0.0; 3]))), address(&zero));
    }

    #[test]
    fn equal_quantised_matrices_of_a_path_are_one() {
        let matrix = |code: u8| {
            let fp8 = Fp8::new([1, 2], vec![code; 2], vec![1.0], [1, 2]).expect("a matrix");
            QuantisedMatrix::new(1, Form::Fp8(fp8))
        };
        let launch = FrozenTensors::open();
        let [first, second] = [0, 1].map(|rank| launch.of(WorldRank::new(rank)));
        // The memory counts for the first rank, also if it comes later.
        let held = second.shared_quantised("a", matrix(1));
        assert!(Arc::ptr_eq(&first.shared_quantised("a", matrix(1)), &held));
        assert!(!Arc::ptr_eq(&first.shared_quantised("a", matrix(2)), &held));
        assert!(!Arc::ptr_eq(&first.shared_quantised("b", matrix(1)), &held));
        launch.close();
        assert!(!Arc::ptr_eq(&first.shared_quantised("a", matrix(1)), &held));
        assert_eq!(Arc::strong_count(&held), 1, "the launch keeps nothing");
    }

    #[test]
    fn nothing_is_kept_after_the_launch() {
        let launch = FrozenTensors::open();
        let held = launch.shared("a", value([1.0; 3]));
        assert!(held.storage().expect("it is in the host's memory").is_shared);
        launch.close();
        assert!(!held.storage().expect("it is in the host's memory").is_shared);
        assert_ne!(address(&launch.shared("a", value([1.0; 3]))), address(&held));
    }
}
