use mlakit::Plan;
use mlakit::op::dense::DenseFields;
use mlakit::op::spec::Scalar;
use mlakit::splits::Budget;

use super::*;
use crate::options::DenseFamily;

fn fields([batch, rows, heads, tokens]: [usize; 4]) -> DenseFields {
    DenseFields {
        heads,
        qk_width: 576,
        value_width: 512,
        record: RecordFormat::Bf16,
        record_width: None,
        page_size: 64,
        softmax_scale: Scalar::try_from(0.1).unwrap(),
        lse: Default::default(),
        sink_in_lse: false,
        query: Default::default(),
        quantize_query: false,
        partial: Default::default(),
        splits: Splits::Auto,
        budget: Default::default(),
        window: None,
        row_lengths: false,
        max_rows: batch * rows,
        max_batch: batch,
        max_kv_tokens: tokens,
        max_table_width: tokens.div_ceil(64),
    }
}

fn h200() -> Facts {
    Facts::preset("h200").unwrap()
}

fn plan(facts: &Facts, fields: DenseFields) -> Result<Plan<Dense>, Error> {
    Plan::for_device::<Cuda>(&DenseSpec::new(fields).unwrap(), facts)
}

fn planned(fields: DenseFields) -> Choice {
    plan(&h200(), fields).unwrap().choice().clone()
}

#[test]
fn a_request_of_16_pairs_has_narrow_tiles() {
    assert_eq!(planned(fields([8, 1, 16, 4096])).kernel, NARROW);
    assert_eq!(planned(fields([8, 1, 17, 4096])).kernel, WIDE);
    assert_eq!(planned(fields([8, 4, 16, 4096])).kernel, WIDE);
    // With fixed splits the kernel does not follow from the capacities.
    let fixed = |shape| DenseFields { splits: Splits::FixedTokens(256), ..fields(shape) };
    assert_eq!(planned(fixed([8, 4, 16, 4096])).kernel, NARROW);
    assert_eq!(planned(fixed([8, 4, 17, 4096])).kernel, WIDE);
}

#[test]
fn what_it_does_not_run_is_portable_and_says_why() {
    let usual = [2, 1, 16, 1000];
    let reason = |fields: DenseFields| {
        let choice = planned(fields);
        assert_eq!(choice.kernel, "portable_dense");
        choice.note.unwrap()
    };
    assert!(reason(DenseFields { window: Some(66), ..fields(usual) }).contains("window"));
    let narrow = DenseFields { qk_width: 320, value_width: 256, ..fields(usual) };
    assert!(reason(narrow).contains("576/512"));
    let e4m3 = DenseFields { record: RecordFormat::E4m3, ..fields(usual) };
    assert!(reason(e4m3).contains("bf16 records"));
    let odd = DenseFields { record_width: Some(577), ..fields(usual) };
    assert!(reason(odd).contains("16 bytes"));
    let count = DenseFields { splits: Splits::Count(3), ..fields(usual) };
    assert!(reason(count).contains("number of splits"));
    let budget = Budget { max_splits: Some(3), max_partial_rows: None };
    assert!(reason(DenseFields { budget, ..fields(usual) }).contains("budget"));
    let many = DenseFields { max_rows: 1 << 24, heads: 1 << 8, ..fields(usual) };
    assert!(reason(many).contains("31 bits"));
    let long = DenseFields { splits: Splits::FixedTokens(64), ..fields([1, 1, 16, 1 << 21]) };
    assert!(reason(long).contains("16384 splits"));
    for gpu in Facts::PRESETS.into_iter().filter(|gpu| !["h100", "h200"].contains(gpu)) {
        let choice = plan(&Facts::preset(gpu).unwrap(), fields(usual)).unwrap().choice().clone();
        assert_eq!((choice.kernel, choice.note), ("portable_dense", None), "{gpu}");
    }
}

#[test]
fn one_family_can_be_asked_for() {
    let facts = |family| Facts { dense: Some(family), ..h200() };
    let usual = fields([2, 1, 16, 1000]);
    let portable = plan(&facts(DenseFamily::Portable), usual.clone()).unwrap();
    assert_eq!(portable.choice().kernel, "portable_dense");
    assert_ne!(portable.planned_for(), h200().to_string());
    assert_eq!(plan(&facts(DenseFamily::Hopper), usual.clone()).unwrap().choice().kernel, NARROW);
    match plan(&facts(DenseFamily::Hopper), DenseFields { window: Some(9), ..usual }) {
        Err(Error::Refused(refusal)) => assert!(refusal.because.contains("window")),
        other => panic!("{other:?}"),
    }
}

/// Scratch is what slots of splits need, or slots of blocks where those need less, and follows from
/// the dtype of partial results in one region alone.
#[test]
fn scratch_is_as_large_as_its_slots() {
    let bytes = |fields: DenseFields, name| {
        let plan = plan(&h200(), fields).unwrap();
        plan.scratch().iter().find(|region| region.name == name).unwrap().bytes
    };
    let rows_of = |fields: DenseFields| {
        let rows = bytes(fields.clone(), Dense::PARTIAL_LSE) / 4;
        assert_eq!(bytes(fields.clone(), Dense::PARTIAL_OUT), rows * 512 * 2);
        let wide = DenseFields { partial: Partial::F32, ..fields };
        assert_eq!(bytes(wide.clone(), Dense::PARTIAL_OUT), rows * 512 * 4);
        assert_eq!(bytes(wide, Dense::PARTIAL_LSE), rows * 4);
        rows
    };
    assert_eq!(rows_of(fields([1, 1, 16, 4096])), 64 * 16);
    assert_eq!(rows_of(fields([1, 1, 16, 1 << 20])), 132 * 16);
    assert_eq!(rows_of(fields([128, 1, 16, 4096])), 2 * 132 * 16);
    assert_eq!(rows_of(fields([128, 1, 128, 4096])), 2 * 132 * 64);
    assert_eq!(rows_of(fields([128, 1, 16, 64])), 0);
    let fixed = DenseFields { splits: Splits::FixedTokens(1024), ..fields([8, 2, 16, 4000]) };
    assert_eq!(rows_of(fixed), 4 * 16 * 16);
}

#[test]
fn shared_memory_is_that_of_the_kernels() {
    let bytes = |narrow| shared_bytes((576, 512), narrow);
    assert_eq!([true, false].map(bytes), [173_056, 228_352]);
    let largest = h200().shared_bytes_per_block;
    assert!(manifest().iter().all(|source| source.dynamic_shared_bytes <= largest));
}
