//! Random lists of pieces that are copied together.

use crate::strategy::{blocks, tensors};
use crate::{End, Pieces, Sides, Spec, model};
use bridge_core::{Cast, DType, Strides};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// The most kinds of pieces in a list. Few, as some frameworks compile a kernel for every shape.
pub(crate) const KINDS: usize = 6;

/// Bytes of the compact pieces.
const SIZES: [usize; 2] = [1 << 10, 4 << 10];

/// The most elements of the targets of a kind, where it has several: more of them test nothing new.
const MOST: usize = 1 << 12;

/// How a target differs from its source.
#[derive(Debug, Clone)]
struct Change {
    /// The dimension with the lowest number runs fastest.
    order: Vec<u32>,
    /// Elements between two rows of each dimension.
    gaps: Vec<i64>,
    /// Elements before the first one.
    lead: usize,
    /// Bytes from an address that the alignment of every framework divides.
    align: usize,
    /// The dimension that runs backwards.
    reversed: Option<usize>,
    /// The length to which a dimension of length 1 is broadcast, and that of a dimension at the front.
    broadcast: (i64, Option<i64>),
    /// Which float the elements are cast to.
    cast: Option<usize>,
}

/// Chooses kinds of pieces, and how many there are of each: up to some hundred in all.
pub(crate) fn lists(sides: &Sides) -> BoxedStrategy<Vec<Pieces>> {
    let dtypes = sides.computed_dtypes();
    let source = prop_oneof![5 => tensors(sides, dtypes, false), 1 => blocks(sides, SIZES.into())];
    let count = prop_oneof![3 => Just(1usize), 3 => 2usize..6, 1 => 16usize..64];
    let on_host = prop_oneof![16 => Just(None), 1 => select(&[Some(End::Source), Some(End::Target)][..])];
    let (to, shared) = (targets(sides), prop::bool::weighted(0.3));
    let pieces = (source, changes(), count, shared, on_host).prop_map(move |(from, change, count, shared, on_host)| {
        let to = to(&from, &change);
        let count = count.min(MOST / model::numel(&to.shape).max(1)).max(1);
        Pieces { from, to, count, shared, on_host }
    });
    vec(pieces, 1..=KINDS).boxed()
}

fn changes() -> impl Strategy<Value = Change> {
    let layout = (vec(any::<u32>(), 6), vec(0i64..3, 6), 0usize..4, select(&[0usize, 16][..]));
    let reversed = prop::option::weighted(0.2, 0usize..6);
    let broadcast = (prop_oneof![2 => Just(1i64), 1 => 2i64..5], prop::option::weighted(0.2, 1i64..4));
    (layout, reversed, broadcast, prop::option::weighted(0.4, 0usize..6)).prop_map(
        |((order, gaps, lead, align), reversed, broadcast, cast)| Change {
            order,
            gaps,
            lead,
            align,
            reversed,
            broadcast,
            cast,
        },
    )
}

/// Returns what makes targets that the framework has.
fn targets(sides: &Sides) -> impl Fn(&Spec, &Change) -> Spec + use<> {
    let (can, ranks) = (sides.to.can.clone(), sides.common_ranks());
    let strided = sides.to.profile.strides != Strides::Compact;
    let listed = sides.to.profile.dtypes.clone();
    let makes = move |dtype: &DType| can.dtypes.contains(dtype) && listed.contains(dtype);
    let floats: Vec<DType> = Cast::DTYPES.into_iter().filter(makes).collect();
    let negative = sides.to.can.negative_strides;
    move |from, change| {
        let mut shape = from.shape.clone();
        let (length, front) = change.broadcast;
        if let Some(one) = shape.iter_mut().find(|one| **one == 1) {
            *one = length;
        }
        shape.splice(0..0, front.filter(|_| shape.len() < *ranks.end()));
        let is_float = Cast::DTYPES.contains(&from.dtype);
        let cast = change.cast.filter(|_| is_float).and_then(|cast| floats.get(cast % floats.len().max(1)));
        let mut spec = Spec::compact(cast.copied().unwrap_or(from.dtype), &shape);
        if !strided || model::numel(&shape) == 0 {
            return spec;
        }
        let mut inner: Vec<usize> = (0..shape.len()).collect();
        inner.sort_by_key(|dim| change.order.get(*dim));
        let mut next = 1;
        for dim in inner {
            spec.strides[dim] = next;
            next = next * shape[dim] + change.gaps.get(dim).copied().unwrap_or_default();
        }
        spec.offset = change.lead;
        if let Some(dim) = change.reversed.filter(|dim| negative && *dim < shape.len()) {
            spec.offset += ((shape[dim] - 1) * spec.strides[dim]) as usize;
            spec.strides[dim] *= -1;
        }
        (spec.base, spec.align) = (change.lead + next as usize, change.align);
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{property, tree};

    fn all(to: Habits) -> Vec<Vec<Pieces>> {
        let device = SimDevice::new(1);
        let (from, to) = (SimFramework::new(&device, Habits::Generous), SimFramework::new(&device, to));
        let (sides, torn) = (Sides::of(&from, &to), property("torn").unwrap());
        (0..400).map(|index| tree(torn, &sides, 3, index).current().pieces).collect()
    }

    #[test]
    fn elements_of_a_target_are_apart_and_inside() {
        for to in [Habits::Generous, Habits::Common, Habits::Strict] {
            for Pieces { to, .. } in all(to).into_iter().flatten() {
                let mut places = model::places(&to.shape, &to.strides);
                let inside = |place: &i64| (0..to.base as i64).contains(&(to.offset as i64 + place));
                assert!(places.iter().all(inside), "{to}");
                let count = places.len();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), count, "{to}");
            }
        }
    }

    #[test]
    fn lists_have_what_a_copy_may_meet() {
        let lists = all(Habits::Generous);
        let counts: Vec<usize> = lists.iter().map(|list| list.iter().map(|pieces| pieces.count).sum()).collect();
        assert!(counts.contains(&1) && counts.iter().any(|count| *count > 99), "{counts:?}");
        let pieces = || lists.iter().flatten();
        assert!(pieces().any(|pieces| pieces.from.dtype != pieces.to.dtype), "casts");
        assert!(pieces().any(|pieces| pieces.to.shape.len() > pieces.from.shape.len()), "dimensions at the front");
        assert!(
            pieces().any(|pieces| pieces.to.strides.iter().any(|stride| *stride < 0)),
            "targets that run backwards"
        );
        assert!(pieces().any(|pieces| pieces.on_host == Some(End::Target)), "moves");
        let mixed = |list: &&Vec<Pieces>| list.iter().any(|pieces| pieces.from.dtype != list[0].from.dtype);
        assert!(lists.iter().filter(mixed).count() > 100, "mixed dtypes");
    }
}
