//! Sums of hashes of the elements of a tensor, from which fingerprints are made. A sum has no order, so parts of a tensor can
//! be added anywhere.

use multiversion::multiversion;

/// The summand of SplitMix64 for each number: an odd number close to 2^64 divided by the golden ratio.
pub const INDEX: u64 = 0x9e37_79b9_7f4a_7c15;
/// Another odd number with bits that look random.
const BITS: u64 = 0xd6e8_feb8_6659_fd93;

/// Returns the sum over consecutive elements of `size` bytes, modulo 2^64; elements of other sizes than 1, 2, 4 and 8 count
/// byte by byte. `first` is the index of the first one. Each element is mixed with its index and with `key`.
#[multiversion(targets = "simd")]
pub fn hash_sum(key: u64, first: u64, bytes: &[u8], size: usize) -> u64 {
    match size {
        4 => sum_of(key, first, bytes, |bits: [u8; 4]| u32::from_le_bytes(bits).into()),
        2 => sum_of(key, first, bytes, |bits: [u8; 2]| u16::from_le_bytes(bits).into()),
        8 => sum_of(key, first, bytes, u64::from_le_bytes),
        _ => sum_of(key, first, bytes, |bits: [u8; 1]| bits[0].into()),
    }
}

#[inline(always)]
fn sum_of<const N: usize>(key: u64, first: u64, bytes: &[u8], bits_of: impl Fn([u8; N]) -> u64) -> u64 {
    let mut place = key.wrapping_add(first.wrapping_mul(INDEX));
    let mut sum = 0u64;
    for bits in bytes.as_chunks::<N>().0 {
        sum = sum.wrapping_add(mixed(place ^ bits_of(*bits).wrapping_mul(BITS)));
        place = place.wrapping_add(INDEX);
    }
    sum
}

/// Returns the number after the last step of SplitMix64 (Steele, Lea and Flood, 2014): every bit of `bits` matters.
#[inline(always)]
pub fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of any width add what single elements add, and the values of the hash stay as they are.
    #[test]
    fn a_sum_has_the_terms_of_its_elements() {
        let bytes: Vec<u8> = (0..8 * 67).map(|index| (index * 37 % 251) as u8).collect();
        for size in [1, 2, 4, 8] {
            for count in [1, 2, 7, 8, 16, 31, 67] {
                let bytes = &bytes[..count * size];
                let terms = bytes.chunks(size).enumerate().map(|(index, bits)| {
                    let bits = bits.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
                    let place = 3u64.wrapping_add((11 + index as u64).wrapping_mul(INDEX));
                    mixed(place ^ bits.wrapping_mul(BITS))
                });
                assert_eq!(hash_sum(3, 11, bytes, size), terms.fold(0, u64::wrapping_add), "{size} {count}");
            }
        }
        // The first number of SplitMix64 with the seed 0.
        assert_eq!(mixed(INDEX), 0xe220_a839_7b1d_cdaf);
    }
}
