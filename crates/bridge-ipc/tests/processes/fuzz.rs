//! Golden messages and tickets, damaged at random, at every entrance: the parser of tickets, an exporter, a server of
//! names, and an importer whose exporter is hostile.
//!
//! `TRUEBRIDGE_FUZZ` sets the seconds, `TRUEBRIDGE_SEED` the seed.

use super::child::seen;
use super::wire::{ALL, Answer, HEADER, LENGTH, memory, numbered, send, ticket_of};
use super::{Folder, LONG, share, wait_for};
use bridge_ipc::{Limits, Names, Settings, Ticket, Writing, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const TICKET: &str = include_str!("../../../../fixtures/ipc/ticket.json");
const REQUESTS: [&str; 2] = [
    include_str!("../../../../fixtures/ipc/requests.jsonl"),
    include_str!("../../../../fixtures/ipc/name_requests.jsonl"),
];
const ANSWERS: &str = include_str!("../../../../fixtures/ipc/answers.jsonl");

/// What is put into a message.
const ODD: [&str; 20] = [
    "-1",
    "0",
    "1",
    "64",
    "65",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\\",
    "\u{0}",
    ",",
    "[[[[[[[[",
    "uint8",
];

/// Numbers of questions and answers.
const NUMBERS: [u64; 6] = [0, 1, 1, 1, 2, u64::MAX];

/// Seconds of a target, unless told otherwise.
const USUAL: u64 = 1;

/// Cases between two looks at whether the other side still works.
const LOOK: u64 = 200;

pub fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |text| text.parse().expect("a number"))
}

/// Numbers that look random (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }

    /// Returns one of these lines, damaged in up to four places.
    fn damaged(&mut self, lines: &[&str]) -> Vec<u8> {
        let mut bytes = self.one(lines).as_bytes().to_vec();
        for _ in 0..self.below(5) {
            let (at, end) = (self.below(bytes.len() + 1), self.below(bytes.len() + 1));
            let range = at.min(end)..at.max(end);
            match self.below(6) {
                0 => drop(bytes.splice(range, self.one(&ODD).bytes())),
                1 => drop(bytes.splice(at..at, self.one(&ODD).bytes())),
                2 => drop(bytes.drain(range.start..range.end.min(range.start + 8))),
                3 => bytes.extend(bytes[range].to_vec()),
                4 => {
                    // A number becomes another one.
                    let start = bytes[at..].iter().position(u8::is_ascii_digit).map_or(bytes.len(), |first| at + first);
                    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                    bytes.splice(start..start + digits, self.one(&ODD).bytes());
                }
                _ => {
                    let flipped = 1 << self.below(8);
                    bytes.get_mut(at).into_iter().for_each(|byte| *byte ^= flipped);
                }
            }
        }
        bytes
    }

    /// Returns a frame around a body, now and then a damaged one.
    fn framed(&mut self, body: &[u8]) -> Vec<u8> {
        let mut bytes = numbered(NUMBERS[self.below(NUMBERS.len())], body);
        if self.below(8) == 0 {
            let at = self.below(HEADER.min(bytes.len()));
            bytes[at] ^= 1 << self.below(8);
        }
        bytes
    }
}

/// Runs cases until the time is over, and returns how many.
fn cases(mut case: impl FnMut(&mut Random, u64)) -> u64 {
    let seconds = Duration::from_secs(number("TRUEBRIDGE_FUZZ", USUAL));
    let (mut random, start) = (Random(number("TRUEBRIDGE_SEED", 1)), Instant::now());
    let mut count = 0;
    while start.elapsed() < seconds {
        case(&mut random, count);
        count += 1;
    }
    count
}

/// Sends bytes, in one piece or in two, and reads what comes until the other side ends the connection.
fn sent(socket: &Path, random: &mut Random, bytes: &[u8]) {
    let Ok(mut stream) = UnixStream::connect(socket) else { return };
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let cut = random.below(bytes.len() + 1);
    // The other side may have ended the connection.
    let _ = stream.write_all(&bytes[..cut]).and_then(|()| stream.write_all(&bytes[cut..]));
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    assert!(read.is_ok() || read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
}

#[test]
fn any_ticket_is_read_or_refused() {
    let count = cases(|random, _| {
        let text = String::from_utf8_lossy(&random.damaged(&[TICKET.trim()])).into_owned();
        if let Ok(ticket) = text.parse::<Ticket>() {
            assert_eq!(ticket.text().parse::<Ticket>().unwrap(), ticket, "{text}");
        }
    });
    println!("{count} tickets");
}

#[test]
fn any_request_is_answered_or_refused() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let names = Names::serve(&folder.path().join("names"), Settings::default()).unwrap();
    let ticket = share(&exporter, vec![1, 2, 3], Writing::Private, LONG).unwrap();
    let token = ticket.text().split("\"token\":\"").nth(1).unwrap()[..32].to_string();
    // Some of them open what is there.
    let good = format!(r#"{{"do":"open","share":1,"token":"{token}"}}"#);
    let lines: Vec<&str> = REQUESTS.iter().flat_map(|file| file.lines()).chain([&*good; 4]).collect();
    let count = cases(|random, count| {
        let bytes: Vec<u8> = (0..1 + random.below(3))
            .flat_map(|_| {
                let body = random.damaged(&lines);
                random.framed(&body)
            })
            .collect();
        let socket = if random.below(4) == 0 { folder.path().join("names") } else { ticket.socket().to_path_buf() };
        sent(&socket, random, &bytes);
        if count % LOOK == 0 {
            assert_eq!(seen(&open(&ticket).unwrap().tensors[0]).unwrap().to_array::<u8>().unwrap().len(), 3);
        }
    });
    wait_for(&exporter, |held| held.leases == 0);
    drop(names);
    println!("{count} connections with requests");
}

#[test]
fn any_answer_is_taken_or_refused() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("hostile.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let ticket = ticket_of(&path);
    let (answers, next) = mpsc::channel::<Answer>();
    let hostile = std::thread::spawn(move || {
        for answer in next {
            let (mut socket, _) = listener.accept().unwrap();
            let mut request = [0; 512];
            let _ = socket.read(&mut request).unwrap();
            send(&socket, &answer);
        }
    });
    let small = r#"{"is":"opened","lease":1,"content":{"segments":[{"road":"file","nbytes":64,"writing":"never"}],"tensors":[{"segment":0,"offset":8,"dtype":"uint8","shape":[2,3],"strides":[8,1]}]}}"#;
    let lines: Vec<&str> = ANSWERS.lines().chain([small; 8]).collect();
    let mut taken = 0;
    let count = cases(|random, _| {
        let body = random.damaged(&lines);
        let bytes = random.framed(&body);
        let files = (0..random.below(3))
            .map(|_| memory(64 << random.below(2), if random.below(4) == 0 { LENGTH } else { ALL }));
        answers.send(Answer { bytes, files: files.collect() }).unwrap();
        if let Ok(opened) = open(&ticket) {
            // Whatever was taken can be read.
            for tensor in &opened.tensors {
                let _ = seen(tensor)
                    .and_then(|array| array.to_array::<u8>())
                    .map(|array| array.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            }
            taken += 1;
        }
    });
    drop(answers);
    hostile.join().unwrap();
    assert!(taken > 0, "none was right by chance, of {count}");
    println!("{count} answers, {taken} of them taken");
}
