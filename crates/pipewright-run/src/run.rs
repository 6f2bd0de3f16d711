//! [`Run`]: a training run, from its first step or from a checkpoint.

use std::path::PathBuf;
use std::sync::Arc;

use pipewright_models::CutModel;

use crate::error::RunError;
use crate::observer::{Observer, Silent};
use crate::recovery::Attempts;
pub use crate::run_attempt::Chosen;
use crate::run_attempt::Parts;
use crate::run_model::RunModel;
use crate::settings::{Loaded, Settings};
use crate::training::process_group::ProcessGroup;

/// A training run in a folder, with its metrics, checkpoints, timelines, evaluations and restarts.
///
/// The model may be one of your own: here two layers, which predict a byte from the byte before it.
///
/// ```
/// use std::ops::Range;
///
/// use burn::module::Module;
/// use burn::nn::{EmbeddingConfig, LinearConfig};
/// use burn::tensor::{Int, Tensor};
/// use pipewright::nn::{Embedding, Linear, TensorParallel, cross_entropy};
/// use pipewright::stage::{Stage, StageContext, StageModule};
/// use pipewright_models::{InitialParameters, ParameterKind, ParameterSpec, Place};
/// use pipewright_run::run_record::metrics;
/// use pipewright_run::training::load::load_settings;
/// use pipewright_run::{Run, RunError, RunModel};
/// use pipewright_schedule::{LayerDesc, ModelDesc};
///
/// const BYTES: usize = 256;
/// const HIDDEN: usize = 8;
///
/// #[derive(Module, Debug)]
/// struct Bytes {
///     embedding: Embedding,
/// }
///
/// impl StageModule for Bytes {
///     type Input = Tensor<2, Int>;
///     type Output = Tensor<3>;
///
///     fn forward(&self, bytes: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
///         self.embedding.forward(bytes)
///     }
/// }
///
/// #[derive(Module, Debug)]
/// struct Head {
///     linear: Linear,
/// }
///
/// impl StageModule for Head {
///     type Input = Tensor<3>;
///     type Output = Tensor<3>;
///
///     fn forward(&self, hidden: Tensor<3>, _context: &StageContext) -> Tensor<3> {
///         self.linear.forward(hidden)
///     }
/// }
///
/// struct NextByte;
///
/// impl RunModel for NextByte {
///     fn to_json(&self) -> serde_json::Value {
///         serde_json::json!({ "model_type": "next_byte", "hidden": HIDDEN })
///     }
///
///     fn describe(&self, _tokens: usize) -> ModelDesc {
///         let layer = |path: &str| LayerDesc {
///             path: path.to_owned(),
///             kind: path.to_owned(),
///             parameters: (BYTES * HIDDEN) as u64,
///             weight: 1,
///             ..LayerDesc::default()
///         };
///         ModelDesc { layers: vec![layer("embedding"), layer("linear")] }
///     }
///
///     fn outline(&self, layers: Range<usize>, _: &TensorParallel) -> Result<Vec<ParameterSpec>, RunError> {
///         let spec = |path: &str, shape, kind| ParameterSpec::new(path.to_owned(), shape, kind);
///         let all = [
///             spec("embedding.weight", vec![BYTES, HIDDEN], ParameterKind::Table),
///             spec("linear.weight", vec![HIDDEN, BYTES], ParameterKind::Matrix),
///         ];
///         Ok(all[layers].to_vec())
///     }
///
///     fn stage(&self, layers: Range<usize>, _: &InitialParameters, place: Place) -> Result<Stage, String> {
///         let loss = |logits: Tensor<3>, next: Tensor<2, Int>| {
///             cross_entropy(logits.flatten(0, 1), next.flatten(0, 1))
///         };
///         match (layers.start, layers.end) {
///             (0, 1) => {
///                 let embedding = EmbeddingConfig::new(BYTES, HIDDEN).init(&place.device).into();
///                 Ok(Stage::new(Bytes { embedding }))
///             }
///             (1, 2) => {
///                 let linear = LinearConfig::new(HIDDEN, BYTES).with_bias(false).init(&place.device).into();
///                 Ok(Stage::with_loss(Head { linear }, loss))
///             }
///             _ => Err("the model has two stages of one layer".to_owned()),
///         }
///     }
///
///     fn vocab_size(&self) -> usize {
///         BYTES
///     }
///
///     fn unit(&self) -> &str {
///         "bytes"
///     }
/// }
///
/// let scratch = tempfile::tempdir()?;
/// let folder = scratch.path().join("run");
/// let settings = [
///     "pipeline.ranks=2".to_owned(),
///     "pipeline.microbatches=2".to_owned(),
///     "data.seq_len=16".to_owned(),
///     "run.steps=2".to_owned(),
///     format!("run.out={:?}", folder),
/// ];
/// Run::new(load_settings(None, &settings)?).model(NextByte).train()?;
///
/// // The folder has all that the run needs to continue.
/// Run::reopen(&folder).set(["run.steps=4"]).model(NextByte).train()?;
/// assert_eq!(metrics(&folder)?.len(), 4);
/// assert_eq!(metrics(&folder)?[0].unit.as_deref(), Some("bytes"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Run {
    source: Source,
    parts: Parts,
}

