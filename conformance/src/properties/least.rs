//! How much of each property must be tested: a property whose cases are all refused says nothing.

use crate::{Coverage, Sides};

/// How the transfer of a case ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    InPlace,
    Copied,
    Refused,
}

/// The least that a property must have tested.
struct Least {
    property: &'static str,
    /// How so many of its cases must have ended.
    way: Way,
    /// One in this many cases, rounded down: a quarter, or less, of what pairs on real frameworks reach.
    one_in: u32,
    /// Why the property tests nothing without them.
    why: &'static str,
}

/// The fewest cases that are judged: with fewer, chance decides.
const ENOUGH: u32 = 50;

/// What each property is for. `dtype` and `honesty` have no row: a target of one dtype refuses most of their cases, which
/// they judge as well. The least share that was seen of any pair of PyTorch, NumPy and TensorFlow on the host, over
/// all rows, is 0.19 for a row of one in 50, and 0.29 for a row of one in 25. Of `failure` it is 0.1: between processes
/// only the ordering can fail.
const LEAST: &[Least] = &[
    Least { property: "life", way: Way::InPlace, one_in: 20, why: "a copy has no lease to release" },
    Least { property: "values", way: Way::InPlace, one_in: 50, why: "a copy says nothing of the exported layout" },
    Least { property: "values", way: Way::Copied, one_in: 25, why: "a view says nothing of copies" },
    Least { property: "shape", way: Way::InPlace, one_in: 50, why: "a copy has strides of its own" },
    Least { property: "identity", way: Way::InPlace, one_in: 25, why: "only a view has the address of its source" },
    Least { property: "identity", way: Way::Copied, one_in: 25, why: "only a copy must have memory of its own" },
    Least { property: "aliasing", way: Way::InPlace, one_in: 25, why: "only shared memory shows writes" },
    Least { property: "order", way: Way::InPlace, one_in: 20, why: "a copy may wait by itself" },
    Least { property: "release_order", way: Way::InPlace, one_in: 20, why: "only memory of a view is reused under it" },
    Least { property: "batch", way: Way::InPlace, one_in: 20, why: "copies return no memory to the source" },
    Least { property: "round_trip", way: Way::InPlace, one_in: 25, why: "a copy does not come back to its address" },
    Least { property: "copy", way: Way::Copied, one_in: 2, why: "it compares copies" },
    Least { property: "far", way: Way::Copied, one_in: 2, why: "it compares copies" },
    Least { property: "staging", way: Way::Copied, one_in: 2, why: "it compares copies" },
    Least { property: "torn", way: Way::Copied, one_in: 2, why: "it judges copies" },
    Least { property: "huge", way: Way::InPlace, one_in: 2, why: "it counts the elements of views" },
    Least { property: "threads", way: Way::InPlace, one_in: 50, why: "only a view has a lease that threads share" },
    Least { property: "devices", way: Way::InPlace, one_in: 20, why: "a copy may wait by itself" },
    Least { property: "failure", way: Way::Refused, one_in: 100, why: "elsewhere no call failed" },
    Least { property: "graph", way: Way::InPlace, one_in: 4, why: "a copy in a graph is work like any other" },
];

impl Way {
    fn count(self, seen: Coverage) -> u32 {
        match self {
            Self::InPlace => seen.in_place,
            Self::Copied => seen.copied,
            Self::Refused => seen.refused,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::InPlace => "in place",
            Self::Copied => "copied",
            Self::Refused => "refused",
        }
    }
}

/// Returns why a property of a pair was hardly tested, if it was. A target whose tensors own their memory takes nothing
/// in place, as its profile says.
pub(crate) fn hardly_tested(property: &str, cases: u32, seen: Coverage, sides: &Sides) -> Option<String> {
    let possible = |way| way != Way::InPlace || !sides.to.profile.owns_memory;
    let mut of = LEAST.iter().filter(|least| least.property == property && cases >= ENOUGH && possible(least.way));
    let few = of.find(|least| least.way.count(seen) < cases / least.one_in);
    few.map(|Least { way, one_in, why, .. }| {
        let (count, least, word) = (way.count(seen), cases / one_in, way.word());
        format!("hardly tested: {count} of {cases} cases were {word}, and {least} must be, because {why}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{Config, Pair, property};

    const HABITS: [Habits; 4] = [Habits::Generous, Habits::Common, Habits::Strict, Habits::Immutable];

    #[test]
    fn a_property_that_only_copies_is_hardly_tested() {
        let device = SimDevice::new(1);
        let sim = SimFramework::new(&device, Habits::Common);
        let mut sides = Sides::of(&sim, &sim);
        let copies = |count| Coverage { copied: count, ..Coverage::default() };
        let told = hardly_tested("aliasing", 100, copies(100), &sides).unwrap();
        assert!(told.contains("0 of 100 cases were in place, and 4 must be, because"), "{told}");
        assert_eq!(hardly_tested("aliasing", ENOUGH - 1, copies(ENOUGH), &sides), None);
        assert_eq!(hardly_tested("aliasing", 100, Coverage { in_place: 4, ..copies(96) }, &sides), None);
        assert!(hardly_tested("copy", 100, Coverage { refused: 100, ..copies(0) }, &sides).is_some());
        sides.to.profile.owns_memory = true;
        assert_eq!(hardly_tested("aliasing", 100, copies(100), &sides), None);
    }

    /// For longer: `TRUEBRIDGE_SEEDS=20`.
    #[test]
    fn no_minimum_is_a_matter_of_luck() {
        let seeds = std::env::var("TRUEBRIDGE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
        for (seed, from, to) in
            (0..seeds).flat_map(|seed| HABITS.map(|from| HABITS.map(|to| (seed, from, to))).concat())
        {
            let device = SimDevice::new(seed);
            let (source, target) = (SimFramework::new(&device, from), SimFramework::new(&device, to));
            let pair = Pair::new(&source, &target).with_native_way();
            let report = Config { cases: 600, seed, ..Config::default() }.certify_pair(&pair, &mut ());
            for judged in &report.properties {
                for least in LEAST.iter().filter(|least| least.property == judged.name && judged.cases >= 20) {
                    let share = least.way.count(judged.coverage) * least.one_in;
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
