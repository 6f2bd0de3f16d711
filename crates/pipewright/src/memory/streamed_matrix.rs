//! A frozen matrix that is in memory only while its stage computes, and otherwise in its file.

use std::error::Error;
use std::fmt;
use std::mem;
use std::panic;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use pipewright_kernel::quantised::QuantisedMatrix;

/// A frozen matrix whose bytes are decoded in panels.
#[derive(Clone, Debug)]
pub enum FrozenMatrix {
    /// The stage holds it.
    Resident(Arc<QuantisedMatrix>),
    /// The stage has it while it computes.
    Streamed(Arc<StreamedMatrix>),
}

impl FrozenMatrix {
    /// Returns the numbers of inputs and outputs of the layer.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Resident(matrix) => [matrix.columns(), matrix.rows()],
            Self::Streamed(matrix) => [matrix.columns, matrix.rows],
        }
    }

    /// Returns the matrix, as [`StreamedMatrix::get`].
    pub fn get(&self) -> Arc<QuantisedMatrix> {
        match self {
            Self::Resident(matrix) => matrix.clone(),
            Self::Streamed(matrix) => matrix.get(),
        }
    }
}

/// Why a matrix could not be read.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// A matrix that is read when its stage needs it. Ranks of one process that have the same one hold it once.
pub struct StreamedMatrix {
    name: String,
    rows: usize,
    columns: usize,
    read: Box<dyn Fn() -> Result<QuantisedMatrix, ReadError> + Send + Sync>,
    held: Mutex<Held>,
    /// The matrix that is read while this one is used.
    next: OnceLock<Weak<StreamedMatrix>>,
}

#[derive(Default)]
struct Held {
    /// `None` while no rank holds it.
    matrix: Option<Arc<QuantisedMatrix>>,
    ranks: usize,
    /// The thread that reads the matrix for the next [`StreamedMatrix::get`].
    ahead: Option<JoinHandle<Result<QuantisedMatrix, ReadError>>>,
}

impl StreamedMatrix {
    /// Returns a matrix of `rows` outputs and `columns` inputs that `read` reads. `name` is the path of the parameter; a shard
    /// has its place in the name.
    pub fn new(
        name: String,
        [rows, columns]: [usize; 2],
        read: impl Fn() -> Result<QuantisedMatrix, ReadError> + Send + Sync + 'static,
    ) -> Self {
        Self { name, rows, columns, read: Box::new(read), held: Mutex::default(), next: OnceLock::new() }
    }

    /// Returns the path of the parameter.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the matrix. Outside of a program that reads it before its stage computes, it is read and not kept.
    ///
    /// # Panics
    /// When it is not in memory and cannot be read. A stage reports the panic as its error.
    pub fn get(&self) -> Arc<QuantisedMatrix> {
        let mut held = self.held();
        if let Some(matrix) = &held.matrix {
            return matrix.clone();
        }
        let ahead = held.ahead.take();
        drop(held);
        let read = match ahead {
            Some(thread) => thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)),
            None => (self.read)(),
        };
        if let Some(next) = self.next.get().and_then(Weak::upgrade) {
            next.start_reading();
        }
        match read {
            Ok(matrix) => Arc::new(matrix),
            Err(error) => panic!("`{}` cannot be read: {error}", self.name),
        }
    }

    /// Lets a thread read the matrix, unless it is in memory or is being read.
    fn start_reading(self: &Arc<Self>) {
        let mut held = self.held();
        if held.matrix.is_none() && held.ahead.is_none() {
            let own = self.clone();
            // Without a thread, the matrix is read when it is used.
            held.ahead =
                thread::Builder::new().name("read-ahead".to_owned()).spawn(move || (own.read)()).ok();
        }
    }

    /// Reads the matrix, unless another rank holds it. Each success needs a [`StreamedMatrix::release`].
    fn load(&self) -> Result<(), ReadError> {
        // A rank that comes meanwhile waits for the matrix.
        let mut held = self.held();
        if held.matrix.is_none() {
            held.matrix = Some(Arc::new((self.read)()?));
        }
        held.ranks += 1;
        Ok(())
    }

    fn release(&self) {
        let mut held = self.held();
        held.ranks -= 1;
        if held.ranks == 0 {
            held.matrix = None;
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // A panic of `read` leaves the state as it was.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for StreamedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, rows, columns, .. } = self;
        write!(f, "StreamedMatrix({name} [{rows}, {columns}])")
    }
}

/// Lets each of these matrices be read while the one before it is used, and the first one while the last one is. It is for
/// matrices that [`StreamedMatrix::get`] returns in this order again and again, outside of a program that reads them before
/// their stage computes.
pub fn read_ahead(matrices: &[Arc<StreamedMatrix>]) {
    let following = matrices.iter().skip(1).chain(matrices.first());
    for (matrix, next) in matrices.iter().zip(following).filter(|(matrix, next)| !Arc::ptr_eq(matrix, next)) {
        // A matrix of several stages keeps its first successor.
        let _ = matrix.next.set(Arc::downgrade(next));
    }
}

