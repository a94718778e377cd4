//! Whether conversions leave something behind.

use super::{Failure, Outcome, Pair, ensure, outstanding};
use crate::{Case, Usage, words};

/// Conversions of a window: so many that what each leaves behind stands out from what a process allocates anyway.
const WINDOW: usize = 256;

/// Windows of which the middle one counts, so that a single allocation of another thread decides nothing.
const WINDOWS: usize = 5;

/// Conversions of a window where only leases and the memory of the frameworks are counted.
const FEW: usize = 8;

/// The most bytes of resident memory that a conversion may leave: half of the page that is resident where a block is
/// leaked that is as large, and far more than a window takes that leaks nothing.
const BYTES: i64 = 2048;

/// Equal conversions leave nothing behind, nor do those that are refused: no lease, no memory, no Python objects. Every
/// second one is made while the view of the one before lives.
pub(super) fn growth<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let leased = outstanding();
    let (tensor, _) = pair.create(case)?;
    // A tensor of another process may itself hold a lease.
    let held = outstanding();
    let counts = |usage: Usage| usage.objects.is_some() || usage.resident.is_some();
    let count = if counts(pair.usage()?) { WINDOW } else { FEW };
    let window = || {
        for _ in 0..count / 2 {
            let (one, _) = pair.transfer(&tensor, case.copy)?;
            let (other, _) = pair.transfer(&tensor, case.copy)?;
            drop((one, other));
        }
        pair.returned(held)
    };
    flat(pair, &format!("{} of the same tensor", words::counted(count, "conversion")), count, window)?;
    drop(tensor);
    pair.returned(leased)?;
    refusals(pair, case)
}

/// What runs `count` calls again and again leaves no memory and no Python objects behind.
fn flat<F, T>(pair: &Pair<'_, F, T>, all: &str, count: usize, window: impl Fn() -> Outcome) -> Outcome {
    let window = || {
        window()?;
        Ok::<_, Failure>(pair.usage()?)
    };
    // What is allocated once for all calls is allocated here.
    window()?;
    let before = pair.memory()?;
    let mut seen = vec![window()?];
    for _ in 0..WINDOWS {
        seen.push(window()?);
    }
    pair.is_back(before)?;
    let grown = |of: fn(&Usage) -> Option<usize>| {
        let steps = seen.windows(2).filter_map(|two| Some(of(&two[1])? as i64 - of(&two[0])? as i64));
        let mut steps: Vec<_> = steps.collect();
        steps.sort_unstable();
        steps.get(WINDOWS / 2).copied().unwrap_or_default()
    };
    let (objects, bytes) = (grown(|usage| usage.objects), grown(|usage| usage.resident));
    ensure!(objects < count as i64 / 2, "{all} leave {objects} objects of Python behind");
    ensure!(bytes < count as i64 * BYTES, "{all} leave {bytes} bytes of memory behind");
    Ok(())
}

/// Conversions that are refused leave nothing behind either: all that the source's users make and that is refused, in turn.
fn refusals<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let mut refused = Vec::new();
    for number in 0.. {
        let Some(usual) = pair.from.usual(number, case.seed).transpose()? else { break };
        refused.extend(usual.refused.map(|_| usual.tensor));
    }
    if refused.is_empty() {
        return Ok(());
    }
    let window = || {
        for tensor in refused.iter().cycle().take(WINDOW) {
            ensure!(pair.transfer(tensor, case.copy).is_err(), "converted, and not refused");
        }
        Ok(())
    };
    flat(pair, &words::counted(WINDOW, "refusal"), WINDOW, window)
}
