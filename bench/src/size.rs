//! The size of the pipeline that a bench measures.

/// The options of the size, which most benches share.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Size {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    pub(crate) ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    pub(crate) microbatches: u32,
}
