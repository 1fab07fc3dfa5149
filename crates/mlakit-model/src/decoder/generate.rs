//! Text from a checkpoint: prompts in chunks, then one replay of one graph a step for all sequences.

use std::time::Instant;

use mlakit::op::sample::{Sample, SampleArgs, SampleFields, SampleSpec};
use mlakit::{
    Buffer, Category, Element, Error, Graph, Key, Lease, PoolView, Prepared, Recorder, Slots,
    Stream, ViewKey,
};
use mlakit_serve::layer::prepare;
use mlakit_serve::{CacheSpec, Capacity, KvPool, LayerCache};

use super::attention::Deployment;
use super::error::DecodeError;
use super::limits::TextLimits;
use super::model::{Decoder, DecoderDevice, StepOperands};
use crate::{Checkpoint, ModelConfig};

/// Which keys a row may attend to where the checkpoint has an indexer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// As the checkpoint was trained. Without sparse attention that is possible only while the indexer would select every key.
    #[default]
    Auto,
    /// Every visible key.
    Dense,
}

/// What a generator has room for, and how it attends.
#[derive(Clone, Copy, Debug)]
pub struct GeneratorOptions {
    /// How the cache stores a token, and how attention over it is divided.
    pub cache: CacheSpec,
    /// Which keys a row may attend to.
    pub attention: Attention,
    /// Sequences side by side.
    pub batch: usize,
    /// Tokens of a sequence, prompt included.
    pub max_tokens: usize,
    /// Rows of a chunk of a prompt.
    pub prompt_rows: usize,
    /// Whether the logits of every row of a prompt can be asked for.
    pub prompt_logits: bool,
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Of the random numbers; sequence and position enter too.
    pub seed: u64,
}

/// What a call of [`Generator::generate`] did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// The new ids of each sequence.
    pub ids: Vec<Vec<u32>>,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Time for the prompts, all but their last tokens.
    pub prompt_seconds: f64,
    /// Replays of the decode graph.
    pub steps: usize,
    /// Time for them, choosing and reading the ids included.
    pub decode_seconds: f64,
}

impl Generation {
    /// New tokens a second, prompts not counted.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens: usize = self.ids.iter().map(Vec::len).sum();
        tokens as f64 / self.decode_seconds.max(1e-12)
    }
}

/// A decoder with a cache, a captured decode step and the inputs of both paths.
pub struct Generator<D: DecoderDevice> {
    // The graph goes first: it leases what is below.
    decode: DecodeGraph<D>,
    prompt: PromptInputs<D>,
    views: Vec<PoolView<D>>,
    pool: KvPool<D>,
    decoder: Decoder<D>,
    options: GeneratorOptions,
    limits: TextLimits,
    eos: Vec<u32>,
}

struct Sequence {
    pages: Vec<i32>,
    cached: usize,
    /// The token that the next step reads.
    next: u32,
    done: bool,
}

/// The captured step and its slots.
struct DecodeGraph<D: DecoderDevice> {
    graph: Graph<D>,
    keys: DecodeKeys,
    host: DecodeHost,
}

#[derive(Clone, Copy)]
struct DecodeKeys {
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
}

/// What the host writes before a replay; kept, so that a step allocates nothing.
struct DecodeHost {
    ids: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i64>,
    table: Vec<i32>,
    kv_lens: Vec<i32>,
    random: Vec<f32>,
    next: Vec<i32>,
}

/// The inputs of a chunk of a prompt.
struct PromptInputs<D: DecoderDevice> {
    ids: Buffer<i32, D>,
    positions: Buffer<i32, D>,
    slots: Buffer<i64, D>,
    table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    offsets: Buffer<i32, D>,
    wanted: Buffer<i32, D>,
    logits: Buffer<f32, D>,
}

