//! Who may share, open and end: folders, sockets, users and forged tickets.

use super::child::{Child, runs_alone};
use super::{Folder, LONG, PATIENCE, share};
use bridge_core::ErrorKind;
use bridge_ipc::{Client, Exporter, Limits, Names, Settings, Ticket, Writing, open, process};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Instant;

fn denied(folder: &Path, users: Vec<u32>) -> String {
    let settings = Settings::default().with_folder(folder).with_users(users);
    let error = Exporter::new(settings).expect_err("the folder is refused");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    error.to_string()
}

fn with_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_folder_with_another_mode_than_it_needs_is_refused() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    with_mode(folder.path(), 0o770);
    assert!(denied(folder.path(), vec![]).contains("lets other users in"));
    with_mode(folder.path(), 0o700);
    assert!(denied(folder.path(), vec![2]).contains("does not let the other users in"));
    drop(Exporter::new(Settings::default().with_folder(folder.path()).with_users(vec![0])).unwrap());
    drop(folder.exporter(Limits::default()));
}

#[test]
fn a_folder_that_is_made_lets_the_users_in() {
    let folder = Folder::new();
    let settings = Settings::default().with_folder(folder.path()).with_users(vec![2]);
    drop(Exporter::new(settings).unwrap());
    assert_eq!(std::fs::metadata(folder.path()).unwrap().mode() & 0o777, 0o711);
}

#[test]
fn a_link_in_the_place_of_the_folder_is_refused() {
    let (folder, link) = (Folder::new(), Folder::new());
    drop(folder.exporter(Limits::default()));
    let stale = folder.path().join("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    symlink(folder.path(), link.path()).unwrap();
    assert!(denied(link.path(), vec![]).contains("is a link"));
    assert!(stale.exists(), "nothing is removed through the link");
    std::fs::remove_file(link.path()).unwrap();
}

#[test]
fn a_forged_ticket_ends_nothing() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let text = ticket.text();
    let token = &text.split("\"token\":\"").nth(1).unwrap()[..32];
    let forged: Ticket = text.replace(token, &"0".repeat(32)).parse().unwrap();
    for held in [false, true] {
        let opened = held.then(|| open(&ticket).unwrap());
        assert_eq!(exporter.revoke(&forged).unwrap_err().kind(), ErrorKind::Argument);
        assert_eq!(exporter.end(&forged).unwrap_err().kind(), ErrorKind::Argument);
        opened.into_iter().for_each(|opened| opened.tensors[0].check().unwrap());
        open(&ticket).unwrap();
    }
    exporter.revoke(&ticket).unwrap();
    exporter.revoke(&ticket).unwrap();
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Gone);
}

/// A socket that does not listen yet may be in the making, for a minute. Other files are not touched.
#[test]
fn a_sweep_removes_what_was_abandoned() {
    let folder = Folder::new();
    drop(folder.exporter(Limits::default()));
    std::fs::create_dir_all(folder.path()).unwrap();
    for (name, age, is_left) in
        [("1.sock", 0, false), ("2.new", 0, true), ("3.new", 100, false), ("4.other", 0, true), ("5.other", 100, true)]
    {
        let path = folder.path().join(name);
        drop(UnixListener::bind(&path).unwrap());
        let time = rustix::fs::Timespec { tv_sec: std::fs::metadata(&path).unwrap().mtime() - age, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, rustix::fs::AtFlags::empty()).unwrap();
        drop(folder.exporter(Limits::default()));
        assert_eq!(path.exists(), is_left, "{name}");
    }
}

#[test]
fn the_exporter_of_a_process_is_configured_before_it_is_made() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    let configure = || process::configure(Settings::default().with_folder(folder.path()));
    configure().unwrap();
    assert!(process::exporter_if_any().is_none());
    let exporter = process::exporter().unwrap();
    assert!(Arc::ptr_eq(&process::exporter_if_any().unwrap(), &exporter));
    assert_eq!(configure().unwrap_err().kind(), ErrorKind::Argument);
    process::close();
    configure().unwrap();
}

