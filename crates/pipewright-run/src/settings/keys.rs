//! The table of the keys: `keys.toml` has each key with its default or an example, its range, and a sentence.
//!
//! The table is a configuration itself, and `pipewright init` writes it without its marks. Before a sentence,
//! marks in angle brackets say what else the program knows of a key:
//!
//! | mark | meaning |
//! |---|---|
//! | `1..1024` | whole numbers of this range |
//! | `count`, `index`, `steps` | whole numbers from 1 or from 0 to 2^31 - 1, and from 0 to 2^63 - 1 |
//! | `positive`, `non-negative`, `fraction`, `share` | numbers of a [`Bound`]; after `single`, in single precision too |
//! | `kept` | a resumed run needs the same value, as `training::identity` checks; a test compares both |
//! | `local` | the processes of a run may have different values |
//! | `timed` | the time of a step depends on it |

use std::mem::take;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use pipewright_document::{Bound, Source, Table, Value, nearest};

/// The names that other systems have for keys and sections.
const OTHER_NAMES: &str = include_str!("other_names.toml");
/// The section of it with the names of sections.
const SECTION_NAMES: &str = "sections";

/// The table.
const TABLE: &str = include_str!("keys.toml");

/// The largest count that a configuration may contain: the largest value of a token id and of the engine's
/// indices.
pub(crate) const LARGEST_COUNT: u32 = i32::MAX as u32;

/// A section with its keys.
pub(super) struct SectionKeys {
    pub(super) name: &'static str,
    /// The comment next to the name.
    pub(super) comment: &'static str,
    pub(super) keys: Vec<Key>,
}

/// A key of the table.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// The default, or an example.
    pub(super) value: &'static str,
    pub(super) has_default: bool,
    /// The comment above the key, which ends with a colon if it is about the following keys too.
    pub(super) above: String,
    /// The comment next to the key, without the marks.
    pub(super) comment: String,
    pub(super) marks: Vec<&'static str>,
}

static SECTIONS: LazyLock<Vec<SectionKeys>> = LazyLock::new(|| {
    let mut sections: Vec<SectionKeys> = Vec::new();
    let mut above = String::new();
    for line in TABLE.lines() {
        let header = line.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        if let Some((name, comment)) = header {
            let comment = comment.trim_start_matches([' ', '#']);
            sections.push(SectionKeys { name, comment, keys: Vec::new() });
            // The comment above the first section is about the file.
            above.clear();
            continue;
        }
        let Some(section) = sections.last_mut() else { continue };
        let comment = line.trim_start_matches([' ', '#']);
        if let Some(key) = Key::of(line) {
            section.keys.push(Key { above: take(&mut above), ..key });
        } else if let (true, Some(key)) = (line.starts_with(' '), section.keys.last_mut()) {
            push_words(&mut key.comment, comment);
        } else {
            push_words(&mut above, comment);
        }
    }
    sections
});

/// Appends words to a sentence.
fn push_words(sentence: &mut String, words: &str) {
    if !sentence.is_empty() && !words.is_empty() {
        sentence.push(' ');
    }
    sentence.push_str(words);
}

/// The keys that have defaults.
static DEFAULTS: LazyLock<Table> = LazyLock::new(|| {
    let table = Table::parse(Source::from(TABLE), usize::MAX, &mut Vec::new());
    table.expect("the table of the keys is TOML, as a test checks")
});

/// The other names of the keys, by section.
static OTHERS: LazyLock<Table> = LazyLock::new(|| {
    let table = Table::parse(Source::from(OTHER_NAMES), usize::MAX, &mut Vec::new());
    table.expect("the table of the other names is TOML, as a test checks")
});

impl Key {
    /// Returns the key of a line of the table, if it has one.
    fn of(line: &'static str) -> Option<Self> {
        let example = line.strip_prefix("# ");
        let (name, rest) = example.unwrap_or(line).split_once(" = ")?;
        let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
        let (value, comment) = rest.split_once(" # ").unwrap_or((rest, ""));
        let (marks, comment) = match comment.strip_prefix('<').and_then(|marked| marked.split_once('>')) {
            Some((marks, comment)) => (marks.split(", ").collect(), comment.trim_start()),
            None => (Vec::new(), comment),
        };
        is_name.then(|| Self {
            name,
            value: value.trim_end(),
            has_default: example.is_none(),
            above: String::new(),
            comment: comment.to_owned(),
            marks,
        })
    }

    /// Returns the whole numbers that the key takes.
    pub(super) fn range(&self) -> Option<RangeInclusive<u64>> {
        self.marks.iter().find_map(|mark| match *mark {
            "count" => Some(1..=u64::from(LARGEST_COUNT)),
            "index" => Some(0..=u64::from(LARGEST_COUNT)),
            "steps" => Some(0..=i64::MAX as u64),
            mark => {
                let (least, most) = mark.split_once("..")?;
                Some(least.parse().ok()?..=most.parse().ok()?)
            }
        })
    }

