//! Which cases were run, by dtype, size, layout and options: a kind of tensor that no case has is a hole.

use crate::{Case, Coverage, Route, Spec, model, words};
use serde::{Deserialize, Serialize};

/// How many cases were of each kind, and how they ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Histogram(Vec<Bar>);

/// The cases of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// What is counted: `dtype`, `size`, `layout` or `option`. A case has one dtype and one size, and may have several
    /// layouts and options.
    pub by: String,
    /// The kind, such as `float32`.
    pub kind: String,
    /// The pairs that had such cases.
    pub pairs: u32,
    /// The cases.
    pub cases: u32,
    /// How their transfers ended.
    #[serde(flatten)]
    pub coverage: Coverage,
}

/// What is counted, in the order of reports.
const BY: [&str; 4] = ["dtype", "size", "layout", "option"];

/// Sizes, by the most bytes of elements that each counts.
const SIZES: [(&str, usize); 7] = [
    ("no elements", 0),
    ("to 64 B", 64),
    ("to 4 KiB", 4 << 10),
    ("to 128 KiB", 128 << 10),
    ("to 2 MiB", 2 << 20),
    ("to 1 GiB", 1 << 30),
    ("above 1 GiB", usize::MAX),
];

impl Histogram {
    /// Counts a case that has run.
    pub(crate) fn count(&mut self, case: &Case, coverage: Coverage) {
        let spec = &case.spec;
        let bytes = model::numel(&spec.shape) * model::itemsize(spec.dtype);
        let size = SIZES.iter().find(|(_, most)| bytes <= *most).map_or("", |(name, _)| name);
        let several = layouts(spec).into_iter().map(|kind| (BY[2], kind));
        let several = several.chain(options(case).into_iter().map(|kind| (BY[3], kind)));
        for (by, kind) in [(BY[0], spec.dtype.to_string()), (BY[1], size.into())].into_iter().chain(several) {
            self.add(&Bar { by: by.into(), kind, pairs: 1, cases: 1, coverage }, u32::max);
        }
    }

    /// Adds the cases of another property of the same pair.
    pub fn add_property(&mut self, other: &Self) {
        other.0.iter().for_each(|bar| self.add(bar, u32::max));
    }

    /// Adds the cases of another pair.
    pub fn add_pair(&mut self, other: &Self) {
        other.0.iter().for_each(|bar| self.add(bar, |one, other| one + other));
    }

    fn add(&mut self, more: &Bar, pairs: impl Fn(u32, u32) -> u32) {
        match self.0.iter_mut().find(|bar| bar.by == more.by && bar.kind == more.kind) {
            Some(bar) => {
                bar.pairs = pairs(bar.pairs, more.pairs);
                bar.cases += more.cases;
                bar.coverage.add(more.coverage);
            }
            None => self.0.push(more.clone()),
        }
    }

    /// Returns the kinds, in the order of reports.
    pub fn bars(&self) -> Vec<&Bar> {
        let place = |all: &[&str], name: &str| all.iter().position(|known| *known == name);
        let sizes = SIZES.map(|(name, _)| name);
        let mut bars: Vec<_> = self.0.iter().collect();
        bars.sort_by_key(|bar| (place(&BY, &bar.by), place(&sizes, &bar.kind), &bar.kind));
        bars
    }

    /// Returns whether no case was counted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn layouts(spec: &Spec) -> Vec<String> {
    let size = model::itemsize(spec.dtype);
    let start = spec.align + spec.offset * size;
    let lengths = spec.shape.iter().zip(&spec.strides);
    let mut long: Vec<_> =
        lengths.filter(|(length, _)| **length > 1).map(|(length, stride)| (*length, *stride)).collect();
    let reversed = long.iter().any(|(_, stride)| *stride < 0);
    let in_order = long.is_sorted_by(|(_, outer), (_, inner)| outer >= inner);
    long.sort_unstable_by_key(|(_, stride)| stride.abs());
    // Elements that the dimensions before reach over.
    let (mut span, mut gaps, mut twice) = (1, false, false);
    for (length, stride) in long {
        gaps |= stride.abs() > span;
        twice |= stride.abs() < span;
        span += (length - 1) * stride.abs();
    }
    let is_compact = !gaps && !twice && !reversed && in_order;
    let known = [
        (spec.shape.is_empty(), "no dimensions"),
        (spec.shape.len() > 8, "more than 8 dimensions"),
        (is_compact, "compact"),
        (!is_compact && !gaps && !twice, "permuted"),
        (gaps, "gaps"),
        (twice, "elements that are there twice"),
        (reversed, "reversed"),
        (spec.offset > 0, "offset"),
        (!start.is_multiple_of(64), "not at a multiple of 64 bytes"),
        (!start.is_multiple_of(1 << size.trailing_zeros()), "not at a multiple of the element"),
    ];
    known.into_iter().filter(|(is_so, _)| *is_so).map(|(_, kind)| kind.into()).collect()
}

