//! Vector clocks: what has happened before what.

/// How much of the work of each stream lies in the past of a point.
#[derive(Debug, Clone, Default)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    /// Adds the past of `other`.
    pub(super) fn join(&mut self, other: &Clock) {
        for (stream, tick) in other.0.iter().enumerate() {
            self.see(stream, *tick);
        }
    }

    /// Adds the first `tick` pieces of work of a stream.
    pub(super) fn see(&mut self, stream: usize, tick: u64) {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        self.0[stream] = self.0[stream].max(tick);
    }

    /// Returns whether that piece of work lies in the past.
    pub(super) fn has_seen(&self, stream: usize, tick: u64) -> bool {
        self.0.get(stream).is_some_and(|seen| *seen >= tick)
    }
}
