//! Scratch copies of reference models, whose configuration and tensors a test may change.

use std::fs;
use std::path::{Path, PathBuf};

use pipewright_models::{ModelConfig, ModelError, hf};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

/// A tensor of a file: its name, type, shape and bytes.
pub(crate) type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// A scratch copy of a reference model.
pub(crate) struct Copy(TempDir);

impl Copy {
    pub(crate) fn of(reference: &str) -> Self {
        let copy = Self(TempDir::new().expect("a temporary folder"));
        for name in ["config.json", "model.safetensors"] {
            fs::copy(Path::new(reference).join(name), copy.path(name)).expect("the file can be read");
        }
        copy
    }

    pub(crate) fn dir(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("it is writable");
    }

    /// Changes keys of the configuration.
    pub(crate) fn configure(&self, change: &Value) {
        let text = fs::read(self.path("config.json")).expect("the file can be read");
        let mut json: Value = serde_json::from_slice(&text).expect("JSON");
        json.as_object_mut().expect("a table").extend(change.as_object().expect("a table").clone());
        self.write("config.json", json.to_string());
    }

    pub(crate) fn tensors(&self) -> Vec<Stored> {
        let bytes = fs::read(self.path("model.safetensors")).expect("the file can be read");
        let file = SafeTensors::deserialize(&bytes).expect("it is sound");
        let stored = |(name, view): (String, TensorView<'_>)| {
            (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        file.tensors().into_iter().map(stored).collect()
    }

    /// Writes a file with these tensors.
    pub(crate) fn store(&self, name: &str, tensors: &[Stored]) {
        let view = |(name, dtype, shape, bytes): &Stored| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("they fit").data().to_vec())
        };
        let data: Vec<(String, Vec<u8>)> = tensors.iter().map(view).collect();
        let views = tensors.iter().zip(&data).map(|((name, dtype, shape, _), (_, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("they fit"))
        });
        let file = safetensors::serialize(views, None).expect("it is sound");
        self.write(name, file);
    }

    /// Rewrites the file of the weights.
    pub(crate) fn edit(&self, edit: impl FnOnce(&mut Vec<Stored>)) {
        let mut tensors = self.tensors();
        edit(&mut tensors);
        self.store("model.safetensors", &tensors);
    }

    /// Checks the weights, and returns the names of the tensors that the model does not use, or the error.
    pub(crate) fn check(&self) -> Result<Vec<String>, String> {
        let told = |error: ModelError| {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
            let text = format!("{error}{}", source.unwrap_or_default());
            text.replace(&self.dir().display().to_string(), "DIR")
        };
        let model = ModelConfig::read(self.dir()).map_err(told)?;
        let parameters = model.parameters().expect("it has layers");
        hf::check_weights(self.dir(), &parameters).map_err(told)
    }

    pub(crate) fn check_refused(&self, parts: &[&str]) {
        let error = self.check().expect_err("it is refused");
        parts.iter().for_each(|part| assert!(error.contains(part), "{error}\nhas not: {part}"));
    }
}
