//! Spec, plan, prepare, bind, run, capture, replay: the same on a device that works at once and on
//! one that works late.

mod common;
use common::*;
use mlakit::Error::Foreign;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A test on both devices.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod on_both {
            use super::*;
            $(#[test]
            fn $name() {
                let (now, late) = (AtOnce::new(2), Late::new(2));
                super::$name(&now);
                is_clean(&now);
                super::$name(&late);
                is_clean(&late);
            })*
        }
    };
}

on_both! {
    probes_are_gone_when_prepare_returns
    a_failing_preparation_leaves_nothing
    a_warm_up_cannot_touch_live_memory
    eager_and_replayed_steps_agree
    a_replay_calls_neither_plan_nor_bind
    a_frozen_device_names_the_missing_spec
    operands_are_checked_when_bound
    a_cache_of_another_geometry_is_refused
    an_unbound_view_does_not_replay
    a_failed_or_panicking_capture_gives_the_stream_back
    slots_keep_their_address_and_capacity
    weights_reload_in_place
    a_view_that_was_bound_again_ends_its_leases
    a_recorder_takes_keys_of_its_own_set
}

fn probes_are_gone_when_prepare_returns<D: Toy>(device: &D) {
    let (scale, sum) = plans::<D>(device.facts());
    let mut live_within = 0;
    let (_scale, seen) = scale
        .prepare_with(device, |warm| {
            let probe = warm.probe::<f32>(&[1.0; 100])?;
            std::mem::forget(probe); // a handle: nothing is lost
            live_within = device.census().live(Category::Probe);
            Ok(7)
        })
        .unwrap();
    let _sum = sum.prepare(device).unwrap();
    let census = device.census();
    assert_eq!(seen, 7);
    assert!(live_within >= 400 && census.peak(Category::Probe) >= live_within);
    assert_eq!((census.live(Category::Probe), census.live(Category::Retiring)), (0, 0));
    assert!(census.live(Category::Code) > 0);
}

fn a_failing_preparation_leaves_nothing<D: Toy>(device: &D) {
    let (scale, sum) = plans::<D>(device.facts());
    let fail = sum.prepare_with(device, |warm| -> Result<(), Error> {
        let x = warm.probe::<f32>(&[0.0; ROWS * 16])?;
        let (mut out, mut scratch) = (warm.probe::<f32>(&[0.0; ROWS])?, warm.scratch()?);
        let (x, out) = ((&x).into(), (&mut out).into());
        warm.run(SumArgs { x, out, scratch: (&mut scratch).into() })?;
        Err(Error::Unbound) // with that launch still in the queue
    });
    assert_eq!(fail.err(), Some(Error::Unbound));
    assert_eq!(device.census().lines(), []);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        scale.prepare_with(device, |_| -> Result<(), Error> { panic!("in a warm-up") })
    }));
    assert!(panicked.is_err());
    assert_eq!(device.census().lines(), []);
}

fn a_warm_up_cannot_touch_live_memory<D: Toy>(device: &D) {
    let (scale, sum) = plans::<D>(device.facts());
    let live = tensor(device, "live", &[1.0; ROWS * 16]);
    let lease = live.lease();
    let tried = sum.prepare_with(device, |warm| {
        let (mut out, mut scratch) = (warm.probe::<f32>(&[0.0; ROWS])?, warm.scratch()?);
        let (out, scratch) = ((&mut out).into(), (&mut scratch).into());
        warm.run(SumArgs { x: (&lease).into(), out, scratch })
    });
    assert_eq!(tried.err(), Some(Foreign { what: "x" }));

    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let pool = filled_pool(device, &mut stream, 1.0);
    let mut view = PoolView::new(device, "live view", PAGE).unwrap();
    view.bind(&mut stream, &pool).unwrap();
    let tried = scale.prepare_with(device, |warm| {
        let (factor, ids) = (warm.probe::<f32>(&[1.0])?, warm.probe::<i32>(&[0; ROWS])?);
        let mut out = warm.probe::<f32>(&[0.0; ROWS * 16])?;
        let mut scratch = warm.scratch()?;
        let (factor, page_table) = ((&factor).into(), (&ids).into());
        let (out, scratch) = ((&mut out).into(), (&mut scratch).into());
        warm.run(ScaleArgs { factor, page_table, cache: view.lease(), out, scratch })
    });
    assert_eq!(tried.err(), Some(Foreign { what: "cache" }));
    stream.wait().unwrap();
}

