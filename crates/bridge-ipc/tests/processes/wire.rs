//! Hostile processes at either end.

use super::child::Child;
use super::{Folder, LONG, PATIENCE, share, wait_for};
use bridge_core::ErrorKind;
use bridge_ipc::{Limits, Ticket, Writing, open};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, sendmsg, socket_with,
};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Returns the first question of a connection, or its answer.
pub fn frame(body: &str) -> Vec<u8> {
    numbered(1, body.as_bytes())
}

/// Returns a question of this number, or its answer; with 0, what has none.
pub fn numbered(number: u64, body: &[u8]) -> Vec<u8> {
    [b"TB\x04\x00", &(body.len() as u32).to_le_bytes()[..], &number.to_le_bytes(), body].concat()
}

/// Bytes of a frame in front of its body.
pub const HEADER: usize = 16;

/// Sends bytes to an exporter, and returns what it answers before it closes the connection.
fn answer_to(ticket: &Ticket, bytes: &[u8]) -> String {
    let mut socket = UnixStream::connect(ticket.socket()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // A connection that is closed with unread bytes is reset.
    let _ = socket.read_to_end(&mut answer);
    String::from_utf8_lossy(answer.get(HEADER..).unwrap_or_default()).into_owned()
}

#[test]
fn what_is_no_request_is_refused() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let protocol = r#"{"is":"refused","why":"protocol"}"#;
    let opens = format!(r#"{{"do":"open","share":1,"token":"{}"}}"#, "0".repeat(32)).into_bytes();
    let cases: [(Vec<u8>, &str); 9] = [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), protocol),
        (b"TB\x01\x00\x00\x00\x00\x00".to_vec(), r#"{"is":"refused","why":"version"}"#),
        (b"TB\x04\x00\xff\xff\xff\xff".to_vec(), protocol),
        (frame("{}"), protocol),
        (frame(r#"{"do":"open","share":1,"token":"00"}"#), protocol),
        (frame(&"[".repeat(1000)), protocol),
        (numbered(0, br#"{"do":"return","lease":5}"#), protocol),
        (frame(r#"{"do":"return","lease":5}"#), protocol),
        (numbered(0, &opens), protocol),
    ];
    for (bytes, expected) in cases {
        assert_eq!(answer_to(&ticket, &bytes), expected, "{}", String::from_utf8_lossy(&bytes));
    }
    wait_for(&exporter, |held| held.connections == 0);
    open(&ticket).unwrap();
}

/// The lease stays until the connection ends: an exporter that has given no point waits for none.
#[test]
fn points_that_the_exporter_cannot_wait_for_are_refused() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let token = ticket.text().split("\"token\":\"").nth(1).unwrap()[..32].to_string();
    let opens = frame(&format!(r#"{{"do":"open","share":1,"token":"{token}"}}"#));
    let device = format!(r#""device":"{}""#, "01".repeat(16));
    let event = format!(r#""event":"{}""#, "2f".repeat(64));
    let points = [
        format!(r#"{{{device},"word":1,"value":1}}"#),
        format!("{{{device},{event}}}"),
        format!(r#"{{{device},"word":1,"value":1,{event}}}"#),
        format!(r#"{{{device},"word":1}}"#),
        format!(r#"{{{device},"word":-1,"value":1}}"#),
    ];
    // Shares, connections and leases are counted together.
    for (lease, point) in (3..).step_by(2).zip(points) {
        let returns = numbered(0, format!(r#"{{"do":"return","lease":{lease},"points":[{point}]}}"#).as_bytes());
        let answers = answer_to(&ticket, &[opens.clone(), returns].concat());
        assert!(answers.ends_with(r#"{"is":"refused","why":"protocol"}"#), "{point}: {answers}");
        wait_for(&exporter, |held| (held.leases, held.connections) == (0, 0));
    }
}

#[test]
fn a_forged_ticket_opens_nothing() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let text = share(&exporter, vec![1], Writing::Private, LONG).unwrap().text();
    let token = text.split("\"token\":\"").nth(1).unwrap()[..32].to_string();
    for forged in [text.replace(&token, &"0".repeat(32)), text.replace("\"share\":1", "\"share\":9")] {
        assert_ne!(forged, text);
        assert_eq!(open(&forged.parse().unwrap()).err().unwrap().kind(), ErrorKind::Gone);
    }
    assert_eq!(exporter.held().leases, 0);
}

#[test]
fn crowds_are_refused_within_a_second() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default().with_connections(16));
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let token = ticket.text().split("\"token\":\"").nth(1).unwrap()[..32].to_string();
    let opens = frame(&format!(r#"{{"do":"open","share":1,"token":"{token}"}}"#));
    // One process has half of the connections. What they hold, they keep.
    let held: Vec<_> = (0..8)
        .map(|_| {
            let mut socket = UnixStream::connect(ticket.socket()).unwrap();
            socket.write_all(&opens).unwrap();
            socket
        })
        .collect();
    wait_for(&exporter, |tables| tables.leases == held.len());
    let (start, mut refused) = (Instant::now(), 0);
    for _ in 0..10_000 {
        let mut socket = UnixStream::connect(ticket.socket()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes).unwrap();
        refused += usize::from(bytes[HEADER..] == *br#"{"is":"refused","why":"busy"}"#);
    }
    assert_eq!(refused, 10_000);
    println!("{:?} for 10,000 connections", start.elapsed());
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Busy);
    let other = Folder::new();
    let mut child = Child::new(other.path());
    assert_eq!(child.ask(&format!("open {}", ticket.text())), "1", "another process has room");
    drop((held, child));
    wait_for(&exporter, |held| held.connections == 0);
    open(&ticket).unwrap();
}

/// A process without a ticket says nothing, and takes no place for long.
#[test]
fn silent_connections_yield() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default().with_connections(4));
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let silent: Vec<_> = (0..2).map(|_| UnixStream::connect(ticket.socket()).unwrap()).collect();
    wait_for(&exporter, |tables| tables.connections == silent.len());
    let start = Instant::now();
    while open(&ticket).is_err_and(|error| error.kind() == ErrorKind::Busy) {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns a ticket of the process at this socket.
pub fn ticket_of(path: &std::path::Path) -> Ticket {
    ticket_for(path, 1)
}

/// Returns a ticket for one of its shares.
pub fn ticket_for(path: &std::path::Path, share: u64) -> Ticket {
    let text = format!(
        r#"{{"truebridge":4,"socket":"{}","share":{share},"token":"{}","expires":{},"about":""}}"#,
        path.display(),
        "0".repeat(32),
        u64::MAX
    );
    text.parse().unwrap()
}

/// What a hostile exporter sends for an answer.
pub struct Answer {
    pub bytes: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

pub fn send(socket: &UnixStream, answer: &Answer) {
    let files: Vec<_> = answer.files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    }
    sendmsg(socket, &[IoSlice::new(&answer.bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Opens a ticket of an exporter that answers so, and returns the kind of the error.
fn opened(answer: Answer) -> ErrorKind {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("hostile.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let ticket = ticket_of(&path);
    let hostile = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = [0; 512];
        let _ = socket.read(&mut request).unwrap();
        send(&socket, &answer);
    });
    let kind = open(&ticket).err().unwrap().kind();
    hostile.join().unwrap();
    kind
}

/// Seals of memory that cannot be shortened, and of memory that cannot change either.
pub const LENGTH: SealFlags = SealFlags::SHRINK;
pub const ALL: SealFlags = SealFlags::SHRINK.union(SealFlags::WRITE);

pub fn memory(nbytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create(c"hostile", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, nbytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn hostile_answers_are_errors() {
    let content = |tensor: &str| {
        format!(
            r#"{{"is":"opened","lease":1,"content":{{"segments":[{{"transport":"file","nbytes":64,"writing":"never"}}],"tensors":[{tensor}]}}}}"#
        )
    };
    let tensor = |segment: &str, offset: &str, dtype: &str, shape: &str, strides: &str| {
        content(&format!(
            r#"{{"segment":{segment},"offset":{offset},"dtype":"{dtype}","shape":{shape},"strides":{strides}}}"#
        ))
    };
    let bodies = [
        String::new(),
        "{}".into(),
        "\u{0}".into(),
        tensor("1", "0", "uint8", "[1]", "[1]"),
        tensor("0", "64", "uint8", "[1]", "[1]"),
        tensor("0", "0", "uint8", "[65]", "[1]"),
        tensor("0", "0", "float32", "[17]", "[1]"),
        tensor("0", "0", "uint8", "[2]", "[-1]"),
        tensor("0", "0", "uint8", "[2,2]", "[9223372036854775807,1]"),
        tensor("0", "18446744073709551615", "uint8", "[1]", "[1]"),
        tensor("0", "18446744073709551616", "uint8", "[1]", "[1]"),
        tensor("0", "0", "uint8", "[-1]", "[1]"),
        tensor("0", "0", "uint8", "[1]", "[]"),
        tensor("0", "0", "uint9", "[1]", "[1]"),
        tensor("0", "0", "uint8", &format!("[{}1]", "1,".repeat(70)), &format!("[{}1]", "1,".repeat(70))),
    ];
    for body in bodies {
        let answer = Answer { bytes: frame(&body), files: vec![memory(64, ALL)] };
        assert_eq!(opened(answer), ErrorKind::Protocol, "{body}");
    }
    let good = tensor("0", "0", "uint8", "[64]", "[1]");
    let kinds = [
        (vec![], "no descriptor"),
        (vec![memory(64, SealFlags::empty())], "not sealed"),
        (vec![memory(63, ALL)], "too short"),
        (vec![memory(64, LENGTH)], "it may still change"),
    ];
    for (files, what) in kinds {
        assert_eq!(opened(Answer { bytes: frame(&good), files }), ErrorKind::Protocol, "{what}");
    }
    let with = |point: &str| {
        good.replace("}]}}", &format!(r#"}}],"points":[{{"device":"{}",{point}}}]}}}}"#, "01".repeat(16)))
    };
    let (word, event) = (with(r#""word":0,"value":1"#), with(&format!(r#""event":"{}""#, "2f".repeat(64))));
    let page = || memory(4096, LENGTH);
    let kinds = [
        (&word, vec![memory(64, ALL)], "no page"),
        (&word, vec![memory(64, ALL), page(), page()], "two pages"),
        (&event, vec![memory(64, ALL), page()], "a page for an event"),
        (&with(r#""word":0"#), vec![memory(64, ALL), page()], "no value"),
        (&with(r#""word":0,"value":1,"more":1"#), vec![memory(64, ALL), page()], "another field"),
    ];
    for (body, files, what) in kinds {
        assert_eq!(opened(Answer { bytes: frame(body), files }), ErrorKind::Protocol, "{what}");
    }
    // This process has no such device, if any.
    let elsewhere = opened(Answer { bytes: frame(&word), files: vec![memory(64, ALL), page()] });
    assert!(matches!(elsewhere, ErrorKind::Missing | ErrorKind::Device | ErrorKind::Driver), "{elsewhere:?}");
    let half = frame(&good)[..40].to_vec();
    assert_eq!(opened(Answer { bytes: half, files: vec![] }), ErrorKind::Gone, "the rest never comes");
    assert_eq!(opened(Answer { bytes: b"TB\x09\x00".repeat(2), files: vec![] }), ErrorKind::Version);
    assert_eq!(opened(Answer { bytes: b"TB\x04\x00\xff\xff\xff\xff".to_vec(), files: vec![] }), ErrorKind::Protocol);
}

#[test]
fn a_socket_that_never_answers_is_an_error_in_time() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("silent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let ticket = ticket_of(&path);
    // First the connection is made and nothing is answered, then no connection is made.
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Busy);
        assert!(start.elapsed() >= Duration::from_secs(5));
        assert!(start.elapsed() < PATIENCE);
        while let Some(socket) = connected(&path) {
            waiting.push(socket);
        }
    }
    drop(listener);
}

/// Connects, if the listener has room.
fn connected(path: &std::path::Path) -> Option<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok().map(|()| socket)
}
