//! The ranges of numbers.

/// The numbers that a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Above 0.
    Positive,
    /// 0 and above.
    NonNegative,
    /// From 0 to below 1.
    Fraction,
    /// Above 0 and below 1.
    Share,
}

impl Bound {
    /// Returns whether the range has the number.
    pub fn holds(self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Self::Positive => number > 0.0,
                Self::NonNegative => number >= 0.0,
                Self::Fraction => (0.0..1.0).contains(&number),
                Self::Share => 0.0 < number && number < 1.0,
            }
    }

    /// Returns the name of the range, as tables of keys have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Positive => "positive",
            Self::NonNegative => "non-negative",
            Self::Fraction => "fraction",
            Self::Share => "share",
        }
    }

    /// Returns the range in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Positive => "a finite number above 0",
            Self::NonNegative => "a finite number, 0 or above",
            Self::Fraction => "a number from 0 to below 1",
            Self::Share => "a number above 0 and below 1",
        }
    }

    /// Returns the range in words if it does not have the number, or does not have it after rounding to
    /// single precision, in which the optimizer computes.
    pub fn refuses_single(self, number: f64) -> Option<String> {
        let rounded = number as f32;
        if !self.holds(number) {
            Some(self.words().to_owned())
        } else if !self.holds(rounded.into()) {
            Some(format!("{} in single precision, which rounds {number:?} to {rounded},", self.words()))
        } else {
            None
        }
    }
}