/// The first share of a process is made while others remove what dead processes have left.
#[test]
fn a_sweep_spares_a_socket_in_the_making() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    drop(folder.exporter(Limits::default()));
    let shares = || {
        let settings = Settings::default().with_folder(folder.path());
        let exporter = Exporter::new(settings)?;
        open(&share(&exporter, vec![1], Writing::Private, LONG)?).map(drop)
    };
    let lost = std::thread::scope(|scope| {
        let rounds = || (0..300).filter_map(|_| shares().err().map(|error| error.to_string())).collect::<Vec<_>>();
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(rounds)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(lost, [""; 0]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

/// Processes that begin to serve at once where a process was killed: one of them does.
#[test]
fn one_of_many_takes_the_place_of_a_dead_process() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    let path = folder.path().join("names");
    for _ in 0..100 {
        drop(UnixListener::bind(&path).unwrap());
        let barrier = Barrier::new(3);
        let serve = || {
            barrier.wait();
            Names::serve(&path, Settings::default())
        };
        let served: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(serve)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(served.iter().filter(|served| served.is_ok()).count(), 1);
        for error in served.iter().filter_map(|served| served.as_ref().err()) {
            assert_eq!(error.kind(), ErrorKind::Busy);
        }
        Client::connect(&path).unwrap().list().unwrap();
        drop(served);
        assert!(!path.exists());
    }
}

/// Only the superuser starts processes of other users.
fn is_superuser() -> bool {
    let may = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    if !may {
        println!("skipped: this test starts processes of other users, and needs the superuser for it");
    }
    may
}

#[test]
fn users_accept_each_other_or_nothing_is_opened() {
    if runs_alone() {
        return;
    }
    if !is_superuser() {
        return;
    }
    let folder = Folder::new();
    std::fs::create_dir(folder.path()).unwrap();
    with_mode(folder.path(), 0o777);
    let mut one = Child::of_user(1, folder.path(), &[2, 0]);
    let ticket = one.ask("share 12");
    let mut two = Child::of_user(2, folder.path(), &[1]);
    assert_eq!(two.ask(&format!("open {ticket}")), "Denied", "user 2 has not accepted user 1");
    two.ask("accept 1");
    assert_eq!(two.ask(&format!("open {ticket}")), "12");
    let mut three = Child::of_user(3, folder.path(), &[]);
    three.ask("accept 1");
    assert_eq!(three.ask(&format!("open {ticket}")), "Denied", "user 1 has not accepted user 3");
    // The superuser accepts no other user either, unless it says so.
    assert_eq!(open(&ticket.parse().unwrap()).err().unwrap().kind(), ErrorKind::Denied);
    let mut root = Child::of_user(0, folder.path(), &[]);
    assert_eq!(root.ask(&format!("open {ticket}")), "Denied");
    root.ask("accept 1");
    assert_eq!(root.ask(&format!("open {ticket}")), "12");
}

/// Forks keep the sockets of their parent: the connection ends with the parent's last view all the same.
#[test]
fn a_connection_ends_although_a_fork_has_its_socket() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let opened = open(&ticket).unwrap();
    assert_eq!(exporter.held().connections, 1);
    // SAFETY: the child calls nothing but `pause`, which is safe after a fork.
    let fork = unsafe { libc::fork() };
    if fork == 0 {
        loop {
            // SAFETY: it waits for a signal, and has no arguments.
            unsafe { libc::pause() };
        }
    }
    drop(opened);
    let start = Instant::now();
    while exporter.held().connections > 0 && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    let held = exporter.held();
    // SAFETY: the process is the one that was made above, which is not waited for yet.
    unsafe { libc::kill(fork, libc::SIGKILL) };
    // SAFETY: the process is a child of this one, and no status is requested.
    unsafe { libc::waitpid(fork, std::ptr::null_mut(), 0) };
    assert_eq!((held.connections, held.leases), (0, 0));
}

#[test]
fn a_socket_lets_in_whom_the_settings_name() {
    let folder = Folder::new();
    for (users, mode) in [(vec![], 0o600), (vec![0, 2], 0o666)] {
        let path = folder.path().join(users.len().to_string());
        let settings = Settings::default().with_folder(path).with_users(users);
        std::fs::create_dir_all(folder.path()).unwrap();
        let exporter = Exporter::new(settings).unwrap();
        let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
        assert_eq!(std::fs::metadata(ticket.socket()).unwrap().mode() & 0o777, mode);
        drop(UnixStream::connect(ticket.socket()).unwrap());
    }
}
