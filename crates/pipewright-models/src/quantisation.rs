//! Quantised weights: by which method, which methods are read, and how transformers writes the others without
//! quantisation.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

/// The bytes of the matrices of a model that files have quantised and that stages hold so, by the path of the
/// parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantisedSizes(Arc<BTreeMap<String, QuantisedBytes>>);

/// The bytes of a quantised matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuantisedBytes {
    /// The bytes that are divided with the matrix.
    pub(crate) divided: u64,
    /// The bytes of the scales that a part has whole if it has some of the inputs.
    pub(crate) scales: u64,
    /// The inputs at whose multiples these scales can be cut too; 0 if they cannot.
    pub(crate) unit: usize,
    /// The bytes that each part has.
    pub(crate) fixed: u64,
    /// The inputs of a block that parts have whole; 0 if every element can be cut off.
    pub(crate) block: usize,
    /// Whether they are in memory only while their stage computes.
    pub(crate) is_streamed: bool,
    /// Whether some of the rows can be read alone.
    pub(crate) has_rows: bool,
}

impl QuantisedBytes {
    /// Returns the bytes of the whole matrix.
    fn total(&self) -> u64 {
        self.divided + self.scales + self.fixed
    }
}

impl FromIterator<(String, QuantisedBytes)> for QuantisedSizes {
    fn from_iter<T: IntoIterator<Item = (String, QuantisedBytes)>>(sizes: T) -> Self {
        Self(Arc::new(sizes.into_iter().collect()))
    }
}

impl QuantisedSizes {
    /// Returns whether no matrix is quantised.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the bytes of all matrices.
    pub fn total(&self) -> u64 {
        self.0.values().map(QuantisedBytes::total).sum()
    }

    /// Returns the sizes with these matrices in place of their own, which are in memory only while their stage computes.
    pub(crate) fn with_streamed(&self, streamed: &Self) -> Self {
        let own = self.0.iter().map(|(path, bytes)| (path.clone(), *bytes));
        let streamed = streamed
            .0
            .iter()
            .map(|(path, bytes)| (path.clone(), QuantisedBytes { is_streamed: true, ..*bytes }));
        own.chain(streamed).collect()
    }

    /// Returns the bytes of the files that a read of a shard of the matrix at a path takes, from the bytes of the shard in
    /// memory; `None` if the matrix stays in memory. `is_of_rows` says whether the shard has whole rows of the file.
    pub(crate) fn read_bytes(&self, path: &str, held: Option<u64>, is_of_rows: bool) -> Option<u64> {
        let bytes = self.0.get(path).filter(|bytes| bytes.is_streamed)?;
        if is_of_rows && bytes.has_rows { held } else { Some(bytes.total()) }
    }

    /// Returns the bytes of a shard of the parameter at a path, from the shapes of both.
    pub(crate) fn bytes_of(
        &self,
        (path, shape): (&str, &[usize]),
        own: &[usize],
        is_cut_by_inputs: bool,
    ) -> Option<u64> {
        let &QuantisedBytes { divided, scales, unit, fixed, block, .. } = self.0.get(path)?;
        let elements = |shape: &[usize]| shape.iter().product::<usize>() as u128;
        let part = |bytes: u64| (u128::from(bytes) * elements(own) / elements(shape).max(1)) as u64;
        let is_whole = own == shape;
        let are_cut = !is_cut_by_inputs || unit > 0 && own[0].is_multiple_of(unit);
        let scales = if is_whole || are_cut { part(scales) } else { scales };
        let divided = match own {
            [inputs, ..] if is_cut_by_inputs && block > 0 && !inputs.is_multiple_of(block) => {
                // A part of a row begins or ends inside a block.
                let (all, most) = (shape[0].div_ceil(block), inputs.div_ceil(block) + 1);
                (u128::from(divided) * most.min(all) as u128 / all.max(1) as u128) as u64
            }
            _ => part(divided),
        };
        Some(divided + scales + fixed)
    }
}

/// Returns the configuration without the description of a quantisation that is read.
pub(crate) fn without_readable(mut config: Value) -> Value {
    let settings = &config["quantization_config"];
    let is_set = |key: &str| settings[key].as_bool().unwrap_or(false);
    let is_readable = match method_of(&config).as_deref() {
        Some("bitsandbytes") => {
            (is_set("load_in_4bit") || is_set("_load_in_4bit")) && !is_set("load_in_8bit")
        }
        _ => described_form(&config).is_some(),
    };
    if is_readable && let Some(keys) = config.as_object_mut() {
        keys.remove("quantization_config");
    }
    config
}

/// A form of weights that `quantization_config` describes for all matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DescribedForm {
    /// FP8 with a scale for each block of these rows and columns.
    Fp8([usize; 2]),
    /// Four bits of GPTQ in groups of this size; `None` for one group for each row.
    Gptq {
        group: Option<usize>,
        /// Whether files have zeros that are one less.
        zeros_are_less: bool,
    },
    /// Four bits of AWQ in groups of this size; `None` for one group for each row.
    Awq { group: Option<usize> },
    /// MXFP4 of experts.
    Mxfp4,
}

