//! Hostile input for the tests: corpora, and inputs that are drawn from them.
//!
//! An input is text, so that a person can read, write and shorten one. The corpus of a target is
//! `fixtures/fuzz/TARGET.txtar`, where the name of each input says what is hostile about it. [`fuzz`] replays the corpus,
//! and then damages its inputs at random.
//!
//! `TRUEBRIDGE_FUZZ` sets the seconds, `TRUEBRIDGE_SEED` the seed.

mod corpus;
mod extent;
mod fields;
mod random;

pub use corpus::{corpus, unpacked};
pub use extent::{addresses, compact, extent};
pub use fields::Fields;
pub use random::Random;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// Seconds of a target, unless the environment names others.
const USUAL: u64 = 1;

/// Returns the number in a variable of the environment.
///
/// # Panics
///
/// Where it holds something else.
pub fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |text| text.parse().expect("a number"))
}

/// Runs cases until the time is over, each with its number, and returns how many.
pub fn cases(mut case: impl FnMut(&mut Random, u64)) -> u64 {
    let seconds = Duration::from_secs(number("TRUEBRIDGE_FUZZ", USUAL));
    let (mut random, start) = (Random(number("TRUEBRIDGE_SEED", 1)), Instant::now());
    let mut count = 0;
    while start.elapsed() < seconds {
        case(&mut random, count);
        count += 1;
    }
    count
}

/// Runs each input of a target, and then damaged ones until the time is over. Prints the input that fails: put it into
/// the corpus, with the fix.
///
/// # Panics
///
/// With the case.
pub fn fuzz(target: &str, mut case: impl FnMut(&[u8])) {
    let kept = corpus(target);
    let mut run = |name: &str, input: &[u8]| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| case(input))) {
            println!("{target}, {name}:\n{}", String::from_utf8_lossy(input));
            resume_unwind(panic);
        }
    };
    for (name, input) in &kept {
        run(name, input);
    }
    let inputs: Vec<&[u8]> = kept.iter().map(|(_, input)| &input[..]).collect();
    let count = cases(|random, number| run(&format!("case {number}"), &random.damaged(&inputs)));
    println!("{target}: {} kept inputs and {count} drawn ones", kept.len());
}
