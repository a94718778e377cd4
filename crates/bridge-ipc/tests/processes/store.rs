//! A store: what is put there outlives the process that has put it, and the store itself.

use super::child::{ipc, read, seen};
use super::{Folder, LONG, PATIENCE, host, share};
use bridge_core::{Adapter, DType, Device, ErrorKind, Options};
use bridge_ipc::{Client, Exporter, IpcTensor, Limits, Message, Names, Settings, Ticket, Writing, empty, open};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store, and what its successor needs.
struct Store {
    folder: Folder,
    names: Option<Names>,
    limits: Limits,
}

impl Store {
    fn new(bytes: usize) -> Self {
        let folder = Folder::new();
        std::fs::create_dir(folder.path()).unwrap();
        let mut store = Self { folder, names: None, limits: Limits::default().with_bytes(bytes) };
        store.start();
        store
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("names")
    }

    /// Ends the store, if there is one, and starts another at its path.
    fn start(&mut self) {
        self.names = None;
        let settings = Settings::default().with_limits(self.limits);
        self.names = Some(Names::persistent(&self.path(), settings).unwrap());
    }

    fn connect(&self) -> Client {
        Client::connect(&self.path()).unwrap()
    }
}

fn put(client: &Client, exporter: &Arc<Exporter>, bytes: Vec<u8>, keep: u64) -> bridge_core::Result<u64> {
    let ticket = share(exporter, bytes, Writing::Private, LONG).unwrap();
    client.put_share(exporter, "weights", &ticket, keep)
}

fn digits(client: &Client, version: Option<u64>) -> String {
    read(&open(&client.get("weights", version).unwrap().1).unwrap().tensors[0]).unwrap()
}

/// Waits until something is so.
fn until(what: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < end, "it takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_put_outlives_its_connection_and_its_exporter() {
    let store = Store::new(1 << 20);
    let reader = store.connect();
    let (sharing, writer) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let version = put(&writer, &exporter, vec![1, 2, 3], 1).unwrap();
    assert_eq!(exporter.held().leases, 1, "the store has it");
    drop((writer, exporter));
    assert_eq!(reader.get("weights", None).unwrap().0, version);
    let opened = open(&reader.get("weights", None).unwrap().1).unwrap();
    assert_eq!(read(&opened.tensors[0]).unwrap(), "123");
    assert_eq!((reader.about().unwrap().persistent, reader.about().unwrap().nbytes), (true, 64));
    reader.remove("weights").unwrap();
    opened.tensors[0].check().unwrap();
    assert_eq!(read(&opened.tensors[0]).unwrap(), "123", "what is open stays");
    drop(opened);
    until(|| reader.about().unwrap().nbytes == 0);
}

#[test]
fn a_newer_version_displaces_an_older_one_and_its_share() {
    let store = Store::new(1 << 20);
    let (sharing, writer) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let versions: Vec<u64> = (1..=4).map(|digit| put(&writer, &exporter, vec![digit], 2).unwrap()).collect();
    assert!(versions.is_sorted());
    assert_eq!((digits(&writer, None), digits(&writer, Some(versions[2]))), ("4".into(), "3".into()));
    assert_eq!(writer.get("weights", Some(versions[1])).unwrap_err().kind(), ErrorKind::Gone);
    until(|| exporter.held().shares == 2 && exporter.held().leases == 2 && writer.about().unwrap().nbytes == 128);
}

#[test]
fn the_next_store_is_handed_what_the_writer_has_put() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, reader) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let versions: Vec<u64> = (1..=2).map(|digit| put(&writer, &exporter, vec![digit], 2).unwrap()).collect();
    assert!(reader.is_persistent().unwrap());
    for _ in 0..3 {
        store.start();
        until(|| reader.get("weights", Some(versions[0])).is_ok() && reader.get("weights", Some(versions[1])).is_ok());
        assert_eq!((digits(&reader, None), digits(&reader, Some(versions[0]))), ("2".into(), "1".into()));
    }
    assert!(put(&writer, &exporter, vec![3], 1).unwrap() > versions[1]);
    assert_eq!(digits(&reader, None), "3");
    until(|| exporter.held().shares == 1 && writer.about().unwrap().nbytes == 64);
}

#[test]
fn the_next_store_is_handed_what_a_reader_has_open() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, readers) = (Folder::new(), store.connect(), [store.connect(), store.connect()]);
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let version = put(&writer, &exporter, vec![1, 2, 3], 1).unwrap();
    let opened = readers.each_ref().map(|reader| open(&reader.get("weights", None).unwrap().1).unwrap());
    drop((writer, exporter));
    for _ in 0..3 {
        store.start();
        opened.iter().for_each(|opened| opened.tensors[0].check().unwrap());
        let late = store.connect();
        until(|| late.get("weights", None).is_ok());
        assert_eq!((late.get("weights", None).unwrap().0, digits(&late, None)), (version, "123".into()));
        until(|| late.about().unwrap().nbytes == 64);
    }
}