/// Returns the form of weights that a configuration describes, if it is read.
pub(crate) fn described_form(config: &Value) -> Option<DescribedForm> {
    let settings = &config["quantization_config"];
    let is =
        |key: &str, value: &str| settings[key].as_str().is_none_or(|found| found.eq_ignore_ascii_case(value));
    let size = |size: &Value| usize::try_from(size.as_u64()?).ok().filter(|size| *size > 0);
    let has_four_bits = settings["bits"].as_u64().or(settings["w_bit"].as_u64()) == Some(4);
    let group = match &settings["group_size"] {
        whole if whole.as_i64() == Some(-1) => Some(None),
        group => size(group).map(Some),
    };
    match settings["quant_method"].as_str()? {
        "fp8" if is("fmt", "e4m3") => match settings["weight_block_size"].as_array()?.as_slice() {
            [rows, columns] => Some(DescribedForm::Fp8([size(rows)?, size(columns)?])),
            _ => None,
        },
        "gptq" if has_four_bits && settings["desc_act"] != true => {
            let format = settings["checkpoint_format"].as_str().unwrap_or("gptq");
            let is_known = ["gptq", "gptq_v2"].contains(&format);
            is_known.then_some(DescribedForm::Gptq { group: group?, zeros_are_less: format == "gptq" })
        }
        "mxfp4" => Some(DescribedForm::Mxfp4),
        // Files of other packings have as many words.
        "awq"
            if has_four_bits
                && ["version", "checkpoint_format", "format"].iter().all(|key| is(key, "gemm")) =>
        {
            Some(DescribedForm::Awq { group: group? })
        }
        _ => None,
    }
}

/// Returns the method by which weights are quantised, as `quantization_config` names it; `None` if there is no
/// such table, or an empty one. Files of bitsandbytes need not name it.
pub(crate) fn method_of(config: &Value) -> Option<String> {
    let settings = config.get("quantization_config")?;
    let is_empty = settings.as_object().is_none_or(serde_json::Map::is_empty);
    if is_empty {
        return None;
    }
    let is_set = |key: &str| settings[key].as_bool().unwrap_or(false);
    let unnamed =
        if is_set("load_in_4bit") || is_set("load_in_8bit") { "bitsandbytes" } else { "no method is named" };
    Some(settings["quant_method"].as_str().unwrap_or(unnamed).to_owned())
}

/// Returns what to do with weights that are quantised by a method.
pub(crate) fn advice(method: &str) -> String {
    const ORIGINAL: &str = "use the model from which the quantised one was made";
    // The methods and classes of transformers 5.23. Without `save_original_format=False`, it cannot write experts.
    let class = match method {
        "fp8" | "mxfp8" => "FineGrainedFP8Config",
        "compressed-tensors" => "CompressedTensorsConfig",
        "bitsandbytes" | "higgs" => {
            return format!(
                "{ORIGINAL}, or write it without quantisation (`from_pretrained`, `model.dequantize()` and `save_pretrained` of \
                 transformers)"
            );
        }
        _ => return format!("{ORIGINAL}, because transformers cannot undo this quantisation"),
    };
    format!(
        "{ORIGINAL}, or write it without quantisation (`from_pretrained` with \
         `quantization_config={class}(dequantize=True)`, and `save_pretrained` with `save_original_format=False`, of transformers)"
    )
}

/// Returns the names of tensors that files of a quantised matrix have next to the tensor of the matrix, or
/// instead of it.
pub(crate) fn companions(tensor: &str) -> [String; 7] {
    let layer = tensor.strip_suffix(".weight").unwrap_or(tensor);
    [
        // GPTQ and AWQ, compressed-tensors, and MXFP4 of gpt-oss.
        format!("{layer}.qweight"),
        format!("{tensor}_packed"),
        format!("{tensor}_blocks"),
        // bitsandbytes in four and eight bits.
        format!("{tensor}.absmax"),
        format!("{layer}.SCB"),
        // Eight bits of several methods.
        format!("{tensor}_scale_inv"),
        format!("{tensor}_scale"),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn methods_are_named_or_follow_from_other_keys() {
        let method = |settings: Value| method_of(&json!({"quantization_config": settings}));
        assert_eq!(method(json!({"quant_method": "gptq", "bits": 4})).as_deref(), Some("gptq"));
        assert_eq!(method(json!({"load_in_8bit": true})).as_deref(), Some("bitsandbytes"));
        assert_eq!(method(json!({"load_in_4bit": false, "bits": 4})).as_deref(), Some("no method is named"));
        assert_eq!((method(json!({})), method(json!(null)), method_of(&json!({}))), (None, None, None));
    }

    #[test]
    fn advice_is_what_transformers_can_do() {
        let check = |methods: &[&str], part: &str| {
            for method in methods {
                let advice = advice(method);
                assert!(advice.starts_with("use the model from") && advice.contains(part), "{advice}");
            }
        };
        check(&["fp8", "mxfp8", "compressed-tensors"], "`save_pretrained` with `save_original_format=False`");
        check(&["fp8", "mxfp8"], "quantization_config=FineGrainedFP8Config(dequantize=True)");
        check(&["compressed-tensors"], "quantization_config=CompressedTensorsConfig(dequantize=True)");
        check(&["bitsandbytes", "higgs"], "`model.dequantize()`");
        check(&["gptq", "awq", "hqq", "aqlm", "torchao", "of tomorrow"], "transformers cannot undo");
    }
}
