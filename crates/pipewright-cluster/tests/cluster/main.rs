//! Tests of predictions for clusters.

mod comparison;
mod data;

mod adapters;
mod bad_input;
mod configs;
mod emitted;
mod goodput_table;
mod judged;
mod measured;
mod memory;
mod mixed;
mod model_keys;
mod operations;
mod parameters;
mod pipelines;
mod properties;
mod published;
mod scaling;
mod search;
mod search_memory;
mod second_runs;
mod uncommon;
