//! What every device must show, generic over the device: one function for each contract, named
//! after it. A device crate lists them with [`device_suite`] and says how its device is made.

pub mod choice;
pub mod compare;
pub mod dense;
pub mod dense_inputs;
pub mod dense_run;
pub mod exact;
pub mod hadamard;
pub mod indexer;
pub mod indexer_edges;
pub mod indexer_inputs;
pub mod indexer_replay;
pub mod indexer_run;
pub mod invariance;
pub mod layer;
pub mod linear;
pub mod merge;
pub mod owners;
pub mod partials;
pub mod pool;
pub mod prepared;
pub mod random;
pub mod replay;
pub mod selection;
pub mod sparse;
pub mod sparse_edges;
pub mod sparse_exact;
pub mod sparse_inputs;
pub mod sparse_replay;
pub mod sparse_run;
pub mod streams;
pub mod writer;

use mlakit::Runs;
use mlakit::op::activation::Activation;
use mlakit::op::dense::Dense;
use mlakit::op::embed::Embed;
use mlakit::op::linear::Linear;
use mlakit::op::merge::Merge;
use mlakit::op::norm::Norm;
use mlakit::op::projection::Projection;
use mlakit::op::rotary::Rotary;
use mlakit::op::route::Route;
use mlakit::op::sample::Sample;
use mlakit::op::writer::Writer;

/// A device that runs every operation.
pub trait SuiteDevice:
    Runs<Activation>
    + Runs<Dense>
    + Runs<Embed>
    + Runs<Linear>
    + Runs<Merge>
    + Runs<Norm>
    + Runs<Projection>
    + Runs<Rotary>
    + Runs<Route>
    + Runs<Sample>
    + Runs<Writer>
{
}

impl<D> SuiteDevice for D where
    D: Runs<Activation>
        + Runs<Dense>
        + Runs<Embed>
        + Runs<Linear>
        + Runs<Merge>
        + Runs<Norm>
        + Runs<Projection>
        + Runs<Rotary>
        + Runs<Route>
        + Runs<Sample>
        + Runs<Writer>
{
}

