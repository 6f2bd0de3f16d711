//! The largest schedule that is generated.

/// The largest number of cells of a generated schedule, idle cells included. Lowering about triples it, and
/// the result must fit into the memory of a large machine.
pub const MAX_COMPUTE_ACTIONS: u128 = 1 << 28;
