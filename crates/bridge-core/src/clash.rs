//! Which of many copies write to bytes that another one reads or writes.

use crate::Layout;
use crate::cast::Change;
use crate::overlap::overlap;

/// A view, by the address of its first element.
type View<'a> = (usize, &'a Layout);

/// Two sides of copies that share bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Clash {
    /// The later piece of the two, by its index.
    pub piece: usize,
    /// The other one. It is the same where a target shares bytes with its own source.
    pub other: usize,
    /// Whether both sides are targets.
    pub targets: bool,
}

/// The lowest and the highest address that a side touches.
struct Interval {
    start: usize,
    end: usize,
    piece: usize,
    is_target: bool,
}

/// A copy, from the first view to the second, and what happens to each element.
type Copied<'a> = (View<'a>, View<'a>, Change);

/// Finds copies of which one writes to bytes of another one, or of its own source, among `count`, of which `piece` returns
/// each. Returns which of them repeat an earlier copy, source and target alike, as those of weights that a model holds twice:
/// they need not be made.
///
/// Only addresses are compared: they differ between host memory and the memory of every device.
///
/// # Errors
///
/// A clash.
pub(crate) fn repeated<'a>(count: usize, piece: impl Fn(usize) -> Copied<'a>) -> Result<Vec<bool>, Clash> {
    let mut intervals: Vec<Interval> = Vec::with_capacity(2 * count);
    // All sources, and then all targets: each are often in order already, as parts of one tensor are.
    for is_target in [false, true] {
        for index in 0..count {
            let (source, target, _) = piece(index);
            let (data, layout) = if is_target { target } else { source };
            if layout.numel() > 0 {
                let (below, above) = layout.byte_extent();
                let (start, end) = (data.wrapping_sub(below), data.wrapping_add(above));
                intervals.push(Interval { start, end, piece: index, is_target });
            }
        }
    }
    // Of equal ones the earlier piece comes first, so that the later one repeats it.
    intervals.sort_by_key(|interval| (interval.start, interval.piece));
    if intervals.is_sorted_by(|one, next| one.end <= next.start) {
        return Ok(vec![false; count]);
    }
    let mut repeats = vec![false; count];
    // What may reach the next interval. Sources need not be apart from each other, so they are looked through for targets
    // only.
    let (mut sources, mut targets): (Vec<&Interval>, Vec<&Interval>) = (Vec::new(), Vec::new());
    let view = |interval: &Interval| match interval.is_target {
        true => piece(interval.piece).1,
        false => piece(interval.piece).0,
    };
    for next in &intervals {
        let reaches = |other: &&Interval| other.end > next.start;
        targets.retain(reaches);
        if next.is_target {
            sources.retain(reaches);
        }
        let against = targets.iter().chain(next.is_target.then_some(&sources).into_iter().flatten());
        let mut is_repeated = false;
        for other in against.filter(|other| overlap(view(next), view(other))) {
            if next.is_target && other.is_target && piece(next.piece) == piece(other.piece) {
                is_repeated = true;
                continue;
            }
            return Err(Clash {
                piece: next.piece.max(other.piece),
                other: next.piece.min(other.piece),
                targets: next.is_target && other.is_target,
            });
        }
        match next.is_target {
            true if is_repeated => repeats[next.piece] = true,
            true => targets.push(next),
            false => sources.push(next),
        }
    }
    Ok(repeats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cast, DType};
    use proptest::prelude::*;

    const AS_IT_IS: Change = (0, None);

    fn layout(length: i64, stride: i64) -> Layout {
        Layout::new(DType::UINT8, &[length], Some(&[stride]), 0).unwrap()
    }

    fn among(pieces: &[Copied<'_>]) -> Result<Vec<bool>, Clash> {
        repeated(pieces.len(), |index| pieces[index])
    }

    fn bytes((data, layout): View<'_>) -> Vec<usize> {
        (0..layout.shape()[0]).map(|i| (data as i64 + i * layout.strides()[0]) as usize).collect()
    }

    proptest! {
        /// The sweep finds a clash where, and only where, comparing all pairs finds one.
        #[test]
        fn a_clash_is_found_where_there_is_one(
            sides in prop::collection::vec(((0usize..400, 0i64..6, -3i64..4), (0usize..400, 0i64..6, 1i64..4)), 0..12),
        ) {
            let views: Vec<_> = sides
                .iter()
                .map(|(source, target)| ((1000 + source.0, layout(source.1, source.2)), (1000 + target.0, layout(target.1, target.2))))
                .collect();
            let pieces: Vec<_> =
                views.iter().map(|(source, target)| ((source.0, &source.1), (target.0, &target.1), AS_IT_IS)).collect();
            let share = |one: View<'_>, other: View<'_>| bytes(one).iter().any(|byte| bytes(other).contains(byte));
            let clashes = |piece: usize, other: usize| {
                let (one, two) = (pieces[piece], pieces[other]);
                let targets = piece != other && one != two && share(one.1, two.1);
                targets || share(one.0, two.1) || share(one.1, two.0)
            };
            let any = (0..pieces.len()).any(|piece| (0..=piece).any(|other| clashes(piece, other)));
            match among(&pieces) {
                Ok(repeats) => {
                    prop_assert!(!any);
                    for (piece, repeats) in repeats.into_iter().enumerate() {
                        let earlier = pieces[..piece].contains(&pieces[piece]) && !bytes(pieces[piece].1).is_empty();
                        prop_assert_eq!(repeats, earlier);
                    }
                }
                Err(clash) => {
                    prop_assert!(any && clashes(clash.piece, clash.other), "{:?}", clash);
                    let both = share(pieces[clash.piece].1, pieces[clash.other].1);
                    prop_assert!(!clash.targets || both);
                }
            }
        }
    }

    #[test]
    fn columns_of_one_matrix_are_apart() {
        let column = Layout::new(DType::FLOAT32, &[100], Some(&[8]), 0).unwrap();
        let compact = Layout::new(DType::FLOAT32, &[100], None, 0).unwrap();
        let pieces: Vec<_> = (0..8).map(|i| ((100_000 + i * 400, &compact), (4 * i, &column), AS_IT_IS)).collect();
        assert_eq!(among(&pieces), Ok(vec![false; 8]));
        let twice = [pieces[3], pieces[1], pieces[3]];
        assert_eq!(among(&twice), Ok(vec![false, false, true]));
        let other = [pieces[3], (pieces[1].0, pieces[3].1, AS_IT_IS)];
        assert_eq!(among(&other), Err(Clash { piece: 1, other: 0, targets: true }));
        let flipped = [pieces[3], (pieces[3].0, pieces[3].1, (1 << 31, None))];
        assert_eq!(among(&flipped), Err(Clash { piece: 1, other: 0, targets: true }), "other bits");
        let casts = [DType::FLOAT16, DType::BFLOAT16].map(|from| Cast::new(from, DType::FLOAT32).ok());
        let cast = casts.map(|cast| (pieces[3].0, pieces[3].1, (0, cast)));
        assert_eq!(among(&[cast[0], cast[0]]), Ok(vec![false, true]));
        assert_eq!(among(&cast), Err(Clash { piece: 1, other: 0, targets: true }), "another cast");
        let own = [pieces[0], ((200, &compact), (300, &compact), AS_IT_IS)];
        assert_eq!(among(&own), Err(Clash { piece: 1, other: 0, targets: false }));
    }
}
