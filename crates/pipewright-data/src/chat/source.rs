//! Rewrites the source of a template for the engine that renders it.
//!
//! Transformers renders with Python's Jinja, whose operators follow Python: `%` formats texts, `~` writes numbers
//! as Python does, `<` refuses other types than numbers and texts. The engine has other operators, so they become
//! calls of functions of [`operators`](crate::chat::operators): `a ~ b` becomes `__concat(a, b)`. All other text
//! stays as it is, with its lines. The tags `generation`, which Jinja does not know, become tags of a filter.
//!
//! The engine parses and compiles with recursion, so the depth of what it receives is limited here.

use crate::chat::tag::{DEPTH, Expression, NESTING, Tag, check_count, too_deep};
use crate::chat::tokens::{Part, Parts, Token, TokenKind, decoded, line_of};

/// The filter that replaces the tag `generation`.
pub(crate) const GENERATION: &str = "mark_generation";
/// The functions that replace operators.
pub(crate) const CONCAT: &str = "__concat";
pub(crate) const REMAINDER: &str = "__remainder";
pub(crate) const COMPARE: &str = "__compare";
pub(crate) const ATTRIBUTE: &str = "__attribute";
pub(crate) const ITEM: &str = "__item";
pub(crate) const HELD: &str = "__held";
pub(crate) const ITERATED: &str = "__iterated";
/// The functions that limit values ([`limits`](crate::chat::limits)).
pub(crate) const BOUND: &str = "__bound";
pub(crate) const MADE: &str = "__made";
pub(crate) const INDEXED: &str = "__indexed";
pub(crate) const SLICED: &str = "__sliced";
pub(crate) const KEY: &str = "__key";
pub(crate) const TABLE_KEY: &str = "__table_key";
pub(crate) const PAID: &str = "__paid";

/// Methods of Python's dictionaries. An attribute with such a name is the method, even if the dictionary has the
/// key.
const METHODS: [&str; 10] =
    ["items", "keys", "values", "get", "copy", "pop", "popitem", "update", "setdefault", "clear"];
/// The longest accepted source. The engine needs seconds for some that are longer.
const LONGEST: usize = 1 << 20;
/// Words that are not the beginning of a value.
const KEYWORDS: [&str; 6] = ["if", "else", "and", "or", "in", "is"];
/// Statements that need other files, or that transformers does not know.
const UNKNOWN: [&str; 8] = ["block", "include", "import", "from", "extends", "do", "autoescape", "trans"];
/// Statements with an end.
const BLOCKS: [&str; 7] = ["for", "if", "with", "filter", "macro", "call", "generation"];

/// A source that the engine can parse.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) source: String,
    /// Whether the template marks what an assistant writes.
    pub(crate) has_generation: bool,
}

/// Why a source is not a template.
#[derive(Debug)]
pub(crate) struct Malformed {
    /// The line, counted from 1.
    pub(crate) line: Option<usize>,
    pub(crate) reason: String,
}

/// Rewrites a source.
pub(crate) fn prepare(source: &str) -> Result<Prepared, Malformed> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut prepared = Prepared { source: String::with_capacity(source.len()), has_generation: false };
    // The depth that each open block adds.
    let mut blocks: Vec<usize> = Vec::new();
    for part in Parts::of(&source) {
        let part = part.map_err(|(at, reason)| malformed(&source, at, reason))?;
        match part {
            Part::Text(text) => prepared.source.push_str(text),
            Part::Tag { begin, tokens, end, at } => {
                prepared.source.push_str(begin);
                let mut tag = Tag { tokens: &tokens, next: 0, nesting: 0 };
                let text = if begin.starts_with("{%") {
                    prepared.has_generation |= tokens.first().is_some_and(|token| token.text == "generation");
                    tag.statement(&mut blocks)
                } else {
                    tag.sequence(&[])
                };
                let Expression { text, depth } = text.map_err(|reason| malformed(&source, at, reason))?;
                let depth = depth + blocks.iter().sum::<usize>();
                if depth > DEPTH || blocks.len() > NESTING {
                    return Err(malformed(&source, at, too_deep()));
                }
                prepared.source.push_str(&text);
                prepared.source.push_str(end);
            }
        }
    }
    if source.len() > LONGEST {
        return Err(Malformed { line: None, reason: format!("it has more than {LONGEST} bytes") });
    }
    Ok(prepared)
}

