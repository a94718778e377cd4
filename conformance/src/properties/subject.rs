//! What the suite relies on: a subject does what the documentation of its methods says, and a profile has a meaning.

use super::{Outcome, Pair, ensure, same_bytes};
use crate::model::{self, random_bytes};
use crate::{Capabilities, Case, Observed, Spec, Subject};
use bridge_core::{DType, DeviceKind, Profile, Result, Strides};
use std::time::{Duration, Instant};

/// What `fill` fills a copy with before it is copied to.
const FILLED: u8 = 0x5a;

/// Both subjects create, read, write and copy their tensors as the suite needs. No adapter is involved.
pub(super) fn subject<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    let (from, to) = pair.profiles();
    has_a_meaning(from, &pair.from.capabilities())?;
    has_a_meaning(to, &pair.to.capabilities())?;
    makes_tensors(pair.from, case)?;
    makes_tensors(pair.to, case)?;
    delays(pair.from, case)?;
    delays(pair.to, case)
}

/// No case can show what a claim without a meaning is worth.
fn has_a_meaning(profile: &Profile, can: &Capabilities) -> Outcome {
    let (name, alignment) = (&profile.name, profile.alignment);
    let sound = alignment == 0 || alignment.is_power_of_two();
    ensure!(sound, "{name}: the profile's alignment is a power of two, or 0 for any address, and not {alignment}");
    let left_out = can.dtypes.iter().find(|dtype| !profile.dtypes.contains(dtype));
    if let Some(dtype) = left_out {
        ensure!(false, "{name}: the subject makes tensors of {dtype}, which the profile leaves out: list it");
    }
    let strides = !can.negative_strides || profile.strides == Strides::Any || profile.owns_memory;
    ensure!(strides, "{name}: the subject makes views with negative strides, and the profile refuses them: state Any");
    let kept = !can.read_only || profile.keeps_read_only || profile.owns_memory;
    ensure!(
        kept,
        "{name}: the subject makes read-only tensors, and the profile does not keep them: state that it does"
    );
    let tried = alignment != 0 || profile.owns_memory || can.unaligned;
    ensure!(
        tried,
        "{name}: the profile takes any address, and its subject has no unaligned tensors to show it: state 1"
    );
    let rank = &profile.rank;
    ensure!(
        !rank.is_empty(),
        "{name}: the profile's rank has a number of dimensions in it, and {}..={} has none",
        rank.start(),
        rank.end()
    );
    Ok(())
}

/// The most dimensions that are tried.
const MOST: usize = 4;

/// Tensors have every number of dimensions that the profile lists.
fn has_its_ranks<S>(subject: &dyn Subject<Tensor = S>, dtype: DType, seed: u64) -> Outcome {
    let (name, rank) = (subject.name(), &subject.profile().rank);
    let (mut made, mut refused) = (Vec::new(), None);
    for ndim in (0..=MOST).filter(|ndim| rank.contains(ndim)) {
        let spec = Spec::compact(dtype, &vec![2; ndim]);
        let seen = subject.create(&spec, &random_bytes(&spec, seed)).and_then(|tensor| subject.observe(&tensor));
        match seen {
            Ok(seen) if seen.shape.len() == ndim => made.push(ndim),
            Ok(seen) => refused = refused.or(Some((ndim, format!("its shape is {:?}", seen.shape)))),
            Err(error) => refused = refused.or(Some((ndim, error.to_string()))),
        }
    }
    let Some((ndim, why)) = refused else { return Ok(()) };
    let advice = match (made.first(), made.last()) {
        (Some(least), Some(&MOST)) => format!("declare Profile::with_rank({least}..={})", rank.end()),
        (Some(least), Some(most)) => format!("declare Profile::with_rank({least}..={most})"),
        _ => "make `create` follow its `Spec`, or declare the numbers that it makes by Profile::with_rank".into(),
    };
    ensure!(false, "{name}: the profile lists {ndim} dimensions, and `create` does not make them ({why}): {advice}");
    Ok(())
}

/// The shortest time of a delay. Every delay of the suite takes milliseconds.
const SHORTEST: Duration = Duration::from_micros(200);

/// How often a delay is tried: all have to take that time.
const TRIES: usize = 4;

/// A delay keeps what is submitted after it waiting. Only a device has one, and a simulated device has no time.
fn delays<S>(subject: &dyn Subject<Tensor = S>, case: &Case) -> Outcome {
    if subject.device().kind != DeviceKind::CUDA {
        return Ok(());
    }
    let tensor = subject.create(&case.spec, &random_bytes(&case.spec, case.seed))?;
    takes_time(subject.name(), || {
        let started = Instant::now();
        subject.delay()?;
        subject.read(&tensor)?;
        Ok(started.elapsed())
    })
}

