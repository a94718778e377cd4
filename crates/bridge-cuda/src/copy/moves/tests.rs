//! Moves over a link without a device (`sim.rs`): a buffer that is used again too early, and bytes that are read too
//! early, are wrong every time.

mod packed;
mod sim;
mod staging;

use super::packed::is_dense;
use super::*;
use bridge_core::{Cast, DType, poison};
use proptest::prelude::*;
use sim::{Kind, Place, Sim, State, Work, own};
use std::cell::RefCell;
use std::collections::HashSet;
use std::ptr::{with_exposed_provenance as at, with_exposed_provenance_mut as at_mut};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard};

const GPU: Device = Device::cuda(0);
const OTHER: Device = Device::cuda(1);
/// The longest piece, and the most buffers that a pool keeps.
const PIECE: usize = CUTS.longest();
const KEPT: usize = CUTS.buffers();
// SAFETY: no driver sees this stream.
const STREAM: Stream = unsafe { Stream::from_handle(0xa0) };

#[test]
fn memory_of_the_pool_is_overwritten_after_its_work_and_before_it_is_freed() {
    let sim = Sim::default();
    let block = Block::new(&sim, Device::cuda(0), 48, Stream::LEGACY).unwrap();
    // SAFETY: the memory is alive until the queue frees it.
    let bytes = || unsafe { std::slice::from_raw_parts(at::<u8>(block.address), 48) }.to_vec();
    block.poison();
    assert!(!bytes().contains(&poison::BYTE), "the stream has not come there");
    sim.finish();
    assert_eq!(bytes(), [poison::BYTE; 48]);
}

/// Returns the offset in bytes of each element, in row-major order.
fn offsets(layout: &Layout) -> Vec<isize> {
    let mut all = vec![0];
    for (length, stride) in layout.shape().iter().zip(layout.strides()) {
        let step = stride * layout.itemsize() as i64;
        all = all.iter().flat_map(|start| (0..*length).map(move |i| start + (i * step) as isize)).collect();
    }
    all
}

/// Copies and casts element by element.
unsafe fn elements(from: (usize, &[isize]), to: (usize, &[isize]), itemsize: usize, change: (u128, Option<Cast>)) {
    let (flips, cast) = change;
    for (source, target) in from.1.iter().zip(to.1) {
        let mut element = [0u8; 16];
        for (byte, (read, flips)) in element.iter_mut().zip(flips.to_le_bytes()).enumerate().take(itemsize) {
            // SAFETY: the promises of a copy: the element is inside its view.
            let value: u8 = unsafe { at::<u8>(from.0).offset(*source).add(byte).read() };
            *read = value ^ flips;
        }
        let written = cast.map_or(itemsize, |cast| cast.to().itemsize().unwrap());
        // The tests cast numbers that both dtypes have: the upper half of a float32 is a bfloat16.
        match cast {
            Some(_) if written == 2 => element.copy_within(2..4, 0),
            Some(_) => element = [0, 0, element[0], element[1]].repeat(4).try_into().unwrap(),
            None => (),
        }
        for (byte, value) in element.iter().enumerate().take(written) {
            // SAFETY: as above.
            unsafe { at_mut::<u8>(to.0).offset(*target).add(byte).write(*value) };
        }
    }
}

unsafe fn each(Piece { from, to, flips, cast }: &Piece<'_>) {
    let sides = ((from.data, &*offsets(from.layout)), (to.data, &*offsets(to.layout)));
    // SAFETY: the caller's promises.
    unsafe { elements(sides.0, sides.1, from.layout.itemsize(), (*flips, *cast)) }
}

