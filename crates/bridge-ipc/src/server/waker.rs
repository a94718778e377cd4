//! Wakes the thread of a socket, and keeps it awake where a question is expected.
//!
//! A process that opens a ticket waits for the answer of this thread. To wake the thread takes longer than the answer:
//! 100 µs and more on virtual machines. So a share wakes it, while the ticket is pending to the other process, and it
//! polls for a moment. Where no process opens that soon, fewer and fewer shares wake it.

use crate::sync::{now, poll, thread};
use bridge_core::Result;
use rustix::event::{EventfdFlags, PollFd, eventfd};
use rustix::fd::OwnedFd;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// How long the thread polls for a question that is expected.
const EXPECTED: Duration = Duration::from_millis(1);

/// How long it polls for the next question after one that it has answered.
const NEXT: Duration = Duration::from_micros(50);

/// The longest time in which shares do not wake it, because no question followed earlier ones.
const MOST_QUIET: Duration = Duration::from_millis(256);

/// Wakes and stops the thread of a socket.
pub(crate) struct Waker {
    pub(super) event: OwnedFd,
    pub(super) stopped: AtomicBool,
    /// Whether a share waits for the thread to notice it.
    is_expecting: AtomicBool,
    /// Whether the thread sleeps, so that a share has to wake it.
    is_asleep: AtomicBool,
    /// The zero of the times below, which are in microseconds.
    start: Instant,
    /// When the last share was made.
    shared: AtomicU64,
    /// Until when shares let the thread sleep.
    quiet: AtomicU64,
}

