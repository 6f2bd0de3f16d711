//! [`MovedState`]: the state of layers that move from stage to stage, in the format of a checkpoint's file.
//!
//! A checkpoint is read under any cut and by any ranks, so its reader puts whole tensors together. Layers move
//! between ranks at the same place of their replicas and tensor groups. These ranks hold the same parts of a
//! parameter, so a moved state has these parts and knows nothing of the others.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Bytes, DType, Shape, TensorData};

use super::error::CheckpointError;
use super::save::{Names, add_stage};
use super::state::StageState;
use super::stored::{OptimizerFields, StoredState};
use super::tensor_file::{self, Accepted, Content, FIELD, FROZEN, Header, INDEX, Named};
use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// The parameters of some layers and their optimizer state.
#[derive(Debug, Default)]
pub(crate) struct MovedState {
    /// The tensors by name. A parameter has its path as its name, with the index of the shard if it is not
    /// whole; a tensor of its optimizer state also has the field.
    tensors: BTreeMap<String, TensorData>,
    /// The numbers of the optimizer state by name.
    scalars: BTreeMap<String, String>,
    frozen: BTreeSet<String>,
}

impl MovedState {
    /// Adds the state of a stage.
    ///
    /// # Errors
    /// When the state cannot be stored.
    pub(crate) fn add(&mut self, stage: StageState) -> Result<(), CheckpointError> {
        let held = stage.parameters.iter();
        self.frozen.extend(held.filter(|held| held.is_frozen).map(|held| held.path.to_string()));
        let names = Names::with_indices(&stage);
        let mut tensors = BTreeMap::new();
        add_stage(stage, &names, &mut tensors, &mut self.scalars)?;
        let data = tensors.into_iter().map(|(name, Named { content, .. })| (name, content.into_data()));
        self.tensors.extend(data);
        Ok(())
    }

    /// Encodes the state of the parameters with these paths. Parameters that the state does not have are left
    /// out: they are the base of adapters, which its receiver reads by itself.
    ///
    /// # Errors
    /// When a tensor has elements of a type that the format does not have.
    pub(crate) fn encoded(&self, paths: &[String]) -> Result<Vec<u8>, CheckpointError> {
        let paths: HashSet<&str> = paths.iter().map(String::as_str).collect();
        let is_one = |name: &str| parameters_of(name).any(|path| paths.contains(path));
        let tensors = self.tensors.iter().filter(|(name, _)| is_one(name)).map(|(name, data)| {
            let (content, accepted) = (Content::Data(data.clone()), Accepted::Any);
            Named { name: name.clone(), content, accepted }
        });
        let scalars = self.scalars.iter().filter(|(name, _)| is_one(name));
        let mut texts: BTreeMap<_, _> = scalars.map(|(name, text)| (name.clone(), text.clone())).collect();
        let frozen: Vec<&str> =
            self.frozen.iter().map(String::as_str).filter(|path| paths.contains(path)).collect();
        texts.insert(FROZEN.to_owned(), serde_json::to_string(&frozen).expect("paths are plain data"));
        tensor_file::encoded(&texts, tensors.collect())
    }

    /// Adds what [`MovedState::encoded`] has returned. A parameter that the state has already stays.
    ///
    /// # Errors
    /// When the bytes are not such a state.
    pub(crate) fn add_encoded(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let damaged =
            || CheckpointError::unusable(place(), "they have arrived in a form that cannot be read");
        let Header { mut texts, tensors, data } =
            tensor_file::read_header(&mut &*bytes).ok_or_else(damaged)?;
        let frozen = texts.remove(FROZEN).and_then(|text| serde_json::from_str::<Vec<String>>(&text).ok());
        self.frozen.extend(frozen.ok_or_else(damaged)?);
        for (name, text) in texts {
            self.scalars.entry(name).or_insert(text);
        }
        for (name, info) in tensors {
            let (start, end) = info.data_offsets;
            let content = bytes.get(data as usize + start..data as usize + end).ok_or_else(damaged)?;
            let dtype = tensor_file::from_stored(info.dtype).ok_or_else(damaged)?;
            let (content, shape) = (Bytes::from_bytes_vec(content.to_vec()), Shape::from(info.shape));
            self.tensors.entry(name).or_insert_with(|| TensorData::from_bytes(content, shape, dtype));
        }
        Ok(())
    }
}

impl StoredState for MovedState {
    fn place(&self) -> &Path {
        place()
    }

    fn has_parameter(&self, path: &str) -> bool {
        self.tensors.keys().any(|name| !name.contains(FIELD) && parameters_of(name).any(|own| own == path))
    }

    fn is_frozen(&self, path: &str) -> bool {
        self.frozen.contains(path)
    }

    fn read_rows(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<TensorData, CheckpointError> {
        let mut expected = shape.to_vec();
        if let Some(rows) = expected.first_mut() {
            *rows = part.rows(*rows).len();
        }
        let unfit = |what: String| CheckpointError::unusable(place(), what);
        match self.tensors.get(&name_of(parameter, shard)) {
            Some(data) if data.shape().as_slice() == expected && data.dtype() == dtype => Ok(data.clone()),
            Some(data) => Err(unfit(format!(
                "`{parameter}` is {:?} {:?} where it comes from and {dtype:?} {expected:?} where it goes",
                data.dtype(),
                data.shape()
            ))),
            // Such a replica has no rows of the parameter.
            None if expected.first() == Some(&0) => {
                Ok(TensorData::from_bytes(Bytes::from_bytes_vec(Vec::new()), Shape::from(expected), dtype))
            }
            None => Err(unfit(format!("the parameter `{parameter}` is missing"))),
        }
    }

    fn read_optimizer(
        &self,
        parameter: &str,
        shard: TensorShard,
        _part: RowShard,
    ) -> Result<OptimizerFields, CheckpointError> {
        let prefix = format!("{}{FIELD}", name_of(parameter, shard));
        let field = |name: &String| name.strip_prefix(&prefix).map(ToOwned::to_owned);
        let from = || prefix.clone()..;
        let scalars = self.scalars.range(from()).map_while(|(name, text)| Some((field(name)?, text.clone())));
        let tensors = self.tensors.range(from()).map_while(|(name, data)| Some((field(name)?, data.clone())));
        Ok(OptimizerFields { scalars: scalars.collect(), tensors: tensors.collect() })
    }
}

fn place() -> &'static Path {
    Path::new("the layers that move")
}

/// Returns the name of a rank's part of a parameter.
fn name_of(path: &str, shard: TensorShard) -> String {
    if shard.is_whole() { path.to_owned() } else { format!("{path}{INDEX}{}", shard.index) }
}

/// Returns the path of the parameter to which a name belongs, with and without the index of a shard.
fn parameters_of(name: &str) -> impl Iterator<Item = &str> {
    let parameter = name.split_once(FIELD).map_or(name, |(parameter, _)| parameter);
    [Some(parameter), parameter.rsplit_once(INDEX).map(|(path, _)| path)].into_iter().flatten()
}
