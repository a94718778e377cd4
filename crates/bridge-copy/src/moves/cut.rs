//! How a move is cut into pieces, each claimed by one thread.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Figures of a move, in bytes where nothing else is said. `examples/moves.rs` measures others.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Bytes that are worth a thread.
    pub share: usize,
    /// The most threads of a move.
    pub threads: usize,
    /// Buffers of a thread: the device fills or empties one while the thread empties or fills the other.
    pub depth: usize,
    /// The shortest piece. A shorter move is one piece.
    pub shortest: usize,
    /// The longest piece, and the length of a buffer.
    pub longest: usize,
    /// Whether stores go past the cache: on the way down, on the way up.
    pub streaming: [bool; 2],
    /// Whether pages of the target are touched before its bytes come in.
    pub touching: bool,
}

/// The ways of a move. The side that the threads copy last, or first, has short pieces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Way {
    /// To the host: the last pieces are short, because the move ends when the threads have copied them.
    Down,
    /// To the device: the first pieces are short, because the device begins when the threads have copied them.
    Up,
}

/// Bytes of a page, and of a huge one.
const PAGE: usize = 4 << 10;
const HUGE: usize = 2 << 20;

/// The pieces of a move of `nbytes` bytes from or to `host`, each claimed once.
pub(super) struct Pieces<'a> {
    cut: &'a Cut,
    way: Way,
    host: usize,
    nbytes: usize,
    in_flight: usize,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl<'a> Pieces<'a> {
    pub fn of(cut: &'a Cut, way: Way, (host, nbytes): (usize, usize), threads: usize) -> Self {
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { cut, way, host, nbytes, in_flight: threads * cut.depth, next, stopped }
    }

    pub fn claim(&self) -> Option<Range<usize>> {
        let is_left = |start: usize| start < self.nbytes && !self.stopped.load(Relaxed);
        let next = |start| is_left(start).then(|| self.end(start));
        self.next.fetch_update(Relaxed, Relaxed, next).ok().map(|start| start..self.end(start))
    }

    /// Returns the end of the piece that begins at `start`. It is the end of a page of the host, of a huge one where
    /// the piece is as long: two threads that touch one page at a time would both clear it.
    fn end(&self, start: usize) -> usize {
        let edge = match self.way {
            Way::Down => self.nbytes - start,
            Way::Up => start,
        };
        let length = (edge / self.in_flight).clamp(self.cut.shortest, self.cut.longest);
        let page = if length >= HUGE { HUGE } else { PAGE };
        let (end, aligned) = (start + length, (self.host + start + length) / page * page);
        let end = if aligned > self.host + start { aligned - self.host } else { end };
        end.min(self.nbytes)
    }

    /// Ends the move after an error: no piece is claimed any more.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::CUT;
    use super::*;

    #[test]
    fn pieces_are_the_whole_without_a_gap_and_fit_a_buffer() {
        let Cut { shortest, longest, .. } = CUT;
        for nbytes in [1, 4095, shortest, shortest + 1, longest, longest + 1, 100 << 20, (1 << 30) + 3] {
            for (threads, host) in [(1, 0), (3, 4096), (8, (1 << 40) + 64), (16, 7)] {
                for way in [Way::Down, Way::Up] {
                    let pieces = Pieces::of(&CUT, way, (host, nbytes), threads);
                    let mut end = 0;
                    while let Some(piece) = pieces.claim() {
                        assert_eq!(piece.start, end);
                        assert!((1..=longest).contains(&piece.len()));
                        end = piece.end;
                    }
                    assert_eq!(end, nbytes, "{threads} threads");
                }
            }
        }
    }
}
