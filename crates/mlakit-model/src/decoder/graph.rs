//! The captured decode step: slots, views, and one replay a step.

use mlakit::op::sample::{Sample, SampleArgs, SampleFields, SampleSpec};
use mlakit::{Error, Graph, Key, Prepared, Recorder, Slots, Stream, ViewKey};
use mlakit_serve::layer::prepare;
use mlakit_serve::{IndexCache, KvPool, LayerCache, Listed, StepKeys};

use super::error::DecodeError;
use super::generate::{Sampling, Sequence};
use super::model::{Decoder, DecoderDevice, StepOperands};

/// The captured step and its slots.
pub(super) struct DecodeGraph<D: DecoderDevice> {
    graph: Graph<D>,
    keys: DecodeKeys,
    host: DecodeHost,
}

#[derive(Clone, Copy)]
pub(super) struct DecodeKeys {
    ids: Key<i32>,
    positions: Key<i32>,
    slots: Key<i64>,
    table: Key<i32>,
    kv_lens: Key<i32>,
    offsets: Key<i32>,
    wanted: Key<i32>,
    logits: Key<f32>,
    temperature: Key<f32>,
    random: Key<f32>,
    next: Key<i32>,
    /// A list of all keys, and how many of them each row sees.
    listed: Option<(Key<i32>, Key<i32>)>,
}

/// What the host writes before a replay; kept, so that a step allocates nothing.
pub(super) struct DecodeHost {
    ids: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
    table: Vec<i32>,
    kv_lens: Vec<i32>,
    random: Vec<f32>,
    next: Vec<i32>,
}

/// Sizes of a step.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) batch: usize,
    pub(super) width: usize,
    pub(super) vocab: usize,
    /// Entries of a row of a list of all keys; 0 where there is none.
    pub(super) listed: usize,
}

impl Shape {
    /// A list of all keys for `rows` rows.
    pub(super) fn all_keys(&self, rows: usize) -> Vec<i32> {
        (0..rows).flat_map(|_| 0..self.listed as i32).collect()
    }
}

