//! Random programs of legal and illegal steps on three streams. Whatever is refused is refused by a
//! typed error; whatever runs touches only memory that lives and races with nothing; in the end
//! every byte is given back.

mod common;
use common::*;

/// What the steps came to.
#[derive(Debug, Default)]
struct Seen {
    done: usize,
    stale: usize,
    busy: usize,
    in_flight: usize,
    unbound: usize,
    no_memory: usize,
    failed: usize,
}

impl Seen {
    /// Counts the errors that a legal program can meet.
    fn tolerate<T>(&mut self, result: Result<T, Error>) {
        *match result {
            Ok(_) => &mut self.done,
            Err(Error::StaleEpoch { .. }) => &mut self.stale,
            Err(Error::Busy { .. }) => &mut self.busy,
            Err(Error::InFlight { .. }) => &mut self.in_flight,
            Err(Error::Unbound) => &mut self.unbound,
            Err(Error::OutOfMemory { .. }) => &mut self.no_memory,
            Err(Error::Device { .. }) => &mut self.failed,
            Err(other) => panic!("{other}"),
        } += 1;
    }
}

const STREAMS: usize = 3;
const WORLDS: usize = 3;

/// Two graphs and an eager view over pools that are bound crosswise.
struct Program<'s> {
    device: &'s Late,
    callers: &'s [sim::SimStream; STREAMS],
    streams: [Stream<'s, Late>; STREAMS],
    worlds: Vec<World<Late>>,
    view: PoolView<Late>,
    cache: Cache<'static, Late>,
    ids: Buffer<i32, Late>,
    out: Buffer<f32, Late>,
    dice: Dice,
}

