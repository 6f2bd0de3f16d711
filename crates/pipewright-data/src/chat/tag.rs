//! The tokens of a tag while they are read, and the expressions that they become.

use crate::chat::tokens::{Token, TokenKind};

/// The deepest accepted nesting of brackets and of blocks.
pub(crate) const NESTING: usize = 64;
/// The deepest accepted tree of operators, brackets and blocks.
pub(crate) const DEPTH: usize = 256;

pub(crate) fn too_deep() -> String {
    format!(
        "more than {NESTING} brackets or blocks are inside each other, or more than {DEPTH} operators, filters and branches \
         follow each other"
    )
}

/// Refuses more operands of an operator than the tree of an expression is deep.
pub(crate) fn check_count(operands: &[Expression]) -> Result<(), String> {
    if operands.len() > DEPTH { Err(too_deep()) } else { Ok(()) }
}

/// The rewritten text of an expression, and the depth of its tree.
#[derive(Default)]
pub(crate) struct Expression {
    pub(crate) text: String,
    pub(crate) depth: usize,
}

impl Expression {
    pub(crate) fn push(&mut self, token: Token<'_>) {
        self.text.push_str(token.space);
        self.text.push_str(token.text);
    }

    /// Appends an operand, which is one level deeper than the operator before it.
    pub(crate) fn append(&mut self, other: &Self) {
        self.text.push_str(&other.text);
        self.depth = self.depth.max(other.depth) + 1;
    }

    pub(crate) fn call(function: &str, arguments: &[Self]) -> Self {
        let texts: Vec<&str> = arguments.iter().map(|argument| argument.text.as_str()).collect();
        let depth =
            arguments.iter().map(|argument| argument.depth).max().unwrap_or_default() + arguments.len();
        // The space keeps the name apart from a keyword.
        Self { text: format!(" {function}({})", texts.join(",")), depth }
    }

    pub(crate) fn constant(text: &str) -> Self {
        Self { text: format!("'{text}'"), depth: 0 }
    }

    /// Calls a function with a value, which may be a tuple without brackets.
    pub(crate) fn given_to(self, function: &str) -> Self {
        Self::call(function, &[Self { text: format!("({})", self.text), ..self }])
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        if self.depth > DEPTH { Err(too_deep()) } else { Ok(()) }
    }
}

/// The tokens of a tag.
pub(crate) struct Tag<'t, 's> {
    pub(crate) tokens: &'t [Token<'s>],
    pub(crate) next: usize,
    /// The number of open brackets.
    pub(crate) nesting: usize,
}

impl<'s> Tag<'_, 's> {
    pub(crate) fn peek(&self) -> Option<Token<'s>> {
        self.tokens.get(self.next).copied()
    }

    /// Returns whether the next token is this operator or word.
    pub(crate) fn is(&self, text: &str) -> bool {
        self.peek().is_some_and(|token| token.is(text))
    }

    pub(crate) fn take(&mut self) -> Result<Token<'s>, String> {
        let token = self.peek().ok_or("a tag ends early")?;
        self.next += 1;
        Ok(token)
    }

    /// Returns whether an operator follows that is not in brackets, before the bracket that is open is closed.
    pub(crate) fn has(&self, operator: &str) -> bool {
        let mut nesting = 0_usize;
        for token in self.tokens[self.next..].iter().filter(|token| token.kind == TokenKind::Operator) {
            match token.text {
                "(" | "[" | "{" => nesting += 1,
                ")" | "]" | "}" if nesting == 0 => return false,
                ")" | "]" | "}" => nesting -= 1,
                text if nesting == 0 && text == operator => return true,
                _ => {}
            }
        }
        false
    }

    /// Returns whether the tokens from a place to the next one have no variables.
    pub(crate) fn is_constant(&self, start: usize) -> bool {
        let constants = ["true", "false", "none", "True", "False", "None"];
        let mut tokens = self.tokens[start..self.next].iter();
        tokens.all(|token| token.kind != TokenKind::Name || constants.contains(&token.text))
    }

    pub(crate) fn open(&mut self) -> Result<(), String> {
        self.nesting += 1;
        if self.nesting > NESTING { Err(too_deep()) } else { Ok(()) }
    }

    /// Returns the number of tokens of the comparison that is next: `not in` has two.
    pub(crate) fn comparison_tokens(&self) -> usize {
        let Some(token) = self.peek() else { return 0 };
        let is_not_in =
            token.is("not") && self.tokens.get(self.next + 1).is_some_and(|second| second.is("in"));
        match token.text {
            _ if token.kind == TokenKind::Text => 0,
            "==" | "!=" | "<" | ">" | "<=" | ">=" | "in" => 1,
            _ if is_not_in => 2,
            _ => 0,
        }
    }

    pub(crate) fn is_operator(&self, operators: &[&str]) -> bool {
        self.peek().is_some_and(|token| token.kind == TokenKind::Operator && operators.contains(&token.text))
    }

    /// Returns whether the argument of a test follows.
    pub(crate) fn is_argument(&self) -> bool {
        self.peek().is_some_and(|token| match token.kind {
            TokenKind::Name => !["and", "or", "else", "is"].contains(&token.text),
            TokenKind::Number | TokenKind::Text => true,
            TokenKind::Operator => matches!(token.text, "[" | "{"),
        })
    }
}
