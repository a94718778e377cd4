//! Many pieces that move together, next to the same elements copied one by one.

mod across;

use super::*;
use std::sync::PoisonError;

/// Figures that make several blocks of a few small pieces, and more pieces of staging than buffers.
const SMALL: Cuts = {
    let cut = Cut { share: 1 << 10, threads: 3, buffers: 3, shortest: 512, longest: 1 << 10, at_once: 0 };
    Cuts { down: cut, up: cut, block: 4 << 10, across: (512, 4 << 10) }
};

/// Every direction of a tree.
const ALL: [(Device, Device); 3] = [DIRECTIONS[0], DIRECTIONS[1], (GPU, OTHER)];

/// The two dtypes of a piece; both are one where it is not cast.
type Dtypes = (DType, DType);

/// A tree of pieces, in memory of the test. What is a device's is the host's here.
struct Tree {
    layouts: Vec<(Layout, Layout)>,
    sources: Vec<Vec<u8>>,
    targets: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
    changes: Vec<(u128, Option<Cast>)>,
}

impl Tree {
    /// Returns a tree of views with their dtypes and the bits to flip.
    fn new(pieces: &[(Views, Dtypes, u128)]) -> Self {
        let (layouts, sources, targets) = Default::default();
        let mut tree = Self { layouts, sources, targets, expected: Vec::new(), changes: Vec::new() };
        for (seed, ((shape, from, to), dtypes, flips)) in pieces.iter().enumerate() {
            let from = Layout::new(dtypes.0, shape, Some(from), 0).unwrap();
            let to = Layout::new(dtypes.1, shape, Some(to), 0).unwrap();
            let capacity = |layout: &Layout| layout.byte_extent().0 + layout.byte_extent().1;
            let cast = Cast::new(dtypes.0, dtypes.1).ok();
            let mut source = numbers(capacity(&from), seed);
            if cast.is_some() {
                // Numbers of few bits.
                source.chunks_mut(4).filter(|_| dtypes.0 == DType::FLOAT32).for_each(|element| element[..2].fill(0));
            }
            tree.targets.push(vec![0xcd; capacity(&to)]);
            tree.expected.push(vec![0xcd; capacity(&to)]);
            tree.sources.push(source);
            tree.layouts.push((from, to));
            tree.changes.push((*flips, cast));
        }
        for (number, expected) in tree.expected.iter_mut().enumerate() {
            let (from, to) = &tree.layouts[number];
            let start = tree.sources[number].as_ptr().expose_provenance() + from.byte_extent().0;
            let end = expected.as_mut_ptr().expose_provenance() + to.byte_extent().0;
            let sides = ((start, &*offsets(from)), (end, &*offsets(to)));
            // SAFETY: the vectors have room for the views.
            unsafe { elements(sides.0, sides.1, from.itemsize(), tree.changes[number]) };
        }
        tree
    }

    /// Moves all pieces, with the targets as they were first.
    fn moved(&mut self, moves: &Moves<'_>, sim: &Sim, (from, to): (Device, Device)) -> Result<(), Failed> {
        let done = self.submitted(moves, (from, to));
        if from == GPU && to == OTHER {
            sim.finish();
        } else if to != Device::CPU {
            // The host may write its memory as soon as the move returns.
            let kept = self.sources.clone();
            self.sources.iter_mut().for_each(|source| source.fill(0xee));
            sim.finish();
            self.sources = kept;
        }
        done
    }

    /// The same, before the work of the devices has run.
    fn submitted(&mut self, moves: &Moves<'_>, direction: (Device, Device)) -> Result<(), Failed> {
        self.submitted_in(moves, direction, STREAM)
    }

    fn submitted_in(&mut self, moves: &Moves<'_>, (from, to): (Device, Device), stream: Stream) -> Result<(), Failed> {
        self.targets.iter_mut().for_each(|target| target.fill(0xcd));
        let mut pieces = Vec::new();
        for (number, (source, target)) in self.layouts.iter().enumerate() {
            let start = self.sources[number].as_ptr().expose_provenance() + source.byte_extent().0;
            let end = self.targets[number].as_mut_ptr().expose_provenance() + target.byte_extent().0;
            let (flips, cast) = self.changes[number];
            let from = Strided { device: from, data: start, layout: source };
            let to = Strided { device: to, data: end, layout: target };
            pieces.push(Piece { from, to, flips, cast });
        }
        // SAFETY: the vectors have room for the views.
        unsafe { moves.copy_all(&pieces, stream) }
    }

