//! Options as a command line or a script has them: `--key value ..`, `--key=value`, and flags. Entries of a document
//! have the same form.

use std::collections::HashMap;

use crate::emit::read_error::ReadError;
use crate::emit::shell::{Command, Doubt, commands};
use crate::plan::System;

/// The most letters, of a hundred, in which a key differs from a known one and is a mistake, not another option.
const DIFFERENT: usize = 15;

/// The most options of a file.
const MOST_OPTIONS: usize = 10_000;

/// One option with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenOption {
    /// The key without dashes before it, and with `-` for `_`.
    pub key: String,
    /// The key as it is written.
    pub name: String,
    /// The values as texts.
    pub values: Vec<String>,
    /// The line of the key, counted from 1.
    pub line: usize,
    /// Why a value is not known; `None` if all are.
    pub unknown: Option<String>,
}

impl GivenOption {
    /// Makes an option from its name and its values.
    pub fn new(name: &str, values: Vec<String>, line: usize) -> Self {
        let key = name.trim_start_matches('-').replace('_', "-");
        Self { key, name: name.to_owned(), values, line, unknown: None }
    }

    /// Returns whether its value is one with which a document turns a flag off.
    pub fn is_off(&self) -> bool {
        const OFF: [&str; 8] = ["false", "none", "null", "~", "0", "0.0", "no", "off"];
        matches!(self.values.as_slice(), [value] if OFF.contains(&value.to_lowercase().as_str()))
    }
}

/// The options of a text, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The options. If a key is given twice, the last one counts.
    pub list: Vec<GivenOption>,
    /// Sentences about what the options depend on.
    pub notes: Vec<String>,
}

/// The prefix of torchtitan's choices of activation checkpointing, which have no dashes.
pub const CHECKPOINTING: &str = "activation-checkpoint:";

/// torchtitan's list of the modules of each stage, the only option whose values may be on several lines.
pub(super) const MODULES: &str = "parallelism.module-fqns-per-model-part";

impl Options {
    /// Reads the options of the command that trains: the one with an option for which `is_own` is true. Without such a
    /// command, the options of all commands count. Skips words that are not values, such as those before the first option.
    ///
    /// # Errors
    /// When the script is too long to be read.
    pub(super) fn parse(text: &str, is_own: impl Fn(&str) -> bool) -> Result<Self, ReadError> {
        let mut is_open = false;
        let mut all: Vec<GivenCommand> = Vec::new();
        let mut unread: Vec<String> = Vec::new();
        for command in commands(text)? {
            let before = unread.len();
            unread.extend(command.unread_settings());
            let first = command.words.first().map_or("", |word| word.text.as_str());
            let is_plain = command.is_plain || is_checkpointing(first);
            let last = all.last_mut().filter(|_| is_open);
            let has_option =
                command.words.iter().any(|word| word.is_option() || is_checkpointing(&word.text));
            match last {
                // The lines of a file of options are one command.
                Some(last) if is_plain || !has_option && last.ends_in_modules() => last.add(command),
                _ => all.push(GivenCommand::of(command, before)),
            }
            is_open = is_plain || (is_open && !has_option);
        }
        let is_training = |command: &GivenCommand| command.options.iter().any(|option| is_own(&option.key));
        if all.iter().any(is_training) {
            all.retain(is_training);
            doubt_differences(&mut all);
        }
        unread.truncate(all.iter().map(|command| command.unread).max().unwrap_or(0));
        let own = all.iter_mut().flat_map(|command| std::mem::take(&mut command.notes));
        let mut notes: Vec<String> = unread.into_iter().chain(own).collect();
        notes.dedup();
        Ok(Self { list: all.into_iter().flat_map(|command| command.options).collect(), notes })
    }

    /// Returns the last option with this key, which counts.
    pub fn find(&self, key: &str) -> Option<&GivenOption> {
        self.list.iter().rev().find(|entry| entry.key == key)
    }

