//! The formulas of the schedules' descriptions, computed.
//!
//! [`Formula`](pipewright_schedule::generate::Formula) describes their form.

/// The numbers in a formula.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// `p`, the number of ranks.
    pub ranks: u32,
    /// `m`, the number of microbatches.
    pub microbatches: u32,
    /// `v`, the number of stages on each rank.
    pub stages_per_rank: u32,
    /// `g`, the group size.
    pub group: u32,
    /// `k`, the number of slices of each microbatch.
    pub slices: u32,
}

/// Returns the value of the formula `text`.
///
/// # Errors
/// When the text is not a formula; the message contains the text.
pub fn value(text: &str, sizes: &Sizes) -> Result<f64, String> {
    let mut reader = Reader { rest: text, sizes };
    let value = reader.sum().map_err(|error| format!("`{text}`: {error}"))?;
    match reader.next() {
        None => Ok(value),
        Some(letter) => Err(format!("`{text}`: unexpected `{letter}`")),
    }
}

/// Returns whether `sizes` meet the conditions `text`.
///
/// # Errors
/// When the text is not a list of conditions; the message contains the text.
pub fn holds(text: &str, sizes: &Sizes) -> Result<bool, String> {
    let mut all = true;
    for condition in text.split(" and ").filter(|condition| !condition.is_empty()) {
        all &= holds_one(condition, sizes)?;
    }
    Ok(all)
}

fn holds_one(text: &str, sizes: &Sizes) -> Result<bool, String> {
    let divides = |number: f64, by: f64| number % by == 0.0;
    if let Some(number) = text.strip_suffix(" is even") {
        return Ok(divides(value(number, sizes)?, 2.0));
    }
    if let Some(number) = text.strip_suffix(" is odd") {
        return Ok(!divides(value(number, sizes)?, 2.0));
    }
    if let Some((number, by)) = text.split_once(" is a multiple of ") {
        return Ok(divides(value(number, sizes)?, value(by, sizes)?));
    }
    if let Some((left, right)) = text.split_once(" >= ") {
        return Ok(value(left, sizes)? >= value(right, sizes)?);
    }
    match text.split_once(" = ") {
        Some((left, right)) => Ok(value(left, sizes)? == value(right, sizes)?),
        None => Err(format!("`{text}` is not a condition")),
    }
}

/// Reads a formula from left to right.
struct Reader<'a> {
    rest: &'a str,
    sizes: &'a Sizes,
}

impl Reader<'_> {
    /// Returns the next character that is not a space.
    fn next(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    /// Skips `letter` if it comes next, and returns whether it did.
    fn skip(&mut self, letter: char) -> bool {
        let is_next = self.next() == Some(letter);
        if is_next {
            self.rest = &self.rest[letter.len_utf8()..];
        }
        is_next
    }

    fn expect(&mut self, letter: char) -> Result<(), String> {
        if self.skip(letter) { Ok(()) } else { Err(format!("expected `{letter}` before `{}`", self.rest)) }
    }

    fn sum(&mut self) -> Result<f64, String> {
        let mut sum = self.product()?;
        loop {
            if self.skip('+') {
                sum += self.product()?;
            } else if self.skip('-') {
                sum -= self.product()?;
            } else {
                return Ok(sum);
            }
        }
    }

    fn product(&mut self) -> Result<f64, String> {
        let mut product = self.factor()?;
        loop {
            if self.skip('/') {
                product /= self.factor()?;
            } else if self.next().is_some_and(|next| next == '(' || next.is_ascii_alphanumeric()) {
                product *= self.factor()?;
            } else {
                return Ok(product);
            }
        }
    }

    fn factor(&mut self) -> Result<f64, String> {
        if self.skip('(') {
            let sum = self.sum()?;
            self.expect(')')?;
            return Ok(sum);
        }
        self.next();
        let end = self.rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        let Sizes { ranks, microbatches, stages_per_rank, group, slices } = *self.sizes;
        match word {
            "p" => Ok(ranks.into()),
            "m" => Ok(microbatches.into()),
            "v" => Ok(stages_per_rank.into()),
            "g" => Ok(group.into()),
            "k" => Ok(slices.into()),
            "min" => self.least(),
            number => number.parse().map_err(|_| format!("`{number}` is neither a number nor a size")),
        }
    }

    /// Reads the two arguments of `min`.
    fn least(&mut self) -> Result<f64, String> {
        self.expect('(')?;
        let first = self.sum()?;
        self.expect(',')?;
        let second = self.sum()?;
        self.expect(')')?;
        Ok(first.min(second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { ranks: 4, microbatches: 10, stages_per_rank: 3, group: 2, slices: 5 };

    #[test]
    fn values() {
        let check = |text: &str, expected: f64| assert_eq!(value(text, &SIZES), Ok(expected), "{text}");
        check("1", 1.0);
        check("p - 1 - g", 1.0);
        check("3 v m + p", 94.0);
        check("(p - 1) / (v m + p - 1)", 3.0 / 33.0);
        check("2 (p - 1) / 3", 2.0);
        check("min(v m, (v - 1) g + p)", 8.0);
        check("(p + k - 1) / k", 8.0 / 5.0);
    }

    #[test]
    fn mistakes_are_named() {
        let check = |text: &str, error: &str| assert_eq!(value(text, &SIZES), Err(error.to_owned()));
        check("q", "`q`: `q` is neither a number nor a size");
        check("(p", "`(p`: expected `)` before ``");
        check("p)", "`p)`: unexpected `)`");
        check("", "``: `` is neither a number nor a size");
    }

    #[test]
    fn conditions() {
        let check = |text: &str, expected: bool| assert_eq!(holds(text, &SIZES), Ok(expected), "{text}");
        check("", true);
        check("p is even and m >= 2 p", true);
        check("p is even and m >= 3 p", false);
        check("p is odd", false);
        check("m is a multiple of p", false);
        check("p - 1 is a multiple of v", true);
        check("g = 2", true);
        assert_eq!(holds("p", &SIZES), Err("`p` is not a condition".to_owned()));
    }
}
