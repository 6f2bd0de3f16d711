//! Writes the metrics of a run as an event file for TensorBoard.
//!
//! The file is a sequence of records: the length of the data (8 bytes), its checksum, the data, and its
//! checksum. All numbers are little-endian. A checksum is a masked CRC-32C, and the data is an `Event`
//! message of TensorBoard in the encoding of Protocol Buffers. Only the few fields that a scalar needs are
//! written here, so no library is needed.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use thiserror::Error;

use crate::train::metrics::Metrics;

/// The version that TensorBoard expects in the first event.
const VERSION: &str = "brain.Event:2";
/// The polynomial of CRC-32C (Castagnoli), with its bits in reverse order.
const CASTAGNOLI: u32 = 0x82f6_3b78;
/// The fields of `Event`, `Summary`, `Summary.Value` and `SessionLog`: a number and a wire type in one byte.
const WALL_TIME: u8 = field(1, WireType::Fixed64);
const STEP: u8 = field(2, WireType::Varint);
const FILE_VERSION: u8 = field(3, WireType::Bytes);
const SUMMARY: u8 = field(5, WireType::Bytes);
const SESSION_LOG: u8 = field(7, WireType::Bytes);
const VALUE: u8 = field(1, WireType::Bytes);
const TAG: u8 = field(1, WireType::Bytes);
const SIMPLE_VALUE: u8 = field(2, WireType::Fixed32);
const STATUS: u8 = field(1, WireType::Varint);
/// The status of a session that starts. TensorBoard then forgets later steps of earlier files.
const STARTS: u64 = 1;

/// An event file that grows by one event for each step.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

/// An event file cannot be written.
#[derive(Error)]
#[error(
    "{}: cannot be written: {source}; free some space, or write no event file (run.tensorboard=false)", path.display()
)]
pub struct EventFileError {
    path: PathBuf,
    source: io::Error,
}

pipewright_schedule::message_as_debug!(EventFileError);

impl EventFile {
    /// Creates the event file of a process in the folder of a run whose first `done` steps are finished.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn create(run: &Path, done: u64) -> Result<Self, EventFileError> {
        let name = format!("events.out.tfevents.{:010.0}.pipewright.{}", now().floor(), std::process::id());
        let path = run.join(name);
        let file = File::create_new(&path).map_err(|source| EventFileError { path: path.clone(), source })?;
        let mut events = Self { path, file };
        events.write(&event(now(), 0, FILE_VERSION, VERSION.as_bytes()))?;
        if done > 0 {
            let mut session = Vec::new();
            write_number(&mut session, STATUS, STARTS);
            events.write(&event(now(), done + 1, SESSION_LOG, &session))?;
        }
        Ok(events)
    }

    /// Appends the metrics of a step, which other programs can read immediately.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn step(&mut self, metrics: &Metrics) -> Result<(), EventFileError> {
        let summary = summary(&scalars(metrics));
        self.write(&event(now(), metrics.step, SUMMARY, &summary))
    }

    /// Appends the validation losses of an evaluation after a step whose other metrics are written.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn evaluation(&mut self, metrics: &Metrics) -> Result<(), EventFileError> {
        let summary = summary(&validation_scalars(metrics).collect::<Vec<_>>());
        self.write(&event(now(), metrics.step, SUMMARY, &summary))
    }

    fn write(&mut self, data: &[u8]) -> Result<(), EventFileError> {
        let written = self.file.write_all(&record(data)).and_then(|()| self.file.flush());
        written.map_err(|source| EventFileError { path: self.path.clone(), source })
    }
}

