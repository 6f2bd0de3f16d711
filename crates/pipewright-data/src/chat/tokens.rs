//! The tokens of the tags of a template.

/// A part of the source of a template.
#[derive(Debug)]
pub(crate) enum Part<'s> {
    /// Text, comments and raw blocks.
    Text(&'s str),
    /// A statement or an expression.
    Tag {
        /// The beginning, such as `{%-`.
        begin: &'s str,
        tokens: Vec<Token<'s>>,
        /// The end, such as `%}`, with the white space before it.
        end: &'s str,
        /// The offset of the tag.
        at: usize,
    },
}

/// A token with the white space before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'s> {
    pub(crate) kind: TokenKind,
    pub(crate) space: &'s str,
    pub(crate) text: &'s str,
}

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Name,
    Number,
    /// A text in quotation marks.
    Text,
    Operator,
}

impl Token<'_> {
    /// Returns whether this is an operator or a word with this text.
    pub(crate) fn is(&self, text: &str) -> bool {
        self.kind != TokenKind::Text && self.text == text
    }
}

/// Iterates over the parts of a source. An error has the offset of its tag.
pub(crate) struct Parts<'s> {
    source: &'s str,
    at: usize,
}

impl<'s> Parts<'s> {
    pub(crate) fn of(source: &'s str) -> Self {
        Self { source, at: 0 }
    }

    /// Returns the offset of the next tag.
    fn next_tag(&self) -> Option<usize> {
        let rest = &self.source[self.at..];
        let is_tag =
            |&(at, _): &(usize, &str)| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
        rest.match_indices('{').find(is_tag).map(|(at, _)| self.at + at)
    }

    fn text_to(&mut self, end: usize) -> Part<'s> {
        let text = &self.source[self.at..end];
        self.at = end;
        Part::Text(text)
    }

    /// Returns the offset behind the tag `{% name %}` that begins at an offset. White space may be controlled at
    /// its beginning too.
    fn after_tag(&self, at: usize, name: &str) -> Option<usize> {
        let tag = self.source[at..].strip_prefix("{%")?;
        let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag);
        let tag = tag.trim_start_matches(|letter: char| letter.is_ascii_whitespace()).strip_prefix(name)?;
        let tag = tag.trim_start_matches(|letter: char| letter.is_ascii_whitespace());
        let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag).strip_prefix("%}")?;
        Some(self.source.len() - tag.len())
    }

    /// Returns the comment or raw block at an offset, if there is one.
    fn verbatim(&mut self, at: usize) -> Option<Result<Part<'s>, (usize, String)>> {
        if self.source[at..].starts_with("{#") {
            let sign = usize::from(self.source[at + 2..].starts_with(['-', '+']));
            let end = self.source[at + 2 + sign..].find("#}").map(|end| at + 2 + sign + end + 2);
            return Some(end.map(|end| self.text_to(end)).ok_or((at, "a comment has no end".to_owned())));
        }
        let begin = self.after_tag(at, "raw")?;
        let mut tags = self.source[begin..].match_indices("{%");
        let end = tags.find_map(|(tag, _)| self.after_tag(begin + tag, "endraw"));
        Some(end.map(|end| self.text_to(end)).ok_or((at, "a raw block has no end".to_owned())))
    }

    fn tag(&mut self) -> Result<Part<'s>, (usize, String)> {
        let (at, source) = (self.at, self.source);
        let close = if source[at..].starts_with("{{") { "}}" } else { "%}" };
        let sign = usize::from(source[at + 2..].starts_with(['-', '+']));
        let begin = &source[at..at + 2 + sign];
        self.at += begin.len();
        let mut tokens = Vec::new();
        let mut nesting = 0_usize;
        loop {
            let rest = &source[self.at..];
            let text = rest.trim_start_matches(|letter: char| letter.is_ascii_whitespace());
            let space = &rest[..rest.len() - text.len()];
            if text.is_empty() {
                return Err((at, "a tag has no end".to_owned()));
            }
            let sign = usize::from(text.starts_with(['-', '+']));
            if nesting == 0 && text[sign..].starts_with(close) {
                let end = &rest[..space.len() + sign + close.len()];
                self.at += end.len();
                return Ok(Part::Tag { begin, tokens, end, at });
            }
            let after_dot = tokens.last().is_some_and(|token: &Token<'_>| token.is("."));
            let (kind, length) =
                token(text, after_dot).ok_or((at, "a text in a tag has no end".to_owned()))?;
            let text = &text[..length];
            match text {
                "(" | "[" | "{" => nesting += 1,
                ")" | "]" | "}" => {
                    nesting = nesting.checked_sub(1).ok_or((at, format!("`{text}` has no beginning")))?;
                }
                _ => {}
            }
            tokens.push(Token { kind, space, text });
            self.at += space.len() + length;
        }
    }
}

