//! The data in the header of a run: model, parameters, ranks, stages, schedule and device.

/// The data in the header of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Overview {
    /// The model's architecture.
    pub(crate) model: String,
    /// The number of the model's layers, including the embedding and the head.
    pub(crate) layers: usize,
    /// The number of the model's parameters.
    pub(crate) parameters: u64,
    /// The number of ranks of all replicas together.
    pub(crate) ranks: u32,
    /// The number of replicas of the pipeline.
    pub(crate) replicas: u32,
    /// The number of stages of one replica.
    pub(crate) stages: u32,
    /// The schedule's name, or the name of its file.
    pub(crate) schedule: String,
    /// Whether the schedule lets weight gradients wait while other microbatches compute, as zero-bubble
    /// schedules do.
    pub(crate) defers_weights: bool,
    /// The number of microbatches per step, over all replicas.
    pub(crate) microbatches: u32,
    /// The device that the ranks compute on.
    pub(crate) device: String,
    /// The loss, in nats, of a model that predicts each token by its frequency in the data.
    pub(crate) frequency_loss: f64,
}
