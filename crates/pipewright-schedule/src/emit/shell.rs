//! The words of a shell script's commands, as the shell would make them, without running anything.
//!
//! Variables, arrays, defaults (`${A:-8}`), sums (`$((2 * A))`), quotes, comments, continued lines and here-documents are
//! read as in Bash. Conditions that compare texts and numbers are decided. A value that needs a command, an argument of the
//! script or a loop is not known, and its word says why: only a reader that needs the value refuses it. Commands in
//! branches that cannot be decided count.

use std::collections::HashMap;

use crate::emit::arithmetic::evaluate;
use crate::emit::condition::{and, or, result_of};

/// The most letters of all expansions.
const MOST_EXPANDED: usize = 1 << 21;
/// The most defaults inside each other, as in `${A:-${B:-8}}`.
const MOST_DEPTH: usize = 16;
/// Commands whose arguments are assignments.
const DECLARES: [&str; 5] = ["export", "local", "declare", "readonly", "typeset"];
/// The letters that end a command, unless it is a line of options alone.
const SEPARATORS: [char; 6] = ['\n', ';', '&', '|', '(', ')'];

/// A word of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Word {
    pub(super) text: String,
    /// The line of its first letter, counted from 1.
    pub(super) line: usize,
    /// Why the text is not known; `None` if it is. It is empty if it is a variable that the file does not set.
    pub(super) unknown: Option<String>,
}

/// Returns the words of each command, in order. Without a command that has options, each array or text with options
/// counts as one: parts of scripts can be read as they are.
pub(super) fn commands(script: &str) -> Vec<Vec<Word>> {
    let mut shell = Shell::default();
    for (line, text) in (1..).zip(script.split('\n')) {
        shell.letters.extend(text.trim_end_matches('\r').chars().chain(['\n']).map(|letter| (letter, line)));
    }
    while shell.at < shell.letters.len() {
        shell.command();
    }
    if shell.commands.iter().flatten().any(Word::is_option) {
        return shell.commands;
    }
    let lists = shell.order.iter().filter_map(|name| shell.variables.get(name));
    let lists = lists.map(|list| list.iter().flat_map(Word::split).collect::<Vec<_>>());
    lists.filter(|words| words.iter().any(Word::is_option)).collect()
}

impl Word {
    fn new(text: impl Into<String>, line: usize) -> Self {
        Self { text: text.into(), line, unknown: None }
    }

    fn unknown(line: usize, reason: String) -> Self {
        Self { text: "?".to_owned(), line, unknown: Some(reason) }
    }

    fn is_unset(&self) -> bool {
        self.text.is_empty() && self.unknown.is_some()
    }

    pub(super) fn is_option(&self) -> bool {
        self.text.len() > 2 && self.text.starts_with("--")
    }

    fn append(&mut self, other: Self) {
        self.line = if self.text.is_empty() { other.line } else { self.line };
        self.text.push_str(&other.text);
        self.unknown = self.unknown.take().or(other.unknown);
    }

    fn parts(&self) -> impl Iterator<Item = Self> {
        self.text.split_whitespace().map(|part| Self { text: part.to_owned(), ..self.clone() })
    }

    /// Returns the words of a text that has options, as `sh -c` and `eval` get; another text is one word.
    fn split(&self) -> Vec<Self> {
        let parts: Vec<Self> = self.parts().collect();
        if parts.iter().any(Self::is_option) { parts } else { vec![self.clone()] }
    }
}

/// A branch of an `if`, or a loop. `None` is a condition that is not decided.
#[derive(Debug, Clone, Copy)]
struct Branch {
    line: usize,
    /// Whether an earlier branch is taken.
    before: Option<bool>,
    /// Whether this branch is taken.
    taken: Option<bool>,
}

