//! A hostile exporter: the program that opens what it shares is real.

use super::super::channel::interrupted_at;
use super::super::wire::{ALL, LENGTH, ticket_for};
use super::channel::Channel;
use super::{BYTES, Beside, ErrorKind, Folder, IpcTensor, PATIENCE, Random, SHARES, assert_is_of, fork, one};
use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};
use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Threads of the program that opens.
const THREADS: usize = 2;

const CONTENT: &str = r#"{"segments":[{"transport":"file","nbytes":64,"writing":"never"}],"tensors":[{"segment":0,"offset":0,"dtype":"uint8","shape":[64],"strides":[1]}]}"#;

/// The end of a content with a point.
const POINTS: &str = r#"}],"points":[{"device":"01010101010101010101010101010101","word":0,"value":1}]}"#;

/// Why a lease is refused.
const WHYS: [&str; 4] = ["unknown", "denied", "busy", "failed"];

/// Returns the memory of a share.
fn memory(share: u64) -> OwnedFd {
    let file = memfd_create(c"hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    let mut file = std::fs::File::from(file);
    file.write_all(&[share as u8; BYTES]).unwrap();
    fcntl_add_seals(&file, ALL).unwrap();
    file.into()
}

/// Returns the page of a connection.
fn page() -> OwnedFd {
    super::super::wire::memory(4096, LENGTH)
}

/// Serves each connection on a thread until it ends.
pub fn listen(listener: &UnixListener, ended: &AtomicBool, serve: impl Fn(UnixStream) + Sync) {
    listener.set_nonblocking(true).unwrap();
    std::thread::scope(|scope| {
        while !ended.load(Relaxed) {
            match listener.accept() {
                Ok((socket, _)) => drop(scope.spawn(|| serve(socket))),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    });
}

/// Leases of a connection that keeps to the protocol.
#[derive(Default)]
struct Records {
    leases: BTreeSet<u64>,
    /// Answers that were not sent yet.
    waiting: usize,
}

pub fn play(random: &mut Random, beside: &Beside) -> &'static str {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("hostile");
    let listener = UnixListener::bind(&path).unwrap();
    // Half of them only delay what they send.
    let mischief = [0, 0, 3, 30][random.below(4)];
    let seeds = Mutex::new(Random(random.bits()));
    let drawn = || Random(seeds.lock().unwrap().bits());
    let (ended, tables) = (AtomicBool::new(false), Mutex::new(Records::default()));
    std::thread::scope(|scope| {
        scope
            .spawn(|| listen(&listener, &ended, |socket| serve(Channel::new(socket, mischief), &mut drawn(), &tables)));
        std::thread::scope(|scope| {
            // Without mischief the connection goes on to the end, and so does this view.
            let ticket = ticket_for(&path, 0);
            let anchor = (mischief == 0).then(|| until_it_opens(&ticket));
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(|| opens(&path, &mut drawn(), beside))).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            if let Some(anchor) = anchor {
                // What came too late was returned.
                let start = Instant::now();
                let settled = |tables: &Records| tables.waiting == 0 && tables.leases.len() <= 1;
                while anchor.check().is_ok() && !settled(&tables.lock().unwrap()) {
                    assert!(start.elapsed() < PATIENCE, "leases are left: {:?}", tables.lock().unwrap().leases);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        ended.store(true, Relaxed);
    });
    "exporter"
}

/// Opens a ticket of an exporter that answers in the end, perhaps by a refusal.
fn until_it_opens(ticket: &bridge_ipc::Ticket) -> IpcTensor {
    loop {
        if let Ok(opened) = one(ticket) {
            return opened;
        }
    }
}

/// Opens, keeps and drops, sometimes gives up, and forks.
fn opens(path: &std::path::Path, random: &mut Random, beside: &Beside) {
    let mut kept: Vec<(u64, IpcTensor)> = Vec::new();
    for _ in 0..5 + random.below(20) {
        match random.below(12) {
            0 => kept.clear(),
            // As many as fill a socket when they are returned.
            1 if random.below(20) == 0 => {
                let ticket = ticket_for(path, 1);
                kept.extend((0..400).map_while(|_| Some((1, one(&ticket).ok()?))));
                kept.clear();
            }
            1 if random.below(4) == 0 => fork(beside),
            2 => {
                // A view may be taken back at any time; until then its elements are what they were.
                kept.iter().for_each(|(share, tensor)| assert_is_of(tensor, *share));
            }
            _ => {
                let (share, patience) = (random.below(SHARES as usize) as u64, random.below(150) as u64);
                // Sometimes longer than an exporter has.
                let patience = if random.below(40) == 0 { 60_000 } else { patience };
                let ticket = ticket_for(path, share);
                let start = Instant::now();
                let opened = interrupted_at(start + Duration::from_millis(patience), || one(&ticket));
                assert!(start.elapsed() < PATIENCE, "an open took {:?}", start.elapsed());
                match opened {
                    Ok(tensor) => {
                        assert_is_of(&tensor, share);
                        kept.push((share, tensor));
                    }
                    Err(error) => assert_ne!(error.kind(), ErrorKind::Argument, "{error}"),
                }
            }
        }
    }
}

/// Answers as it should, but for the channel.
fn serve(mut channel: Channel, random: &mut Random, tables: &Mutex<Records>) {
    let (mut last, mut deaf, mut own) = (0, 0_u32, BTreeSet::new());
    let mut turn = || {
        // Sometimes it stops reading for some steps.
        deaf = if random.below(100) == 0 { 100 } else { deaf.saturating_sub(1) };
        if deaf == 0 {
            channel.read()?;
        }
        while let Some((number, body)) = channel.heard() {
            let said: serde_json::Value = serde_json::from_str(&body).unwrap();
            if said["do"] == "return" {
                let lease = said["lease"].as_u64().unwrap();
                assert!(own.remove(&lease) || !channel.is_honest, "lease {lease} was returned twice, or never given");
                tables.lock().unwrap().leases.remove(&lease);
                continue;
            }
            let share = said["share"].as_u64().unwrap();
            if random.below(10) == 0 {
                let why = WHYS[random.below(WHYS.len())];
                channel.say(number, &format!(r#"{{"is":"refused","why":"{why}"}}"#), Vec::new());
            } else {
                last += 1;
                own.insert(last);
                tables.lock().unwrap().leases.insert(last);
                let (mut content, mut files) = (CONTENT.to_owned(), vec![memory(share)]);
                // The program has no such device: it gives the lease back.
                if random.below(20) == 0 {
                    content = content.replace("}]}", POINTS);
                    files.push(page());
                }
                let body = format!(r#"{{"is":"opened","lease":{last},"content":{content}}}"#);
                channel.say(number, &body, files);
            }
        }
        let notices = if channel.waiting.is_empty() { [0, 0, 0, 0, 0, 0, 0, 0, 1, 40][random.below(10)] } else { 0 };
        for _ in 0..notices {
            // Never the first, which is kept to the end.
            let share = 1 + random.below(SHARES as usize);
            channel.say(0, &format!(r#"{{"is":"revoked","share":{share}}}"#), Vec::new());
        }
        let going = channel.step(random);
        tables.lock().unwrap().waiting = channel.waiting.len();
        going
    };
    while turn().is_some() {}
    *tables.lock().unwrap() = Records::default();
}
