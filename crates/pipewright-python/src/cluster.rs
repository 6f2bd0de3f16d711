//! Predicts training steps on clusters, and lists what `pipewright_pp.torch` measures for such predictions.

use pipewright_cluster::catalogue;
use pipewright_cluster::elementwise::kernel_shapes;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{PredictError, Prediction, optimizer_traffic, predict as predict_step};
use pipewright_cluster::setting::Setting;
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::held_bytes::HeldBytes;
use pipewright_shapes::model::{Attention, Latent, Mixer};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;

use crate::cluster_input::{check, layout_of, machine_of, model_of, refused};
use crate::interrupt::interruptible;

/// The predicted time and memory of a training step.
#[pyclass(frozen, module = "pipewright_pp.cluster", name = "Prediction")]
#[derive(Debug)]
pub(crate) struct PyPrediction(pub(crate) Prediction);

#[pymethods]
impl PyPrediction {
    /// Seconds of a step.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// The seconds of the busiest rank by what they are spent on. Their sum is `seconds`. Communication counts only as
    /// far as it is exposed.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (prediction, parts) = (&self.0, &self.0.parts);
        let dict = PyDict::new(py);
        for (name, seconds) in [
            ("products", parts.products),
            ("attention", parts.attention),
            ("elementwise", parts.elementwise),
            ("launches", parts.launches),
            ("tensor", parts.tensor),
            ("experts", parts.experts),
            ("context", parts.context),
            ("offload", parts.offload),
            ("data", parts.data),
            ("bubble", prediction.bubble),
            ("optimizer", prediction.optimizer),
        ] {
            dict.set_item(name, seconds)?;
        }
        Ok(dict)
    }

    /// The bytes of each rank of a pipeline.
    #[getter]
    fn memory_bytes(&self) -> Vec<u64> {
        self.0.memory.iter().map(|memory| memory.total() as u64).collect()
    }

    /// The bytes of each rank of a pipeline by part: `parameters`, `gradients`, `optimizer`, `activations` (what forwards
    /// keep for backwards, or before an update what undoes it, if that is more), `temporary` (logits and what is
    /// computed again) and `buffers` (of messages and collectives). The sum of a rank is its number in `memory_bytes`,
    /// up to rounding.
    #[getter]
    fn memory_parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let of_rank = |held: &HeldBytes<f64>| {
            let dict = PyDict::new(py);
            for (part, bytes) in held.named() {
                let bytes = if part == "activations" { bytes.max(held.undo) } else { bytes };
                dict.set_item(part, bytes as u64)?;
            }
            Ok(dict)
        };
        self.0.memory.iter().map(of_rank).collect()
    }

    /// The blocks of each stage of the pipeline.
    #[getter]
    fn blocks(&self) -> Vec<usize> {
        self.0.blocks.clone()
    }

    /// The seconds in which each rank of the pipeline waits for the others and their messages.
    #[getter]
    fn waits(&self) -> Vec<f64> {
        self.0.waits.clone()
    }

    /// Tokens per second of each GPU.
    #[getter]
    fn tokens_per_s_per_gpu(&self) -> f64 {
        self.0.tokens_per_gpu
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let peak = self.0.peak_memory() / 2f64.powi(30);
        format!("<Prediction of {:.4} s per step and {peak:.2} GiB>", self.0.seconds)
    }
}