#[derive(Default)]
struct Shell {
    /// The letters with their lines.
    letters: Vec<(char, usize)>,
    at: usize,
    variables: HashMap<String, Vec<Word>>,
    /// The names of variables in the order of their first values.
    order: Vec<String>,
    commands: Vec<Vec<Word>>,
    branches: Vec<Branch>,
    /// The result of the last list of commands.
    status: Option<bool>,
    /// The connection to the command before: `&` for `&&`, `|` for `||`, or none.
    link: Option<char>,
    /// The words that end here-documents of this line.
    documents: Vec<String>,
    /// The letters of all expansions.
    expanded: usize,
    /// The number of defaults around this text.
    depth: usize,
    /// Whether this line has options alone, as in a file of arguments, in which separators are letters.
    is_plain: bool,
}

impl Shell {
    fn peek(&self) -> Option<char> {
        self.letters.get(self.at).map(|(letter, _)| *letter)
    }

    fn starts_with(&self, text: &str) -> bool {
        self.letters.iter().skip(self.at).map(|(letter, _)| *letter).take(text.len()).eq(text.chars())
    }

    /// Takes the letters before one for which `ends` is true.
    fn take_until(&mut self, ends: impl Fn(char) -> bool) -> String {
        let rest = self.letters.iter().skip(self.at).map(|(letter, _)| *letter);
        let taken: String = rest.take_while(|letter| !ends(*letter)).collect();
        self.at += taken.chars().count();
        taken
    }

    fn ends_command(&self, letter: char) -> bool {
        letter == '\n' || (!self.is_plain && SEPARATORS.contains(&letter))
    }

    fn take_name(&mut self) -> String {
        self.take_until(|letter| !(letter.is_ascii_alphanumeric() || letter == '_'))
    }

    /// Takes the text between two brackets.
    fn take_enclosed(&mut self, open: char, close: char) -> String {
        let (mut text, mut depth) = (String::new(), 0);
        while let Some(letter) = self.peek() {
            self.at += 1;
            depth += i32::from(letter == open) - i32::from(letter == close);
            if depth == 0 {
                break;
            }
            text.push(letter);
        }
        text.split_off(text.len().min(1))
    }

    /// Skips blanks, continued lines and comments. `lines` are blanks in an array.
    fn skip_blanks(&mut self, lines: bool) {
        while let Some(letter) = self.peek() {
            match letter {
                '\n' if !lines => return,
                '\\' if self.starts_with("\\\n") => self.at += 2,
                '#' => drop(self.take_until(|letter| letter == '\n')),
                letter if letter.is_whitespace() => self.at += 1,
                _ => return,
            }
        }
    }

    /// Reads one command, a word of the language, or a separator.
    fn command(&mut self) {
        self.skip_blanks(false);
        let Some(letter) = self.peek() else { return };
        if self.ends_command(letter) {
            self.is_plain = false;
            self.at += 1;
            let is_double = ['&', '|'].contains(&letter) && self.peek() == Some(letter);
            self.at += usize::from(is_double);
            self.link = is_double.then_some(letter);
            if letter == '\n' {
                self.skip_documents();
            }
            return;
        }
        if self.keyword() {
            return;
        }
        let linked = match self.link {
            Some('&') => self.status,
            Some(_) => self.status.map(|status| !status),
            None => Some(true),
        };
        let active = self.branches.iter().fold(linked, |active, branch| and(active, branch.taken));
        self.is_plain = self.starts_with("--");
        let mut words: Vec<Word> = Vec::new();
        while let Some(letter) = self.peek().filter(|letter| !self.ends_command(*letter)) {
            let may_assign = words.is_empty() || DECLARES.contains(&words[0].text.as_str());
            if letter == '<' || letter == '>' {
                self.redirection(&mut words);
            } else if !(may_assign && self.assignment(active)) {
                words.extend(self.word());
            }
            self.skip_blanks(false);
        }
        let words: Vec<Word> = words.iter().flat_map(Word::split).collect();
        let result = if words.is_empty() { Some(true) } else { test(&words) };
        if active != Some(false) {
            self.commands.push(words);
        }
        self.status = match self.link {
            Some('&') => and(self.status, result),
            Some(_) => or(self.status, result),
            None => result,
        };
    }

