//! The names of the files of a rank in a checkpoint or a copy.

use crate::ids::WorldRank;

/// The endings of the names of a rank's file of tensors, and of its note for the process that commits.
pub(super) const TENSORS: &str = ".safetensors";
pub(super) const NOTE: &str = ".note";

const PREFIX: &str = "rank-";

/// Returns the name of the file of tensors of a rank.
pub(super) fn tensors_of(rank: WorldRank) -> String {
    format!("{}{TENSORS}", name_of(rank))
}

/// Returns the name of the note of a rank.
pub(super) fn note_of(rank: WorldRank) -> String {
    format!("{}{NOTE}", name_of(rank))
}

/// Returns the part that the names of a rank's files have in common, which is also the name of its part of a copy.
pub(super) fn name_of(rank: WorldRank) -> String {
    format!("{PREFIX}{:04}", rank.get())
}

/// Splits the name of a file of a rank into the part that its files have in common and the ending; `None` if it is another
/// name. Such a name leads to no other folder.
pub(super) fn split(name: &str) -> Option<(&str, &str)> {
    let digits = name.strip_prefix(PREFIX)?.bytes().take_while(u8::is_ascii_digit).count();
    let (common, ending) = name.split_at(PREFIX.len() + digits);
    (digits > 0 && ["", TENSORS, NOTE].contains(&ending)).then_some((common, ending))
}

/// Returns whether a file of a checkpoint with this name belongs to a rank.
pub fn is_rank_file(name: &str) -> bool {
    split(name).is_some_and(|(_, ending)| !ending.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_a_rank_are_read_again() {
        for rank in [0, 7, 12_345].map(WorldRank::new) {
            let common = name_of(rank);
            assert_eq!(split(&common), Some((&*common, "")));
            assert_eq!(split(&tensors_of(rank)), Some((&*common, TENSORS)));
            assert_eq!(split(&note_of(rank)), Some((&*common, NOTE)));
            assert!(
                is_rank_file(&tensors_of(rank)) && is_rank_file(&note_of(rank)) && !is_rank_file(&common)
            );
        }
        assert_eq!(
            [tensors_of, note_of].map(|name| name(WorldRank::new(3))),
            ["rank-0003.safetensors", "rank-0003.note"]
        );
        for name in [
            "lock",
            "rank-",
            "rank-x.note",
            "rank-1/../../x.note",
            "rank-1.note/x",
            "../rank-1.note",
            "rank-1.noted",
        ] {
            assert_eq!(split(name), None, "{name}");
        }
    }
}