impl<'s> Program<'s> {
    fn new(device: &'s Late, callers: &'s [sim::SimStream; STREAMS], seed: u64) -> Self {
        let mut streams = callers.each_ref().map(|caller| device.stream(caller).unwrap());
        let worlds = (0..WORLDS).map(|i| World::new(device, &mut streams[i])).collect::<Vec<_>>();
        let mut view = PoolView::new(device, "view", PAGE).unwrap();
        view.bind(&mut streams[0], &worlds[0].pool).unwrap();
        let (cache, dice) = (view.lease(), Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let (ids, out) = (table(device, &[0, 1]), tensor(device, "out", &[0.0; ROWS]));
        Self { device, callers, streams, worlds, view, cache, ids, out, dice }
    }

    fn pick(&mut self, among: usize) -> usize {
        self.dice.roll(among as u64) as usize
    }

    fn step(&mut self, seen: &mut Seen) {
        let (w, s) = (self.pick(WORLDS), self.pick(STREAMS));
        let ids = [self.dice.roll(5) as i32 - 1, self.dice.roll(4) as i32];
        match self.dice.roll(22) {
            0..2 => self.bind(w, s, seen),
            2 => self.worlds[w].pool.release(),
            3 => seen.tolerate(self.worlds[w].pool.refill(3)),
            4 => {
                let pool = &mut self.worlds[w].pool;
                seen.tolerate(pool.write_on(&mut self.streams[s], (0, 0), &page(1.0)));
            }
            5 => {
                let world = &mut self.worlds[w];
                seen.tolerate(world.graph.slot_mut(world.table).unwrap().write(&ids));
            }
            6 => {
                let world = &mut self.worlds[w];
                let mut slot = world.graph.slot_mut(world.table).unwrap();
                seen.tolerate(slot.write_on(&mut self.streams[s], &ids));
            }
            7 => seen.tolerate(self.worlds[w].graph.read(self.worlds[w].out)),
            8..10 => self.order(s),
            10 => self.replace(w, s, seen),
            11..13 => {
                let jobs = self.pick(40);
                self.callers[s].pump(jobs);
            }
            13 => seen.tolerate(self.worlds[w].pool.read((1, 0), &mut [0; 32])),
            14 => seen.tolerate(self.worlds[w].pool.write((1, 0), &page(2.0))),
            15 => seen.tolerate(self.view.bind(&mut self.streams[s], &self.worlds[w].pool)),
            16 => self.cache = self.view.lease(),
            17..19 => self.eager(w, s, seen),
            _ => seen.tolerate(self.worlds[w].graph.replay(&mut self.streams[s]).map(drop)),
        }
    }

    /// Points a graph at a pool, most often of another world, so that one pool serves several
    /// graphs.
    fn bind(&mut self, w: usize, s: usize, seen: &mut Seen) {
        let of = self.pick(WORLDS);
        let mut world = self.worlds.swap_remove(w);
        let pool = self.worlds.get(of).map_or(&world.pool, |other| &other.pool);
        seen.tolerate(world.graph.bind(&mut self.streams[s], world.view, pool));
        self.worlds.push(world);
    }

    fn order(&mut self, s: usize) {
        let other = (s + 1 + self.pick(STREAMS - 1)) % STREAMS;
        let [one, two] = self.streams.get_disjoint_mut([s, other]).unwrap();
        one.wait_for(two).unwrap();
    }

    /// Lets something go that others lease, now and then; sometimes the device fails next.
    fn replace(&mut self, w: usize, s: usize, seen: &mut Seen) {
        match self.dice.roll(12) {
            0 => {
                let factor = Buffer::new(self.device, (Category::Weights, "factor"), &[2.0]);
                self.worlds[w].factor = factor.unwrap();
            }
            1 => self.worlds[w] = World::new(self.device, &mut self.streams[s]),
            2 => {
                self.device.inject(Fault::Obtain(1));
                seen.tolerate(self.worlds[w].pool.refill(2));
            }
            3 => {
                self.device.inject(Fault::Work(1));
                let slot = self.ids.write_on(&mut self.streams[s], 0, &[0, 0]);
                // Unless it was refused before it reached the device, the fault is spent.
                if slot.is_err() {
                    self.device.inject(Fault::Work(usize::MAX));
                }
                seen.tolerate(slot);
            }
            4 => self.out = tensor(self.device, "out", &[0.0; ROWS]),
            _ => {}
        }
    }

    /// A call by leases, through a view that may have been bound again since.
    fn eager(&mut self, w: usize, s: usize, seen: &mut Seen) {
        let world = &self.worlds[w];
        let inputs = ((&self.ids.lease()).into(), self.cache.clone());
        let (scaled, out) = (world.scaled.lease(), (&self.out.lease()).into());
        let stream = &mut self.streams[s];
        seen.tolerate(world.layer.step(stream, &world.lane, inputs, &scaled, out));
    }
}

fn play(seed: u64, steps: usize, seen: &mut Seen) {
    let device = Late::new(2);
    let callers: [_; STREAMS] = std::array::from_fn(|_| device.own_stream().unwrap());
    let mut program = Program::new(&device, &callers, seed);
    for step in 0..steps {
        program.step(seen);
        assert_eq!(device.violations(), 0, "seed {seed}, step {step}");
    }
    drop(program);
    while callers.iter().map(|caller| caller.pump(usize::MAX)).sum::<usize>() > 0 {}
    is_clean(&device);
}

fn is_broad(seen: &Seen) {
    let Seen { done, stale, busy, in_flight, unbound, no_memory, failed } = *seen;
    let least = [done, stale, busy, in_flight, unbound, no_memory, failed].into_iter().min();
    assert!(least > Some(50), "{seen:?}");
}

#[test]
fn many_short_random_programs() {
    let mut seen = Seen::default();
    (0..1500).for_each(|seed| play(seed, 150, &mut seen));
    is_broad(&seen);
}

#[test]
fn a_few_long_random_programs() {
    let mut seen = Seen::default();
    (10_000..10_012).for_each(|seed| play(seed, 20_000, &mut seen));
    is_broad(&seen);
}
