//! Words without a device: their operations are recorded, and touch no memory.

use super::{Call, Fake, State};
use crate::driver::{Failure, Outcome, WordsDriver};
use bridge_core::Stream;

impl State {
    /// Fails unless the word is registered and a context is current.
    fn word(&self, call: &'static str, word: usize) -> Outcome<()> {
        self.outcome(call)?;
        self.current().ok_or(Failure { call, code: 201 })?;
        let is_known = self.registered.iter().any(|bytes| bytes.start <= word && word + size_of::<u64>() <= bytes.end);
        is_known.then_some(()).ok_or(Failure { call, code: 1 })
    }
}

impl WordsDriver for Fake {
    unsafe fn register(&self, start: usize, nbytes: usize) -> Outcome<()> {
        let (mut state, call) = (self.state(), "cuMemHostRegister_v2");
        state.outcome(call)?;
        state.current().ok_or(Failure { call, code: 201 })?;
        state.registered.push(start..start + nbytes);
        Ok(())
    }

    unsafe fn unregister(&self, start: usize) -> Outcome<()> {
        let mut state = self.state();
        let at = state.registered.iter().position(|bytes| bytes.start == start);
        let at = at.ok_or(Failure { call: "cuMemHostUnregister", code: 713 })?;
        state.registered.swap_remove(at);
        Ok(())
    }

    unsafe fn write_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()> {
        let mut state = self.state();
        state.word("cuStreamWriteValue64_v2", word)?;
        state.calls.push(Call::Write(stream, word, value));
        Ok(())
    }

    unsafe fn wait_word(&self, stream: Stream, word: usize, value: u64) -> Outcome<()> {
        let mut state = self.state();
        state.word("cuStreamWaitValue64_v2", word)?;
        state.calls.push(Call::Await(stream, word, value));
        Ok(())
    }
}
