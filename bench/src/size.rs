//! How large the pipeline is that a bench measures.

/// What most benches ask for on the command line.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Size {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    pub(crate) ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    pub(crate) microbatches: u32,
}
