//! What a run is, in the words of its header: model, parameters, ranks, stages, schedule and device.

/// What the header of a run says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Overview {
    /// The model's architecture.
    pub(crate) model: String,
    /// The model's layers, embedding and head included.
    pub(crate) layers: usize,
    /// The model's parameters.
    pub(crate) parameters: u64,
    /// Ranks of all replicas.
    pub(crate) ranks: u32,
    /// Replicas of the pipeline.
    pub(crate) replicas: u32,
    /// Stages of one pipeline.
    pub(crate) stages: u32,
    /// The schedule's name, or the name of its file.
    pub(crate) schedule: String,
    /// Microbatches of a step, over all replicas.
    pub(crate) microbatches: u32,
    /// What the ranks compute on.
    pub(crate) device: String,
    /// The loss of guessing each token by its frequency in the data, in nats.
    pub(crate) frequency_loss: f64,
}
