//! Models of views, groups and release, which shuttle runs under many schedules: see `cargo xtask audit`.

#![cfg(shuttle)]

#[allow(dead_code)]
#[path = "contract/clocks.rs"]
mod clocks;
#[allow(dead_code)]
#[path = "contract/common.rs"]
mod common;

use bridge_core::{Reuse, Stream, explore};
use clocks::Batch;
use common::{OTHER, OWNER, READER};
use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use shuttle::thread;
use std::sync::Arc;

// SAFETY: no driver sees this stream.
const THIRD: Stream = unsafe { Stream::from_handle(0xd0) };
const IN_ORDER: (Stream, Reuse) = (OWNER, Reuse::InStreamOrder);
const UNKNOWN: (Stream, Reuse) = (OWNER, Reuse::Unknown);

/// Runs the threads of a model to their ends.
fn join<const N: usize>(threads: [thread::JoinHandle<()>; N]) {
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
}

/// Every buffer was returned once, and none before the uses of its view.
fn assert_returned(batch: &Batch) {
    assert_eq!(batch.model.state().wrong, Vec::<String>::new());
    assert_eq!(batch.drops(), vec![1; batch.drops().len()]);
    assert!(batch.to.side.views.is_empty());
}

#[test]
fn a_use_is_ordered_while_other_views_of_the_bytes_come_and_go() {
    explore(|| {
        let mut batch = Batch::apart(0, &[IN_ORDER; 2]);
        let [first, second] = [0, 1].map(|number| batch.leases[number].take());
        let batch = Arc::new(batch);
        let (recorded, transferred) = (Arc::clone(&batch), Arc::clone(&batch));
        join([
            thread::spawn(move || drop(first)),
            thread::spawn(move || {
                assert!(recorded.work(1, OTHER) >= 1, "its own view is alive");
                drop(second);
            }),
            thread::spawn(move || {
                let third = transferred.convert(&[UNKNOWN]);
                assert!(transferred.work(2, THIRD) >= 1, "its own view is alive");
                drop(third);
            }),
        ]);
        assert_returned(&batch);
    });
}

#[test]
fn the_last_two_views_of_a_group_leave_at_once() {
    explore(|| {
        let mut batch = Batch::new(&[IN_ORDER, UNKNOWN, IN_ORDER, IN_ORDER, IN_ORDER, IN_ORDER, IN_ORDER, IN_ORDER]);
        let mut leases = std::mem::take(&mut batch.leases);
        let (last, left) = (leases.split_off(6), Arc::new(AtomicUsize::new(2)));
        // The first of them asks for a flush.
        drop(leases);
        let batch = Arc::new(batch);
        let leave = |(lease, number)| {
            let (batch, left) = (Arc::clone(&batch), Arc::clone(&left));
            thread::spawn(move || {
                batch.work(number, READER);
                drop::<Option<bridge_core::Lease>>(lease);
                if left.fetch_sub(1, SeqCst) == 1 {
                    // Nothing needs the reader after the last drop.
                    batch.model.state().destroyed.push(READER);
                }
            })
        };
        let [a, b]: [_; 2] = last.into_iter().zip([6, 7]).map(leave).collect::<Vec<_>>().try_into().expect("two");
        let flushed = Arc::clone(&batch);
        join([a, b, thread::spawn(move || flushed.model.tick())]);
        assert_returned(&batch);
    });
}
