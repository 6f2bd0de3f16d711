//! [`Fingerprint`]: a hash of the trained parameters and their optimizer state, by parameter.
//!
//! The hash of a parameter (a leaf) is a sum over its elements. Each element is mixed with its index in the whole
//! parameter and with the names of the parameter and the field, so ranks that hold parts of a parameter hash their
//! parts, and the sum of the parts is the hash of the whole. The tree above the leaves depends on paths alone. So a
//! fingerprint does not depend on the cut, the schedule, or the number of replicas that share a parameter.
//!
//! If tensor ranks hold shards of different sizes, the fingerprint belongs to this number of tensor ranks.
//!
//! A leaf has 64 bits. Two different states have the same leaf by accident in one of 10^19 cases, but such states can be
//! constructed: a fingerprint finds mistakes and faults, not forgeries of the hash itself.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::TensorData;
use pipewright_kernel::hash::hash_sum;
use pipewright_schedule::StageIndex;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSlice;
use serde::{Deserialize, Serialize};

use super::error::CheckpointError;
use super::optimizer::{OLDER, take_apart};
use super::state::{HeldParameter, StageState};
use super::tensor_file::FIELD;
use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// The hashes of all trained parameters, each with its optimizer state, in the order of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(Vec<(Arc<str>, Digest)>);

/// A hash of 64 bits, whose text has 16 hexadecimal digits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest(u64);

/// The sum over the elements of a parameter that a rank holds.
pub(crate) type PartialLeaf = (Arc<str>, Digest);

/// The leaves that a rank holds, each with its stage.
pub(crate) type StageLeaves = Vec<(StageIndex, PartialLeaf)>;

impl Digest {
    /// Returns the hash of names and their hashes, which does not depend on their order.
    fn of(parts: impl IntoIterator<Item = (Arc<str>, Digest)>) -> Self {
        let mut parts: Vec<_> = parts.into_iter().collect();
        parts.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut hasher = blake3::Hasher::new();
        for (name, digest) in parts {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(&digest.0.to_le_bytes());
        }
        first_eight(&hasher.finalize())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = u64::from_str_radix(&text, 16).ok().filter(|_| text.len() == 16);
        digits.map(Self).ok_or_else(|| format!("expected a hash of 16 hexadecimal digits, found `{text}`"))
    }
}

impl Fingerprint {
    /// Adds up the parts of leaves. A parameter has the place of its first part.
    pub(crate) fn sum(parts: impl IntoIterator<Item = PartialLeaf>) -> Self {
        let (mut leaves, mut places) = (Vec::new(), HashMap::new());
        for (path, Digest(part)) in parts {
            let place = *places.entry(path.clone()).or_insert(leaves.len());
            if place == leaves.len() {
                leaves.push((path, Digest::default()));
            }
            let Digest(sum) = &mut leaves[place].1;
            *sum = sum.wrapping_add(part);
        }
        Self(leaves)
    }

    /// Returns the fingerprint of the first replicas that hold all parameters together, and the parameters that differ on
    /// others; `None` if a rank has not reported its part. Each part has the number of such a group of replicas.
    pub(crate) fn of_replicas(parts: Option<Vec<(u32, StageLeaves)>>) -> (Option<Self>, Vec<Arc<str>>) {
        let mut groups: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for (group, leaves) in parts.unwrap_or_default() {
            groups.entry(group).or_default().extend(leaves);
        }
        let mut groups = groups.into_values().map(|mut leaves| {
            leaves.sort_by_key(|(stage, _)| *stage);
            Self::sum(leaves.into_iter().map(|(_, leaf)| leaf))
        });
        let Some(first) = groups.next() else { return (None, Vec::new()) };
        let mut unlike: Vec<Arc<str>> = groups
            .flat_map(|other| first.differences(&other).into_iter().map(Arc::from).collect::<Vec<_>>())
            .collect();
        unlike.sort_unstable();
        unlike.dedup();
        (Some(first), unlike)
    }

