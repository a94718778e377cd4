//! Every planted fault in turn: where the suite does not find one, the suite has failed.

use super::device::SimDevice;
use super::framework::SimFramework;
use crate::fault::{FAULTS, Fault, FaultReport, Faulty, Planted, Role};
use crate::{Config, Pair};
use bridge_core::{Adapter, Options, transfer};

/// Cases for each fault, over all properties. Each property stops at its first failure.
const CASES: u32 = 400;

/// Cases for the property that must find the fault, where it has not: a few routes are drawn seldom, and no verdict may
/// depend on the seed.
const MORE_CASES: u32 = 160_000;

/// Plants every fault in turn into an adapter of the simulated device, and runs every property on it.
pub fn run_faults(seed: u64) -> Vec<FaultReport> {
    let run = |planted: &Planted| FaultReport {
        fault: planted.name.into(),
        must_be_caught_by: planted.caught_by.into(),
        caught_by: caught_by(planted, Some(planted.fault), seed),
    };
    FAULTS.iter().map(run).collect()
}

fn caught_by(planted: &Planted, fault: Option<Fault>, seed: u64) -> Vec<String> {
    let failing = |config: &Config| {
        let device = SimDevice::new(seed);
        let (from, to) = (SimFramework::new(&device, planted.from), SimFramework::new(&device, planted.to));
        match planted.role {
            Role::Source => config.failing(&Pair::new(&Faulty::new(from, fault), &to).with_native_method()),
            Role::Target => config.failing(&Pair::new(&from, &Faulty::new(to, fault)).with_native_method()),
            Role::Conversion => {
                let mut pair = Pair::new(&from, &to).with_native_method();
                pair.conversion_there = Some(Box::new(|tensor, ordering, copy| {
                    let exported = from.export(tensor)?;
                    let options = Options::default().with_copy(copy);
                    transfer(&from, &to, tensor, ordering, &options).inspect_err(|_| std::mem::forget(exported))
                }));
                config.failing(&pair)
            }
            Role::Ordering => {
                config.failing(&Pair::new(&from, &to).with_ordering(device.ordering_with(fault)).with_native_method())
            }
        }
    };
    let config = Config { cases: CASES, seed, ..Config::default() };
    let mut caught_by = failing(&config);
    if fault.is_some() && !caught_by.iter().any(|name| name == planted.caught_by) {
        let properties = Some(vec![planted.caught_by.into()]);
        caught_by.extend(failing(&Config { cases: MORE_CASES, properties, ..config }));
    }
    caught_by
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::REAL_FAULTS;
    use crate::habits::Habits;
    use crate::{Calls, Failure, Route, Sides, property, replay, tree};

    #[test]
    fn the_wrapper_itself_does_no_harm() {
        for planted in [&FAULTS[0], &FAULTS[FAULTS.len() - 1]] {
            assert_eq!(caught_by(planted, None, 5), Vec::<String>::new());
        }
    }

    #[test]
    fn faults_are_caught_where_one_side_has_a_single_stream_and_does_not_write() {
        let elsewhere = [
            (Fault::StreamForgotten, Habits::Immutable, Habits::Common),
            (Fault::StreamMistaken, Habits::Immutable, Habits::Common),
            (Fault::WaitSkipped, Habits::Generous, Habits::Immutable),
            (Fault::ReleaseNotOrdered, Habits::Immutable, Habits::Common),
            (Fault::ReleaseNotOrdered, Habits::Common, Habits::Immutable),
            (Fault::EarlyRelease, Habits::Immutable, Habits::Generous),
            (Fault::GroupReleasedEarly, Habits::Common, Habits::Immutable),
            (Fault::FlushNotOrdered, Habits::Immutable, Habits::Common),
            (Fault::FlushForgotten, Habits::Generous, Habits::Immutable),
            (Fault::Leak, Habits::Generous, Habits::Immutable),
            (Fault::SilentCopy, Habits::Generous, Habits::Immutable),
        ];
        for (fault, from, to) in elsewhere {
            let known = FAULTS.iter().find(|planted| planted.fault == fault).unwrap();
            let planted = Planted { from, to, ..*known };
            let caught_by = caught_by(&planted, Some(fault), 5);
            assert!(caught_by.iter().any(|name| name == planted.caught_by), "{planted:?}: {caught_by:?}");
        }
    }

    /// Returns whether one route of a property finds the fault.
    fn is_found_by(name: &str, route: Route, planted: &Planted) -> bool {
        let device = SimDevice::new(5);
        let (from, to) = (SimFramework::new(&device, planted.from), SimFramework::new(&device, planted.to));
        let property = property(name).unwrap();
        let sides = Sides::of(&from, &to);
        let plant = |sound, role| Faulty::new(sound, (planted.role == role).then_some(planted.fault));
        let (from, to) = (plant(from, Role::Source), plant(to, Role::Target));
        let pair = Pair::new(&from, &to).with_native_method();
        let cases = (0..1000).map(|index| tree(property, &sides, 5, index).current());
        let mut cases = cases.filter(|case| case.route == route);
        cases.any(|case| replay(&pair, property, &case).is_err())
    }

    #[test]
    fn every_route_finds_the_faults_that_it_is_there_for() {
        let (source, target, generous, common) = (Role::Source, Role::Target, Habits::Generous, Habits::Common);
        let routes = [
            (Route::Direct, Fault::ReuseOverclaimed, source, common, generous),
            (Route::Noted, Fault::ViewsNotNoted, target, generous, generous),
            (Route::Onward, Fault::ExportNotNoted, target, generous, generous),
            (Route::CopyOn, Fault::ExportNotNoted, target, generous, generous),
            (Route::CopyOn, Fault::CopyElsewhere, target, generous, generous),
            (Route::Late, Fault::ReleaseNotOrdered, target, generous, common),
            (Route::Twice, Fault::SecondViewNotNoted, target, generous, common),
            (Route::Beside, Fault::ReuseBorrowed, target, generous, generous),
            (Route::Beside, Fault::ReuseBorrowed, target, common, generous),
            (Route::Fresh, Fault::StreamKeptByHandle, target, generous, common),
            (Route::Fresh, Fault::StreamKeptByHandle, target, common, generous),
            (Route::Exported, Fault::OwnerStreamNotKept, source, common, generous),
            (Route::Exported, Fault::OwnerStreamNotKept, source, generous, common),
            (Route::Passing, Fault::ViewsNotNoted, target, generous, generous),
        ];
        for (route, fault, role, from, to) in routes {
            let planted = Planted { fault, name: "", caught_by: "release_order", role, from, to };
            assert!(is_found_by("release_order", route, &planted), "{route:?} does not find {planted:?}");
        }
        let (fault, from, to) = (Fault::StreamMistaken, generous, common);
        for (route, role) in [(Route::Direct, source), (Route::Onward, target), (Route::CopyOn, target)] {
            let planted = Planted { fault, name: "", caught_by: "order", role, from, to };
            assert!(is_found_by("order", route, &planted), "{route:?} does not find {planted:?}");
        }
    }

    /// Returns what `torn` says of the fault in one kind of call: the words of its oracle, not the checker's.
    /// Without a fault it returns any failure.
    fn torn_by(calls: Calls, fault: Option<Fault>, seed: u64) -> Option<String> {
        let device = SimDevice::new(seed);
        let [from, to] = [Habits::Generous, Habits::Common].map(|habits| SimFramework::new(&device, habits));
        let pair = Pair::new(&from, &to).with_ordering(device.ordering_with(fault));
        let (torn, sides) = (property("torn").unwrap(), Sides::of(&from, &to));
        let cases = (0..100).map(|index| tree(torn, &sides, seed, index).current());
        let mut failures = cases.filter(|case| case.calls == calls).filter_map(|case| replay(&pair, torn, &case).err());
        let counts = |failure: &Failure| fault.is_none() || failure.message.contains("of generation");
        failures.find(counts).map(|failure| failure.message)
    }

    /// For longer: `TRUEBRIDGE_SEEDS=50`.
    #[test]
    fn each_method_of_copying_finds_torn_targets_by_their_elements() {
        use Calls::{Halves, Prepared, Together};
        use Fault::{PieceLeftOut, TableReusedEarly, UpdateNotAwaited, UpdateNotOrdered};
        let seeds = std::env::var("TRUEBRIDGE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
        for (seed, calls) in (0..seeds).flat_map(|seed| [Together, Halves, Prepared].map(|calls| (seed, calls))) {
            assert_eq!(torn_by(calls, None, seed), None, "{calls:?}, seed {seed}");
            let early = (calls == Halves).then_some(TableReusedEarly);
            for fault in [PieceLeftOut, UpdateNotOrdered, UpdateNotAwaited].into_iter().chain(early) {
                let found = torn_by(calls, Some(fault), seed);
                assert!(found.is_some(), "{calls:?} does not find {fault:?}, seed {seed}");
            }
        }
    }

    #[test]
    fn no_reason_shows_a_value_as_rust_writes_it() {
        for planted in FAULTS.iter().filter(|planted| matches!(planted.role, Role::Source | Role::Target)) {
            let device = SimDevice::new(5);
            let (from, to) = (SimFramework::new(&device, planted.from), SimFramework::new(&device, planted.to));
            let plant = |sound, role| Faulty::new(sound, (planted.role == role).then_some(planted.fault));
            let (from, to) = (plant(from, Role::Source), plant(to, Role::Target));
            let config = Config { cases: 100, seed: 5, shrinks: false, ..Config::default() };
            let report = config.certify_pair(&Pair::new(&from, &to), &mut ());
            // What a panic says is the adapter's. Advice of core's names what a caller passes.
            let mut reasons = report.properties.iter().filter_map(|property| property.reason.as_ref());
            let shown = |text: &str| {
                ["Some(", "None", "ZeroCopy", "Copy(", "InPlace", " { ", "::"].iter().any(|at| text.contains(at))
            };
            assert_eq!(
                reasons.find(|reason| shown(&reason.replace("Pair::dtype", "").replace("Options::order", ""))
                    && !reason.starts_with("panicked")),
                None,
                "{}",
                planted.name
            );
        }
    }

    #[test]
    fn every_fault_names_a_property() {
        assert!(FAULTS.len() >= 62);
        assert!(FAULTS.iter().all(|planted| property(planted.caught_by).is_some()));
        assert!(REAL_FAULTS.iter().all(|planted| property(planted.caught_by).is_some()));
    }
}
