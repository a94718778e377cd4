//! Counts under many threads, in their own process, because the counts are those of the process.

#[allow(dead_code)]
#[path = "contract/common.rs"]
mod common;

use bridge_core::{Adapter, Device, Options, Ordering, Strides, stats, transfer, transfer_all};
use common::{Event, Item, Office, Paper, Recorder};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;

/// Admits one test at a time: the counts are those of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn no_lease_is_lost_from_the_counts() {
    const THREADS: usize = 8;
    const LEASES: usize = 20_000;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = stats();
    let start = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let ordering: Arc<dyn Ordering> = Arc::new(Recorder::default());
                let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
                let paper = Paper { device: Device::CPU, stream: None, ..Paper::new(&Default::default()) };
                let item = Item::Own(paper);
                start.wait();
                for _ in 0..LEASES {
                    drop(transfer(&from, &to, &item, &ordering, &Options::default()).expect("it converts"));
                }
            });
        }
    });
    let after = stats();
    let leases = (THREADS * LEASES) as u64;
    assert_eq!((after.leased - before.leased, after.released - before.released), (leases, leases));
    assert_eq!(after.leaked, before.leaked);
}

#[test]
fn views_of_many_threads_all_leave() {
    const THREADS: usize = 8;
    const VIEWS: usize = 2_000;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let to = Office::new(Strides::Any);
    let (side, start) = (to.side.clone(), Barrier::new(THREADS));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (side, start) = (side.clone(), &start);
            scope.spawn(move || {
                let ordering: Arc<dyn Ordering> = Arc::new(Recorder::default());
                let from = Office::new(Strides::Any);
                let to = Office { side, ..Office::new(Strides::Any) };
                let log = Default::default();
                start.wait();
                for number in 0..VIEWS {
                    // Half of the addresses are the thread's own, all threads share the others.
                    let address = 0x10000 * (1 + number % 2 * (thread + 1)) + number % 7 * 0x100;
                    let item = Item::Own(Paper { address, ..Paper::new(&log) });
                    let view = transfer(&from, &to, &item, &ordering, &Options::default()).expect("it converts").0;
                    assert!(to.side.used(address, common::OTHER, || None) > 0);
                    drop(view);
                }
            });
        }
    });
    assert!(side.views.is_empty());
}

#[test]
fn leases_of_a_batch_dropped_on_many_threads_all_return() {
    const THREADS: usize = 4;
    const LEASES: usize = 64;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = stats();
    for _ in 0..500 {
        let recorder = Arc::new(Recorder::default());
        let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
        let items: Vec<Item> = (0..LEASES)
            .map(|i| Item::Own(Paper { address: 0x1000 + i * 0x100, ..Paper::new(&recorder.log) }))
            .collect();
        let tensors: Vec<(&dyn Adapter<Tensor = Item>, _)> = items.iter().map(|item| (&from as _, item)).collect();
        let ordering: Arc<dyn Ordering> = recorder.clone();
        let converted = transfer_all(&tensors, &to, &ordering, &Options::default());
        let mut views = converted.map_err(|failed| failed.error.to_string()).expect("they convert").into_iter();
        let start = Barrier::new(THREADS + 1);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                let (start, share): (_, Vec<_>) = (&start, views.by_ref().take(LEASES / THREADS).collect());
                scope.spawn(move || {
                    start.wait();
                    drop(share);
                });
            }
            start.wait();
            // The flushes that were to be called later, in the midst of the drops.
            for _ in 0..20 {
                let due = std::mem::take(&mut *recorder.flushes.lock().unwrap());
                due.into_iter().for_each(|flush| flush());
                thread::yield_now();
            }
        });
        let dropped = recorder.log.lock().unwrap().iter().filter(|event| **event == Event::Dropped).count();
        assert_eq!(dropped, LEASES);
        assert!(to.side.views.is_empty());
    }
    let after = stats();
    assert_eq!(after.leased - before.leased, after.released - before.released);
    assert_eq!(after.leaked, before.leaked);
}
