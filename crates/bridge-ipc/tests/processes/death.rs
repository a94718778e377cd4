//! What others may do, and what is left when a process dies.

use super::child::{Child, ipc, is_gone, read, runs_alone, seen};
use super::{Folder, LONG, PATIENCE, host, share, wait_for};
use bridge_core::{
    Access, Adapter, Allocation, COPY_ALIGNMENT, DType, ErrorKind, Export, Layout, Memory, Options, Order, Permutation,
    copy_into,
};
use bridge_ipc::{Held, Ipc, Limits, Message, Ticket, Transport, Writing, check, is_leasing, open, transport};
use bridge_ndarray::{HostArray, NdArray};
use ndarray::array;
use std::time::{Duration, Instant, SystemTime};

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

#[test]
fn another_process_reads_in_place_and_gives_back() {
    let folder = Folder::new();
    let (exporter, mut child) = (folder.exporter(Limits::default()), Child::new(folder.path()));
    let ticket = share(&exporter, vec![1, 2, 3], Writing::Private, LONG).unwrap();
    assert_eq!(ticket.to_string(), "ndarray uint8 [3] on cpu, expires in 3600 s");
    for _ in 0..3 {
        assert_eq!(child.ask(&format!("open {}", ticket.text())), "123");
    }
    let Held { shares, leases, connections, bytes, .. } = exporter.held();
    assert_eq!((shares, leases, connections, bytes), (1, 3, 1, 64));
    for lease in 0..3 {
        child.ask(&format!("drop {lease}"));
    }
    wait_for(&exporter, |held| held.leases == 0);
    exporter.revoke(&ticket).unwrap();
    assert_eq!(exporter.held().shares, 0);
    assert_eq!(child.ask(&format!("open {}", ticket.text())), "Gone");
}

#[test]
fn a_view_keeps_the_lease_and_the_memory() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1, 2, 3], Writing::Private, LONG).unwrap();
    let view = seen(&open(&ticket).unwrap().tensors[0]).unwrap();
    exporter.revoke(&ticket).unwrap();
    // The lease would be back before the answer to a later question.
    let other = share(&exporter, vec![0], Writing::Private, LONG).unwrap();
    drop(open(&other).unwrap());
    wait_for(&exporter, |held| held.leases <= 1);
    assert_eq!((exporter.held().shares, exporter.held().leases), (2, 1));
    assert_eq!(view.to_array::<u8>().unwrap().as_slice(), Some(&[1, 2, 3][..]));
    drop(view);
    wait_for(&exporter, |held| (held.shares, held.leases) == (1, 0));
}

#[test]
fn writes_are_seen_as_the_share_says() {
    let folder = Folder::new();
    let (exporter, mut child) = (folder.exporter(Limits::default()), Child::new(folder.path()));
    let table =
        [(Writing::Private, "written", "12"), (Writing::Never, "ReadOnly", "12"), (Writing::Shared, "written", "99")];
    for (lease, (writing, answer, left)) in table.into_iter().enumerate() {
        let ticket = share(&exporter, vec![1, 2], writing, LONG).unwrap();
        let own = &open(&ticket).unwrap().tensors[0];
        assert_eq!(own.access() == Access::ReadOnly, writing == Writing::Never);
        assert_eq!(ipc().overwritten(own).is_err(), writing == Writing::Never);
        let passed = if writing == Writing::Private { Transport::Copy } else { Transport::Passed };
        assert_eq!(transport(&ipc(), own, Some(writing)).unwrap(), passed, "{writing:?}");
        child.ask(&format!("open {}", ticket.text()));
        assert_eq!(child.ask(&format!("write {lease}")), answer, "{writing:?}");
        assert_eq!(read(own).unwrap(), left, "{writing:?}");
    }
}

#[test]
fn a_killed_reader_has_no_lease_within_a_second() {
    let folder = Folder::new();
    let (exporter, mut child) = (folder.exporter(Limits::default()), Child::new(folder.path()));
    let ticket = share(&exporter, vec![7], Writing::Private, LONG).unwrap();
    child.ask(&format!("open {}", ticket.text()));
    child.kill();
    let start = Instant::now();
    wait_for(&exporter, |held| (held.leases, held.connections) == (0, 0));
    println!("free after {:?}", start.elapsed());
}

