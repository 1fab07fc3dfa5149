//! Text from a checkpoint: prompts in chunks, then one replay of one graph a step for all sequences.

use std::time::Instant;

use mlakit::{PoolView, Stream};
use mlakit_serve::{CacheSpec, Capacity, IndexCache, KvPool, LayerCache};

use super::attention::{Deployment, Lists};
use super::error::DecodeError;
use super::graph::{DecodeGraph, Shape};
use super::limits::TextLimits;
use super::model::{Decoder, DecoderDevice};
use super::prompt::PromptInputs;
use crate::{Checkpoint, ModelConfig};

/// Which keys a row may attend to where the checkpoint has an indexer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// As the checkpoint was trained: to those that its indexers select.
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
    views: Vec<LayerViews<D>>,
    pool: KvPool<D>,
    decoder: Decoder<D>,
    options: GeneratorOptions,
    limits: TextLimits,
    eos: Vec<u32>,
}

/// The views of a prompt's caches, of one layer.
struct LayerViews<D: DecoderDevice> {
    latent: PoolView<D>,
    index: Option<PoolView<D>>,
}

/// A text in the making.
pub(super) struct Sequence {
    pub(super) pages: Vec<i32>,
    pub(super) cached: usize,
    /// The token that the next step reads.
    pub(super) next: u32,
    pub(super) done: bool,
}

impl<D: DecoderDevice> Generator<D> {
    /// Uploads, prepares, makes the cache, and captures the decode step.
    ///
    /// # Errors
    /// As [`Decoder::new`].
    pub fn new(
        stream: &mut Stream<'_, D>,
        (config, checkpoint): (&ModelConfig, &Checkpoint),
        options: GeneratorOptions,
    ) -> Result<Self, DecodeError> {
        let device = stream.device().clone();
        let limits = TextLimits::new(config);
        let width = options.max_tokens.div_ceil(options.cache.page_size).max(1);
        let rows = options.prompt_rows.max(options.batch);
        let capacity = Capacity {
            rows,
            batch: options.batch,
            kv_tokens: options.max_tokens.max(1),
            table_width: width,
        };
        let (config, deployment) = deploy(config, options, capacity);
        let wanted = if options.prompt_logits { rows } else { options.batch };
        let decoder = Decoder::new(&device, (&config, checkpoint), &deployment, wanted)?;
        device.census().enter("serve");
        let pages = options.batch * width + 1;
        let pool = KvPool::new(&device, decoder.layers(), decoder.pages(), pages)?
            .with_index(&device, decoder.index_pages())?;
        let mut views = Vec::with_capacity(decoder.layers());
        for (layer, index) in decoder.index_pages().enumerate() {
            let mut latent = PoolView::new(&device, "prompt view", decoder.pages())?;
            latent.bind(stream, pool.layer(layer))?;
            let mut index = index
                .map(|pages| PoolView::new(&device, "prompt view of index keys", pages))
                .transpose()?;
            if let (Some(view), Some(pages)) = (&mut index, pool.index(layer)) {
                view.bind(stream, pages)?;
            }
            views.push(LayerViews { latent, index });
        }
        let listed = match deployment.lists {
            Lists::Shared => 0,
            Lists::Outside { width } => width,
        };
        let shape = Shape { batch: options.batch, width, vocab: config.vocab_size, listed };
        let decode = DecodeGraph::capture(stream, &decoder, (shape, &pool))?;
        let prompt_wanted = if options.prompt_logits { rows } else { 0 };
        let prompt = PromptInputs::new(&device, (rows, prompt_wanted), shape)?;
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
                let id = self.decode.chosen()[index] as u32;
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
            let all_selected = self.decoder.topk().is_some_and(|topk| at + part.len() <= topk);
            let operands = self.prompt.operands((part.len(), wanted), all_selected)?;
            let vocab = self.decoder.vocab();
            let out = self.prompt.logits.lease().part(0..wanted * vocab)?;
            let views = &self.views;
            let caches = |_: &Stream<'_, D>, layer: usize| Ok(views[layer].lease());
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

impl<D: DecoderDevice> LayerViews<D> {
    fn lease(&self) -> LayerCache<D> {
        let index = self.index.as_ref().map(|view| IndexCache {
            read: view.lease(),
            write: view.lease_mut(),
            ring: None,
        });
        LayerCache { read: self.latent.lease(), write: self.latent.lease_mut(), index }
    }
}

/// The model as it is run, and how. A dense run has no use for indexers; where dense attention does not read the record, each row
/// has a list of all its keys instead.
fn deploy(
    config: &ModelConfig,
    options: GeneratorOptions,
    capacity: Capacity,
) -> (ModelConfig, Deployment) {
    let mut config = config.clone();
    let sparse = config.layers.iter().any(|layer| layer.attention.indexer.is_some());
    let dense = options.attention == Attention::Dense || !sparse;
    if dense {
        config.layers.iter_mut().for_each(|layer| layer.attention.indexer = None);
    }
    let plain = options.cache.record.is_plain();
    let lists = match dense && !plain {
        true => Lists::Outside { width: capacity.kv_tokens },
        false => Lists::Shared,
    };
    let decode_rows = options.batch;
    let cache = options.cache;
    (config, Deployment { cache, capacity, decode_rows, dense_prompts: plain, lists })
}
