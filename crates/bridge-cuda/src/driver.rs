//! The few driver functions that the protocol needs, as a trait, so that it can be tested without a device.

use bridge_core::{Error, ErrorKind, Stream};

/// A CUDA context (`CUcontext`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Context(pub usize);

/// A CUDA event (`CUevent`), never null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Event(pub usize);

/// What the driver knows of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pointer {
    /// `CUmemorytype`, or 0 for memory that the driver does not know.
    pub memory_type: u32,
    /// Whether the memory is managed.
    pub managed: bool,
    /// Ordinal of the device that it was allocated for.
    pub ordinal: i32,
    /// Lowest address of the allocation.
    pub start: usize,
    /// Length of the allocation in bytes.
    pub size: usize,
}

/// A driver call that failed. It is small, so that the quick path carries no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The function of the driver API.
    pub call: &'static str,
    /// Its `CUresult`: a number, because a newer driver may report one that no enum here has.
    pub code: u32,
}

/// Shorthand for the results of driver calls.
pub(crate) type Outcome<T> = Result<T, Failure>;

/// The mode in which driver calls leave captures alone (`CU_STREAM_CAPTURE_MODE_RELAXED`).
pub(crate) const RELAXED: u32 = 2;

/// The driver. No method but [`synchronize`](Self::synchronize) waits for the device, and each acts on the calling thread's current context.
pub(crate) trait Driver: Send + Sync + 'static {
    /// The device's primary context, which all frameworks share. It is kept for the rest of the process.
    fn retain_primary_context(&self, ordinal: i32) -> Outcome<Context>;
    /// The calling thread's current context.
    fn current_context(&self) -> Outcome<Option<Context>>;
    /// Makes a context current, on top of the one that was.
    fn push_context(&self, context: Context) -> Outcome<()>;
    /// Makes the context current that was so before the push.
    fn pop_context(&self) -> Outcome<()>;
    /// A new event in the current context, without timing.
    fn create_event(&self) -> Outcome<Event>;
    /// Destroys an event. Where it has not fired yet, the driver does so afterwards.
    fn destroy_event(&self, event: Event) -> Outcome<()>;
    /// Lets the event stand for everything that is in the stream now.
    fn record_event(&self, event: Event, stream: Stream) -> Outcome<()>;
    /// Lets everything that is put into the stream from now on wait for what the event stands for now.
    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()>;
    /// Whether everything that the event stands for has run.
    fn query_event(&self, event: Event) -> Outcome<bool>;
    /// Whether work in the stream waits for work that was put into the legacy default stream before, and the other way
    /// round.
    fn is_blocking(&self, stream: Stream) -> Outcome<bool>;
    /// Whether everything has run that an event would stand for if it were recorded in the stream now; also `false` where
    /// that cannot be told. The stream is not captured. Captures elsewhere are left alone.
    fn is_idle(&self, stream: Stream) -> Outcome<bool>;
    /// Whether the stream is being captured into a graph instead of run.
    fn is_capturing(&self, stream: Stream) -> Outcome<bool>;
    /// Blocks the host until everything that is in the stream now has run.
    fn synchronize(&self, stream: Stream) -> Outcome<()>;
    /// Ordinal of the device of the calling thread's current context, which has to have one.
    fn current_device(&self) -> Outcome<i32>;
    /// The context that a stream belongs to.
    fn context_of(&self, stream: Stream) -> Outcome<Context>;
    /// Sets how the calling thread's driver calls get on with captures that are under way; gives how they did before.
    fn exchange_capture_mode(&self, mode: u32) -> Outcome<u32>;
    /// What the driver knows of an address. Needs no current context.
    fn pointer(&self, address: usize) -> Outcome<Pointer>;
    /// Name and description of a result code.
    fn describe(&self, code: u32) -> String;
}

/// What to do next, for the codes where that is known: first code, last code, advice.
const ADVICE: &[(u32, u32, &str)] = &[
    (2, 2, "free memory on the device first"),
    (3, 3, "CUDA does not survive a fork: start processes with the method \"spawn\""),
    (4, 4, "the driver is shutting down with the process"),
    (101, 101, "the device was hidden or lost: see CUDA_VISIBLE_DEVICES"),
    (400, 400, "the stream was destroyed, or belongs to another device than the tensor"),
    (700, 700, "a kernel failed earlier and its context is lost: restart the process"),
    (709, 709, "the device was reset: restart the process"),
    (710, 719, "a kernel failed earlier and its context is lost: restart the process"),
    (900, 908, "a stream is being captured: exchange the tensor before the capture, or on the captured stream"),
];

/// The error for the user.
#[cold]
pub(crate) fn error(driver: &impl Driver, failure: Failure) -> Error {
    let Failure { call, code } = failure;
    let mut text = format!("{call} failed: {}", driver.describe(code));
    if let Some((_, _, advice)) = ADVICE.iter().find(|(first, last, _)| (*first..=*last).contains(&code)) {
        text = format!("{text}: {advice}");
    }
    Error::new(ErrorKind::Driver, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    #[test]
    fn errors_say_what_failed_and_what_to_do() {
        let text = |code| error(&Fake::default(), Failure { call: "cuEventRecord", code }).to_string();
        assert!(text(900).starts_with("cuEventRecord failed: CUDA_ERROR_FAKE (code 900): a stream is being captured"));
        assert!(text(3).contains("spawn"));
        assert_eq!(text(999), "cuEventRecord failed: CUDA_ERROR_FAKE (code 999)");
    }

    #[test]
    fn advice_is_unambiguous() {
        assert!(ADVICE.iter().all(|(first, last, _)| first <= last));
        assert!(ADVICE.windows(2).all(|pair| pair[0].1 < pair[1].0));
    }
}