    /// Returns whether a flag is given, and not with the value of a document that turns it off.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_some_and(|entry| !entry.is_off())
    }

    /// Returns the last option with this key.
    ///
    /// # Errors
    /// When its values are not known.
    pub fn known(&self, key: &str) -> Result<Option<&GivenOption>, ReadError> {
        let entry = self.find(key);
        match entry.and_then(|entry| Some((entry, entry.unknown.as_ref()?))) {
            Some((entry, reason)) => {
                let what = format!("`{}` is not known: {reason}; write its value", entry.name);
                Err(ReadError::new(what).at(entry.line))
            }
            None => Ok(entry),
        }
    }

    /// Returns a sentence about each flag that counts although it depends on something that is not read. `is_read` says
    /// which keys are read. A flag that certainly has the same meaning without its doubtful entry has no sentence.
    pub fn doubtful_flags(&self, is_read: impl Fn(&str) -> bool) -> Vec<String> {
        let mut last: HashMap<&str, usize> = HashMap::new();
        // Whether a flag is on by the entries that certainly count.
        let mut is_on: HashMap<&str, bool> = HashMap::new();
        for (index, entry) in self.list.iter().enumerate() {
            last.insert(&entry.key, index);
            if entry.unknown.is_none() {
                is_on.insert(&entry.key, !entry.is_off());
            }
        }
        let counts = |&(index, entry): &(usize, &GivenOption)| {
            let certain = is_on.get(entry.key.as_str()).copied().unwrap_or(false);
            last[entry.key.as_str()] == index && certain == entry.is_off() && is_read(&entry.key)
        };
        let sentence = |(_, entry): (usize, &GivenOption)| {
            let reason = entry.unknown.as_ref()?;
            Some(format!("`{}` of line {} counts, although {reason}", entry.name, entry.line))
        };
        self.list.iter().enumerate().filter(counts).filter_map(sentence).collect()
    }

    /// Returns the only value of an option.
    ///
    /// # Errors
    /// When the option has no value or several, or its value is not known.
    pub fn word(&self, key: &str) -> Result<Option<(&str, usize)>, ReadError> {
        let Some(entry) = self.known(key)? else { return Ok(None) };
        match entry.values.as_slice() {
            [value] => Ok(Some((value, entry.line))),
            values => Err(self.wrong(key, &values.join(" "), "one value")),
        }
    }

    /// Returns the value of an option that is a number of at least `least`.
    ///
    /// # Errors
    /// When it is not such a number, or not known.
    pub fn number(&self, key: &str, least: u32) -> Result<Option<u32>, ReadError> {
        let Some((value, _)) = self.word(key)? else { return Ok(None) };
        let number = value.parse().ok().filter(|&number| number >= least && number <= MOST);
        let expected = format!("a whole number from {least} to {MOST}");
        number.map(Some).ok_or_else(|| self.wrong(key, value, &expected))
    }

    /// Returns the mistake of a value, at the line of the option.
    pub fn wrong(&self, key: &str, value: &str, expected: &str) -> ReadError {
        match self.find(key) {
            Some(entry) => ReadError::value(&entry.name, value, expected).at(entry.line),
            None => ReadError::value(&with_dashes(key), value, expected),
        }
    }

    /// Checks that no key is nearly one of `known`, or begins with one of `strict` and is not known.
    ///
    /// # Errors
    /// When there is such a key, with the known one, or there are too many options.
    pub fn check(&self, system: System, known: &[&str], strict: &str) -> Result<(), ReadError> {
        self.check_by(system, known, |key| known.contains(&key))?;
        let unknown = self.list.iter().find(|entry| {
            !strict.is_empty() && entry.key.starts_with(strict) && !known.contains(&entry.key.as_str())
        });
        match unknown {
            Some(entry) => Err(ReadError::unknown_key(system, &entry.name, None).at(entry.line)),
            None => Ok(()),
        }
    }

    /// Checks that no key is nearly one of `names`, except for keys for which `is_known` is true.
    ///
    /// # Errors
    /// When there is such a key, with the name, or there are too many options.
    pub fn check_by(
        &self,
        system: System,
        names: &[&str],
        is_known: impl Fn(&str) -> bool,
    ) -> Result<(), ReadError> {
        if self.list.len() > MOST_OPTIONS {
            let what =
                format!("the file has {} options, and at most {MOST_OPTIONS} are read", self.list.len());
            return Err(ReadError::new(what + "; leave out the ones that do not change the layout"));
        }
        for entry in self.list.iter().filter(|entry| !is_known(&entry.key)) {
            if let Some(near) = nearest(&entry.key, names).map(with_dashes) {
                return Err(ReadError::unknown_key(system, &entry.name, Some(&near)).at(entry.line));
            }
        }
        Ok(())
    }
}

/// The options of a command.
#[derive(Debug)]
struct GivenCommand {
    line: usize,
    /// The number of commands before it that may set variables and are not read.
    unread: usize,
    options: Vec<GivenOption>,
    notes: Vec<String>,
}

impl GivenCommand {
    fn of(command: Command, unread: usize) -> Self {
        let line = command.line;
        let note = command.depends_on.map(|condition| {
            format!(
                "the command of line {line} depends on a condition or a loop of line {condition}, which is not run; it counts"
            )
        });
        let mut given = Self { line, unread, options: Vec::new(), notes: note.into_iter().collect() };
        given.add(command);
        given
    }

    /// Returns whether the next line may have further values of the last option.
    fn ends_in_modules(&self) -> bool {
        self.options.last().is_some_and(|last| last.key == MODULES)
    }

