//! The greatest common divisor of whole numbers.

/// Returns the greatest number that divides both, by Euclid's algorithm; the other number if one is 0.
pub fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_divisor_divides_both() {
        for (one, other, expected) in [(12, 18, 6), (18, 12, 6), (7, 5, 1), (0, 4, 4), (4, 0, 4), (0, 0, 0)] {
            assert_eq!(greatest_common_divisor(one, other), expected, "{one}, {other}");
        }
        assert_eq!(greatest_common_divisor(u64::MAX, u64::MAX), u64::MAX);
    }
}
