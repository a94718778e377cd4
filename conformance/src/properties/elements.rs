//! Copies into tensors that exist, judged element by element, and which are refused.

use super::torn::misfit;
use super::users::is_injective;
use super::{Failure, Outcome, Pair, as_expected, ensure, same_bytes};
use crate::model::{self, Expected, Random};
use crate::{Calls, Case, Pieces, Spec, Usual};
use bridge_core::{Cast, DType, ErrorKind, Pair as Update, Pending, Plan, Prepared, Strides, copy_all, copy_into};

/// The most equal pieces of one kind: more of them test nothing new here.
const EQUAL: usize = 3;

/// One piece: what its source holds, and what its target must hold.
struct Piece<F, T> {
    source: F,
    target: T,
    dtype: DType,
    is_cast: bool,
    /// Those of the base buffer of the source.
    bytes: Vec<u8>,
    source_elements: Vec<u8>,
    expected: Vec<u8>,
    /// Those of both sides, before the copy.
    versions: [Option<u64>; 2],
    told: String,
}

/// Every element of a target is that of its source, broadcast and cast; the source keeps its own.
pub(super) fn elements<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    pair.kernels.set(true);
    let mut random = Random::new(case.seed);
    let mut pieces = Vec::new();
    for kind in &case.pieces {
        for index in 0..kind.count.min(EQUAL) {
            // Every second piece of a kind that shares has the source of the one before it.
            let before = pieces.last().filter(|_| kind.shared && index % 2 == 1);
            let shared = before.map(|piece: &Piece<F, T>| (pair.from.share(&piece.source), piece.bytes.clone()));
            pieces.push(piece(pair, kind, shared, &mut random)?);
        }
    }
    let updates: Vec<Update<'_, F, T>> = pieces
        .iter()
        .map(|piece| Update::new(pair.from, &piece.source, pair.to, &piece.target).with_dtype(Some(piece.dtype)))
        .collect();
    match case.calls {
        Calls::Together => copy_all(&updates, pair.ordering()).map(drop).map_err(misfit)?,
        Calls::Prepared => {
            let copier = Prepared::new(&updates, pair.ordering()).map_err(misfit)?;
            copier.copy(&updates, pair.ordering()).map(drop).map_err(misfit)?;
        }
        // One after the other.
        Calls::Halves => {
            for (update, piece) in updates.iter().zip(&pieces) {
                if piece.is_cast {
                    copy_all(&[*update], pair.ordering()).map_err(misfit)?;
                } else {
                    copy_into(pair.from, pair.to, &piece.source, &piece.target, pair.ordering())?;
                }
            }
        }
    }
    for (number, piece) in pieces.iter().enumerate() {
        let got = pair.to.read(&piece.target)?;
        let what = format!("piece {} of {} ({})", number + 1, pieces.len(), piece.told);
        same_values(&what, piece.dtype, &got, &piece.expected)?;
        let [unwritten, before] = piece.versions;
        let (source, target) = (pair.from.version(&piece.source)?, pair.to.version(&piece.target)?);
        ensure!(piece.expected.is_empty() || target > before || before.is_none(), "{what}: the write was not counted");
        ensure!(source == unwritten, "{what}: a write to the source was counted");
        same_bytes(&format!("the source of {what}"), &pair.from.read(&piece.source)?, &piece.source_elements)?;
    }
    Ok(())
}

fn piece<F, T>(
    pair: &Pair<'_, F, T>,
    kind: &Pieces,
    shared: Option<(F, Vec<u8>)>,
    random: &mut Random,
) -> Result<Piece<F, T>, Failure> {
    let casts = Cast::new(kind.from.dtype, kind.to.dtype)
        .is_ok_and(|cast| pair.ordering().copies().is_some_and(|copies| copies.casts(cast).is_ok()));
    let dtype = if casts { kind.to.dtype } else { kind.from.dtype };
    let pending = kind.to.pending.filter(|_| dtype == kind.to.dtype);
    let (from, to) = (&kind.from, Spec { dtype, pending, ..kind.to.clone() });
    // Arithmetic need not keep the bits of a NaN: there is none where either side has deferred an operation.
    let deferred = Spec { pending: from.pending.or(pending), ..from.clone() };
    let (source, bytes) = match shared {
        Some(shared) => shared,
        None => {
            let bytes = match casts && deferred.pending.is_none() {
                true => model::floats(from.dtype, from.base, random),
                false => model::random_bytes(&deferred, random.bits()),
            };
            (pair.from.create(from, &bytes)?, bytes)
        }
    };
    let target = pair.to.create(&to, &model::random_bytes(&to, random.bits()))?;
    let mut expected = model::elements(&broadcast(from, &to.shape), &bytes);
    if casts {
        let cast = |element| model::cast(from.dtype, dtype, element);
        expected = expected.chunks(model::itemsize(from.dtype)).flat_map(cast).collect();
    }
    let (source_elements, told) = (model::elements(from, &bytes), format!("{from} into {to}"));
    let versions = [pair.from.version(&source)?, pair.to.version(&target)?];
    Ok(Piece { source, target, dtype, is_cast: casts, bytes, source_elements, expected, versions, told })
}

