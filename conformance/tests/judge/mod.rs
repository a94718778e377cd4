//! The judgement of a pair.

#![allow(dead_code, reason = "not every test uses all of it")]

use bridge_conformance::{Case, Config, Observer, Pair, PropertyReport, Subject, Verdict};
use bridge_core::{ErrorKind, Result};

/// The subject, or `None` where its library or its device is missing. The reason is printed.
pub fn present<S>(made: Result<S>) -> Option<S> {
    match made {
        Err(error) if error.kind() == ErrorKind::Missing => {
            println!("skipped: {error}");
            None
        }
        made => Some(made.unwrap_or_else(|error| panic!("{error}"))),
    }
}

fn number(variable: &str, otherwise: u32) -> u32 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Prints each verdict as it comes: a pair may take long.
struct Printed(String);

impl Observer for Printed {
    fn started(&mut self, _: &str, _: u32, _: &Case) {}

    fn finished(&mut self, judged: &PropertyReport) {
        println!("{}: {} {:?}, {} cases", self.0, judged.name, judged.verdict, judged.cases);
    }
}

/// Runs every property, prints the verdicts, and panics where one has failed.
pub fn judge<F, T>(from: &dyn Subject<Tensor = F>, to: &dyn Subject<Tensor = T>) {
    let (cases, seed) = (number("TRUEBRIDGE_CASES", 1000), number("TRUEBRIDGE_SEED", 1));
    let config = Config { cases, seed: seed.into(), ..Config::default() };
    let name = format!("{} → {}", from.profile().name, to.profile().name);
    let report = config.certify_pair(&Pair::new(from, to), &mut Printed(name));
    let failed: Vec<_> = report.properties.iter().filter(|judged| judged.verdict == Verdict::Failed).collect();
    assert!(failed.is_empty(), "{} → {}: {failed:#?}", report.from, report.to);
}

/// Plants a fault into the adapters, and panics where this property does not find it.
#[cfg(feature = "planted")]
pub fn finds<F, T>(fault: &'static str, property: &str, from: &dyn Subject<Tensor = F>, to: &dyn Subject<Tensor = T>) {
    bridge_core::planted::plant(fault);
    let config = Config { cases: 600, seed: 5, shrinks: false, ..Config::default() };
    let report = config.certify_pair(&Pair::new(from, to), &mut ());
    bridge_core::planted::plant("");
    let failed = report.properties.iter().filter(|judged| judged.verdict == Verdict::Failed);
    let failed: Vec<_> = failed.map(|judged| judged.name.as_str()).collect();
    assert!(failed.contains(&property), "{property} must find {fault}; found by {failed:?}");
}