unsafe fn on_host(pieces: &[Piece<'_>], _: usize) -> Result<(), Failed> {
    assert!(pieces.iter().all(|piece| piece.flips == 0 && piece.cast.is_none()), "the device changes elements");
    // SAFETY: the caller's promises.
    pieces.iter().for_each(|piece| unsafe { each(piece) });
    Ok(())
}

static ON_DEVICE: Mutex<Option<&'static Sim>> = Mutex::new(None);

/// Tests that use kernels run one at a time: a function pointer holds no link.
static ONE: Mutex<()> = Mutex::new(());

unsafe fn on_device(pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
    let sim = ON_DEVICE.lock().unwrap().expect("a test has set it");
    let mut state = sim.call().map_err(|error| Failed::new(0, error))?;
    state.launches.push(pieces.len());
    assert!(pieces.iter().all(|piece| piece.from.device == piece.to.device), "a launch is on one device");
    let mut all: Vec<Work> = Vec::new();
    for Piece { from, to, flips, cast } in pieces {
        let (source, target) = ((from.data, offsets(from.layout)), (to.data, offsets(to.layout)));
        let (itemsize, change) = (from.layout.itemsize(), (*flips, *cast));
        // SAFETY: the promises of a copy.
        all.push(Box::new(move || unsafe { elements((source.0, &source.1), (target.0, &target.1), itemsize, change) }));
    }
    let place = (pieces[0].from.device, stream);
    Sim::submit(&mut state, (place, Kind::Launch), Box::new(move || all.into_iter().for_each(|work| work())));
    Ok(())
}

fn order(earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
    let sim = ON_DEVICE.lock().unwrap().expect("a test has set it");
    let state = &mut *sim.call()?;
    state.orders.push([earlier, later]);
    let before = state.ends.get(&earlier).cloned().unwrap_or_default();
    state.ends.entry(later).or_default().extend(before);
    Ok(())
}

unsafe fn no_kernel(_: &[Piece<'_>], _: Stream) -> Result<(), Failed> {
    panic!("compact bytes need no kernel")
}

impl Moves<'_> {
    /// Moves one piece.
    unsafe fn copy(&self, from: Strided<'_>, to: Strided<'_>, flips: u128, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promises.
        unsafe { self.copy_all(&[Piece { from, to, flips, cast: None }], stream) }.map_err(|failed| failed.error)
    }
}

fn moves<'a>(sim: &'a Sim, pool: &'a Pool) -> Moves<'a> {
    let lanes = Box::leak(Box::new(Lanes::new()));
    Moves { link: sim, pool, lanes, cuts: &CUTS, on_device: no_kernel, on_host, order }
}

fn bytes(nbytes: usize) -> Layout {
    Layout::new(DType::UINT8, &[nbytes as i64], None, 0).unwrap()
}

fn numbers(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes).map(|at| (((at + seed) * 2_654_435_761) >> 13) as u8).collect()
}

/// Moves plain bytes, and returns what is in the target once the stream has run.
fn moved(moves: &Moves<'_>, sim: &Sim, source: &[u8], from: Device, to: Device) -> Result<Vec<u8>> {
    let mut target = vec![0; source.len()];
    let layout = bytes(source.len());
    let view = |device, data| Strided { device, data, layout: &layout };
    let (start, end) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    // SAFETY: both are vectors of that length.
    let done = unsafe { moves.copy(view(from, start), view(to, end), 0, STREAM) };
    match to.kind {
        // The elements are there when it returns.
        DeviceKind::CPU => (),
        _ => sim.finish(),
    }
    done.map(|()| target)
}

const DIRECTIONS: [(Device, Device); 2] = [(GPU, Device::CPU), (Device::CPU, GPU)];
const LENGTHS: [usize; 6] = [1, 4096, 300 << 10, PIECE, PIECE + 5, 6 * PIECE + 123];

#[test]
fn bytes_arrive_up_down_and_across_at_every_length() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    for (seed, nbytes) in LENGTHS.into_iter().enumerate() {
        for (from, to) in [(GPU, Device::CPU), (Device::CPU, GPU), (GPU, OTHER)] {
            let source = numbers(nbytes, seed);
            assert!(moved(&moves(&sim, &pool), &sim, &source, from, to).unwrap() == source, "{nbytes} {from} to {to}");
        }
    }
    assert_eq!(sim.state().copies.iter().filter(|copy| copy.1 == OTHER).count(), LENGTHS.len(), "one copy each");
}

#[test]
fn a_source_on_the_host_may_be_overwritten_once_the_move_returns() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let (mut source, layout) = (numbers(3 * PIECE, 1), bytes(3 * PIECE));
    let (expected, mut target) = (source.clone(), vec![0u8; 3 * PIECE]);
    let (start, end) = (source.as_mut_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    let view = |device, data| Strided { device, data, layout: &layout };
    for pinned in [false, true] {
        sim.state().pinned.extend(pinned.then_some(start));
        // SAFETY: both are vectors of that length.
        unsafe { moves(&sim, &pool).copy(view(Device::CPU, start), view(GPU, end), 0, STREAM) }.unwrap();
        source.fill(0xee);
        sim.finish();
        assert!(target == expected, "pinned: {pinned}");
        source.copy_from_slice(&expected);
    }
}

