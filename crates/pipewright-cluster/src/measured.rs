//! Files of measurements that replace parts of a prediction.
//!
//! ```toml
//! [products]            # large products of matrices
//! share = 0.71          # of the peak in bf16
//! share_fp8 = 0.55      # of the peak in FP8
//! [attention]
//! share = 0.6           # of the peak in bf16 that fused attention reaches in its forward
//! [memory]
//! gb_per_s = 2900       # that elementwise kernels reach
//! [node]                # collectives inside a node: bus bandwidth in each direction
//! gb_per_s = 360
//! latency_us = 8
//! [network]             # collectives between nodes, for each GPU
//! gb_per_s = 41
//! latency_us = 20
//! [[product]]           # one product of `rows x inner` and `inner x columns` on one GPU
//! rows = 8192
//! columns = 28672
//! inner = 8192
//! precision = "bf16"    # or fp8
//! seconds = 5.6e-3
//! [[layer]]             # a block of the model for one microbatch on one rank
//! block = 0             # its number, from 0; all blocks of this kind are meant
//! rows = 1              # of the microbatch
//! sequence = 8192       # tokens of a row
//! tensor_parallel = 8
//! precision = "bf16"
//! forward_s = 3.1e-3
//! backward_s = 6.3e-3   # without what it computes again
//! ```
//!
//! Each part may be left out. A measured product replaces the prediction where a rank of a layout has its
//! shape. Products with the same input are one product: queries, keys and values, and the gate and up
//! projections of a feed-forward part. [`unused_products`] names the products that a layout does not have. A
//! measured block replaces the prediction for its own sizes, and scales it for all others, with the ratio of
//! measured to predicted time. If a kind of block was measured in several sizes, the nearest ones count.

use toml::de::{DeTable, DeValue};

use crate::layout::Precision;
use crate::machine::Machine;
pub use crate::measured_layer::{MeasuredError, MeasuredLayer};
use crate::measured_rates::{RATES, Rate};
use crate::measured_times::{MeasuredBlock, MeasuredProduct, MeasuredSizes};
use crate::quantity::{Dimension, Measure};
use crate::setting::Setting;
use crate::toml_file::{Key, Reader, TomlFileError, TomlFileErrorKind, Value};
use pipewright_shapes::model::Model;

/// The content of a file of measurements.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Measured {
    /// Rates, each with its place in a machine.
    rates: Vec<(&'static Rate, f64)>,
    /// Products of single shapes.
    products: Vec<MeasuredProduct>,
    /// Blocks of the model.
    layers: Vec<MeasuredLayer>,
}

const PRECISIONS: [(&str, Precision); 3] =
    [("bf16", Precision::Half), ("f16", Precision::Half), ("fp8", Precision::Fp8)];

/// Reads the text of a file of measurements.
///
/// # Errors
/// When a key is unknown or missing, or a value has the wrong unit or range.
pub fn read(text: &str) -> Result<Measured, TomlFileError> {
    let (reader, table) = Reader::parse(text)?;
    let mut measured = Measured::default();
    for (key, value) in table.get_ref() {
        let word: &str = key.get_ref();
        match word {
            "product" => {
                for (start, table) in tables(reader, word, value)? {
                    let product = product(reader, start, table)?;
                    if measured.products.iter().any(|other| other.is_like(&product)) {
                        return Err(reader.at(start, TomlFileErrorKind::Twice { table: "product" }));
                    }
                    measured.products.push(product);
                }
            }
            "layer" => {
                for (start, table) in tables(reader, word, value)? {
                    let layer = layer(reader, start, table)?;
                    let is_same =
                        |other: &MeasuredLayer| (other.block, other.sizes) == (layer.block, layer.sizes);
                    if measured.layers.iter().any(is_same) {
                        return Err(reader.at(start, TomlFileErrorKind::Twice { table: "layer" }));
                    }
                    measured.layers.push(layer);
                }
            }
            _ if RATES.iter().any(|rate| rate.table == word) => rates(reader, word, value, &mut measured)?,
            _ => {
                let known = ["products", "attention", "memory", "node", "network", "product", "layer"];
                return Err(reader.unknown(key, &known));
            }
        }
    }
    Ok(measured)
}