/// No load of the machine makes a delay shorter, so a sound one never fails.
fn takes_time(name: &str, mut delayed: impl FnMut() -> Result<Duration>) -> Outcome {
    for _ in 0..TRIES {
        let took = delayed()?;
        let advice = "submit a kernel of a few milliseconds to the current stream";
        ensure!(took >= SHORTEST, "{name}: a read after `delay` took {took:?}, so nothing was delayed: {advice}");
    }
    Ok(())
}

/// Where tensors of the framework have strides, `create` makes them and `read` follows them.
fn has_its_strides<S>(subject: &dyn Subject<Tensor = S>, dtype: DType, seed: u64) -> Outcome {
    let (name, profile) = (subject.name(), subject.profile());
    if profile.strides == Strides::Compact || !profile.rank.contains(&2) {
        return Ok(());
    }
    let spec = Spec { strides: vec![1, 2], offset: 1, base: 8, ..Spec::compact(dtype, &[2, 3]) };
    let bytes = random_bytes(&spec, seed);
    let read = subject.read(&subject.create(&spec, &bytes)?)?;
    same_bytes(
        &format!("{name}: what `create` made with strides and `read` returns"),
        &read,
        &model::elements(&spec, &bytes),
    )
}

fn makes_tensors<S>(subject: &dyn Subject<Tensor = S>, case: &Case) -> Outcome {
    let (name, spec, can) = (subject.name(), &case.spec, subject.capabilities());
    has_its_ranks(subject, spec.dtype, case.seed)?;
    has_its_strides(subject, spec.dtype, case.seed)?;
    let bytes = random_bytes(spec, case.seed);
    let mut first = subject.create(spec, &bytes)?;
    same_bytes(&format!("{name}: what `create` made and `read` returns"), &subject.read(&first)?, &bytes)?;
    let second = subject.create(spec, &bytes)?;
    let (at_first, at_second) = (subject.observe(&first)?, subject.observe(&second)?);
    let told = (at_first.dtype, &at_first.shape) == (spec.dtype, &spec.shape);
    ensure!(told, "{name}: `observe` returns “{at_first}” for “{spec}”");
    apart(name, "`create` returns a tensor in new memory", spec, &at_first, &at_second)?;
    let shared = subject.observe(&subject.share(&first))?;
    ensure!(shared.address == at_first.address, "{name}: `share` returns the same tensor, not a copy");
    if can.writes {
        let written = model::random_elements(spec, model::numel(&spec.shape), case.seed.wrapping_add(1));
        subject.write(&second, &written)?;
        same_bytes(&format!("{name}: what `write` wrote"), &subject.read(&second)?, &written)?;
    }
    let nbytes = bytes.len();
    let mut copy = filled(subject, nbytes, FILLED)?;
    subject.snapshot(&first, &mut copy)?;
    apart(name, "`snapshot` copies to new memory", spec, &at_first, &subject.observe(&copy)?)?;
    // No framework has to keep a bool that is neither of its two values.
    let byte = if spec.dtype == DType::BOOL { 1 } else { !FILLED };
    subject.fill(&mut first, byte)?;
    same_bytes(&format!("{name}: what `fill` filled"), &subject.read(&first)?, &vec![byte; nbytes])?;
    same_bytes(&format!("{name}: what `snapshot` copied, after a write to its source"), &subject.read(&copy)?, &bytes)?;
    for stream in subject.streams() {
        let mut runs = 0;
        let mut run = || {
            runs += 1;
            Ok(())
        };
        // SAFETY: the stream is one of the subject's.
        unsafe { subject.on_stream(stream, &mut run) }?;
        ensure!(runs == 1, "{name}: `on_stream` runs its body once, not {runs} times");
    }
    Ok(())
}

/// Allocates bytes that are all the same.
fn filled<S>(subject: &dyn Subject<Tensor = S>, nbytes: usize, byte: u8) -> Result<S> {
    let mut tensor = subject.allocate(nbytes)?;
    subject.fill(&mut tensor, byte)?;
    Ok(tensor)
}

/// Two tensors of as many bytes share none.
fn apart(name: &str, rule: &str, spec: &Spec, one: &Observed, other: &Observed) -> Outcome {
    let nbytes = model::numel(&spec.shape) * model::itemsize(spec.dtype);
    let (one, other) = (one.address, other.address);
    ensure!(one.abs_diff(other) >= nbytes, "{name}: {rule}, but {one:#x} and {other:#x} are not {nbytes} bytes apart");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_that_ever_takes_no_time_is_none() {
        let long = Duration::from_millis(3);
        assert_eq!(takes_time("toy", || Ok(long)), Ok(()));
        let mut times = [long, long, Duration::from_micros(20)].into_iter();
        let failure = takes_time("toy", || Ok(times.next().unwrap_or(long))).unwrap_err();
        assert!(failure.message.contains("a read after `delay` took 20µs"), "{failure}");
    }
}