#[test]
fn pinned_host_memory_is_copied_at_once() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let source = numbers(3 * PIECE, 2);
    let mut target = vec![0u8; source.len()];
    let (start, end) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    sim.state().pinned.extend([start, end]);
    let layout = bytes(source.len());
    let view = |device, data| Strided { device, data, layout: &layout };
    // SAFETY: both are vectors of that length.
    unsafe {
        moves(&sim, &pool).copy(view(GPU, start), view(Device::CPU, end), 0, STREAM).unwrap();
        assert!(target == source);
        moves(&sim, &pool).copy(view(Device::CPU, start), view(GPU, end), 0, STREAM).unwrap();
    }
    let state = sim.state();
    assert_eq!(state.copies, [(GPU, Device::CPU, source.len()), (Device::CPU, GPU, source.len())]);
    assert!(state.memory.is_empty() && state.events.is_empty());
}

#[test]
fn a_short_move_is_one_copy_and_waits_only_for_what_it_reads() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let source = numbers(64 << 10, 3);
    assert!(moved(&moves(&sim, &pool), &sim, &source, GPU, Device::CPU).unwrap() == source);
    let made = || {
        let state = sim.state();
        (state.copies.len(), state.waits)
    };
    assert_eq!(made(), (1, 1));
    assert!(moved(&moves(&sim, &pool), &sim, &source, Device::CPU, GPU).unwrap() == source);
    assert_eq!(made(), (2, 1), "nothing waits for a stream on the way up");
    assert_eq!(sim.state().memory.len(), 1, "the buffer is kept");
}

/// Longer moves, those behind other work, and those whose copy fails are staged.
#[test]
fn a_short_move_in_an_idle_stream_is_left_to_the_driver() {
    for ((from, to), cut) in DIRECTIONS.into_iter().zip([CUTS.down, CUTS.up]) {
        for (more, is_busy, fails) in [(0, false, false), (1, false, false), (0, true, false), (0, false, true)] {
            let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
            sim.state().makes_at_once = true;
            sim.state().fails_at_once = fails;
            if is_busy {
                Sim::submit(&mut sim.state(), ((GPU, STREAM), Kind::Fill), Box::new(|| ()));
            }
            let source = numbers(cut.at_once + more, more);
            assert!(moved(&moves(&sim, &pool), &sim, &source, from, to).unwrap() == source);
            let is_staged = !sim.state().memory.is_empty();
            assert_eq!(is_staged, more > 0 || is_busy || fails, "{from} to {to}: {more}, {is_busy}, {fails}");
        }
    }
}

#[test]
fn a_move_in_a_capture_is_refused_and_one_without_elements_does_nothing() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    sim.state().captured = true;
    let error = moved(&moves(&sim, &pool), &sim, &[1, 2, 3], GPU, Device::CPU).unwrap_err();
    assert_eq!((error.kind(), sim.state().submitted), (ErrorKind::Captured, 0));
    assert!(moved(&moves(&sim, &pool), &sim, &[], GPU, Device::CPU).unwrap().is_empty());
}