/// Declares a test for each contract. `$device` makes a fresh device for a test, or says why this
/// machine has none and gives `None`.
macro_rules! device_suite {
    ($device:expr) => {
        $crate::suite::device_suite! { @each $device;
            activation_and_embed_prepare = prepared::embed_and_activation_prepare,
            dense_prepares = prepared::dense_prepares,
            linear_prepares = prepared::linear_prepares,
            merge_prepares = prepared::merge_prepares,
            norm_prepares = prepared::norm_prepares,
            projection_prepares = prepared::projection_prepares,
            rotary_prepares = prepared::rotary_prepares,
            route_and_sample_prepare = prepared::route_and_sample_prepare,
            writer_prepares = prepared::writer_prepares,
            dense_agrees_with_the_oracle = dense::agrees_with_the_oracle,
            dense_counts_what_is_out_of_bounds = dense::counts_what_is_out_of_bounds,
            dense_sees_only_what_is_referred_to = dense::sees_only_what_is_referred_to,
            scores_of_minus_infinity = dense::scores_of_minus_infinity_weigh_nothing,
            a_nan_key_stays_with_the_rows_that_see_it =
                dense::a_nan_key_stays_with_the_rows_that_see_it,
            pages_beyond_two_gibibytes = dense::pages_beyond_two_gibibytes,
            equal_keys_give_their_value = exact::equal_keys_give_their_value,
            a_saturated_score_gives_its_value = exact::a_saturated_score_gives_its_value,
            two_equal_scores_give_the_mean = exact::two_equal_scores_give_the_mean,
            fixed_splits_know_no_company = invariance::fixed_splits_know_no_company,
            a_call_repeats_itself = invariance::a_call_repeats_itself,
            linear_agrees_with_the_oracle = linear::agrees_with_the_oracle,
            linear_rows_know_no_company = linear::rows_know_no_company,
            projections_agree_and_know_no_company = linear::projections_agree_and_know_no_company,
            norms_agree_and_know_no_company = layer::norms_agree_and_know_no_company,
            rotations_agree = layer::rotations_agree,
            embeddings_are_exact = layer::embeddings_are_exact,
            activations_agree = layer::activations_agree,
            routes_agree_and_know_no_company = choice::routes_agree_and_know_no_company,
            routes_break_ties_by_index = choice::routes_break_ties_by_index,
            samples_agree = choice::samples_agree,
            strange_logits_give_an_id = choice::strange_logits_give_an_id,
            merge_agrees_with_the_oracle = merge::agrees_with_the_oracle,
            what_weighs_nothing_changes_no_bit = merge::what_weighs_nothing_changes_no_bit,
            the_partial_dtype_changes_one_region = partials::the_dtype_changes_one_region,
            a_thousand_replays_equal_eager_runs = replay::a_thousand_replays_equal_eager_runs,
            eager_and_replay_are_the_same_bits = replay::eager_and_replay_are_the_same_bits,
            a_released_pool_is_stale_until_it_is_bound_again =
                owners::a_released_pool_is_stale_until_it_is_bound_again,
            a_call_bound_before_the_release_is_refused =
                owners::a_call_bound_before_the_release_is_refused,
            another_page_geometry_is_refused = owners::another_page_geometry_is_refused,
            a_leaked_submission_is_harmless = owners::a_leaked_submission_is_harmless,
            a_frozen_device_names_the_missing_spec =
                owners::a_frozen_device_names_the_missing_spec,
            threads_with_streams_of_their_own = streams::threads_with_streams_of_their_own,
            an_undeclared_order_is_busy = streams::an_undeclared_order_is_busy,
            a_declared_order_is_not_busy = streams::a_declared_order_is_not,
            writer_writes_the_bytes_of_the_oracle = writer::writes_the_bytes_of_the_oracle,
            replays_write_the_bytes_of_the_oracle =
                writer::replays_write_the_bytes_of_the_oracle,
            slots_beyond_two_gibibytes = writer::slots_beyond_two_gibibytes,
            tokens_of_another_kind_are_refused = writer::tokens_of_another_kind_are_refused,
        }
    };
    (sparse $device:expr) => {
        $crate::suite::device_suite! { @each $device;
            sparse_prepares = sparse::prepares,
            sparse_agrees_with_the_oracle = sparse::agrees_with_the_oracle,
            every_record_agrees = sparse::every_record_agrees,
            lists_of_every_width = sparse::lists_of_every_width,
            any_number_of_heads = sparse::any_number_of_heads,
            positions_are_looked_up_in_the_kernel = sparse::positions_are_looked_up_in_the_kernel,
            sparse_sees_only_what_is_referred_to = sparse::sees_only_what_is_referred_to,
            selected_pages_beyond_two_gibibytes = sparse::pages_beyond_two_gibibytes,
            entries_out_of_bounds_are_skipped_and_counted =
                sparse_edges::entries_out_of_bounds_are_skipped_and_counted,
            a_row_without_a_key_is_zero = sparse_edges::a_row_without_a_key_is_zero,
            counts_are_clamped = sparse_edges::counts_are_clamped,
            requests_without_tokens = sparse_edges::requests_without_tokens,
            more_entries_than_keys = sparse_edges::more_entries_than_keys,
            a_token_selected_twice_counts_twice =
                sparse_edges::a_token_selected_twice_counts_twice,
            infinite_sinks = sparse_edges::infinite_sinks,
            a_scope_may_be_empty = sparse_edges::a_scope_may_be_empty,
            scopes_of_different_records = sparse_edges::scopes_of_different_records,
            seventy_thousand_rows = sparse_edges::seventy_thousand_rows,
            positions_around_65536 = sparse_edges::positions_around_65536,
            splits_that_get_no_column = sparse_edges::splits_that_get_no_column,
            selected_scores_of_minus_infinity =
                sparse_edges::scores_of_minus_infinity_weigh_nothing,
            a_nan_token_reaches_the_rows_that_select_it =
                sparse_edges::a_nan_token_reaches_the_rows_that_select_it,
            selected_rows_know_no_company = sparse_edges::rows_know_no_company,
            operands_are_checked = sparse_edges::operands_are_checked,
            a_sparse_call_repeats_itself = sparse_exact::a_call_repeats_itself,
            equal_tokens_give_their_value = sparse_exact::equal_tokens_give_their_value,
            a_saturated_token_gives_its_value = sparse_exact::a_saturated_token_gives_its_value,
            two_equal_tokens_give_the_mean = sparse_exact::two_equal_tokens_give_the_mean,
            sparse_replays_equal_eager_runs = sparse_replay::replays_equal_eager_runs,
        }
    };
    (indexer $device:expr) => {
        $crate::suite::device_suite! { @each $device;
            indexer_prepares = indexer::prepares,
            indexer_agrees_with_the_oracle = indexer::agrees_with_the_oracle,
            ordinary_scores_agree = indexer::ordinary_scores_agree,
            indexed_rows_know_no_company = indexer::rows_know_no_company,
            indexer_calls_in_the_same_memory_agree = indexer::calls_in_the_same_memory_agree,
            indexer_replays_equal_eager_runs = indexer_replay::replays_equal_eager_runs,
            a_million_keys_in_a_small_budget = indexer::a_million_keys_in_a_small_budget,
            a_budget_too_small_is_refused = indexer::a_budget_too_small_is_refused,
            indexer_operands_are_checked = indexer::operands_are_checked,
            equal_scores_go_to_the_smaller_position =
                indexer_edges::equal_scores_go_to_the_smaller_position,
            near_ties_are_told_apart = indexer_edges::near_ties_are_told_apart,
            scores_sorted_both_ways = indexer_edges::sorted_both_ways,
            infinities_and_nan_have_their_place =
                indexer_edges::infinities_and_nan_have_their_place,
            an_infinite_key_has_an_infinite_score =
                indexer_edges::an_infinite_key_has_an_infinite_score,
            short_rows_select_everything = indexer_edges::short_rows_select_everything,
            lengths_around_every_boundary = indexer_edges::lengths_around_every_boundary,
            bad_lengths_and_offsets_are_counted =
                indexer_edges::bad_lengths_and_offsets_are_counted,
            positions_beyond_the_pools_are_counted =
                indexer_edges::positions_beyond_the_pools_are_counted,
            scales_may_be_anything = indexer_edges::scales_may_be_anything,
            empty_indexer_calls = indexer_edges::empty_calls,
            seventy_thousand_indexed_rows = indexer_edges::seventy_thousand_rows,
            indexed_positions_around_65536 = indexer_edges::positions_around_65536,
            index_pages_beyond_two_gibibytes = indexer_edges::index_pages_beyond_two_gibibytes,
            selection_prepares = selection::prepares,
            selections_agree = selection::agrees_with_the_oracle,
            pools_of_four_make_2051_slots = selection::pools_of_four_make_2051_slots,
            pools_prepare = pool::prepares,
            steps_of_any_size_agree = pool::steps_of_any_size_agree,
            rejected_drafts_leave_no_trace = pool::rejected_drafts_leave_no_trace,
            what_is_not_there_is_left_out = pool::what_is_not_there_is_left_out,
            hadamard_agrees_with_the_definition = hadamard::agrees_with_the_definition,
            layer_norms_agree = layer::layer_norms_agree_and_know_no_company,
            rotations_of_a_part_agree = layer::rotations_of_a_part_agree,
            gates_apart_agree = layer::gates_apart_agree,
        }
    };
    (@each $device:expr; $($name:ident = $module:ident::$contract:ident,)*) => {
        $(
            #[test]
            fn $name() {
                if let Some(device) = $device {
                    $crate::suite::$module::$contract(&device);
                }
            }
        )*
    };
}
pub(crate) use device_suite;