#[test]
fn what_a_dead_process_shared_is_gone_and_no_crash() {
    let folder = Folder::new();
    let mut child = Child::new(folder.path());
    let ticket: Ticket = child.ask("share 456").parse().unwrap();
    let opened = open(&ticket).unwrap();
    let (tensor, view) = (&opened.tensors[0], seen(&opened.tensors[0]).unwrap());
    assert_eq!(read(tensor).unwrap(), "456");
    child.kill();
    let start = Instant::now();
    while !is_gone(tensor) {
        assert!(start.elapsed() < PATIENCE);
    }
    assert_eq!(view.to_array::<u8>().unwrap().as_slice(), Some(&[4, 5, 6][..]), "a view that is there can be read");
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Gone);
    // The socket of a killed process is removed by the next one.
    let exporter = folder.exporter(Limits::default());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    drop(exporter);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_ended_share_stays_with_its_readers() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1, 2], Writing::Private, LONG).unwrap();
    let tensor = open(&ticket).unwrap().tensors.remove(0);
    exporter.end(&ticket).unwrap();
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Gone);
    // The answer came after any notice about the share.
    tensor.check().unwrap();
    assert_eq!(exporter.held().shares, 1);
    drop(tensor);
    wait_for(&exporter, |held| held.shares == 0);
    let own = folder.exporter(Limits::default());
    assert_eq!(own.end(&ticket).unwrap_err().kind(), ErrorKind::Argument);
}

#[test]
fn a_revoked_share_is_said_to_be_gone() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    let tensor = open(&ticket).unwrap().tensors.remove(0);
    tensor.check().unwrap();
    exporter.revoke(&ticket).unwrap();
    let start = Instant::now();
    while !is_gone(&tensor) {
        assert!(start.elapsed() < PATIENCE);
    }
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Gone);
    // It is kept until it is returned.
    assert_eq!(exporter.held().shares, 1);
    drop(tensor);
    wait_for(&exporter, |held| held.shares == 0);
}

/// Returns bytes at these addresses, which no code reads.
fn bytes_at(start: usize, end: usize) -> Export {
    let layout = Layout::new(DType::UINT8, &[(end - start) as i64], None, 0).unwrap();
    // SAFETY: nothing reads the memory, which may not exist.
    let memory = unsafe { Memory::new(Allocation::host(start..end, Access::ReadOnly), ()) };
    Export::new(DType::UINT8, layout, memory).unwrap()
}

/// A tensor of any framework lies in the memory of a share if all of its elements do.
#[test]
fn memory_of_another_process_is_found_by_its_addresses() {
    if runs_alone() {
        return;
    }
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let ticket = share(&exporter, vec![7; 64], Writing::Shared, LONG).unwrap();
    assert_eq!((exporter.held().bytes, is_leasing()), (64, false));
    let opened = open(&ticket).unwrap();
    assert!(is_leasing());
    exporter.revoke(&ticket).unwrap();
    let (start, begin) = (opened.tensors[0].data(), Instant::now());
    while !is_gone(&opened.tensors[0]) {
        assert!(begin.elapsed() < PATIENCE);
    }
    for (from, to, is_there) in [(0, 64, true), (63, 64, true), (63, 65, false), (64, 65, false), (8, 8, false)] {
        let found = check(&bytes_at(start + from, start + to)).map_err(|error| error.kind());
        assert_eq!(found, if is_there { Err(ErrorKind::Gone) } else { Ok(()) }, "{from}..{to}");
    }
    assert_eq!(check(&bytes_at(start - 1, start + 1)).map_err(|error| error.kind()), Ok(()));
    drop(opened);
    assert!(!is_leasing(), "what was dropped is not remembered");
}

/// Memory that all may write to is mapped once, whatever tickets it has.
#[test]
fn memory_with_several_leases_is_good_as_long_as_one_of_them_is() {
    for revoked in [0, 1] {
        let folder = Folder::new();
        let exporter = folder.exporter(Limits::default());
        let first = share(&exporter, vec![7; 64], Writing::Shared, LONG).unwrap();
        let tensor = &open(&first).unwrap().tensors[0];
        let message = Message::of(&[(&ipc(), tensor)], Some(Writing::Shared), &host(), &Options::default()).unwrap();
        assert_eq!(message.transfers()[0].bytes_copied, 0);
        let second = message.share(&exporter, LONG, None).unwrap();
        let again = &open(&second).unwrap().tensors[0];
        assert_eq!(again.data(), tensor.data());
        let (tickets, tensors) = ([&first, &second], [tensor, again]);
        let check = || check(&bytes_at(tensor.data(), tensor.data() + 1)).map_err(|error| error.kind());
        for (number, left) in [(revoked, Ok(())), (1 - revoked, Err(ErrorKind::Gone))] {
            exporter.revoke(tickets[number]).unwrap();
            let start = Instant::now();
            while !is_gone(tensors[number]) {
                assert!(start.elapsed() < PATIENCE);
            }
            assert_eq!(check(), left);
        }
    }
}