#[test]
fn what_was_removed_or_displaced_is_not_handed_over() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, reader) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    put(&writer, &exporter, vec![1], 1).unwrap();
    let _old = open(&reader.get("weights", None).unwrap().1).unwrap();
    let version = put(&writer, &exporter, vec![2], 1).unwrap();
    let _new = open(&reader.get("weights", None).unwrap().1).unwrap();
    store.start();
    until(|| reader.get("weights", Some(version)).is_ok());
    store.start();
    until(|| reader.get("weights", Some(version)).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(reader.about().unwrap().nbytes, 64, "the displaced one is not kept again");
    reader.remove("weights").unwrap();
    store.start();
    until(|| reader.list().is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(reader.list().unwrap(), []);
    assert_eq!((writer.about().unwrap().nbytes, exporter.held().shares), (0, 0));
}

/// It was displaced at the last store, although no process is left that has put another.
#[test]
fn a_reader_does_not_hand_over_what_was_displaced() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, reader) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    put(&writer, &exporter, vec![1], 1).unwrap();
    let _old = open(&reader.get("weights", None).unwrap().1).unwrap();
    let version = put(&writer, &exporter, vec![2], 1).unwrap();
    let _new = open(&reader.get("weights", None).unwrap().1).unwrap();
    drop((writer, exporter));
    store.start();
    // It would have handed over the older one first.
    until(|| reader.get("weights", Some(version)).is_ok());
    assert_eq!(reader.about().unwrap().nbytes, 64);
}

/// What a connection has found is handed over by each of the process, also after that one was dropped. What was found
/// is remembered until it is opened, and forgotten with its name.
#[test]
fn readers_hand_over_all_that_they_have_open() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, readers) = (Folder::new(), store.connect(), [store.connect(), store.connect()]);
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let names = ["one", "other"];
    for name in names {
        let ticket = share(&exporter, vec![7], Writing::Never, LONG).unwrap();
        writer.put_share(&exporter, name, &ticket, 1).unwrap();
    }
    assert!(readers[1].is_persistent().unwrap());
    let found = names.map(|name| readers[0].get(name, None).unwrap().1);
    let _opened = found.map(|ticket| open(&ticket).unwrap());
    let [first, second] = readers;
    drop((writer, exporter, first));
    let listed = || second.list().map_or(Vec::new(), |names| names.into_iter().map(|listed| listed.name).collect());
    store.start();
    until(|| listed() == names);
    second.remove("one").unwrap();
    store.start();
    until(|| !listed().is_empty());
    assert_eq!(listed(), ["other"]);
}

/// For the next store: memory that this one persistent needs no other process, and is passed on in place.
#[test]
fn what_is_stored_outlives_the_process_that_has_opened_it() {
    let store = Store::new(1 << 20);
    let (sharing, client) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let ticket = share(&exporter, vec![1, 2, 3], Writing::Never, LONG).unwrap();
    client.put_share(&exporter, "weights", &ticket, 1).unwrap();
    let kept = client.get("weights", None).unwrap().1;
    let copied = |ticket: &Ticket| {
        let opened = open(ticket).unwrap();
        let leaves: &[(&dyn Adapter<Tensor = _>, _)] = &[(&ipc(), &opened.tensors[0])];
        let message = Message::outliving(leaves, Some(Writing::Never), &host(), &Options::default()).unwrap();
        message.transfers()[0].bytes_copied
    };
    assert_eq!((copied(&ticket), copied(&kept)), (3, 0));
}

/// One piece of memory for each call, as long as each process that opens it writes for itself.
#[test]
fn memory_that_was_made_for_a_store_is_taken_as_it_is() {
    let sharing = Folder::new();
    let exporter = sharing.exporter(Limits::default());
    let specs = [(DType::UINT8, vec![3], Device::CPU), (DType::FLOAT32, vec![2, 2], Device::CPU)];
    // SAFETY: it is memory of the host, of zeros.
    let [tensors, others] = [(); 2].map(|()| unsafe { empty(&specs) }.unwrap());
    for (tensor, spec) in tensors.iter().zip(&specs) {
        assert_eq!((tensor.dtype(), tensor.layout().shape(), tensor.device()), (spec.0, &spec.1[..], spec.2));
    }
    let message = |tensors: &[&IpcTensor], writing| {
        let from = ipc();
        let leaves: Vec<(&dyn Adapter<Tensor = IpcTensor>, &IpcTensor)> =
            tensors.iter().map(|tensor| (&from as _, *tensor)).collect();
        Message::outliving(&leaves, writing, &host(), &Options::default()).unwrap()
    };
    for (writing, copied) in
        [(None, 0), (Some(Writing::Private), 0), (Some(Writing::Never), 3), (Some(Writing::Shared), 3)]
    {
        assert_eq!(message(&[&tensors[0]], writing).transfers()[0].bytes_copied, copied, "{writing:?}");
    }
    let ticket = message(&[&tensors[0], &others[0], &tensors[1]], None).share(&exporter, LONG, None).unwrap();
    for (tensor, digit) in [(&tensors[0], 1), (&others[0], 2)] {
        let mut array = seen(tensor).unwrap();
        // SAFETY: the view is writable, and no other thread uses the memory.
        unsafe { array.view_mut::<u8>().unwrap() }.fill(digit);
    }
    let opened = open(&ticket).unwrap().tensors;
    assert_eq!((read(&opened[0]).unwrap(), read(&opened[1]).unwrap()), ("111".into(), "222".into()));
    assert_eq!(seen(&opened[2]).unwrap().to_array::<f32>().unwrap().shape(), [2, 2]);
}