impl<'s> Iterator for Parts<'s> {
    type Item = Result<Part<'s>, (usize, String)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.source.len() {
            return None;
        }
        let Some(at) = self.next_tag() else { return Some(Ok(self.text_to(self.source.len()))) };
        if at > self.at {
            return Some(Ok(self.text_to(at)));
        }
        Some(self.verbatim(at).unwrap_or_else(|| self.tag()))
    }
}

/// Returns the kind and the length of the token at the beginning of a text; `None` if a text has no end.
fn token(text: &str, after_dot: bool) -> Option<(TokenKind, usize)> {
    const LONG: [&str; 6] = ["//", "**", "==", "!=", "<=", ">="];
    let first = text.chars().next().unwrap_or_default();
    let length = |is_part: fn(char) -> bool| text.find(|letter| !is_part(letter)).unwrap_or(text.len());
    Some(match first {
        '\'' | '"' => (TokenKind::Text, length_of_text(text, first)?),
        '0'..='9' if after_dot => (TokenKind::Number, length(|letter| letter.is_ascii_digit())),
        '0'..='9' => (TokenKind::Number, length_of_number(text)),
        'a'..='z' | 'A'..='Z' | '_' => {
            (TokenKind::Name, length(|letter| letter.is_ascii_alphanumeric() || letter == '_'))
        }
        _ if LONG.iter().any(|long| text.starts_with(long)) => (TokenKind::Operator, 2),
        _ => (TokenKind::Operator, first.len_utf8()),
    })
}

fn length_of_text(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, letter)| {
        let is_end = letter == quote && !is_escaped;
        is_escaped = letter == '\\' && !is_escaped;
        is_end
    });
    end.map(|(end, _)| end + 1)
}

/// Returns the length of a number: digits with an optional fraction and exponent, or with a base.
fn length_of_number(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digits = |from: usize| {
        from + bytes[from..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'_').count()
    };
    if let [b'0', b'b' | b'B' | b'o' | b'O' | b'x' | b'X', ..] = bytes {
        return 2 + bytes[2..].iter().take_while(|byte| byte.is_ascii_hexdigit() || **byte == b'_').count();
    }
    let mut end = digits(0);
    if bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
        end = digits(end + 1);
    }
    if let Some(b'e' | b'E') = bytes.get(end) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
            end = digits(end + 1 + sign);
        }
    }
    end
}

/// Returns a text in quotation marks with the escapes of Python as the engine reads it.
pub(crate) fn decoded(quoted: &str) -> Result<String, String> {
    if !quoted.contains('\\') {
        return Ok(quoted.to_owned());
    }
    let mut text = String::with_capacity(quoted.len() + 2);
    let mut letters = quoted[1..quoted.len() - 1].chars();
    let push = |text: &mut String, letter: char| match letter {
        '\\' | '"' => text.extend(['\\', letter]),
        '\n' => text.push_str("\\n"),
        letter => text.push(letter),
    };
    text.push('"');
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            // A line end in a text stays one, so that lines keep their numbers.
            if letter == '\n' {
                text.push('\n');
            } else {
                push(&mut text, letter);
            }
            continue;
        }
        match letters.next().unwrap_or_default() {
            '\n' => {}
            'n' => push(&mut text, '\n'),
            'r' => push(&mut text, '\r'),
            't' => push(&mut text, '\t'),
            'a' => push(&mut text, '\u{7}'),
            'b' => push(&mut text, '\u{8}'),
            'f' => push(&mut text, '\u{c}'),
            'v' => push(&mut text, '\u{b}'),
            quote @ ('\\' | '\'' | '"') => push(&mut text, quote),
            digit @ '0'..='7' => {
                let more: Vec<char> = letters.clone().take(2).take_while(|digit| digit.is_digit(8)).collect();
                let digits: String = std::iter::once(digit).chain(more.iter().copied()).collect();
                letters.by_ref().take(more.len()).for_each(drop);
                push(&mut text, code_point(&digits, 8)?);
            }
            kind @ ('x' | 'u' | 'U') => {
                let length = match kind {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let digits: String = letters.by_ref().take(length).collect();
                if digits.len() != length || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                    return Err(format!("the escape `\\{kind}` needs {length} hexadecimal digits"));
                }
                push(&mut text, code_point(&digits, 16)?);
            }
            'N' => return Err("write the character instead of its name `\\N`".to_owned()),
            // Python keeps the sign.
            other => {
                push(&mut text, '\\');
                push(&mut text, other);
            }
        }
    }
    text.push('"');
    Ok(text)
}

fn code_point(digits: &str, radix: u32) -> Result<char, String> {
    let letter = u32::from_str_radix(digits, radix).ok().and_then(char::from_u32);
    letter.ok_or_else(|| format!("the escape of {digits} is not a character"))
}

/// Returns the line of an offset, counted from 1.
pub(crate) fn line_of(source: &str, at: usize) -> usize {
    source[..at].matches('\n').count() + 1
}
