use super::*;
use crate::driver::{Context, Event};
use crate::fake::{Call, Counted, Fake, eventually};
use bridge_core::{DeviceKind, ErrorKind};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;

// SAFETY: no driver sees this stream.
const A: Stream = unsafe { Stream::from_handle(0xa0) };
// SAFETY: no driver sees this stream.
const B: Stream = unsafe { Stream::from_handle(0xb0) };
const GPU: Device = Device::cuda(0);
const CALLERS: Context = Context(7);

fn cuda() -> CudaOrdering<Fake> {
    CudaOrdering::new(Fake::default(), 2)
}

fn fake(cuda: &CudaOrdering<Fake>) -> &Fake {
    cuda.devices().driver()
}

#[test]
fn the_later_stream_waits_and_the_second_time_it_takes_two_calls() {
    let (cuda, primary) = (cuda(), Fake::primary(0));
    let one = Event(1);
    cuda.order(GPU, A, B).unwrap();
    let first =
        [Call::Retain(0), Call::Push(primary), Call::Create, Call::Record(one, A), Call::Wait(B, one), Call::Pop];
    assert_eq!(fake(&cuda).take_calls(), first);
    fake(&cuda).push_context(primary).unwrap();
    fake(&cuda).take_calls();
    cuda.order(GPU, B, A).unwrap();
    assert_eq!(fake(&cuda).take_calls(), [Call::Record(one, B), Call::Wait(A, one)]);
    assert_eq!(fake(&cuda).ordered(), [(A, B), (B, A)]);
}

#[test]
fn only_a_blocking_stream_of_the_current_device_works_after_legacy() {
    let cuda = cuda();
    fake(&cuda).blocking(A);
    let order_after = |stream| cuda.devices().enter(GPU).unwrap().is_own_after_legacy(stream).unwrap();
    assert!(!order_after(A), "no context was current");
    fake(&cuda).push_context(Fake::primary(0)).unwrap();
    assert!(order_after(A));
    assert!(!order_after(B), "a non-blocking stream");
    fake(&cuda).push_context(CALLERS).unwrap();
    assert!(!order_after(A), "another context is current");
}

#[test]
fn a_buffer_released_on_an_idle_stream_is_dropped_at_once() {
    let (cuda, drops) = (cuda(), Arc::default());
    fake(&cuda).idle(A);
    cuda.release_later(GPU, A, Counted::boxed(&drops));
    assert_eq!((drops.load(SeqCst), cuda.releases().pending()), (1, 0));
    fake(&cuda).capture(A);
    cuda.release_later(GPU, A, Counted::boxed(&drops));
    assert_eq!((drops.load(SeqCst), cuda.releases().leaked()), (1, 1));
}

#[test]
fn a_buffer_that_any_stream_may_use_is_dropped_after_all_work_of_the_device() {
    let (cuda, drops) = (cuda(), Arc::default());
    fake(&cuda).idle(A);
    cuda.release_after_all_work(Device::cuda(1), A, Counted::boxed(&drops));
    cuda.release_after_all_work(GPU, A, Counted::boxed(&drops));
    let calls = fake(&cuda).take_calls();
    for (number, device) in [(1, 1), (2, 0)] {
        assert!(calls.contains(&Call::RecordContext(Event(number), Fake::primary(device))), "{calls:?}");
    }
    assert_eq!((drops.load(SeqCst), cuda.releases().pending()), (0, 2), "that one stream is idle says nothing");
    fake(&cuda).finish_all();
    eventually("both are dropped", || drops.load(SeqCst) == 2 && cuda.releases().pending() == 0);
    assert_eq!(cuda.releases().leaked(), 0);
}

#[test]
fn such_a_buffer_is_leaked_where_the_driver_cannot_record_and_no_capture_is_ended() {
    let (cuda, drops) = (cuda(), Arc::default());
    fake(&cuda).capture(A);
    cuda.release_after_all_work(GPU, A, Counted::boxed(&drops));
    fake(&cuda).end_capture();
    let calls = fake(&cuda).take_calls();
    assert!(!calls.iter().any(|call| matches!(call, Call::RecordContext(..))), "{calls:?}");
    fake(&cuda).fail("cuCtxRecordEvent", 801);
    cuda.release_after_all_work(GPU, A, Counted::boxed(&drops));
    assert_eq!((drops.load(SeqCst), cuda.releases().leaked(), fake(&cuda).live_events()), (0, 2, 0));
}