/// Returns the source as it is seen with the shape of its target.
fn broadcast(from: &Spec, shape: &[i64]) -> Spec {
    let front = shape.len() - from.shape.len();
    let stride = |dim: usize| {
        let own = dim.checked_sub(front).filter(|own| from.shape[*own] == shape[dim]);
        own.map_or(0, |own| from.strides[own])
    };
    Spec { strides: (0..shape.len()).map(stride).collect(), shape: shape.to_vec(), ..from.clone() }
}

/// Compares bit for bit, but for the payload of a NaN.
fn same_values(what: &str, dtype: DType, got: &[u8], want: &[u8]) -> Outcome {
    ensure!(got.len() == want.len(), "{what}: {} bytes instead of {}", got.len(), want.len());
    let size = model::itemsize(dtype);
    let same = |(got, want): &(&[u8], &[u8])| got == want || model::is_nan(dtype, got) && model::is_nan(dtype, want);
    match got.chunks(size).zip(want.chunks(size)).position(|both| !same(&both)) {
        None => Ok(()),
        Some(at) => {
            let element = |bytes: &[u8]| bytes[at * size..][..size].to_vec();
            let (got, want) = (element(got), element(want));
            Err(Failure::new(format!("{what}: element {at} is {got:02x?}, not {want:02x?}")))
        }
    }
}

/// What a copy must not write to is refused, and stays as it was; into every other tensor that users make elements arrive.
pub(super) fn targets<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    pair.kernels.set(true);
    let mut number = 0;
    while let Some(usual) = pair.to.usual(number, case.seed).transpose()? {
        number += 1;
        into_usual(pair, case, &usual).map_err(|failure| failure.about(&usual.name))?;
    }
    let (to, random) = (pair.to.capabilities(), &mut Random::new(case.seed));
    let (rows, columns) = (2 + random.below(6) as i64, 2 + random.below(40) as i64);
    let matrix = Spec::compact(case.spec.dtype, &[rows, columns]);
    let spread = pair.to.profile().strides != Strides::Compact && to.broadcasts;
    let row = Spec { strides: vec![0, 1], base: columns as usize, ..matrix.clone() };
    let slanted = Spec { strides: vec![1, 1], base: (rows + columns) as usize, ..matrix.clone() };
    let other = Spec::compact(case.spec.dtype, &[rows + 1, columns + 1]);
    let constant = Spec { read_only: true, ..matrix.clone() };
    let refused = [
        (to.read_only, "a read-only target", &matrix, &constant, ErrorKind::ReadOnly),
        (spread, "a target that repeats a row", &matrix, &row, ErrorKind::Layout),
        (spread, "a target whose rows overlap", &matrix, &slanted, ErrorKind::Layout),
        (true, "a target of another shape", &other, &matrix, ErrorKind::Layout),
    ];
    for (_, what, from, to, kind) in refused.into_iter().filter(|(is_made, ..)| *is_made) {
        let source = pair.from.create(from, &model::random_bytes(from, random.bits()))?;
        let target = pair.to.create(to, &model::random_bytes(to, random.bits()))?;
        stays(pair, &[(&source, &target)], kind).map_err(|failure| failure.about(what))?;
    }
    overlapping(pair, &matrix, random)
}

/// Returns the dtype of the parts of a complex number, or the dtype.
fn part(dtype: DType) -> DType {
    match dtype {
        DType::COMPLEX64 => DType::FLOAT32,
        DType::COMPLEX128 => DType::FLOAT64,
        other => other,
    }
}