    fn add(&mut self, command: Command) {
        for word in command.words {
            let reason = word.doubt.reason().map(str::to_owned);
            if word.is_option() || is_checkpointing(&word.text) {
                let (name, value) = match word.text.split_once('=') {
                    Some((name, value)) => (name, Some(value.to_owned())),
                    None => (word.text.as_str(), None),
                };
                let option = GivenOption::new(name, value.into_iter().collect(), word.line);
                self.options.push(GivenOption { unknown: reason, ..option });
                continue;
            }
            let is_absent = matches!(word.doubt, Doubt::Absent(_));
            let last = self.options.last_mut();
            // A variable without a value adds no word, and the name of a program is not a value.
            let is_left_out = |last: &GivenOption| {
                is_absent || !last.values.is_empty() && (word.text.is_empty() || word.text.ends_with(".py"))
            };
            match last.filter(|last| !is_left_out(last)) {
                Some(last) => {
                    last.unknown = last.unknown.take().or(reason);
                    last.values.push(word.text);
                }
                None if word.text.is_empty() => {
                    self.notes.extend(reason.map(|reason| format!("{reason}; it counts as empty")));
                }
                None => {}
            }
        }
    }
}

/// Returns whether a word is torchtitan's choice of activation checkpointing.
fn is_checkpointing(word: &str) -> bool {
    word.starts_with(CHECKPOINTING) || word.replace('_', "-").starts_with(CHECKPOINTING)
}

/// Marks the options in which commands differ that may all train.
fn doubt_differences(commands: &mut [GivenCommand]) {
    let [first, second, ..] = &*commands else { return };
    let reason = format!("the commands of lines {} and {} differ in it", first.line, second.line);
    // The values of an option, and the number of commands that have them.
    let mut values: HashMap<String, (Vec<String>, usize)> = HashMap::new();
    for command in &*commands {
        let own: HashMap<&str, &GivenOption> =
            command.options.iter().map(|option| (option.key.as_str(), option)).collect();
        for (key, option) in own {
            let known = values.entry(key.to_owned()).or_insert_with(|| (option.values.clone(), 0));
            known.1 += usize::from(known.0 == option.values);
        }
    }
    let count = commands.len();
    for option in commands.iter_mut().flat_map(|command| &mut command.options) {
        if values.get(&option.key).is_some_and(|(_, same)| *same < count) {
            option.unknown.get_or_insert_with(|| reason.clone());
        }
    }
}

/// The largest number that is read. Products of several fit 64 bits, and a schedule of this size is refused
/// before it is made.
const MOST: u32 = 1_000_000;

/// Returns a key as a command line has it.
pub(super) fn with_dashes(key: &str) -> String {
    let dashes = if key.starts_with(CHECKPOINTING) { "" } else { "--" };
    format!("{dashes}{key}")
}

