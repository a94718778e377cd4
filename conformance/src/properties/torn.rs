//! Copies of many pieces while their sources change.

use super::{Failure, Outcome, Pair, on, on_both};
use crate::model::{self, Random};
use crate::{Calls, Case, Coverage, End, Pieces, Spec, Subject, words};
use bridge_core::{Cast, DType, Device, Misfit, Order, Pair as Update, Prepared, Stream, copy_all};

/// Bytes of which elements of any float of [`Cast::DTYPES`] consist, and are cast to any other one: to four results that
/// differ, and none beyond the finite ones.
const CAST: [u8; 4] = [0x3e, 0x40, 0xbe, 0xbf];

/// The generation of what a target holds before the first copy. Sources hold generation 0 then.
const GARBAGE: usize = 0xfe;

/// Each target holds one whole generation of its source: that of the writes before the copy. The sources are written
/// late, or the copy runs late, and they are overwritten as soon as the call has returned.
pub(super) fn torn<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    pair.kernels.set(true);
    let mut random = Random::new(case.seed);
    let mut scene = Scene::new(pair, case)?;
    let (writer, reader) = (scene.writer, scene.reader);
    let copies = 1 + random.below(3) + usize::from(case.calls == Calls::Prepared);
    let mut snapshots = Vec::new();
    for _ in 0..copies {
        let allocate = |piece: &Piece<'_>| Ok(pair.to.allocate(piece.nbytes())?);
        snapshots.push(on(pair.to, reader, || scene.pieces.iter().map(allocate).collect::<Result<Vec<T>, Failure>>())?);
    }
    let mut copier = match case.calls {
        Calls::Prepared => {
            // A copier is called in the streams that are current then, whichever it was made in.
            let streams = pair.streams();
            let made = if pair.from.capabilities().legacy_stream { writer } else { streams.from(case.streams.back) };
            Some(on_both(pair, made, streams.to(case.streams.onward), || scene.prepared())?)
        }
        _ => None,
    };
    let held = random.below(2) == 0;
    for (copy, snapshots) in snapshots.iter_mut().enumerate() {
        let is_late = random.below(2) == 0;
        on(pair.from, writer, || {
            if !is_late {
                pair.from.delay()?;
            }
            scene.fill(generation(copy))
        })?;
        on_both(pair, writer, reader, || {
            if is_late {
                pair.to.delay()?;
            }
            match &copier {
                Some(copier) if held => scene.copy_held(copier),
                Some(copier) => scene.copy_prepared(copier),
                None => scene.copy(),
            }?;
            if copy + 1 == copies {
                // While the last copies are pending.
                copier = None;
            }
            Ok(())
        })?;
        on(pair.from, writer, || scene.fill(generation(copy) + 1))?;
        on(pair.to, reader, || {
            let mut targets = scene.targets.iter().zip(snapshots);
            targets.try_for_each(|(target, into)| Ok(pair.to.snapshot(target, into)?))
        })?;
    }
    pair.add_seen(Coverage { copied: 1, ..Coverage::default() });
    // The overwriting has run before the copies are looked at, if nothing makes it wait for them.
    on(pair.from, writer, || Ok(scene.sources.last().map(|source| pair.from.read(source)).transpose()?))?;
    for (copy, snapshots) in snapshots.iter().enumerate() {
        for (piece, snapshot) in scene.pieces.iter().zip(snapshots) {
            let got = on(pair.to, reader, || Ok(pair.to.read(snapshot)?))?;
            scene.judge(piece, &got, generation(copy)).map_err(|found| {
                let (number, count) = (piece.number + 1, scene.pieces.len());
                Failure::new(format!("copy {} of {copies}, piece {number} of {count} ({piece}): {found}", copy + 1))
            })?;
        }
    }
    Ok(())
}

/// Returns the number of the writes before a copy. Those after it are the next generation.
fn generation(copy: usize) -> usize {
    2 * copy + 1
}

/// One of the pieces.
struct Piece<'a> {
    number: usize,
    kind: &'a Pieces,
    /// The dtype of the target.
    dtype: DType,
    /// The shape of the target.
    shape: Vec<i64>,
    /// The piece whose source it is a part of; its own number where it is of none.
    owner: usize,
}

impl std::fmt::Display for Piece<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} into {}", self.kind.from, Spec { dtype: self.dtype, ..self.kind.to.clone() })
    }
}

