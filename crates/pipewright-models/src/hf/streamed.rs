//! Matrices that are read from their files whenever their stage computes: the frozen base of adapters that is larger than
//! memory.
//!
//! A matrix is streamed in the form in which the files have it: quantised, or as floats. The files are open for direct reads
//! ([`DirectFile`]), so they do not fill the page cache. Everything that files have in
//! another form stays in memory: tables, norms and biases, the matrices of experts, and matrices whose rows are inputs, as in a
//! GPT-2 in safetensors that is not quantised.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pipewright::memory::{ReadError, StreamedMatrix};
use pipewright::tensor::TensorShard;
use pipewright_kernel::quantised::{FloatType, Form, Plain, QuantisedMatrix};
use pipewright_schedule::error_text::with_causes;
use pipewright_system::direct_file::DirectFile;

use super::layout::{FilePlace, count};
use super::weight_type::WeightType;
use super::weights::Weights;
use crate::error::ModelError;
use crate::parameter::{ParameterKind, ParameterSpec};
use crate::quantisation::{QuantisedBytes, QuantisedSizes};

/// The advice after a failed read.
const ADVICE: &str =
    "check the disk, put back the file with which the run began if it has changed, and resume the run";

/// The place of a matrix of floats.
struct PlainPlace {
    place: FilePlace<String>,
    file: String,
    kind: FloatType,
}

impl Weights {
    /// Returns the weights, whose matrices of linear layers are read when they are needed ([`Weights::streamed_matrix`]).
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub(crate) fn streaming(self) -> Result<Self, ModelError> {
        let reader = Self::open(self.directory())?.reading_directly()?;
        Ok(self.with_reader(Arc::new(Mutex::new(reader))))
    }