/// Returns the known key that is similar to another key.
pub(super) fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    crate::words::nearest(key, known.iter().copied(), |letters| letters * DIFFERENT / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(&str, &[&str], usize)]) {
        let found = Options::parse(text, |_| true).expect("options");
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
        check("A=\"--a 1 \\\n  --b \\\n  2\n\"\npython x.py $A", &[("a", &["1"], 1), ("b", &["2"], 1)]);
        let modules = format!("--{MODULES} x\n y\n z\n)");
        check(&modules, &[(MODULES, &["x", "y", "z"], 1)]);
    }

    /// Checks the options, with `!` behind the ones that are not known, and the notes.
    fn check_own(text: &str, expected: &str, notes: &[&str]) {
        let options = Options::parse(text, |key| key == "a").expect("options");
        let shown = options.list.iter().map(|option| {
            let doubt = if option.unknown.is_some() { "!" } else { "" };
            [std::slice::from_ref(&option.key), option.values.as_slice()].concat().join(" ") + doubt
        });
        assert_eq!(shown.collect::<Vec<_>>().join(", "), expected, "{text}");
        assert_eq!(options.notes, notes, "{text}");
    }

    #[test]
    fn only_the_command_that_trains_counts() {
        check_own("make --b 1\nrun --a 1 --c\nplot --d 2 | tee --e", "a 1, c", &[]);
        check_own("echo run --a 2\ncat <<X\n--a 3\nX\nrun --a 1", "a 1", &[]);
        check_own("make --b 1\nplot --c", "b 1, c", &[]);
        check_own("--a 1\n--c\n", "a 1, c", &[]);
        check_own("X=(--a 1)\nY=(--c)\necho --a 2", "a 1, c", &[]);
        let modules = format!("run --a 1 --{MODULES} x y\nplot z\n");
        check_own(&modules, &format!("a 1, {MODULES} x y"), &[]);
    }

    #[test]
    fn commands_that_differ_are_not_known() {
        check_own("run --a 1 --b 2 --c\nrun --a 1 --b 3", "a 1, b 2!, c!, a 1, b 3!", &[]);
        check_own("run --a 1\nrun --a 1", "a 1, a 1", &[]);
        let options = Options::parse("run --a 1 --b\nrun --a 2", |key| key == "a").expect("options");
        let error = options.number("a", 1).expect_err("two values").to_string();
        assert_eq!(
            error,
            "line 2: `--a` is not known: the commands of lines 1 and 2 differ in it; write its value"
        );
        assert_eq!(
            options.doubtful_flags(|key| key == "b"),
            ["`--b` of line 1 counts, although the commands of lines 1 and 2 differ in it"]
        );
    }

    #[test]
    fn a_doubtful_flag_has_a_sentence_if_it_matters() {
        let check = |arguments: &str, lines: &[usize]| {
            let script = format!("if x; then\nX=--b\nY='--b false'\nfi\nrun --a 1 {arguments}");
            let options = Options::parse(&script, |key| key == "a").expect("options");
            let expected: Vec<String> = lines
                .iter()
                .map(|line| {
                    let name = if *line == 2 { "X" } else { "Y" };
                    format!("`--b` of line {line} counts, although `{name}` depends on a condition or a loop of line 1, which is not run")
                })
                .collect();
            assert_eq!(options.doubtful_flags(|key| key == "b"), expected, "{arguments}");
        };
        check("$X", &[2]);
        check("$X $X", &[2]);
        check("$X --b", &[]);
        check("--b $X", &[]);
        check("$X --b false", &[]);
        check("--b $Y", &[3]);
        check("--b false $Y", &[]);
        check("--b false $X", &[2]);
        check("$Y", &[]);
        check("$X --c", &[2]);
    }

    #[test]
    fn a_file_that_is_not_read_has_a_note() {
        let note = |command: &str, line: usize| {
            format!(
                "`{command}` of line {line} is not read; if it sets a variable of the command, write the value into the script"
            )
        };
        let check = |script: &str, notes: &[String]| {
            check_own(script, "a 1", &notes.iter().map(String::as_str).collect::<Vec<_>>());
        };
        check("source env.sh\nrun --a 1", &[note("source env.sh", 1)]);
        check("\n. ./env.sh\neval $(x)\nrun --a 1", &[note(". ./env.sh", 2), note("eval ?", 3)]);
        check("f() { source x; }\nf\nrun --a 1\n. y", &[note("source x", 1)]);
        check("f() { source x; }\nfalse && . y\n( echo source z )\nrun --a 1", &[]);
        check("eval \"run --a 1\"", &[]);
    }

    #[test]
    fn what_is_not_certain_is_said() {
        let depends =
            "the command of line 2 depends on a condition or a loop of line 1, which is not run; it counts";
        check_own("while x; do\n run --a 1\ndone", "a 1", &[depends]);
        check_own("run --a 1 $X", "a 1", &["`X` of line 1 has no value in the file; it counts as empty"]);
        check_own("O=(--a 1)\nif x; then O+=(--b); fi\nrun ${O[@]}", "a 1, b!", &[]);
        check_own("if x; then O+=(--b); fi\nrun --a 1 ${O[@]}", "a 1, b!", &[]);
    }

    #[test]
    fn flags_may_be_off() {
        let options =
            |value| Options { list: vec![GivenOption::new("a", vec![value], 1)], ..Options::default() };
        for off in ["no", "Off", "false", "None", "0"] {
            assert!(!options(off.to_owned()).has("a"), "{off}");
        }
        for on in ["yes", "on", "true", "1"] {
            assert!(options(on.to_owned()).has("a"), "{on}");
        }
    }

    #[test]
    fn numbers_are_whole_and_alone() {
        let number = |text| Options::parse(text, |_| true).expect("options").number("a", 1);
        assert_eq!(number("--a 3"), Ok(Some(3)));
        assert_eq!(number("--a 3 --a 4"), Ok(Some(4)));
        assert_eq!(number("--b 3"), Ok(None));
        for text in ["--a 0", "--a x", "--a", "--a 1 2", "--a 4294967295"] {
            assert!(number(text).is_err(), "{text}");
        }
    }

    #[test]
    fn keys_that_are_nearly_known_are_mistakes() {
        let check = |text, strict| {
            Options::parse(text, |_| true).expect("options").check(
                System::Megatron,
                &["global-batch-size"],
                strict,
            )
        };
        assert_eq!(check("--hidden-size 4", ""), Ok(()));
        let error = check("--hidden-size 4\n--global-batchsize 3", "").expect_err("a typo").to_string();
        assert_eq!(
            error,
            "line 2: Megatron has no key `--global-batchsize`; did you mean `--global-batch-size`?"
        );
        assert!(check("--hidden-size 4", "hidden").is_err());
    }
}
