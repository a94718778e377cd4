//! Models of connections, which shuttle runs under many schedules: see `cargo xtask audit`.
//!
//! Exporter, importer and names are the real ones, with questions, answers, notices, timeouts, interrupts and forks.

use crate::sync::{begin as begin_process, fork, lost, thread};
use crate::{Client, Exporter, Ipc, IpcTensor, Limits, Message, Names, Settings, Ticket, Writing, open, while_waiting};
use bridge_core::{Error, ErrorKind, HostOnly, Options, Result, explore, transfer};
use bridge_ndarray::{HostArray, NdArray};
use shuttle::rand::{Rng, thread_rng};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(1 << 30);

/// The folder of a model, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let name = format!("truebridge-model-{}-{}", std::process::id(), LAST.fetch_add(1, Relaxed));
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: one thread of a model runs at a time.
    unsafe { NdArray::new() }
}

/// Begins a run of a model. Some waits are interrupted.
fn begin(folder: &Folder) -> Arc<Exporter> {
    begin_process();
    while_waiting(|| match thread_rng().gen_range(0..16) {
        0 => Err(Error::new(ErrorKind::Framework, "interrupted")),
        _ => Ok(()),
    });
    let settings = Settings { folder: Some(folder.0.clone()), limits: Limits::default(), ..Settings::default() };
    Arc::new(Exporter::new(settings).unwrap())
}

fn share(exporter: &Exporter, byte: u8) -> Ticket {
    let (from, array) = (ndarray(), HostArray::from(vec![byte]));
    let ordering: Arc<dyn bridge_core::Ordering> = Arc::new(HostOnly);
    let message = Message::of(&[(&from, &array)], Some(Writing::Never), &ordering, &Options::default());
    message.unwrap().share(exporter, LONG, None).unwrap()
}

fn one(ticket: &Ticket) -> Result<IpcTensor> {
    Ok(open(ticket)?.tensors.remove(0))
}

/// Opens, also after a timeout.
fn surely(ticket: &Ticket) -> IpcTensor {
    loop {
        if let Some(opened) = perhaps(ticket) {
            return opened;
        }
    }
}

/// Opens, unless no time is left or the program is interrupted.
fn perhaps(ticket: &Ticket) -> Option<IpcTensor> {
    one(ticket).map_err(given_up).ok()
}

fn given_up(error: Error) {
    assert!(matches!(error.kind(), ErrorKind::Busy | ErrorKind::Framework), "{error}");
}

/// Lets the other threads run until the condition holds.
fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::yield_now();
    }
}

fn byte(tensor: &IpcTensor) -> u8 {
    let ordering: Arc<dyn bridge_core::Ordering> = Arc::new(HostOnly);
    // SAFETY: no code writes to the memory.
    let opened = unsafe { Ipc::of_opened() };
    let (array, _) = transfer(&opened, &ndarray(), tensor, &ordering, &Options::in_place()).unwrap();
    array.to_array::<u8>().unwrap()[0]
}

#[test]
fn each_answer_is_that_of_its_question() {
    let folder = Folder::new();
    explore(move || {
        let exporter = begin(&folder);
        let tickets: Arc<[_]> = (0..3).map(|number| share(&exporter, number)).collect();
        let anchor = surely(&tickets[0]);
        let threads = [[1, 2], [2, 1]].map(|shares| {
            let tickets = Arc::clone(&tickets);
            thread::spawn(move || {
                for share in shares {
                    let opened = perhaps(&tickets[share as usize]);
                    opened.into_iter().for_each(|opened| assert_eq!(byte(&opened), share));
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // All questions before this one are answered, and leases that came too late are returned.
        drop(surely(&tickets[0]));
        until(|| anchor.check().is_ok() && exporter.held().leases <= 1);
        assert_eq!((byte(&anchor), exporter.held().leases), (0, 1));
    });
}

#[test]
fn each_view_hears_that_it_is_revoked_and_no_other_does() {
    let folder = Folder::new();
    explore(move || {
        let exporter = begin(&folder);
        let tickets: Arc<[_]> = (0..2).map(|number| share(&exporter, number)).collect();
        let views = [0, 1].map(|share: usize| surely(&tickets[share]));
        let asks = {
            let tickets = Arc::clone(&tickets);
            thread::spawn(move || drop(perhaps(&tickets[1])))
        };
        exporter.revoke(&tickets[0]).unwrap();
        until(|| views[0].check().is_err());
        views[1].check().unwrap();
        asks.join().unwrap();
        views[1].check().unwrap();
    });
}

/// The fork loses the threads of its parent where they wait, with the locks that they hold. It opens tickets for
/// itself, and messages for its parent stay for the parent.
#[test]
fn a_fork_waits_for_no_lost_thread_and_takes_nothing() {
    let folder = Folder::new();
    explore(move || {
        let exporter = begin(&folder);
        let tickets: Arc<[_]> = (0..2).map(|number| share(&exporter, number)).collect();
        let views = Arc::new([0, 1].map(|share: usize| surely(&tickets[share])));
        let has_asked = Arc::new(AtomicBool::new(false));
        let asks = {
            let tickets = Arc::clone(&tickets);
            let has_asked = Arc::clone(&has_asked);
            thread::spawn(move || {
                drop(perhaps(&tickets[1]));
                has_asked.store(true, Relaxed);
            })
        };
        let (has_forked, is_revoked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let forks = {
            let (tickets, views) = (Arc::clone(&tickets), Arc::clone(&views));
            let (has_forked, is_revoked) = (Arc::clone(&has_forked), Arc::clone(&is_revoked));
            thread::spawn(move || {
                fork(|| {
                    until(|| lost() == 1 || has_asked.load(Relaxed));
                    has_forked.store(true, Relaxed);
                    until(|| is_revoked.load(Relaxed));
                    views.iter().for_each(|view| view.check().unwrap());
                    assert_eq!(byte(&surely(&tickets[1])), 1);
                });
            })
        };
        until(|| has_forked.load(Relaxed));
        exporter.revoke(&tickets[0]).unwrap();
        is_revoked.store(true, Relaxed);
        [asks, forks].into_iter().for_each(|thread| thread.join().unwrap());
        until(|| views[0].check().is_err());
        views[1].check().unwrap();
    });
}

/// Versions of one name from two threads, some of them given up: in the end exactly the versions that the name stands
/// for are shared.
#[test]
fn a_put_is_listed_or_ended() {
    let folder = Folder::new();
    explore(move || {
        let exporter = begin(&folder);
        let path = folder.0.join("names");
        let names = Names::serve(&path, Settings::default()).unwrap();
        let client = Arc::new(Client::connect(&path).unwrap());
        let threads = [1, 2].map(|number| {
            let (client, exporter) = (Arc::clone(&client), Arc::clone(&exporter));
            thread::spawn(move || {
                let ticket = share(&exporter, number);
                let put = client.put_share(&exporter, "x", &ticket, 1);
                put.err().into_iter().for_each(given_up);
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // Its answer comes after those of the puts.
        let listed = loop {
            match client.list() {
                Ok(listed) => break listed.len(),
                Err(error) => given_up(error),
            }
        };
        until(|| exporter.held().shares == listed);
        drop(client);
        assert_eq!(exporter.held().shares, 0);
        drop(names);
    });
}