fn eager_and_replayed_steps_agree<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, &mut stream);
    for ids in [[0, 1], [2, -1], [1, 1], [9, 0]] {
        world.graph.slot_mut(world.table).unwrap().write_on(&mut stream, &ids).unwrap();
        let replayed = world.replay(&mut stream);

        let (eager_table, eager_out) = (table(device, &ids), tensor(device, "o", &[0.0; ROWS]));
        let mut view = PoolView::new(device, "eager view", PAGE).unwrap();
        view.bind(&mut stream, &world.pool).unwrap();
        let args = ScaleArgs {
            factor: (&world.factor).into(),
            page_table: (&eager_table).into(),
            cache: (&view).into(),
            out: (&mut world.scaled).into(),
            scratch: (&mut world.lane).into(),
        };
        world.layer.scale.bind(args).unwrap().run(&mut stream).unwrap();
        let (x, out) = ((&world.scaled).into(), (&eager_out.lease()).into());
        let args = SumArgs { x, out, scratch: (&mut world.lane).into() };
        world.layer.sum.bind(args).unwrap().run(&mut stream).unwrap();
        stream.wait().unwrap();
        assert_eq!(eager_out.read().unwrap(), replayed);

        // The same step once more, by leases on a stream.
        let inputs = ((&eager_table.lease()).into(), view.lease());
        let (scaled, out) = (world.scaled.lease(), (&eager_out.lease()).into());
        world.layer.step(&mut stream, &world.lane, inputs, &scaled, out).unwrap();
        stream.wait().unwrap();
        assert_eq!(eager_out.read().unwrap(), replayed);
        let page = |id: i32| if (0..3).contains(&id) { of_page((id + 1) as f32) } else { 0.0 };
        assert_eq!(replayed, ids.map(page));
    }
    assert_eq!(world.lane.faults().unwrap(), [3, 0, 0], "page 9: replayed, borrowed, leased");
    world.lane.clear_faults().unwrap();
    assert_eq!(world.lane.faults().unwrap(), [0; 3]);
}

fn a_replay_calls_neither_plan_nor_bind<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, &mut stream);
    let before = device.keeper().counts();
    for step in 0..100 {
        world.graph.slot_mut(world.table).unwrap().write_on(&mut stream, &[step % 3, 0]).unwrap();
        assert_eq!(world.replay(&mut stream)[0], of_page((step % 3 + 1) as f32));
    }
    let after = device.keeper().counts();
    assert_eq!(after, Counts { submitted: before.submitted + 200, ..before });
}

fn a_frozen_device_names_the_missing_spec<D: Toy>(device: &D) {
    let (scale, sum) = plans::<D>(device.facts());
    let first = scale.prepare(device).unwrap();
    device.freeze();
    let again = scale.prepare(device).expect("its code is there: nothing to compile");
    let missing = sum.prepare(device).err();
    let names = |spec: &str| spec.contains("sum SumSpec(SumFields { rows: 2, width: 16 })");
    assert!(matches!(&missing, Some(Error::Frozen { spec }) if names(spec)), "{missing:?}");
    drop((first, again));
    assert!(matches!(scale.prepare(device).err(), Some(Error::Frozen { .. })), "its code is gone");
}

fn operands_are_checked_when_bound<D: Toy>(device: &D) {
    let (_, sum) = plans::<D>(device.facts());
    let sum = sum.prepare(device).unwrap();
    let mut lane = Lane::new(device, "lane", &[sum.plan().scratch_bytes()]).unwrap();
    let mut thin = Lane::new(device, "thin", &[]).unwrap();
    let x = tensor(device, "x", &[1.0; ROWS * 16]);
    let mut short = tensor(device, "short", &[1.0]);
    let (input, output) = ((&x).into(), (&mut short).into());
    let bound = sum.bind(SumArgs { x: input, out: output, scratch: (&mut lane).into() });
    assert_eq!(bound.err(), Some(Error::Size { what: "out".into(), needed: 8, given: 4 }));
    // Borrows cannot alias; leases (and foreign memory) can, so bytes are compared.
    for (part, aliases) in [(0..32, true), (31..33, true), (32..34, false)] {
        let wide = tensor(device, "wide", &[1.0; 34]);
        let out = wide.lease().part(part).unwrap();
        let (input, output) = ((&wide.lease().part(0..32).unwrap()).into(), (&out).into());
        let bound = sum.bind(SumArgs { x: input, out: output, scratch: (&mut lane).into() });
        let overlap = Error::Overlap { output: "out", other: "x" };
        assert_eq!(bound.err(), aliases.then_some(overlap));
    }
    // Sixteen exbibytes further on, which a product of 64 bits would take for 0.
    let beyond = x.lease().part(1 << 62..(1 << 62) + 2);
    assert!(matches!(beyond.err(), Some(Error::Size { given: 128, .. })));
    let out = tensor(device, "out", &[0.0; ROWS]);
    let (input, output) = ((&x).into(), (&out.lease()).into());
    let bound = sum.bind(SumArgs { x: input, out: output, scratch: (&mut thin).into() });
    let needed = sum.plan().scratch_bytes();
    assert_eq!(bound.err(), Some(Error::Size { what: "scratch".into(), needed, given: 256 }));
}

