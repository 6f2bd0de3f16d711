//! Puts examples into rows.

/// Puts examples of these sizes into rows, each into the first one with enough free places. A tree of the
/// most free places in a row finds it in logarithmic time.
pub(crate) fn first_fit(sizes: impl ExactSizeIterator<Item = usize>, seq_len: usize) -> Vec<Vec<u32>> {
    let leaves = sizes.len().next_power_of_two();
    // The node `n` has the children `2 n` and `2 n + 1`; the leaves are the rows.
    let mut free = vec![seq_len; 2 * leaves];
    let mut rows: Vec<Vec<u32>> = Vec::new();
    for (example, size) in (0..).zip(sizes) {
        let mut node = 1;
        while node < leaves {
            node = if free[2 * node] >= size { 2 * node } else { 2 * node + 1 };
        }
        let row = node - leaves;
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(example);
        free[node] -= size;
        while node > 1 {
            node /= 2;
            free[node] = free[2 * node].max(free[2 * node + 1]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_example_goes_into_the_first_row_with_room() {
        let check = |sizes: &[usize], expected: &[&[u32]]| {
            assert_eq!(first_fit(sizes.iter().copied(), 10), expected, "{sizes:?}");
        };
        check(&[], &[]);
        check(&[10], &[&[0]]);
        check(&[6, 5, 4, 5, 3], &[&[0, 2], &[1, 3], &[4]]);
        check(&[9, 9, 1, 1, 1], &[&[0, 2], &[1, 3], &[4]]);
    }
}
