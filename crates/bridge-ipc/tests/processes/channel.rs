//! Questions that are given up, answers that come late, and forks: each answer is that of its question.

use super::child::{Child, is_gone, read, runs_alone, seen};
use super::wire::{ALL, Answer, HEADER, memory, numbered, send, ticket_for};
use super::{Folder, LONG, PATIENCE, share, wait_for};
use bridge_core::{Error, ErrorKind, Result};
use bridge_ipc::{Client, Exporter, IpcTensor, Limits, Names, Settings, Ticket, Writing, open, while_waiting};
use rustix::process::Signal;
use std::cell::RefCell;
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

type Program = Box<dyn FnMut() -> Result<()>>;

thread_local! {
    /// What the program of this thread does while it waits.
    static PROGRAM: RefCell<Option<Program>> = const { RefCell::new(None) };
}

fn interrupted<T>(wait: impl FnOnce() -> T) -> T {
    interrupted_at(Instant::now(), wait)
}

/// Interrupts what waits after this time.
pub fn interrupted_at<T>(time: Instant, wait: impl FnOnce() -> T) -> T {
    let program = move || match Instant::now() >= time {
        true => Err(Error::new(ErrorKind::Framework, "interrupted")),
        false => Ok(()),
    };
    while_it_waits(program, wait)
}

/// Runs a program from time to time while something waits.
fn while_it_waits<T>(program: impl FnMut() -> Result<()> + 'static, wait: impl FnOnce() -> T) -> T {
    while_waiting(|| PROGRAM.with_borrow_mut(|program| program.as_mut().map_or(Ok(()), |program| program())));
    PROGRAM.set(Some(Box::new(program)));
    let done = wait();
    PROGRAM.set(None);
    done
}

/// A process that shares, and does as a test says.
struct Other {
    listener: UnixListener,
    folder: Folder,
}

/// The content of a share of 64 bytes.
const CONTENT: &str = r#"{"segments":[{"transport":"file","nbytes":64,"writing":"never"}],"tensors":[{"segment":0,"offset":0,"dtype":"uint8","shape":[64],"strides":[1]}]}"#;

impl Other {
    fn new() -> Self {
        let folder = Folder::new();
        std::fs::create_dir(folder.path()).unwrap();
        Self { listener: UnixListener::bind(folder.path().join("other")).unwrap(), folder }
    }

    fn ticket(&self, share: u64) -> Ticket {
        ticket_for(&self.folder.path().join("other"), share)
    }

    fn accept(&self) -> UnixStream {
        let (socket, _) = self.listener.accept().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }
}

/// Reads a request and its number.
fn heard(socket: &mut UnixStream) -> (u64, String) {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header).unwrap();
    let mut body = vec![0; u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize];
    socket.read_exact(&mut body).unwrap();
    (u64::from_le_bytes(header[8..].try_into().unwrap()), String::from_utf8(body).unwrap())
}

