//! Contracts of layers and models on a device, generic over it: this crate's tests list them for the
//! CPU, the tests of another device crate for that device.

/// Declares a test for each contract; `sparse` for those of layers that select their keys. `$device` makes the device of a test, or says why this machine
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
            models_with_indexers_attending_to_every_key = device_layers,
            logits_of_the_first_128_tokens = device_tiny,
            broken_weights_are_refused = device_tiny,
            greedy_text_is_that_of_transformers = device_tiny,
        }
    };
    (sparse $device:expr) => {
        $crate::device::model_suite! { @each $device;
            sparse_layers_with_their_selection = device_sparse,
            sparse_layers_select_for_themselves = device_sparse,
            sparse_decode_through_the_paged_cache = device_sparse,
            packed_sparse_sequences = device_sparse,
            sparse_layers_of_real_widths = device_sparse,
            every_record_against_the_dequantised_cache = device_sparse,
            selecting_every_key_is_dense_attention = device_sparse,
            gated_layers = device_sparse,
            greedy_ids_of_sparse_models = device_sparse,
            selections_of_the_tiny_checkpoint = device_tiny,
            bits_per_byte_of_the_tiny_checkpoint = device_tiny,
            sparse_greedy_text_is_that_of_transformers = device_tiny,
            decode_across_the_top_k = device_tiny,
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
