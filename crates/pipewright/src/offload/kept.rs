//! The tensors of a microbatch outside of the rank's tensors: in the processor's memory or in a file.

use std::io;
use std::path::Path;

use burn::tensor::{DType, Device, Shape, TensorData};

use super::error::OffloadErrorKind;
use super::place::OffloadTo;
use super::scratch::ScratchFile;
use crate::tensor::{Value, Values};

/// Tensors without their elements.
struct Form {
    shape: Shape,
    dtype: DType,
    device: Device,
    bytes: usize,
    requires_grad: bool,
}

/// The tensors of a microbatch that have left.
pub(super) struct Kept {
    forms: Vec<Form>,
    elements: Elements,
}

enum Elements {
    Host(Vec<TensorData>),
    File(ScratchFile),
}

impl Form {
    fn of(value: &Value) -> Self {
        Self {
            shape: value.shape(),
            dtype: value.dtype(),
            device: value.device(),
            bytes: value.bytes(),
            requires_grad: value.requires_grad(),
        }
    }

    fn with(self, data: TensorData) -> Value {
        let value = Value::from_data(data, &self.device);
        if self.requires_grad { value.requiring_grad() } else { value.constant() }
    }
}

impl Kept {
    /// Moves tensors to `place`. `name` is a part of a file's name.
    pub(super) fn write(place: &OffloadTo, name: &str, values: Values) -> Result<Self, OffloadErrorKind> {
        let forms = values.iter().map(Form::of).collect();
        let elements = match place {
            OffloadTo::Host => Elements::Host(values.into_iter().map(Value::into_data).collect()),
            OffloadTo::Folder(folder) => Elements::File(write_file(folder, name, values)?),
        };
        Ok(Self { forms, elements })
    }

    /// Brings the tensors back.
    pub(super) fn read(self) -> Result<Values, OffloadErrorKind> {
        let Self { forms, elements } = self;
        let mut file = match elements {
            Elements::Host(data) => {
                return Ok(forms.into_iter().zip(data).map(|(form, data)| form.with(data)).collect());
            }
            Elements::File(file) => file,
        };
        let values = read_all(&mut file, forms);
        values.map_err(|source| OffloadErrorKind::Read { file: file.path.to_owned(), source })
    }
}

/// Reads tensors of these forms from a file.
fn read_all(file: &mut ScratchFile, forms: Vec<Form>) -> io::Result<Values> {
    file.rewind()?;
    let read = |form: Form| {
        let mut bytes = vec![0; form.bytes];
        file.read_exact(&mut bytes)?;
        let data = TensorData::from_bytes_vec(bytes, form.shape.clone(), form.dtype);
        Ok(form.with(data))
    };
    forms.into_iter().map(read).collect()
}

/// Writes tensors to a file. The memory of each is free as soon as it is written.
fn write_file(folder: &Path, name: &str, values: Values) -> Result<ScratchFile, OffloadErrorKind> {
    let failed = |file: &Path| {
        let file = file.to_owned();
        move |source| OffloadErrorKind::Write { file, source }
    };
    let mut file = ScratchFile::create(folder, name).map_err(failed(&folder.join(name)))?;
    for value in values {
        file.write_all(value.into_data().as_bytes()).map_err(failed(&file.path))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;

    fn values() -> Values {
        let device = Device::flex();
        let numbers: Vec<f32> = (0..24).map(|number| (number as f32).sin()).collect();
        let tensor = Tensor::<3>::from_data(TensorData::new(numbers, [2, 3, 4]), &device);
        // The second tensor is a part of its storage, and its elements are in another order.
        let part = tensor.clone().narrow(2, 1, 2).swap_dims(0, 1);
        vec![Value::of(tensor.clone()), Value::of(part).constant(), Value::of(tensor.cast(DType::BF16))]
    }

    fn check(place: &OffloadTo) {
        let kept = Kept::write(place, "a", values()).unwrap_or_else(|error| panic!("{error}"));
        let back = kept.read().unwrap_or_else(|error| panic!("{error}"));
        let of = |values: Values| -> Vec<_> {
            values.into_iter().map(|value| (value.requires_grad(), value.into_data())).collect()
        };
        assert_eq!(of(back), of(values()), "{place}");
    }

    #[test]
    fn tensors_come_back_with_their_bits() {
        let folder = tempfile::tempdir().expect("a folder");
        check(&OffloadTo::Host);
        check(&OffloadTo::Folder(folder.path().to_owned()));
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("a file");
        let place = OffloadTo::Folder(file.clone());
        let Err(error) = Kept::write(&place, "rank-0", values()) else { panic!("a file is no folder") };
        let expected = format!("cannot be written to `{}`: ", file.join("rank-0").display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert!(place.prepare().is_err());
    }
}