/// Reads the table of rates with a name.
fn rates(
    reader: Reader<'_>,
    name: &str,
    value: &Value<'_>,
    measured: &mut Measured,
) -> Result<(), TomlFileError> {
    let DeValue::Table(table) = value.get_ref() else {
        return Err(reader.wrong_kind(name, value, "a table"));
    };
    let known = || RATES.iter().filter(|rate| rate.table == name);
    for (key, value) in table {
        let rate = known().find(|rate| rate.measure.key == key.get_ref().as_ref());
        let keys = || known().map(|rate| rate.measure.key).collect::<Vec<_>>();
        let rate = rate.ok_or_else(|| reader.unknown(key, &keys()))?;
        measured.rates.push((rate, reader.number(rate.measure, value)?));
    }
    Ok(())
}

/// Returns the tables of a list, or one table, with their first bytes.
fn tables<'a, 'b>(
    reader: Reader<'_>,
    name: &str,
    value: &'b Value<'a>,
) -> Result<Vec<(usize, &'b DeTable<'a>)>, TomlFileError> {
    let wrong = |value: &Value<'_>| reader.wrong_kind(name, value, &format!("tables [[{name}]]"));
    let table = |value: &'b Value<'a>| match value.get_ref() {
        DeValue::Table(table) => Ok((value.span().start, table)),
        _ => Err(wrong(value)),
    };
    match value.get_ref() {
        DeValue::Array(items) => items.iter().map(table).collect(),
        _ => Ok(vec![table(value)?]),
    }
}

/// A table whose keys are all numbers, except for its precision.
struct Row<'a> {
    reader: Reader<'a>,
    start: usize,
    table: &'a DeTable<'a>,
}

const fn size(key: &'static str, least: f64) -> Measure {
    Measure { key, dimension: Dimension::Count, unit: 1.0, least, most: 1e9 }
}

const fn seconds(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Time, unit: 1.0, least: 1e-9, most: 1e5 }
}

impl Row<'_> {
    fn check_keys(&self, known: &[&str]) -> Result<(), TomlFileError> {
        let unknown = |key: &&Key<'_>| !known.contains(&key.get_ref().as_ref());
        match self.table.keys().find(unknown) {
            Some(key) => Err(self.reader.unknown(key, known)),
            None => Ok(()),
        }
    }

    fn number(&self, measure: Measure) -> Result<f64, TomlFileError> {
        let missing = || {
            let advice = "; add what was measured".to_owned();
            self.reader.at(self.start, TomlFileErrorKind::Missing { key: measure.key, advice })
        };
        self.reader.number_in(self.table, measure)?.ok_or_else(missing)
    }

    fn precision(&self) -> Result<Precision, TomlFileError> {
        match self.table.get("precision") {
            Some(value) => self.reader.word("precision", value, &PRECISIONS),
            None => Ok(Precision::Half),
        }
    }
}

fn product(reader: Reader<'_>, start: usize, table: &DeTable<'_>) -> Result<MeasuredProduct, TomlFileError> {
    let row = Row { reader, start, table };
    row.check_keys(&["rows", "columns", "inner", "precision", "seconds"])?;
    Ok(MeasuredProduct {
        rows: row.number(size("rows", 1.0))?,
        columns: row.number(size("columns", 1.0))?,
        inner: row.number(size("inner", 1.0))?,
        precision: row.precision()?,
        seconds: row.number(seconds("seconds"))?,
    })
}

fn layer(reader: Reader<'_>, start: usize, table: &DeTable<'_>) -> Result<MeasuredLayer, TomlFileError> {
    let row = Row { reader, start, table };
    row.check_keys(&[
        "block",
        "rows",
        "sequence",
        "tensor_parallel",
        "precision",
        "forward_s",
        "backward_s",
    ])?;
    let or_one = |measure: Measure, default: f64| {
        Ok::<f64, TomlFileError>(reader.number_in(table, measure)?.unwrap_or(default))
    };
    Ok(MeasuredLayer {
        block: or_one(size("block", 0.0), 0.0)? as usize,
        sizes: MeasuredSizes {
            rows: or_one(size("rows", 1.0), 1.0)? as u32,
            sequence: row.number(size("sequence", 1.0))? as u32,
            tensor: or_one(size("tensor_parallel", 1.0), 1.0)? as u32,
            precision: row.precision()?,
        },
        forward: row.number(seconds("forward_s"))?,
        backward: row.number(seconds("backward_s"))?,
    })
}

