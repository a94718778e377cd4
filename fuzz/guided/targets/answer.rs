#![no_main]
#![allow(dead_code, unused_imports, reason = "the tests use the rest")]

#[path = "../../../crates/bridge-ipc/tests/processes/main.rs"]
mod processes;

use processes::fuzz::Hostile;
use std::sync::{LazyLock, Mutex};

static HOSTILE: LazyLock<Mutex<Hostile>> = LazyLock::new(|| Mutex::new(Hostile::new()));

libfuzzer_sys::fuzz_target!(|input: &[u8]| HOSTILE.lock().unwrap().answers(input));