fn a_cache_of_another_geometry_is_refused<D: Toy>(device: &D) {
    let scale = plans::<D>(device.facts()).0.prepare(device).unwrap();
    let (factor, ids) = (tensor(device, "f", &[1.0]), table(device, &[0; ROWS]));
    let mut out = tensor(device, "out", &[0.0; ROWS * 16]);
    let mut lane = Lane::new(device, "lane", &[scale.plan().scratch_bytes()]).unwrap();
    let wide = PageGeometry { page_size: 32, ..PAGE };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let pool = Pages::new(device, "pool", wide, 1).unwrap();
    let mut view = PoolView::new(device, "view", wide).unwrap();
    view.bind(&mut stream, &pool).unwrap();
    let (factor, page_table) = ((&factor).into(), (&ids).into());
    let (out, scratch) = ((&mut out).into(), (&mut lane).into());
    let bound = scale.bind(ScaleArgs { factor, page_table, cache: (&view).into(), out, scratch });
    let (needed, given) = (PAGE.to_string(), wide.to_string());
    assert_eq!(bound.err(), Some(Error::PageGeometry { needed, given }));
    stream.wait().unwrap();
}

fn an_unbound_view_does_not_replay<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut slots = Slots::new(device);
    slots.view("view", PAGE).unwrap();
    let mut graph = slots.capture(&mut stream, |_| Ok(())).unwrap();
    assert_eq!(graph.replay(&mut stream).err(), Some(Error::Unbound));
    let scale = plans::<D>(device.facts()).0.prepare(device).unwrap();
    let view = PoolView::new(device, "view", PAGE).unwrap();
    let (factor, ids) = (tensor(device, "f", &[1.0]), table(device, &[0; ROWS]));
    let mut out = tensor(device, "out", &[0.0; ROWS * 16]);
    let mut lane = Lane::new(device, "lane", &[scale.plan().scratch_bytes()]).unwrap();
    let (factor, page_table) = ((&factor).into(), (&ids).into());
    let (out, scratch) = ((&mut out).into(), (&mut lane).into());
    let bound = scale.bind(ScaleArgs { factor, page_table, cache: (&view).into(), out, scratch });
    assert_eq!(bound.err(), Some(Error::Unbound));
}

#[test]
fn another_device_is_refused() {
    let (other, facts) = (AtOnce::new(2), AtOnce::facts_of(2));
    let x = tensor(&other, "x", &[1.0; ROWS * 16]);
    let twin = AtOnce::new(2);
    // Both machines count addresses from the same number; here nothing may overlap by chance.
    let _gap = tensor(&twin, "gap", &[0.0; 4096]);
    let caller = twin.own_stream().unwrap();
    let mut stream = twin.stream(&caller).unwrap();
    let sum = plans::<AtOnce>(&facts).1.prepare(&twin).unwrap();
    let mut lane = Lane::new(&twin, "lane", &[sum.plan().scratch_bytes()]).unwrap();
    let mut out = tensor(&twin, "out", &[0.0; ROWS]);
    let args = SumArgs { x: (&x).into(), out: (&mut out).into(), scratch: (&mut lane).into() };
    let ran = sum.bind(args).unwrap().run(&mut stream);
    assert_eq!(ran.err(), Some(Foreign { what: "x" }));
    assert_eq!(out.write_on(&mut stream, 0, &[1.0]).map(drop), Ok(()));
    let caller = other.own_stream().unwrap();
    let mut elsewhere = other.stream(&caller).unwrap();
    assert_eq!(stream.wait_for(&elsewhere), Err(Foreign { what: "stream" }));
    let pool = Pages::new(&twin, "pool", PAGE, 1).unwrap();
    let mut view = PoolView::new(&other, "view", PAGE).unwrap();
    assert_eq!(view.bind(&mut elsewhere, &pool).err(), Some(Foreign { what: "pool" }));
    let captured = Slots::new(&twin).capture(&mut elsewhere, |_| Ok(()));
    assert_eq!(captured.err(), Some(Foreign { what: "stream" }));

    let facts = Late::facts_of(9);
    let plan = Plan::<Sum>::for_device::<Late>(&sum_spec(1, 1), &facts).unwrap();
    assert_eq!(plan.prepare(&Late::new(1)).err(), Some(Foreign { what: "plan" }));
}