/// Also if the connection to another one was made meanwhile.
#[test]
fn all_leases_on_a_process_come_through_one_connection() {
    let folders = [Folder::new(), Folder::new()];
    let exporters = folders.each_ref().map(|folder| folder.exporter(Limits::default()));
    let tickets = exporters.each_ref().map(|exporter| share(exporter, vec![1], Writing::Private, LONG).unwrap());
    let _opened = [0, 1, 0, 1].map(|number| open(&tickets[number]).unwrap());
    for exporter in &exporters {
        assert_eq!((exporter.held().leases, exporter.held().connections), (2, 1));
    }
}

/// A part of a second counts as a whole one.
#[test]
fn a_ticket_expires_no_earlier_than_its_share() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    for (time, seconds) in [(LONG, 3600), (LONG + Duration::from_millis(1), 3601)] {
        let before = now();
        let text = share(&exporter, vec![1], Writing::Private, time).unwrap().text();
        let expires = serde_json::from_str::<serde_json::Value>(&text).unwrap()["expires"].as_u64().unwrap();
        assert!((before..=now()).contains(&(expires - seconds)), "{time:?}");
    }
}

#[test]
fn a_ticket_expires() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    // The thread waits for the end of this one.
    let long = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    drop(open(&long).unwrap());
    wait_for(&exporter, |held| held.connections == 0);
    let short = share(&exporter, vec![1], Writing::Private, Duration::from_millis(1)).unwrap();
    wait_for(&exporter, |held| held.shares == 1);
    assert_eq!(open(&short).err().unwrap().kind(), ErrorKind::Gone);
    exporter.revoke(&long).unwrap();
    let ticket = share(&exporter, vec![1], Writing::Private, Duration::from_millis(1)).unwrap();
    wait_for(&exporter, |held| held.shares == 0);
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Gone);
}

#[test]
fn what_was_opened_is_passed_on() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    for (writing, copied) in [(Writing::Never, "0"), (Writing::Private, "3"), (Writing::Shared, "3")] {
        let (mut first, mut second) = (Child::new(folder.path()), Child::new(folder.path()));
        let ticket = share(&exporter, vec![1, 2, 3], writing, LONG).unwrap();
        assert_eq!(first.ask(&format!("open {}", ticket.text())), "123");
        let passed = first.ask("pass 0");
        let (bytes, ticket) = passed.split_once(' ').unwrap();
        assert_eq!(bytes, copied, "bytes copied of memory that is shared as {writing:?}");
        assert_eq!(second.ask(&format!("open {ticket}")), "123");
        assert_eq!(second.ask("write 0"), "ReadOnly");
        // What is passed on in place keeps the first lease.
        first.ask("drop 0");
        let kept = usize::from(copied == "0");
        wait_for(&exporter, |held| held.leases == kept);
        first.kill();
        wait_for(&exporter, |held| held.leases == 0);
    }
}

#[test]
fn what_is_passed_on_in_another_order_is_copied() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    // SAFETY: no code writes to the memory.
    let (ipc, matrix) = (unsafe { Ipc::new() }, HostArray::from(array![[1u8, 2, 3], [4, 5, 6]]));
    let message = Message::of(&[(&ndarray(), &matrix)], Some(Writing::Never), &host(), &Options::default()).unwrap();
    let opened = open(&message.share(&exporter, LONG, None).unwrap()).unwrap();
    let transposed = Options::default().with_permute(Permutation::new(&[1, 0]).unwrap());
    for (order, copied) in [(None, 0), (Some(Order::ColumnMajor), 0), (Some(Order::RowMajor), 6)] {
        let options = transposed.with_order(order);
        let message = Message::of(&[(&ipc, &opened.tensors[0])], Some(Writing::Never), &host(), &options).unwrap();
        assert_eq!(message.transfers()[0].bytes_copied, copied, "{order:?}");
        let ticket = message.share(&exporter, LONG, None).unwrap();
        assert_eq!(ticket.to_string(), "ipc uint8 [3, 2] on cpu, expires in 3600 s");
        let array = seen(&open(&ticket).unwrap().tensors[0]).unwrap();
        assert_eq!(array.to_array::<u8>().unwrap(), array![[1, 4], [2, 5], [3, 6]].into_dyn());
    }
}

