//! The inputs of a chunk of a prompt.

use mlakit::{Buffer, Category, Element, Error, Lease};
use mlakit_serve::{Listed, StepKeys};

use super::graph::Shape;
use super::model::{DecoderDevice, StepOperands};

/// The inputs of a chunk of a prompt.
pub(super) struct PromptInputs<D: DecoderDevice> {
    ids: Buffer<i32, D>,
    positions: Buffer<i32, D>,
    slots: Buffer<i64, D>,
    table: Buffer<i32, D>,
    kv_lens: Buffer<i32, D>,
    offsets: Buffer<i32, D>,
    /// Zeros: a prompt is one request.
    request: Buffer<i32, D>,
    /// A list of all keys, and how many of them each row sees.
    listed: Option<(Buffer<i32, D>, Buffer<i32, D>)>,
    wanted: Buffer<i32, D>,
    pub(super) logits: Buffer<f32, D>,
}

impl<D: DecoderDevice> PromptInputs<D> {
    pub(super) fn new(
        device: &D,
        (rows, wanted): (usize, usize),
        shape: Shape,
    ) -> Result<Self, Error> {
        fn tensor<T: Element, D: DecoderDevice>(
            device: &D,
            len: usize,
        ) -> Result<Buffer<T, D>, Error> {
            Buffer::zeroed(device, (Category::Tensors, "prompt inputs"), len)
        }
        let mut listed = None;
        if shape.listed > 0 {
            let (all, counts) = (tensor(device, rows * shape.listed)?, tensor(device, rows)?);
            let all: &mut (Buffer<i32, D>, _) = listed.insert((all, counts));
            all.0.write(&shape.all_keys(rows))?;
        }
        Ok(Self {
            ids: tensor(device, rows)?,
            positions: tensor(device, rows)?,
            slots: tensor(device, rows)?,
            table: tensor(device, shape.width)?,
            kv_lens: tensor(device, 1)?,
            offsets: tensor(device, 2)?,
            request: tensor(device, rows)?,
            listed,
            wanted: tensor(device, wanted)?,
            logits: tensor(device, wanted * shape.vocab)?,
        })
    }

    pub(super) fn write(
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
        if let Some((_, counts)) = &mut self.listed {
            let seen: Vec<i32> = positions.iter().map(|position| position + 1).collect();
            counts.write(&seen)?;
        }
        self.wanted.write(&rows)
    }

    pub(super) fn operands(
        &self,
        (rows, wanted): (usize, usize),
        all_selected: bool,
    ) -> Result<StepOperands<D>, Error> {
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
            keys: StepKeys {
                all_selected,
                request: Some(part(self.request.lease(), rows)?),
                listed: match &self.listed {
                    Some((all, counts)) => Some(Listed {
                        positions: part(all.lease(), all.len() / counts.len() * rows)?,
                        counts: part(counts.lease(), rows)?,
                    }),
                    None => None,
                },
                pooled: None,
            },
            wanted_rows: part(self.wanted.lease(), wanted)?,
        })
    }
}