    /// Reads a word of the language, if there is one.
    fn keyword(&mut self) -> bool {
        let (start, line) = (self.at, self.letters[self.at].1);
        let word = self.take_until(|letter| letter.is_whitespace() || letter == ';');
        match (word.as_str(), self.branches.last_mut()) {
            ("if", _) => self.branches.push(Branch { line, before: Some(false), taken: Some(true) }),
            ("for" | "while" | "until" | "case" | "select", _) => {
                self.branches.push(Branch { line, before: None, taken: None });
            }
            ("then", Some(branch)) => branch.taken = and(branch.before.map(|before| !before), self.status),
            ("elif", Some(branch)) => {
                *branch = Branch { line, before: or(branch.before, branch.taken), taken: Some(true) };
            }
            ("else", Some(branch)) => {
                branch.before = or(branch.before, branch.taken);
                branch.taken = branch.before.map(|before| !before);
            }
            ("fi" | "done" | "esac", Some(_)) => drop(self.branches.pop()),
            ("do" | "{" | "}", _) => {}
            _ => {
                self.at = start;
                return false;
            }
        }
        self.link = None;
        true
    }

    /// Reads `A=..`, `A+=..` or `A=( .. )`, if there is one, and sets the variable unless it is certain that the command
    /// does not run.
    fn assignment(&mut self, active: Option<bool>) -> bool {
        let start = self.at;
        let name = self.take_name();
        let adds = self.starts_with("+=");
        let is_name = name.starts_with(|letter: char| !letter.is_ascii_digit());
        if !is_name || !(adds || self.starts_with("=")) {
            self.at = start;
            return false;
        }
        self.at += 1 + usize::from(adds);
        let is_array = self.peek() == Some('(');
        let mut value = Vec::new();
        if is_array {
            self.at += 1;
            self.skip_blanks(true);
            while self.peek().is_some_and(|letter| letter != ')') {
                value.extend(self.word_or_letter());
                self.skip_blanks(true);
            }
            self.at += 1;
        } else {
            let words = self.word().into_iter();
            value.push(words.reduce(join).unwrap_or_default());
        }
        if active.is_none() {
            let line = self.branches.iter().find(|branch| branch.taken.is_none()).map(|branch| branch.line);
            let place = line.map_or_else(String::new, |line| format!(" of line {line}"));
            let reason = format!("`{name}` depends on a condition or a loop{place}, which is not run");
            value.iter_mut().for_each(|word| word.unknown = Some(reason.clone()));
        }
        if active == Some(false) {
            return true;
        }
        if !self.order.contains(&name) {
            self.order.push(name.clone());
        }
        let known = self.variables.entry(name).or_default();
        match known.first_mut() {
            _ if adds && is_array => known.extend(value),
            Some(first) if adds => value.into_iter().for_each(|word| first.append(word)),
            _ => *known = value,
        }
        true
    }

    /// Reads a word, or skips a letter that begins none.
    fn word_or_letter(&mut self) -> Vec<Word> {
        let start = self.at;
        let words = self.word();
        self.at += usize::from(self.at == start);
        words
    }

