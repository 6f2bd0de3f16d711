//! Weights of layers as a user writes them: decimal numbers, with exact arithmetic.
//!
//! A partition compares whole numbers. All weights of a list are therefore multiplied by the same power of
//! ten: `1.5,2` becomes `15,20`. Sums are divided by that power again.

use pipewright_document::shortened;
use pipewright_planning::failure::Failure;
use serde::{Serialize, Serializer};

/// Decimal numbers, stored as whole numbers with a common number of decimals.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    /// The numbers, multiplied by ten to the power of `decimals`.
    pub(crate) scaled: Vec<u64>,
    decimals: usize,
}

/// A sum of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sum {
    scaled: u128,
    decimals: usize,
}

impl Weights {
    /// Reads the weights of all layers.
    ///
    /// # Errors
    /// Fails at the first weight that is not a number of at least 0, or that has too many digits.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, Failure> {
        let refused = |index: usize, why: &str| {
            let (text, position, count) = (shortened(&texts[index]), index + 1, texts.len());
            Failure::input(format!("--weights: weight {position} of {count}, `{text}`, {why}"))
        };
        let parts = texts.iter().enumerate().map(|(index, text)| {
            split(text).ok_or_else(|| match text.trim().strip_prefix('-').and_then(split) {
                Some(_) => refused(index, "is negative; write 0 or more"),
                None => refused(index, "is not a decimal number; write one such as 2 or 1.5"),
            })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let decimals = parts.iter().map(|(_, fraction)| fraction.len()).max().unwrap_or(0);
        let scaled = parts.iter().enumerate().map(|(index, (whole, fraction))| {
            let digits = format!("{whole}{fraction:0<decimals$}");
            // Leading zeros are not counted.
            digits.trim_start_matches('0').parse().or_else(|_| {
                if digits.contains(|c| c != '0') {
                    Err(refused(
                        index,
                        &format!(
                            "has too many digits: with {decimals} decimals, weights reach {}",
                            largest(decimals)
                        ),
                    ))
                } else {
                    Ok(0)
                }
            })
        });
        Ok(Self { scaled: scaled.collect::<Result<_, _>>()?, decimals })
    }

    /// Returns a sum of these weights, given the sum of the scaled weights.
    pub(crate) fn sum(&self, scaled: u128) -> Sum {
        Sum { scaled, decimals: self.decimals }
    }
}

/// Returns the digits before and after the decimal point of a number without sign or exponent. Zeros at the
/// end of the fraction are dropped.
fn split(text: &str) -> Option<(&str, &str)> {
    let (whole, fraction) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    let are_digits = [whole, fraction].iter().all(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let has_digits = !whole.is_empty() || !fraction.is_empty();
    (are_digits && has_digits).then(|| (whole, fraction.trim_end_matches('0')))
}

/// Returns the largest weight with this many decimals.
fn largest(decimals: usize) -> String {
    Sum { scaled: u128::from(u64::MAX), decimals }.to_string()
}

impl std::fmt::Display for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self.decimals + 1;
        let digits = format!("{:0>width$}", self.scaled);
        let (whole, fraction) = digits.split_at(digits.len() - self.decimals);
        match fraction.trim_end_matches('0') {
            "" => f.write_str(whole),
            fraction => write!(f, "{whole}.{fraction}"),
        }
    }
}

impl Serialize for Sum {
    /// Writes a whole number if the sum is whole, otherwise the nearest number that JSON readers can
    /// represent.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        match text.parse::<u128>() {
            Ok(whole) => serializer.serialize_u128(whole),
            Err(_) => serializer.serialize_f64(text.parse().map_err(serde::ser::Error::custom)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(texts: &[&str]) -> Result<Weights, String> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        Weights::parse(&texts).map_err(|failure| failure.text())
    }

    fn check(texts: &[&str], scaled: &[u64], decimals: usize) {
        assert_eq!(parse(texts), Ok(Weights { scaled: scaled.to_vec(), decimals }), "{texts:?}");
    }

    #[test]
    fn decimals_are_exact() {
        check(&["1", "0", "18446744073709551615"], &[1, 0, u64::MAX], 0);
        check(&["1.5", "2"], &[15, 20], 1);
        check(&["0.1", ".25", "3."], &[10, 25, 300], 2);
        check(&["1.50", "2.0"], &[15, 20], 1);
        check(&["007", "0.0"], &[7, 0], 0);
    }

    #[test]
    fn sums_are_printed_as_they_are_written() {
        let check = |scaled: u128, decimals: usize, expected: &str| {
            let sum = Sum { scaled, decimals };
            assert_eq!(sum.to_string(), expected);
            assert_eq!(serde_json::to_string(&sum).ok().as_deref(), Some(expected));
        };
        check(35, 1, "3.5");
        check(30, 1, "3");
        check(5, 2, "0.05");
        check(0, 3, "0");
        check(u128::from(u64::MAX) * 2, 0, "36893488147419103230");
    }

    #[test]
    fn absurd_weights_are_refused_by_position() {
        let check = |texts: &[&str], message: &str| {
            assert_eq!(parse(texts), Err(format!("--weights: {message}")), "{texts:?}");
        };
        check(&["1", "-1.5"], "weight 2 of 2, `-1.5`, is negative; write 0 or more");
        for text in ["nan", "inf", "-inf", "1e3", "", ".", "1.5.2", "+1", "0x10", "1_000"] {
            let words = "is not a decimal number; write one such as 2 or 1.5";
            check(&[text, "1"], &format!("weight 1 of 2, `{text}`, {words}"));
        }
        check(
            &["0.001", "1000000000000000000"],
            "weight 2 of 2, `1000000000000000000`, has too many digits: with 3 decimals, weights reach \
             18446744073709551.615",
        );
    }
}
