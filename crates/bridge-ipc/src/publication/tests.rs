//! Versions over real connections, on the host.

use super::*;
use crate::names::Names;
use crate::settings::Settings;
use bridge_core::{DType, DeviceKind};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

const PATIENCE: Duration = Duration::from_secs(20);

/// A folder for sockets, which is removed in the end.
#[derive(Debug)]
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A connection to the names, and the part of the process that shares.
type Ends = (Arc<Client>, Arc<Exporter>);

fn published(slots: usize) -> Result<(Folder, Names, Ends, Publication)> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("truebridge-published-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Folder(std::env::temp_dir().join(name));
    std::fs::create_dir(&folder.0).unwrap();
    std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o700)).unwrap();
    let settings = Settings { folder: Some(folder.0.clone()), ..Settings::default() };
    let exporter = Arc::new(Exporter::new(settings)?);
    let names = Names::serve(&folder.0.join("names"), Settings::default())?;
    let client = Arc::new(Client::connect(&folder.0.join("names"))?);
    let specs = [(DType::FLOAT32, vec![4], Device::CPU), (DType::UINT8, vec![], Device::CPU)];
    let publication = Publication::new(&client, &exporter, "weights", (&specs, &[0, 1]), slots)?;
    Ok((folder, names, (client, exporter), publication))
}

/// Hands a draft over as one that a device has yet to finish.
fn pending_draft(publication: &Publication) -> Finishing {
    let draft = publication.draft(Duration::ZERO).unwrap();
    let mut state = publication.desk.lock();
    state.handed += 1;
    Finishing(Some((state.handed, draft)))
}

fn eventually_free(publication: &Publication, slots: usize) {
    let free = publication.desk.wait(PATIENCE, |state| (state.free.len() == slots).then_some(())).unwrap();
    assert_eq!(free, Some(()), "{} slots are free", publication.desk.lock().free.len());
}

#[test]
fn a_version_that_is_overtaken_is_left_out() {
    let (_folder, _names, (client, _exporter), publication) = published(3).unwrap();
    let [older, newer] = [(); 2].map(|()| pending_draft(&publication));
    assert_eq!(publication.settled(Duration::ZERO).unwrap(), None);
    drop(newer);
    let version = publication.settled(PATIENCE).unwrap().expect("it is announced");
    assert_eq!(version, publication.version());
    drop(older);
    eventually_free(&publication, 2);
    assert_eq!(client.newest("weights").unwrap().map(|(newest, _)| newest), Some(version), "only one was put");
}

/// As above, while the thread announces another one.
#[test]
fn a_version_that_waits_to_be_announced_is_not_replaced_by_an_older_one() {
    for is_in_order in [false, true] {
        let (_folder, _names, _ends, publication) = published(4).unwrap();
        let [first, older, newer] = [(); 3].map(|()| pending_draft(&publication));
        let turn = locked(&publication.desk.turn);
        drop(first);
        publication.desk.wait(PATIENCE, |state| state.finished.is_none().then_some(())).unwrap();
        match is_in_order {
            true => drop((older, newer)),
            false => drop((newer, older)),
        }
        drop(turn);
        assert!(publication.settled(PATIENCE).unwrap().is_some(), "the newest is announced");
        eventually_free(&publication, 3);
    }
}

#[test]
fn a_displaced_version_frees_its_slot_and_a_draft_that_is_dropped_too() {
    let (_folder, _names, (client, _exporter), publication) = published(2).unwrap();
    let mut last = 0;
    for _ in 1..5 {
        let draft = publication.draft(Duration::ZERO).unwrap();
        assert_eq!(draft.tensors().iter().map(|tensor| tensor.layout().numel()).sum::<usize>(), 5);
        let version = publication.announce(draft, None).unwrap().expect("the host is done at once");
        assert!(version > last);
        last = version;
        eventually_free(&publication, 1);
        drop(publication.draft(Duration::ZERO).unwrap());
        eventually_free(&publication, 1);
    }
    let draft = publication.draft(Duration::ZERO).unwrap();
    assert_eq!(publication.draft(Duration::ZERO).unwrap_err().kind(), ErrorKind::Busy);
    drop(draft);
    client.remove("weights").unwrap();
    eventually_free(&publication, 2);
}

#[test]
fn a_draft_of_another_publication_is_refused() {
    let (_folder, _names, _ends, publication) = published(2).unwrap();
    let (_other_folder, _other_names, _other_ends, other) = published(2).unwrap();
    let draft = other.draft(Duration::ZERO).unwrap();
    assert_eq!(publication.announce(draft, None).unwrap_err().kind(), ErrorKind::Argument);
    eventually_free(&other, 2);
    eventually_free(&publication, 2);
}

#[test]
fn a_version_has_the_elements_and_the_tree_that_it_was_announced_with() {
    let start = |tensor: &IpcTensor| std::ptr::with_exposed_provenance_mut::<u8>(tensor.data());
    // SAFETY: the tensor is compact, and no other thread uses it.
    let fill = |tensor: &IpcTensor, byte| unsafe { start(tensor).write_bytes(byte, tensor.layout().nbytes()) };
    // SAFETY: as above.
    let read =
        |tensor: &IpcTensor| unsafe { std::slice::from_raw_parts(start(tensor), tensor.layout().nbytes()) }.to_vec();
    let (_folder, _names, (client, _exporter), publication) = published(2).unwrap();
    for (number, tree) in [(1, "[0,1]"), (2, "{\"a\":0,\"b\":1}")] {
        let draft = publication.draft(PATIENCE).unwrap();
        for (index, tensor) in draft.tensors().iter().enumerate() {
            fill(tensor, 10 * number + index as u8);
        }
        publication.announce(draft, Some(tree.into())).unwrap();
        let (_, ticket) = client.newest("weights").unwrap().unwrap();
        let opened = crate::open(&ticket).unwrap();
        let bytes: Vec<_> = opened.tensors.iter().map(read).collect();
        assert_eq!(bytes, [vec![10 * number; 16], vec![10 * number + 1]]);
        assert_eq!(opened.tree.as_deref(), Some(tree));
    }
}