#[test]
fn a_capture_of_a_blocking_stream_forbids_the_legacy_stream() {
    for captured in [A, Stream::PER_THREAD] {
        let cuda = cuda();
        fake(&cuda).blocking(A);
        fake(&cuda).capture(captured);
        for (earlier, later) in [(captured, Stream::LEGACY), (Stream::LEGACY, captured), (B, Stream::LEGACY)] {
            let across = cuda.order_across((GPU, earlier), (Device::cuda(1), later));
            for result in [cuda.order(GPU, earlier, later), across] {
                let error = result.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Captured);
                assert!(error.to_string().contains("a blocking stream is being captured"), "{error}");
            }
        }
        cuda.order(GPU, B, B).unwrap();
        assert_eq!(fake(&cuda).ordered(), []);
        assert_eq!(cuda.synchronize(GPU, Stream::LEGACY).unwrap_err().kind(), ErrorKind::Captured);
    }
}

#[test]
fn a_buffer_of_the_legacy_stream_is_dropped_after_the_capture_of_a_blocking_stream() {
    type ReleaseLater = fn(&CudaOrdering<Fake>, Box<dyn DeviceBuffer>);
    let releases: [ReleaseLater; 3] = [
        |cuda, buffer| cuda.release_later(GPU, Stream::LEGACY, buffer),
        |cuda, buffer| cuda.release_after_all_work(GPU, Stream::LEGACY, buffer),
        |cuda, buffer| cuda.release_after_all_work(GPU, B, buffer),
    ];
    for captured in [A, Stream::PER_THREAD] {
        for release_later in releases {
            let (cuda, drops) = (cuda(), Arc::default());
            fake(&cuda).blocking(A);
            fake(&cuda).capture(captured);
            release_later(&cuda, Counted::boxed(&drops));
            assert_eq!((drops.load(SeqCst), cuda.after_capture().deferred(), cuda.releases().leaked()), (0, 1, 0));
            fake(&cuda).end_capture();
            eventually("the event is recorded", || cuda.releases().pending() == 1);
            fake(&cuda).finish_all();
            eventually("it is dropped", || drops.load(SeqCst) == 1 && cuda.after_capture().deferred() == 0);
            assert_eq!(cuda.releases().leaked(), 0);
        }
    }
}

#[test]
fn a_buffer_that_waits_for_a_capture_is_leaked_when_the_driver_shuts_down() {
    let (cuda, drops) = (cuda(), Arc::default());
    fake(&cuda).blocking(A);
    fake(&cuda).capture(A);
    cuda.release_later(GPU, Stream::LEGACY, Counted::boxed(&drops));
    fake(&cuda).fail("cuStreamIsCapturing", 4);
    eventually("nothing waits", || cuda.after_capture().deferred() == 0);
    eventually("it is leaked", || cuda.releases().leaked() == 1);
    assert_eq!(drops.load(SeqCst), 0);
}

#[test]
fn the_default_streams_are_passed_unchanged() {
    let cuda = cuda();
    for (earlier, later) in [(Stream::LEGACY, B), (A, Stream::PER_THREAD), (Stream::LEGACY, Stream::PER_THREAD)] {
        cuda.order(GPU, earlier, later).unwrap();
        assert_eq!(fake(&cuda).ordered().last(), Some(&(earlier, later)));
    }
}

#[test]
fn equal_streams_need_no_driver() {
    let cuda = cuda();
    cuda.order(GPU, A, A).unwrap();
    assert_eq!(fake(&cuda).take_calls(), []);
}

#[test]
fn a_captured_stream_is_not_ordered_with_one_outside() {
    let cuda = cuda();
    fake(&cuda).capture(A);
    for (earlier, later) in [(A, B), (B, A)] {
        let error = cuda.order(GPU, earlier, later).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Captured);
        assert!(error.to_string().contains("captured"), "{error}");
    }
    let calls = fake(&cuda).take_calls();
    assert!(!calls.iter().any(|call| matches!(call, Call::Record(..) | Call::Wait(..))), "{calls:?}");
}

#[test]
fn the_host_waits_for_a_stream_that_runs_and_for_none_that_only_records() {
    let cuda = cuda();
    cuda.synchronize(GPU, A).unwrap();
    assert!(fake(&cuda).take_calls().contains(&Call::Synchronize(A)));
    fake(&cuda).capture(A);
    assert_eq!(cuda.synchronize(GPU, A).unwrap_err().kind(), ErrorKind::Captured);
    assert!(!fake(&cuda).take_calls().contains(&Call::Synchronize(A)));
}

#[test]
fn a_stream_belongs_to_the_device_of_its_context() {
    let cuda = cuda();
    fake(&cuda).belongs(B, 1);
    let has = |device, stream| cuda.devices().has_stream(Device::cuda(device), stream).unwrap();
    assert!(has(0, A) && !has(1, A) && has(1, B) && !has(0, B));
    assert!(has(0, Stream::LEGACY) && has(1, Stream::PER_THREAD));
    assert_eq!((fake(&cuda).current_context(), cuda.devices().current()), (Ok(None), None));
    fake(&cuda).push_context(Fake::primary(1)).unwrap();
    assert_eq!(cuda.devices().current(), Some(Device::cuda(1)));
    fake(&cuda).fail("cuStreamGetCtx", 1);
    assert!(has(0, B), "the driver does not know");
}