/// Predicts a training step of a model on a cluster.
///
/// Args:
///     config: The model's `config.json`: its path, its folder, its text, or the same keys as a dictionary.
///     machine: The name of a machine, as `pipewright clusters` lists them, or the path of a cluster file, which contains
///         a slash or ends in `.toml`.
///     layout: The keys of a published run's configuration as a dictionary, as a text in TOML or JSON, or as the path of
///         such a file. `gpus`, `mbs` (rows of a microbatch), `gbs` (rows of a step),
///         `seq` and `precision` are needed; others are `tp`, `pp`, `vp`, `cp`, `ep`, `etp`, `schedule`, `recompute`,
///         `data_parallel`, `sequence_parallel`, `attention` and `compiled`.
///
/// Raises:
///     ClusterError: If the model, the machine or the layout has a mistake, with every problem as `problems`.
///     OSError: If a file cannot be read.
#[pyfunction]
pub(crate) fn predict(
    py: Python<'_>,
    config: &Bound<'_, PyAny>,
    machine: &Bound<'_, PyAny>,
    layout: &Bound<'_, PyAny>,
) -> PyResult<PyPrediction> {
    let (model, layout) = (model_of(config)?, layout_of(layout)?);
    check(py, &layout, &model)?;
    let machine = machine_of(machine)?;
    let predicted = interruptible(py, move |_| {
        let setting = Setting { model: &model, layout: &layout, machine: &machine };
        predict_step(&setting, &mut Programs::default())
    })?;
    let place = |error: &PredictError| match error {
        PredictError::NoHostLink(_) => "",
        PredictError::Layout(_) | PredictError::Pipeline(_) => "layout: ",
    };
    Ok(PyPrediction(
        predicted.map_err(|error| refused(py, vec![place(&error).to_owned() + &with_causes(&error)]))?,
    ))
}

/// Returns the products, the attention and the kernels of a rank, as `pipewright_pp.torch.measure_machine` measures them.
///
/// Args:
///     config, layout: As for `predict`.
///
/// Raises:
///     ClusterError, OSError: Like `predict`.
#[pyfunction]
pub(crate) fn shapes<'py>(
    py: Python<'py>,
    config: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (model, layout) = (&model_of(config)?, &layout_of(layout)?);
    check(py, layout, model)?;
    // The shapes depend on no figure of the machine.
    let setting = Setting { model, layout, machine: &catalogue::machines()[0] };
    let shapes = setting.product_shapes();
    let products =
        shapes.chunks(3).flat_map(|of_matrix| of_matrix.iter().zip(["forward", "input", "weight"]));
    let products = products.map(|((product, precision), role)| {
        let [rows, columns, inner] = [product.rows, product.columns, product.inner].map(f64::round);
        json!({"rows": rows, "columns": columns, "inner": inner, "precision": precision.name(), "role": role})
    });
    let kernels = kernel_shapes(&setting).into_iter().map(|shape| {
        json!({"kind": shape.kernel.name(), "width": shape.width.round(), "forward_bytes": shape.bytes.forward,
            "backward_bytes": shape.bytes.backward})
    });
    let tensor = u64::from(layout.tensor);
    let attention = model.blocks.iter().find_map(|block| match block.with_copies(layout.tensor).mixer {
        Mixer::Attention(attention) => Some(json!({"rows": layout.microbatch, "sequence": layout.sequence,
            "heads": attention.heads / tensor, "key_value_heads": attention.key_value_heads / tensor,
            "head_size": attention.head_size})),
        _ => None,
    });
    // The parts of a head that the kernels of positions read and write.
    let rotary = model.blocks.iter().find_map(|block| match block.mixer {
        Mixer::Attention(Attention { rotary_size, .. }) if rotary_size > 0 => {
            Some(json!({"plain_size": 0, "rotary_size": rotary_size, "value_size": 0}))
        }
        Mixer::Latent(Latent { plain_size, rotary_size, value_size, .. }) => {
            Some(json!({"plain_size": plain_size, "rotary_size": rotary_size, "value_size": value_size}))
        }
        _ => None,
    });
    let blocks = model.blocks.len().div_ceil(layout.pipeline as usize);
    let all = json!({"products": products.collect::<Vec<_>>(), "kernels": kernels.collect::<Vec<_>>(),
        "scores": attention, "rotary": rotary, "blocks": blocks, "tokens": layout.tokens(),
        "vocabulary": model.vocabulary, "precision": layout.precision.name(),
        "optimizer_bytes": optimizer_traffic(layout, layout.implementation.optimizer.moments())});
    py.import("json")?.call_method1("loads", (all.to_string(),))
}