/// The nth call of the link fails, for every n: the error is the driver's, and no event and no memory is lost but that
/// of a buffer whose last copy the driver cannot tell the end of.
#[test]
fn every_failure_is_an_error_and_the_next_move_works() {
    let source = numbers(2 * PIECE, 5);
    for (from, to) in [(GPU, Device::CPU), (Device::CPU, GPU), (GPU, OTHER)] {
        for left in 0.. {
            let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
            sim.state().left = Some(left);
            let done = moved(&moves(&sim, &pool), &sim, &source, from, to);
            let is_over = sim.state().left != Some(0);
            sim.state().left = None;
            match done {
                Ok(target) => {
                    assert!(target == source);
                    if is_over {
                        assert!(left > 1, "{from} to {to} made no calls");
                        break;
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Driver),
            }
            assert!(moved(&moves(&sim, &pool), &sim, &source, from, to).unwrap() == source, "after failure {left}");
        }
    }
}

#[test]
fn a_move_tells_how_far_it_is_and_what_hears_it_may_end_it() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let source = numbers(6 * PIECE + 123, 3);
    // One thread reports every piece. Of several threads only one reports, and it may have no piece.
    let alone = |cut| Cut { threads: 1, ..cut };
    let alone = Cuts { down: alone(CUTS.down), up: alone(CUTS.up), ..CUTS };
    for (cuts, (from, to)) in [&alone, &CUTS].into_iter().flat_map(|cuts| DIRECTIONS.map(|direction| (cuts, direction)))
    {
        let moves = Moves { cuts, ..moves(&sim, &pool) };
        let hearing = |most: usize| {
            let told = Rc::new(RefCell::new(Vec::new()));
            let heard = Rc::clone(&told);
            let tick: Tick = Rc::new(move |done| {
                heard.borrow_mut().push(done);
                let enough = || Error::new(ErrorKind::Framework, "enough");
                if heard.borrow().len() < most { Ok(()) } else { Err(enough()) }
            });
            (ticking(tick, || moved(&moves, &sim, &source, from, to)), told.take())
        };
        let (target, told) = hearing(usize::MAX);
        assert!(target.unwrap() == source && told.is_sorted() && told.iter().all(|done| *done <= source.len()));
        if cuts.up.threads == 1 {
            assert!(told.len() > 6 && told.last() == Some(&source.len()), "{told:?}");
            let (ended, told) = hearing(2);
            assert!(ended.unwrap_err().to_string().contains("enough") && told.len() == 2);
        }
        let (target, told) = (moved(&moves, &sim, &source, from, to), hearing(usize::MAX).1.len());
        assert!(target.unwrap() == source && (cuts.up.threads > 1 || told > 6), "after one that was ended");
    }
}

#[test]
fn a_move_that_is_ended_leaves_no_work_on_its_target() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let (source, mut target) = (numbers(3 * PIECE, 1), vec![0u8; 3 * PIECE]);
    let layout = bytes(source.len());
    let view = |device, data| Strided { device, data, layout: &layout };
    let (from, to) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    let stop: Tick = Rc::new(|_| Err(Error::new(ErrorKind::Framework, "enough")));
    // On one thread, which reports its pieces.
    let cuts = Cuts { up: Cut { threads: 1, ..CUTS.up }, ..CUTS };
    let moves = Moves { cuts: &cuts, ..moves(&sim, &pool) };
    // SAFETY: both are vectors of that length.
    let ended = ticking(stop, || unsafe { moves.copy(view(Device::CPU, from), view(GPU, to), 0, STREAM) });
    let left = sim.state().nodes.iter().filter(|node| node.work.is_some()).count();
    sim.finish();
    assert!(ended.is_err() && left == 0, "{left} pieces");
}

#[test]
fn a_move_that_stops_early_says_so() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    sim.state().left = Some(8);
    let error = moved(&moves(&sim, &pool), &sim, &numbers(2 * PIECE, 1), GPU, Device::CPU).unwrap_err();
    assert!(error.to_string().contains("undefined"), "{error}");
}

#[test]
fn an_error_says_once_that_a_move_has_stopped() {
    let once = undefined(Error::new(ErrorKind::Driver, "planned failure"));
    assert_eq!(once.to_string().matches("has stopped").count(), 1);
    assert_eq!(undefined(once).to_string().matches("has stopped").count(), 1);
}

#[test]
fn a_dense_layout_fills_its_bytes_in_any_order_of_the_dimensions() {
    let dense =
        |shape: &[i64], strides: &[i64]| is_dense(&Layout::new(DType::FLOAT32, shape, Some(strides), 0).unwrap());
    assert!(dense(&[2, 3], &[3, 1]) && dense(&[2, 3], &[1, 2]) && dense(&[2, 1, 3], &[1, 99, 2]) && dense(&[], &[]));
    assert!(!dense(&[2, 3], &[6, 2]) && !dense(&[2, 3], &[0, 1]) && !dense(&[3], &[-1]) && !dense(&[2, 2], &[1, 1]));
}

