//! When staging buffers are used again, and when the host waits for one.

use super::*;

#[test]
fn staging_is_not_used_before_its_last_copy_has_run() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let (sources, layout): (Vec<_>, _) = ((1..81).map(|seed| vec![seed; PIECE]).collect(), bytes(PIECE));
    let mut targets = vec![vec![0u8; PIECE]; sources.len()];
    let mut all = |lies| {
        sim.state().lies = lies;
        for (source, target) in sources.iter().zip(&mut targets) {
            let (start, end) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
            let view = |device, data| Strided { device, data, layout: &layout };
            // SAFETY: both are vectors of that length.
            unsafe { moves(&sim, &pool).copy(view(Device::CPU, start), view(GPU, end), 0, STREAM) }.unwrap();
        }
        sim.finish();
        sources.iter().zip(&targets).filter(|(source, target)| source != target).count()
    };
    assert_eq!(all(false), 0);
    assert!(all(true) > 0, "where events lie, this test sees it");
    let pinned = sim.state().memory.len();
    assert!(pinned <= KEPT + 1, "{pinned} buffers for {} moves: the pool is bounded", sources.len());
}

#[test]
fn a_move_of_a_few_megabytes_to_the_device_does_not_wait() {
    for nbytes in [1, 1 << 20, 3 << 20, (8 << 20) - 1] {
        let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
        let (source, layout, mut target) = (numbers(nbytes, 1), bytes(nbytes), vec![0u8; nbytes]);
        let (start, end) = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
        let view = |device, data| Strided { device, data, layout: &layout };
        // SAFETY: both are vectors of that length.
        unsafe { moves(&sim, &pool).copy(view(Device::CPU, start), view(GPU, end), 0, STREAM) }.unwrap();
        assert_eq!(sim.state().done, 0, "{nbytes} bytes: the host has waited");
        sim.finish();
        assert!(source == target);
    }
}

#[test]
fn an_upload_behind_any_work_does_not_wait() {
    let (sim, pool) = (Sim::default(), Pool::new(&UNHURRIED));
    let sources: Vec<_> = (1..40).map(|seed| numbers(100_000 * seed + seed, seed)).collect();
    let mut pinned = 0;
    for round in 0..2 {
        let mut targets: Vec<_> = sources.iter().map(|source| vec![0u8; source.len()]).collect();
        for (source, target) in sources.iter().zip(&mut targets) {
            let (host, nbytes) = (Host::At(source.as_ptr().expose_provenance()), source.len());
            let (link, device, stream, address) = (&sim, GPU, STREAM, target.as_mut_ptr().expose_provenance());
            let upload = Bytes { link, pool: &pool, cuts: &UNHURRIED, device, stream, address, host, nbytes };
            // SAFETY: both are vectors of that length.
            unsafe { upload.up() }.unwrap();
        }
        assert!(sim.state().done == 0 || round > 0, "the host has waited");
        sim.finish();
        assert!(sources == targets);
        let before = std::mem::replace(&mut pinned, sim.state().memory.len());
        assert!(round == 0 || pinned == before, "buffers are used again");
    }
}

#[test]
fn a_buffer_is_of_the_device_that_it_is_taken_for() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let mut used = |device| {
        let mut staging = pool.take(&sim, device).unwrap();
        let mut target = [0u8; 4];
        // SAFETY: the array is that long, and alive until the stream has run.
        unsafe { staging.empty(target.as_mut_ptr().expose_provenance(), 4, STREAM) }.unwrap();
        sim.finish();
    };
    [GPU, OTHER, GPU].into_iter().for_each(&mut used);
    assert_eq!(sim.state().copies.iter().map(|copy| copy.1).collect::<Vec<_>>(), [GPU, OTHER, GPU]);
}

#[test]
fn a_buffer_whose_wait_fails_is_not_used_again() {
    let (sim, pool) = (Sim::default(), Pool::new(&CUTS));
    let mut target = [0u8; 4];
    let mut staging = pool.take(&sim, GPU).unwrap();
    let lost = staging.start();
    // SAFETY: the array is that long, and alive until the stream has run.
    unsafe { staging.empty(target.as_mut_ptr().expose_provenance(), 4, STREAM) }.unwrap();
    sim.state().left = Some(0);
    assert!(staging.wait().is_err());
    drop(staging);
    sim.state().left = None;
    assert_ne!(pool.take(&sim, GPU).unwrap().start(), lost, "the copy may still read it");
    sim.finish();
}