/// Other processes may still read what a store had passed on when it was killed.
#[test]
fn a_slot_that_a_store_has_is_replaced_and_not_written_again() {
    let (_folder, _names, _ends, publication) = published(2).unwrap();
    let drafts = [(); 2].map(|()| publication.draft(Duration::ZERO).unwrap());
    let old = drafts.each_ref().map(|draft| draft.slot.clone().unwrap());
    for draft in drafts {
        draft.outside.store(1, Ordering::Relaxed);
        drop(draft);
    }
    let again = [(); 2].map(|()| publication.draft(Duration::ZERO).unwrap());
    let is_old = |draft: &Draft| old.iter().any(|slot| Arc::ptr_eq(slot, draft.slot.as_ref().unwrap()));
    assert!(!again.iter().any(is_old));
    assert_eq!(publication.draft(Duration::ZERO).unwrap_err().kind(), ErrorKind::Busy, "as many as before");
}

#[test]
fn a_version_that_cannot_be_announced_is_an_error_of_the_next_call() {
    let (_folder, names, _client_and_exporter, publication) = published(2).unwrap();
    let draft = pending_draft(&publication);
    drop(names);
    drop(draft);
    assert_eq!(publication.settled(PATIENCE).unwrap_err().kind(), ErrorKind::Gone);
    assert_eq!(publication.settled(Duration::ZERO).unwrap(), Some(0), "it is told once");
    eventually_free(&publication, 2);
}

#[test]
fn nothing_is_announced_after_the_end() {
    let (_folder, _names, (client, _exporter), publication) = published(2).unwrap();
    let draft = pending_draft(&publication);
    let desk = Arc::clone(&publication.desk);
    drop(publication);
    drop(draft);
    assert_eq!(desk.lock().free.len(), 2);
    assert_eq!(client.newest("weights").unwrap(), None);
}

#[test]
fn the_end_of_the_connection_ends_what_was_published() {
    let (_folder, names, (client, exporter), publication) = published(2).unwrap();
    publication.announce(publication.draft(PATIENCE).unwrap(), None).unwrap();
    assert_eq!(exporter.held().shares, 1);
    drop(client);
    assert_eq!(exporter.held().shares, 0);
    let draft = publication.draft(PATIENCE).unwrap();
    assert_eq!(publication.announce(draft, None).unwrap_err().kind(), ErrorKind::Gone);
    eventually_free(&publication, 2);
    drop((names, exporter));
}

/// A thread waits for a slot meanwhile.
#[test]
fn the_end_of_a_publication_ends_its_waits() {
    let (_folder, _names, _ends, publication) = published(2).unwrap();
    let drafts = [(); 2].map(|()| publication.draft(Duration::ZERO).unwrap());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| publication.draft(PATIENCE).map(drop).map_err(|error| error.kind()));
        std::thread::sleep(Duration::from_millis(20));
        publication.close();
        assert_eq!(waiting.join().unwrap(), Err(ErrorKind::Gone));
    });
    let [one, _] = drafts;
    assert_eq!(publication.announce(one, None).unwrap_err().kind(), ErrorKind::Gone);
}

#[test]
fn what_cannot_be_published_is_refused() {
    assert_eq!(published(1).unwrap_err().kind(), ErrorKind::Argument);
    let (_folder, _names, (client, exporter), _publication) = published(2).unwrap();
    for (name, device, kind) in
        [("", Device::CPU, ErrorKind::Argument), ("x", Device { kind: DeviceKind(8), index: 0 }, ErrorKind::Device)]
    {
        let specs = [(DType::FLOAT32, vec![4], device)];
        let refused = Publication::new(&client, &exporter, name, (&specs, &[0]), 2);
        assert_eq!(refused.unwrap_err().kind(), kind);
    }
    let specs = [(DType::FLOAT32, vec![4], Device::CPU)];
    for (specs, places) in [(&specs[..0], &[][..]), (&specs, &[]), (&specs, &[0, 7]), (&specs[..0], &[0])] {
        let refused = Publication::new(&client, &exporter, "x", (specs, places), 2);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Argument, "{places:?}");
    }
}

/// A thread of the parent holds the lock, which nothing unlocks in the fork.
#[test]
fn a_forked_process_publishes_nothing() {
    let (_folder, _names, _ends, publication) = published(2).unwrap();
    let draft = publication.draft(Duration::ZERO).unwrap();
    let held = publication.desk.lock();
    // SAFETY: the child takes no lock of another thread, and ends.
    let fork = unsafe { libc::fork() };
    if fork == 0 {
        // SAFETY: it ends a child that waits.
        unsafe { libc::alarm(20) };
        let is_refused = publication.draft(Duration::ZERO).is_err_and(|error| error.kind() == ErrorKind::Gone);
        drop(draft);
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to the status.
    assert_eq!(unsafe { libc::waitpid(fork, &mut status, 0) }, fork);
    assert_eq!(status, 0);
    drop(held);
    drop(draft);
    assert_eq!(publication.desk.lock().free.len(), 2);
}
