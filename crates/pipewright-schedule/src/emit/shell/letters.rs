//! The letters of a script with their lines, and a place among them.

/// A here-document, whose lines follow.
#[derive(Debug, Clone)]
pub(super) struct HereDocument {
    /// The line that ends it.
    pub(super) end: String,
    /// Whether tabs before its lines do not count.
    pub(super) has_tabs: bool,
}

/// The longest text between the brackets of an element.
const LONGEST_SUBSCRIPT: usize = 200;

/// Letters, and the index of the next one.
#[derive(Debug, Default)]
pub(super) struct Letters {
    list: Vec<(char, usize)>,
    pub(super) at: usize,
}

impl Letters {
    /// Returns the letters of a script, whose lines are counted from 1 and end in `\n`.
    pub(super) fn of_script(text: &str) -> Self {
        let mut list = Vec::with_capacity(text.len() + 1);
        for (line, text) in (1..).zip(text.split('\n')) {
            list.extend(text.trim_end_matches('\r').chars().chain(['\n']).map(|letter| (letter, line)));
        }
        Self { list, at: 0 }
    }

    /// Returns the letters of a text that is on one line.
    pub(super) fn of_text(text: &str, line: usize) -> Self {
        Self { list: text.chars().map(|letter| (letter, line)).collect(), at: 0 }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at >= self.list.len()
    }

    pub(super) fn next(&self) -> Option<(char, usize)> {
        self.list.get(self.at).copied()
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.peek_at(0)
    }

    /// Returns the letter at a distance from the next one.
    pub(super) fn peek_at(&self, distance: usize) -> Option<char> {
        self.list.get(self.at + distance).map(|(letter, _)| *letter)
    }

    /// Returns the line of the next letter; at the end, of the last one.
    pub(super) fn line(&self) -> usize {
        self.next().or(self.list.last().copied()).map_or(1, |(_, line)| line)
    }

    /// Returns whether the letter before the next one is a digit.
    pub(super) fn is_behind_digit(&self) -> bool {
        self.at.checked_sub(1).is_some_and(|before| self.list[before].0.is_ascii_digit())
    }

    pub(super) fn starts_with(&self, text: &str) -> bool {
        let rest = self.list.get(self.at..).unwrap_or_default();
        rest.iter().map(|(letter, _)| *letter).take(text.len()).eq(text.chars())
    }

    /// Skips a text if it is next.
    pub(super) fn take(&mut self, text: &str) -> bool {
        let is_next = self.starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    /// Returns the letters before one for which `ends` is true, at most `most`, and does not skip them.
    pub(super) fn word_ahead(&self, most: usize, ends: impl Fn(char) -> bool) -> String {
        let rest = self.list.get(self.at..).unwrap_or_default().iter().map(|(letter, _)| *letter);
        rest.take_while(|letter| !ends(*letter)).take(most).collect()
    }

    /// Takes the letters before one for which `ends` is true.
    pub(super) fn take_until(&mut self, ends: impl Fn(char) -> bool) -> String {
        let rest = self.list.get(self.at..).unwrap_or_default().iter().map(|(letter, _)| *letter);
        let (mut taken, mut count) = (String::new(), 0);
        for letter in rest.take_while(|letter| !ends(*letter)) {
            taken.push(letter);
            count += 1;
        }
        self.at += count;
        taken
    }

    /// Takes the letters, digits and underscores of a name.
    pub(super) fn take_name(&mut self) -> String {
        self.take_until(|letter| !is_of_name(letter))
    }

    /// Takes the text between two brackets. Brackets in quotes do not count.
    pub(super) fn take_enclosed(&mut self, open: char, close: char) -> String {
        let (mut text, mut depth, mut quote) = (String::new(), 0, None);
        while let Some(letter) = self.peek() {
            self.at += 1;
            match (letter, quote) {
                ('\\', None | Some('"')) => {
                    text.push(letter);
                    text.extend(self.peek());
                    self.at += 1;
                    continue;
                }
                ('"' | '\'', None) => quote = Some(letter),
                (letter, Some(open)) if letter == open => quote = None,
                (_, Some(_)) => {}
                (letter, None) => depth += i32::from(letter == open) - i32::from(letter == close),
            }
            if depth == 0 {
                break;
            }
            text.push(letter);
        }
        self.at = self.at.min(self.list.len());
        text.split_off(text.len().min(1))
    }

    /// Takes a text in brackets that is next on this line, such as `[0]`, and returns it without the brackets.
    pub(super) fn take_subscript(&mut self) -> Option<String> {
        let rest = self.word_ahead(LONGEST_SUBSCRIPT, |letter| letter == '\n');
        let mut depth = 0_usize;
        for (count, (index, letter)) in rest.char_indices().enumerate() {
            match letter {
                '[' => depth += 1,
                ']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                self.at += if index == 0 { 0 } else { count + 1 };
                return (index > 0).then(|| rest[1..index].to_owned());
            }
        }
        None
    }

    /// Skips blanks, continued lines and comments. `lines` are blanks in an array.
    pub(super) fn skip_blanks(&mut self, lines: bool) {
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
}

/// Returns whether a letter may be in the name of a variable.
pub(super) fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

/// Returns whether a text is the name of a variable.
pub(super) fn is_name(text: &str) -> bool {
    text.chars().all(is_of_name) && text.starts_with(|letter: char| !letter.is_ascii_digit())
}