impl<D: DecoderDevice> Generator<D> {
    /// Uploads, prepares, makes the cache, and captures the decode step.
    ///
    /// # Errors
    /// As [`Decoder::new`]; more tokens than the checkpoint has positions for.
    pub fn new(
        stream: &mut Stream<'_, D>,
        (config, checkpoint): (&ModelConfig, &Checkpoint),
        options: GeneratorOptions,
    ) -> Result<Self, DecodeError> {
        let device = stream.device().clone();
        let limits = TextLimits::new(config, options.attention);
        let width = options.max_tokens.div_ceil(options.cache.page_size).max(1);
        let rows = options.prompt_rows.max(options.batch);
        let deployment = Deployment {
            cache: options.cache,
            capacity: Capacity {
                rows,
                batch: options.batch,
                kv_tokens: options.max_tokens.max(1),
                table_width: width,
            },
            decode_rows: options.batch,
        };
        let wanted = if options.prompt_logits { rows } else { options.batch };
        let decoder = Decoder::new(&device, (config, checkpoint), &deployment, wanted)?;
        device.census().enter("serve");
        let pages = options.batch * width + 1;
        let pool = KvPool::new(&device, decoder.layers(), decoder.pages(), pages)?;
        let mut views = Vec::with_capacity(decoder.layers());
        for layer in 0..decoder.layers() {
            let mut view = PoolView::new(&device, "prompt view", decoder.pages())?;
            view.bind(stream, pool.layer(layer))?;
            views.push(view);
        }
        let shape = Shape { batch: options.batch, width, vocab: config.vocab_size };
        let decode = DecodeGraph::capture(stream, &decoder, (shape, &pool))?;
        let prompt_wanted = if options.prompt_logits { rows } else { 0 };
        let prompt = PromptInputs::new(&device, (rows, width), (prompt_wanted, shape.vocab))?;
        let eos = config.eos_token_ids.clone();
        Ok(Self { decode, prompt, views, pool, decoder, options, limits, eos })
    }

    /// Continues each prompt by at most `tokens` ids; `on_token` hears each new id with the number of its sequence. A sequence ends with an
    /// id that ends texts, which is not among the new ids.
    ///
    /// # Errors
    /// Prompts that do not fit; as each step.
    pub fn generate(
        &mut self,
        stream: &mut Stream<'_, D>,
        prompts: &[Vec<u32>],
        (tokens, sampling): (usize, Sampling),
        on_token: &mut dyn FnMut(usize, u32) -> Result<(), DecodeError>,
    ) -> Result<Generation, DecodeError> {
        self.check(prompts, tokens)?;
        let mut made = Generation { ids: vec![Vec::new(); prompts.len()], ..Generation::default() };
        let mut sequences = Vec::with_capacity(prompts.len());
        let begin = Instant::now();
        for prompt in prompts {
            let cached = prompt.len() - 1;
            let mut pages = Vec::new();
            self.pool.grow(&mut pages, cached + tokens)?;
            let sequence = Sequence { pages, cached, next: prompt[cached], done: tokens == 0 };
            self.feed(stream, (&sequence.pages, 0), &prompt[..cached], false)?;
            sequences.push(sequence);
            made.prompt_tokens += prompt.len();
        }
        made.prompt_seconds = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        self.decode.begin(sampling, &sequences)?;
        while sequences.iter().any(|sequence| !sequence.done) {
            self.decode.step(stream, (&sequences, &self.pool), sampling)?;
            made.steps += 1;
            if made.steps == 1 {
                self.decode.expect_numbers(sequences.len())?;
            }
            for (index, sequence) in sequences.iter_mut().enumerate() {
                if sequence.done {
                    continue;
                }
                let id = self.decode.host.next[index] as u32;
                sequence.cached += 1;
                sequence.next = id;
                if self.eos.contains(&id) {
                    sequence.done = true;
                    continue;
                }
                made.ids[index].push(id);
                sequence.done = made.ids[index].len() >= tokens;
                on_token(index, id)?;
            }
        }
        made.decode_seconds = begin.elapsed().as_secs_f64();
        for sequence in &mut sequences {
            self.pool.free(&mut sequence.pages);
        }
        Ok(made)
    }

