//! What owners may do at any time, and what whoever still holds a right to their memory then gets.

use mlakit::op::dense::Dense;
use mlakit::op::merge::Partial;
use mlakit::{Category, Error, PageGeometry, Pages, Plan, RecordLayout, Splits};

use super::SuiteDevice;
use super::dense_inputs::{DenseInputs, shape};
use super::dense_run::{Operands, prepare};
use super::random::Rng;
use super::replay::{Eager, Replayed, Step, World, fill, same};

/// A released pool: replays say so, and the ledger has its bytes back. A refilled one that is bound
/// again replays to the same bits, without a new capture.
pub fn a_released_pool_is_stale_until_it_is_bound_again<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, Splits::Auto, Partial::Bf16);
    let mut replayed = Replayed::new(&mut stream, &world);
    assert_eq!(replayed.graph.replay(&mut stream).err(), Some(Error::Unbound));
    let step = Step::new(&mut Rng(1));
    replayed.run(&mut stream, &world, (&step, true));
    let needed = replayed.given(&mut stream);

    let bound = replayed.graph.bind(&mut stream, replayed.view, &world.pools[0]);
    bound.unwrap();
    let before = device.census().live(Category::Cache);
    let (held, pages) = (world.pools[0].epoch(), world.pools[0].pages());
    let bytes = pages * world.pools[0].page_stride_bytes();
    world.pools[0].release();
    assert_eq!(device.census().live(Category::Cache), before - bytes);
    assert_eq!(device.census().live(Category::Retiring), 0, "nothing in flight uses it");
    let current = world.pools[0].epoch();
    assert!(current > held);
    let refused = replayed.graph.replay(&mut stream).err();
    assert_eq!(refused, Some(Error::StaleEpoch { held, current }));
    let unbound = replayed.graph.bind(&mut stream, replayed.view, &world.pools[0]).err();
    assert_eq!(unbound, Some(Error::Unbound), "there is nothing to bind");

    world.pools[0].refill(pages).unwrap();
    let refused = replayed.graph.replay(&mut stream).err();
    assert!(matches!(refused, Some(Error::StaleEpoch { .. })), "a new pool is not bound yet");
    for (seed, pool) in world.pools.iter_mut().enumerate() {
        fill(pool, seed as u64);
    }
    replayed.run(&mut stream, &world, (&step, true));
    same("after the refill", &replayed.given(&mut stream), &needed);
}

/// A call that was bound before its pool went is refused when it is run.
pub fn a_call_bound_before_the_release_is_refused<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let inputs = DenseInputs::new(&shape(3, (66, 34), &[(70, 1)]), 1);
    let prepared = prepare(device, &inputs.spec);
    let mut operands = Operands::new(&mut stream, &inputs, &prepared);
    let needed = operands.run(&mut stream, &prepared);
    operands.pool.release();
    let refused = prepared.bind(operands.args()).unwrap().run(&mut stream).err();
    assert!(matches!(refused, Some(Error::StaleEpoch { .. })), "{refused:?}");
    assert_eq!(operands.outcome(), needed, "and nothing was written");
}

/// A pool of another page size, record or width is refused by name, and the view stays bound.
pub fn another_page_geometry_is_refused<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(device, Splits::Auto, Partial::Bf16);
    let mut replayed = Replayed::new(&mut stream, &world);
    let step = Step::new(&mut Rng(2));
    replayed.run(&mut stream, &world, (&step, true));
    let needed = replayed.given(&mut stream);
    let own = world.pools[0].geometry();
    let wider = RecordLayout { width: own.record.width + 2, ..own.record };
    for other in [PageGeometry { page_size: 32, ..own }, PageGeometry { record: wider, ..own }] {
        let pool = Pages::new(device, "other pool", other, 4).unwrap();
        let refused = replayed.graph.bind(&mut stream, replayed.view, &pool).err();
        let (needed, given) = (own.to_string(), other.to_string());
        assert_eq!(refused, Some(Error::PageGeometry { needed, given }));
    }
    let _ = replayed.graph.replay(&mut stream).unwrap();
    same("after the refusals", &replayed.given(&mut stream), &needed);
}

/// A leaked submission holds nothing up: slots are written, replays follow, owners go.
pub fn a_leaked_submission_is_harmless<D: SuiteDevice>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, Splits::Count(2), Partial::F32);
    let mut replayed = Replayed::new(&mut stream, &world);
    let mut eager = Eager::new(device, &world);
    let steps = [3, 4].map(|seed| Step::new(&mut Rng(seed)));
    let needed = steps.each_ref().map(|step| {
        eager.run(&mut stream, &mut world, step);
        eager.given(&mut stream)
    });
    for (seed, pool) in world.pools.iter_mut().enumerate() {
        fill(pool, seed as u64);
    }
    for (step, needed) in steps.iter().zip(&needed) {
        replayed.run(&mut stream, &world, (step, false));
        let _ = Box::leak(Box::new(replayed.graph.replay(&mut stream).unwrap()));
        same("after a leak", &replayed.given(&mut stream), needed);
    }
    let _ = Box::leak(Box::new(replayed.graph.replay(&mut stream).unwrap()));
    drop((replayed, world, eager));
    stream.wait().unwrap();
    for category in [Category::Cache, Category::Slots, Category::Scratch, Category::Retiring] {
        assert_eq!(device.census().live(category), 0, "{category}");
    }
}

/// A frozen device runs what is prepared and names the `Spec` that is not.
pub fn a_frozen_device_names_the_missing_spec<D: SuiteDevice>(device: &D) {
    let inputs = DenseInputs::new(&shape(3, (66, 34), &[(70, 1)]), 1);
    let prepared = prepare(device, &inputs.spec);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut operands = Operands::new(&mut stream, &inputs, &prepared);
    let needed = operands.run(&mut stream, &prepared);
    device.freeze();
    let again = prepare(device, &inputs.spec);
    assert_eq!(operands.run(&mut stream, &again), needed);
    let missing = shape(4, (66, 34), &[(70, 1)]).spec();
    let plan = Plan::<Dense>::for_device::<D>(&missing, device.facts()).unwrap();
    match plan.prepare(device).err() {
        Some(Error::Frozen { spec }) => {
            assert!(spec.contains("dense") && spec.contains("heads: 4"), "{spec}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(operands.run(&mut stream, &prepared), needed);
}
