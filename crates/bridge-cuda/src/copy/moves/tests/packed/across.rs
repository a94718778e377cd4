//! Blocks that move from one device to another.

use super::*;

#[test]
fn the_streams_of_two_devices_wait_for_each_other() {
    let (mine, moving, theirs) = ((GPU, STREAM), own(GPU, 0), own(OTHER, 0));
    let (_one, sim, pool) = device();
    let moves = packing(sim, &pool);
    rows(10, 304).moved(&moves, sim, (GPU, OTHER)).map_err(|failed| failed.error).unwrap();
    // The memory there is ready; the bytes are there; the targets are written.
    assert_eq!(sim.state().orders, [[theirs, mine], [mine, theirs], [theirs, mine]], "one block moves in the stream");
    sim.state().orders.clear();
    rows(50, 304).moved(&moves, sim, (GPU, OTHER)).map_err(|failed| failed.error).unwrap();
    // A block is packed; there is room for the next one; this one is there. The one after the next is packed and
    // spread when the copy before it has left and its own place is free.
    let (packed, left, capacity, there) = ([mine, moving], [moving, mine], [theirs, moving], [moving, theirs]);
    let blocks = [vec![packed, packed, capacity, capacity, there], vec![left, packed, capacity, there]];
    let blocks = [blocks.concat(), vec![left, packed, capacity, there], vec![left, packed, there]].concat();
    assert_eq!(sim.state().orders, [blocks, vec![left, [theirs, mine]]].concat());
}

/// Returns the work that has run when work begins.
fn before(state: &State, number: usize) -> HashSet<usize> {
    let (mut all, mut next) = (HashSet::new(), vec![number]);
    while let Some(number) = next.pop() {
        next.extend(state.nodes[number].after.iter().filter(|number| all.insert(**number)));
    }
    all
}

/// Otherwise it could wait for work that waits for it.
#[test]
fn a_move_waits_for_no_other_stream_of_the_caller() {
    let (_one, sim, pool) = device();
    let moves = packing(sim, &pool);
    // SAFETY: no driver sees this stream.
    let second = unsafe { Stream::from_handle(0xa1) };
    let mut tree = rows(50, 304);
    let mut lanes = |stream| {
        tree.submitted_in(&moves, (GPU, OTHER), stream).map_err(|failed| failed.error).unwrap();
        let state = sim.state();
        let mine = |number: &usize| state.nodes[*number].place == (GPU, stream);
        let copies = (0..state.nodes.len()).filter(|number| state.nodes[*number].kind == Kind::Copy);
        let own = copies.filter(|copy| before(&state, *copy).iter().any(mine)).collect::<Vec<_>>();
        for number in own.iter().flat_map(|copy| before(&state, *copy)) {
            let place = state.nodes[number].place;
            assert!(place.0 == OTHER || place == (GPU, stream) || place.1 != STREAM && place.1 != second, "{place:?}");
        }
        state.streams / 2
    };
    assert_eq!((lanes(STREAM), lanes(STREAM)), (1, 1), "one stream of the caller has one lane");
    assert_eq!((lanes(second), lanes(STREAM), lanes(second)), (2, 2, 2), "another one has another");
    sim.finish();
    // SAFETY: as above.
    let third = unsafe { Stream::from_handle(0xa2) };
    assert_eq!(lanes(third), 2, "what has ended is used again");
}

/// While a block moves, the next one is packed and the one before is spread: none of these waits for another.
#[test]
fn the_work_on_three_blocks_overlaps() {
    let (_one, sim, pool) = device();
    let mut tree = rows(50, 304);
    // Each load packs with one launch, moves with one copy, and spreads with one launch.
    tree.submitted(&packing(sim, &pool), (GPU, OTHER)).map_err(|failed| failed.error).unwrap();
    let state = sim.state();
    let before = |number: usize| before(&state, number);
    let of = |place: Place, kind: Kind| {
        let nodes = state.nodes.iter().enumerate().filter(|(_, node)| (node.place, node.kind) == (place, kind));
        nodes.map(|(number, _)| number).collect::<Vec<_>>()
    };
    let (packed, moved) = (of((GPU, STREAM), Kind::Launch), of(own(GPU, 0), Kind::Copy));
    let spread = of(own(OTHER, 0), Kind::Launch);
    assert_eq!((packed.len(), moved.len(), spread.len()), (4, 4, 4));
    for at in 0..3 {
        assert!(!before(packed[at + 1]).contains(&moved[at]), "block {} is packed while {at} moves", at + 1);
        assert!(!before(moved[at + 1]).contains(&spread[at]), "block {at} is spread while {} moves", at + 1);
    }
    for at in 0..2 {
        assert!(before(packed[at + 2]).contains(&moved[at]), "two blocks of the source at a time");
        assert!(before(moved[at + 2]).contains(&spread[at]), "two blocks of the target at a time");
    }
}

/// The kernel is pending there, and the caller's stream does not wait for it.
#[test]
fn the_host_waits_where_a_stream_cannot_wait_for_another_device() {
    fn fails<const AT: usize>(earlier: (Device, Stream), later: (Device, Stream)) -> Result<()> {
        order(earlier, later)?;
        let sim = ON_DEVICE.lock().unwrap().expect("a test has set it");
        match sim.state().orders.len() {
            made if made == AT => Err(Error::new(ErrorKind::Driver, "planned failure")),
            _ => Ok(()),
        }
    }
    for (order, waits, arrives) in [(fails::<1> as Order, 0, false), (fails::<2>, 0, false), (fails::<3>, 1, true)] {
        let (_one, sim, pool) = device();
        let mut tree = rows(10, 304);
        let done = tree.moved(&Moves { order, ..packing(sim, &pool) }, sim, (GPU, OTHER));
        assert_eq!((done.is_ok(), tree.wrong() == 0, sim.state().waits), (arrives, arrives, waits));
        assert_eq!(remaining(sim), (0, 0));
    }
}

/// A few columns of a matrix there, which one block holds although it is large.
#[test]
fn a_target_with_gaps_on_another_device_is_written() {
    let (_one, sim, pool) = device();
    let bytes = (DType::UINT8, DType::UINT8);
    let mut tree = Tree::new(&[((vec![3000, 2], vec![2, 1], vec![5, 1]), bytes, 0)]);
    tree.moved(&packing(sim, &pool), sim, (GPU, OTHER)).map_err(|failed| failed.error).unwrap();
    assert_eq!((tree.wrong(), &*sim.state().launches), (0, &[1, 1][..]));
}

/// One failure of an order or an event leaves no stream behind.
#[test]
fn streams_of_a_move_that_has_failed_are_used_again() {
    static FAILS: Mutex<usize> = Mutex::new(usize::MAX);
    fn once(earlier: Place, later: Place) -> Result<()> {
        let mut left = FAILS.lock().unwrap();
        *left = left.wrapping_sub(1);
        if *left == 0 { Err(Error::new(ErrorKind::Driver, "planned failure")) } else { order(earlier, later) }
    }
    let (_one, sim, pool) = device();
    let moves = Moves { order: once, ..packing(sim, &pool) };
    let mut tree = rows(50, 304);
    for at in 1..25 {
        *FAILS.lock().unwrap() = at;
        let failed = tree.moved(&moves, sim, (GPU, OTHER)).is_err();
        *FAILS.lock().unwrap() = usize::MAX;
        tree.moved(&moves, sim, (GPU, OTHER)).map_err(|failed| failed.error).unwrap();
        let streams = sim.state().streams;
        assert_eq!((tree.wrong(), streams, remaining(sim)), (0, 2, (0, 0)), "{at}, failed: {failed}");
    }
}
