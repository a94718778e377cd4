//! Copies that cast: which pairs are cast, what is refused before anything is written, and that bytes are never copied
//! instead of a cast.

use crate::common::Event::{self, Copied as Launched, Dropped};
use crate::common::{Copied, Item, Log, OWNER, Office, Paper, READER, Recorder};
use crate::into::papers;
use bridge_core::{
    Cast, Copies, DType, Device, ErrorKind, Layout, Misfit, Ordering, Pair, Pending, Piece, Prepared, Result, Strided,
    Strides, copy_all,
};
use std::sync::Arc;

const HALF: DType = DType::BFLOAT16;

/// What is made of the pairs, and what happened. `None`: the ordering has copies that do not cast.
fn made<R>(
    papers: Vec<(Paper, Paper)>,
    dtype: Option<DType>,
    recorder: Recorder,
    make: impl Fn(&[Pair<'_, Item, Item>], &Arc<dyn Ordering>) -> R,
) -> (R, Vec<Event>) {
    let (from, to) = (Office::new(Strides::Any), Office::new(Strides::Any));
    let log = recorder.log.clone();
    let ordering: Arc<dyn Ordering> = Arc::new(recorder);
    let items: Vec<_> = papers.into_iter().map(|(source, target)| (Item::Own(source), Item::Own(target))).collect();
    let mut pairs: Vec<Pair<'_, Item, Item>> = Vec::new();
    for (tensor, out) in &items {
        pairs.push(Pair::new(&from, tensor, &to, out).with_dtype(dtype));
    }
    let made = make(&pairs, &ordering);
    (made, crate::common::taken(&log))
}

fn caster(log: &Log) -> Recorder {
    Recorder { log: log.clone(), copies: Some(Copied::Well), casts: true, ..Recorder::default() }
}

/// Sources of float32, and targets of another dtype.
fn halves(count: usize, log: &Log) -> Vec<(Paper, Paper)> {
    let mut papers = papers(count, log);
    papers.iter_mut().for_each(|(_, target)| target.dtype = HALF);
    papers
}

fn refused(papers: Vec<(Paper, Paper)>, dtype: Option<DType>, recorder: Recorder) -> Misfit {
    let (copied, events) = made(papers, dtype, recorder, |pairs, ordering| copy_all(pairs, ordering).map(drop));
    assert!(events.iter().all(|event| *event == Dropped), "{events:?}");
    copied.unwrap_err()
}

#[test]
fn pairs_of_other_dtypes_are_cast_and_others_copied_by_one_call() {
    let log = Log::default();
    let mut papers = halves(4, &log);
    (papers[1].0.dtype, papers[1].1.dtype) = (DType::INT64, DType::INT64);
    papers[2].0.dtype = DType::FLOAT64;
    papers[3].0.dtype = HALF;
    for (_, target) in &mut papers {
        target.address += 0x10000;
    }
    let (copied, events) =
        made(papers, Some(HALF), caster(&log), |pairs, ordering| copy_all(pairs, ordering).map(drop));
    copied.unwrap();
    let cast = |from| Event::Cast { cast: Cast::new(from, HALF).unwrap(), flips: 0, stream: Some(READER) };
    assert_eq!((&events[1], &events[3]), (&cast(DType::FLOAT32), &cast(DType::FLOAT64)), "{events:?}");
    assert!(matches!((&events[2], &events[4]), (Launched { .. }, Launched { .. })), "{events:?}");
}

#[test]
fn pairs_that_are_not_cast_are_refused_before_anything_is_written() {
    let log = Log::default();
    let misfit = refused(halves(3, &log), None, caster(&log));
    assert_eq!((misfit.index, misfit.error.kind()), (0, ErrorKind::Dtype));

    let mut other = halves(3, &log);
    other[2].1.dtype = DType::FLOAT16;
    let misfit = refused(other, Some(HALF), caster(&log));
    assert_eq!((misfit.index, misfit.error.kind()), (2, ErrorKind::Dtype));

    let mut integers = halves(3, &log);
    integers[1].0.dtype = DType::INT32;
    let misfit = refused(integers, Some(HALF), caster(&log));
    assert_eq!((misfit.index, misfit.error.kind()), (1, ErrorKind::Dtype));
}

/// Moves with a cast are one call for each way, next to those without.
#[test]
fn elements_are_cast_between_memories() {
    let log = Log::default();
    let mut papers = halves(5, &log);
    for (_, target) in &mut papers[..3] {
        (target.device, target.stream) = (Device::CPU, None);
    }
    papers[1].0.dtype = HALF;
    (papers[4].0.device, papers[4].0.stream) = (Device::CPU, None);
    for paper in papers.iter_mut() {
        paper.1.address += 0x10000;
    }
    let (copied, events) =
        made(papers, Some(HALF), caster(&log), |pairs, ordering| copy_all(pairs, ordering).map(drop));
    copied.unwrap();
    let cast = |stream| Event::Cast { cast: Cast::new(DType::FLOAT32, HALF).unwrap(), flips: 0, stream: Some(stream) };
    let (gpu, here) = (Device::cuda(0), Device::CPU);
    let moved = Event::Moved { from: gpu, to: here, flips: 0, stream: Some(OWNER) };
    let made: Vec<_> =
        events.into_iter().filter(|event| matches!(event, Event::Cast { .. } | Event::Moved { .. })).collect();
    assert_eq!(made, [cast(READER), cast(READER), cast(OWNER), moved, cast(OWNER)]);
}

/// On a device, and on the host, where core has its own loop, which copies bytes.
#[test]
fn copies_that_do_not_cast_refuse() {
    let log = Log::default();
    for on_host in [false, true] {
        for copies in [Some(Copied::Well), Some(Copied::Fails(ErrorKind::CopyNeeded)), None] {
            let mut papers = halves(2, &log);
            for (source, target) in papers.iter_mut().filter(|_| on_host) {
                (source.device, source.stream, target.device, target.stream) = (Device::CPU, None, Device::CPU, None);
            }
            let recorder = Recorder { log: log.clone(), copies, ..Recorder::default() };
            let misfit = refused(papers, Some(HALF), recorder);
            assert_eq!((misfit.index, misfit.error.kind()), (0, ErrorKind::CopyNeeded), "{}", misfit.error);
        }
    }
}

/// An implementation from before there were casts.
struct Bytes;

// SAFETY: nothing is called.
unsafe impl Copies for Bytes {
    unsafe fn copy(&self, _: Strided<'_>, _: Strided<'_>, _: u128, _: Option<bridge_core::Stream>) -> Result<()> {
        panic!("bytes are copied instead of a cast")
    }
}

#[test]
fn the_default_refuses_casts_also_where_it_is_not_asked() {
    let cast = Cast::new(DType::FLOAT16, HALF).unwrap();
    assert_eq!(Bytes.casts(cast).unwrap_err().kind(), ErrorKind::CopyNeeded);
    let layout = Layout::new(HALF, &[4], None, 0).unwrap();
    let side = Strided { device: Device::CPU, data: 0x1000, layout: &layout };
    let piece = |cast| Piece { from: side, to: side, flips: 0, cast };
    // SAFETY: nothing is copied.
    let failed = unsafe { Bytes.copy_all(&[piece(None), piece(Some(cast))], None) }.unwrap_err();
    assert_eq!((failed.index, failed.error.kind()), (1, ErrorKind::CopyNeeded));
}

/// The sign of the source is flipped for an operation of either side.
#[test]
fn a_pending_negation_of_either_side_is_done_in_the_source() {
    let negated = Some(Pending::Negation);
    for (source, target, expected) in [(negated, None, 1 << 31), (None, negated, 1 << 31), (negated, negated, 0)] {
        let log = Log::default();
        let mut papers = halves(1, &log);
        (papers[0].0.pending, papers[0].1.pending) = (source, target);
        let (copied, events) =
            made(papers, Some(HALF), caster(&log), |pairs, ordering| copy_all(pairs, ordering).map(drop));
        copied.unwrap();
        assert!(matches!(events[1], Event::Cast { flips, .. } if flips == expected), "{events:?}");
    }
}

/// Views of one memory as two dtypes of one size.
#[test]
fn another_cast_into_the_same_target_is_no_repetition() {
    let log = Log::default();
    let mut papers = papers(2, &log);
    (papers[1].0.address, papers[1].1.address) = (papers[0].0.address, papers[0].1.address);
    for (index, (source, target)) in papers.iter_mut().enumerate() {
        (source.dtype, target.dtype) = ([DType::FLOAT16, HALF][index], DType::FLOAT32);
    }
    let misfit = refused(papers, Some(DType::FLOAT32), caster(&log));
    assert_eq!((misfit.index, misfit.beside, misfit.error.kind()), (1, Some(0), ErrorKind::Layout));
}

#[test]
fn a_prepared_cast_is_one_again_and_notices_another_dtype() {
    let log = Log::default();
    let (_, events) = made(halves(2, &log), Some(HALF), caster(&log), |pairs, ordering| {
        let prepared = Prepared::new(pairs, ordering).unwrap();
        prepared.copy(pairs, ordering).unwrap();
        // The same memory as elements of another dtype.
        let Item::Own(paper) = pairs[1].tensor else { unreachable!() };
        let other = Item::Own(Paper { dtype: DType::FLOAT64, strides: vec![3, 1], ..paper.clone() });
        let changed = [pairs[0], Pair::new(pairs[1].from, &other, pairs[1].to, pairs[1].out).with_dtype(Some(HALF))];
        let misfit = prepared.copy(&changed, ordering).unwrap_err();
        assert_eq!((misfit.index, misfit.error.kind()), (1, ErrorKind::Layout));
    });
    assert_eq!(events.iter().filter(|event| matches!(event, Event::Cast { .. })).count(), 2, "{events:?}");
}