#[test]
fn a_watch_goes_on_with_the_next_store() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, reader) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let first = put(&writer, &exporter, vec![1], 1).unwrap();
    let watch = reader.watch("weights", first).unwrap();
    store.names = None;
    assert_eq!(watch.wait(Duration::from_millis(50)).unwrap(), None);
    assert_eq!(reader.list().unwrap_err().kind(), ErrorKind::Gone);
    store.start();
    let second = put(&writer, &exporter, vec![2], 1).unwrap();
    assert_eq!(watch.wait(PATIENCE).unwrap().map(|(version, _)| version), Some(second));
    let watch = reader.watch("weights", second).unwrap();
    store.start();
    let third = put(&writer, &exporter, vec![3], 1).unwrap();
    assert_eq!(watch.wait(PATIENCE).unwrap().map(|(version, _)| version), Some(third));
}

#[test]
fn a_store_has_no_more_than_its_bytes() {
    let store = Store::new(128);
    let (sharing, writer) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    put(&writer, &exporter, vec![1; 64], 1).unwrap();
    assert_eq!(put(&writer, &exporter, vec![1; 65], 1).unwrap_err().kind(), ErrorKind::OutOfMemory);
    until(|| exporter.held().shares == 1);
    assert_eq!((digits(&writer, None).len(), writer.about().unwrap().limit), (64, 128));
    put(&writer, &exporter, vec![2; 64], 1).unwrap();
}

#[test]
fn a_store_refuses_a_ticket_that_opens_nothing() {
    let store = Store::new(1 << 20);
    let (sharing, writer) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    exporter.revoke(&ticket).unwrap();
    assert_eq!(writer.put("weights", &ticket, 1).unwrap_err().kind(), ErrorKind::Gone);
    drop(exporter);
    assert_eq!(writer.put("weights", &ticket, 1).unwrap_err().kind(), ErrorKind::Gone);
    assert_eq!(writer.list().unwrap(), []);
}

/// A process that shares and does not answer delays only its own connection.
#[test]
fn a_slow_process_does_not_hold_up_others() {
    let store = Store::new(1 << 20);
    let (sharing, slow, quick) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let silent = sharing.path().join("silent");
    let _listener = UnixListener::bind(&silent).unwrap();
    let text = share(&exporter, vec![1], Writing::Private, LONG).unwrap().text();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ticket = text.replace(value["socket"].as_str().unwrap(), silent.to_str().unwrap()).parse().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| slow.put("silent", &ticket, 1).unwrap_err().kind());
        put(&quick, &exporter, vec![1], 1).unwrap();
        assert!(!waits.is_finished(), "it waits for five seconds");
        assert_eq!(waits.join().unwrap(), ErrorKind::Busy);
    });
    assert_eq!(slow.list().unwrap().len(), 1, "the connection goes on");
}

#[test]
fn memory_under_two_names_counts_once() {
    let store = Store::new(128);
    let (sharing, writer) = (Folder::new(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    let ticket = share(&exporter, vec![1; 128], Writing::Private, LONG).unwrap();
    for name in ["one", "other"] {
        writer.put(name, &ticket, 1).unwrap();
        assert_eq!(writer.about().unwrap().nbytes, 128);
    }
    writer.remove("one").unwrap();
    assert_eq!(writer.about().unwrap().nbytes, 128);
    writer.remove("other").unwrap();
    until(|| writer.about().unwrap().nbytes == 0);
}

#[test]
fn a_watch_that_begins_between_two_stores_waits() {
    let mut store = Store::new(1 << 20);
    let (sharing, writer, reader) = (Folder::new(), store.connect(), store.connect());
    let exporter = Arc::new(sharing.exporter(Limits::default()));
    assert!(reader.is_persistent().unwrap());
    store.names = None;
    let watch = reader.watch("weights", 0).unwrap();
    assert_eq!(watch.wait(Duration::from_millis(30)).unwrap(), None);
    assert!(writer.is_persistent().is_err());
    store.start();
    let writer = store.connect();
    let version = put(&writer, &exporter, vec![1], 1).unwrap();
    assert_eq!(watch.wait(PATIENCE).unwrap().map(|(found, _)| found), Some(version));
}
