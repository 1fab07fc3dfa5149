//! The protocol under loom: every interleaving of two or three threads, with the memory orders that
//! are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p mlakit --lib --release clock::model`

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering::SeqCst};
use loom::thread;

use super::*;

const DEVICE: u64 = 1;

/// Memory as the model sees it. `contents` is touched with plain accesses, so loom itself reports a
/// race or a use after free.
struct Memory {
    standing: Arc<Standing>,
    clocks: Clocks,
    contents: loom::cell::UnsafeCell<u32>,
    freed: AtomicBool,
}

// SAFETY: the only field that is not `Sync` is `contents`, and that its accesses are ordered is
// what loom checks here.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            standing: Standing::new(DEVICE, Epoch::default()),
            clocks: Clocks::default(),
            contents: loom::cell::UnsafeCell::new(0),
            freed: AtomicBool::new(false),
        })
    }

    /// `Stream::submit` on stream `stream`, on a device that works at once.
    fn submit(&self, claim: &Claim, (stream, number): (usize, u64), access: Access) -> bool {
        let check = || claim.check("x", access, (DEVICE, stream), |t| self.clocks.done(t));
        if check().is_err() {
            return false;
        }
        let ticket = Ticket { stream, number };
        Claim::stamp(ticket, std::iter::once((claim, access)));
        let sent = check().is_ok();
        if sent {
            self.touch(access);
        }
        self.clocks.complete(ticket);
        sent
    }

    fn touch(&self, access: Access) {
        assert!(!self.freed.load(SeqCst), "used after it was freed");
        match access {
            // SAFETY: loom panics if a write is concurrent.
            Access::Read => self.contents.with(|at| assert!(unsafe { *at } < 100)),
            // SAFETY: loom panics if any other access is concurrent.
            Access::Write => self.contents.with_mut(|at| unsafe { *at += 1 }),
        }
    }

    /// `Keeper::retire`, then `Keeper::reclaim` as soon as it may.
    fn release(&self) {
        self.standing.close();
        while !self.standing.idle(&self.clocks) {
            thread::yield_now();
        }
        self.touch(Access::Write); // a free is a write to all of it
        self.freed.store(true, SeqCst);
    }

    fn host(&self, access: Access) -> bool {
        self.standing.host(&"x".into(), access, &self.clocks, || self.touch(access)).is_ok()
    }
}

/// The owner lets go while a stream uses: the stream notices, or the owner waits.
#[test]
fn a_release_against_a_submission() {
    loom::model(|| {
        let memory = Memory::new();
        let claim = Claim::new(memory.standing.clone());
        let user = {
            let memory = memory.clone();
            thread::spawn(move || memory.submit(&claim, (0, 1), Access::Read))
        };
        memory.release();
        user.join().unwrap();
    });
}

/// Two streams without an order: at most one of two conflicting uses goes through at a time.
#[test]
fn two_streams_against_each_other() {
    for second in [Access::Read, Access::Write] {
        loom::model(move || {
            let memory = Memory::new();
            let claim = Claim::new(memory.standing.clone());
            let other = {
                let (memory, claim) = (memory.clone(), claim.clone());
                thread::spawn(move || memory.submit(&claim, (1, 1), second))
            };
            memory.submit(&claim, (0, 1), Access::Write);
            other.join().unwrap();
        });
    }
}

/// A host copy while a stream uses.
#[test]
fn a_host_copy_against_a_submission() {
    for (host, work) in [
        (Access::Read, Access::Write),
        (Access::Write, Access::Read),
        (Access::Write, Access::Write),
    ] {
        loom::model(move || {
            let memory = Memory::new();
            let claim = Claim::new(memory.standing.clone());
            let user = {
                let memory = memory.clone();
                thread::spawn(move || memory.submit(&claim, (0, 1), work))
            };
            memory.host(host);
            user.join().unwrap();
        });
    }
}

/// Two host copies: readers together, a writer alone.
#[test]
fn two_host_copies() {
    for other in [Access::Read, Access::Write] {
        loom::model(move || {
            let memory = Memory::new();
            let copy = {
                let memory = memory.clone();
                thread::spawn(move || memory.host(other))
            };
            let mine = memory.host(Access::Write);
            let theirs = copy.join().unwrap();
            assert!(mine || theirs, "both gave way to nobody");
        });
    }
}

/// A view is pointed elsewhere while its lease is used: whoever finds the new words has lost the
/// lease.
#[test]
fn a_rebind_against_a_leased_call() {
    loom::model(|| {
        let view = Memory::new();
        let mut claim = Claim::new(view.standing.clone());
        let user = {
            let (view, lease) = (view.clone(), claim.clone());
            thread::spawn(move || {
                let check = || lease.check("x", Access::Read, (DEVICE, 1), |t| view.clocks.done(t));
                let ticket = Ticket { stream: 1, number: 1 };
                if check().is_ok() {
                    Claim::stamp(ticket, std::iter::once((&lease, Access::Read)));
                    if check().is_ok() {
                        // SAFETY: loom panics if the write is concurrent.
                        let words = view.contents.with(|at| unsafe { *at });
                        assert_eq!(words, 0, "read the pages that it has not numbered");
                    }
                    view.clocks.complete(ticket);
                }
            })
        };
        let ticket = Ticket { stream: 0, number: 1 };
        let check = |claim: &Claim| {
            claim.check("x", Access::Write, (DEVICE, 0), |t| view.clocks.done(t)).is_ok()
        };
        if check(&claim) {
            Claim::stamp(ticket, std::iter::once((&claim, Access::Write)));
            if check(&claim) {
                claim.renew();
                view.touch(Access::Write);
            }
            view.clocks.complete(ticket);
        }
        user.join().unwrap();
    });
}

/// Streams come and go: an index that left work behind is not given to another queue.
#[test]
fn an_index_is_one_queue() {
    loom::model(|| {
        let clocks = Arc::new(Clocks::default());
        let come_and_go = |clocks: &Clocks| {
            if let Ok((index, issued)) = clocks.attach() {
                let unfinished = clocks.done(index) < issued;
                assert!(!unfinished, "stream {index} has work of another queue in flight");
                clocks.detach(index, issued + 1); // and the work is never done
            }
        };
        let other = {
            let clocks = clocks.clone();
            thread::spawn(move || come_and_go(&clocks))
        };
        come_and_go(&clocks);
        come_and_go(&clocks);
        other.join().unwrap();
    });
}
