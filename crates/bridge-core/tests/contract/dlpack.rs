//! The codec: round trips in both ABIs, with every drop counted.

use crate::common::Event::Dropped;
use crate::common::{Item, Office, Paper, Recorder, taken};
use bridge_core::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use bridge_core::dlpack::{ManagedTensorBase, Origin, adopt, export, wrap, wrap_as};
use bridge_core::{Access, Device, DeviceKind, ErrorKind, Lease, Options, Ordering, Strides, transfer};
use std::sync::Arc;

fn lease(recorder: &Arc<Recorder>, read_only: bool) -> Lease {
    let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
    let strides = vec![-3, 1];
    let paper = Paper { device: Device::CPU, stream: None, access, strides, ..Paper::new(&recorder.log) };
    let ordering: Arc<dyn Ordering> = recorder.clone();
    let mut to = Office::new(Strides::Any);
    to.profile.keeps_read_only = true;
    let converted = transfer(&Office::new(Strides::Any), &to, &Item::Own(paper), &ordering, &Options::default());
    match converted.expect("it converts").0 {
        Item::Leased(lease) => lease,
        Item::Own(_) => unreachable!("import returns leases"),
    }
}

fn host(_: Device, _: usize) -> bridge_core::Result<Origin> {
    Ok(Origin::host())
}

fn there_and_back<M: ManagedTensorBase>(keeps_flags: bool) {
    for read_only in [false, true] {
        let recorder = Arc::new(Recorder::default());
        // SAFETY: nothing writes to the memory.
        let (managed, handover) = unsafe { wrap_as::<M>(lease(&recorder, read_only), drop) };
        drop(handover);
        // SAFETY: `wrap` makes a whole managed tensor, whose memory this test does not touch.
        let exported =
            unsafe { adopt(managed.into_raw()).and_then(|managed| export(managed, host)) }.expect("it is sound");
        assert_eq!(
            (exported.layout().shape(), exported.layout().strides(), exported.data()),
            (&[2, 3][..], &[-3, 1][..], 0x1000)
        );
        let kept = match (keeps_flags, read_only) {
            (true, true) => Access::ReadOnly,
            (true, false) => Access::ReadWrite,
            (false, _) => Access::Unstated,
        };
        assert_eq!(exported.buffer().access(), kept);
        assert_eq!(taken(&recorder.log), []);
        drop(exported);
        assert_eq!(taken(&recorder.log), [Dropped]);
    }
}

#[test]
fn versioned_there_and_back() {
    there_and_back::<DLManagedTensorVersioned>(true);
}

#[test]
fn legacy_there_and_back() {
    there_and_back::<DLManagedTensor>(false);
}

#[test]
fn a_handover_is_reclaimed_once() {
    let recorder = Arc::new(Recorder::default());
    let (managed, handover) = wrap(lease(&recorder, false));
    // SAFETY: no code uses the memory.
    unsafe { handover.reclaim() };
    assert_eq!(taken(&recorder.log), [Dropped]);
    drop(managed);
    assert_eq!(taken(&recorder.log), []);

    let (managed, handover) = wrap(lease(&recorder, false));
    drop(managed);
    assert_eq!(taken(&recorder.log), []);
    // SAFETY: no code uses the memory.
    unsafe { handover.reclaim() };
    assert_eq!(taken(&recorder.log), [Dropped]);
}

#[test]
fn the_caller_may_know_the_device_better() {
    let recorder = Arc::new(Recorder::default());
    let (managed, handover) = wrap(lease(&recorder, false));
    drop(handover);
    let known = Device { kind: DeviceKind::CUDA_MANAGED, index: 1 };
    // SAFETY: as above.
    let exported = unsafe { export(managed, |said, address| Ok(host(said, address)?.on(known))) };
    assert_eq!(exported.expect("it is sound").device(), known);
}

#[test]
fn views_outside_the_allocation_are_refused_and_given_back() {
    for (allocation, fits) in [(0xff4..0x1018, true), (0x1000..0x1018, false), (0xff4..0x1000, false)] {
        let recorder = Arc::new(Recorder::default());
        let (managed, handover) = wrap(lease(&recorder, false));
        drop(handover);
        let origin = |device, address| Ok(host(device, address)?.within(Some(allocation.clone())));
        // SAFETY: as above.
        let exported = unsafe { export(managed, origin) };
        assert_eq!(exported.is_ok(), fits, "{allocation:x?}");
        match exported {
            Ok(exported) => drop(exported),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Layout),
        }
        assert_eq!(taken(&recorder.log), [Dropped]);
    }
}

#[test]
fn another_major_version_is_given_back_unread() {
    let recorder = Arc::new(Recorder::default());
    let (managed, handover) = wrap(lease(&recorder, false));
    drop(handover);
    let raw = managed.into_raw();
    // SAFETY: the tensor was made above, and is owned here.
    unsafe {
        (*raw).version.major = 2;
        assert_eq!(adopt(raw).err().expect("it is refused").kind(), ErrorKind::Version);
    }
    assert_eq!(taken(&recorder.log), [Dropped]);
}

#[test]
fn null_is_refused() {
    // SAFETY: null is allowed.
    let nothing = unsafe { adopt::<DLManagedTensor>(std::ptr::null_mut()) };
    assert_eq!(nothing.err().expect("it is refused").kind(), ErrorKind::Protocol);
}
