//! Names between programs that run for long.

use super::child::{Child, read, runs_alone};
use super::wire::{HEADER, frame};
use super::{Folder, LONG, PATIENCE, share, wait_for};
use bridge_core::ErrorKind;
use bridge_ipc::{Client, Held, Limits, Listed, Names, Settings, Ticket, Writing, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Served {
    folder: Folder,
    names: Names,
}

fn served() -> Served {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let names = Names::serve(&folder.path().join("names"), Settings::default()).unwrap();
    Served { folder, names }
}

#[test]
fn the_newest_version_is_found_and_older_ones_are_kept() {
    let served = served();
    let sharing = Folder::new();
    let exporter = sharing.exporter(Limits::default());
    let (writer, reader) =
        (Client::connect(served.names.path()).unwrap(), Client::connect(served.names.path()).unwrap());
    assert_eq!(reader.get("weights", None).unwrap_err().kind(), ErrorKind::Gone);
    let mut versions = Vec::new();
    for bytes in [vec![1], vec![2], vec![3]] {
        let ticket = share(&exporter, bytes, Writing::Never, LONG).unwrap();
        versions.push(writer.put("weights", &ticket, 2).unwrap());
    }
    let digits = |version| read(&open(&reader.get("weights", version).unwrap().1).unwrap().tensors[0]).unwrap();
    assert_eq!(
        (digits(None), digits(Some(versions[1])), digits(Some(versions[2]))),
        ("3".into(), "2".into(), "3".into())
    );
    assert_eq!(reader.get("weights", Some(versions[0])).unwrap_err().kind(), ErrorKind::Gone);
    let about = "ndarray uint8 [1] on cpu".to_string();
    let [Listed { name, version, about: seen, .. }] = &reader.list().unwrap()[..] else { panic!("not one name") };
    assert_eq!((name.as_str(), *version, seen), ("weights", versions[2], &about));
    writer.remove("weights").unwrap();
    assert_eq!(reader.list().unwrap(), []);
    assert_eq!(reader.remove("weights").unwrap_err().kind(), ErrorKind::Gone);
}

#[test]
fn a_process_that_waits_is_told() {
    let served = served();
    let sharing = Folder::new();
    let exporter = sharing.exporter(Limits::default());
    let client = Client::connect(served.names.path()).unwrap();
    let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
    let watch = client.watch("weights", 0).unwrap();
    assert_eq!(watch.wait(Duration::ZERO).unwrap(), None);
    assert_eq!(watch.wait(Duration::from_millis(1)).unwrap(), None);
    let version = client.put("weights", &ticket, 1).unwrap();
    assert_eq!(watch.wait(Duration::MAX).unwrap(), Some((version, ticket.clone())));
    let later = client.watch("weights", version).unwrap();
    assert_eq!(later.wait(Duration::from_millis(1)).unwrap(), None);
    client.put("others", &ticket, 1).unwrap();
    assert_eq!(later.wait(Duration::from_millis(1)).unwrap(), None);
    let next = client.put("weights", &ticket, 1).unwrap();
    assert!(next > version);
    assert_eq!(later.wait(PATIENCE).unwrap(), Some((next, ticket.clone())));
    let last = client.watch("weights", next).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| last.wait(PATIENCE).unwrap());
        let put = client.put("weights", &ticket, 1).unwrap();
        assert_eq!(waits.join().unwrap(), Some((put, ticket.clone())));
    });
}

/// Only a store has a successor for which a watch waits.
#[test]
fn a_watch_ends_with_the_names() {
    let served = served();
    let client = Client::connect(served.names.path()).unwrap();
    let watch = client.watch("weights", 0).unwrap();
    drop(served.names);
    assert_eq!(watch.wait(Duration::ZERO).unwrap_err().kind(), ErrorKind::Gone);
    assert_eq!(client.watch("weights", 0).map(drop).unwrap_err().kind(), ErrorKind::Gone);
}

#[test]
fn a_fork_does_not_wait_over_its_parents_connection() {
    if runs_alone() {
        return;
    }
    let served = served();
    let client = Client::connect(served.names.path()).unwrap();
    let watch = client.watch("weights", 0).unwrap();
    // SAFETY: the child calls functions that take no lock of another thread, and ends.
    let fork = unsafe { libc::fork() };
    if fork == 0 {
        let is_gone = watch.wait(Duration::ZERO).is_err_and(|error| error.kind() == ErrorKind::Gone);
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(!is_gone)) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to the status.
    assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
    assert_eq!(status, 0);
}

