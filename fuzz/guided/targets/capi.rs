#![no_main]

#[path = "../../../crates/bridge-capi/tests/hostile/calls.rs"]
mod calls;
#[path = "../../../crates/bridge-capi/tests/hostile/interface.rs"]
mod interface;
#[path = "../../../crates/bridge-capi/tests/hostile/managed.rs"]
mod managed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| calls::case(input));
