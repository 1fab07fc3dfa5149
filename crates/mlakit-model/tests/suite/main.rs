//! Checks of this crate against the reference vectors, the tiny checkpoint and malformed input.

mod checkpoint;
mod common;
mod config;
mod device;
mod device_layers;
mod device_sparse;
mod device_tiny;
mod full_layers;
mod fuzz;
mod layers;
mod malformed_checkpoints;
mod malformed_configs;
mod models;
mod router;
mod tiny_dsa;
mod tokenizer;

mod cpu {
    crate::device::model_suite!(Some(mlakit_cpu::Cpu::detect().unwrap()));
    crate::device::model_suite!(sparse Some(mlakit_cpu::Cpu::detect().unwrap()));

    #[test]
    fn logits_in_near_ties() {
        crate::device_tiny::near_ties_included(&mlakit_cpu::Cpu::detect().unwrap());
    }
}
