//! Checks of this crate against the reference vectors, the tiny checkpoint and malformed input.

mod checkpoint;
mod common;
mod config;
mod device_layers;
mod full_layers;
mod fuzz;
mod layers;
mod malformed_checkpoints;
mod malformed_configs;
mod models;
mod tiny_dsa;
mod tokenizer;
