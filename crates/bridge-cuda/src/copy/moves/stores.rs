//! Stores past the cache, and pages of the host.

use std::ptr;

/// Copies `nbytes` bytes.
///
/// # Safety
///
/// Both ranges are valid for `nbytes` bytes and do not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, nbytes: usize) {
    // SAFETY: the caller's promises.
    unsafe { ptr::copy_nonoverlapping(from, to, nbytes) };
}

/// Copies `nbytes` bytes past the cache. An ordinary store first loads the line that it replaces: filling a cold target
/// from a warm buffer this way takes half the time.
///
/// # Safety
///
/// Both ranges are valid for `nbytes` bytes and do not overlap.
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, nbytes: usize) {
    let head = to.align_offset(LINE).min(nbytes);
    let body = (nbytes - head) / LINE * LINE;
    // SAFETY: the three parts are inside both ranges, and the body begins where `LINE` divides the target's address.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        copy_lines(from.add(head), to.add(head), body);
        ptr::copy_nonoverlapping(from.add(head + body), to.add(head + body), nbytes - head - body);
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// # Safety
///
/// As [`copy_streaming`]; `LINE` divides `to` and `nbytes`.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_lines(from: *const u8, to: *mut u8, nbytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    for line in (0..nbytes).step_by(LINE) {
        // SAFETY: the line is inside both ranges; `LINE` divides the target's address, and SSE2 belongs to x86-64.
        unsafe {
            let (from, to) = (from.add(line).cast::<__m128i>(), to.add(line).cast::<__m128i>());
            let words = [0, 1, 2, 3].map(|word| _mm_loadu_si128(from.add(word)));
            words.into_iter().enumerate().for_each(|(word, value)| _mm_stream_si128(to.add(word), value));
        }
    }
    // Streaming stores are weakly ordered: without the fence another thread may see the end of the move before them.
    // SAFETY: SSE belongs to x86-64.
    unsafe { _mm_sfence() };
}

/// # Safety
///
/// As [`copy_streaming`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_lines(from: *const u8, to: *mut u8, nbytes: usize) {
    // SAFETY: the caller's promises.
    unsafe { copy(from, to, nbytes) };
}

/// Asks the system for huge pages in `nbytes` bytes from `start`, which are about to be written. Fresh memory costs a
/// page fault per 4 KiB otherwise, more than the copy itself. It is a hint: a failure changes nothing.
pub(crate) fn prefer_huge_pages(start: *mut u8, nbytes: usize) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let head = start.align_offset(HUGE).min(nbytes);
        let whole = (nbytes - head) / HUGE * HUGE;
        if whole > 0 {
            // SAFETY: the advice changes no byte, and is an error where no memory is mapped.
            let _ = unsafe {
                rustix::mm::madvise(start.wrapping_add(head).cast(), whole, rustix::mm::Advice::LinuxHugepage)
            };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, nbytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_at_every_alignment_and_no_other() {
        let source: Vec<u8> = (0..1000u32).map(|at| (at * 7 + 1) as u8).collect();
        for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 63), (64, 33)] {
            for nbytes in [0, 1, 15, 63, 64, 65, 127, 128, 200, 777] {
                let mut target = vec![0u8; 1000];
                // SAFETY: both ranges are inside the vectors.
                unsafe { copy_streaming(source[from..].as_ptr(), target[to..].as_mut_ptr(), nbytes) };
                assert_eq!(target[to..to + nbytes], source[from..from + nbytes], "{nbytes} from {from} to {to}");
                assert!(target[..to].iter().chain(&target[to + nbytes..]).all(|byte| *byte == 0));
            }
        }
    }

    /// Returns the ranges of mapped memory, inside this one, for which huge pages are requested.
    #[cfg(target_os = "linux")]
    fn advised(within: &std::ops::Range<usize>) -> Vec<std::ops::Range<usize>> {
        let number = |text| usize::from_str_radix(text, 16).ok();
        let (mut mapping, mut found) = (0..0, Vec::new());
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let Some((start, end)) = first.split_once('-').and_then(|(start, end)| number(start).zip(number(end))) {
                mapping = start.max(within.start)..end.min(within.end);
            } else if first == "VmFlags:" && rest.split(' ').any(|flag| flag == "hg") && !mapping.is_empty() {
                found.push(mapping.clone());
            }
        }
        found
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn huge_pages_are_asked_for_inside_the_range_alone() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return eprintln!("skipped: the system has no transparent huge pages");
        }
        const HUGE: usize = 2 << 20;
        const NBYTES: usize = 5 * HUGE;
        // SAFETY: the system chooses the place.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), NBYTES, ProtFlags::READ, MapFlags::PRIVATE) }.unwrap();
        let mapped = start.addr()..start.addr() + NBYTES;
        let page = mapped.start.next_multiple_of(HUGE);
        for (from, nbytes) in [(page + 1, HUGE), (page - 1, HUGE), (page + HUGE, HUGE - 1)] {
            prefer_huge_pages(ptr::with_exposed_provenance_mut(from), nbytes);
            assert_eq!(advised(&mapped), [], "{nbytes} bytes");
        }
        prefer_huge_pages(ptr::with_exposed_provenance_mut(page - 64), 3 * HUGE);
        let whole = page..page + 2 * HUGE;
        assert_eq!(advised(&mapped), [whole]);
        // SAFETY: no code uses the mapping.
        unsafe { munmap(start, NBYTES) }.unwrap();
    }

    #[test]
    fn advice_for_any_range_leaves_its_bytes() {
        let mut bytes = vec![7u8; 5 << 20];
        for (from, nbytes) in [(0, 0), (0, 5 << 20), (1, 100), (123, 3 << 20)] {
            prefer_huge_pages(bytes[from..].as_mut_ptr(), nbytes);
        }
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
}
