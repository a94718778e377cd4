#![no_main]
#![allow(dead_code, unused_imports, reason = "the tests use the rest")]

#[path = "../../../crates/bridge-ipc/tests/processes/main.rs"]
mod processes;

libfuzzer_sys::fuzz_target!(|input: &[u8]| processes::fuzz::ticket(input));