    /// Returns the bound of the numbers that the key takes, and whether it holds in single precision too.
    pub(super) fn bound(&self) -> Option<(Bound, bool)> {
        let bounds = [Bound::Positive, Bound::NonNegative, Bound::Fraction, Bound::Share];
        self.marks.iter().find_map(|mark| {
            let single = mark.strip_prefix("single ");
            let bound = bounds.into_iter().find(|bound| bound.name() == single.unwrap_or(mark))?;
            Some((bound, single.is_some()))
        })
    }

    /// Returns whether the processes of a run may have different values.
    pub(super) fn is_local(&self) -> bool {
        self.marks.contains(&"local")
    }

    /// Returns whether the time of a step depends on the value.
    pub(super) fn is_timed(&self) -> bool {
        self.marks.contains(&"timed")
    }
}

/// Returns the sections in the order in which they are written.
pub(super) fn sections() -> &'static [SectionKeys] {
    &SECTIONS
}

/// Returns the keys of `section`, if there is such a section.
pub(super) fn keys_of(section: &str) -> Option<&'static [Key]> {
    SECTIONS.iter().find(|known| known.name == section).map(|known| known.keys.as_slice())
}

/// Returns the defaults of the keys of `section`.
pub(super) fn defaults_of(section: &str) -> &'static Table {
    let table = DEFAULTS.get(section).and_then(Value::as_table);
    table.expect("each section that is read is in the table of the keys, as a test checks")
}

/// Returns whether the processes of a run may have different values of a key, such as `run.out`.
pub(crate) fn may_differ(key: &str) -> bool {
    let key = key.split_once('.').and_then(|(section, key)| find(section, key));
    key.is_some_and(Key::is_local)
}

/// Returns all keys, such as `run.out`, each with its mark `kept`.
#[cfg(test)]
pub(crate) fn kept_marks() -> impl Iterator<Item = (String, bool)> {
    let keys = SECTIONS.iter().flat_map(|section| section.keys.iter().map(|key| (section.name, key)));
    keys.map(|(section, key)| (format!("{section}.{}", key.name), key.marks.contains(&"kept")))
}

/// Returns a key of a section.
pub(super) fn find(section: &str, key: &str) -> Option<&'static Key> {
    keys_of(section)?.iter().find(|known| known.name == key)
}

/// Returns a configuration with every key at its default and a comment on each.
pub fn template() -> String {
    let without_marks = |line: &str| {
        let marks = line.split_once("# <").and_then(|(start, rest)| Some((start, rest.split_once('>')?.1)));
        let Some((start, sentence)) = marks else { return line.to_owned() };
        format!("{start}#{sentence}").trim_end_matches([' ', '#']).to_owned()
    };
    TABLE.lines().map(|line| without_marks(line) + "\n").collect()
}

/// Returns the keys as arguments of `--set`, such as `run.steps=`.
pub fn set_arguments() -> &'static [String] {
    static ARGUMENTS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let keys =
            SECTIONS.iter().flat_map(|section| section.keys.iter().map(|key| (section.name, key.name)));
        keys.map(|(section, key)| format!("{section}.{key}=")).collect()
    });
    &ARGUMENTS
}

/// Returns the key of a section that another system calls `name`.
fn known_elsewhere(section: &str, name: &str) -> Option<&'static str> {
    let is_called =
        |names: &Value| names.as_list().into_iter().flatten().any(|known| known.as_text() == Some(name));
    let mut keys = OTHERS.get(section)?.as_table()?.entries.iter();
    keys.find(|(_, names)| is_called(&names.value)).map(|(key, _)| key.as_str())
}

/// Returns the key that the user probably meant by an unknown key, in words. The first match of these counts:
/// a key of this section that another system calls so, the same key in another section, a key of another section that
/// another system calls so, a similar key in this section, a similar key in another section.
pub(super) fn suggestion(section: &str, key: &str) -> Option<String> {
    let elsewhere = |wanted: &str| {
        let has_key = |known: &&SectionKeys| known.name != section && find(known.name, wanted).is_some();
        SECTIONS.iter().find(has_key).map(|owner| format!("`{wanted}` in [{}]", owner.name))
    };
    let here = keys_of(section).unwrap_or_default().iter().map(|key| key.name);
    let all = SECTIONS.iter().flat_map(|known| &known.keys).map(|key| key.name);
    let other_name = || {
        let others = SECTIONS.iter().filter(|known| known.name != section);
        let mut found = others.filter_map(|known| Some((known_elsewhere(known.name, key)?, known.name)));
        found.next().map(|(name, section)| format!("`{name}` in [{section}]"))
    };
    known_elsewhere(section, key)
        .map(|name| format!("`{name}`"))
        .or_else(|| elsewhere(key))
        .or_else(other_name)
        .or_else(|| nearest(key, here).map(|name| format!("`{name}`")))
        .or_else(|| nearest(key, all).and_then(elsewhere))
}

