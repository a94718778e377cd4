//! How much of each property must be tested: a property whose cases are all refused says nothing.

use crate::{Case, Coverage, Sides, model};

/// What a case has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    InPlace,
    Copied,
    Refused,
    /// What the property is for, by its own account: its function calls [`Pair::show`](super::Pair::show).
    Shown,
}
use Outcome::{Copied, InPlace, Refused, Shown};

/// The least that a property must have tested.
struct Least {
    property: &'static str,
    /// What so many of its cases must have shown.
    outcome: Outcome,
    /// One in this many cases, rounded down: a quarter, or less, of what pairs on real frameworks reach.
    one_in: u32,
    /// Why the property tests nothing without them.
    why: &'static str,
}

const fn least(property: &'static str, outcome: Outcome, one_in: u32, why: &'static str) -> Least {
    Least { property, outcome, one_in, why }
}

/// The fewest cases with which a minimum is missed, in units of the cases that it wants one of. With as many, a pair
/// that reaches four times the minimum misses it in one run of millions. With fewer, more cases are run first.
const ENOUGH: u32 = 8;

/// What each property is for. `dtype` and `honesty` have no row: a target of one dtype refuses most of their cases, which
/// they judge as well. The least share that was seen of any pair of PyTorch, NumPy and TensorFlow on the host, over
/// all rows, is 0.19 for a row of one in 50, and 0.29 for a row of one in 25. Of `failure` it is 0.1: between processes
/// only the ordering can fail.
const LEAST: &[Least] = &[
    least("life", InPlace, 20, "a copy has no lease to release"),
    least("values", InPlace, 50, "a copy says nothing of the exported layout"),
    least("values", Copied, 25, "a view says nothing of copies"),
    least("shape", InPlace, 50, "a copy has its own strides"),
    least("identity", InPlace, 25, "only a view has the address of its source"),
    least("identity", Copied, 25, "only a copy must have new memory"),
    least("aliasing", InPlace, 25, "only shared memory shows writes"),
    least("order", InPlace, 20, "a copy may wait by itself"),
    least("release_order", InPlace, 20, "only memory of a view is reused under it"),
    least("batch", InPlace, 20, "copies return no memory to the source"),
    least("round_trip", InPlace, 25, "a copy does not come back to its address"),
    least("profile", Shown, 50, "elsewhere the own import takes nothing in place"),
    least("round_trip", Shown, 25, "only where both conversions are in place do addresses count"),
    least("read_only", Shown, 25, "only read-only memory in place can be written to"),
    least("copy", Copied, 2, "it compares copies"),
    least("far", Copied, 2, "it compares copies"),
    least("staging", Copied, 2, "it compares copies"),
    least("torn", Copied, 2, "it judges copies"),
    least("huge", InPlace, 2, "it counts the elements of views"),
    least("threads", InPlace, 50, "only a view has a lease that threads share"),
    least("devices", InPlace, 20, "a copy may wait by itself"),
    least("failure", Refused, 100, "elsewhere no call failed"),
    least("graph", InPlace, 4, "a copy in a graph is work like any other"),
];

impl Outcome {
    fn count(self, seen: Coverage) -> u32 {
        match self {
            Self::InPlace => seen.in_place,
            Self::Copied => seen.copied,
            Self::Refused => seen.refused,
            Self::Shown => seen.shown,
        }
    }

    /// Returns what so many cases were.
    fn words(self) -> &'static str {
        match self {
            Self::InPlace => "were in place",
            Self::Copied => "were copied",
            Self::Refused => "were refused",
            Self::Shown => "showed what it is for",
        }
    }

    /// Returns whether a pair can show it. A target whose tensors own their memory takes nothing in place, as its profile
    /// says, and a source that takes nothing gets nothing back.
    fn is_possible(self, property: &str, sides: &Sides) -> bool {
        let takes = sides.from.profile.devices.contains(&sides.device.kind) && !sides.from.profile.owns_memory;
        match self {
            Self::InPlace | Self::Shown if sides.to.profile.owns_memory => false,
            Self::Shown => property != "round_trip" || takes,
            _ => true,
        }
    }
}

/// What was tested of a property: only by cases that have elements, because an empty tensor is in place everywhere.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tested {
    cases: u32,
    seen: Coverage,
}

impl Tested {
    /// Counts a case.
    pub(crate) fn count(&mut self, case: &Case, seen: Coverage) {
        let mut specs = case.pieces.iter().map(|pieces| &pieces.from).chain([&case.spec]);
        if specs.any(|spec| model::numel(&spec.shape) > 0) {
            self.cases += 1;
            self.seen.add(seen);
        }
    }