#[test]
fn memory_that_all_may_write_to_is_mapped_once() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    // SAFETY: the memory is used only on this thread.
    let ipc = unsafe { Ipc::new() };
    let ticket = share(&exporter, vec![1, 2, 3], Writing::Shared, LONG).unwrap();
    let (one, other) = (open(&ticket).unwrap(), open(&ticket).unwrap());
    let error = copy_into(&ipc, &ipc, &one.tensors[0], &other.tensors[0], &host()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Layout, "{error}");
    drop(one);
    let source = HostArray::from(vec![4u8, 5, 6]);
    copy_into(&ndarray(), &ipc, &source, &other.tensors[0], &host()).unwrap();
    // Also after it was written to.
    let third = open(&ticket).unwrap();
    assert_eq!(read(&third.tensors[0]).unwrap(), "456");
    let error = copy_into(&ipc, &ipc, &third.tensors[0], &other.tensors[0], &host()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Layout, "{error}");
    drop((other, third));
    wait_for(&exporter, |held| held.leases == 0);
    assert_eq!(read(&open(&ticket).unwrap().tensors[0]).unwrap(), "456");
}

#[test]
fn a_message_of_many_tensors_takes_one_piece_of_memory() {
    let folder = Folder::new();
    let exporter = folder.exporter(Limits::default());
    let arrays: Vec<_> = (0..300u32).map(|i| HostArray::from(vec![i; i as usize % 7])).collect();
    let from = ndarray();
    let leaves: Vec<(&dyn Adapter<Tensor = HostArray>, &HostArray)> =
        arrays.iter().map(|array| (&from as _, array)).collect();
    let message = Message::of(&leaves, Some(Writing::Private), &host(), &Options::default()).unwrap();
    let room: usize = arrays.iter().map(|array| array.layout().nbytes().next_multiple_of(COPY_ALIGNMENT)).sum();
    let ticket = message.share(&exporter, LONG, Some("a list".into())).unwrap();
    assert_eq!(exporter.held().bytes, room);
    let opened = open(&ticket).unwrap();
    assert_eq!((opened.tensors.len(), opened.tree.as_deref()), (300, Some("a list")));
    for (i, tensor) in opened.tensors.iter().enumerate() {
        assert_eq!(
            seen(tensor).unwrap().to_array::<u32>().unwrap().iter().copied().collect::<Vec<_>>(),
            vec![i as u32; i % 7],
            "{i}"
        );
        assert_eq!(tensor.data() % 64, 0);
    }
}

#[test]
fn limits_are_errors() {
    let folder = Folder::new();
    let limits = Limits::default().with_shares(2).with_leases(2).with_bytes(1 << 10);
    let exporter = folder.exporter(limits);
    let kind = |bytes: usize| share(&exporter, vec![0; bytes], Writing::Private, LONG).err().map(|error| error.kind());
    assert_eq!(kind(2 << 10), Some(ErrorKind::Busy));
    let ticket = share(&exporter, vec![1], Writing::Private, LONG).unwrap();
    assert_eq!(kind(64), None);
    assert_eq!(kind(0), Some(ErrorKind::Busy), "two shares");
    let leases = [open(&ticket).unwrap(), open(&ticket).unwrap()];
    assert_eq!(open(&ticket).err().unwrap().kind(), ErrorKind::Busy);
    drop(leases);
    wait_for(&exporter, |held| held.leases == 0);
    open(&ticket).unwrap();
}

#[test]
fn a_copy_is_refused_where_none_may_be_made() {
    let options = Options::in_place();
    let (from, array) = (ndarray(), HostArray::from(vec![1u8]));
    let refused = Message::of(&[(&from, &array)], Some(Writing::Private), &host(), &options).err().unwrap();
    assert_eq!((refused.index, refused.error.kind()), (0, ErrorKind::CopyNeeded));
}