#[test]
fn each_device_has_its_own_context_and_events() {
    let cuda = cuda();
    for device in [Device::cuda(1), GPU, Device { kind: DeviceKind::CUDA_MANAGED, index: 1 }] {
        cuda.order(device, A, B).unwrap();
    }
    let calls = fake(&cuda).take_calls();
    let pushed = calls.iter().filter_map(|call| if let Call::Push(context) = call { Some(context.0) } else { None });
    assert_eq!(pushed.collect::<Vec<_>>(), [1001, 1000, 1001]);
    assert_eq!(fake(&cuda).live_events(), 2);
}

#[test]
fn streams_of_one_device_are_ordered_in_its_context_and_those_of_two_in_both() {
    let one = cuda();
    one.order_across((GPU, A), (GPU, B)).unwrap();
    let alone = fake(&one).take_calls();
    one.order(GPU, A, B).unwrap();
    assert_eq!(fake(&one).ordered(), [(A, B), (A, B)]);
    let contexts = |calls: Vec<Call>| {
        let pushed = |call| if let Call::Push(context) = call { Some(context.0) } else { None };
        calls.into_iter().filter_map(pushed).collect::<BTreeSet<_>>()
    };
    let two = cuda();
    two.order_across((GPU, A), (Device::cuda(1), B)).unwrap();
    assert_eq!(contexts(alone), [1000].into());
    assert_eq!(contexts(fake(&two).take_calls()), [1000, 1001].into());
    assert_eq!(fake(&two).ordered(), [(A, B)]);
}

#[test]
fn the_context_is_restored_also_after_errors() {
    let steps =
        ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"];
    for current in [None, Some(CALLERS), Some(Fake::primary(0)), Some(Fake::primary(1))] {
        for step in steps {
            let cuda = cuda();
            current.iter().for_each(|context| fake(&cuda).push_context(*context).unwrap());
            fake(&cuda).fail(step, 906);
            let reached = step != "cuCtxPushCurrent_v2" || current != Some(Fake::primary(0));
            match cuda.order(GPU, A, B) {
                Ok(()) => assert!(!reached, "{step} failed without an error"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Captured);
                    assert!(error.to_string().starts_with(step), "{error}");
                }
            }
            assert_eq!(fake(&cuda).current_context(), Ok(current), "after {step} failed");
            fake(&cuda).fail(step, 0);
            cuda.order(GPU, A, B).unwrap();
            assert_eq!(fake(&cuda).current_context(), Ok(current), "after success");
            assert_eq!(fake(&cuda).ordered().last(), Some(&(A, B)));
            assert_eq!(fake(&cuda).live_events(), 1, "an event was lost when {step} failed");
        }
    }
}

#[test]
fn an_event_that_failed_is_not_used_again() {
    let cuda = cuda();
    fake(&cuda).fail("cuStreamWaitEvent", 400);
    let error = cuda.order(GPU, A, B).unwrap_err();
    assert!(error.to_string().contains("the stream was destroyed"), "{error}");
    assert!(fake(&cuda).take_calls().contains(&Call::Destroy(Event(1))));
    fake(&cuda).fail("cuStreamWaitEvent", 0);
    cuda.order(GPU, A, B).unwrap();
    assert!(fake(&cuda).take_calls().contains(&Call::Record(Event(2), A)));
}

#[test]
fn other_devices_are_refused_by_name() {
    for device in [Device::CPU, Device::cuda(2), Device::cuda(-1), Device { kind: DeviceKind::ROCM, index: 0 }] {
        let error = cuda().order(device, A, B).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert!(error.to_string().contains(&device.to_string()));
    }
}

#[test]
fn threads_share_one_ordering() {
    let cuda = cuda();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cuda = &cuda;
            scope.spawn(move || {
                for _ in 0..200 {
                    // SAFETY: no driver sees this stream.
                    cuda.order(GPU, unsafe { Stream::from_handle(100 + thread) }, B).unwrap();
                    assert_eq!(fake(cuda).current_context(), Ok(None));
                }
            });
        }
    });
    let ordered = fake(&cuda).ordered();
    // SAFETY: no driver sees this stream.
    let from = |thread: u64| unsafe { Stream::from_handle(100 + thread) };
    let of = |thread: u64| ordered.iter().filter(|pair| **pair == (from(thread), B)).count();
    assert_eq!((0..4).map(of).collect::<Vec<_>>(), [200; 4]);
}