    /// Returns how many targets have other bytes than they should.
    fn wrong(&self) -> usize {
        self.targets.iter().zip(&self.expected).filter(|(target, expected)| target != expected).count()
    }
}

/// A tree whose pieces are plain rows of so many bytes, `count` of them.
fn rows(count: usize, length: usize) -> Tree {
    let bytes = (DType::UINT8, DType::UINT8);
    let piece = |number: usize| ((vec![(length - number % 3) as i64], vec![1], vec![1]), bytes, 0);
    Tree::new(&(0..count).map(piece).collect::<Vec<_>>())
}

/// A piece of plain bytes.
fn plain(length: i64) -> (Views, Dtypes, u128) {
    ((vec![length], vec![1], vec![1]), (DType::UINT8, DType::UINT8), 0)
}

/// Sets up the link of the kernels.
fn device() -> (MutexGuard<'static, ()>, &'static Sim, Pool) {
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let sim: &'static Sim = Box::leak(Box::default());
    *ON_DEVICE.lock().unwrap() = Some(sim);
    (one, sim, Pool::new(&SMALL))
}

/// Returns how many blocks of the device, and how much other memory, are left.
fn remaining(sim: &Sim) -> (usize, usize) {
    let state = sim.state();
    (state.blocks, state.memory.len() - state.blocks)
}

fn packing<'a>(sim: &'a Sim, pool: &'a Pool) -> Moves<'a> {
    Moves { cuts: &SMALL, on_device, ..moves(sim, pool) }
}