    /// Reads a word, which expansions may make several or none.
    fn word(&mut self) -> Vec<Word> {
        let mut words: Vec<Word> = Vec::new();
        let mut current: Option<Word> = None;
        while let Some(&(letter, line)) = self.letters.get(self.at) {
            match letter {
                '\\' => {
                    let next = self.letters.get(self.at + 1).filter(|(next, _)| *next != '\n');
                    let Some(&(next, _)) = next else { break };
                    current.get_or_insert_default().append(Word::new(next, line));
                    self.at += 2;
                }
                '\'' => {
                    self.at += 1;
                    let text = self.take_until(|letter| letter == '\'');
                    current.get_or_insert_default().append(Word::new(text, line));
                    self.at += 1;
                }
                '"' => self.quoted(&mut words, &mut current),
                '$' | '`' => {
                    for (index, word) in self.expansion().into_iter().enumerate() {
                        // Blanks in a value separate words.
                        if index > 0 || word.text.starts_with(char::is_whitespace) {
                            words.extend(current.take());
                        }
                        let parts = if word.is_unset() { vec![word] } else { word.parts().collect() };
                        for (index, part) in parts.into_iter().enumerate() {
                            if index > 0 {
                                words.extend(current.take());
                            }
                            current.get_or_insert_default().append(part);
                        }
                    }
                }
                '<' | '>' => break,
                letter if letter.is_whitespace() || self.ends_command(letter) => break,
                letter => {
                    current.get_or_insert_default().append(Word::new(letter, line));
                    self.at += 1;
                }
            }
        }
        words.extend(current);
        words
    }

    /// Reads a text in double quotes. The elements of an array are words of their own.
    fn quoted(&mut self, words: &mut Vec<Word>, current: &mut Option<Word>) {
        self.at += 1;
        let is_array_alone = self.starts_with("${") && current.is_none();
        while let Some(&(letter, line)) = self.letters.get(self.at).filter(|(letter, _)| *letter != '"') {
            let next = match letter {
                '$' | '`' => {
                    for (index, word) in self.expansion().into_iter().enumerate() {
                        if index > 0 {
                            words.extend(current.take());
                        }
                        current.get_or_insert_default().append(word);
                    }
                    continue;
                }
                '\\' => {
                    self.at += 1;
                    // A continued line in a text of options still separates words.
                    self.peek().map_or('\\', |next| if next == '\n' { ' ' } else { next })
                }
                letter => letter,
            };
            self.at += 1;
            current.get_or_insert_default().append(Word::new(next, line));
        }
        self.at += 1;
        if !is_array_alone {
            current.get_or_insert_with(|| Word::new("", 0));
        }
    }

    /// Reads an expansion, and returns its words: the elements of an array, or one.
    fn expansion(&mut self) -> Vec<Word> {
        let line = self.letters[self.at].1;
        let words = self.expand(line);
        self.expanded += words.iter().map(|word| 1 + word.text.len()).sum::<usize>();
        if self.expanded > MOST_EXPANDED {
            return vec![Word::unknown(line, format!("the values up to line {line} are too long"))];
        }
        words
    }

    fn expand(&mut self, line: usize) -> Vec<Word> {
        let unknown = |reason: String| vec![Word::unknown(line, reason)];
        let is_command = self.peek() == Some('`');
        self.at += 1;
        if is_command {
            let command = self.take_until(|letter| letter == '`');
            self.at += 1;
            return unknown(format!("`{command}` of line {line} is not run"));
        }
        match self.peek() {
            Some('(') if self.starts_with("((") => {
                let sum = self.take_enclosed('(', ')');
                let known = |name: &str| {
                    let word = self.variables.get(name)?.first().filter(|word| word.unknown.is_none())?;
                    word.text.trim().parse().ok()
                };
                match evaluate(&sum, &known) {
                    Some(number) => vec![Word::new(number.to_string(), line)],
                    None => unknown(format!("`$({sum})` of line {line} has a value that is not known")),
                }
            }
            Some('(') => {
                let command = self.take_enclosed('(', ')');
                unknown(format!("`$({command})` of line {line} is not run"))
            }
            Some('{') => {
                let inside = self.take_enclosed('{', '}');
                self.parameter(&inside, line)
            }
            Some(letter) if letter.is_ascii_alphabetic() || letter == '_' => {
                let name = self.take_name();
                self.parameter(&name, line)
            }
            Some(letter) if letter.is_ascii_digit() || "@*#?!$-".contains(letter) => {
                self.at += 1;
                self.parameter(&letter.to_string(), line)
            }
            _ => vec![Word::new("$", line)],
        }
    }

