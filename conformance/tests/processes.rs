//! A framework whose tensors are converted by tickets has every property of the framework itself, and flaws on the way
//! are found. A thread serves it here: the runner judges processes.

use bridge_conformance::processes::{Around, Direction, FLAWS, Flaw, Remote, serve};
use bridge_conformance::rust::NdArraySubject;
use bridge_conformance::{Config, Pair, PairReport, Subject};
use bridge_core::Stream;
use std::os::unix::net::UnixStream;
use std::thread;

const HERE: fn() -> NdArraySubject = NdArraySubject::default;

/// Returns `ndarray` at the other end of a socket.
fn remote() -> Remote {
    let (here, there) = UnixStream::pair().unwrap();
    let copy = |end: &UnixStream| end.try_clone().unwrap();
    let (read, write) = (copy(&there), there);
    thread::spawn(move || serve(&HERE(), read, write, Around::default()));
    Remote::new("ndarray+remote", copy(&here), here, HERE().ordering(), Around::default()).unwrap()
}

fn judge<F, T>(pair: &Pair<'_, F, T>) -> PairReport {
    Config { cases: 500, ..Config::default() }.certify_pair(pair, &mut ())
}

#[test]
fn tensors_that_are_shared_by_tickets_have_every_property() {
    let (local, remote, other) = (HERE(), remote(), remote());
    for report in [judge(&remote.after(&local)), judge(&remote.before(&local)), judge(&remote.after(&other))] {
        assert!(report.passed(), "{report:#?}");
        let left_out = report.properties.iter().filter(|judged| judged.cases == 0);
        let reasons: Vec<_> = left_out.map(|judged| judged.reason.as_deref().unwrap_or("none")).collect();
        let known = [
            "the device has no streams",
            "the source makes no tensors of gigabytes",
            "the source makes no views of its tensors",
            "one side is for a single thread",
            "neither side has another device",
            "the target captures no graphs",
            "copies into tensors are within one process: versions are for several",
            "it judges calls within one process",
            "the target has no method that imports",
            "not every import takes tensors of the source",
            "no list says how users of the source make tensors",
            "no function of either framework can be made to raise",
            "the source has tensors only on a device or only on the host",
        ];
        assert!(reasons.iter().all(|reason| known.contains(reason)), "{reasons:?}");
    }
}

#[test]
fn flaws_between_processes_are_found() {
    // Of the others a process dies, or they need patience: the runner plants them.
    for flaw in [Flaw::OffsetDropped, Flaw::LeaseIgnored] {
        let planted = FLAWS.iter().find(|planted| planted.flaw == flaw).unwrap();
        assert_eq!(planted.direction, Direction::Back);
        let properties = Some(vec![planted.caught_by.to_owned()]);
        let config = Config { cases: 2000, properties, shrinks: false, ..Config::default() };
        let report = config.certify_pair(&remote().with(Some(flaw)).before(&HERE()), &mut ());
        assert!(!report.passed(), "{planted:?} was not found by {report:#?}");
    }
}

#[test]
fn errors_of_the_other_side_arrive_as_they_are() {
    let (remote, local) = (remote(), HERE());
    let spec = bridge_conformance::Spec::compact(bridge_core::DType::FLOAT32, &[2]);
    let read_only = bridge_conformance::Spec { read_only: true, ..spec };
    let tensor = remote.create(&read_only, &[0; 8]).unwrap();
    let there = remote.write(&tensor, &[1; 8]).unwrap_err();
    let here = local.write(&local.create(&read_only, &[0; 8]).unwrap(), &[1; 8]).unwrap_err();
    assert_eq!((there.kind(), there.to_string()), (here.kind(), here.to_string()));
}

/// A handle of this process means nothing in the other, or another stream.
#[test]
fn a_stream_of_this_process_is_not_named_to_the_other() {
    let remote = remote();
    assert!(!remote.capabilities().external_streams);
    // SAFETY: no driver sees this stream.
    let stream = unsafe { Stream::from_handle(0xa0) };
    let mut has_run = false;
    let mut run = || {
        has_run = true;
        Ok(())
    };
    // SAFETY: as above.
    let refused = unsafe { remote.on_stream(stream, &mut run) };
    assert!(refused.unwrap_err().to_string().contains("not a stream of the other process") && !has_run);
}