fn dtypes() -> impl Strategy<Value = Dtypes> {
    const BOTH: [DType; 2] = [DType::FLOAT32, DType::BFLOAT16];
    prop::sample::select(vec![
        (DType::UINT8, DType::UINT8),
        (DType::FLOAT64, DType::FLOAT64),
        (BOTH[0], BOTH[0]),
        (BOTH[0], BOTH[1]),
        (BOTH[1], BOTH[0]),
        (DType::COMPLEX128, DType::COMPLEX128),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Strided pieces of any dtypes, cast or with bits to flip, some too large to be packed, some empty.
    #[test]
    fn any_tree_arrives_as_its_pieces_copied_one_by_one(
        small in prop::collection::vec((views(), dtypes(), any::<bool>()), 0..30),
        large in prop::collection::vec((600..3000i64, dtypes()), 0..3),
        direction in prop::sample::select(ALL.to_vec()),
    ) {
        let (_one, sim, pool) = device();
        // The sign of the number.
        let sign = |dtype: DType| match dtype {
            DType::FLOAT32 => 1 << 31,
            DType::BFLOAT16 => 1 << 15,
            _ => 0x80,
        };
        let small = small.into_iter().map(|(view, dtypes, flips)| (view, dtypes, if flips { sign(dtypes.0) } else { 0 }));
        let large = large.into_iter().map(|(length, dtypes)| ((vec![length], vec![1], vec![1]), dtypes, 0));
        let none = ((vec![2, 0], vec![1, 1], vec![1, 1]), (DType::UINT8, DType::UINT8), 0);
        let mut tree = Tree::new(&large.chain([none]).chain(small).collect::<Vec<_>>());
        let moves = packing(sim, &pool);
        for _ in 0..2 {
            tree.moved(&moves, sim, direction).map_err(|failed| failed.error).unwrap();
            prop_assert_eq!(tree.wrong(), 0);
        }
        sim.finish();
        let (blocks, kept) = remaining(sim);
        prop_assert!(blocks == 0 && kept <= SMALL.buffers(), "{} blocks and {} buffers are left", blocks, kept);
    }
}

#[test]
fn a_block_is_one_launch_and_few_copies() {
    for (direction, (from, to)) in ALL.into_iter().enumerate() {
        let (_one, sim, _) = device();
        let pool = Pool::new(&CUTS);
        let moves = Moves { cuts: &CUTS, ..packing(sim, &pool) };
        let mut tree = rows(1000, 600);
        tree.moved(&moves, sim, (from, to)).map_err(|failed| failed.error).unwrap();
        assert_eq!(tree.wrong(), 0);
        let state = sim.state();
        assert_eq!(state.launches, if direction == 2 { vec![1000, 1000] } else { vec![1000] });
        assert!(state.copies.len() <= if direction == 2 { 1 } else { 2 }, "{} copies", state.copies.len());
        let nbytes: usize = state.copies.iter().map(|copy| copy.2).sum();
        assert!(nbytes <= 1000 * 608, "{nbytes} bytes in direction {direction}");
    }
}

#[test]
fn a_block_has_a_limit() {
    for direction in DIRECTIONS {
        let (_one, sim, pool) = device();
        rows(60, 256).moved(&packing(sim, &pool), sim, direction).map_err(|failed| failed.error).unwrap();
        assert_eq!(sim.state().launches, [16, 16, 16, 12], "256 bytes each, in blocks of 4096");
        sim.state().launches.clear();
        rows(8, 512).moved(&packing(sim, &pool), sim, direction).map_err(|failed| failed.error).unwrap();
        assert_eq!(sim.state().launches, [8], "the fewest and the largest that are packed");
        let (small, cut) = (Cut { shortest: 256, ..SMALL.up }, SMALL.up);
        for (down, up) in [(small, cut), (cut, small)] {
            sim.state().launches.clear();
            let cuts = Cuts { down, up, ..SMALL };
            let moves = Moves { cuts: &cuts, ..packing(sim, &pool) };
            rows(8, 512).moved(&moves, sim, direction).map_err(|failed| failed.error).unwrap();
            let is_small = if direction == DIRECTIONS[0] { down.shortest == 512 } else { up.shortest == 512 };
            assert_eq!(sim.state().launches.is_empty(), !is_small, "each direction has its own figures");
        }
    }
}

#[test]
fn the_device_has_the_rows_of_its_side_whatever_the_other_has() {
    // Transposed, with gaps, repeated.
    for (shape, strides, expected) in [
        (&[8, 16][..], &[1, 8][..], &[1, 8][..]),
        (&[8, 16], &[40, 2], &[16, 1]),
        (&[4, 8, 16], &[16, 0, 1], &[16, 64, 1]),
    ] {
        let there = Layout::new(DType::FLOAT32, shape, Some(strides), 0).unwrap();
        let here = Layout::new(DType::FLOAT32, shape, None, 0).unwrap();
        let side = |device, layout| Strided { device, data: 1 << 20, layout };
        let (there, here) = (side(GPU, &there), side(Device::CPU, &here));
        for (from, to) in [(there, here), (here, there)] {
            let pieces = [Piece { from, to, flips: 0, cast: None }; 8];
            let loads = loads(&pieces, (1 << 20, 1 << 20), on_host).map_err(|failed| failed.error).unwrap();
            let [Load::Packed(packed)] = &loads[..] else { panic!("one block") };
            assert_eq!(packed.pieces[0].wire.strides(), expected);
        }
    }
}

#[test]
fn fewer_than_eight_small_pieces_and_large_ones_are_moved_one_by_one() {
    let (_one, sim, pool) = device();
    let plain = Moves { on_device: no_kernel, ..packing(sim, &pool) };
    for (count, length) in [(7, 100), (20, 600)] {
        for direction in DIRECTIONS {
            let mut tree = rows(count, length);
            tree.moved(&plain, sim, direction).map_err(|failed| failed.error).unwrap();
            assert_eq!(tree.wrong(), 0);
        }
    }
}

#[test]
fn staging_of_packed_pieces_is_not_used_before_its_last_copy_has_run() {
    for direction in DIRECTIONS {
        let (_one, sim, pool) = device();
        let mut tree = rows(200, 300);
        let mut wrong = |lies| {
            sim.state().lies = lies;
            tree.moved(&packing(sim, &pool), sim, direction).map_err(|failed| failed.error).unwrap();
            sim.finish();
            tree.wrong()
        };
        assert_eq!(wrong(false), 0);
        assert!(wrong(true) > 0, "where events lie, this test sees it");
        assert_eq!(wrong(false), 0);
    }
}

#[test]
fn a_piece_that_a_side_leaves_out_is_seen() {
    unsafe fn host_but_one(pieces: &[Piece<'_>], most: usize) -> Result<(), Failed> {
        // SAFETY: the caller's promises.
        unsafe { on_host(&pieces[pieces.len().min(1)..], most) }
    }
    unsafe fn device_but_one(pieces: &[Piece<'_>], stream: Stream) -> Result<(), Failed> {
        // SAFETY: the caller's promises.
        unsafe { on_device(&pieces[..pieces.len() - 1], stream) }
    }
    for direction in ALL {
        let (_one, sim, pool) = device();
        let moves = packing(sim, &pool);
        let host = Moves { on_host: host_but_one, ..packing(sim, &pool) };
        let device = Moves { on_device: device_but_one, ..packing(sim, &pool) };
        for (moves, faulty) in [(moves, false), (host, direction.1 != OTHER), (device, true)] {
            // The host's loops are for views that are not plain bytes.
            let bytes = (DType::UINT8, DType::UINT8);
            let mut tree = Tree::new(&vec![((vec![300], vec![2], vec![2]), bytes, 0); 50]);
            tree.moved(&moves, sim, direction).map_err(|failed| failed.error).unwrap();
            assert_eq!(tree.wrong() > 0, faulty);
        }
    }
}

#[test]
fn every_failure_is_an_error_and_the_next_tree_arrives() {
    for (threads, direction) in [1, 3].into_iter().flat_map(|threads| ALL.map(|direction| (threads, direction))) {
        let cut = Cut { threads, ..SMALL.up };
        let cuts = Cuts { down: cut, up: cut, ..SMALL };
        for left in 0.. {
            let (_one, sim, pool) = device();
            let moves = Moves { cuts: &cuts, ..packing(sim, &pool) };
            let mut tree = rows(45, 100);
            if direction.1 == OTHER {
                // The first one is too large to be packed with others.
                tree = Tree::new(&[vec![plain(2000)], vec![plain(300); 45]].concat());
            }
            sim.state().left = Some(left);
            let done = tree.moved(&moves, sim, direction);
            let is_over = sim.state().left != Some(0);
            sim.state().left = None;
            sim.finish();
            if let Err(failed) = &done {
                let wrote = tree.targets.iter().flatten().any(|byte| *byte != 0xcd);
                let text = failed.error.to_string();
                assert!(!wrote || text.ends_with("undefined"), "after {left} calls: {text}");
                assert_eq!(failed.error.kind(), ErrorKind::Driver);
            }
            assert!(done.is_err() || tree.wrong() == 0, "after {left} calls");
            tree.moved(&moves, sim, direction).map_err(|failed| failed.error).unwrap();
            assert_eq!(tree.wrong(), 0, "after failure {left}");
            sim.finish();
            // A buffer whose last copy the driver cannot tell the end of is lost: the one before the threads start, and
            // one in each. So are blocks of two devices that copies may still read and fill: two of each.
            let (blocks, kept) = remaining(sim);
            let lost = if direction.1 == OTHER { 4 } else { 0 };
            assert!(blocks <= lost && kept <= SMALL.buffers() + threads + 1, "{blocks}, {kept} after failure {left}");
            if is_over {
                assert!(done.is_ok() && left > 10 && blocks == 0, "{left} calls");
                break;
            }
        }
    }
}

#[test]
fn an_error_of_a_launch_names_the_piece_among_all() {
    unsafe fn third(_: &[Piece<'_>], _: Stream) -> Result<(), Failed> {
        Err(Failed::new(2, Error::new(ErrorKind::CopyNeeded, "planned")))
    }
    for direction in ALL {
        let (_one, sim, pool) = device();
        // The first is moved by itself.
        let mut tree = Tree::new(&[vec![plain(2000)], vec![plain(50); 10]].concat());
        let failed = tree.moved(&Moves { on_device: third, ..packing(sim, &pool) }, sim, direction).unwrap_err();
        assert_eq!((failed.index, failed.error.kind()), (3, ErrorKind::CopyNeeded));
    }
}

#[test]
fn a_piece_that_cannot_be_moved_keeps_all_from_being_moved() {
    let (_one, sim, pool) = device();
    let wide = DType { bits: 128, lanes: 3, ..DType::UINT8 };
    for direction in DIRECTIONS {
        let bytes = (DType::UINT8, DType::UINT8);
        let dtypes = |number: usize| if number == 13 { (wide, wide) } else { bytes };
        let piece = |number: usize| ((vec![5], vec![2], vec![3]), dtypes(number), 0);
        // Without elements of 48 bytes, which the model has not.
        let mut tree =
            Tree::new(&(0..20).map(|number| ((vec![0], vec![2], vec![3]), bytes, number)).collect::<Vec<_>>());
        let layouts: Vec<_> = (0..20).map(piece).collect();
        for (layout, ((shape, from, to), dtypes, _)) in tree.layouts.iter_mut().zip(layouts) {
            let view = |dtype, strides: &[i64]| Layout::new(dtype, &shape, Some(strides), 0).unwrap();
            *layout = (view(dtypes.0, &from), view(dtypes.1, &to));
        }
        let failed = tree.moved(&packing(sim, &pool), sim, direction).unwrap_err();
        assert_eq!((failed.index, failed.error.kind()), (13, ErrorKind::CopyNeeded));
        assert_eq!(sim.state().submitted, 0, "nothing is launched");
    }
}

#[test]
fn a_tree_in_a_capture_is_refused_before_anything_is_launched() {
    let (_one, sim, pool) = device();
    sim.state().captured = true;
    for direction in DIRECTIONS {
        let failed = rows(20, 300).moved(&packing(sim, &pool), sim, direction).unwrap_err();
        assert_eq!((failed.error.kind(), sim.state().submitted), (ErrorKind::Captured, 0));
    }
}

#[test]
fn a_tree_tells_how_far_it_is_and_what_hears_it_may_end_it() {
    let (_one, sim, pool) = device();
    // On one thread, which reports its pieces.
    let cut = Cut { threads: 1, ..SMALL.up };
    let cuts = Cuts { down: cut, up: cut, ..SMALL };
    let moves = Moves { cuts: &cuts, ..packing(sim, &pool) };
    for direction in DIRECTIONS {
        let mut tree = rows(60, 300);
        let large = rows(3, 5000);
        tree.layouts.extend(large.layouts);
        tree.sources.extend(large.sources);
        tree.targets.extend(large.targets);
        tree.expected.extend(large.expected);
        tree.changes.extend(large.changes);
        let nbytes = 3 * 5000 + 60 * 304;
        let mut hearing = |most: usize| {
            let told = Rc::new(RefCell::new(Vec::new()));
            let heard = Rc::clone(&told);
            let tick: Tick = Rc::new(move |done| {
                heard.borrow_mut().push(done);
                let enough = || Error::new(ErrorKind::Framework, "enough");
                if heard.borrow().len() < most { Ok(()) } else { Err(enough()) }
            });
            let done = ticking(tick, || tree.moved(&moves, sim, direction));
            (done, told.take(), tree.wrong())
        };
        let (done, told, wrong) = hearing(usize::MAX);
        assert!(done.is_ok() && wrong == 0);
        assert!(told.len() > 20 && told.is_sorted(), "{told:?}");
        assert!((nbytes - 100..=nbytes).contains(told.last().unwrap()), "{told:?} of {nbytes}");
        let (ended, told, _) = hearing(30);
        assert!(ended.unwrap_err().error.to_string().contains("enough") && told.len() == 30);
        assert_eq!(hearing(usize::MAX).2, 0, "after one that was ended");
    }
}
