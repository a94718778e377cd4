use super::*;
use crate::ordering::used;
use proptest::prelude::*;

const GPU: Device = Device::cuda(0);
// SAFETY: no driver sees this stream.
const A: Stream = unsafe { Stream::from_handle(0xa0) };
// SAFETY: no driver sees this stream.
const B: Stream = unsafe { Stream::from_handle(0xb0) };

fn recorded(streams: Vec<Used>) -> Vec<Stream> {
    streams.iter().map(|used| used.stream).collect()
}

#[test]
fn a_use_reaches_every_view_of_the_address() {
    let views = Views::default();
    let (whole, part) = (0x1000..0x1100, 0x1040..0x1050);
    for bytes in [&whole, &whole, &part] {
        views.enter(GPU, bytes);
    }
    views.enter(Device::cuda(1), &whole);
    assert_eq!(used(&views, GPU, 0x1044, A, || None), 3);
    assert_eq!(used(&views, GPU, 0x1050, B, || None), 2);
    assert_eq!(used(&views, GPU, 0x1100, B, || None), 0, "the byte after the last");
    assert_eq!(recorded(views.leave(GPU, &part)), [A]);
    assert_eq!(recorded(views.leave(GPU, &whole)), [A, B]);
    assert_eq!(recorded(views.leave(GPU, &whole)), [A, B]);
    assert_eq!((used(&views, GPU, 0x1044, A, || None), views.len()), (0, 1));
    assert_eq!(recorded(views.leave(Device::cuda(1), &whole)), []);
    assert!(views.is_empty());
}

#[test]
fn addresses_in_the_same_views_are_told_from_others() {
    let views = Views::default();
    // More than a list has, so that some are in classes.
    let ranges = [0x1000..0x1100, 0x1040..0x1050, 0x1000..0x1080, 0x1010..0x1020, 0x1015..0x1016, 0x1070..0x1090];
    ranges.iter().for_each(|bytes| views.enter(GPU, bytes));
    for one in 0x0ff0..0x1110 {
        let inside = |address| ranges.iter().filter(move |bytes| bytes.contains(&address)).cloned().collect::<Vec<_>>();
        let mut around = views.around(GPU, one).to_vec();
        around.sort_by_key(|bytes| (bytes.start, bytes.end));
        let mut expected = inside(one);
        expected.sort_by_key(|bytes| (bytes.start, bytes.end));
        assert_eq!(around, expected);
        for other in [one + 1, 0x1017, 0x1050] {
            assert_eq!(views.around(GPU, one) == views.around(GPU, other), inside(one) == inside(other));
        }
        assert!(views.around(Device::cuda(1), one).is_empty());
    }
}

#[test]
fn a_handle_used_again_is_kept_although_it_was_noted_raw_before() {
    let views = Views::default();
    views.enter(GPU, &(0x1000..0x1100));
    let keep: Keep = Arc::new(());
    used(&views, GPU, 0x1000, A, || None);
    used(&views, GPU, 0x1000, A, || Some(keep.clone()));
    used(&views, GPU, 0x1000, A, || Some(keep.clone()));
    assert_eq!(Arc::strong_count(&keep), 2, "it is kept, once");
    drop(views.leave(GPU, &(0x1000..0x1100)));
    assert_eq!(Arc::strong_count(&keep), 1);
}

#[test]
fn a_handle_that_nothing_keeps_is_noted_once() {
    let views = Views::default();
    views.enter(GPU, &(0x1000..0x1100));
    for _ in 0..3 {
        used(&views, GPU, 0x1000, A, || None);
    }
    assert_eq!(recorded(views.leave(GPU, &(0x1000..0x1100))), [A]);
}

#[test]
fn a_use_that_is_known_asks_for_no_keep() {
    let views = Views::default();
    views.enter(GPU, &(0x1000..0x1100));
    let keep: Keep = Arc::new(());
    let use_of = |address| {
        let mut asked = false;
        let kept = || {
            asked = true;
            Some(keep.clone())
        };
        (used(&views, GPU, address, A, kept), asked)
    };
    assert_eq!([use_of(0x1000), use_of(0x1000)], [(1, true), (1, false)]);
    views.enter(GPU, &(0x1000..0x1010));
    assert_eq!([use_of(0x1000), use_of(0x1000)], [(2, true), (2, false)], "one of the two had no record");
    assert_eq!(use_of(0x2000), (0, false));
}

#[test]
fn a_keep_may_use_the_views_itself() {
    let views = Views::default();
    views.enter(GPU, &(0x1000..0x1100));
    let reentered = || {
        used(&views, GPU, 0x1000, B, || None);
        None
    };
    assert_eq!(used(&views, GPU, 0x1000, A, reentered), 1);
}

#[test]
fn views_of_no_bytes_have_no_address() {
    let views = Views::default();
    views.enter(GPU, &(0x1000..0x1000));
    assert_eq!((used(&views, GPU, 0x1000, A, || None), views.len()), (0, 0));
    assert!(views.leave(GPU, &(0x1000..0x1000)).is_empty());
}

fn counted(spans: &mut Spans<u8, usize>, place: u8, address: usize) -> usize {
    let mut count = 0;
    spans.containing(place, address, |bytes, views| {
        assert!(bytes.contains(&address));
        count += *views;
    });
    count
}

#[test]
fn ranges_at_the_ends_of_the_address_space() {
    let mut spans = Spans::<u8, usize>::default();
    for bytes in [0..1, 0..usize::MAX, usize::MAX - 1..usize::MAX] {
        *spans.enter(0, &bytes).unwrap() += 1;
    }
    let at = |spans: &mut _, address| counted(spans, 0, address);
    assert_eq!([0, 1, usize::MAX - 1, usize::MAX].map(|address| at(&mut spans, address)), [2, 1, 2, 0]);
    assert!(spans.enter(0, &(5..5)).is_none() && spans.leave(0, &(5..5), |_| true).is_none());
    let reversed = Range { start: 6, end: 5 };
    assert!(spans.enter(0, &reversed).is_none());
}

proptest! {
    /// The map agrees with a list of all ranges.
    #[test]
    fn it_agrees_with_a_list(
        steps in prop::collection::vec((0u8..2, 0usize..300, 0usize..9, 0usize..16, 0..4), 0..200),
    ) {
        let (mut spans, mut list) = (Spans::<u8, usize>::default(), Vec::new());
        for (place, start, log, more, step) in steps {
            let bytes = start..start + (1 << log) + more;
            match step {
                0 | 1 => {
                    *spans.enter(place, &bytes).unwrap() += 1;
                    list.push((place, bytes));
                }
                2 if !list.is_empty() => {
                    let (place, bytes) = list.swap_remove(start % list.len());
                    let removed = spans.leave(place, &bytes, |views| {
                        *views -= 1;
                        *views == 0
                    });
                    prop_assert_eq!(removed.is_some(), !list.contains(&(place, bytes)));
                }
                _ => {
                    let expected = list.iter().filter(|(at, bytes)| *at == place && bytes.contains(&start)).count();
                    prop_assert_eq!(counted(&mut spans, place, start), expected);
                }
            }
            prop_assert_eq!(spans.is_empty(), list.is_empty());
        }
    }
}
