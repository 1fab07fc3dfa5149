//! Captures that fail, and what they leave behind: the stream as it was.

use cudarc::driver::sys;
use half::bf16;
use mlakit::op::merge::{LseInput, LseOutput, Merge, MergeArgs, PartialInput};
use mlakit::{Category, Device, Error, Key, Lane, Lse, Natural, Plan, Prepared, Recorder, Slots};
use mlakit_cuda::Cuda;

use super::driver::{Driver, Gate, ok, raw};
use super::large::merge_spec;
use super::{cuda, cuda_alone};

/// A merge of two parts, in slots.
struct World {
    merge: Prepared<Merge, Cuda>,
    lane: Lane<Cuda>,
}

#[derive(Clone, Copy)]
struct Keys {
    outs: Key<f32>,
    lses: Key<Lse<Natural>>,
    out: Key<bf16>,
    lse: Key<Lse<Natural>>,
}

impl World {
    fn new(device: &Cuda) -> Self {
        let plan = Plan::<Merge>::for_device::<Cuda>(&merge_spec(), device.facts()).unwrap();
        let merge = plan.prepare(device).unwrap();
        let lane = Lane::new(device, "lane", &[plan.scratch_bytes()]).unwrap();
        Self { merge, lane }
    }

    fn slots(device: &Cuda) -> (Slots<Cuda>, Keys) {
        let mut slots = Slots::new(device);
        let keys = Keys {
            outs: slots.slot("outs", 16).unwrap(),
            lses: slots.slot("lses", 2).unwrap(),
            out: slots.slot("out", 8).unwrap(),
            lse: slots.slot("lse", 1).unwrap(),
        };
        (slots, keys)
    }

    fn record(&self, rec: &mut Recorder<'_, Cuda>, keys: Keys) -> Result<(), Error> {
        let args = MergeArgs {
            outs: PartialInput::F32(rec.input(keys.outs)?),
            lses: LseInput::Natural(rec.input(keys.lses)?),
            sink: None,
            out: rec.output(keys.out)?,
            lse: LseOutput::Natural(rec.output(keys.lse)?),
            scratch: self.lane.lease(),
        };
        self.merge.bind(args)?.run(rec)
    }

    /// Captures and replays on this stream: it is as it should be.
    fn works(&self, stream: &mut mlakit::Stream<'_, Cuda>) {
        let (slots, keys) = Self::slots(&stream.device().clone());
        let mut graph = slots.capture(stream, |rec| self.record(rec, keys)).unwrap();
        graph.slot_mut(keys.outs).unwrap().write(&[[2.0; 8], [4.0; 8]].concat()).unwrap();
        for _ in 0..3 {
            graph.replay(stream).unwrap().wait(stream).unwrap();
            assert_eq!(graph.read(keys.out).unwrap(), [bf16::from_f32(3.0); 8]);
        }
    }
}

#[test]
fn a_recording_that_fails_leaves_the_stream() {
    let Some(device) = cuda() else { return };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(&device);
    let (slots, keys) = World::slots(&device);
    let failed = slots.capture(&mut stream, |rec| {
        world.record(rec, keys)?;
        Err(Error::Unbound)
    });
    assert_eq!(failed.err(), Some(Error::Unbound));
    world.works(&mut stream);

    let (slots, keys) = World::slots(&device);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        slots.capture(&mut stream, |rec| {
            world.record(rec, keys)?;
            panic!("in the recording")
        })
    }));
    assert!(panicked.is_err());
    world.works(&mut stream);
    drop((stream, world));
    assert_eq!(device.census().lines(), []);
}

/// An allocation on the capturing stream, past the library, would be a node that allocates at each
/// replay.
#[test]
fn a_recording_with_memory_nodes_is_refused() {
    let Some(device) = cuda() else { return };
    let _current = Driver::new(&device);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(&device);
    let (slots, keys) = World::slots(&device);
    let refused = slots.capture(&mut stream, |rec| {
        world.record(rec, keys)?;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer, the stream is live.
        unsafe { ok(sys::cuMemAllocAsync(&mut address, 1024, raw(&caller))) };
        // SAFETY: the memory was allocated on this stream.
        unsafe { ok(sys::cuMemFreeAsync(address, raw(&caller))) };
        Ok(())
    });
    match refused.err() {
        Some(Error::Contract { what: "capture", given, .. }) => {
            assert!(given.contains("type 1"), "{given}");
        }
        other => panic!("{other:?}"),
    }
    world.works(&mut stream);
}

/// Memory of the library's own may come and go while it records.
#[test]
fn memory_is_obtained_while_another_thing_records() {
    let Some(device) = cuda() else { return };
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(&device);
    let (slots, keys) = World::slots(&device);
    let graph = slots.capture(&mut stream, |rec| {
        let kind = (Category::Tensors, "meanwhile");
        let x = mlakit::Buffer::<f32, Cuda>::new(&device, kind, &vec![1.0; 1 << 20])?;
        world.record(rec, keys)?;
        assert_eq!(x.read()?[..4], [1.0; 4]);
        Ok(())
    });
    graph.unwrap().replay(&mut stream).unwrap().wait(&mut stream).unwrap();
    world.works(&mut stream);
}

/// The legacy default stream cannot capture: typed, and it works on.
#[test]
fn the_legacy_stream_does_not_capture() {
    let Some(device) = cuda() else { return };
    // SAFETY: null is the legacy default stream, which lives as long as the context.
    let caller = unsafe { device.borrow_stream(std::ptr::null_mut()) }.unwrap();
    let mut stream = device.stream(&caller).unwrap();
    let world = World::new(&device);
    let (slots, keys) = World::slots(&device);
    let failed = slots.capture(&mut stream, |rec| world.record(rec, keys)).err();
    match failed {
        Some(Error::Device { call: "cuStreamBeginCapture", .. }) => {}
        other => panic!("{other:?}"),
    }
    let kind = (Category::Tensors, "x");
    let mut x = mlakit::Buffer::<u8, Cuda>::zeroed(&device, kind, 10).unwrap();
    x.write_on(&mut stream, 3, &[7; 4]).unwrap();
    stream.wait().unwrap();
    assert_eq!(x.read().unwrap(), [0, 0, 0, 7, 7, 7, 7, 0, 0, 0]);
}

/// Captured behind a closed gate: nothing of the capture waits for the stream's work.
#[test]
fn a_capture_behind_a_gate() {
    let Some(device) = cuda_alone() else { return };
    let driver = Driver::new(&device);
    let callers = [device.own_stream().unwrap(), device.own_stream().unwrap()];
    let [mut stream, mut other] = callers.each_ref().map(|c| device.stream(c).unwrap());
    let world = World::new(&device);
    let (slots, keys) = World::slots(&device);
    let gate = Gate::new(&driver, raw(&callers[0]));
    let mut graph = slots
        .capture(&mut stream, |rec| {
            // The other stream waits for what was given before the recording, not for the
            // recording.
            world.record(rec, keys)
        })
        .unwrap();
    let replayed = graph.replay(&mut stream).unwrap().ticket();
    other.wait_for(&stream).unwrap();
    assert!(!device.keeper().is_done(replayed));
    gate.open();
    other.wait().unwrap();
    assert!(device.keeper().is_done(replayed), "the other stream waited for the replay");
    drop((graph, world));
    assert_eq!(device.census().lines(), []);
}
