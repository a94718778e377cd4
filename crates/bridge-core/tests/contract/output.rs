//! Memory for results: whose it is, in which stream it is written, and what becomes of it.

use crate::common::{ALLOCATED, Copied, Event, GPU, Item, Log, Office, Paper, READER, Recorder, taken};
use bridge_core::{DType, Device, ErrorKind, HostOnly, Ordering, Strides, output};
use std::sync::Arc;

const FRESH: usize = 0x40000;

fn ordering(log: &Log) -> Arc<dyn Ordering> {
    Arc::new(Recorder { log: log.clone(), copies: Some(Copied::Well), ..Recorder::default() })
}

#[test]
fn a_framework_that_allocates_keeps_the_result_as_its_own() {
    let (log, mut office) = (Log::default(), Office::new(Strides::Any));
    office.fresh = Some(Paper { address: FRESH, stream: Some(READER), ..Paper::new(&log) });
    let ordering = ordering(&log);
    let made = output(&office, &ordering, GPU, DType::FLOAT32, &[2, 3]).unwrap();
    assert_eq!((made.as_ptr::<f32>().addr(), made.device(), made.stream()), (FRESH, GPU, Some(READER)));
    // SAFETY: the memory does not exist, and no code reads it. Here and below.
    let finished = unsafe { made.finish() }.unwrap();
    assert!(matches!(finished, Item::Own(paper) if paper.address == FRESH));
    assert!(!taken(&log).iter().any(|event| matches!(event, Event::Ordered(..))));
}

#[test]
fn other_results_are_written_to_memory_of_the_driver_or_the_host() {
    let (log, office) = (Log::default(), Office::new(Strides::Compact));
    let ordering = ordering(&log);
    let made = output(&office, &ordering, GPU, DType::FLOAT32, &[2, 3]).unwrap();
    assert_eq!(
        (made.as_ptr::<f32>().addr(), made.stream(), made.layout().shape()),
        (ALLOCATED, Some(READER), &[2, 3][..])
    );
    // SAFETY: see above.
    let Item::Leased(lease) = unsafe { made.finish() }.unwrap() else { panic!("the office has no memory") };
    assert!(lease.is_copy() && lease.data() == ALLOCATED);
    drop(lease);
    assert_eq!(taken(&log), [Event::Dropped]);

    let made = output(&office, &ordering, Device::CPU, DType::FLOAT32, &[5]).unwrap();
    assert!(made.stream().is_none() && !made.as_ptr::<f32>().is_null());
    drop(made);
}

#[test]
fn what_the_framework_does_not_take_is_refused_before_anything_is_written() {
    let (log, office) = (Log::default(), Office::new(Strides::Any));
    let refused = |ordering: &Arc<dyn Ordering>, device, dtype| {
        output(&office, ordering, device, dtype, &[2]).expect_err("it is refused").kind()
    };
    let with_copies = ordering(&log);
    assert_eq!(refused(&with_copies, GPU, DType::FLOAT64), ErrorKind::Dtype);
    assert_eq!(taken(&log), [Event::Dropped]);
    let without: Arc<dyn Ordering> = Arc::new(HostOnly);
    assert_eq!(refused(&without, GPU, DType::FLOAT32), ErrorKind::CopyNeeded);
}