/// Matrices that are in memory until this is dropped.
#[derive(Debug, Default)]
pub struct LoadedMatrices(Vec<Arc<StreamedMatrix>>);

impl LoadedMatrices {
    /// Reads matrices, as long as `continues` returns true.
    ///
    /// # Errors
    /// The name of the first matrix that cannot be read, and why. Those before it are dropped.
    pub fn read(
        matrices: Vec<Arc<StreamedMatrix>>,
        continues: impl Fn() -> bool,
    ) -> Result<Self, (String, ReadError)> {
        let mut loaded = Self::default();
        for matrix in matrices {
            if !continues() {
                break;
            }
            matrix.load().map_err(|source| (matrix.name.clone(), source))?;
            loaded.0.push(matrix);
        }
        Ok(loaded)
    }
}

impl Drop for LoadedMatrices {
    fn drop(&mut self) {
        mem::take(&mut self.0).iter().for_each(|matrix| matrix.release());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use pipewright_kernel::quantised::{FloatType, Form, Plain};

    use super::*;

    /// Returns a matrix, and the number of times that it was read. It cannot be read more often than `most` times.
    fn matrix(most: usize) -> (Arc<StreamedMatrix>, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = reads.clone();
        let read = move || {
            if counted.fetch_add(1, Ordering::Relaxed) == most {
                return Err("the disk is gone".into());
            }
            let plain = Plain::new([1, 2], vec![0; 4], FloatType::Bf16).expect("two zeros");
            Ok(QuantisedMatrix::new(1, Form::Plain(plain)))
        };
        (Arc::new(StreamedMatrix::new("a".to_owned(), [1, 2], read)), reads)
    }

    #[test]
    fn ranks_hold_a_matrix_once_until_the_last_one_drops_it() {
        let (matrix, reads) = matrix(10);
        let load = || LoadedMatrices::read(vec![matrix.clone()], || true).expect("it is read");
        let [first, second] = [load(), load()];
        assert!(Arc::ptr_eq(&matrix.get(), &matrix.get()));
        drop(first);
        matrix.get();
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        drop(second);
        assert!(matrix.held().matrix.is_none());
        matrix.get();
        assert!(matrix.held().matrix.is_none(), "without a program it is not kept");
        assert_eq!(reads.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn each_matrix_is_read_while_the_one_before_it_is_used() {
        let readers = Arc::new(Mutex::new(Vec::new()));
        let matrix = |name: &'static str| {
            let readers = readers.clone();
            let read = move || {
                readers.lock().expect("no panic").push((name, thread::current().id()));
                let plain = Plain::new([1, 2], vec![0; 4], FloatType::Bf16).expect("two zeros");
                Ok(QuantisedMatrix::new(1, Form::Plain(plain)))
            };
            Arc::new(StreamedMatrix::new(name.to_owned(), [1, 2], read))
        };
        let matrices = ["a", "b", "c"].map(matrix);
        read_ahead(&matrices);
        for _ in 0..2 {
            matrices.iter().for_each(|matrix| drop(matrix.get()));
        }
        // The end of the last read is awaited.
        matrices[0].get();
        let readers = readers.lock().expect("no panic");
        let names: Vec<&str> = readers.iter().map(|(name, _)| *name).take(7).collect();
        assert_eq!(names, ["a", "b", "c", "a", "b", "c", "a"]);
        let own: Vec<bool> =
            readers.iter().map(|(_, reader)| *reader == thread::current().id()).take(7).collect();
        assert_eq!(own, [true, false, false, false, false, false, false]);
        assert!(matrices.iter().all(|matrix| matrix.held().matrix.is_none()));
    }

    #[test]
    fn a_failed_read_ahead_is_reported_when_the_matrix_is_used() {
        let ((first, _), (bad, _)) = (matrix(10), matrix(0));
        read_ahead(&[first.clone(), bad.clone()]);
        first.get();
        let failed = panic::catch_unwind(panic::AssertUnwindSafe(|| bad.get())).expect_err("it fails");
        let message = failed.downcast_ref::<String>().expect("a text");
        assert_eq!(message, "`a` cannot be read: the disk is gone");
    }

    #[test]
    fn a_failure_drops_the_matrices_before_it() {
        let ((good, _), (bad, _)) = (matrix(10), matrix(0));
        let (name, error) = LoadedMatrices::read(vec![good.clone(), bad], || true).expect_err("it fails");
        assert_eq!((name.as_str(), error.to_string().as_str()), ("a", "the disk is gone"));
        assert!(good.held().matrix.is_none());
        let stopped = LoadedMatrices::read(vec![good.clone()], || false).expect("it reads nothing");
        assert!(stopped.0.is_empty() && good.held().matrix.is_none());
    }
}