impl Piece<'_> {
    /// Bytes of the target.
    fn nbytes(&self) -> usize {
        model::numel(&self.shape) * model::itemsize(self.dtype)
    }

    /// Returns the byte of the source in a generation.
    fn byte(&self, seed: u64, generation: usize) -> u8 {
        let first = Random::new(seed ^ self.owner as u64).bits() as u8;
        let byte = first.wrapping_add(generation as u8);
        match self.kind.from.dtype {
            // bool knows only two bytes.
            DType::BOOL => byte & 1,
            // Pieces of one source are all cast, or none is.
            dtype if dtype != self.kind.to.dtype => CAST[usize::from(byte) % CAST.len()],
            _ => byte,
        }
    }

    /// Returns an element of the target that holds a generation.
    fn element(&self, seed: u64, generation: usize) -> Vec<u8> {
        let source = vec![self.byte(seed, generation); model::itemsize(self.kind.from.dtype)];
        if self.dtype == self.kind.from.dtype { source } else { model::cast(self.kind.from.dtype, self.dtype, &source) }
    }
}

/// The tensors of a case.
struct Scene<'a, F, T> {
    pair: &'a Pair<'a, F, T>,
    case: &'a Case,
    writer: Option<Stream>,
    reader: Option<Stream>,
    /// Whether pieces may be parts of others.
    parts: bool,
    pieces: Vec<Piece<'a>>,
    sources: Vec<F>,
    targets: Vec<T>,
}

impl<'a, F, T> Scene<'a, F, T> {
    fn new(pair: &'a Pair<'a, F, T>, case: &'a Case) -> Result<Self, Failure> {
        let (streams, from, to) = (pair.streams(), pair.from.capabilities(), pair.to.capabilities());
        // A copy is ordered with the stream that the library names.
        let written = if from.legacy_stream { 0 } else { case.streams.write };
        let (writer, reader) = (streams.from(written), streams.to(case.streams.read));
        // A tensor that is filled by another one leaves its parts behind.
        let parts = from.parts && from.writes && to.parts;
        let (pieces, sources, targets) = Default::default();
        let mut scene = Self { pair, case, writer, reader, parts, pieces, sources, targets };
        for kind in &case.pieces {
            (0..kind.count).try_for_each(|index| scene.add(kind, index))?;
        }
        Ok(scene)
    }

    /// Makes a piece: the one with this index of its kind.
    fn add(&mut self, kind: &'a Pieces, index: usize) -> Outcome {
        let Self { pair, case: Case { seed, .. }, .. } = *self;
        let casts = Cast::new(kind.from.dtype, kind.to.dtype)
            .is_ok_and(|cast| pair.ordering().copies().is_some_and(|copies| copies.casts(cast).is_ok()));
        let dtype = if casts { kind.to.dtype } else { kind.from.dtype };
        let number = self.pieces.len();
        let mut piece = Piece { number, kind, dtype, shape: kind.to.shape.clone(), owner: number };
        let rows = |shape: &[i64]| shape.first().copied().unwrap_or_default();
        let (ndim, count) = (kind.from.shape.len(), rows(&kind.from.shape));
        let is_part =
            self.parts && kind.shared && index % 2 == 1 && (ndim, count) == (piece.shape.len(), rows(&piece.shape));
        let part = if is_part && count > 1 && model::numel(&kind.from.shape) > 0 {
            pair.from.part(&self.sources[number - 1], 1).transpose()?
        } else {
            None
        };
        let to = Spec { dtype, ..kind.to.clone() };
        let garbage = piece.byte(*seed, GARBAGE);
        let mut target = made(pair.to, &to, kind.on_host == Some(End::Target), garbage)?;
        let source = match part {
            Some(part) => {
                target = pair.to.part(&target, 1).transpose()?.unwrap_or(target);
                piece.owner = self.pieces[number - 1].owner;
                piece.shape[0] -= 1;
                part
            }
            None => made(pair.from, &kind.from, kind.on_host == Some(End::Source), piece.byte(*seed, 0))?,
        };
        self.pieces.push(piece);
        self.sources.push(source);
        self.targets.push(target);
        Ok(())
    }

    /// Writes a generation to the sources.
    fn fill(&mut self, generation: usize) -> Outcome {
        for (piece, source) in
            self.pieces.iter().zip(&mut self.sources).filter(|(piece, _)| piece.owner == piece.number)
        {
            self.pair.from.fill(source, piece.byte(self.case.seed, generation))?;
        }
        Ok(())
    }

