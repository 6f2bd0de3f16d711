//! A word of a command, and how expansions are split into words.

use std::rc::Rc;

/// The most letters of a text that a reason shows.
const SHOWN: usize = 60;

/// A word of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Word {
    pub(crate) text: String,
    /// The line of its first letter, counted from 1.
    pub(crate) line: usize,
    pub(crate) doubt: Doubt,
    /// Whether a part of it is in quotes, so that it is a word even without letters.
    pub(super) is_quoted: bool,
}

/// Why the text of a word may be another one. The reasons are sentences without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Doubt {
    /// The text is certain.
    #[default]
    None,
    /// The text needs a variable that the file does not set, and that is empty here.
    Unset(Rc<str>),
    /// The word is a list that the file does not set. It is left out if the list is empty.
    Absent(Rc<str>),
    /// The text is not known.
    Unknown(Rc<str>),
}

impl Doubt {
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }

    /// Returns the reason, unless the text is certain.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            Self::None => None,
            Self::Unset(reason) | Self::Absent(reason) | Self::Unknown(reason) => Some(reason),
        }
    }

    /// Returns the doubt of two texts that are joined.
    fn with(self, other: Self) -> Self {
        match (self, other) {
            (one @ Self::Unknown(_), _) | (one, Self::None) => one,
            (Self::None, other) | (_, other @ Self::Unknown(_)) => other,
            (one, _) => one,
        }
    }
}

impl Word {
    pub(super) fn new(text: impl Into<String>, line: usize) -> Self {
        Self { text: text.into(), line, ..Self::default() }
    }

    pub(super) fn unknown(line: usize, reason: &str) -> Self {
        Self { doubt: Doubt::Unknown(reason.into()), ..Self::new("?", line) }
    }

    pub(crate) fn is_option(&self) -> bool {
        is_option(&self.text)
    }

    /// Returns whether the shell leaves the word out: an expansion without quotes that is empty.
    pub(super) fn vanishes(&self) -> bool {
        self.text.is_empty() && !self.is_quoted
    }

    /// Marks the word as one that a command adds which may not run.
    pub(super) fn may_be_missing(&mut self, reason: &Rc<str>) {
        (self.doubt, self.is_quoted) = (Doubt::Unknown(reason.clone()), false);
    }

    /// Returns whether the shell may make several words of it, or none.
    pub(super) fn may_be_several(&self) -> bool {
        self.doubt.is_unknown() && !self.is_quoted
    }

    /// Returns the text if it is certain.
    pub(super) fn known(&self) -> Option<&str> {
        (self.doubt == Doubt::None).then_some(self.text.as_str())
    }

    fn push(&mut self, letter: char, line: usize) {
        self.line = if self.text.is_empty() { line } else { self.line };
        self.text.push(letter);
    }

    pub(super) fn append(&mut self, other: Self) {
        self.line = if self.text.is_empty() { other.line } else { self.line };
        self.text.push_str(&other.text);
        self.is_quoted |= other.is_quoted;
        self.doubt = match std::mem::take(&mut self.doubt).with(other.doubt) {
            Doubt::Absent(reason) if !self.vanishes() => Doubt::Unset(reason),
            doubt => doubt,
        };
    }

    /// Returns the words of a text that has options, as `sh -c` and `eval` get; another text is one word.
    pub(super) fn split(self) -> Vec<Self> {
        if !self.text.split_whitespace().any(is_option) {
            return vec![self];
        }
        let part = |text: &str| Self { doubt: self.doubt.clone(), ..Self::new(text, self.line) };
        self.text.split_whitespace().map(part).collect()
    }
}

/// Returns whether a text begins with the dashes and a letter of an option.
pub(super) fn is_option(text: &str) -> bool {
    text.len() > 2 && text.starts_with("--")
}

/// The words that the letters of a command make.
#[derive(Debug, Default)]
pub(super) struct Words {
    pub(super) list: Vec<Word>,
    /// The word that further letters belong to.
    pub(super) current: Option<Word>,
    /// Whether the words are the pieces of a text: a blank behind a doubtful piece begins another one.
    pub(super) are_pieces: bool,
}

impl Words {
    pub(super) fn push(&mut self, letter: char, line: usize) {
        let is_doubtful = self.current.as_ref().is_some_and(|word| word.doubt.is_unknown());
        if self.are_pieces && is_doubtful && letter.is_whitespace() {
            self.end_word();
        }
        self.current.get_or_insert_default().push(letter, line);
    }

    pub(super) fn append(&mut self, word: Word) {
        self.current.get_or_insert_default().append(word);
    }

    pub(super) fn end_word(&mut self) {
        self.list.extend(self.current.take());
    }

    /// Adds the elements of an expansion in double quotes. Each is a word.
    pub(super) fn add_quoted(&mut self, elements: Vec<Word>) {
        for (index, word) in elements.into_iter().enumerate() {
            if index > 0 {
                self.end_word();
            }
            let is_quoted = !matches!(word.doubt, Doubt::Absent(_));
            self.append(Word { is_quoted, ..word });
        }
    }

    /// Adds the elements of an expansion without quotes, in which blanks separate words.
    pub(super) fn add_split(&mut self, elements: Vec<Word>) {
        for (index, word) in elements.into_iter().enumerate() {
            if index > 0 || word.text.starts_with(char::is_whitespace) {
                self.end_word();
            }
            if word.text.is_empty() {
                // An empty value makes no word, and the reason of the doubt is kept.
                if word.doubt != Doubt::None {
                    self.append(Word { is_quoted: false, ..word });
                }
                continue;
            }
            for (index, text) in word.text.split_whitespace().enumerate() {
                if index > 0 {
                    self.end_word();
                }
                self.append(Word { doubt: word.doubt.clone(), ..Word::new(text, word.line) });
            }
            if word.text.ends_with(char::is_whitespace) {
                self.end_word();
            }
        }
    }

    pub(super) fn finish(mut self) -> Vec<Word> {
        self.end_word();
        self.list
    }
}

/// Joins words by blanks into one text, which may be empty.
pub(super) fn join(words: Vec<Word>, line: usize) -> Word {
    let mut joined = Word { is_quoted: true, ..Word::new("", line) };
    for (index, word) in words.into_iter().enumerate() {
        if index > 0 {
            joined.text.push(' ');
        }
        joined.append(word);
    }
    joined
}

/// Joins the pieces of a text.
pub(super) fn concatenated(pieces: Vec<Word>, line: usize) -> Word {
    let mut joined = Word::new("", line);
    pieces.into_iter().for_each(|piece| joined.append(piece));
    joined
}

/// Returns the start of a text for a reason.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}
