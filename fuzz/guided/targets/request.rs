#![no_main]
#![allow(dead_code, unused_imports, reason = "the tests use the rest")]

#[path = "../../../crates/bridge-ipc/tests/processes/main.rs"]
mod processes;

use processes::fuzz::Served;
use std::sync::{LazyLock, Mutex};

static SERVED: LazyLock<Mutex<Served>> = LazyLock::new(|| Mutex::new(Served::new()));

libfuzzer_sys::fuzz_target!(|input: &[u8]| SERVED.lock().unwrap().asked(input));
