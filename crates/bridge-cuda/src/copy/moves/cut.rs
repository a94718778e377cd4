//! How a move is cut into pieces, each claimed by one thread.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Figures of a move in one direction, in bytes where nothing else is said. `examples/moves` measures others.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Bytes that are worth a thread.
    pub share: usize,
    /// The most threads of a move.
    pub threads: usize,
    /// Buffers of a move with so many threads, at least one for each.
    pub buffers: usize,
    /// The shortest piece. A shorter move is one piece.
    pub shortest: usize,
    /// The longest piece.
    pub longest: usize,
    /// The most bytes that the driver moves without our staging, where no work is pending in the stream.
    pub at_once: usize,
}

/// Figures of moves.
#[derive(Clone, Copy, Debug)]
pub struct Cuts {
    /// To the host.
    pub down: Cut,
    /// To the device.
    pub up: Cut,
    /// The most bytes of small pieces that are packed together. A small piece is no longer than the shortest piece of a
    /// long one.
    pub block: usize,
    /// Between two devices: the most bytes of a small piece, and of a block of them.
    pub across: (usize, usize),
}

impl Cuts {
    /// Returns the bytes of a buffer.
    pub(super) const fn longest(&self) -> usize {
        if self.down.longest > self.up.longest { self.down.longest } else { self.up.longest }
    }

    /// Returns the buffers of the move that has most.
    pub(super) const fn buffers(&self) -> usize {
        if self.down.buffers > self.up.buffers { self.down.buffers } else { self.up.buffers }
    }
}

/// The end of a move whose pieces are short, because the host's copy of one piece overlaps with nothing there: the
/// device waits for the first piece that goes up, and the caller for the last one that comes down.
#[derive(Clone, Copy)]
pub(super) enum Short {
    First,
    Last,
}

/// Where the pieces of a move may end.
#[derive(Clone, Copy)]
pub(super) enum Ends<'a> {
    /// At the ends of the host's pages: two threads that touch one page at a time would both clear it. This is the
    /// address of the first byte.
    Pages(usize),
    /// After these numbers of bytes, in ascending order, none further than the shortest piece from the one before. The
    /// last is that of all bytes.
    At(&'a [usize]),
}

/// Bytes of a page, and of a huge one.
const PAGE: usize = 4 << 10;
const HUGE: usize = 2 << 20;

/// The pieces of a move of `nbytes` bytes, each claimed once.
pub(super) struct Pieces<'a> {
    cut: Cut,
    short: Short,
    ends: Ends<'a>,
    nbytes: usize,
    /// How many threads the move is worth, and the buffers that they share.
    pub threads: usize,
    pub buffers: usize,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl<'a> Pieces<'a> {
    /// Cuts a move for `most` threads or fewer.
    pub fn of(cut: &Cut, short: Short, (ends, nbytes): (Ends<'a>, usize), most: usize) -> Self {
        let threads = (nbytes / cut.share).clamp(1, cut.threads.min(most).max(1));
        let buffers = (cut.buffers * threads).div_ceil(cut.threads);
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { cut: *cut, short, ends, nbytes, threads, buffers, next, stopped }
    }

    pub fn claim(&self) -> Option<Range<usize>> {
        let is_left = |start: usize| start < self.nbytes && !self.stopped.load(Relaxed);
        let next = |start| is_left(start).then(|| self.end(start));
        self.next.fetch_update(Relaxed, Relaxed, next).ok().map(|start| start..self.end(start))
    }

    /// Returns the bytes that are claimed.
    pub fn claimed(&self) -> usize {
        self.next.load(Relaxed)
    }

    /// Returns the end of the piece that begins at `start`: the last of the ends within its length.
    fn end(&self, start: usize) -> usize {
        let edge = match self.short {
            Short::First => start,
            Short::Last => self.nbytes - start,
        };
        let length = (edge / self.buffers).clamp(self.cut.shortest, self.cut.longest);
        let end = match self.ends {
            Ends::Pages(host) => {
                let page = if length >= HUGE { HUGE } else { PAGE };
                let aligned = (host + start + length) / page * page;
                if aligned > host + start { aligned - host } else { start + length }
            }
            Ends::At(ends) => {
                ends[..ends.partition_point(|end| *end <= start + length)].last().map_or(start, |end| *end)
            }
        };
        end.min(self.nbytes)
    }

    /// Ends the move after an error: no piece is claimed any more.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::CUTS;
    use super::*;

    #[test]
    fn pieces_are_the_whole_without_a_gap_and_fit_a_buffer() {
        for (cut, short) in [(CUTS.down, Short::Last), (CUTS.up, Short::First)] {
            let Cut { shortest, longest, .. } = cut;
            for nbytes in [1, 4095, shortest, shortest + 1, longest, longest + 1, 100 << 20, (1 << 30) + 3] {
                for (threads, host) in [(1, 0), (3, 4096), (8, (1 << 40) + 64), (16, 7)] {
                    let pieces = Pieces::of(&cut, short, (Ends::Pages(host), nbytes), threads);
                    assert!((1..=threads).contains(&pieces.threads) && pieces.buffers >= pieces.threads);
                    let mut end = 0;
                    while let Some(piece) = pieces.claim() {
                        assert_eq!(piece.start, end);
                        assert!((1..=longest).contains(&piece.len()));
                        let page = if piece.len() >= HUGE { HUGE } else { PAGE };
                        assert!(
                            piece.end == nbytes || (host + piece.end).is_multiple_of(page),
                            "{piece:?} cuts a page"
                        );
                        end = piece.end;
                    }
                    assert_eq!(end, nbytes, "{threads} threads");
                }
            }
        }
    }

    #[test]
    fn after_an_error_no_piece_is_claimed() {
        let pieces = Pieces::of(&CUTS.up, Short::First, (Ends::Pages(0), 1 << 30), 8);
        assert!(pieces.claim().is_some());
        pieces.stop();
        assert_eq!(pieces.claim(), None);
    }

    #[test]
    fn packed_pieces_end_with_one_of_those_inside_and_fit_a_buffer() {
        for (cut, short) in [(CUTS.down, Short::Last), (CUTS.up, Short::First)] {
            let lengths = (1..2000usize).map(|n| n * 7919 * 16 % cut.shortest + 16);
            let ends: Vec<_> = lengths
                .scan(0, |end, length| {
                    Some({
                        *end += length.min(cut.shortest);
                        *end
                    })
                })
                .collect();
            let nbytes = ends[ends.len() - 1];
            let pieces = Pieces::of(&cut, short, (Ends::At(&ends), nbytes), 8);
            let mut end = 0;
            while let Some(piece) = pieces.claim() {
                assert!(piece.start == end && piece.end > end && piece.len() <= cut.longest, "{piece:?}");
                assert!(ends.binary_search(&piece.end).is_ok(), "{piece:?} cuts one of those inside");
                end = piece.end;
            }
            assert_eq!(end, nbytes);
        }
    }

    #[test]
    fn the_open_end_of_a_move_has_the_shortest_pieces() {
        let lengths = |cut, short| {
            let pieces = Pieces::of(cut, short, (Ends::Pages(0), 1 << 30), 8);
            std::iter::from_fn(|| pieces.claim()).map(|piece| piece.len()).collect::<Vec<_>>()
        };
        let (down, up) = (lengths(&CUTS.down, Short::Last), lengths(&CUTS.up, Short::First));
        assert!(down[0] == CUTS.down.longest && down[down.len() - 2] == CUTS.down.shortest);
        assert!(up[0] == CUTS.up.shortest && up[up.len() - 2] == CUTS.up.longest);
    }
}