impl<D: DecoderDevice> DecodeGraph<D> {
    pub(super) fn capture(
        stream: &mut Stream<'_, D>,
        decoder: &Decoder<D>,
        (shape, pool): (Shape, &KvPool<D>),
    ) -> Result<Self, DecodeError> {
        let device = stream.device().clone();
        let Shape { batch, width, vocab, listed } = shape;
        let mut slots = Slots::new(&device);
        let keys = DecodeKeys {
            ids: slots.slot("ids", batch)?,
            positions: slots.slot("positions", batch)?,
            slots: slots.slot("slots", batch)?,
            table: slots.slot("page table", batch * width)?,
            kv_lens: slots.slot("lengths", batch)?,
            offsets: slots.slot("offsets", batch + 1)?,
            wanted: slots.slot("wanted rows", batch)?,
            logits: slots.slot("logits", batch * vocab)?,
            temperature: slots.slot("temperature", 1)?,
            random: slots.slot("random numbers", batch)?,
            next: slots.slot("next ids", batch)?,
            listed: match listed {
                0 => None,
                _ => Some((slots.slot("all keys", batch * listed)?, slots.slot("counts", batch)?)),
            },
        };
        let latent: Vec<ViewKey> = (0..decoder.layers())
            .map(|layer| slots.view(format!("view of layer {layer}"), decoder.pages()))
            .collect::<Result<_, _>>()?;
        let index: Vec<Option<ViewKey>> = decoder
            .index_pages()
            .enumerate()
            .map(|(layer, pages)| {
                let name = format!("view of layer {layer}'s index keys");
                pages.map(|pages| slots.view(name, pages)).transpose()
            })
            .collect::<Result<_, _>>()?;
        let fields = SampleFields { vocab, max_rows: batch, temperature: true };
        let sample: Prepared<Sample, D> = prepare(&device, SampleSpec::new(fields)?)?;
        let caches = |rec: &Recorder<'_, D>, layer: usize| {
            let keys = |view: ViewKey| -> Result<_, Error> {
                Ok(IndexCache { read: rec.cache(view)?, write: rec.cache_mut(view)?, ring: None })
            };
            Ok(LayerCache {
                read: rec.cache(latent[layer])?,
                write: rec.cache_mut(latent[layer])?,
                index: index[layer].map(keys).transpose()?,
            })
        };
        let mut graph = slots.capture(stream, |rec| {
            let operands = keys.operands(rec)?;
            let logits = rec.output(keys.logits)?;
            decoder.step(rec, &operands, &caches, logits)?;
            let args = SampleArgs {
                logits: rec.input(keys.logits)?,
                temperature: Some(rec.input(keys.temperature)?),
                random: Some(rec.input(keys.random)?),
                ids: rec.output(keys.next)?,
                scratch: decoder.lane().lease(),
            };
            sample.bind(args)?.run(rec)
        })?;
        for (layer, view) in latent.iter().enumerate() {
            graph.bind(stream, *view, pool.layer(layer))?;
            if let (Some(view), Some(pages)) = (index[layer], pool.index(layer)) {
                graph.bind(stream, view, pages)?;
            }
        }
        if let Some((positions, _)) = keys.listed {
            graph.slot_mut(positions)?.write(&shape.all_keys(batch))?;
        }
        let rows: Vec<i32> = (0..=batch as i32).collect();
        graph.slot_mut(keys.offsets)?.write(&rows)?;
        graph.slot_mut(keys.wanted)?.write(&rows[..batch])?;
        Ok(Self { graph, keys, host: DecodeHost::new(shape) })
    }

    /// Before the first step of a batch.
    pub(super) fn begin(
        &mut self,
        sampling: Sampling,
        sequences: &[Sequence],
    ) -> Result<(), Error> {
        self.host.table.fill(-1);
        let width = self.host.table.len() / self.host.ids.len();
        for (row, sequence) in self.host.table.chunks_exact_mut(width).zip(sequences) {
            row[..sequence.pages.len()].copy_from_slice(&sequence.pages);
        }
        self.graph.slot_mut(self.keys.table)?.write(&self.host.table)?;
        self.graph.slot_mut(self.keys.temperature)?.write(&[sampling.temperature])
    }

    /// After the first step: broken weights make logits that are no numbers, and a text of the first id over and over.
    pub(super) fn expect_numbers(&self, sequences: usize) -> Result<(), DecodeError> {
        let logits = self.graph.read(self.keys.logits)?;
        let live = &logits[..logits.len() / self.host.ids.len() * sequences];
        match live.iter().find(|logit| !logit.is_finite()) {
            None => Ok(()),
            Some(logit) => Err(DecodeError::Input {
                what: "checkpoint",
                needed: "weights that give finite logits".to_string(),
                given: format!("weights that give {logit}"),
            }),
        }
    }

    /// The ids that the last step chose.
    pub(super) fn chosen(&self) -> &[i32] {
        &self.host.next
    }

    /// Every live sequence reads its token and chooses the next: slots are written, the graph is replayed, the ids are read.
    pub(super) fn step(
        &mut self,
        stream: &mut Stream<'_, D>,
        (sequences, pool): (&[Sequence], &KvPool<D>),
        sampling: Sampling,
    ) -> Result<(), Error> {
        let host = &mut self.host;
        for row in 0..host.ids.len() {
            let live = sequences.get(row).filter(|sequence| !sequence.done);
            host.ids[row] = live.map_or(-1, |s| s.next as i32);
            host.positions[row] = live.map_or(0, |s| s.cached as i32);
            host.slots[row] = live.map_or(-1, |s| pool.slot(&s.pages, s.cached));
            host.kv_lens[row] = live.map_or(0, |s| s.cached as i32 + 1);
            host.random[row] =
                live.map_or(0.0, |s| uniform(sampling.seed, row as u64, s.cached as u64));
        }
        let keys = self.keys;
        self.graph.slot_mut(keys.ids)?.write(&self.host.ids)?;
        self.graph.slot_mut(keys.positions)?.write(&self.host.positions)?;
        self.graph.slot_mut(keys.slots)?.write(&self.host.slots)?;
        self.graph.slot_mut(keys.kv_lens)?.write(&self.host.kv_lens)?;
        if let Some((_, counts)) = keys.listed {
            self.graph.slot_mut(counts)?.write(&self.host.kv_lens)?;
        }
        self.graph.slot_mut(keys.random)?.write(&self.host.random)?;
        self.graph.replay(stream)?.wait(stream)?;
        self.graph.read_into(keys.next, &mut self.host.next)
    }
}

impl DecodeKeys {
    fn operands<D: DecoderDevice>(&self, rec: &Recorder<'_, D>) -> Result<StepOperands<D>, Error> {
        Ok(StepOperands {
            ids: rec.input(self.ids)?,
            positions: rec.input(self.positions)?,
            slots: rec.input(self.slots)?,
            page_table: rec.input(self.table)?,
            kv_lens: rec.input(self.kv_lens)?,
            q_offsets: rec.input(self.offsets)?,
            keys: StepKeys {
                // Each row is a request of its own, and each one's logits are wanted.
                request: Some(rec.input(self.wanted)?),
                listed: match self.listed {
                    Some((positions, counts)) => Some(Listed {
                        positions: rec.input(positions)?,
                        counts: rec.input(counts)?,
                    }),
                    None => None,
                },
                ..StepKeys::default()
            },
            wanted_rows: rec.input(self.wanted)?,
        })
    }
}

impl DecodeHost {
    fn new(shape: Shape) -> Self {
        let Shape { batch, width, .. } = shape;
        Self {
            ids: vec![-1; batch],
            positions: vec![0; batch],
            slots: vec![-1; batch],
            table: vec![-1; batch * width],
            kv_lens: vec![0; batch],
            random: vec![0.0; batch],
            next: vec![0; batch],
        }
    }
}

/// A number in [0, 1) that depends on nothing but its arguments (SplitMix64).
fn uniform(seed: u64, sequence: u64, position: u64) -> f32 {
    let mix = |value: u64| {
        let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits = mix(mix(mix(seed) ^ sequence) ^ position);
    (bits >> 40) as f32 / (1u64 << 24) as f32
}