/// Returns the advice for an unknown key.
pub(super) fn advice_for_key(section: &str, key: &str) -> String {
    suggestion(section, key).map_or_else(
        || {
            let keys = keys_of(section).unwrap_or_default().iter();
            let names: Vec<String> = keys.map(|key| format!("`{}`", key.name)).collect();
            format!("the keys of [{section}] are {}", names.join(", "))
        },
        |meant| format!("did you mean {meant}?"),
    )
}

/// Returns the advice for an unknown section.
pub(super) fn advice_for_section(section: &str) -> String {
    let meant = known_elsewhere(SECTION_NAMES, section);
    match meant.or_else(|| nearest(section, SECTIONS.iter().map(|known| known.name))) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("the sections are {}", section_names()),
    }
}

/// Returns the names of all sections.
pub(super) fn section_names() -> String {
    SECTIONS.iter().map(|section| format!("[{}]", section.name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_has_a_meaning() {
        for section in sections() {
            for key in &section.keys {
                let traits =
                    key.marks.iter().filter(|mark| ["kept", "local", "timed"].contains(mark)).count();
                let ranges = usize::from(key.range().is_some()) + usize::from(key.bound().is_some());
                assert_eq!(
                    key.marks.len(),
                    traits + ranges,
                    "{}.{}: {:?}",
                    section.name,
                    key.name,
                    key.marks
                );
            }
        }
        let marks = template().lines().filter(|line| line.contains("# <")).count();
        assert_eq!(marks, 0);
    }

    fn check(section: &str, key: &str, expected: Option<&str>) {
        assert_eq!(suggestion(section, key).as_deref(), expected);
    }

    #[test]
    fn misspelt_keys() {
        check("pipeline", "rnaks", Some("`ranks`"));
        check("pipeline", "Microbatches", Some("`microbatches`"));
        check("pipeline", "micro_batches", Some("`microbatches`"));
        check("run", "deadline_second", Some("`deadline_seconds`"));
        check("pipeline", "seq_len", Some("`seq_len` in [data]"));
        check("pipeline", "seqlen", Some("`seq_len` in [data]"));
        check("pipeline", "colour", None);
        check("pipeline", "", None);
    }

    #[test]
    fn misspelt_sections() {
        assert_eq!(advice_for_section("pipelines"), "did you mean `pipeline`?");
        assert!(advice_for_section("colours").starts_with("the sections are [model], "));
    }

    #[test]
    fn other_names_are_names_of_keys() {
        for (section, entry) in &OTHERS.entries {
            let mut seen = std::collections::BTreeSet::new();
            for (key, names) in &entry.value.as_table().expect("a table of keys").entries {
                let is_known = match section.as_str() {
                    SECTION_NAMES => keys_of(key).is_some(),
                    section => {
                        find(section, key).is_some() || pipewright_models::ModelConfig::is_known_key(key)
                    }
                };
                assert!(is_known, "{section}.{key}");
                for name in names.value.as_list().expect("a list of names") {
                    let name = name.as_text().expect("a name");
                    assert!(find(section, name).is_none(), "{section}.{name} is a key");
                    assert!(seen.insert(name), "{section}.{name} is there twice");
                }
            }
        }
    }

    #[test]
    fn keys_of_other_systems_are_suggested() {
        let check = |section: &str, key: &str, expected: &str| {
            assert_eq!(advice_for_key(section, key), format!("did you mean {expected}?"), "{section}.{key}");
        };
        check("pipeline", "rank", "`ranks`");
        check("pipeline", "stages", "`stages_per_rank`");
        check("model", "layers", "`num_hidden_layers`");
        check("optimizer", "lr", "`learning_rate`");
        check("run", "lr", "`learning_rate` in [optimizer]");
        check("data", "batch_size", "`microbatch_size` in [pipeline]");
        check("run", "pipeline_parallel_degree", "`ranks` in [pipeline]");
        check("adapter", "r", "`rank`");
        // A key of ours in another section, and a slip of the pen.
        check("run", "seq_len", "`seq_len` in [data]");
        check("pipeline", "microbatchs", "`microbatches`");
        assert_eq!(advice_for_section("training"), "did you mean `run`?");
        assert_eq!(advice_for_section("pipline"), "did you mean `pipeline`?");
    }
}
