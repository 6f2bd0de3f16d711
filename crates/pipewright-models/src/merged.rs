//! The parameters of a model with its adapters merged into them: `v = w + scale * a b` for each layer with an
//! adapter, and with DoRA `v m / |v|`, for the magnitudes `m` and the norms `|v|` of the columns.

use std::collections::HashSet;

use crate::error::ModelError;
use crate::lora::{
    GATE_UP, LoraConfig, MAGNITUDES, TABLE_MATRICES, is_table, layer_of_first, module_of, name_of,
};
use crate::parameter::{ParameterKind, ParameterSource, ParameterSpec};

/// The parameters of a base with adapters merged into them.
pub(crate) struct MergedSource<'a> {
    base: Box<dyn ParameterSource + 'a>,
    adapter: Box<dyn ParameterSource + 'a>,
    lora: &'a LoraConfig,
    /// The paths of the layers with an adapter.
    layers: HashSet<String>,
}

impl<'a> MergedSource<'a> {
    /// Merges the parameters `specs` of `adapter` into the parameters of `base`.
    pub(crate) fn new(
        base: Box<dyn ParameterSource + 'a>,
        adapter: Box<dyn ParameterSource + 'a>,
        lora: &'a LoraConfig,
        specs: &[ParameterSpec],
    ) -> Self {
        let layers = specs.iter().filter_map(|spec| layer_of_first(&spec.path)).map(str::to_owned);
        Self { base, adapter, lora, layers: layers.collect() }
    }
}

impl ParameterSource for MergedSource<'_> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        if self.lora.saves(&spec.path) {
            return self.adapter.parameter(spec);
        }
        let mut values = self.base.parameter(spec)?;
        let Some(layer) = spec.path.strip_suffix(".weight") else { return Ok(values) };
        // The gate of an expert and its layer up may share their first matrix.
        let first_layer = match spec.layout.stack_of_experts() {
            Some(stack) if name_of(stack) == GATE_UP && !self.lora.own_experts => {
                format!("{}.{GATE_UP}", module_of(layer))
            }
            _ => layer.to_owned(),
        };
        let is_adapted = self.layers.contains(&first_layer);
        let (true, &[inputs, outputs]) = (is_adapted, spec.shape.as_slice()) else { return Ok(values) };
        let rank = self.lora.rank as usize;
        let mut matrix = |layer: &str, name: &str, shape: [usize; 2]| {
            let (path, kind) = (format!("{layer}.{name}"), ParameterKind::Matrix);
            self.adapter.parameter(&ParameterSpec::new(path, shape.to_vec(), kind))
        };
        let names = if is_table(layer) { TABLE_MATRICES } else { ["lora_A.weight", "lora_B.weight"] };
        let (first, second) =
            (matrix(&first_layer, names[0], [inputs, rank])?, matrix(layer, names[1], [rank, outputs])?);
        let scale = self.lora.scale() as f32;
        let mut added = vec![0.0; outputs];
        for (row, low) in values.chunks_exact_mut(outputs).zip(first.chunks_exact(rank)) {
            added.fill(0.0);
            for (x, second) in low.iter().zip(second.chunks_exact(outputs)) {
                added.iter_mut().zip(second).for_each(|(sum, y)| *sum += x * y);
            }
            row.iter_mut().zip(&added).for_each(|(value, sum)| *value += scale * sum);
        }
        if self.lora.dora {
            let mut squares = vec![0.0; outputs];
            for row in values.chunks_exact(outputs) {
                squares
                    .iter_mut()
                    .zip(row)
                    .for_each(|(sum, &value)| *sum += f64::from(value) * f64::from(value));
            }
            let (path, kind) = (format!("{layer}.{MAGNITUDES}"), ParameterKind::Scale);
            let magnitudes = self.adapter.parameter(&ParameterSpec::new(path, vec![outputs], kind))?;
            let factors: Vec<f32> =
                magnitudes.iter().zip(&squares).map(|(m, square)| m / norm(*square)).collect();
            for row in values.chunks_exact_mut(outputs) {
                row.iter_mut().zip(&factors).for_each(|(value, factor)| *value *= factor);
            }
        }
        Ok(values)
    }
}

/// Returns the norm of a column from the sum of its squares; above 0, so that a column of zeros stays zero.
fn norm(squares: f64) -> f32 {
    (squares.sqrt() as f32).max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the elements 0, 1, 2 and so on.
    struct Counted;

    impl ParameterSource for Counted {
        fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
            Ok((0..spec.shape.iter().product::<usize>()).map(|index| index as f32).collect())
        }
    }

    #[test]
    fn a_layer_gets_the_product_of_its_matrices() {
        let lora = LoraConfig { rank: 2, alpha: 4.0, ..LoraConfig::default() };
        let spec = |path: &str, shape: [usize; 2]| {
            ParameterSpec::new(path.to_owned(), shape.to_vec(), ParameterKind::Matrix)
        };
        let adapted = [spec("a.q_proj.lora_A.weight", [2, 2])];
        let mut merged = MergedSource::new(Box::new(Counted), Box::new(Counted), &lora, &adapted);
        let mut values = |path| merged.parameter(&spec(path, [2, 3])).expect("the sources have everything");
        // [[0, 1], [2, 3]] x [[0, 1, 2], [3, 4, 5]] = [[3, 4, 5], [9, 14, 19]], times 2.
        assert_eq!(values("a.q_proj.weight"), [6.0, 9.0, 12.0, 21.0, 32.0, 43.0]);
        assert_eq!(values("a.k_proj.weight"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn magnitudes_are_the_norms_of_the_columns() {
        let lora = LoraConfig { rank: 2, alpha: 4.0, dora: true, ..LoraConfig::default() };
        let spec = |path: &str, shape: [usize; 2]| {
            ParameterSpec::new(path.to_owned(), shape.to_vec(), ParameterKind::Matrix)
        };
        let adapted = [spec("a.q_proj.lora_A.weight", [2, 2])];
        let mut merged = MergedSource::new(Box::new(Counted), Box::new(Counted), &lora, &adapted);
        let values = merged.parameter(&spec("a.q_proj.weight", [2, 3])).expect("the sources have everything");
        // The columns of [[6, 9, 12], [21, 32, 43]] have the norms 0, 1 and 2 then.
        let norm = |column: usize| values[column].hypot(values[3 + column]);
        assert_eq!([0, 1, 2].map(|column| (norm(column) * 1e5).round()), [0.0, 1e5, 2e5]);
        assert!((values[4] / values[1] - 32.0 / 9.0).abs() < 1e-5, "{values:?}");
    }
}
