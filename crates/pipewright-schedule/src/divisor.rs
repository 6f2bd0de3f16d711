//! The divisors of whole numbers.

/// Returns the greatest number that divides both, by Euclid's algorithm; the other number if one is 0.
pub fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// Returns the divisors of a number in ascending order.
pub fn divisors(number: u32) -> Vec<u32> {
    let low = (1..=number.isqrt()).filter(|&divisor| number.is_multiple_of(divisor));
    let mut divisors: Vec<u32> = low.collect();
    let high: Vec<u32> = divisors.iter().rev().map(|divisor| number / divisor).collect();
    divisors.extend(high);
    divisors.dedup();
    divisors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_ascend() {
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(16), [1, 2, 4, 8, 16]);
        assert_eq!(divisors(126), [1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126]);
        assert_eq!(divisors(u32::MAX).len(), 32);
    }

    #[test]
    fn the_divisor_divides_both() {
        for (one, other, expected) in [(12, 18, 6), (18, 12, 6), (7, 5, 1), (0, 4, 4), (4, 0, 4), (0, 0, 0)] {
            assert_eq!(greatest_common_divisor(one, other), expected, "{one}, {other}");
        }
        assert_eq!(greatest_common_divisor(u64::MAX, u64::MAX), u64::MAX);
    }
}
