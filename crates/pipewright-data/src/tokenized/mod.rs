//! Files of token ids that are made once from other data files, and read as they are needed.
//!
//! | bytes | content |
//! |---|---|
//! | 0..4096 | the header: magic bytes, version, JSON, and a checksum of these |
//! | 4096.. | the ids, little-endian; after the ids of each example a bit for each of them: it counts in the loss |
//! | then | for each example its number of bytes, in 32 bits |
//! | then | the BLAKE3 hash of each MiB of the content |

pub(crate) mod header;
pub(crate) mod writer;
pub(crate) mod opened;