/// Copies into a tensor as the target's users make it: as far as its framework lets others write to it.
fn into_usual<F, T>(pair: &Pair<'_, F, T>, case: &Case, usual: &Usual<'_, T>) -> Outcome {
    let source = |dtype, shape: &[i64]| {
        let spec = Spec::compact(dtype, shape);
        let bytes = model::random_bytes(&spec, case.seed);
        Ok::<_, Failure>((pair.from.create(&spec, &bytes)?, bytes))
    };
    let target = &usual.tensor;
    if let Some(kind) = usual.refused {
        let (tensor, _) = source(case.spec.dtype, &case.spec.shape)?;
        return is_refused(pair, &[(&tensor, target)], kind);
    }
    let seen = pair.to.observe(target)?;
    let is_made = pair.from.capabilities().dtypes.contains(&seen.dtype);
    if !is_made || !pair.from.profile().rank.contains(&seen.shape.len()) {
        return Ok(());
    }
    let (tensor, bytes) = source(seen.dtype, &seen.shape)?;
    let refused = match usual.pending {
        _ if seen.read_only => Some(ErrorKind::ReadOnly),
        Some(Pending::Packing) => Some(ErrorKind::Layout),
        _ => (!is_injective(&seen)).then_some(ErrorKind::Layout),
    };
    if let Some(kind) = refused {
        return stays(pair, &[(&tensor, target)], kind);
    }
    let before = pair.to.version(target)?;
    copy_into(pair.from, pair.to, &tensor, target, pair.ordering())?;
    let is_counted = pair.to.version(target)? > before || before.is_none() || bytes.is_empty();
    ensure!(is_counted, "the write was not counted");
    let got = pair.to.read(target)?;
    match usual.pending {
        // To read it, the framework computes: on a GPU without the payload of a NaN.
        Some(_) => same_values("the target", part(seen.dtype), &got, &bytes),
        None => same_bytes("the target", &got, &bytes),
    }
}

/// A copy between tensors that share bytes is refused: of one, or of two that are copied together.
fn overlapping<F, T>(pair: &Pair<'_, F, T>, matrix: &Spec, random: &mut Random) -> Outcome {
    let (first, second) = (model::random_bytes(matrix, random.bits()), model::random_bytes(matrix, random.bits()));
    let (source, target) = (pair.from.create(matrix, &second)?, pair.to.create(matrix, &first)?);
    let last = matrix.shape[0] as usize - 1;
    if let Some(row) = pair.to.part(&target, last).transpose()? {
        let one = Spec::compact(matrix.dtype, &[1, matrix.shape[1]]);
        let one = pair.from.create(&one, &model::random_bytes(&one, random.bits()))?;
        let both = [(&source, &target), (&one, &row)];
        stays(pair, &both, ErrorKind::Layout).map_err(|failure| failure.about("two targets that overlap"))?;
    }
    // What the source's framework sees of the target's memory.
    let Ok((view, done)) = pair.back(&target, None) else { return Ok(()) };
    if done.plan != Plan::ZeroCopy {
        return Ok(());
    }
    stays(pair, &[(&view, &target)], ErrorKind::Layout).map_err(|failure| failure.about("a tensor and itself"))?;
    let Some(row) = pair.from.part(&view, last).transpose()? else { return Ok(()) };
    stays(pair, &[(&row, &target)], ErrorKind::Layout).map_err(|failure| failure.about("the last row of the target"))
}

/// The copy is refused, and nothing is written or counted as a write.
fn stays<F, T>(pair: &Pair<'_, F, T>, copies: &[(&F, &T)], kind: ErrorKind) -> Outcome {
    let look = || {
        let look = |(_, target): &(&F, &T)| Ok::<_, Failure>((pair.to.read(target)?, pair.to.version(target)?));
        copies.iter().map(look).collect::<Result<Vec<_>, _>>()
    };
    let before = look()?;
    is_refused(pair, copies, kind)?;
    for ((bytes, version), (old, unwritten)) in look()?.iter().zip(&before) {
        same_bytes("the target of a copy that was refused", bytes, old)?;
        ensure!(version == unwritten, "a copy that was refused was counted as a write");
    }
    Ok(())
}

/// The copies are refused with this kind, one by one and together.
fn is_refused<F, T>(pair: &Pair<'_, F, T>, copies: &[(&F, &T)], kind: ErrorKind) -> Outcome {
    let judge = |got: bridge_core::Result<()>| as_expected(got, Expected::Refused(kind)).map(drop);
    let updates: Vec<_> = copies.iter().map(|(tensor, out)| Update::new(pair.from, tensor, pair.to, out)).collect();
    if let [(tensor, out)] = copies {
        judge(copy_into(pair.from, pair.to, tensor, out, pair.ordering()).map(drop))?;
    }
    judge(copy_all(&updates, pair.ordering()).map(drop).map_err(|misfit| misfit.error))?;
    judge(Prepared::new(&updates, pair.ordering()).map(drop).map_err(|misfit| misfit.error))
}