#[test]
fn what_a_process_has_put_goes_with_it() {
    let served = served();
    let sharing = Folder::new();
    let mut child = Child::new(sharing.path());
    let reader = Client::connect(served.names.path()).unwrap();
    let watch = reader.watch("weights", 0).unwrap();
    child.ask(&format!("connect {}", served.names.path().display()));
    child.ask("put 12");
    let (_, ticket): (u64, Ticket) = watch.wait(PATIENCE).unwrap().unwrap();
    assert_eq!(read(&open(&ticket).unwrap().tensors[0]).unwrap(), "12");
    child.kill();
    let start = Instant::now();
    while !reader.list().unwrap().is_empty() {
        assert!(start.elapsed() < PATIENCE);
    }
}

#[test]
fn one_process_serves_at_a_path() {
    if runs_alone() {
        return;
    }
    let served = served();
    let path = served.names.path().to_path_buf();
    let kind = |path: &std::path::Path| Names::serve(path, Settings::default()).err().unwrap().kind();
    assert_eq!(kind(&path), ErrorKind::Busy);
    let file = served.folder.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    assert_eq!(kind(&file), ErrorKind::Argument);
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    assert_eq!(kind(&file.join("x")), ErrorKind::Argument);
    let long = |bytes: usize| path.with_file_name("p".repeat(bytes - served.folder.path().as_os_str().len() - 1));
    assert_eq!(kind(&long(108)), ErrorKind::Argument);
    let longest = Names::serve(&long(107), Settings::default()).unwrap();
    Client::connect(longest.path()).unwrap().list().unwrap();
    let client = Client::connect(&path).unwrap();
    drop(served.names);
    assert_eq!(client.list().unwrap_err().kind(), ErrorKind::Gone);
    assert_eq!(Client::connect(&path).err().unwrap().kind(), ErrorKind::Gone);
    // The socket that a killed process leaves is not an obstacle.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let names = Names::serve(&path, Settings::default()).unwrap();
    Client::connect(names.path()).unwrap().list().unwrap();
    assert_eq!(client.put("x", &ticket(), 1).unwrap_err().kind(), ErrorKind::Gone);
    drop(names);
    std::env::set_current_dir(served.folder.path()).unwrap();
    drop(UnixListener::bind("names").unwrap());
    let names = Names::serve("names".as_ref(), Settings::default()).unwrap();
    assert_eq!(names.path(), path);
}

