//! Splits Rust code into names and punctuation, without comments and without the contents of strings.
//!
//! It handles only as much of the language as paths need. A lifetime is read as a quote and a name, which
//! does no harm.

/// A name or a punctuation mark, and its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) text: &'a str,
    /// The line, counted from 1.
    pub(crate) line: usize,
}

/// Returns the tokens of `text`; `::` is one token.
pub(crate) fn tokens(text: &str) -> Vec<Token<'_>> {
    let (mut tokens, mut rest, mut line) = (Vec::new(), text, 1);
    while let Some(first) = rest.chars().next() {
        let (length, is_token) = next_length(rest, first);
        let (piece, behind) = rest.split_at(length);
        if is_token {
            tokens.push(Token { text: piece, line });
        }
        line += piece.matches('\n').count();
        rest = behind;
    }
    tokens
}

/// Returns the length in bytes of the next piece of code, and whether it is a token.
fn next_length(rest: &str, first: char) -> (usize, bool) {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), false);
    }
    if rest.starts_with("/*") {
        return (block_comment(rest), false);
    }
    if let Some(length) = string(rest) {
        return (length, false);
    }
    if rest.starts_with("::") {
        return (2, true);
    }
    if is_name(first) {
        return (rest.find(|letter| !is_name(letter)).unwrap_or(rest.len()), true);
    }
    (first.len_utf8(), !first.is_whitespace())
}

/// Returns the length in bytes of the block comment with which `rest` begins. Block comments nest.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Returns the length in bytes of the string or character with which `rest` begins; `None` if it does not
/// begin with one.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c"].into_iter().find(|prefix| {
        let behind = rest.strip_prefix(prefix).unwrap_or_default().trim_start_matches('#');
        rest.starts_with(prefix) && behind.starts_with('"')
    });
    let prefix = prefix.unwrap_or_default();
    let hashes = rest[prefix.len()..].bytes().take_while(|&byte| byte == b'#').count();
    let is_raw = prefix.ends_with('r');
    if hashes > 0 && !is_raw {
        return None;
    }
    let start = prefix.len() + hashes;
    if rest[start..].starts_with('"') {
        let end = if is_raw {
            let closing = format!("\"{}", "#".repeat(hashes));
            rest[start + 1..].find(&closing).map(|at| start + 1 + at + closing.len())
        } else {
            closing_quote(&rest[start + 1..], b'"').map(|at| start + 1 + at)
        };
        return Some(end.unwrap_or(rest.len()));
    }
    character(rest)
}

/// Returns the length in bytes of the character literal with which `rest` begins; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    let first = inner.chars().next()?;
    let is_literal = first == '\\' || inner[first.len_utf8()..].starts_with('\'');
    is_literal.then(|| closing_quote(inner, b'\'').map_or(rest.len(), |at| 1 + at))
}

/// Returns the number of bytes up to and including the next `quote` that is not escaped.
fn closing_quote(text: &str, quote: u8) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            byte if byte == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}
