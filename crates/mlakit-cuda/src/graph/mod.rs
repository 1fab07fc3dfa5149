//! Recorded sequences.
//!
//! A capture is of the relaxed mode: what other threads, or the recording closure itself, do
//! meanwhile on other streams (allocations among it) is theirs and does not end it. A recording
//! holds kernels and memory sets, and copies; a node that allocates or frees is refused, because
//! the ledger would not know of it.

use std::sync::Arc;

use mlakit::Error;

use crate::driver::{Context, RawExecutable, RawGraph, RawNode};
use crate::stream::Queue;

/// A sequence that is ready to be replayed.
pub struct Executable {
    context: Arc<Context>,
    raw: RawExecutable,
}

// SAFETY: the handle may be used from any thread, by one at a time, which `&mut Queue` and the core
// see to.
unsafe impl Send for Executable {}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC` and `..._MEM_FREE`.
const MEMORY_NODES: [u32; 2] = [10, 11];

/// From here on launches are recorded.
pub(crate) fn begin(queue: &mut Queue) -> Result<(), Error> {
    let context = queue.context.clone();
    let _current = context.enter()?;
    queue.seal()?;
    // SAFETY: the stream is live while it is lent.
    let code = unsafe { (context.api.capture_begin)(queue.raw, RELAXED) };
    context.check("cuStreamBeginCapture", code).inspect_err(|_| queue.open())
}

/// Ends the recording, whatever came of it; the stream is as before.
pub(crate) fn end(queue: &mut Queue) -> Result<Executable, Error> {
    let context = queue.context.clone();
    let _current = context.enter_lost()?;
    let mut graph = std::ptr::null_mut();
    // SAFETY: `begin` began it, on this stream, and the pointer is to a live handle.
    let code = unsafe { (context.api.capture_end)(queue.raw, &mut graph) };
    queue.open();
    let graph = Recorded { context: &context, raw: graph };
    context.check("cuStreamEndCapture", code)?;
    graph.expect_no_memory_nodes()?;
    let executable = graph.instantiate()?;
    // SAFETY: both handles are live. Now, so that the first replay does not have to.
    let code = unsafe { (context.api.graph_upload)(executable.raw, queue.raw) };
    context.check("cuGraphUpload", code)?;
    Ok(executable)
}

impl Executable {
    /// Enqueues the sequence.
    pub(crate) fn replay(&self, queue: &mut Queue) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: both handles are live; the core keeps the executable until this replay is done.
        let code = unsafe { (self.context.api.graph_launch)(self.raw, queue.raw) };
        self.context.check("cuGraphLaunch", code)
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter_lost() {
            // SAFETY: `instantiate` made it, it is destroyed once, and the core drops it when no
            // replay runs.
            unsafe { (self.context.api.executable_destroy)(self.raw) };
        }
    }
}

/// What the capture gave; needed only to make the executable. Null after a failure.
struct Recorded<'c> {
    context: &'c Arc<Context>,
    raw: RawGraph,
}

impl Recorded<'_> {
    fn expect_no_memory_nodes(&self) -> Result<(), Error> {
        for node in self.nodes()? {
            let mut kind = 0;
            // SAFETY: the node is of this graph, and the pointer is to a live integer.
            let code = unsafe { (self.context.api.graph_node_type)(node, &mut kind) };
            self.context.check("cuGraphNodeGetType", code)?;
            if MEMORY_NODES.contains(&kind) {
                let needed = "nodes that neither allocate nor free";
                return Err(Error::contract("capture", needed, format!("a node of type {kind}")));
            }
        }
        Ok(())
    }

    fn nodes(&self) -> Result<Vec<RawNode>, Error> {
        let mut count = 0;
        // SAFETY: the graph is live; with no place for nodes the driver stores their number alone.
        let code =
            unsafe { (self.context.api.graph_nodes)(self.raw, std::ptr::null_mut(), &mut count) };
        self.context.check("cuGraphGetNodes", code)?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        if count > 0 {
            // SAFETY: the graph is live, and there is place for `count` nodes.
            let code =
                unsafe { (self.context.api.graph_nodes)(self.raw, nodes.as_mut_ptr(), &mut count) };
            self.context.check("cuGraphGetNodes", code)?;
        }
        nodes.truncate(count);
        Ok(nodes)
    }

    fn instantiate(&self) -> Result<Executable, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is live, and the pointer is to a live handle.
        let code = unsafe { (self.context.api.graph_instantiate)(&mut raw, self.raw, 0) };
        self.context.check("cuGraphInstantiate", code)?;
        Ok(Executable { context: self.context.clone(), raw })
    }
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the capture made it, and the executable does not need it.
            unsafe { (self.context.api.graph_destroy)(self.raw) };
        }
    }
}
