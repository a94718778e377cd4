#![no_main]

#[path = "../../../crates/bridge-core/tests/hostile/codec.rs"]
mod codec;

libfuzzer_sys::fuzz_target!(|input: &[u8]| codec::case(input));
