//! Contracts of layers and models on a device, generic over it: this crate's tests list them for the
//! CPU, the tests of another device crate for that device.

/// Declares a test for each contract. `$device` makes the device of a test, or says why this machine
/// has none and gives `None`.
macro_rules! model_suite {
    ($device:expr) => {
        $crate::device::model_suite! { @each $device;
            prefill_in_chunks = device_layers,
            decode_through_the_paged_cache = device_layers,
            packed_sequences_of_several_lengths = device_layers,
            positions_that_do_not_begin_at_zero = device_layers,
            e4m3_caches_against_the_dequantised_cache = device_layers,
            the_oracle_honours_the_record = device_layers,
            a_layer_of_real_widths = device_layers,
            greedy_ids_of_whole_models = device_layers,
            greedy_ids_of_a_model_with_an_indexer = device_layers,
            logits_of_the_first_128_tokens = device_tiny,
            broken_weights_are_refused = device_tiny,
            greedy_text_is_that_of_transformers = device_tiny,
        }
    };
    (@each $device:expr; $($contract:ident = $module:ident,)*) => {
        $(
            #[test]
            fn $contract() {
                if let Some(device) = $device {
                    $crate::$module::$contract(&device);
                }
            }
        )*
    };
}
pub(crate) use model_suite;