/// Its parent still shares, and serves names.
#[test]
fn a_fork_ends_nothing_of_its_parent() {
    if runs_alone() {
        return;
    }
    let (served, sharing) = (served(), Folder::new());
    let exporter = sharing.exporter(Limits::default());
    let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
    let client = Client::connect(served.names.path()).unwrap();
    client.put("weights", &ticket, 1).unwrap();
    // SAFETY: the child calls functions that take no lock of another thread, and ends.
    let fork = unsafe { libc::fork() };
    if fork == 0 {
        // SAFETY: it ends the child if that waits for a thread of its parent.
        unsafe { libc::alarm(PATIENCE.as_secs() as u32) };
        let is_gone = exporter.end(&ticket).is_err_and(|error| error.kind() == ErrorKind::Gone);
        let is_right = is_gone && exporter.is_elsewhere() && exporter.held() == Held::default();
        drop((client, exporter, served.names));
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to the status.
    assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
    assert_eq!(status, 0);
    let found = Client::connect(served.names.path()).unwrap().get("weights", None).unwrap().1;
    assert_eq!(read(&open(&found).unwrap().tensors[0]).unwrap(), "7");
    client.list().unwrap();
}

#[test]
fn what_is_no_name_is_an_error_and_nothing_else_changes() {
    let served = served();
    let sharing = Folder::new();
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let client = Client::connect(served.names.path()).unwrap();
    let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
    client.put_share(&exporter, "good", &ticket, 1).unwrap();
    for name in ["", "a\nb", &"n".repeat(129)] {
        let other = share(&exporter, vec![8], Writing::Never, LONG).unwrap();
        let errors = [
            client.put_share(&exporter, name, &other, 1).unwrap_err(),
            client.put(name, &ticket, 1).unwrap_err(),
            client.get(name, None).unwrap_err(),
            client.remove(name).unwrap_err(),
            client.watch(name, 0).err().unwrap(),
        ];
        errors.iter().for_each(|error| assert_eq!(error.kind(), ErrorKind::Argument, "{error}"));
    }
    assert_eq!(client.put("good", &ticket, 0).unwrap_err().kind(), ErrorKind::Argument);
    assert_eq!(client.list().unwrap().len(), 1);
    assert_eq!(exporter.held().shares, 1);
    open(&client.get("good", None).unwrap().1).unwrap();
}

/// Programs in other languages may ask for such names: they are refused, and what they have put stays.
#[test]
fn a_refused_name_does_not_end_the_connection() {
    let served = served();
    let mut socket = UnixStream::connect(served.names.path()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let put = |name: &str| format!(r#"{{"do":"put","name":"{name}","ticket":{},"keep":1}}"#, ticket().text());
    let mut ask = |body: &str| {
        socket.write_all(&frame(body)).unwrap();
        let mut header = [0; HEADER];
        socket.read_exact(&mut header).unwrap();
        let mut answer = vec![0; u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize];
        socket.read_exact(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    };
    assert!(ask(&put("good")).starts_with(r#"{"is":"stored""#));
    assert_eq!(ask(&put("")), r#"{"is":"refused","why":"protocol"}"#);
    assert!(ask(r#"{"do":"list"}"#).contains("good"));
}

/// A version that another process displaces is dropped by the one that has put it, which does nothing.
#[test]
fn what_is_displaced_is_not_shared_any_more() {
    let served = served();
    let (mine, theirs) = (Folder::new(), Folder::new());
    let exporter = Arc::new(mine.exporter(Limits::default()));
    let client = Client::connect(served.names.path()).unwrap();
    let put = |name: &str| {
        let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
        client.put_share(&exporter, name, &ticket, 1).unwrap();
    };
    put("weights");
    put("weights");
    assert_eq!(exporter.held().shares, 1, "its own are dropped when it has put the next");
    put("others");
    let mut child = Child::new(theirs.path());
    child.ask(&format!("connect {}", served.names.path().display()));
    child.ask("put 12");
    wait_for(&exporter, |held| held.shares == 1);
    client.remove("others").unwrap();
    assert_eq!(exporter.held().shares, 0);
    put("more");
    drop(served);
    wait_for(&exporter, |held| held.shares == 0);
    assert_eq!(client.put("x", &ticket(), 1).unwrap_err().kind(), ErrorKind::Gone);
}

#[test]
fn what_is_refused_is_not_shared_any_more() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let settings = Settings::default().with_limits(Limits::default().with_shares(1));
    let names = Names::serve(&folder.path().join("names"), settings).unwrap();
    let sharing = Folder::new();
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let client = Client::connect(names.path()).unwrap();
    let put = |name: &str| {
        let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
        client.put_share(&exporter, name, &ticket, 1)
    };
    let first = put("weights").unwrap();
    assert_eq!(put("others").unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(exporter.held().shares, 1);
    assert!(put("weights").unwrap() > first, "one takes the place of another");
    assert_eq!(exporter.held().shares, 1);
}

#[test]
fn a_closed_connection_shares_nothing() {
    let served = served();
    let sharing = Folder::new();
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let client = Client::connect(served.names.path()).unwrap();
    let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
    client.put_share(&exporter, "weights", &ticket, 1).unwrap();
    drop(client);
    assert_eq!(exporter.held().shares, 0);
}

/// What a server of names hands over is a ticket like any other.
#[test]
fn a_ticket_that_comes_through_names_is_checked() {
    let good = ticket().text();
    let about = good.split(r#""about":""#).nth(1).unwrap().trim_end_matches("\"}");
    let cases = [
        good.replace("/run", "run"),
        good.replace(r#""truebridge":4"#, r#""truebridge":9"#),
        good.replace(about, r"\u001b[31m"),
        good.replace(about, &"x".repeat(3000)),
    ];
    for (text, is_good) in cases.iter().map(|text| (text, false)).chain([(&good, true)]) {
        let folder = Folder::new();
        std::fs::create_dir(folder.path()).unwrap();
        let path = folder.path().join("names");
        let listener = UnixListener::bind(&path).unwrap();
        let answer = frame(&format!(r#"{{"is":"found","version":1,"ticket":{text}}}"#));
        let hostile = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let _ = socket.read(&mut [0; 512]).unwrap();
            socket.write_all(&answer).unwrap();
        });
        let got = Client::connect(&path).unwrap().get("weights", None);
        hostile.join().unwrap();
        assert_eq!(got.map_err(|error| error.kind()).err(), (!is_good).then_some(ErrorKind::Protocol), "{text}");
    }
}

/// Threads that put one name: the newest version can be opened after each round.
#[test]
fn the_newest_of_many_versions_can_be_opened() {
    let served = served();
    let sharing = Folder::new();
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let client = Client::connect(served.names.path()).unwrap();
    for _ in 0..100 {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
                    client.put_share(&exporter, "weights", &ticket, 1).unwrap();
                });
            }
        });
        assert_eq!(read(&open(&client.get("weights", None).unwrap().1).unwrap().tensors[0]).unwrap(), "7");
    }
}

fn ticket() -> Ticket {
    include_str!("../../../../fixtures/ipc/ticket.json").parse().unwrap()
}
