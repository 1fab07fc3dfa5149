//! A progress bar, on a terminal, for what takes longer than a second.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What a piece of work must take before its bar is drawn.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts steps. A second after it was made, if stderr is a terminal, its bar appears there,
/// however long a step takes.
pub struct Progress {
    bar: ProgressBar,
    waiting: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Of `steps` steps; `what` is written before the bar.
    pub fn new(what: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        let waiting = if std::io::stderr().is_terminal() { wait(bar.clone()) } else { None };
        Self { bar, waiting }
    }

    /// One step is about to begin.
    pub fn step(&mut self, name: &str) {
        self.bar.set_message(name.to_owned());
    }

    /// One step is done.
    pub fn done(&mut self) {
        self.bar.inc(1);
    }
}

/// Draws the bar after a while, unless the sender goes first. Without a thread there is no bar.
fn wait(bar: ProgressBar) -> Option<(Sender<()>, JoinHandle<()>)> {
    let (gone, wait) = mpsc::channel();
    let draw = move || {
        if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.tick();
        }
    };
    Builder::new().name("progress".into()).spawn(draw).ok().map(|thread| (gone, thread))
}

/// The bar leaves nothing on the screen.
impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((gone, thread)) = self.waiting.take() {
            drop(gone);
            // A thread that failed has drawn nothing.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_bar_appears_after_a_second_and_not_before() {
        let bar = ProgressBar::with_draw_target(Some(3), ProgressDrawTarget::hidden());
        let begin = Instant::now();
        let (gone, thread) = wait(bar.clone()).unwrap();
        drop(gone);
        thread.join().unwrap();
        assert!(begin.elapsed() < PATIENCE, "whoever is quick does not wait for the bar");
        let (_gone, thread) = wait(bar).unwrap();
        thread.join().unwrap();
        assert!(begin.elapsed() >= PATIENCE);
    }
}
