//! Counts under many threads, in a process of their own, because the counts are those of the process.

#[allow(dead_code)]
#[path = "contract/common.rs"]
mod common;

use bridge_core::{Device, Options, Ordering, Strides, stats, transfer};
use common::{Item, Office, Paper, Recorder};
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
                    drop(transfer(&from, &to, &item, &ordering, &Options::default()).expect("it crosses"));
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
                    let view = transfer(&from, &to, &item, &ordering, &Options::default()).expect("it crosses").0;
                    assert!(to.side.views.used(common::GPU, address, common::OTHER, || None) > 0);
                    drop(view);
                }
            });
        }
    });
    assert!(side.views.is_empty());
}