impl Waker {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Arc::new(Self {
            event: event.map_err(crate::memory::failed("no eventfd"))?,
            stopped: AtomicBool::new(false),
            is_expecting: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            start: now(),
            shared: AtomicU64::new(0),
            quiet: AtomicU64::new(0),
        }))
    }

    /// Makes the thread look at what has changed.
    pub(crate) fn ring(&self) {
        // The counter of an eventfd overflows after 2^64 calls that are not read.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Keeps the thread awake for a moment: something was shared, and a process may open it now.
    pub(crate) fn expect(&self) {
        let now = self.time();
        self.shared.store(now, Relaxed);
        if now < self.quiet.load(Relaxed) || self.is_expecting.swap(true, SeqCst) {
            return;
        }
        if self.is_asleep.load(SeqCst) {
            self.ring();
        }
    }

    fn time(&self) -> u64 {
        micros(now().saturating_duration_since(self.start))
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Whether the thread polls or sleeps.
pub(super) struct Attention {
    waker: Arc<Waker>,
    /// Until when it polls.
    until: Option<Instant>,
    /// Whether it has polled since a share, and no question has come.
    is_waiting: bool,
    /// Whether it has answered a question since it polled.
    was_asked: bool,
    /// The time of quiet after the next share without a question.
    quiet: Duration,
}

impl Attention {
    pub(super) fn new(waker: Arc<Waker>) -> Self {
        Self { waker, until: None, is_waiting: false, was_asked: false, quiet: EXPECTED }
    }

    /// Waits until one of these descriptors is ready, or for this time; without a time, for ever. Returns how many are
    /// ready.
    pub(super) fn wait(&mut self, asked: &mut [PollFd<'_>], time: Option<Duration>) -> rustix::io::Result<usize> {
        self.expects_another();
        while self.is_awake() {
            match poll(asked, Some(Duration::ZERO)) {
                Ok(0) => thread::yield_now(),
                ready => return ready,
            }
        }
        let ready = poll(asked, time);
        self.waker.is_asleep.store(false, SeqCst);
        ready
    }

    /// Takes note of a question that is answered now.
    pub(super) fn asked(&mut self) {
        if self.waker.time().saturating_sub(self.waker.shared.load(Relaxed)) < micros(EXPECTED) {
            self.waker.quiet.store(0, Relaxed);
            self.quiet = EXPECTED;
        }
        (self.is_waiting, self.was_asked) = (false, true);
    }

    /// Polls for the next question after one that is answered.
    fn expects_another(&mut self) {
        if take(&mut self.was_asked) {
            self.until = self.until.max(Some(now() + NEXT));
        }
    }

    /// Returns whether a question is expected now. If not, what is expected from now on wakes the thread.
    fn is_awake(&mut self) -> bool {
        if self.notices() || self.until.is_some_and(|until| now() < until) {
            return true;
        }
        self.until = None;
        if take(&mut self.is_waiting) {
            self.waker.quiet.store(self.waker.time() + micros(self.quiet), Relaxed);
            self.waker.is_expecting.store(false, SeqCst);
            self.quiet = MOST_QUIET.min(2 * self.quiet);
        }
        self.waker.is_asleep.store(true, SeqCst);
        let is_awake = self.notices();
        self.waker.is_asleep.store(!is_awake, SeqCst);
        is_awake
    }

    /// Notices a share, unless a question after an earlier one is awaited. Returns whether there was one.
    fn notices(&mut self) -> bool {
        if self.is_waiting || !self.waker.is_expecting.swap(false, SeqCst) {
            return false;
        }
        self.is_waiting = true;
        self.until = Some(now() + EXPECTED);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::PollFlags;
    use std::sync::atomic::AtomicUsize;
    use std::thread::{sleep, spawn};

    fn attention() -> (Arc<Waker>, Attention) {
        let waker = Waker::new().unwrap();
        (Arc::clone(&waker), Attention::new(waker))
    }

    /// Lets time pass. Returns whether the thread sleeps then.
    fn falls_asleep(attention: &mut Attention) -> bool {
        sleep(2 * EXPECTED);
        !attention.is_awake()
    }

    /// Returns whether the thread is woken.
    fn is_rung(waker: &Waker) -> bool {
        rustix::io::read(&waker.event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn a_share_wakes_a_thread_that_sleeps() {
        let (waker, mut attention) = attention();
        waker.expect();
        assert!(!is_rung(&waker), "it does not sleep yet");
        assert!(attention.is_awake() && falls_asleep(&mut attention));
        waker.quiet.store(0, Relaxed);
        waker.expect();
        waker.expect();
        assert!(is_rung(&waker) && attention.is_awake());
    }

    #[test]
    fn shares_that_no_process_opens_let_it_sleep_ever_longer() {
        let (waker, mut attention) = attention();
        for quiet in (0..20).map(|power| MOST_QUIET.min(EXPECTED * (1 << power))) {
            assert_eq!(attention.quiet, quiet);
            let time = waker.time();
            waker.quiet.store(0, Relaxed);
            waker.expect();
            assert!(attention.is_awake());
            // Others that come meanwhile do not keep it awake.
            waker.expect();
            assert!(falls_asleep(&mut attention));
            assert!(waker.quiet.load(Relaxed) >= time + micros(quiet));
        }
        while is_rung(&waker) {}
        waker.quiet.store(u64::MAX, Relaxed);
        waker.expect();
        assert!(!is_rung(&waker) && !attention.is_awake());
    }

    #[test]
    fn a_question_right_after_a_share_ends_the_quiet() {
        for (shared, ends) in [(u64::MAX, true), (0, false)] {
            let (waker, mut attention) = attention();
            sleep(2 * EXPECTED);
            attention.quiet = MOST_QUIET;
            waker.quiet.store(u64::MAX, Relaxed);
            waker.shared.store(shared, Relaxed);
            attention.asked();
            assert_eq!((waker.quiet.load(Relaxed) == 0, attention.quiet == EXPECTED), (ends, ends));
        }
    }

    /// Also if the answer takes longer than that.
    #[test]
    fn it_polls_for_the_next_question_once_it_has_answered_one() {
        let (_, mut attention) = attention();
        attention.asked();
        sleep(2 * NEXT);
        let answered = now();
        attention.expects_another();
        let until = attention.until;
        assert!(until >= Some(answered + NEXT));
        attention.expects_another();
        assert_eq!(attention.until, until, "it was asked once");
    }

    #[test]
    fn no_share_is_lost_while_the_thread_falls_asleep() {
        const SHARES: usize = 10_000;
        let ((waker, mut attention), noticed) = (attention(), Arc::new(AtomicUsize::new(0)));
        let (rings, count) = (Arc::clone(&waker), Arc::clone(&noticed));
        let thread = spawn(move || {
            while count.load(SeqCst) < SHARES {
                if !attention.is_awake() {
                    let woken = poll(&mut [PollFd::new(&rings.event, PollFlags::IN)], Some(Duration::from_secs(60)));
                    assert_eq!(woken, Ok(1), "a share did not wake it");
                    is_rung(&rings);
                }
                // As if the question came at once.
                if take(&mut attention.is_waiting) {
                    attention.until = None;
                    count.fetch_add(1, SeqCst);
                }
            }
        });
        for share in 1..=SHARES {
            waker.expect();
            while noticed.load(SeqCst) < share && !thread.is_finished() {
                std::thread::yield_now();
            }
        }
        thread.join().unwrap();
    }
}
