//! Options as a command line or a script has them: `--key value ..`, `--key=value`, and flags.
//!
//! Words are separated by blanks and ends of lines. Quotes group a word, `#` begins a comment, and a `\` at
//! the end of a line continues it, so that parts of scripts can be read as they are. A quote that its line
//! does not close encloses several lines of options, and separates words as a blank does.

use crate::emit::read_error::ReadError;
use crate::plan::System;

/// The most letters, of a hundred, in which a key differs from a known one and is a mistake, not another option.
const DIFFERENT: usize = 15;

/// One option with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenOption {
    /// The key without dashes before it, and with `-` for `_`.
    pub(super) key: String,
    pub(super) values: Vec<String>,
    /// The line of the key, counted from 1.
    pub(super) line: usize,
}

impl GivenOption {
    /// Returns whether a word on `line` is a value. The words of a script after the values are not, such as
    /// the end of an array, the start of the next one, or a variable on a line of its own.
    fn takes(&self, word: &str, line: usize) -> bool {
        let may_be = line == self.line || self.values.is_empty() || self.key == MODULES;
        may_be && word != ")" && !word.ends_with("=(")
    }
}

/// The options of a text, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) list: Vec<GivenOption>,
}

/// The prefix of torchtitan's choices of activation checkpointing, which have no dashes.
pub(super) const CHECKPOINTING: &str = "activation-checkpoint:";

/// torchtitan's list of the modules of each stage, the only option whose values may be on several lines.
pub(super) const MODULES: &str = "parallelism.module-fqns-per-model-part";

impl Options {
    /// Reads all options of a text. Skips words that are not values, such as those before the first option.
    pub(super) fn parse(text: &str) -> Self {
        let mut list: Vec<GivenOption> = Vec::new();
        for (line, word) in words(text) {
            let normal = word.replace('_', "-");
            if normal.starts_with(CHECKPOINTING) {
                list.push(GivenOption { key: normal, values: Vec::new(), line });
            } else if let Some(option) = word.strip_prefix("--").filter(|option| !option.is_empty()) {
                let (key, value) = match option.split_once('=') {
                    Some((key, value)) => (key, Some(value.to_owned())),
                    None => (option, None),
                };
                list.push(GivenOption {
                    key: key.replace('_', "-"),
                    values: value.into_iter().collect(),
                    line,
                });
            } else if let Some(last) = list.last_mut().filter(|last| last.takes(&word, line)) {
                last.values.push(word);
            }
        }
        Self { list }
    }

    /// Returns the last option with this key, which counts.
    pub(super) fn find(&self, key: &str) -> Option<&GivenOption> {
        self.list.iter().rev().find(|entry| entry.key == key)
    }

    /// Returns whether a flag is given.
    pub(super) fn has(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// Returns the only value of an option.
    pub(super) fn word(&self, key: &str) -> Result<Option<(&str, usize)>, ReadError> {
        let Some(entry) = self.find(key) else { return Ok(None) };
        match entry.values.as_slice() {
            [value] => Ok(Some((value, entry.line))),
            values => Err(wrong(key, &values.join(" "), "one value").at(entry.line)),
        }
    }

    /// Returns the value of an option that is a number of at least `least`.
    pub(super) fn number(&self, key: &str, least: u32) -> Result<Option<u32>, ReadError> {
        let Some((value, line)) = self.word(key)? else { return Ok(None) };
        let number = value.parse().ok().filter(|&number| number >= least && number <= MOST);
        let expected = format!("a whole number from {least} to {MOST}");
        number.map(Some).ok_or_else(|| wrong(key, value, &expected).at(line))
    }

    /// Checks that no key is nearly one of `known`, or begins with one of `strict` and is not known.
    pub(super) fn check(&self, system: System, known: &[&str], strict: &str) -> Result<(), ReadError> {
        for entry in self.list.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            let near = nearest(&entry.key, known);
            if near.is_some() || (!strict.is_empty() && entry.key.starts_with(strict)) {
                let near = near.map(with_dashes);
                let error = ReadError::unknown_key(system, &with_dashes(&entry.key), near.as_deref());
                return Err(error.at(entry.line));
            }
        }
        Ok(())
    }
}

