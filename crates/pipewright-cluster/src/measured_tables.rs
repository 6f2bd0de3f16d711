//! Reads and writes measured times and rates that need no model: products, attention, kernels and links.

use std::fmt::Write as _;

use pipewright_document::{Dimension, Measure, Reader};

use crate::figure::{self, latency};
use crate::implementation::name_of;
use crate::layout::Precision;
use crate::measured_times::{
    Kernel, LinkUse, MeasuredKernel, MeasuredLink, MeasuredProduct, MeasuredScores, MeasuredTimes,
    ScoresShape,
};

const PLACES: [(&str, bool); 2] = [("node", true), ("network", false)];

const OVERLAP: Measure =
    Measure { key: "overlap", dimension: Dimension::Share, unit: 1.0, least: 0.0, most: 1.0 };

/// Reads the tables of a file of measurements, or of `[measured]` of a cluster file.
pub(crate) fn read(file: &mut Reader<'_>) -> MeasuredTimes {
    MeasuredTimes {
        products: rows(file, "product", product, MeasuredProduct::is_like),
        blocks: Vec::new(),
        scores: rows(file, "scores", scores, |row, other| row.shape == other.shape),
        kernels: rows(file, "kernel", kernel, |row, other| row.kernel == other.kernel),
        links: rows(file, "link", link, |row, other| {
            (row.purpose, row.is_inside_node) == (other.purpose, other.is_inside_node)
        }),
        overlap: file.measure(OVERLAP),
    }
}

