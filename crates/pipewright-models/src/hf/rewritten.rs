//! Writes the model of a directory again with some of its tensors changed, tensor by tensor. All others are copied as
//! they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::json;

use super::file::bad_header;
use super::layout::INDEX;
use super::weights::Weights;
use super::write::{DEFAULT_SHARD_BYTES, Scratch, file_name, header_of};
use crate::error::ModelError;

/// A tensor of a new file: its name, type, shape and number of bytes.
pub(super) type Announced = (String, Dtype, Vec<usize>, usize);

/// Writes the tensors of a model into the files of `scratch`. `announced` returns the tensors that take the place of
/// one, and `bytes` their bytes; `None` for a tensor that is copied. Returns the bytes of all tensors before and after.
pub(super) fn rewrite(
    weights: &mut Weights,
    scratch: &Scratch,
    announced: impl Fn(&Announced) -> Option<Vec<Announced>>,
    mut bytes: impl FnMut(&mut Weights, &str) -> Result<Option<Vec<Vec<u8>>>, ModelError>,
) -> Result<[u64; 2], ModelError> {
    let tensors: Vec<String> = weights.tensors().map(str::to_owned).collect();
    let mut shards: Vec<(Vec<String>, Vec<Announced>, usize)> = vec![Default::default()];
    let (mut before, mut after) = (0, 0);
    for tensor in tensors {
        let (dtype, shape, size) = weights.describe(&tensor)?;
        before += size as u64;
        let own = (tensor.clone(), dtype, shape, size);
        let announced = announced(&own).unwrap_or_else(|| vec![own]);
        let size: usize = announced.iter().map(|(.., bytes)| bytes).sum();
        after += size as u64;
        let is_full = |used: usize| used > 0 && (used + size) as u64 > DEFAULT_SHARD_BYTES;
        if shards.last().is_some_and(|(.., used)| is_full(*used)) {
            shards.push(Default::default());
        }
        if let Some((names, all, used)) = shards.last_mut() {
            names.push(tensor);
            all.extend(announced);
            *used += size;
        }
    }
    let (count, mut map) = (shards.len(), BTreeMap::new());
    for (index, (names, announced, _)) in shards.into_iter().enumerate() {
        let name = file_name(index, count);
        map.extend(announced.iter().map(|(tensor, ..)| (tensor.clone(), name.clone())));
        let path = scratch.path().join(name);
        let header = header(announced).map_err(|source| bad_header(&path, source))?;
        let mut file = File::create_new(&path).map_err(ModelError::io("write", &path))?;
        let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(ModelError::io("write", &path));
        write(&header)?;
        for tensor in names {
            match bytes(weights, &tensor)? {
                Some(parts) => parts.iter().try_for_each(|part| write(part))?,
                None => write(&weights.raw(&tensor)?)?,
            }
        }
        file.sync_all().map_err(ModelError::io("write", &path))?;
    }
    if count > 1 {
        scratch.write_json(INDEX, &json!({"metadata": {"total_size": after}, "weight_map": map}))?;
    }
    Ok([before, after])
}

/// Returns the header of a file with these tensors.
fn header(announced: Vec<Announced>) -> Result<Vec<u8>, serde_json::Error> {
    let mut offset = 0;
    let tensors = announced.into_iter().map(|(name, dtype, shape, bytes)| {
        let start = offset;
        offset += bytes;
        (name, TensorInfo { dtype, shape, data_offsets: (start, offset) })
    });
    header_of(tensors.collect())
}
