//! The lent streams of one device, by the index that the core gave them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlakit::clock::STREAMS;
use mlakit::{Error, Keeper, Reporter, Ticket};

use super::line::Line;
use super::{CallerStream, Queue};
use crate::driver::{Code, Context};

/// The lines.
pub(crate) struct Lines {
    context: Arc<Context>,
    table: Mutex<[Option<Arc<Line>>; STREAMS]>,
}

impl Lines {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), table: Mutex::default() }
    }

    /// Takes a lent stream into use.
    pub(crate) fn attach(&self, caller: &CallerStream, reporter: Reporter) -> Result<Queue, Error> {
        if !caller.is_of(&self.context) {
            return Err(Error::Foreign { what: "stream" });
        }
        if caller.is_capturing()? {
            return Err(Error::contract("stream", "one that is not capturing", "one that is"));
        }
        let index = reporter.stream();
        let stream = (caller.raw, caller.own.clone());
        let line = Arc::new(Line::new(&self.context, reporter, stream)?);
        // The core gives an index again only when the stream that had it is done.
        self.table()[index] = Some(line.clone());
        Ok(Queue { context: self.context.clone(), raw: caller.raw, line })
    }

    /// Reports what has arrived, and forgets the lines from which nothing can come any more.
    pub(crate) fn poll(&self, keeper: &Keeper) {
        // The driver asks for a current context. If the context is lost, the lines ask nothing of
        // the driver.
        let _current = self.context.enter();
        for place in self.table().iter_mut() {
            if let Some(line) = place {
                line.report(keeper);
                if line.is_over(keeper) {
                    *place = None;
                }
            }
        }
    }

    /// Makes a queue wait for a ticket of another stream.
    pub(crate) fn after(
        &self,
        queue: &Queue,
        ticket: Ticket,
        keeper: &Keeper,
    ) -> Result<(), Error> {
        let line = self.table()[ticket.stream()].clone();
        match line {
            Some(line) if line.raw != queue.raw && !keeper.is_done(ticket) => line.hold(queue.raw),
            _ => Ok(()),
        }
    }

    /// Waits until no line has anything in flight; for the end of a device.
    pub(crate) fn drain(&self, keeper: &Keeper) {
        self.poll(keeper);
        let busy = self.table().iter().flatten().any(|line| !line.is_idle(keeper));
        if busy && let Ok(_current) = self.context.enter() {
            // SAFETY: the context is current.
            let code = unsafe { (self.context.api.context_synchronize)() };
            debug_assert!(code == 0 || Code(code).is_sticky(), "cuCtxSynchronize: {code}");
            let _ = self.context.check("cuCtxSynchronize", code); // remembers a sticky error
        }
        self.poll(keeper);
    }

    fn table(&self) -> MutexGuard<'_, [Option<Arc<Line>>; STREAMS]> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Enqueues the signal of a submission.
    pub(crate) fn signal(&mut self, ticket: Ticket) {
        match self.context.enter() {
            Ok(_current) => self.line.signal(ticket),
            Err(_) => self.line.gave_up(ticket),
        }
    }

    /// The stream is about to record: others wait for what it was given before.
    pub(crate) fn seal(&self) -> Result<(), Error> {
        self.line.seal()
    }

    /// The stream records no more.
    pub(crate) fn open(&self) {
        self.line.open();
    }
}
