//! What every device must show, generic over the device: one function for each contract, named
//! after it. A device crate lists them with [`device_suite`] and says how its device is made.

pub mod choice;
pub mod compare;
pub mod dense;
pub mod dense_inputs;
pub mod dense_run;
pub mod exact;
pub mod invariance;
pub mod layer;
pub mod linear;
pub mod merge;
pub mod owners;
pub mod partials;
pub mod prepared;
pub mod random;
pub mod replay;
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