fn a_failed_or_panicking_capture_gives_the_stream_back<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let failed = Slots::new(device).capture(&mut stream, |_| Err(Error::Unbound));
    assert_eq!(failed.err(), Some(Error::Unbound));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        Slots::new(device).capture(&mut stream, |_| panic!("while recording")).map(drop)
    }));
    assert!(panicked.is_err());
    // If the stream still recorded, this would not be executed.
    let sum = plans::<D>(device.facts()).1.prepare(device).unwrap();
    let mut lane = Lane::new(device, "lane", &[sum.plan().scratch_bytes()]).unwrap();
    let x = tensor(device, "x", &[1.0; ROWS * 16]);
    let mut out = tensor(device, "out", &[0.0; ROWS]);
    let args = SumArgs { x: (&x).into(), out: (&mut out).into(), scratch: (&mut lane).into() };
    sum.bind(args).unwrap().run(&mut stream).unwrap();
    stream.wait().unwrap();
    assert_eq!(out.read().unwrap(), [16.0; 2]);
    assert_eq!(World::new(device, &mut stream).replay(&mut stream), [of_page(1.0); 2]);
}

fn slots_keep_their_address_and_capacity<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, &mut stream);
    let before = world.graph.address(world.table).unwrap();
    let too_much = world.graph.slot_mut(world.table).unwrap().write(&[0; 3]);
    let size = Error::Size { what: "page_table".into(), needed: 12, given: 8 };
    assert_eq!(too_much, Err(size.clone()));
    let too_much = world.graph.slot_mut(world.table).unwrap().write_on(&mut stream, &[0; 3]);
    assert_eq!(too_much.err(), Some(size));
    stream.wait().unwrap();
    world.graph.slot_mut(world.table).unwrap().write(&[2, 2]).unwrap();
    assert_eq!(world.replay(&mut stream), [of_page(3.0); 2]);
    assert_eq!(world.graph.address(world.table).unwrap(), before);
    let foreign = Slots::new(device).slot::<i32>("other", 1).unwrap();
    assert_eq!(world.graph.slot_mut(foreign).err(), Some(Foreign { what: "key" }));
    assert_eq!(world.graph.read(foreign).err(), Some(Foreign { what: "key" }));
}

fn weights_reload_in_place<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut world = World::new(device, &mut stream);
    let before = world.factor.address();
    world.factor.write_on(&mut stream, 0, &[100.0]).unwrap();
    assert_eq!(world.replay(&mut stream), [1600.0; 2]);
    assert_eq!(world.factor.address(), before);
    // A tensor of more bytes than one launch can carry.
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut wide = tensor(device, "wide", &[0.0; 1001]);
    wide.write_on(&mut stream, 1, &values).unwrap();
    stream.wait().unwrap();
    assert_eq!(wide.read().unwrap()[1..], values);
}

