//! The parts of a copy: what one process has written, and what the machines of a run hold together.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, StateFile};

/// The entry of a part's description with the number of files of the whole copy.
pub(super) const FILES: &str = "files_of_copy";

/// The entry of a copy's description with its series.
pub(super) const SERIES: &str = "series_of_copy";

/// The files of one process, or of a whole copy, that are in the memory of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyPart {
    series: String,
    /// The number of files of the whole copy.
    files: u64,
    /// Whether a process of this machine wrote the files.
    is_own: bool,
    /// The files, and the description of the run.
    manifest: Manifest,
}

impl CopyPart {
    /// Reads a part; `None` if it lacks an entry or names no file.
    pub(super) fn of(mut manifest: Manifest, is_own: bool) -> Option<Self> {
        let files = manifest.description.remove(FILES)?.as_u64()?;
        let series = manifest.description.get(SERIES)?.as_str()?.to_owned();
        (!manifest.files.is_empty()).then_some(Self { series, files, is_own, manifest })
    }

    /// Reads the manifest of a copy from which a run has resumed.
    pub(super) fn of_whole(mut manifest: Manifest) -> Option<Self> {
        manifest.description.insert(FILES.to_owned(), manifest.files.len().into());
        Self::of(manifest, true)
    }

    /// Returns the number of steps that the run had taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns whether a process of this machine wrote the files.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// Returns the bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the series of the copy: the start of the processes that made it.
    pub fn series(&self) -> &str {
        &self.series
    }
}

/// A copy whose files are in the memories of one or several machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatheredCopy {
    series: String,
    manifest: Manifest,
    /// The machines that hold each file of the manifest.
    holders: Vec<Vec<Holder>>,
}

/// A machine that holds a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The index of the machine.
    pub machine: usize,
    /// Whether one of its own processes wrote the file.
    pub is_own: bool,
}

impl GatheredCopy {
    /// Returns the copies all of whose files are on one of the machines, the newest first. `machines` has the
    /// parts that each machine holds.
    pub fn gather(machines: &[Vec<CopyPart>]) -> Vec<Self> {
        let mut parts: BTreeMap<(u64, &str), Vec<(usize, &CopyPart)>> = BTreeMap::new();
        for (machine, held) in machines.iter().enumerate() {
            for part in held {
                parts.entry((part.step(), part.series())).or_default().push((machine, part));
            }
        }
        parts.into_values().rev().filter_map(Self::of_parts).collect()
    }

    /// Puts the parts of one step and series together; `None` if they are not all the parts of one copy.
    fn of_parts(mut parts: Vec<(usize, &CopyPart)>) -> Option<Self> {
        // The part of the first rank has the description.
        parts.sort_by(|(_, one), (_, other)| one.manifest.files[0].name.cmp(&other.manifest.files[0].name));
        let &(_, first) = parts.first()?;
        let mut files: BTreeMap<&str, (&StateFile, Vec<Holder>)> = BTreeMap::new();
        for (machine, part) in &parts {
            if (part.files, part.manifest.cursor) != (first.files, first.manifest.cursor) {
                return None;
            }
            let holder = Holder { machine: *machine, is_own: part.is_own };
            for file in &part.manifest.files {
                let (known, holders) = files.entry(&file.name).or_insert((file, Vec::new()));
                if *known != file {
                    return None;
                }
                match holders.iter_mut().find(|known| known.machine == *machine) {
                    Some(known) => known.is_own |= part.is_own,
                    None => holders.push(holder),
                }
            }
        }
        if files.len() as u64 != first.files {
            return None;
        }
        let (files, holders) = files.into_values().map(|(file, holders)| (file.clone(), holders)).unzip();
        let Manifest { step, cursor, description, .. } = first.manifest.clone();
        let manifest = Manifest::new(step, cursor, description, files);
        Some(Self { series: first.series.clone(), manifest, holders })
    }

    /// Returns the number of steps that the run had taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns the series of the copy.
    pub fn series(&self) -> &str {
        &self.series
    }

