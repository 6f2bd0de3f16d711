//! Tests of predictions for clusters.

mod comparison;
mod data;

mod adapters;
mod bad_input;
mod configs;
mod emitted;
mod goodput_table;
mod measured;
mod memory;
mod operations;
mod parameters;
mod pipelines;
mod properties;
mod published;
mod scaling;
mod search;
mod search_memory;