fn malformed(source: &str, at: usize, reason: String) -> Malformed {
    Malformed { line: Some(line_of(source, at)), reason }
}

impl<'s> Tag<'_, 's> {
    /// Rewrites a statement, and opens or closes its block.
    fn statement(&mut self, blocks: &mut Vec<usize>) -> Result<Expression, String> {
        let Some(name) = self.peek() else { return self.sequence(&[]) };
        self.next += 1;
        if UNKNOWN.contains(&name.text) {
            return Err(format!("the statement `{}` is not available in chat templates", name.text));
        }
        let mut statement = Expression::default();
        let is_block = name.text == "set" && !self.has("=");
        match name.text {
            "elif" => *blocks.last_mut().ok_or("`elif` is not in an `if` block")? += 1,
            end if end.starts_with("end") => drop(blocks.pop()),
            name if is_block || BLOCKS.contains(&name) => blocks.push(1),
            _ => {}
        }
        match name.text {
            "generation" => {
                statement.text = format!("{}filter {GENERATION}", name.space);
                return Ok(statement);
            }
            "endgeneration" => {
                statement.text = format!("{}endfilter", name.space);
                return Ok(statement);
            }
            _ => statement.push(name),
        }
        match name.text {
            "for" => self.loop_head(&mut statement)?,
            "set" if !is_block => self.assignment(&mut statement)?,
            _ => {}
        }
        let rest = self.sequence(&[])?;
        statement.append(&rest);
        Ok(statement)
    }

    /// Copies the variables of a loop, and rewrites what it iterates.
    fn loop_head(&mut self, statement: &mut Expression) -> Result<(), String> {
        while !self.is("in") {
            self.target(statement)?;
        }
        statement.push(self.take()?);
        let iterated = self.sequence(&["if", "recursive"])?;
        statement.append(&iterated.given_to(ITERATED));
        Ok(())
    }

    /// Copies the variables of an assignment, and rewrites its value.
    fn assignment(&mut self, statement: &mut Expression) -> Result<(), String> {
        let mut is_held = false;
        while !self.is("=") {
            is_held |= self.is(".");
            self.target(statement)?;
        }
        statement.push(self.take()?);
        let is_tuple = self.has(",");
        let start = self.next;
        let value = self.sequence(&[])?;
        if is_held {
            statement.append(&value.given_to(HELD));
        } else if self.is_constant(start) {
            statement.append(&value);
        } else {
            statement.append(&value.given_to(if is_tuple { MADE } else { BOUND }));
        }
        Ok(())
    }

    /// Copies a token of the variables that a statement sets.
    fn target(&mut self, statement: &mut Expression) -> Result<(), String> {
        let token = self.take()?;
        match token.text {
            "(" if token.kind == TokenKind::Operator => self.open()?,
            "." => statement.depth += 1,
            ")" if token.kind == TokenKind::Operator => self.nesting = self.nesting.saturating_sub(1),
            _ => {}
        }
        statement.push(token);
        Ok(())
    }

    /// Rewrites expressions and what is between them, up to one of these tokens or the end.
    fn sequence(&mut self, ends: &[&str]) -> Result<Expression, String> {
        let mut all = Expression::default();
        // The depth of the operators before the next value, such as `not`, `and` and `else`.
        let mut operators = 0;
        while let Some(token) = self.peek().filter(|token| !ends.iter().any(|end| token.is(end))) {
            let is_value = match token.kind {
                TokenKind::Name => token.text != "not" && !KEYWORDS.contains(&token.text),
                TokenKind::Number | TokenKind::Text => true,
                TokenKind::Operator => matches!(token.text, "(" | "[" | "{" | "-"),
            };
            if is_value {
                let value = self.comparison()?;
                all.text.push_str(&value.text);
                all.depth = all.depth.max(value.depth + operators);
                all.check()?;
                continue;
            }
            if token.kind == TokenKind::Operator && matches!(token.text, ")" | "]" | "}") {
                return Err(format!("`{}` has no beginning", token.text));
            }
            operators = if matches!(token.text, "," | ":" | "=") { 0 } else { operators + 1 };
            all.depth = all.depth.max(operators);
            all.check()?;
            all.push(token);
            self.next += 1;
        }
        Ok(all)
    }

    /// Rewrites a chain of comparisons.
    fn comparison(&mut self) -> Result<Expression, String> {
        let mut chain = vec![self.sum()?];
        while let count @ 1.. = self.comparison_tokens() {
            let operator: Vec<&str> =
                self.tokens[self.next..self.next + count].iter().map(|token| token.text).collect();
            self.next += count;
            chain.extend([Expression::constant(&operator.join(" ")), self.sum()?]);
            check_count(&chain)?;
        }
        Ok(if chain.len() == 1 { chain.remove(0) } else { Expression::call(COMPARE, &chain) })
    }

    fn sum(&mut self) -> Result<Expression, String> {
        let start = self.next;
        let mut left = self.concatenation()?;
        let mut is_sum = false;
        while self.is_operator(&["+", "-"]) {
            is_sum |= self.is("+");
            left.push(self.take()?);
            left.append(&self.concatenation()?);
            left.check()?;
        }
        Ok(if is_sum && !self.is_constant(start) { left.given_to(BOUND) } else { left })
    }

    fn concatenation(&mut self) -> Result<Expression, String> {
        let mut parts = vec![self.product()?];
        while self.is_operator(&["~"]) {
            self.next += 1;
            parts.push(self.product()?);
            check_count(&parts)?;
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expression::call(CONCAT, &parts) })
    }

    fn product(&mut self) -> Result<Expression, String> {
        let start = self.next;
        let mut left = self.power()?;
        while self.is_operator(&["*", "/", "//", "%"]) {
            let operator = self.take()?;
            if operator.text == "%" {
                left = Expression::call(REMAINDER, &[left, self.power()?]);
            } else {
                left.push(operator);
                let is_repeated = operator.text == "*" && !self.is_constant(start);
                left.append(&self.power()?);
                if is_repeated {
                    left = left.given_to(BOUND);
                }
            }
            left.check()?;
        }
        Ok(left)
    }

    fn power(&mut self) -> Result<Expression, String> {
        let mut left = self.value(true)?;
        while self.is_operator(&["**"]) {
            left.push(self.take()?);
            left.append(&self.value(true)?);
            left.check()?;
        }
        Ok(left)
    }

    /// Rewrites a value with its sign, attributes, subscripts and calls, and with filters and tests if it
    /// `is_filtered`.
    fn value(&mut self, is_filtered: bool) -> Result<Expression, String> {
        let mut signs = Expression::default();
        while self.is_operator(&["-"]) {
            signs.push(self.take()?);
            signs.depth += 1;
            signs.check()?;
        }
        let first = self.take()?;
        let mut value = Expression::default();
        match first.kind {
            TokenKind::Operator => value = self.literal(first)?,
            TokenKind::Text => value.text = format!("{}{}", first.space, decoded(first.text)?),
            TokenKind::Name | TokenKind::Number => value.push(first),
        }
        // Texts that follow each other are one text.
        while first.kind == TokenKind::Text
            && let Some(next) = self.peek().filter(|next| next.kind == TokenKind::Text)
        {
            self.next += 1;
            value.text.push_str(next.space);
            value.text.push_str(&decoded(next.text)?);
        }
        self.postfix(&mut value)?;
        signs.text.push_str(&value.text);
        signs.depth += value.depth;
        if is_filtered {
            self.filters(&mut signs)?;
        }
        Ok(signs)
    }

    /// Rewrites a list, a tuple, a table, or an expression in brackets.
    fn literal(&mut self, open: Token<'s>) -> Result<Expression, String> {
        let (start, is_list) = (self.next, open.text != "(" || self.has(","));
        let literal = if open.text == "{" { self.table(open)? } else { self.bracket(open)? };
        Ok(if is_list && !self.is_constant(start) { Expression::call(MADE, &[literal]) } else { literal })
    }

    /// Rewrites a table.
    fn table(&mut self, open: Token<'s>) -> Result<Expression, String> {
        self.open()?;
        let mut all = Expression::default();
        all.push(open);
        while !self.is("}") {
            let start = self.next;
            let key = self.sequence(&[":", "}"])?;
            all.append(&if self.is_constant(start) { key } else { key.given_to(TABLE_KEY) });
            if self.is(":") {
                all.push(self.take()?);
                let value = self.sequence(&[",", "}"])?;
                all.append(&value);
            }
            if self.is(",") {
                all.push(self.take()?);
            }
            if self.peek().is_none() {
                break;
            }
        }
        all.push(self.take()?);
        self.nesting -= 1;
        Ok(all)
    }

    /// Rewrites the subscript of a value behind its bracket.
    fn subscript(&mut self, value: Expression, open: Token<'s>) -> Result<Expression, String> {
        let start = self.next;
        let is_slice = self.has(":");
        let is_name = self.peek().is_some_and(|token| token.kind == TokenKind::Text);
        let mut item = Expression::default();
        self.open()?;
        let index = self.sequence(&["]"])?;
        let close = self.take()?;
        self.nesting -= 1;
        let index = if is_slice || self.is_constant(start) { index } else { index.given_to(KEY) };
        let function = if is_slice { SLICED } else { INDEXED };
        item.append(&if is_name && !is_slice { value } else { Expression::call(function, &[value]) });
        item.push(open);
        item.append(&index);
        item.push(close);
        Ok(item)
    }

    /// Rewrites the arguments of `loop.changed`, which compares them; `cycle` needs arguments.
    fn arguments(&mut self, method: &str, open: Token<'s>) -> Result<Expression, String> {
        let is_empty = self.is(")") || self.is("*") || self.is("**");
        if method == "cycle" && is_empty {
            return Err("`cycle` needs values".to_owned());
        }
        let arguments = self.bracket(open)?;
        if method != "changed" {
            return Ok(arguments);
        }
        let text = format!("({PAID}{})", arguments.text);
        Ok(Expression { text, depth: arguments.depth + 1 })
    }

    /// Rewrites what is between brackets.
    fn bracket(&mut self, open: Token<'s>) -> Result<Expression, String> {
        let close = match open.text {
            "(" => ")",
            "[" => "]",
            "{" => "}",
            other => return Err(format!("unexpected `{other}`")),
        };
        self.open()?;
        let mut all = Expression::default();
        all.push(open);
        all.append(&self.sequence(&[close])?);
        all.push(self.take()?);
        self.nesting -= 1;
        Ok(all)
    }

    /// Rewrites the attributes, subscripts and calls of a value.
    fn postfix(&mut self, value: &mut Expression) -> Result<(), String> {
        let mut method = "";
        while self.is_operator(&[".", "[", "("]) {
            let token = self.take()?;
            if token.text != "." {
                let text = self.tokens.get(self.next).copied().filter(|_| token.text == "[");
                let name = text.filter(|text| text.kind == TokenKind::Text && text.text.len() > 2);
                let name = name.map(|name| &name.text[1..name.text.len() - 1]);
                let is_closed = self.tokens.get(self.next + 1).is_some_and(|token| token.is("]"));
                if let Some(name) = name.filter(|name| is_closed && METHODS.contains(name)) {
                    self.next += 2;
                    *value = Expression::call(ITEM, &[std::mem::take(value), Expression::constant(name)]);
                } else if token.text == "[" {
                    *value = self.subscript(std::mem::take(value), token)?;
                } else {
                    value.append(&self.arguments(method, token)?);
                }
                method = "";
                value.check()?;
                continue;
            }
            let name = self.take()?;
            method = name.text;
            if METHODS.contains(&name.text) && !self.is_operator(&["("]) {
                let name = Expression::constant(name.text);
                *value = Expression::call(ATTRIBUTE, &[std::mem::take(value), name]);
            } else {
                value.push(token);
                value.push(name);
                value.depth += 1;
            }
            value.check()?;
        }
        Ok(())
    }

    /// Rewrites the filters and tests of a value.
    fn filters(&mut self, value: &mut Expression) -> Result<(), String> {
        while self.is_operator(&["|"]) || self.is("is") {
            value.check()?;
            let token = self.take()?;
            value.push(token);
            if token.text == "is" && self.is("not") {
                value.push(self.take()?);
                value.depth += 1;
            }
            value.push(self.take()?);
            while self.is_operator(&["."]) {
                value.push(self.take()?);
                value.push(self.take()?);
            }
            value.depth += 1;
            if self.is_operator(&["("]) {
                let open = self.take()?;
                value.append(&self.bracket(open)?);
            } else if token.text == "is" && self.is_argument() {
                value.append(&self.value(false)?);
            }
        }
        Ok(())
    }
}