/// Reads the tables of a list, or one table. Two of them may not be the same, as `is_same` says.
pub(crate) fn rows<T>(
    file: &mut Reader<'_>,
    key: &'static str,
    read: fn(&mut Reader<'_>) -> Option<T>,
    is_same: fn(&T, &T) -> bool,
) -> Vec<T> {
    let name = format!("[[{key}]]");
    let tables = file.tables(key, &format!("tables {name}")).unwrap_or_default();
    let mut rows: Vec<T> = Vec::with_capacity(tables.len());
    for table in tables {
        let mut reader = file.inner(&name, table);
        let row = read(&mut reader);
        if row.as_ref().is_some_and(|row| rows.iter().any(|other| is_same(row, other))) {
            let sentence = format!("this {name} has the sizes of one before it");
            reader.report_at(table.place.clone(), sentence, "keep one of them");
        }
        reader.finish();
        rows.extend(row);
    }
    rows
}

pub(crate) const fn size(key: &'static str, least: f64) -> Measure {
    Measure { key, dimension: Dimension::Count, unit: 1.0, least, most: 1e9 }
}

pub(crate) const fn seconds(key: &'static str) -> Measure {
    Measure { key, dimension: Dimension::Time, unit: 1.0, least: 1e-9, most: 1e5 }
}

fn product(row: &mut Reader<'_>) -> Option<MeasuredProduct> {
    row.require(&["rows", "columns", "inner", "seconds"]);
    let [rows, columns, inner] = ["rows", "columns", "inner"].map(|key| row.measure(size(key, 1.0)));
    let precision = row.word("precision", &Precision::NAMES).unwrap_or(Precision::Half);
    let seconds = row.measure(seconds("seconds"));
    Some(MeasuredProduct { rows: rows?, columns: columns?, inner: inner?, precision, seconds: seconds? })
}

fn scores(row: &mut Reader<'_>) -> Option<MeasuredScores> {
    row.require(&["sequence", "heads", "head_size", "forward_s", "backward_s"]);
    let [rows, sequence, heads, shared, head_size] =
        ["rows", "sequence", "heads", "key_value_heads", "head_size"].map(|key| row.measure(size(key, 1.0)));
    let precision = row.word("precision", &Precision::NAMES).unwrap_or(Precision::Half);
    let [forward, backward] = ["forward_s", "backward_s"].map(|key| row.measure(seconds(key)));
    let heads = heads?;
    let shape = ScoresShape {
        rows: rows.unwrap_or(1.0) as u32,
        sequence: sequence? as u32,
        heads: heads as u64,
        key_value_heads: shared.unwrap_or(heads) as u64,
        head_size: head_size? as u64,
        precision,
    };
    Some(MeasuredScores { shape, seconds: [forward?, backward?] })
}

fn kernel(row: &mut Reader<'_>) -> Option<MeasuredKernel> {
    row.require(&["kind", "forward_gb_per_s"]);
    let kernel = row.word("kind", &Kernel::NAMED);
    let [forward, backward] =
        ["forward_gb_per_s", "backward_gb_per_s"].map(|key| row.measure(bandwidth(key)));
    let forward = forward?;
    Some(MeasuredKernel { kernel: kernel?, rates: [forward, backward.unwrap_or(forward)] })
}

fn link(row: &mut Reader<'_>) -> Option<MeasuredLink> {
    row.require(&["use", "between", "gb_per_s", "latency_us"]);
    let purpose = row.word("use", &LinkUse::NAMED);
    let is_inside_node = row.word("between", &PLACES);
    let bandwidth = row.measure(bandwidth("gb_per_s"));
    let latency = row.measure(latency("latency_us"));
    Some(MeasuredLink {
        purpose: purpose?,
        is_inside_node: is_inside_node?,
        bandwidth: bandwidth?,
        latency: latency?,
    })
}

/// Kernels and messages of small sizes are far below the rates of data sheets.
const fn bandwidth(key: &'static str) -> Measure {
    Measure { least: 1e-6, ..figure::bandwidth(key) }
}

impl MeasuredTimes {
    /// Says what is measured, products and blocks excepted.
    pub(crate) fn sentences(&self) -> Vec<String> {
        let rate = |rate: f64| (rate / 1e6).round() / 1e3;
        let scores = self.scores.iter().map(|MeasuredScores { shape, .. }| {
            let ScoresShape { rows, sequence, heads, .. } = shape;
            format!("attention of {heads} heads on {rows} x {sequence} tokens")
        });
        let kernels = self.kernels.iter().map(|MeasuredKernel { kernel, rates: [forward, backward] }| {
            format!("{} at {} and {} GB/s", kernel.name(), rate(*forward), rate(*backward))
        });
        let links = self.links.iter().map(|link| {
            let (purpose, place) =
                (name_of(&LinkUse::NAMED, link.purpose), name_of(&PLACES, link.is_inside_node));
            format!("{purpose} at {} GB/s ({place})", rate(link.bandwidth))
        });
        let overlap = self.overlap.map(|share| format!("{share} of the replicas' collectives is hidden"));
        scores.chain(kernels).chain(links).chain(overlap).collect()
    }

    /// Returns the times as the table `[measured]` of a cluster file, without blocks. Without times, it is empty.
    pub(crate) fn to_toml(&self) -> String {
        let mut text = String::new();
        if let Some(overlap) = self.overlap {
            let _ = writeln!(text, "\n[measured]\noverlap = {overlap}");
        }
        for MeasuredProduct { rows, columns, inner, precision, seconds } in &self.products {
            let precision = precision.name();
            let _ = writeln!(
                text,
                "\n[[measured.product]]\nrows = {rows}\ncolumns = {columns}\ninner = {inner}\nprecision = \"{precision}\"\nseconds = {seconds}"
            );
        }
        for MeasuredScores { shape, seconds: [forward, backward] } in &self.scores {
            let ScoresShape { rows, sequence, heads, key_value_heads, head_size, precision } = shape;
            let precision = precision.name();
            let _ = writeln!(
                text,
                "\n[[measured.scores]]\nrows = {rows}\nsequence = {sequence}\nheads = {heads}\nkey_value_heads = {key_value_heads}\nhead_size = {head_size}\nprecision = \"{precision}\"\nforward_s = {forward}\nbackward_s = {backward}"
            );
        }
        for MeasuredKernel { kernel, rates } in &self.kernels {
            let [forward, backward] = rates.map(|rate| rate / 1e9);
            let kind = kernel.name();
            let _ = writeln!(
                text,
                "\n[[measured.kernel]]\nkind = \"{kind}\"\nforward_gb_per_s = {forward}\nbackward_gb_per_s = {backward}"
            );
        }
        for MeasuredLink { purpose, is_inside_node, bandwidth, latency } in &self.links {
            let (purpose, place) = (name_of(&LinkUse::NAMED, *purpose), name_of(&PLACES, *is_inside_node));
            let (rate, latency) = (bandwidth / 1e9, latency * 1e6);
            let _ = writeln!(
                text,
                "\n[[measured.link]]\nuse = \"{purpose}\"\nbetween = \"{place}\"\ngb_per_s = {rate}\nlatency_us = {latency}"
            );
        }
        text
    }
}