/// Where the settings and the state of a run come from.
enum Source {
    New(Box<dyn FnOnce() -> Result<Loaded, RunError>>),
    Folder { path: PathBuf, set: Vec<String> },
}

impl Run {
    /// Returns a run with these settings.
    pub fn new(settings: Loaded) -> Self {
        Self::load(|| Ok(settings))
    }

    /// Returns a run that loads its settings when it starts. If several processes make up the run, each loads its own
    /// when all have joined, and an error in one of them ends all.
    pub fn load(settings: impl FnOnce() -> Result<Loaded, RunError> + 'static) -> Self {
        Self::of(Source::New(Box::new(settings)))
    }

    /// Returns the run in a folder, which continues from its newest checkpoint. The path may also name a checkpoint of
    /// the run.
    pub fn reopen(folder: impl Into<PathBuf>) -> Self {
        Self::of(Source::Folder { path: folder.into(), set: Vec::new() })
    }

    fn of(source: Source) -> Self {
        let parts = Parts { model: None, planner: None, observer: Arc::new(Silent) };
        Self { source, parts }
    }

    /// Overrides stored settings of a reopened run with texts such as `run.steps=8`.
    pub fn set(mut self, texts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        if let Source::Folder { set, .. } = &mut self.source {
            set.extend(texts.into_iter().map(Into::into));
        }
        self
    }

    /// Trains `model` in place of the model that the settings name.
    pub fn model(mut self, model: impl RunModel + 'static) -> Self {
        self.parts.model = Some(Arc::new(model));
        self
    }

    /// Reports to `observer`.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.parts.observer = observer;
        self
    }

    /// Plans runs whose settings have `pipeline.schedule = "auto"`. Without a planner they are refused.
    pub fn planner(
        mut self,
        planner: impl Fn(Settings, &CutModel, &mut ProcessGroup) -> Result<Chosen, RunError> + 'static,
    ) -> Self {
        self.parts.planner = Some(Box::new(planner));
        self
    }

    /// Trains until the last step, until the validation loss no longer falls, or until the observer requests the end.
    /// After a fault it restarts from its newest state, as often as `run.restarts` allows.
    ///
    /// # Errors
    /// When the settings, the model, the data or the folder are wrong, when a rank fails, or when the end was
    /// requested ([`ErrorKind::Interrupted`](crate::error::ErrorKind::Interrupted)).
    pub fn train(self) -> Result<(), RunError> {
        let Self { source, parts } = self;
        let mut processes = ProcessGroup::gather(parts.observer.clone())?;
        let mut attempts = processes.settle(Attempts::new())?;
        let mut outcome = match source {
            Source::New(load) => parts.start(load, &mut processes, &mut attempts),
            Source::Folder { path, set } => parts.resume(&path, &set, &mut processes, &mut attempts),
        };
        while let Err(error) = outcome {
            match attempts.after(error, |sentence| parts.observer.note(sentence)) {
                Ok(folder) => outcome = parts.resume(&folder, &[], &mut processes, &mut attempts),
                Err(error) => return processes.settle(Err(error)),
            }
        }
        processes.settle(outcome)
    }
}
