//! Predicts training steps on clusters, and lists what `pipewright.torch` measures for such predictions.

use std::path::PathBuf;

use pipewright_cluster::catalogue::{self, by_name, from_toml};
use pipewright_cluster::elementwise::kernel_shapes;
use pipewright_cluster::layout::Layout;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{Prediction, optimizer_traffic, predict as predict_step};
use pipewright_cluster::published;
use pipewright_cluster::setting::Setting;
use pipewright_document::{Problem, Problems, Reader, Source, Table};
use pipewright_schedule::error_text::with_causes;
use pipewright_shapes::model::{Mixer, Model};
use pipewright_shapes::reader;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;

use crate::errors::{exception, plain, value_error};
use crate::interrupt::interruptible;
use crate::profile::text_of;

/// The predicted time and memory of a training step.
#[pyclass(frozen, module = "pipewright.cluster", name = "Prediction")]
#[derive(Debug)]
pub(crate) struct PyPrediction(Prediction);

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

    /// Tokens per second of each GPU.
    #[getter]
    fn tokens_per_s_per_gpu(&self) -> f64 {
        self.0.tokens_per_gpu
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
///     layout: The keys of a published run's configuration. `gpus`, `mbs` (rows of a microbatch), `gbs` (rows of a step),
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
    let machine = machine_of(machine)?;
    let predicted = interruptible(py, move |_| {
        let setting = Setting { model: &model, layout: &layout, machine: &machine };
        predict_step(&setting, &mut Programs::default())
    })?;
    Ok(PyPrediction(predicted.map_err(|error| refused(py, vec![with_causes(&error)]))?))
}

/// Returns the products, the attention and the kernels of a rank, as `pipewright.torch.measure_machine` measures them.
///
/// Args:
///     config, layout: As for `predict`.
///
/// Raises:
///     ClusterError, OSError: As `predict`.
#[pyfunction]
pub(crate) fn shapes<'py>(
    py: Python<'py>,
    config: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (model, layout) = (&model_of(config)?, &layout_of(layout)?);
    layout.check(model).map_err(|error| plain(py, "ClusterError", &error))?;
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
    let all = json!({"products": products.collect::<Vec<_>>(), "kernels": kernels.collect::<Vec<_>>(),
        "scores": attention, "blocks": model.blocks.len().div_ceil(layout.pipeline as usize), "tokens": layout.tokens(), "vocabulary": model.vocabulary,
        "precision": layout.precision.name(), "optimizer_bytes": optimizer_traffic(layout)});
    py.import("json")?.call_method1("loads", (all.to_string(),))
}

fn model_of(config: &Bound<'_, PyAny>) -> PyResult<Model> {
    let folder = config.extract::<PathBuf>().ok().filter(|path| path.is_dir());
    let file = folder.map(|folder| folder.join("config.json").into_pyobject(config.py())).transpose()?;
    let (text, path) = text_of("a model", file.as_ref().unwrap_or(config))?;
    let place = path.map_or_else(String::new, |path| format!("{}: ", path.display()));
    let described = reader::read(&text);
    Ok(described.map_err(|error| refused(config.py(), vec![format!("{place}{error}")]))?.model)
}

fn machine_of(machine: &Bound<'_, PyAny>) -> PyResult<Machine> {
    let py = machine.py();
    let name = machine.extract::<String>().ok();
    match name.filter(|name| !name.contains(['/', '\\']) && !name.ends_with(".toml")) {
        Some(name) => by_name(&name).map_err(|error| plain(py, "ClusterError", &error)),
        None => {
            let (text, path) = text_of("a machine", machine)?;
            let name = path.map_or_else(String::new, |path| path.display().to_string());
            let read = from_toml(Source { name, text });
            read.map_err(|Problems(problems)| refused(py, problems.iter().map(Problem::text).collect()))
        }
    }
}

fn layout_of(layout: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let py = layout.py();
    let (text, _) = text_of("a layout", layout)?;
    let keys: serde_json::Value = serde_json::from_str(&text).map_err(value_error)?;
    let text = toml::to_string(&keys).map_err(value_error)?;
    let read = Table::read(&text, published::MAX_FILE, |table, problems| {
        let mut keys = Reader::new("the layout", table, problems);
        keys.require(&["gpus", "mbs", "gbs", "seq", "precision"]);
        let layout = published::layout(&mut keys);
        keys.finish();
        layout
    });
    // The text has no lines that the caller knows.
    let sentence = |problem: &Problem| {
        let help = problem.help.as_ref().map_or_else(String::new, |help| format!("; {help}"));
        format!("layout: {}{help}", problem.sentence)
    };
    read.map_err(|Problems(problems)| refused(py, problems.iter().map(sentence).collect()))
}

fn refused(py: Python<'_>, problems: Vec<String>) -> PyErr {
    exception(py, "ClusterError", &problems.join("\n"), |fields| fields.set_item("problems", problems))
}
