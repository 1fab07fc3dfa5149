//! Which page of the latent cache is whose.

use mlakit::{Device, Error, Name, PageGeometry, Pages};
use thiserror::Error as ThisError;

/// Why pages could not be had.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
pub enum PoolError {
    /// More pages were asked for than are free.
    #[error("the cache is full: {needed} more pages needed, {free} free")]
    Full {
        /// Pages needed.
        needed: usize,
        /// Pages free.
        free: usize,
    },
    /// Memory.
    #[error(transparent)]
    Memory(#[from] Error),
}

/// The latent cache of all layers of a model: in every layer the same page ids belong to the same sequence. Page 0 is nobody's, so that
/// a page table filled with zeros reads nothing of anyone.
pub struct KvPool<D: Device> {
    layers: Vec<Pages<D>>,
    /// Index keys of each layer, where it has an indexer.
    index: Vec<Option<Pages<D>>>,
    pages: usize,
    page_size: usize,
    /// Free pages, the next one last.
    free: Vec<u32>,
}

impl<D: Device> KvPool<D> {
    /// `pages` pages for each of `layers` layers, page 0 included.
    ///
    /// # Errors
    /// As [`Pages::new`].
    pub fn new(
        device: &D,
        layers: usize,
        geometry: PageGeometry,
        pages: usize,
    ) -> Result<Self, Error> {
        let layer = |index: usize| {
            Pages::new(device, Name::from(format!("layer {index}")), geometry, pages)
        };
        let layers = (0..layers).map(layer).collect::<Result<_, _>>()?;
        let free = (1..pages as u32).rev().collect();
        Ok(Self { layers, index: Vec::new(), pages, page_size: geometry.page_size, free })
    }

    /// The same with index keys beside the latents of each layer that has a geometry for them: as many pages, so that one page table
    /// is for both.
    ///
    /// # Errors
    /// As [`Pages::new`].
    pub fn with_index(
        mut self,
        device: &D,
        geometries: impl IntoIterator<Item = Option<PageGeometry>>,
    ) -> Result<Self, Error> {
        for (layer, geometry) in geometries.into_iter().enumerate() {
            let name = Name::from(format!("layer {layer} index keys"));
            let pages = geometry.map(|geometry| Pages::new(device, name, geometry, self.pages));
            self.index.push(pages.transpose()?);
        }
        Ok(self)
    }

    /// Makes a sequence long enough for `tokens` tokens.
    ///
    /// # Errors
    /// [`PoolError::Full`]; the sequence keeps the pages that it had.
    pub fn grow(&mut self, sequence: &mut Vec<i32>, tokens: usize) -> Result<(), PoolError> {
        let needed = tokens.div_ceil(self.page_size).saturating_sub(sequence.len());
        if needed > self.free.len() {
            return Err(PoolError::Full { needed, free: self.free.len() });
        }
        let taken = self.free.split_off(self.free.len() - needed);
        sequence.extend(taken.into_iter().rev().map(|page| page as i32));
        Ok(())
    }

    /// Takes a sequence's pages back.
    pub fn free(&mut self, sequence: &mut Vec<i32>) {
        self.free.extend(sequence.drain(..).rev().map(|page| page as u32));
    }

    /// The pages of a layer.
    pub fn layer(&self, layer: usize) -> &Pages<D> {
        &self.layers[layer]
    }

    /// The pages of a layer's index keys, where it has an indexer.
    pub fn index(&self, layer: usize) -> Option<&Pages<D>> {
        self.index.get(layer)?.as_ref()
    }

    /// Pages that nobody has.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The slot of a sequence's token: page x page size + offset. -1 where the sequence has no page for it.
    pub fn slot(&self, sequence: &[i32], position: usize) -> i64 {
        let page = sequence.get(position / self.page_size);
        page.map_or(-1, |page| {
            i64::from(*page) * self.page_size as i64 + (position % self.page_size) as i64
        })
    }
}