    /// Joins the fingerprints of the stages of a model, in their order.
    pub fn joined(stages: impl IntoIterator<Item = Self>) -> Self {
        Self::sum(stages.into_iter().flat_map(|Self(leaves)| leaves))
    }

    /// Returns the hash of the whole state.
    pub fn root(&self) -> Digest {
        Digest::of(self.layers())
    }

    /// Returns the hash of each layer, by path, in the order of the model. It does not depend on the order of the parameters,
    /// which is another one if ranks hold experts together.
    pub fn layers(&self) -> Vec<(Arc<str>, Digest)> {
        let mut layers: Vec<(&str, Vec<PartialLeaf>)> = Vec::new();
        for leaf in &self.0 {
            let layer = layer_of(&leaf.0);
            match layers.iter_mut().find(|(path, _)| *path == layer) {
                Some((_, leaves)) => leaves.push(leaf.clone()),
                None => layers.push((layer, vec![leaf.clone()])),
            }
        }
        let digest = |(layer, leaves): (&str, Vec<_>)| (layer.into(), Digest::of(leaves));
        layers.into_iter().map(digest).collect()
    }

    /// Returns the hash of each parameter, by path, in the order of the model.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, Digest)> {
        self.0.iter().map(|(path, digest)| (&**path, *digest))
    }

    /// Returns the paths of the parameters that differ or that only one of the two has, in the order of the model.
    pub fn differences<'a>(&'a self, other: &'a Self) -> Vec<&'a str> {
        let known: HashMap<&str, Digest> = other.parameters().collect();
        let own: HashMap<&str, Digest> = self.parameters().collect();
        let unlike = self.parameters().filter(|(path, digest)| known.get(path) != Some(digest));
        let missing = other.parameters().filter(|(path, _)| !own.contains_key(path));
        unlike.chain(missing).map(|(path, _)| path).collect()
    }
}

/// Returns the path of the layer of a parameter: up to its first number, or without its last name.
fn layer_of(path: &str) -> &str {
    let mut end = 0;
    for name in path.split('.') {
        end += name.len();
        if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..end];
        }
        end += 1;
    }
    path.rsplit_once('.').map_or(path, |(layer, _)| layer)
}