    /// The logits of every row of one text, F32 `[ids, vocab]`, through the cache in chunks.
    ///
    /// # Errors
    /// Options without `prompt_logits`; a text that does not fit; as each step.
    pub fn logits(
        &mut self,
        stream: &mut Stream<'_, D>,
        ids: &[u32],
    ) -> Result<Vec<f32>, DecodeError> {
        if !self.options.prompt_logits {
            let needed = "options with prompt_logits".to_string();
            return Err(DecodeError::Input { what: "logits", needed, given: "without".into() });
        }
        self.check(&[ids.to_vec()], 0)?;
        let mut pages = Vec::new();
        self.pool.grow(&mut pages, ids.len())?;
        let logits = self.feed(stream, (&pages, 0), ids, true);
        self.pool.free(&mut pages);
        logits
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder<D> {
        &self.decoder
    }

    /// Puts tokens into the cache, a chunk at a time; with the logits of all rows where they are wanted.
    fn feed(
        &mut self,
        stream: &mut Stream<'_, D>,
        (pages, first): (&[i32], usize),
        ids: &[u32],
        wanted: bool,
    ) -> Result<Vec<f32>, DecodeError> {
        let mut logits = Vec::new();
        for (chunk, part) in ids.chunks(self.options.prompt_rows.max(1)).enumerate() {
            let at = first + chunk * self.options.prompt_rows.max(1);
            let slots: Vec<i64> =
                (at..at + part.len()).map(|position| self.pool.slot(pages, position)).collect();
            let wanted = if wanted { part.len() } else { 0 };
            self.prompt.write((pages, at), part, &slots)?;
            let operands = self.prompt.operands(part.len(), wanted)?;
            let vocab = self.decoder.vocab();
            let out = self.prompt.logits.lease().part(0..wanted * vocab)?;
            let views = &self.views;
            let caches = |_: &Stream<'_, D>, layer: usize| {
                Ok(LayerCache { read: views[layer].lease(), write: views[layer].lease_mut() })
            };
            self.decoder.step(stream, &operands, &caches, (&out).into())?;
            stream.wait()?;
            let mut values = vec![0.0; wanted * vocab];
            self.prompt.logits.read_into(0, &mut values)?;
            logits.extend(values);
        }
        Ok(logits)
    }

