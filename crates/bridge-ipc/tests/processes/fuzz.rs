//! Hostile input at every entrance: the parser of tickets, an exporter and a server of names, and an importer whose
//! exporter is hostile.

use super::child::seen;
use super::wire::{ALL, Answer, HEADER, LENGTH, memory, numbered, send, ticket_of};
use super::{Folder, LONG, share, wait_for};
use bridge_fuzz::{Fields, fuzz};
use bridge_ipc::{Exporter, Limits, Names, Settings, Ticket, Writing, open};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Cases between two looks at whether the other side still works.
const LOOK: u64 = 200;

/// The most bytes of a file that comes with an answer.
const MOST: u64 = 1 << 20;

/// Ends what is said of a frame, before its body.
const BODY: &str = " | ";

/// A line of an input: a frame, and the files that come with it. Before the body may be `number 2` for the number of
/// the question, `length 9` for the length that the frame states, `flip 3 7` for a bit of a byte of the header, and
/// `files 64 1 128 0` for files of so many bytes, which may still be written to (0) or not (1).
struct Frame<'a> {
    about: Fields<'a>,
    bytes: Vec<u8>,
}

impl<'a> Frame<'a> {
    fn of(line: &'a str) -> Self {
        let (about, body) = line.split_once(BODY).unwrap_or(("", line));
        let about = Fields::of(about);
        let mut bytes = numbered(about.one("number", 1), body.as_bytes());
        if about.has("length") {
            bytes[4..8].copy_from_slice(&(about.one("length", 0) as u32).to_le_bytes());
        }
        if about.has("flip") {
            bytes[about.one("flip", 0) as usize % HEADER] ^= 1 << (about.at("flip", 1, 0) % 8);
        }
        Self { about, bytes }
    }

    fn files(&self) -> Vec<OwnedFd> {
        let numbers = self.about.all("files").unwrap_or_default();
        let file = |pair: &[u64]| memory(pair[0] % MOST, if pair.get(1) == Some(&1) { ALL } else { LENGTH });
        numbers.chunks(2).take(4).map(file).collect()
    }
}

/// Reads a ticket.
pub fn ticket(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Ok(ticket) = text.parse::<Ticket>() {
        assert_eq!(ticket.text().parse::<Ticket>().unwrap(), ticket);
        assert!(!format!("{ticket} {ticket:?}").contains(char::is_control));
    }
}

/// A process that shares, and a server of names.
pub struct Served {
    folder: Folder,
    exporter: Exporter,
    ticket: Ticket,
    names: Names,
    token: String,
    count: u64,
}

impl Served {
    pub fn new() -> Self {
        let folder = Folder::new();
        let exporter = folder.exporter(Limits::default());
        let names = Names::serve(&folder.path().join("names"), Settings::default()).unwrap();
        let ticket = share(&exporter, vec![1, 2, 3], Writing::Private, LONG).unwrap();
        let token = ticket.text().split("\"token\":\"").nth(1).unwrap()[..32].to_string();
        Self { folder, exporter, ticket, names, token, count: 0 }
    }

    /// Sends the lines of an input through one connection: to the server of names where the first says `names`, and
    /// with a pause in the stream at the byte that `cut` names. `TOKEN` is the token of share 1.
    pub fn asked(&mut self, input: &[u8]) {
        let text = String::from_utf8_lossy(input).replace("TOKEN", &self.token);
        let frames: Vec<Frame<'_>> = text.lines().map(Frame::of).collect();
        let Some(first) = frames.first() else { return };
        let to_names = first.about.has("names");
        let socket = if to_names { self.folder.path().join("names") } else { self.ticket.socket().to_path_buf() };
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.bytes.clone()).collect();
        let cut = first.about.one("cut", 0) as usize % (bytes.len() + 1);
        sent(&socket, &bytes[..cut], &bytes[cut..]);
        if self.count.is_multiple_of(LOOK) {
            assert_eq!(seen(&open(&self.ticket).unwrap().tensors[0]).unwrap().to_array::<u8>().unwrap().len(), 3);
        }
        self.count += 1;
    }

    /// Waits until all leases have been returned.
    pub fn close(self) {
        wait_for(&self.exporter, |held| held.leases == 0);
        drop(self.names);
    }
}

/// Sends bytes in two pieces, and reads what comes until the other side ends the connection.
fn sent(socket: &PathBuf, start: &[u8], rest: &[u8]) {
    let Ok(mut stream) = UnixStream::connect(socket) else { return };
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The other side may have ended the connection.
    let _ = stream.write_all(start).and_then(|()| stream.write_all(rest));
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    assert!(read.is_ok() || read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
}

/// A process that answers what an input says.
pub struct Hostile {
    answers: Sender<Answer>,
    thread: JoinHandle<()>,
    ticket: Ticket,
    _folder: Folder,
    pub taken: u64,
}

impl Hostile {
    pub fn new() -> Self {
        let folder = Folder::new();
        std::fs::create_dir(folder.path()).unwrap();
        let path = folder.path().join("hostile.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (answers, next) = channel::<Answer>();
        let thread = std::thread::spawn(move || {
            for answer in next {
                let (mut socket, _) = listener.accept().unwrap();
                let mut request = [0; 512];
                let _ = socket.read(&mut request).unwrap();
                send(&socket, &answer);
            }
        });
        Self { answers, thread, ticket: ticket_of(&path), _folder: folder, taken: 0 }
    }

    /// Opens a ticket, for which the lines of an input are the answer. Whatever is taken can be read.
    pub fn answers(&mut self, input: &[u8]) {
        let text = String::from_utf8_lossy(input);
        let frames: Vec<Frame<'_>> = text.lines().map(Frame::of).collect();
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.bytes.clone()).collect();
        let files = frames.iter().flat_map(Frame::files).take(4).collect();
        self.answers.send(Answer { bytes, files }).unwrap();
        let Ok(opened) = open(&self.ticket) else { return };
        for tensor in &opened.tensors {
            let _ = seen(tensor)
                .and_then(|array| array.to_array::<u8>())
                .map(|array| array.iter().map(|byte| u64::from(*byte)).sum::<u64>());
        }
        self.taken += 1;
    }

    /// Ends the process.
    pub fn close(self) {
        drop(self.answers);
        self.thread.join().unwrap();
    }
}

#[test]
fn any_ticket_is_read_or_refused() {
    fuzz("ticket", ticket);
}

#[test]
fn any_request_is_answered_or_refused() {
    let mut served = Served::new();
    fuzz("request", |input| served.asked(input));
    served.close();
}

#[test]
fn any_answer_is_taken_or_refused() {
    let mut hostile = Hostile::new();
    fuzz("answer", |input| hostile.answers(input));
    assert!(hostile.taken > 0, "no answer was right");
    println!("{} answers were taken", hostile.taken);
    hostile.close();
}
