//! Copies in threads before and after a fork, as workers that load data make them.

#![cfg(unix)]

use bridge_core::{Copies, DType, Device, Layout, Strided};
use bridge_cuda::Copier;

/// Rows and columns of the matrix: 16 MiB, for several threads where there are several processors.
const SIDE: i64 = 2048;

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
    fn alarm(seconds: u32) -> u32;
    fn _exit(code: i32) -> !;
}

/// Transposes a matrix. Returns whether every element is at its place.
fn transposes() -> bool {
    let source: Vec<u32> = (0..(SIDE * SIDE) as u32).collect();
    let mut target = vec![0u32; source.len()];
    let layout = |strides: [i64; 2]| Layout::new(DType::UINT32, &[SIDE, SIDE], Some(&strides), 0).unwrap();
    let (from, to) = (layout([1, SIDE]), layout([SIDE, 1]));
    let data = (source.as_ptr().expose_provenance(), target.as_mut_ptr().expose_provenance());
    let side = |data, layout| Strided { device: Device::CPU, data, layout };
    // SAFETY: each view covers the whole of one vector.
    unsafe { Copier.copy(side(data.0, &from), side(data.1, &to), 0, None) }.unwrap();
    let rows = target.chunks_exact(SIDE as usize).enumerate();
    rows.flat_map(|(i, row)| row.iter().enumerate().map(move |(j, found)| (i, j, *found)))
        .all(|(i, j, found)| found == source[j * SIDE as usize + i])
}

#[test]
fn a_forked_child_copies_in_threads() {
    assert!(transposes());
    // SAFETY: the child calls nothing that a fork leaves in an unknown state: glibc keeps its allocator and the start
    // of threads usable. It leaves by `_exit`, and is killed by the alarm where it hangs.
    let child = unsafe {
        match fork() {
            0 => {
                alarm(120);
                _exit(if transposes() { 0 } else { 1 })
            }
            child => child,
        }
    };
    let mut status = -1;
    // SAFETY: the status is a number of this function, and the child is its own.
    assert_eq!((child > 0).then(|| unsafe { waitpid(child, &raw mut status, 0) }), Some(child));
    assert_eq!(status, 0, "the child crashed, hung, or copied wrongly");
    assert!(transposes());
}
