//! The largest schedule that is generated.

/// The largest number of compute actions that is generated, idle cells among them. Lowering about triples it,
/// which must still fit a large machine's memory.
pub const MAX_COMPUTE_ACTIONS: u128 = 1 << 28;
