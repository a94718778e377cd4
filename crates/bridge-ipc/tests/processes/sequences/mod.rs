//! Random sequences of a hostile peer, at both ends of the wire, while real code is at the other: it delays, repeats,
//! reorders, drops, damages and truncates what it sends, fills sockets, stops reading and disconnects, and the program
//! forks.
//!
//! An `open` returns the tensor that was asked for, or an error in time; what another exporter shares stays; no process
//! hangs; and no lease, descriptor or memory is left.
//!
//! `TRUEBRIDGE_FUZZ` sets the seconds, `TRUEBRIDGE_SEED` the seed.

mod caller;
mod channel;
mod exporter;
mod names;

use super::child::seen;
use super::{Folder, LONG, PATIENCE, share, wait_for};
use bridge_core::{ErrorKind, Result};
use bridge_fuzz::{Random, number};
use bridge_ipc::{Exporter, IpcTensor, Limits, Ticket, Writing, open};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Says that a process is the fuzzer's own.
const ALONE: &str = "TRUEBRIDGE_TEST_SEQUENCES";

/// Seconds of a run, unless told otherwise.
const USUAL: u64 = 8;

/// Sequences that are played at once.
const AT_ONCE: u64 = 16;

/// Shares of each exporter: the bytes of each are its number.
const SHARES: u64 = 5;

/// Bytes of a share.
const BYTES: usize = 64;

/// The most kibibytes that the process grows by.
const GROWTH: u64 = 96 << 10;

/// Runs in a separate process, which counts its files and memory.
#[test]
fn any_sequence_is_survived() {
    let mut run = Command::new(std::env::current_exe().unwrap());
    run.args(["--exact", "sequences::run", "--ignored", "--nocapture"]).env(ALONE, "1");
    assert!(run.status().unwrap().success());
}

/// What is next to the sequences: an exporter that keeps to the protocol, and a view of it.
struct Beside {
    exporter: Exporter,
    tickets: Vec<Ticket>,
    view: IpcTensor,
}

impl Beside {
    fn new(folder: &Folder) -> Self {
        let exporter = folder.exporter(Limits::default());
        let shared = |byte| share(&exporter, vec![byte as u8; BYTES], Writing::Never, LONG).unwrap();
        let tickets: Vec<_> = (0..SHARES).map(shared).collect();
        let view = one(&tickets[0]).unwrap();
        Self { exporter, tickets, view }
    }

    /// The view is still shared, and the others can be opened.
    fn check(&self) -> Result<()> {
        self.view.check()?;
        assert_is_of(&self.view, 0);
        let last = SHARES - 1;
        assert_is_of(&one(&self.tickets[last as usize])?, last);
        Ok(())
    }
}

fn one(ticket: &Ticket) -> Result<IpcTensor> {
    Ok(open(ticket)?.tensors.remove(0))
}

/// Refuses elements that are not the share's. The exporter may have taken the view back, also while it was read.
fn assert_is_of(tensor: &IpcTensor, share: u64) {
    let found = seen(tensor).and_then(|array| array.to_array::<u8>());
    let is_good = found.as_ref().is_ok_and(|array| array.iter().all(|byte| *byte == share as u8));
    assert!(is_good || tensor.check().is_err(), "the view of share {share} is {found:?}");
}

/// A fork, which opens for itself and finds its parent's view still shared.
fn fork(beside: &Beside) {
    // SAFETY: the child takes no lock that a thread of its parent may hold, which is what is tested.
    let fork = unsafe { libc::fork() };
    if fork == 0 {
        // SAFETY: it ends a child that waits.
        unsafe { libc::alarm(PATIENCE.as_secs() as u32) };
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(beside.check().is_err())) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to the status.
    assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
    assert_eq!(status, 0);
}

/// The seeds of the sequences that are being played, and when each is to be over.
static PLAYED: Mutex<BTreeMap<u64, Instant>> = Mutex::new(BTreeMap::new());

/// Ends the process where a sequence hangs, with what its threads wait for.
fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let hangs = PLAYED.lock().unwrap().iter().find(|(_, end)| Instant::now() > **end).map(|(seed, _)| *seed);
        if let Some(seed) = hangs {
            println!("the sequence of TRUEBRIDGE_SEED={seed} hangs");
            super::print_threads();
            std::process::exit(1);
        }
    }
}

/// Ends the process when any thread panics, because others wait for it.
fn end_with_panics() {
    let says = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        says(panic);
        println!("one of these is TRUEBRIDGE_SEED: {:?}", PLAYED.lock().unwrap().keys());
        std::process::exit(1);
    }));
}

fn play(seed: u64, beside: &Beside) -> &'static str {
    PLAYED.lock().unwrap().insert(seed, Instant::now() + 3 * PATIENCE);
    let mut random = Random(seed);
    let kind = match random.below(4) {
        0 | 1 => exporter::play(&mut random, beside),
        2 => caller::play(&mut random, beside),
        _ => names::play(&mut random, beside),
    };
    beside.check().unwrap();
    PLAYED.lock().unwrap().remove(&seed);
    kind
}

#[test]
#[ignore = "the program of the process that plays sequences"]
fn run() {
    if std::env::var_os(ALONE).is_none() {
        return;
    }
    let (seconds, first) = (number("TRUEBRIDGE_FUZZ", USUAL), number("TRUEBRIDGE_SEED", 1));
    end_with_panics();
    std::thread::spawn(watch);
    let folder = Folder::new();
    let beside = Beside::new(&folder);
    beside.check().unwrap();
    let (files, memory) = (files(), memory());
    let (end, next) = (Instant::now() + Duration::from_secs(seconds), Mutex::new(first));
    let played = Mutex::new(BTreeMap::<_, u64>::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let draw = || {
                    let mut next = next.lock().unwrap();
                    let seed = *next;
                    *next += 1;
                    // One at least, to replay a seed.
                    (seed == first || Instant::now() < end).then_some(seed)
                };
                while let Some(seed) = draw() {
                    let kind = play(seed, &beside);
                    *played.lock().unwrap().entry(kind).or_default() += 1;
                }
            });
        }
    });
    println!("sequences from seed {first} on: {:?}", played.into_inner().unwrap());
    wait_for(&beside.exporter, |held| (held.leases, held.connections) == (1, 1));
    // Threads of connections that have ended end soon.
    let start = Instant::now();
    while self::files() != files {
        assert!(start.elapsed() < PATIENCE, "{} files were open, and {} are", files, self::files());
        std::thread::sleep(Duration::from_millis(10));
    }
    let grown = self::memory().saturating_sub(memory);
    assert!(grown < GROWTH, "{grown} kB more");
}

/// Returns how many files this process has open.
fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the kibibytes of memory that this process has.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