impl Measured {
    /// Returns the machine with measured rates and times that replace the predicted ones for `model`. Figures
    /// and constants that are replaced have the source "measured".
    ///
    /// # Errors
    /// When a measured block does not fit the model, or one kind of block was measured twice in the same sizes.
    pub fn machine(&self, model: &Model, machine: &Machine) -> Result<Machine, MeasuredError> {
        let mut changed = machine.clone();
        self.rates.iter().for_each(|(rate, value)| rate.apply(&mut changed, *value));
        changed.measured.products.clone_from(&self.products);
        let mut blocks: Vec<MeasuredBlock> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let block = layer.compared(model, &changed)?;
            let is_same = |other: &MeasuredBlock| (other.block, other.sizes) == (block.block, block.sizes);
            if let Some(index) = blocks.iter().position(is_same) {
                return Err(MeasuredError::Twice { block: layer.block, other: self.layers[index].block });
            }
            blocks.push(block);
        }
        changed.measured.blocks = blocks;
        Ok(changed)
    }

    /// Says which parts of predictions for `changed`, which [`Self::machine`] made of `machine` for `model`,
    /// are measured, and which of them are faster than the data sheet allows.
    pub fn sentences(&self, model: &Model, machine: &Machine, changed: &Machine) -> Vec<String> {
        let rate = |(rate, value): &(&'static Rate, f64)| {
            let plain = |value: f64| (rate.measure.plain(value) * 1000.0).round() / 1000.0;
            let most = (rate.most)(machine);
            let above = if *value > most {
                format!(", which is above the data sheet's {}", plain(most))
            } else {
                String::new()
            };
            format!("{} {} instead of {}{above}", plain(*value), rate.noun, plain((rate.get)(machine)))
        };
        let product = |product: &MeasuredProduct| {
            format!("{}{}", product_sentence(product), too_fast(product.share_of_peak(machine)))
        };
        let layer = |(layer, block): (&MeasuredLayer, &MeasuredBlock)| {
            let percent = |factor: f64| format!("{:+.1}%", (factor - 1.0) * 100.0);
            format!(
                "blocks such as number {}: forward {}, backward {} against the prediction{}",
                layer.block,
                percent(block.forward),
                percent(block.backward),
                too_fast(layer.share_of_peak(&block.block, model, machine))
            )
        };
        let layers = self.layers.iter().zip(&changed.measured.blocks).map(layer);
        self.rates.iter().map(rate).chain(self.products.iter().map(product)).chain(layers).collect()
    }
}

/// Says that a measurement is faster than the data sheet's peak, if its share of the peak is above 1.
fn too_fast(share: f64) -> String {
    if share <= 1.0 {
        return String::new();
    }
    format!(", which is {:.0}% of the data sheet's peak", share * 100.0)
}

/// Names a product by its shape.
fn product_sentence(product: &MeasuredProduct) -> String {
    let MeasuredProduct { rows, columns, inner, .. } = product;
    format!("the product of {rows} x {inner} and {inner} x {columns}")
}

/// Names the measured products of a setting's machine that no rank of its layout computes.
pub fn unused_products(setting: &Setting<'_>) -> Vec<String> {
    let shapes = setting.product_shapes();
    let is_used = |product: &&MeasuredProduct| {
        let shape = [product.rows, product.columns, product.inner];
        shapes.iter().any(|&(other, precision)| {
            [other.rows, other.columns, other.inner] == shape && precision == product.precision
        })
    };
    let products = &setting.machine.measured.products;
    products.iter().filter(|product| !is_used(product)).map(product_sentence).collect()
}