    fn check(&self, prompts: &[Vec<u32>], tokens: usize) -> Result<(), DecodeError> {
        let input =
            |what, needed: String, given: String| Err(DecodeError::Input { what, needed, given });
        if prompts.is_empty() || prompts.len() > self.options.batch {
            let needed = format!("1 to {}", self.options.batch);
            return input("prompts", needed, prompts.len().to_string());
        }
        for prompt in prompts {
            if prompt.is_empty() {
                return input("prompt", "at least one token".into(), "none".into());
            }
            if let Some(id) = prompt.iter().find(|id| **id as usize >= self.decoder.vocab()) {
                let needed = format!("token ids below {}", self.decoder.vocab());
                return input("prompt", needed, id.to_string());
            }
            let visible = prompt.len() + tokens.saturating_sub(1);
            if visible > self.options.max_tokens {
                let needed = format!("at most {} tokens", self.options.max_tokens);
                return input("prompt and new tokens", needed, visible.to_string());
            }
            self.limits.check(prompt.len(), tokens)?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    width: usize,
    vocab: usize,
}

impl<D: DecoderDevice> DecodeGraph<D> {
    fn capture(
        stream: &mut Stream<'_, D>,
        decoder: &Decoder<D>,
        (shape, pool): (Shape, &KvPool<D>),
    ) -> Result<Self, DecodeError> {
        let device = stream.device().clone();
        let Shape { batch, width, vocab } = shape;
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
        };
        let views: Vec<ViewKey> = (0..decoder.layers())
            .map(|layer| slots.view(format!("view of layer {layer}"), decoder.pages()))
            .collect::<Result<_, _>>()?;
        let fields = SampleFields { vocab, max_rows: batch, temperature: true };
        let sample: Prepared<Sample, D> = prepare(&device, SampleSpec::new(fields)?)?;
        let caches = |rec: &Recorder<'_, D>, layer: usize| {
            Ok(LayerCache { read: rec.cache(views[layer])?, write: rec.cache_mut(views[layer])? })
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
        for (layer, view) in views.iter().enumerate() {
            graph.bind(stream, *view, pool.layer(layer))?;
        }
        let rows: Vec<i32> = (0..=batch as i32).collect();
        graph.slot_mut(keys.offsets)?.write(&rows)?;
        graph.slot_mut(keys.wanted)?.write(&rows[..batch])?;
        Ok(Self { graph, keys, host: DecodeHost::new(shape) })
    }

    /// Before the first step of a batch.
    fn begin(&mut self, sampling: Sampling, sequences: &[Sequence]) -> Result<(), Error> {
        self.host.table.fill(-1);
        let width = self.host.table.len() / self.host.ids.len();
        for (row, sequence) in self.host.table.chunks_exact_mut(width).zip(sequences) {
            row[..sequence.pages.len()].copy_from_slice(&sequence.pages);
        }
        self.graph.slot_mut(self.keys.table)?.write(&self.host.table)?;
        self.graph.slot_mut(self.keys.temperature)?.write(&[sampling.temperature])
    }

    /// After the first step: broken weights make logits that are no numbers, and a text of the first id over and over.
    fn expect_numbers(&self, sequences: usize) -> Result<(), DecodeError> {
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

    /// Every live sequence reads its token and chooses the next: slots are written, the graph is replayed, the ids are read.
    fn step(
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

impl<D: DecoderDevice> PromptInputs<D> {
    fn new(
        device: &D,
        (rows, width): (usize, usize),
        (wanted, vocab): (usize, usize),
    ) -> Result<Self, Error> {
        fn tensor<T: Element, D: DecoderDevice>(
            device: &D,
            len: usize,
        ) -> Result<Buffer<T, D>, Error> {
            Buffer::zeroed(device, (Category::Tensors, "prompt inputs"), len)
        }
        Ok(Self {
            ids: tensor(device, rows)?,
            positions: tensor(device, rows)?,
            slots: tensor(device, rows)?,
            table: tensor(device, width)?,
            kv_lens: tensor(device, 1)?,
            offsets: tensor(device, 2)?,
            wanted: tensor(device, wanted)?,
            logits: tensor(device, wanted * vocab)?,
        })
    }

    fn write(
        &mut self,
        (pages, first): (&[i32], usize),
        ids: &[u32],
        slots: &[i64],
    ) -> Result<(), Error> {
        let end = first + ids.len();
        let as_i32: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let positions: Vec<i32> = (first as i32..end as i32).collect();
        let rows: Vec<i32> = (0..self.wanted.len().min(ids.len()) as i32).collect();
        self.ids.write(&as_i32)?;
        self.positions.write(&positions)?;
        self.slots.write(slots)?;
        let pages = &pages[..pages.len().min(self.table.len())];
        self.table.write(&vec![-1; self.table.len()])?;
        self.table.write(pages)?;
        self.kv_lens.write(&[end as i32])?;
        self.offsets.write(&[0, ids.len() as i32])?;
        self.wanted.write(&rows)
    }

    fn operands(&self, rows: usize, wanted: usize) -> Result<StepOperands<D>, Error> {
        fn part<T: Element, D>(
            lease: Lease<T, D>,
            len: usize,
        ) -> Result<mlakit::Input<'static, T, D>, Error> {
            Ok((&lease.part(0..len)?).into())
        }
        Ok(StepOperands {
            ids: part(self.ids.lease(), rows)?,
            positions: part(self.positions.lease(), rows)?,
            slots: part(self.slots.lease(), rows)?,
            page_table: (&self.table.lease()).into(),
            kv_lens: (&self.kv_lens.lease()).into(),
            q_offsets: (&self.offsets.lease()).into(),
            wanted_rows: part(self.wanted.lease(), wanted)?,
        })
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