    /// Returns the words of `${inside}`.
    fn parameter(&mut self, inside: &str, line: usize) -> Vec<Word> {
        let end = inside.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        let (name, rest) = inside.split_at(end.unwrap_or(inside.len()));
        let known = self.variables.get(name);
        let operators = [":-", ":=", "-", "="].into_iter();
        let default = operators.filter_map(|operator| Some((operator, rest.strip_prefix(operator)?))).next();
        let is_empty = known.is_none_or(|list| list.first().is_none_or(|word| word.text.is_empty()));
        match (known, rest, default) {
            (Some(list), "[@]" | "[*]", _) => list.clone(),
            (None, "[@]" | "[*]", _) if !name.is_empty() => Vec::new(),
            (Some(list), "", _) => list.first().cloned().into_iter().collect(),
            (Some(list), _, Some((operator, _))) if !(is_empty && operator.starts_with(':')) => {
                list.first().cloned().into_iter().collect()
            }
            (_, _, Some((_, text))) if self.depth < MOST_DEPTH => vec![self.default_text(text, line)],
            (None, "", _) => {
                let is_argument = name.starts_with(|letter: char| letter.is_ascii_digit());
                let reason = if is_argument {
                    format!("`${name}` of line {line} is an argument of the script")
                } else {
                    format!("`{name}` of line {line} has no value in the file")
                };
                vec![Word { text: String::new(), line, unknown: Some(reason) }]
            }
            _ => vec![Word::unknown(line, format!("`${{{inside}}}` of line {line} is not read"))],
        }
    }

    /// Returns the text after `:-`.
    fn default_text(&mut self, text: &str, line: usize) -> Word {
        let mut inner = Self {
            letters: text.chars().map(|letter| (letter, line)).collect(),
            variables: std::mem::take(&mut self.variables),
            depth: self.depth + 1,
            expanded: self.expanded,
            ..Self::default()
        };
        let mut joined = Word::new("", line);
        while inner.at < inner.letters.len() {
            inner.word_or_letter().into_iter().for_each(|word| joined.append(word));
        }
        (self.variables, self.expanded) = (inner.variables, inner.expanded);
        joined
    }

    /// Skips `2> file`, or reads the start of a here-document.
    fn redirection(&mut self, words: &mut Vec<Word>) {
        let is_adjacent = self.at > 0 && self.letters[self.at - 1].0.is_ascii_digit();
        if is_adjacent && words.last().is_some_and(|word| word.text.parse::<u8>().is_ok()) {
            words.pop();
        }
        let operator = self.take_until(|letter| !['<', '>', '&', '-'].contains(&letter));
        self.skip_blanks(false);
        let target = self.word();
        if ["<<", "<<-"].contains(&operator.as_str()) {
            self.documents.extend(target.into_iter().next().map(|word| word.text));
        }
    }

    /// Skips the lines of here-documents.
    fn skip_documents(&mut self) {
        for end in std::mem::take(&mut self.documents) {
            while self.at < self.letters.len() {
                let line = self.take_until(|letter| letter == '\n');
                self.at += 1;
                if line.trim() == end {
                    break;
                }
            }
        }
    }
}

fn join(one: Word, other: Word) -> Word {
    Word { text: format!("{} {}", one.text, other.text), unknown: one.unknown.or(other.unknown), ..one }
}