/// Answers with a lease on memory of so many bytes, of which 64 are used.
fn grant(socket: &UnixStream, number: u64, lease: u64, nbytes: u64) {
    let body = format!(r#"{{"is":"opened","lease":{lease},"content":{CONTENT}}}"#);
    send(socket, &Answer { bytes: numbered(number, body.as_bytes()), files: vec![memory(nbytes, ALL)] });
}

fn say(socket: &UnixStream, number: u64, body: &str) {
    send(socket, &Answer { bytes: numbered(number, body.as_bytes()), files: Vec::new() });
}

fn one(ticket: &Ticket) -> Result<IpcTensor> {
    Ok(open(ticket)?.tensors.remove(0))
}

/// The socket of the process that shares is full when its tensors are requested, and it answers late.
#[test]
fn an_answer_is_never_that_of_another_question() {
    let folder = Folder::new();
    let mut child = Child::new(folder.path());
    let [first, second] = ["share 1", "share 2"].map(|share| child.ask(share).parse::<Ticket>().unwrap());
    let kept = one(&first).unwrap();
    let views: Vec<_> = (0..1000).map(|_| one(&first).unwrap()).collect();
    child.send(Signal::STOP);
    drop(views);
    assert_eq!(one(&first).unwrap_err().kind(), ErrorKind::Busy);
    child.send(Signal::CONT);
    assert_eq!(read(&one(&second).unwrap()).unwrap(), "2");
    kept.check().unwrap();
    assert_eq!(read(&kept).unwrap(), "1");
    // What came late was returned.
    let start = Instant::now();
    while child.ask("leases") != "1" {
        assert!(start.elapsed() < PATIENCE);
    }
}

/// A thread sends what the socket did not accept, although no question follows.
#[test]
fn leases_are_returned_although_the_socket_was_full() {
    let folder = Folder::new();
    let mut child = Child::new(folder.path());
    let ticket = child.ask("share 1").parse::<Ticket>().unwrap();
    let _kept = one(&ticket).unwrap();
    let views: Vec<_> = (0..1000).map(|_| one(&ticket).unwrap()).collect();
    child.send(Signal::STOP);
    drop(views);
    child.send(Signal::CONT);
    let start = Instant::now();
    while child.ask("leases") != "1" {
        assert!(start.elapsed() < PATIENCE);
    }
}

/// The fork keeps the socket open, and answers nothing.
#[test]
fn a_process_has_ended_although_its_fork_has_the_socket() {
    let folder = Folder::new();
    let mut child = Child::new(folder.path());
    let opened = one(&child.ask("share 1").parse().unwrap()).unwrap();
    child.ask("fork");
    child.kill();
    let start = Instant::now();
    while !is_gone(&opened) {
        assert!(start.elapsed() < PATIENCE);
    }
}

/// A question is given up, and its answer comes with that of the next: the lease of the first is returned, and its
/// descriptors are not those of the second. Views that were opened before are still good.
#[test]
fn a_late_answer_is_given_back() {
    let other = Other::new();
    let ticket = |share| other.ticket(share);
    std::thread::scope(|scope| {
        let (tickets, thread) = ([1, 2, 3].map(ticket), &other);
        let opens = scope.spawn(move || {
            let kept = one(&tickets[0]).unwrap();
            let given_up = interrupted(|| one(&tickets[1]));
            assert_eq!(given_up.unwrap_err().kind(), ErrorKind::Framework);
            kept.check().unwrap();
            let opened = one(&tickets[2]).unwrap();
            kept.check().unwrap();
            seen(&opened).unwrap().to_array::<u8>().unwrap().len()
        });
        let mut socket = thread.accept();
        let asked = |socket: &mut UnixStream, share: u64| {
            let (number, body) = heard(socket);
            assert!(body.contains(&format!(r#""share":{share},"#)), "{body}");
            number
        };
        let first = asked(&mut socket, 1);
        grant(&socket, first, 7, 64);
        let (second, third) = (asked(&mut socket, 2), asked(&mut socket, 3));
        assert!(first < second && second < third);
        // Too few bytes for the content: the wrong descriptor would be refused.
        grant(&socket, second, 8, 1);
        grant(&socket, third, 9, 64);
        assert_eq!(heard(&mut socket), (0, r#"{"do":"return","lease":8}"#.into()));
        assert_eq!(opens.join().unwrap(), 64);
    });
}

/// An answer comes without its descriptor, and the next frame with one, which is not the answer's.
#[test]
fn a_descriptor_belongs_to_the_frame_that_it_came_with() {
    let other = Other::new();
    let ticket = other.ticket(1);
    let ((waits, waiting), (has_come, come)) = (mpsc::channel(), mpsc::channel::<()>());
    // The program reads nothing until both have come.
    let program = move || {
        let _ = (waits.send(()), come.recv());
        Ok(())
    };
    let opens = std::thread::spawn(move || while_it_waits(program, || one(&ticket).map(drop)));
    let mut socket = other.accept();
    let (number, _) = heard(&mut socket);
    waiting.recv().unwrap();
    say(&socket, number, &format!(r#"{{"is":"opened","lease":8,"content":{CONTENT}}}"#));
    let notice = numbered(0, br#"{"is":"revoked","share":3}"#);
    send(&socket, &Answer { bytes: notice, files: vec![memory(64, ALL)] });
    drop(has_come);
    assert_eq!(opens.join().unwrap().unwrap_err().kind(), ErrorKind::Protocol);
}

/// A store counts the bytes of what it takes over once.
#[test]
fn a_store_takes_no_memory_that_may_grow() {
    let other = Other::new();
    let path = other.folder.path().join("names");
    let _names = Names::persistent(&path, Settings::default()).unwrap();
    let client = Client::connect(&path).unwrap();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| client.put("memory", &other.ticket(1), 1).map_err(|error| error.kind()));
        let mut socket = other.accept();
        let (number, _) = heard(&mut socket);
        grant(&socket, number, 1, 64);
        assert_eq!(put.join().unwrap(), Err(ErrorKind::Protocol));
    });
}

/// Each of the first bytes comes with some descriptors. More than an answer may have end the connection at once, and
/// fewer than it has, too.
#[test]
fn descriptors_come_in_several_sends() {
    let lengths = vec!["[64]"; 1012].join(",").replace("[64]", r#"{"transport":"file","nbytes":64,"writing":"never"}"#);
    let content = CONTENT.replace(r#"{"transport":"file","nbytes":64,"writing":"never"}"#, &lengths);
    let body =
        format!(r#"{{"is":"opened","lease":1,"content":{}}}"#, content.replace(r#""segment":0"#, r#""segment":1011"#));
    for (counts, kind) in [
        (&[253, 253, 253, 253][..], None),
        (&[253, 253, 253, 252][..], Some(ErrorKind::Protocol)),
        (&[253, 253, 253, 253, 1][..], Some(ErrorKind::Protocol)),
    ] {
        let other = Other::new();
        let ticket = other.ticket(1);
        let opens =
            std::thread::spawn(move || one(&ticket).map(|opened| seen(&opened).unwrap().to_array::<u8>().unwrap()[0]));
        let mut socket = other.accept();
        let bytes = numbered(heard(&mut socket).0, body.as_bytes());
        for (at, count) in counts.iter().enumerate() {
            // What is too much is seen before the frame is whole.
            let is_whole = at + 1 == counts.len() && at < 4;
            let end = if is_whole { bytes.len() } else { at + 1 };
            let files = (0..*count).map(|_| memory(64, ALL)).collect();
            send(&socket, &Answer { bytes: bytes[at..end].to_vec(), files });
        }
        assert_eq!(opens.join().unwrap().map_err(|error| error.kind()).err(), kind, "{counts:?}");
    }
}

/// Numbers that no question waits for end the connection.
#[test]
fn an_answer_that_was_not_asked_for_is_none() {
    for (first, second) in [(1, Some(1)), (1, Some(3)), (2, None), (0, None), (u64::MAX, None)] {
        let other = Other::new();
        let tickets = [1, 2].map(|share| other.ticket(share));
        let opens = std::thread::spawn(move || {
            let opened = one(&tickets[0])?;
            let again = one(&tickets[1]).map(drop);
            drop(opened);
            again
        });
        let mut socket = other.accept();
        assert_eq!(heard(&mut socket).0, 1);
        grant(&socket, first, 1, 64);
        if let Some(second) = second {
            assert_eq!(heard(&mut socket).0, 2);
            grant(&socket, second, 2, 64);
        }
        assert_eq!(opens.join().unwrap().unwrap_err().kind(), ErrorKind::Protocol, "{first} {second:?}");
    }
}

/// A notice answers no question, although it has the number of one: it ends the connection.
#[test]
fn a_notice_with_a_number_is_no_answer() {
    let other = Other::new();
    let tickets = [1, 2].map(|share| other.ticket(share));
    let opens = std::thread::spawn(move || {
        let opened = one(&tickets[0]).unwrap();
        let kinds = [one(&tickets[1]).map(drop), opened.check()].map(|done| done.map_err(|error| error.kind()));
        drop(opened);
        kinds
    });
    let mut socket = other.accept();
    let number = heard(&mut socket).0;
    grant(&socket, number, 1, 64);
    let number = heard(&mut socket).0;
    say(&socket, number, r#"{"is":"revoked","share":9}"#);
    assert_eq!(opens.join().unwrap(), [Err(ErrorKind::Protocol); 2]);
}

/// A fork takes nothing that was said to its parent: the notice that a share was revoked stays for the parent.
#[test]
fn a_fork_does_not_read_its_parents_connection() {
    if runs_alone() {
        return;
    }
    let other = Other::new();
    let ticket = other.ticket(5);
    let (is_revoked, revoked) = mpsc::channel();
    std::thread::scope(|scope| {
        let opens = scope.spawn(move || {
            let opened = one(&ticket).unwrap();
            revoked.recv().unwrap();
            // SAFETY: the child calls functions that take no lock of another thread, and ends.
            let fork = unsafe { libc::fork() };
            if fork == 0 {
                let good = opened.check().is_ok();
                // SAFETY: it ends the child at once.
                unsafe { libc::_exit(i32::from(!good)) };
            }
            let mut status = 0;
            // SAFETY: the pointer is to the status.
            assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
            assert_eq!(status, 0);
            opened.check().unwrap_err().kind()
        });
        let mut socket = other.accept();
        let (number, _) = heard(&mut socket);
        grant(&socket, number, 1, 64);
        say(&socket, 0, r#"{"is":"revoked","share":6}"#);
        say(&socket, 0, r#"{"is":"revoked","share":5}"#);
        is_revoked.send(()).unwrap();
        assert_eq!(opens.join().unwrap(), ErrorKind::Gone);
    });
}

/// Forks that are made while threads share and open share and open for themselves.
#[test]
fn forks_wait_for_no_thread_of_their_parent() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ends = AtomicBool::new(false);
    let shares_and_opens = |exporter: &Exporter| {
        let ticket = share(exporter, vec![1, 2], Writing::Private, LONG)?;
        let read = read(&one(&ticket)?)?;
        exporter.revoke(&ticket)?;
        Ok::<_, Error>(read == "12")
    };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ends.load(Relaxed) {
                    assert!(shares_and_opens(&exporter).unwrap());
                }
            });
        }
        let codes: Vec<_> = (0..30)
            .map(|_| {
                // SAFETY: the child takes no lock that a thread of its parent may hold, which is what is tested.
                let fork = unsafe { libc::fork() };
                if fork == 0 {
                    // SAFETY: it ends a child that waits.
                    unsafe { libc::alarm(PATIENCE.as_secs() as u32) };
                    let is_refused = shares_and_opens(&exporter).is_err_and(|error| error.kind() == ErrorKind::Gone);
                    let own = Settings::default().with_folder(folder.path());
                    let is_good = Exporter::new(own).and_then(|own| shares_and_opens(&own)).is_ok_and(|good| good);
                    // SAFETY: it ends the child at once.
                    unsafe { libc::_exit(2 * i32::from(!is_refused) + i32::from(!is_good)) };
                }
                let mut status = 0;
                // SAFETY: the pointer is to the status.
                assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
                status
            })
            .collect();
        ends.store(true, Relaxed);
        assert_eq!(codes, vec![0; codes.len()]);
    });
}

/// A put is given up, and its answer comes with that of the next question: what the server refused is not shared any
/// more, and what it stored is, until a name stands for it no longer.
#[test]
fn a_late_answer_settles_a_put() {
    for (answer, shares) in
        [(r#"{"is":"refused","why":"busy"}"#, 0), (r#"{"is":"missing"}"#, 0), (r#"{"is":"stored","version":4}"#, 1)]
    {
        let (other, sharing) = (Other::new(), Folder::new());
        let exporter = Arc::new(sharing.exporter(Limits::default()));
        let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
        let displaced = format!(r#"{{"is":"displaced","ticket":{}}}"#, ticket.text());
        let (is_answered, answered) = mpsc::channel();
        std::thread::scope(|scope| {
            let (exporter, path) = (&exporter, other.folder.path().join("other"));
            let puts = scope.spawn(move || {
                let client = Client::connect(&path).unwrap();
                let given_up = interrupted(|| client.put_share(exporter, "weights", &ticket, 2));
                assert_eq!(given_up.unwrap_err().kind(), ErrorKind::Framework);
                assert_eq!(exporter.held().shares, 1, "it may be listed");
                assert_eq!(client.list().unwrap(), []);
                wait_for(exporter, |held| held.shares == shares);
                is_answered.send(()).unwrap();
                wait_for(exporter, |held| held.shares == 0);
            });
            let mut socket = other.accept();
            let (put, list) = (heard(&mut socket).0, heard(&mut socket).0);
            say(&socket, put, answer);
            say(&socket, list, r#"{"is":"listed","names":[]}"#);
            answered.recv().unwrap();
            if shares == 1 {
                say(&socket, 0, &displaced);
            }
            puts.join().unwrap();
        });
    }
}

/// A process that has as many files open as it may loses the descriptors of an answer, or cannot connect: that is an
/// error, and what it opened before stays.
#[test]
fn too_many_open_files_end_no_connection() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let [exporter, other] = [&folder, &elsewhere].map(|folder| folder.exporter(Limits::default()));
    let [ticket, unknown] = [&exporter, &other].map(|exporter| share(exporter, vec![7], Writing::Never, LONG).unwrap());
    let mut child = Child::new(folder.path());
    let [open, connect] = [ticket, unknown].map(|ticket| format!("open {}", ticket.text()));
    assert_eq!(child.ask(&open), "7");
    child.ask("crowd");
    for line in [&open, &connect, &open] {
        assert_eq!(child.ask(line), "OutOfMemory");
    }
    child.ask("room");
    for line in [&open, &connect, "read 0"] {
        assert_eq!(child.ask(line), "7");
    }
    wait_for(&exporter, |held| (held.leases, held.connections) == (2, 1));
}

/// A thread that waits for its turn is interrupted as one that waits for an answer, and the answer comes to the other.
#[test]
fn a_thread_that_waits_for_another_is_interrupted() {
    let other = Other::new();
    let [first, second] = [1, 2].map(|share| other.ticket(share));
    std::thread::scope(|scope| {
        let waits = scope.spawn(move || one(&first).map(drop));
        let mut socket = other.accept();
        let (number, _) = heard(&mut socket);
        assert_eq!(interrupted(|| one(&second)).unwrap_err().kind(), ErrorKind::Framework);
        grant(&socket, number, 1, 64);
        waits.join().unwrap().unwrap();
    });
}

/// A hook that decides whether a wait goes on does not wait for the same connection.
#[test]
fn what_the_program_asks_for_meanwhile_is_refused_at_once() {
    let other = Other::new();
    let [first, second] = [1, 2].map(|share| other.ticket(share));
    let program = move || Err(one(&second).expect_err("the connection is in use"));
    let opens = std::thread::spawn(move || while_it_waits(program, || one(&first).map(drop)));
    let mut socket = other.accept();
    heard(&mut socket);
    assert_eq!(opens.join().unwrap().unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn an_error_says_what_a_ticket_lacks() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let short = share(&exporter, vec![7], Writing::Never, Duration::from_millis(1)).unwrap();
    let long = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
    wait_for(&exporter, |held| held.shares == 1);
    let says = |ticket: &Ticket| {
        let error = one(ticket).unwrap_err();
        (error.kind(), error.to_string())
    };
    let (kind, text) = says(&short);
    assert!(kind == ErrorKind::Gone && text.contains("the ticket has expired"), "{text}");
    exporter.revoke(&long).unwrap();
    let (kind, text) = says(&long);
    assert!(kind == ErrorKind::Gone && text.contains("revoked"), "{text}");
    let moved = long.text().replace(".sock", ".moved");
    let (kind, text) = says(&moved.parse().unwrap());
    assert!(kind == ErrorKind::Gone && text.contains(".moved"), "{text}");
}