    /// Returns the matrix of a linear layer as one that is read when it is needed; `None` if it stays in memory.
    pub(super) fn streamed_matrix(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<StreamedMatrix>, ModelError> {
        let Some(reader) = self.reader.clone() else { return Ok(None) };
        // This opens the files of the matrix, so that a later change to them is seen.
        if reader.lock().unwrap_or_else(PoisonError::into_inner).streamed_bytes(spec)?.is_none() {
            return Ok(None);
        }
        let name = if shard.is_whole() { spec.path.clone() } else { format!("{} {shard:?}", spec.path) };
        let (shape, spec) = (shard.shape(&spec.shape), spec.clone());
        let read = move || {
            let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            let read = reader.read_streamed(&spec, shard);
            read.map_err(|error| ReadError::from(format!("{}; {ADVICE}", with_causes(&error))))
        };
        Ok(Some(StreamedMatrix::new(name, [shape[1], shape[0]], read)))
    }

    /// Returns the bytes of a matrix that can be streamed; `None` if the parameter is not one. It reads headers only.
    fn streamed_bytes(&mut self, spec: &ParameterSpec) -> Result<Option<QuantisedBytes>, ModelError> {
        let is_grown = self.own_rows(spec).is_some();
        if spec.kind != ParameterKind::Matrix || spec.is_of_routed_expert() || is_grown {
            return Ok(None);
        }
        let is_in_order = spec.layout.parts.is_none();
        if let Some(place) = self.quantised_place(spec) {
            let bytes = self.check_quantised(spec, &place)?;
            let has_rows = is_in_order && self.has_rows(spec, &place)?;
            return Ok(Some(QuantisedBytes { has_rows, ..bytes }));
        }
        let Some(PlainPlace { place, file, kind }) = self.plain_place(spec)? else { return Ok(None) };
        let has_rows = is_in_order && self.file(file)?.rows_of(&place.tensor).is_none();
        let divided = (count(&place.shape) * kind.bytes()) as u64;
        Ok(Some(QuantisedBytes { divided, has_rows, ..QuantisedBytes::default() }))
    }

    /// Returns the rows of the file that a shard has, if they can be read alone.
    fn rows_of_shard(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<Option<Range<usize>>, ModelError> {
        let is_of_rows = !shard.is_whole() && shard.dimension == 1;
        let has_rows = is_of_rows && self.streamed_bytes(spec)?.is_some_and(|bytes| bytes.has_rows);
        Ok(has_rows.then(|| shard.range(spec.shape[1])))
    }

    fn plain_place(&mut self, spec: &ParameterSpec) -> Result<Option<PlainPlace>, ModelError> {
        let spec = &*self.in_files(spec);
        let layout = &spec.layout;
        let is_plain = spec.kind == ParameterKind::Matrix && layout.entry.is_none() && layout.stack.is_none();
        if !is_plain || layout.inputs_first || spec.shape.len() != 2 || self.lacks_labels(spec) {
            return Ok(None);
        }
        let (place, file) = self.find(spec)?;
        let opened = self.file(file.clone())?;
        opened.check(&place.tensor, &place.shape)?;
        let kind = match opened.element_type(&place.tensor) {
            Some(WeightType::Bfloat16) => FloatType::Bf16,
            Some(WeightType::Float16) => FloatType::F16,
            _ => FloatType::F32,
        };
        Ok(Some(PlainPlace { place, file, kind }))
    }

    fn read_streamed(
        &mut self,
        spec: &ParameterSpec,
        shard: TensorShard,
    ) -> Result<QuantisedMatrix, ModelError> {
        let own = self.rows_of_shard(spec, shard)?;
        if let Some(place) = self.quantised_place(spec) {
            if let Some(rows) = own {
                return self.read_rows(spec, &place, rows);
            }
            let matrix = self.read_quantised(spec, &place)?;
            return self.shard_of_matrix(matrix, spec, shard, &place.tensor);
        }
        let Some(PlainPlace { place, file, kind }) = self.plain_place(spec)? else {
            return Err(ModelError::new(format!("`{}` is not a matrix that is streamed", spec.path)));
        };
        let (path, file) = (self.path_of(&file), self.file(file)?);
        let order = file.rows_of(&place.tensor).map(<[usize]>::to_vec);
        let &[all, columns] = &*place.shape else { unreachable!("the shape of a matrix was checked") };
        let (bytes, rows) = match &own {
            Some(own) => {
                let width = columns * kind.bytes();
                (file.read_bytes_of(&place.tensor, own.start * width..own.end * width)?, own.len())
            }
            None => (file.read_bytes(&place.tensor)?, all),
        };
        let plain = Plain::new([rows, columns], bytes, kind);
        let fault = |error| ModelError::at(&path, format!("tensor `{}`: {error}", place.tensor));
        let matrix = QuantisedMatrix::new(rows, Form::Plain(plain.map_err(fault)?));
        let matrix = match order {
            Some(order) => {
                matrix.gathered(&order).map_err(|error| ModelError::at(&path, error.to_string()))?
            }
            None => matrix,
        };
        if own.is_some() {
            return Ok(matrix);
        }
        self.shard_of_matrix(matrix, spec, shard, &place.tensor)
    }
}

/// The rate at which the files of a model are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadRate {
    /// The bytes per second.
    pub bytes_per_s: f64,
    /// Whether the reads went past the page cache, which may have made them faster otherwise.
    pub is_direct: bool,
}

/// Measures the rate at which the largest file with weights in `dir` is read, for at most `time`.
///
/// # Errors
/// When a file cannot be read.
pub fn read_rate(dir: &Path, time: Duration) -> Result<ReadRate, ModelError> {
    /// The bytes of one measured read.
    const PIECE: u64 = 64 << 20;
    let weights = Weights::open(dir)?;
    let paths = weights.file_names()?.into_iter().map(|name| weights.path_of(&name));
    let length = |path: &PathBuf| path.metadata().map_or(0, |file| file.len());
    let Some(path) = paths.max_by_key(length) else {
        return Err(ModelError::at(dir, "there is no file with weights"));
    };
    let mut file = DirectFile::open(&path).map_err(ModelError::io("read", &path))?;
    let (all, start) = (length(&path), Instant::now());
    let mut position = 0;
    while position < all && start.elapsed() < time {
        let end = (position + PIECE).min(all);
        file.read(position..end).map_err(ModelError::io("read", &path))?;
        position = end;
    }
    let bytes_per_s = (position as f64 / start.elapsed().as_secs_f64()).max(1.0);
    Ok(ReadRate { bytes_per_s, is_direct: file.is_direct() })
}

/// Returns the bytes of the matrices among the parameters `specs` that a run on the files in `dir` can stream. It reads headers
/// only.
///
/// # Errors
/// When a file is missing, cut short or not a file with weights, or a tensor has another shape.
pub fn streamed_sizes(dir: &Path, specs: &[ParameterSpec]) -> Result<QuantisedSizes, ModelError> {
    let mut weights = Weights::open(dir)?;
    let mut sizes = Vec::new();
    for spec in specs {
        if let Some(bytes) = weights.streamed_bytes(spec)? {
            sizes.push((spec.path.clone(), bytes));
        }
    }
    Ok(sizes.into_iter().collect())
}