    fn updates(&self) -> Vec<Update<'_, F, T>> {
        let (from, to) = (self.pair.from, self.pair.to);
        let sides = self.pieces.iter().zip(self.sources.iter().zip(&self.targets));
        sides.map(|(piece, (tensor, out))| Update::new(from, tensor, to, out).with_dtype(Some(piece.dtype))).collect()
    }

    fn copy(&self) -> Outcome {
        let updates = self.updates();
        let apart = if self.case.calls == Calls::Halves { 2 } else { 1 };
        for first in 0..apart {
            let some: Vec<_> = updates.iter().copied().skip(first).step_by(apart).collect();
            copy_all(&some, self.pair.ordering()).map_err(misfit)?;
        }
        Ok(())
    }

    fn prepared(&self) -> Result<Prepared, Failure> {
        Prepared::new(&self.updates(), self.pair.ordering()).map_err(misfit)
    }

    fn copy_prepared(&self, copier: &Prepared) -> Outcome {
        copier.copy(&self.updates(), self.pair.ordering()).map(drop).map_err(misfit)
    }

    /// Copies from and into the memory that the copier keeps; where it keeps none, as [`copy_prepared`].
    ///
    /// [`copy_prepared`]: Self::copy_prepared
    fn copy_held(&self, copier: &Prepared) -> Outcome {
        if copier.held(0).is_none() {
            return self.copy_prepared(copier);
        }
        self.targets.iter().try_for_each(|target| self.pair.to.overwritten(target))?;
        // SAFETY: the tensors of the case are alive, no framework replaces the memory of one that is written, and no
        // other thread has them.
        unsafe { copier.copy_held() }.map_err(misfit)
    }

    /// Compares what a target held with the generation that it must have held.
    ///
    /// # Errors
    ///
    /// The generations that it held instead.
    fn judge(&self, piece: &Piece<'_>, got: &[u8], expected: usize) -> Result<(), String> {
        let seed = self.case.seed;
        let (element, size) = (piece.element(seed, expected), model::itemsize(piece.dtype));
        if got.len() == piece.nbytes() && got.chunks(size).all(|got| got == element) {
            return Ok(());
        }
        let garbage = vec![piece.byte(seed, GARBAGE); size];
        let is_right = got.chunks(size).filter(|got| *got == element).count();
        let mut found = Vec::new();
        for generation in 0..=expected + 1 {
            let element = piece.element(seed, generation);
            if generation != expected && got.chunks(size).any(|got| got == element) {
                found.push(format!("generation {generation}"));
            }
        }
        found.extend(got.chunks(size).any(|got| got == garbage).then(|| "what was there before".into()));
        let found = if found.is_empty() { "what no generation has".into() } else { found.join(" and ") };
        let elements = words::counted(got.len() / size, "element");
        Err(format!("{is_right} of {elements} are of generation {expected}; the others are {found}"))
    }
}

/// Makes the tensor that `spec` describes, with this byte everywhere: in memory of the host if `on_host` is set and
/// the framework has host memory as well as the device's.
fn made<S>(subject: &dyn Subject<Tensor = S>, spec: &Spec, on_host: bool, byte: u8) -> Result<S, Failure> {
    // SAFETY: it is filled below.
    let in_host_memory = || unsafe { subject.empty(Device::CPU, spec.dtype, &spec.shape, Order::RowMajor) }.ok();
    let is_there = |tensor: &S| subject.observe(tensor).is_ok_and(|seen| seen.device == Device::CPU);
    let moved = (on_host && subject.device() != Device::CPU).then(in_host_memory).flatten().filter(is_there);
    match moved {
        Some(mut tensor) => {
            subject.fill(&mut tensor, byte)?;
            Ok(tensor)
        }
        None => Ok(subject.create(spec, &vec![byte; spec.base * model::itemsize(spec.dtype)])?),
    }
}

pub(super) fn misfit(Misfit { index, error, .. }: Misfit) -> Failure {
    let failure = Failure::from(error);
    Failure { message: format!("piece {}: {failure}", index + 1), ..failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_tell_generations_apart() {
        let pairs = Cast::DTYPES.iter().flat_map(|from| Cast::DTYPES.iter().map(move |to| (*from, *to)));
        for (from, to) in pairs.filter(|(from, to)| from != to) {
            let source = |byte| vec![byte; model::itemsize(from)];
            let results = CAST.map(|byte| model::cast(from, to, &source(byte)));
            for (index, result) in results.iter().enumerate() {
                assert!(!results[..index].contains(result), "{from} to {to}: {results:x?}");
                // Every format is finite there.
                let is_wide = to == DType::FLOAT64;
                let value = if is_wide { result.clone() } else { model::cast(to, DType::FLOAT64, result) };
                let value = f64::from_le_bytes(value.try_into().unwrap());
                assert!((-2.5..33.0).contains(&value), "{from} to {to}: {value}");
            }
        }
    }
}