/// A lease of a view numbers the pages that the view showed when the lease was made. Were it good
/// after the view is bound to other pages, the call would read those without a number, and they
/// could be freed under it.
fn a_view_that_was_bound_again_ends_its_leases<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(device, &mut stream);
    let other = filled_pool(device, &mut stream, 5.0);
    let mut view = PoolView::new(device, "view", PAGE).unwrap();
    view.bind(&mut stream, &world.pool).unwrap();
    let (ids, out) = (table(device, &[0, 0]), tensor(device, "out", &[0.0; ROWS]));
    let cache = view.lease();
    let step = |cache, stream: &mut Stream<'_, D>| {
        let inputs = ((&ids.lease()).into(), cache);
        let (scaled, out) = (world.scaled.lease(), (&out.lease()).into());
        world.layer.step(stream, &world.lane, inputs, &scaled, out)
    };
    step(cache.clone(), &mut stream).unwrap();
    view.bind(&mut stream, &other).unwrap();
    let stale = step(cache, &mut stream);
    assert_eq!(stale, Err(Error::StaleEpoch { held: 1, current: 2 }));
    step(view.lease(), &mut stream).unwrap();
    drop(other); // under the call
    stream.wait().unwrap();
    assert_eq!(out.read().unwrap(), [of_page(5.0); 2]);
    // A refusal changes nothing: the view still shows what it showed.
    let wide = PageGeometry { page_size: 32, ..PAGE };
    let other = Pages::new(device, "wide", wide, 1).unwrap();
    assert!(matches!(view.bind(&mut stream, &other), Err(Error::PageGeometry { .. })));
    assert_eq!(step(view.lease(), &mut stream), Err(Error::StaleEpoch { held: 0, current: 1 }));
    view.bind(&mut stream, &world.pool).unwrap();
    step(view.lease(), &mut stream).unwrap();
    stream.wait().unwrap();
    assert_eq!(out.read().unwrap(), [of_page(1.0); 2]);
}

fn a_recorder_takes_keys_of_its_own_set<D: Toy>(device: &D) {
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let mut other = Slots::new(device);
    let (slot, view) = (other.slot::<f32>("slot", 1).unwrap(), other.view("view", PAGE).unwrap());
    let mut slots = Slots::new(device);
    slots.slot::<f32>("mine", 1).unwrap();
    slots.view("mine", PAGE).unwrap();
    let mut graph = slots
        .capture(&mut stream, |rec| {
            assert_eq!(rec.input(slot).err(), Some(Foreign { what: "key" }));
            assert_eq!(rec.output(slot).err(), Some(Foreign { what: "key" }));
            assert_eq!(rec.cache(view).err(), Some(Foreign { what: "view" }));
            assert_eq!(rec.cache_mut(view).err(), Some(Foreign { what: "view" }));
            Ok(())
        })
        .unwrap();
    let pool = Pages::new(device, "pool", PAGE, 1).unwrap();
    let bound = graph.bind(&mut stream, view, &pool);
    assert_eq!(bound.err(), Some(Foreign { what: "view" }));
}

#[test]
fn plans_are_host_data_of_a_machine_that_is_not_here() {
    fn is_plain<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn crosses_threads<T: Send>() {}
    let (scale, sum) = plans::<Late>(&Late::facts_of(4));
    is_plain(&scale);
    is_plain(&sum);
    let partials = |plan: &Plan<Sum>| (plan.scratch()[0].name, plan.scratch()[0].bytes);
    assert_eq!(partials(&sum), ("partials", 4 * ROWS * 4));
    assert_eq!(partials(&plans::<Late>(&Late::facts_of(1)).1), ("partials", 0));
    crosses_threads::<(Prepared<Sum, Late>, Graph<Late>, Pages<Late>, Stream<'static, Late>)>();
    let spec = scale_spec(1, PageGeometry { page_size: 512, ..PAGE });
    let refusal = Plan::<Scale>::for_device::<Late>(&spec, &Late::facts_of(4)).unwrap_err();
    assert!(refusal.to_string().contains("use smaller pages"), "{refusal}");
}

#[test]
fn page_geometries_that_have_no_bytes_are_refused() {
    let device = AtOnce::new(1);
    for (width, page_size) in [(0, 16), (1 << 17, 16), (1, 0), (1, 17), (1, 1 << 17)] {
        let record = RecordLayout { format: RecordFormat::Bf16, width, rope: 0 };
        let pool = Pages::new(&device, "pool", PageGeometry { record, page_size }, 1);
        assert!(matches!(pool.err(), Some(Error::Contract { .. })), "{width} x {page_size}");
    }
    let narrow = Pages::with_stride(&device, "pool", PAGE, (1, 31));
    assert!(matches!(narrow.err(), Some(Error::Size { needed: 32, given: 31, .. })));
    is_clean(&device);
}

#[test]
fn partial_results_merge_in_one_base() {
    let (a, b) = (Lse::<Natural>::new(1.0), Lse::<Natural>::new(2.0));
    assert!((a.merge(b).value() - 2.3132617).abs() < 1e-6);
    assert_eq!(a.merge(Lse::new(f32::NAN)), a);
    let merged = a.to::<Base2>().merge(b.to()).to::<Natural>();
    assert!((merged.value() - a.merge(b).value()).abs() < 1e-6);
}