    /// Returns the manifest of the whole copy.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the files with the machines that hold them.
    pub fn files(&self) -> impl Iterator<Item = (&StateFile, &[Holder])> {
        self.manifest.files.iter().zip(self.holders.iter().map(Vec::as_slice))
    }

    /// Returns the bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use pipewright_data::Cursor;
    use serde_json::{Map, Value};

    use super::*;

    /// Returns the part of a process with these ranks, of a copy of `files` files.
    fn part(step: u64, files: u64, ranks: &[u32], is_own: bool) -> CopyPart {
        let file = |rank: &u32| {
            let json = format!(r#"{{"name":"rank-{rank:04}.safetensors","bytes":1,"hash":"a"}}"#);
            serde_json::from_str(&json).expect("an entry of a manifest")
        };
        let description = [(FILES.to_owned(), Value::from(files)), (SERIES.to_owned(), Value::from("first"))];
        let description = Map::from_iter(description);
        let manifest = Manifest::new(step, Cursor::default(), description, ranks.iter().map(file).collect());
        CopyPart::of(manifest, is_own).expect("it has all entries")
    }

    /// Checks which steps are complete on machines with these parts.
    fn check(machines: &[&[CopyPart]], expected: &[u64]) {
        let machines: Vec<Vec<CopyPart>> = machines.iter().map(|parts| parts.to_vec()).collect();
        let steps: Vec<u64> = GatheredCopy::gather(&machines).iter().map(GatheredCopy::step).collect();
        assert_eq!(steps, expected, "{machines:?}");
    }

    fn own(step: u64, files: u64, ranks: &[u32]) -> CopyPart {
        part(step, files, ranks, true)
    }

    fn received(step: u64, files: u64, ranks: &[u32]) -> CopyPart {
        part(step, files, ranks, false)
    }

    #[test]
    fn a_copy_needs_the_parts_of_all_ranks_of_one_step_and_one_cut() {
        check(&[&[own(7, 3, &[2]), own(7, 3, &[0, 1])]], &[7]);
        check(&[&[own(7, 1, &[0])]], &[7]);
        check(&[&[own(7, 3, &[0, 1])]], &[]);
        check(&[&[own(7, 2, &[0]), own(7, 2, &[0])]], &[]);
        check(&[&[own(7, 2, &[0]), own(6, 2, &[1])]], &[]);
        check(&[&[own(7, 2, &[0]), own(7, 4, &[1])]], &[]);
        check(&[], &[]);
    }

    #[test]
    fn machines_complete_a_copy_together() {
        check(&[&[own(7, 2, &[0])], &[own(7, 2, &[1])]], &[7]);
        // The second machine is lost, and the first one holds its files of step 6 only.
        check(&[&[own(7, 2, &[0]), own(6, 2, &[0]), received(6, 2, &[1])]], &[6]);
        let newest = [own(7, 2, &[0]), received(7, 2, &[1])];
        check(&[&newest, &[own(6, 2, &[1]), received(6, 2, &[0])]], &[7, 6]);
    }

    #[test]
    fn parts_of_another_series_do_not_complete_a_copy() {
        let mut other = own(7, 2, &[1]);
        other.series = "second".to_owned();
        check(&[&[own(7, 2, &[0]), other]], &[]);
    }

    #[test]
    fn a_file_with_two_contents_is_not_used() {
        let mut other = received(7, 1, &[0]);
        other.manifest.files[0].hash = "b".to_owned();
        check(&[&[own(7, 1, &[0])], &[other]], &[]);
    }

    #[test]
    fn the_holders_of_a_file_are_known() {
        let machines =
            [vec![own(7, 2, &[0]), received(7, 2, &[1])], vec![own(7, 2, &[1]), received(7, 2, &[0])]];
        let copy = &GatheredCopy::gather(&machines)[0];
        let holders: Vec<Vec<(usize, bool)>> = copy
            .files()
            .map(|(_, holders)| holders.iter().map(|holder| (holder.machine, holder.is_own)).collect())
            .collect();
        assert_eq!(holders, [[(0, true), (1, false)], [(0, false), (1, true)]]);
        assert!(!copy.manifest().description.contains_key(FILES));
        assert_eq!((copy.series(), copy.bytes()), ("first", 2));
    }
}
