//! Tensors of a batch whose element type is not the one with which a stage computes.

use burn::tensor::{DType, Device, Int, Tensor};

use super::value::{Value, ValueKind};

/// Why a tensor cannot be converted without a loss.
#[derive(Debug, PartialEq)]
pub(crate) enum Lossy {
    /// Floats of the other type have fewer digits or a smaller range.
    Digits,
    /// An integer does not fit.
    Value(String),
}

impl Value {
    /// Returns a float tensor with elements of type `expected`, which must have all numbers of its own type.
    /// Types that are not plain floats, such as quantised ones, stay as they are.
    pub(crate) fn into_float(self, expected: DType) -> Result<Self, Lossy> {
        let found = self.dtype();
        let [from, to] = [found, expected].map(digits_and_range);
        match (from, to) {
            _ if found == expected => Ok(self),
            (Some(from), Some(to)) if from.0 <= to.0 && from.1 <= to.1 => Ok(self.cast(expected)),
            (Some(_), Some(_)) => Err(Lossy::Digits),
            _ => Ok(self),
        }
    }

    /// Returns an integer tensor with elements of type `expected`. The values are read only if the type is
    /// not known to have all of them.
    pub(crate) fn into_int(self, expected: DType) -> Result<Self, Lossy> {
        let found = self.dtype();
        let (Some(from), Some(to)) = (int_range(found), int_range(expected)) else { return Ok(self) };
        if found == expected {
            return Ok(self);
        }
        let is_contained = to.0 <= from.0 && from.1 <= to.1;
        if !is_contained && let Some(value) = self.clone().find_outside(found, to) {
            return Err(Lossy::Value(value.to_string()));
        }
        // The number of dimensions does not matter here; 1 is arbitrary.
        Ok(Self::of(Tensor::<1, Int>::from_dispatch(self.into_dispatch()).cast(expected)))
    }

    /// Returns an integer outside a range.
    fn find_outside(self, found: DType, (lowest, highest): (i128, i128)) -> Option<i128> {
        let data = self.into_data();
        let is_outside = |value: &i128| !(lowest..=highest).contains(value);
        match found {
            DType::U64 => data.iter::<u64>().map(i128::from).find(is_outside),
            _ => data.iter::<i64>().map(i128::from).find(is_outside),
        }
    }
}

/// Returns the bits of the mantissa and of the exponent of a float type.
fn digits_and_range(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F64 => Some((52, 11)),
        DType::F32 => Some((23, 8)),
        DType::F16 => Some((10, 5)),
        DType::BF16 => Some((7, 8)),
        _ => None,
    }
}

/// Returns the smallest and the largest number of an integer type.
fn int_range(dtype: DType) -> Option<(i128, i128)> {
    Some(match dtype {
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        _ => return None,
    })
}

/// Returns the integer type of a device.
pub(crate) fn int_type_of(device: &Device) -> DType {
    device.settings().int_dtype.into()
}

/// Returns the float type that all tensors of a list have; `None` if they differ, or if none is a plain
/// float.
pub(crate) fn float_type_of<'a>(values: impl Iterator<Item = &'a Value>) -> Option<DType> {
    let floats = values.filter(|value| value.kind() == ValueKind::Float);
    let mut types = floats.map(Value::dtype).filter(|dtype| digits_and_range(*dtype).is_some());
    let first = types.next()?;
    types.all(|dtype| dtype == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_float(from: DType, to: DType, is_lossless: bool) {
        let value = Value::of(Tensor::<1>::ones([2], (&Device::flex(), from)));
        let found = value.into_float(to).map(|value| value.dtype());
        assert_eq!(found, if is_lossless { Ok(to) } else { Err(Lossy::Digits) }, "{from:?} {to:?}");
    }

    #[test]
    fn floats_are_converted_to_types_with_all_their_numbers() {
        check_float(DType::F16, DType::F32, true);
        check_float(DType::BF16, DType::F32, true);
        check_float(DType::F32, DType::F64, true);
        check_float(DType::F32, DType::F32, true);
        check_float(DType::F64, DType::F32, false);
        check_float(DType::F16, DType::BF16, false);
        check_float(DType::BF16, DType::F16, false);
    }

    fn check_int(value: i64, (from, to): (DType, DType), is_lossless: bool) {
        let value = Tensor::<1, Int>::from_data([0, value], (&Device::flex(), from));
        let found = Value::of(value.clone()).into_int(to);
        if is_lossless {
            let found = found.expect("it fits");
            assert_eq!(found.dtype(), to);
            let values = |data: burn::tensor::TensorData| data.iter::<i64>().collect::<Vec<_>>();
            assert_eq!(values(found.into_data()), values(value.into_data()));
        } else {
            assert!(matches!(found, Err(Lossy::Value(_))), "{from:?} {to:?}");
        }
    }

    #[test]
    fn integers_are_converted_if_their_values_fit() {
        check_int(-7, (DType::I32, DType::I64), true);
        check_int(200, (DType::U8, DType::I64), true);
        check_int(7, (DType::U64, DType::I64), true);
        check_int(7, (DType::I64, DType::I32), true);
        check_int(1 << 40, (DType::I64, DType::I32), false);
        check_int(-1, (DType::I64, DType::U32), false);
    }
}