/// Returns the hashes of the parameters of a stage, each with its optimizer state. `rows_of` returns the number of rows of
/// a parameter before it is sharded over replicas.
pub(crate) fn leaves_of(
    state: StageState,
    rows_of: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<PartialLeaf>, CheckpointError> {
    let StageState { parameters, optimizer, .. } = state;
    // Shards of one parameter may be on one stage, so names are indices.
    let names: HashMap<ParamId, Arc<str>> =
        parameters.iter().map(|held| (held.id, held.index.to_string().into())).collect();
    let parts = optimizer.map(|optimizer| take_apart(&optimizer, &names)).transpose()?.unwrap_or_default();
    let mut sums: HashMap<String, u64> = HashMap::new();
    let by_name: HashMap<String, &HeldParameter> =
        parameters.iter().map(|held| (held.index.to_string(), held)).collect();
    let mut add = |name: &str, field: &str, data: &TensorData| {
        let held = by_name[name];
        let place = Place { shard: held.shard, rows: held.rows, whole_rows: rows_of(held.index) };
        let sum = sums.entry(name.to_owned()).or_default();
        *sum = sum.wrapping_add(place.sum(key_of(&held.path, field), data));
    };
    for (name, data) in &parts.tensors {
        let (name, field) = name.split_once(FIELD).unwrap_or((name, ""));
        add(name, field, data);
    }
    for held in &parameters {
        let name = held.index.to_string();
        add(&name, "", &held.value.clone().into_data());
        held.older.clone().into_iter().for_each(|older| add(&name, OLDER, &older.into_data()));
    }
    for (name, text) in &parts.scalars {
        let (name, field) = name.split_once(FIELD).unwrap_or((name, ""));
        let held = by_name[name];
        // All parts of a parameter have the same numbers.
        if held.shard.index == 0 && held.rows.index == 0 {
            let sum = sums.entry(name.to_owned()).or_default();
            *sum = sum.wrapping_add(key_of(&held.path, &format!("{field}={text}")));
        }
    }
    let leaf = |held: &HeldParameter| {
        (held.path.clone(), Digest(sums.get(&held.index.to_string()).copied().unwrap_or_default()))
    };
    Ok(parameters.iter().map(leaf).collect())
}

/// Where the elements of a tensor are in the whole parameter.
struct Place {
    shard: TensorShard,
    rows: RowShard,
    /// The rows of the shard.
    whole_rows: Option<usize>,
}

impl Place {
    /// Returns the sum over the elements.
    fn sum(&self, key: u64, data: &TensorData) -> u64 {
        let (shape, size) = (data.shape().to_vec(), data.dtype().size());
        let cut = self.shard.dimension.min(shape.len().saturating_sub(1));
        let first_row = self.whole_rows.map_or(0, |rows| self.rows.rows(rows).start);
        let [Some(&held), Some(&held_rows)] = [shape.get(cut), shape.first()] else {
            return elements(key, 0, data.as_bytes(), size);
        };
        let of_shard = if cut == 0 { self.whole_rows.unwrap_or(held_rows) } else { held };
        let (start, whole) =
            (self.shard.index as usize * of_shard, (self.shard.of as usize * of_shard).max(held));
        let inner: usize = shape[cut + 1..].iter().product();
        if cut == 0 {
            return elements(key, (start + first_row) * inner, data.as_bytes(), size);
        }
        let first = first_row * shape[1..cut].iter().product::<usize>();
        let block = (held * inner * size).max(1);
        let blocks = data.as_bytes().chunks(block).enumerate();
        let sums = blocks
            .map(|(block, bytes)| elements(key, ((first + block) * whole + start) * inner, bytes, size));
        sums.fold(0, u64::wrapping_add)
    }
}

/// The elements that a thread adds at once.
const PIECE: usize = 1 << 16;

/// Returns the sum over consecutive elements of `size` bytes; `first` is the index of the first one.
fn elements(key: u64, first: usize, bytes: &[u8], size: usize) -> u64 {
    let piece = |(index, bytes): (usize, &[u8])| hash_sum(key, (first + index * PIECE) as u64, bytes, size);
    if bytes.len() <= PIECE * size {
        return piece((0, bytes));
    }
    bytes.par_chunks(PIECE * size).enumerate().map(piece).reduce(|| 0, u64::wrapping_add)
}

/// Returns the number with which the elements of a field are mixed.
fn key_of(path: &str, field: &str) -> u64 {
    first_eight(&blake3::hash(format!("{path}{FIELD}{field}").as_bytes())).0
}

fn first_eight(hash: &blake3::Hash) -> Digest {
    let (first, _) = hash.as_bytes().split_at(8);
    Digest(u64::from_le_bytes(first.try_into().expect("a hash has 32 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(rows: usize) -> Place {
        Place { shard: TensorShard::WHOLE, rows: RowShard::WHOLE, whole_rows: Some(rows) }
    }

    fn data(elements: Vec<f32>, shape: [usize; 2]) -> TensorData {
        TensorData::new(elements, shape)
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let shape = [4, 6];
        let values: Vec<f32> = (0..24).map(|value| value as f32).collect();
        let expected = whole(4).sum(7, &data(values.clone(), shape));
        for dimension in [0, 1] {
            for (of, replicas) in [(2, 1), (2, 2), (1, 3)] {
                let mut sum = 0u64;
                for index in 0..of {
                    let shard = TensorShard { dimension, index, of, copy: 0, copies: 1 };
                    let held = shard.cut(values.clone(), &shape);
                    let [rows, columns] = <[usize; 2]>::try_from(shard.shape(&shape)).expect("a matrix");
                    for part in RowShard::all(replicas) {
                        let own = part.rows(rows);
                        let elements = held[own.start * columns..own.end * columns].to_vec();
                        let place = Place { shard, rows: part, whole_rows: Some(rows) };
                        sum = sum.wrapping_add(place.sum(7, &data(elements, [own.len(), columns])));
                    }
                }
                assert_eq!(sum, expected, "{of} shards along {dimension}, {replicas} replicas");
            }
        }
    }

    #[test]
    fn every_element_its_place_and_its_name_count() {
        let sum = |key, values: &[f32]| whole(2).sum(key, &data(values.to_vec(), [2, 2]));
        let first = sum(key_of("a", ""), &[1.0, 2.0, 3.0, 4.0]);
        let others = [
            sum(key_of("a", ""), &[2.0, 1.0, 3.0, 4.0]),
            sum(key_of("a", ""), &[1.0, 2.0, 3.0, f32::from_bits(4.0f32.to_bits() + 1)]),
            sum(key_of("a", ""), &[1.0, 2.0, 3.0, -4.0]),
            sum(key_of("b", ""), &[1.0, 2.0, 3.0, 4.0]),
            sum(key_of("a", "momentum"), &[1.0, 2.0, 3.0, 4.0]),
        ];
        assert!(others.iter().all(|other| *other != first));
    }

    #[test]
    fn replicas_are_compared_and_the_first_one_counts() {
        let part = |group, stage, path: &str, sum| {
            (group, vec![(StageIndex::new(stage), (Arc::from(path), Digest(sum)))])
        };
        let parts =
            |last| vec![part(0, 1, "b", 1), part(1, 1, "b", 1), part(0, 0, "a", 2), part(1, 0, "a", last)];
        let (fingerprint, unlike) = Fingerprint::of_replicas(Some(parts(2)));
        let paths: Vec<_> = fingerprint.iter().flat_map(Fingerprint::parameters).collect();
        assert_eq!(paths, [("a", Digest(2)), ("b", Digest(1))]);
        assert_eq!(unlike, []);
        assert_eq!(Fingerprint::of_replicas(Some(parts(3))), (fingerprint, vec!["a".into()]));
        assert_eq!(Fingerprint::of_replicas(None), (None, Vec::new()));
    }

    #[test]
    fn long_tensors_have_the_sum_of_their_pieces() {
        let bytes: Vec<u8> = (0..4 * (2 * PIECE + 5)).map(|index| (index % 251) as u8).collect();
        assert_eq!(elements(3, 11, &bytes, 4), hash_sum(3, 11, &bytes, 4));
    }

    #[test]
    fn the_tree_has_layers_and_names_differences() {
        let leaf = |path: &str, sum| (Arc::from(path), Digest(sum));
        let paths = ["model.embed.weight", "model.layers.1.a.weight", "model.layers.1.b", "head"];
        let all = || paths.into_iter().zip(1..).map(|(path, sum)| leaf(path, sum));
        let tree = Fingerprint::sum(all());
        let layers: Vec<Arc<str>> = tree.layers().into_iter().map(|(path, _)| path).collect();
        assert_eq!(layers, ["model.embed", "model.layers.1", "head"].map(Arc::from));
        let parts = all().chain([leaf(paths[1], 5), leaf(paths[1], 5u64.wrapping_neg())]);
        assert_eq!(Fingerprint::sum(parts), tree, "the parts of a parameter are added");
        let mut reversed: Vec<_> = all().collect();
        reversed.reverse();
        assert_eq!(Fingerprint::sum(reversed).root(), tree.root(), "the order of ranks does not count");
        let other = Fingerprint::sum(all().chain([leaf(paths[2], 1), leaf("more", 0)]));
        assert_ne!(other.root(), tree.root());
        assert_eq!(tree.differences(&other), [paths[2], "more"]);
        assert_eq!(tree.differences(&tree.clone()), [""; 0]);
        let text = serde_json::to_string(&tree).expect("a text");
        assert!(text.starts_with(r#"[["model.embed.weight","0000000000000001"]"#), "{text}");
        assert_eq!(serde_json::from_str::<Fingerprint>(&text).expect("it is read again"), tree);
    }
}