/// The largest number that is read. Products of several fit 64 bits, and a schedule of this size is refused
/// before it is made.
const MOST: u32 = 1_000_000;

/// Returns the error for a value.
pub(super) fn wrong(key: &str, value: &str, expected: &str) -> ReadError {
    ReadError::value(&with_dashes(key), value, expected)
}

/// Returns an option as it is written.
pub(super) fn with_dashes(key: &str) -> String {
    let dashes = if key.starts_with(CHECKPOINTING) { "" } else { "--" };
    format!("{dashes}{key}")
}

/// Returns the known key that is similar to another key.
pub(super) fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    crate::words::nearest(key, known.iter().copied(), |letters| letters * DIFFERENT / 100)
}

/// Returns the words of a text with their lines.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let mut word: Option<String> = None;
        let mut quote: Option<char> = None;
        for (at, letter) in content.char_indices() {
            match quote {
                Some(end) if letter == end => quote = None,
                Some(_) => word.get_or_insert_default().push(letter),
                None if (letter == '"' || letter == '\'') && content[at + 1..].contains(letter) => {
                    word.get_or_insert_default();
                    quote = Some(letter);
                }
                None if letter == '#' && word.is_none() => break,
                None if letter.is_whitespace() || ['\\', '"', '\''].contains(&letter) => {
                    words.extend(word.take().map(|word| (line, word)));
                }
                None => word.get_or_insert_default().push(letter),
            }
        }
        words.extend(word.map(|word| (line, word)));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(&str, &[&str], usize)]) {
        let found = Options::parse(text);
        let found: Vec<(&str, Vec<&str>, usize)> = found
            .list
            .iter()
            .map(|entry| (entry.key.as_str(), entry.values.iter().map(String::as_str).collect(), entry.line))
            .collect();
        let expected: Vec<_> =
            expected.iter().map(|(key, values, line)| (*key, values.to_vec(), *line)).collect();
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn options_are_read_from_scripts() {
        check("--a 1 --b=2\n--c", &[("a", &["1"], 1), ("b", &["2"], 1), ("c", &[], 2)]);
        check("torchrun x.py \\\n  --a_b \"E t|L\" \\\n # --c 4\n", &[("a-b", &["E t|L"], 2)]);
        check("--a x y 'z w'", &[("a", &["x", "y", "z w"], 1)]);
        check(
            "--a 1 activation_checkpoint:full",
            &[("a", &["1"], 1), ("activation-checkpoint:full", &[], 1)],
        );
        check("--", &[]);
    }

    #[test]
    fn words_of_a_script_are_no_values() {
        check("A=(\n  --a 1\n)\nB_ARGS=(\n  --b\n)\n", &[("a", &["1"], 2), ("b", &[], 5)]);
        check("run --a 1 \\\n  ${ARGS[@]} \\\n  \"${B[@]}\"\n", &[("a", &["1"], 1)]);
        check("A=\"--a 1 \\\n  --b \\\n  2\n\"\npython x.py $A", &[("a", &["1"], 1), ("b", &["2"], 2)]);
        let modules = format!("--{MODULES} x\n y\n z\n)");
        check(&modules, &[(MODULES, &["x", "y", "z"], 1)]);
    }

    #[test]
    fn numbers_are_whole_and_alone() {
        let number = |text| Options::parse(text).number("a", 1);
        assert_eq!(number("--a 3"), Ok(Some(3)));
        assert_eq!(number("--a 3 --a 4"), Ok(Some(4)));
        assert_eq!(number("--b 3"), Ok(None));
        for text in ["--a 0", "--a x", "--a", "--a 1 2", "--a 4294967295"] {
            assert!(number(text).is_err(), "{text}");
        }
    }

    #[test]
    fn keys_that_are_nearly_known_are_mistakes() {
        let check =
            |text, strict| Options::parse(text).check(System::Megatron, &["global-batch-size"], strict);
        assert_eq!(check("--hidden-size 4", ""), Ok(()));
        let error = check("--hidden-size 4\n--global-batchsize 3", "").expect_err("a typo").to_string();
        assert_eq!(
            error,
            "line 2: Megatron has no key `--global-batchsize`; did you mean `--global-batch-size`?"
        );
        assert!(check("--hidden-size 4", "hidden").is_err());
    }
}
