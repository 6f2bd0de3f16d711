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
//! precision = "bf16"    # or fp8, f32
//! seconds = 5.6e-3
//! [[layer]]             # a block of the model for one microbatch on one rank
//! block = 0             # its number, from 0; all blocks of this kind are meant
//! rows = 1              # of the microbatch
//! sequence = 8192       # tokens of a row
//! tensor_parallel = 8
//! precision = "bf16"
//! forward_s = 3.1e-3
//! backward_s = 6.3e-3   # without what it computes again
//! [[scores]]            # fused attention for one microbatch on one rank
//! rows = 1
//! sequence = 8192
//! heads = 8
//! key_value_heads = 1   # of this rank
//! head_size = 128
//! precision = "bf16"    # or f32
//! forward_s = 1.2e-3
//! backward_s = 3.4e-3
//! [[kernel]]            # a kind of elementwise kernels
//! kind = "norm"         # or residual, rotary, gated, plain, loss, embedding, optimizer
//! forward_gb_per_s = 900    # of the bytes that the cost model counts for them (`elementwise`)
//! backward_gb_per_s = 700   # the forward's, if it is missing
//! [[link]]
//! use = "all_reduce"    # or all_to_all, message
//! between = "node"      # ranks of one node, or "network": each rank in another node
//! gb_per_s = 360        # bus bandwidth, for each GPU in each direction
//! latency_us = 8        # of each round of messages
//! ```
//!
//! `overlap = 0.8`, before all tables, is the share of the replicas' collectives that computation hides, if there
//! is enough of it; all of it if the key is missing.
//!
//! A cluster file may have all of this but `[[layer]]` and the tables of rates in its table `[measured]`, such as
//! `[[measured.product]]`: its figures and constants are its rates, and layers belong to a model.
//!
//! Each part may be left out. A measured product replaces the prediction where a rank of a layout has its
//! shape. Products with the same input are one product: queries, keys and values, and the gate and up
//! projections of a feed-forward part. [`unused_products`] names the products that a layout does not have. A
//! measured block replaces the prediction for its own sizes, and scales it for all others, with the ratio of
//! measured to predicted time. If a kind of block was measured in several sizes, the nearest ones count.

use pipewright_document::{Problems, Reader, Source, Table};

use crate::catalogue::MAX_FILE;
use crate::implementation::Implementation;
use crate::layout::Precision;
use crate::machine::Machine;
pub use crate::measured_layer::{MeasuredError, MeasuredLayer};
use crate::measured_rates::{RATES, Rate};
use crate::measured_tables::{self, rows, seconds, size};
use crate::measured_times::{MeasuredBlock, MeasuredProduct, MeasuredSizes, MeasuredTimes};
use crate::setting::Setting;
use pipewright_shapes::model::Model;

/// The content of a file of measurements.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Measured {
    /// Rates, each with its place in a machine.
    rates: Vec<(&'static Rate, f64)>,
    /// Times and rates that need no model.
    times: MeasuredTimes,
    /// Blocks of the model.
    layers: Vec<MeasuredLayer>,
}

/// Reads a file of measurements.
///
/// # Errors
/// When a key is unknown or missing, or a value has the wrong unit or range.
pub fn read(source: impl Into<Source>) -> Result<Measured, Problems> {
    Table::read(source, MAX_FILE, |table, problems| {
        let mut file = Reader::new("the measurements", table, problems);
        let measured = Measured {
            rates: rates(&mut file),
            times: measured_tables::read(&mut file),
            layers: rows(&mut file, "layer", layer, |layer: &MeasuredLayer, other| {
                (other.block, other.sizes) == (layer.block, layer.sizes)
            }),
        };
        file.finish();
        Some(measured)
    })
}

/// Reads the tables of rates.
fn rates(file: &mut Reader<'_>) -> Vec<(&'static Rate, f64)> {
    let mut rates = Vec::new();
    for own in RATES.chunk_by(|rate, next| rate.table == next.table) {
        let name = own[0].table;
        let Some(table) = file.table(name, "a table") else { continue };
        let name = format!("[{name}]");
        let mut reader = file.inner(&name, table);
        rates.extend(own.iter().filter_map(|rate| Some((rate, reader.measure(rate.measure)?))));
        reader.finish();
    }
    rates
}

fn layer(row: &mut Reader<'_>) -> Option<MeasuredLayer> {
    row.require(&["sequence", "forward_s", "backward_s"]);
    let block = row.measure(size("block", 0.0)).unwrap_or(0.0) as usize;
    let [rows, sequence, tensor] = ["rows", "sequence", "tensor_parallel"]
        .map(|key| row.measure(size(key, 1.0)).map(|size| size as u32));
    let precision = row.word("precision", &Precision::NAMES).unwrap_or(Precision::Half);
    let [forward, backward] = ["forward_s", "backward_s"].map(|key| row.measure(seconds(key)));
    let sizes = MeasuredSizes {
        rows: rows.unwrap_or(1),
        sequence: sequence?,
        tensor: tensor.unwrap_or(1),
        precision,
    };
    Some(MeasuredLayer { block, sizes, forward: forward?, backward: backward? })
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
        changed.measured = self.times.clone().over(&machine.measured);
        let mut blocks: Vec<MeasuredBlock> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let block = layer.of_model(model)?;
            let is_same = |other: &MeasuredBlock| (other.block, other.sizes) == (block.block, block.sizes);
            if let Some(index) = blocks.iter().position(is_same) {
                let (block, other) = (layer.block, self.layers[index].block);
                return Err(MeasuredError(format!(
                    "of block {block} measures the same kind of block in the same sizes as block {other}; keep one of them"
                )));
            }
            blocks.push(block);
        }
        changed.measured.blocks.splice(0..0, blocks);
        Ok(changed)
    }

    /// Says which parts of predictions for `changed`, which [`Self::machine`] made of `machine` for `model`,
    /// are measured, and which of them are faster than the data sheet allows. Blocks are compared with predictions
    /// of a stack.
    pub fn sentences(
        &self,
        model: &Model,
        machine: &Machine,
        changed: &Machine,
        stack: Implementation,
    ) -> Vec<String> {
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
            let layout = block.sizes.layout(stack);
            let setting = Setting { model, layout: &layout, machine: changed };
            let [forward, backward] = setting.measured_factors(block).map(percent);
            format!(
                "blocks such as number {}: forward {forward}, backward {backward} against the prediction{}",
                layer.block,
                too_fast(layer.share_of_peak(&block.block, model, machine))
            )
        };
        let layers = self.layers.iter().zip(&changed.measured.blocks).map(layer);
        let products = self.times.products.iter().map(product);
        self.rates.iter().map(rate).chain(products).chain(self.times.sentences()).chain(layers).collect()
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
