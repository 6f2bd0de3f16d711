//! The blocks of a result that one thread computes at a time, in panels of the operands.

use std::ops::Range;

/// Bytes of a packed right operand: they stay in a second-level cache while they meet all rows of the left operand.
const GROUP_BYTES: usize = 256 * 1024;

/// Panels of rows whose products take about ten times as long as packing the columns, or five times with AMX.
const LEAST_ROWS: usize = 8;

/// Returns the panels of columns of this size that stay in a second-level cache, at least one.
pub(crate) fn panels_in_cache(panel_bytes: usize) -> usize {
    (GROUP_BYTES / panel_bytes.max(1)).max(1)
}

/// A part of the result, in panels of the operands.
pub(crate) struct Block {
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

/// Returns the blocks of a result, of at most `most` panels of columns. A thread packs the columns of a block for this block
/// alone.
pub(crate) fn blocks(
    [row_panels, panels]: [usize; 2],
    most: usize,
    threads: usize,
) -> impl Iterator<Item = Block> {
    // Several blocks for each thread, so that threads that are interrupted compute fewer.
    let wanted = if threads == 1 { 1 } else { 4 * threads };
    let columns = most.min(panels.div_ceil(wanted));
    let groups = panels.div_ceil(columns);
    // Each part of the rows packs the columns again. So rows are cut into short parts only if a thread
    // would have no block otherwise.
    let parts = wanted.div_ceil(groups).min(row_panels / LEAST_ROWS).max(threads.div_ceil(groups));
    let rows = row_panels.div_ceil(parts);
    let ranges = |count: usize, size: usize| (0..count).step_by(size).map(move |i| i..count.min(i + size));
    ranges(panels, columns).flat_map(move |columns| {
        ranges(row_panels, rows).map(move |rows| Block { rows, columns: columns.clone() })
    })
}