#[test]
fn two_sides_of_one_dense_layout_move_as_plain_bytes() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let turned = Layout::new(DType::UINT8, &[300, 200], Some(&[1, 300]), 0).unwrap();
    let (source, mut target) = (numbers(60_000, 4), vec![0u8; 60_000]);
    let (start, end) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    let view = |device, data| Strided { device, data, layout: &turned };
    let refuse: OnHost = |_, _| panic!("no loop is needed");
    let moves = Moves { on_host: refuse, ..moves(&sim, &pool) };
    // SAFETY: both are vectors of that length.
    unsafe { moves.copy(view(GPU, start), view(Device::CPU, end), 0, STREAM) }.unwrap();
    assert!(target == source);
}

/// A dimension of a view: the gap to its neighbours, and whether it is reversed.
type Dim = (i64, bool);

/// Strides of a view of `shape`, whose dimensions lie in memory in order, from the `inner`th outwards.
fn strides(shape: &[i64], dims: &[Dim], inner: usize) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for d in (0..shape.len()).map(|d| (d + inner) % shape.len()) {
        let (gap, reversed) = dims[d];
        step *= gap;
        strides[d] = if reversed { -step } else { step };
        step *= shape[d];
    }
    strides
}

/// A shape, and the strides of two views of it.
type Views = (Vec<i64>, Vec<i64>, Vec<i64>);

/// Two views of one shape: permuted, sliced, some reversed, some compact.
fn views() -> impl Strategy<Value = Views> {
    let dim = || (1..3i64, any::<bool>());
    let all = prop::collection::vec((1..5i64, dim(), dim()), 0..4);
    (all, 0..4usize, 0..4usize, any::<[bool; 2]>()).prop_map(|(dims, first, second, compact)| {
        let shape: Vec<i64> = dims.iter().map(|dim| dim.0).collect();
        let sides = [(first, dims.iter().map(|dim| dim.1).collect()), (second, dims.iter().map(|dim| dim.2).collect())];
        let mut sides =
            sides.into_iter().zip(compact).map(|((inner, dims), compact): ((usize, Vec<Dim>), bool)| match compact {
                true => Layout::new(DType::UINT8, &shape, None, 0).unwrap().strides().to_vec(),
                false => strides(&shape, &dims, inner),
            });
        let (source, target) = (sides.next().unwrap(), sides.next().unwrap());
        drop(sides);
        (shape, source, target)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Strided views on either side, with bits to flip: the same elements as copied one by one.
    #[test]
    fn strided_views_arrive_with_their_bits_flipped(
        (shape, source_strides, target_strides) in views(),
        itemsize in prop::sample::select(vec![1usize, 2, 4, 8, 16]),
        flips in prop::sample::select(vec![0u128, 0x80]),
        direction in 0..3usize,
    ) {
        let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (sim, pool): (&'static Sim, _) = (Box::leak(Box::default()), Pool::new(&CUTS));
        *ON_DEVICE.lock().unwrap() = Some(sim);
        let dtype = DType { bits: (itemsize * 8) as u8, ..DType::UINT8 };
        let source_layout = Layout::new(dtype, &shape, Some(&source_strides), 0).unwrap();
        let target_layout = Layout::new(dtype, &shape, Some(&target_strides), 0).unwrap();
        let capacity = |layout: &Layout| layout.byte_extent().0 + layout.byte_extent().1;
        let source = numbers(capacity(&source_layout), 5);
        let mut target = vec![0u8; capacity(&target_layout)];
        let mut expected = target.clone();
        let start = source.as_ptr().expose_provenance() + source_layout.byte_extent().0;
        let end = target.as_mut_ptr().expose_provenance() + target_layout.byte_extent().0;
        let check = expected.as_mut_ptr().expose_provenance() + target_layout.byte_extent().0;
        // SAFETY: the vectors have room for the views.
        unsafe { elements((start, &offsets(&source_layout)), (check, &offsets(&target_layout)), itemsize, (flips, None)) };
        let (from, to) = [(GPU, Device::CPU), (Device::CPU, GPU), (GPU, OTHER)][direction];
        let moves = Moves { on_device, ..moves(sim, &pool) };
        // SAFETY: as above.
        unsafe {
            moves.copy(
                Strided { device: from, data: start, layout: &source_layout },
                Strided { device: to, data: end, layout: &target_layout },
                flips,
                STREAM,
            )
        }
        .unwrap();
        if to != Device::CPU {
            sim.finish();
        }
        prop_assert_eq!(target, expected);
        sim.finish();
        let kept = sim.state().memory.len();
        prop_assert!(kept <= 2, "{} blocks are left in addition to the pool's buffers", kept);
    }
}