/// Returns the scalars of a step with their names. TensorBoard groups names by the part before the slash.
fn scalars(metrics: &Metrics) -> Vec<(String, f64)> {
    let mut scalars = vec![
        ("train/loss".to_owned(), metrics.loss),
        ("train/grad_norm".to_owned(), metrics.grad_norm),
        ("train/learning_rate".to_owned(), metrics.learning_rate),
        (format!("speed/{}_per_second", metrics.counted()), metrics.tokens_per_second),
        ("speed/step_ms".to_owned(), metrics.step_ms),
        ("speed/bubble_fraction".to_owned(), metrics.bubble_fraction),
        ("speed/exposed_comm_fraction".to_owned(), metrics.exposed_comm_fraction),
    ];
    scalars.extend(metrics.gap_ms.map(|value| ("speed/gap_ms".to_owned(), value)));
    scalars.extend(metrics.accuracy.map(|value| ("train/accuracy".to_owned(), value)));
    scalars.extend(metrics.loss_scale.map(|value| ("train/loss_scale".to_owned(), value)));
    scalars.extend(metrics.model_tflops.map(|value| ("speed/model_tflops".to_owned(), value)));
    scalars.extend(metrics.mfu.map(|value| ("speed/mfu".to_owned(), value)));
    scalars.extend(metrics.planned_step_ms.map(|value| ("speed/planned_step_ms".to_owned(), value)));
    scalars.extend(metrics.predicted_step_ms.map(|value| ("speed/predicted_step_ms".to_owned(), value)));
    let interval = metrics.checkpoint_interval.map(|steps| ("checkpoint/interval".to_owned(), steps as f64));
    scalars.extend(interval);
    scalars.extend(metrics.checkpoint_cost_ms.map(|value| ("checkpoint/cost_ms".to_owned(), value)));
    scalars.extend(validation_scalars(metrics));
    for (name, values) in
        [("preference", &metrics.preference), ("preference_validation", &metrics.validation_preference)]
    {
        scalars.extend(values.iter().map(|(key, value)| (format!("{name}/{key}"), *value)));
    }
    scalars.extend(metrics.auxiliary.iter().map(|(name, loss)| (format!("auxiliary/{name}"), *loss)));
    let ranks = (0..).zip(&metrics.bubble_per_rank);
    scalars.extend(ranks.map(|(rank, bubble): (u32, _)| (format!("bubble/rank_{rank}"), *bubble)));
    for (name, times) in [
        ("expert_exchange_ms", &metrics.expert_exchange_ms),
        ("exposed_expert_exchange_ms", &metrics.exposed_expert_exchange_ms),
        ("expert_wait_ms", &metrics.expert_wait_ms),
    ] {
        let ranks = (0..).zip(times);
        scalars.extend(ranks.map(|(rank, time): (u32, _)| (format!("{name}/rank_{rank}"), *time)));
    }
    let ranks = (0..).zip(&metrics.peak_bytes);
    scalars.extend(ranks.map(|(rank, bytes): (u32, _)| (format!("peak_bytes/rank_{rank}"), *bytes as f64)));
    scalars
}

/// Returns the validation losses of a step with their names.
fn validation_scalars(metrics: &Metrics) -> impl Iterator<Item = (String, f64)> {
    let whole = metrics.validation_loss.map(|loss| ("validation/loss".to_owned(), loss));
    let of_tokens = [
        metrics.validation_perplexity.map(|perplexity| ("validation/perplexity".to_owned(), perplexity)),
        metrics.validation_accuracy.map(|accuracy| ("validation/accuracy".to_owned(), accuracy)),
    ];
    let sources = (1..).zip(&metrics.validation_sources);
    let source_losses = sources
        .filter_map(|(number, source): (u32, _)| Some((format!("validation/source_{number}"), source.loss?)));
    whole.into_iter().chain(of_tokens.into_iter().flatten()).chain(source_losses)
}

/// Returns a `Summary` message.
fn summary(scalars: &[(String, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (name, value) in scalars {
        let mut entry = Vec::new();
        write_bytes(&mut entry, TAG, name.as_bytes());
        entry.push(SIMPLE_VALUE);
        entry.extend((*value as f32).to_le_bytes());
        write_bytes(&mut summary, VALUE, &entry);
    }
    summary
}

/// Returns an `Event` message with one member besides its time and its step.
fn event(wall_time: f64, step: u64, member: u8, content: &[u8]) -> Vec<u8> {
    let mut event = vec![WALL_TIME];
    event.extend(wall_time.to_le_bytes());
    if step > 0 {
        write_number(&mut event, STEP, step);
    }
    write_bytes(&mut event, member, content);
    event
}

/// Returns a record with this data.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let [of_length, of_data] = [&length[..], data].map(|bytes| masked(crc32c(bytes)).to_le_bytes());
    [&length[..], &of_length, data, &of_data].concat()
}

/// How a field is encoded.
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

/// Returns the first byte of a field with a number below 16.
const fn field(number: u8, kind: WireType) -> u8 {
    number << 3 | kind as u8
}

fn write_number(message: &mut Vec<u8>, field: u8, number: u64) {
    message.push(field);
    write_varint(message, number);
}

fn write_bytes(message: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    message.push(field);
    write_varint(message, bytes.len() as u64);
    message.extend(bytes);
}

/// Appends a number in groups of seven bits, the lowest first; all bytes but the last have their highest bit
/// set.
fn write_varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number as u8 | 0x80);
        number >>= 7;
    }
    message.push(number as u8);
}

/// Returns the CRC-32C of some bytes, bit by bit: a step has about a thousand bytes, so a table would not
/// pay.
fn crc32c(bytes: &[u8]) -> u32 {
    let next = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { CASTAGNOLI } else { 0 })
    };
    !bytes.iter().fold(!0, next)
}

/// Returns a masked checksum. The mask keeps apart the checksums of a record and of data that contains
/// checksums.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // The examples of RFC 3720, B.4, and the check value of the CRC catalogue.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_have_the_bytes_of_tensorboard() {
        let version = record(&event(1.5, 0, FILE_VERSION, VERSION.as_bytes()));
        let expected = "18000000000000\
00a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a32";
        assert!(hexadecimal(&version).starts_with(expected), "{}", hexadecimal(&version));
        let scalar = event(2.0, 300, SUMMARY, &summary(&[("train/loss".to_owned(), 0.5)]));
        let expected = "09000000000000004010ac022a130a110a0a747261696e2f6c6f737315\
0000003f";
        assert_eq!(hexadecimal(&scalar), expected);
    }

    fn hexadecimal(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