/// Returns the result of a test, unless it needs a command or a file. A variable without a value is empty.
fn test(words: &[Word]) -> Option<bool> {
    let is_known = words.iter().all(|word| word.unknown.is_none() || word.is_unset());
    let words: Vec<&str> = words.iter().map(|word| word.text.as_str()).collect();
    if is_known { result_of(&words) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the words of the only command with options.
    fn check(script: &str, expected: &str) {
        let commands = commands(script);
        let with_options: Vec<_> =
            commands.iter().filter(|words| words.iter().any(Word::is_option)).collect();
        let texts: Vec<&str> =
            with_options.iter().flat_map(|words| words.iter()).map(|word| word.text.as_str()).collect();
        assert_eq!(texts.join(" "), expected, "{script}");
    }

    #[test]
    fn variables_and_arrays_are_expanded() {
        check("A=8\nrun --a $A --b ${A}x --c '$A' --d \"$A\"", "run --a 8 --b 8x --c $A --d 8");
        check("export A=${B:-4}; C=$((A * 2)) # --x\nrun --a $A --c=${C:=9}", "run --a 4 --c=8");
        check("X=(--a 1 # no\n  --b)\nX+=(--c \"2 3\")\nrun ${X[@]} \\\n  --d", "run --a 1 --b --c 2 3 --d");
        check("declare -a X=(--a)\nX+=(\"--b 2\")\nrun \"${X[@]}\"", "run --a --b 2");
        check(
            "O=\"--a 1 \\\n --b 2\"\nsrun sh -c \"python x.py ${O}\"",
            "srun sh -c python x.py --a 1 --b 2",
        );
        check("A=1\nA+=2\nrun --a $A 2>&1 > log | tee --append", "run --a 12 tee --append");
        check("--a Et|(t|)*2L; # x\n--b $A", "--a Et|(t|)*2L; --b ");
        check("cat <<EOF > f\nrun --no\nEOF\nrun --a", "run --a");
    }

    #[test]
    fn conditions_that_compare_are_decided() {
        let script = "T=fp8\nif [[ \"$T\" == fp8 && -z $U ]]; then A=1; elif [ $T = x ]; then A=2; else A=3; fi\nrun --a $A";
        check(script, "run --a 1");
        check("if [ 3 -gt 4 ] || false; then A=1\nelse\n  A=2\nfi\nrun --a $A", "run --a 2");
        check("A=1; [ -n \"$B\" ] && A=2\n[ -n \"$A\" ] || A=3\nrun --a $A", "run --a 1");
        let unknown = commands("for i in 1 2; do A=1; done\nif [ -f x ]; then B=2; fi\nrun --a $A --b $B");
        let reasons: Vec<&str> =
            unknown.iter().flatten().filter_map(|word| word.unknown.as_deref()).collect();
        assert_eq!(
            reasons,
            [
                "`A` depends on a condition or a loop of line 1, which is not run",
                "`B` depends on a condition or a loop of line 2, which is not run"
            ]
        );
    }

    #[test]
    fn values_that_need_a_command_are_not_known() {
        let reason = |script: &str| {
            commands(script).iter().flatten().find_map(|word| word.unknown.clone()).unwrap_or_default()
        };
        assert_eq!(reason("A=$(nproc)\nrun --a $A"), "`$(nproc)` of line 1 is not run");
        assert_eq!(reason("run --a \"$1\""), "`$1` of line 1 is an argument of the script");
        assert_eq!(reason("run --a $A"), "`A` of line 1 has no value in the file");
        assert_eq!(reason("run --a $((N * 2))"), "`$((N * 2))` of line 1 has a value that is not known");
        assert_eq!(reason("A=x\nrun --a ${A%.*}"), "`${A%.*}` of line 2 is not read");
    }

    #[test]
    fn hostile_scripts_end() {
        let doubled = format!("A=xxxxxxxx\n{}run --a $A", "A=$A$A\n".repeat(60));
        assert!(commands(&doubled).iter().flatten().any(|word| word.unknown.is_some()));
        commands(&format!("run --a {}", "${A:-".repeat(10_000)));
        commands(&format!("run --a {}", "$((".repeat(10_000)));
        for text in ["'", "\"", "$", "${", "$(", "`", "A=(", "<<", "\\", "if", "fi", "))", "${}"] {
            commands(text);
            commands(&format!("run --a {text}"));
        }
    }
}