    /// Returns what was tested too little.
    fn missed(&self, property: &str, sides: &Sides) -> impl Iterator<Item = &'static Least> {
        let missed = move |least: &&Least| {
            let few = least.outcome.count(self.seen) < self.cases / least.one_in;
            few && least.property == property && least.outcome.is_possible(property, sides)
        };
        LEAST.iter().filter(missed)
    }

    /// Returns whether further cases decide if a property was hardly tested.
    pub(crate) fn needs_more(&self, property: &str, sides: &Sides) -> bool {
        self.missed(property, sides).any(|least| self.cases < ENOUGH * least.one_in)
    }

    /// Returns why a property of a pair was hardly tested, if it was.
    pub(crate) fn hardly(&self, property: &str, sides: &Sides) -> Option<String> {
        let few = self.missed(property, sides).find(|least| self.cases >= ENOUGH * least.one_in);
        few.map(|Least { outcome, one_in, why, .. }| {
            let (count, cases, words) = (outcome.count(self.seen), self.cases, outcome.words());
            let least = cases / one_in;
            format!("hardly tested: {count} of {cases} cases with elements {words}, and {least} must, because {why}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{Fault, Faulty};
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{Config, Pair, Spec, property, tree};
    use bridge_core::DType;

    const HABITS: [Habits; 4] = [Habits::Generous, Habits::Common, Habits::Strict, Habits::Immutable];

    fn seeds() -> u64 {
        std::env::var("TRUEBRIDGE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1)
    }

    /// So many cases of this shape that ended like this.
    fn tested(count: u32, shape: &[i64], seen: Coverage) -> Tested {
        let mut tested = Tested::default();
        let sim = SimFramework::new(&SimDevice::new(1), Habits::Common);
        let case = tree(property("values").unwrap(), &Sides::of(&sim, &sim), 1, 0).current();
        let case = Case { spec: Spec::compact(DType::FLOAT32, shape), ..case };
        (0..count).for_each(|_| tested.count(&case, seen));
        tested
    }

    #[test]
    fn a_property_that_only_copies_is_hardly_tested() {
        let sim = SimFramework::new(&SimDevice::new(1), Habits::Common);
        let mut sides = Sides::of(&sim, &sim);
        let copied = Coverage { copied: 1, ..Coverage::default() };
        let in_place = Coverage { in_place: 1, ..Coverage::default() };
        let all = tested(ENOUGH * 25, &[2], copied);
        let told = all.hardly("aliasing", &sides).unwrap();
        assert!(told.contains("0 of 200 cases with elements were in place, and 8 must, because"), "{told}");
        let fewer = tested(ENOUGH * 25 - 1, &[2], copied);
        assert!(fewer.needs_more("aliasing", &sides) && fewer.hardly("aliasing", &sides).is_none());
        assert!(!tested(24, &[2], copied).needs_more("aliasing", &sides), "one of 25 is none of 24");
        assert!(!tested(ENOUGH * 25, &[2], in_place).needs_more("aliasing", &sides));
        let mut empty = tested(1000, &[2, 0], in_place);
        empty.count(&tree(property("values").unwrap(), &sides, 1, 0).current(), copied);
        assert!(empty.cases <= 1);
        let refused = Coverage { refused: 1, ..Coverage::default() };
        assert!(tested(ENOUGH * 2, &[2], refused).hardly("copy", &sides).is_some());
        sides.to.profile.owns_memory = true;
        assert_eq!(all.hardly("aliasing", &sides), None);
    }

    /// For longer: `TRUEBRIDGE_SEEDS=10`.
    #[test]
    fn where_only_empty_tensors_are_in_place_no_property_about_views_passes() {
        let names = ["values", "shape", "identity", "read_only", "aliasing", "round_trip"].map(String::from);
        for seed in 0..seeds() {
            let device = SimDevice::new(seed);
            let (from, to) = (SimFramework::new(&device, Habits::Generous), SimFramework::new(&device, Habits::Common));
            let to = Faulty::new(to, Some(Fault::AlignmentInvented));
            let config = Config { seed, properties: Some(names.to_vec()), ..Config::default() };
            assert_eq!(config.failing(&Pair::new(&from, &to)), names, "seed {seed}");
        }
    }

    /// For longer: `TRUEBRIDGE_SEEDS=20`.
    #[test]
    fn no_minimum_is_a_matter_of_luck() {
        let seeds = seeds();
        for (seed, from, to) in
            (0..seeds).flat_map(|seed| HABITS.map(|from| HABITS.map(|to| (seed, from, to))).concat())
        {
            let device = SimDevice::new(seed);
            let (source, target) = (SimFramework::new(&device, from), SimFramework::new(&device, to));
            let pair = Pair::new(&source, &target).with_native_method();
            let sides = pair.sides();
            let report = Config { cases: 400, seed, ..Config::default() }.certify_pair(&pair, &mut ());
            for judged in report.properties.iter().filter(|judged| judged.cases >= 20) {
                let possible =
                    |least: &&Least| least.property == judged.name && least.outcome.is_possible(&judged.name, &sides);
                for least in LEAST.iter().filter(possible) {
                    let share = least.outcome.count(judged.coverage) * least.one_in;
                    assert!(
                        share >= 2 * judged.cases,
                        "{from:?} → {to:?}, seed {seed}: {judged}, {:?}",
                        judged.coverage
                    );
                }
            }
        }
    }

    #[test]
    fn minimums_are_those_of_properties() {
        assert!(LEAST.iter().all(|least| property(least.property).is_some() && least.one_in > 0));
    }
}