fn options(case: &Case) -> Vec<String> {
    let mut all = vec![words::copy(case.copy).to_owned()];
    all.extend(case.spec.read_only.then(|| "read-only".into()));
    all.extend(case.spec.pending.map(|pending| format!("deferred: {}", words::pending(pending))));
    all.extend((case.route != Route::Direct).then(|| format!("route: {:?}", case.route).to_lowercase()));
    all.extend((!case.pieces.is_empty()).then(|| format!("pieces {}", words::calls(case.calls))));
    all.extend((case.streams != Default::default()).then(|| "other streams".into()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{Config, Pair, Sides, property, tree};
    use bridge_core::DType;

    #[test]
    fn a_case_counts_once_by_dtype_and_by_size() {
        let mut all = Histogram::default();
        let device = SimDevice::new(1);
        let sim = SimFramework::new(&device, Habits::Generous);
        for index in 0..300 {
            let case = tree(property("values").unwrap(), &Sides::of(&sim, &sim), 1, index).current();
            all.count(&case, Coverage { copied: 1, ..Coverage::default() });
        }
        for by in ["dtype", "size"] {
            assert_eq!(all.bars().iter().filter(|bar| bar.by == by).map(|bar| bar.cases).sum::<u32>(), 300, "{by}");
        }
        assert!(all.bars().iter().all(|bar| bar.coverage.copied == bar.cases && bar.pairs == 1));
        let kinds: Vec<_> = all.bars().iter().filter(|bar| bar.by == "size").map(|bar| bar.kind.clone()).collect();
        assert_eq!(kinds[..3], ["no elements", "to 64 B", "to 4 KiB"]);
        let mut twice = all.clone();
        twice.add_pair(&all);
        assert!(twice.bars().iter().all(|bar| bar.pairs == 2) && twice.bars().len() == all.bars().len());
        all.add_property(&twice);
        assert!(all.bars().iter().all(|bar| bar.pairs == 2 && bar.coverage.copied == bar.cases));
    }

    #[test]
    fn layouts_are_told_apart() {
        let of = |shape: &[i64], strides: &[i64], offset| {
            layouts(&Spec { strides: strides.into(), offset, ..Spec::compact(DType::FLOAT32, shape) })
        };
        assert_eq!(of(&[], &[], 0), ["no dimensions", "compact"]);
        assert_eq!(of(&[2, 3], &[1, 2], 0), ["permuted"]);
        assert_eq!(of(&[2, 3], &[4, 1], 1), ["gaps", "offset", "not at a multiple of 64 bytes"]);
        assert_eq!(of(&[3, 2], &[0, 1], 0), ["elements that are there twice"]);
        assert_eq!(of(&[3], &[-1], 16), ["permuted", "reversed", "offset"]);
    }

    #[test]
    fn a_pair_says_what_its_cases_were() {
        let device = SimDevice::new(1);
        let sim = SimFramework::new(&device, Habits::Generous);
        let report = Config { cases: 400, ..Config::default() }.certify_pair(&Pair::new(&sim, &sim), &mut ());
        for judged in report.properties.iter().filter(|judged| judged.cases > 0) {
            let dtypes = judged.histogram.bars().into_iter().filter(|bar| bar.by == "dtype");
            assert_eq!(dtypes.map(|bar| bar.cases).sum::<u32>(), judged.cases, "{judged}");
        }
    }
}
