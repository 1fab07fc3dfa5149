//! A progress bar, on a terminal, for what takes longer than a second.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What a step must take before a bar is drawn.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts steps; draws to stderr once a second has passed, and only if stderr is a terminal.
pub struct Progress {
    bar: ProgressBar,
    begin: Instant,
    terminal: bool,
    shown: bool,
}

impl Progress {
    /// Of `steps` steps; `what` is written before the bar.
    pub fn new(what: &'static str, steps: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        let terminal = std::io::stderr().is_terminal();
        Self { bar, begin: Instant::now(), terminal, shown: false }
    }

    /// One step is about to begin.
    pub fn step(&mut self, name: &str) {
        self.bar.set_message(name.to_owned());
        if self.terminal && !self.shown && self.begin.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
        }
    }

    /// One step is done.
    pub fn done(&mut self) {
        self.bar.inc(1);
    }
}

/// The bar leaves nothing on the screen.
impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
