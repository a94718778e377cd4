//! Copies into tensors that exist, judged element by element.

use super::torn::misfit;
use super::{Failure, Outcome, Pair, ensure, same_bytes};
use crate::model::{self, Random};
use crate::{Calls, Case, Pieces, Spec};
use bridge_core::{Cast, DType, Pair as Update, Prepared, copy_all, copy_into};

/// The most equal pieces of one kind: more of them test nothing new here.
const EQUAL: usize = 3;

/// One piece: what its source holds, and what its target must hold.
struct Piece<F, T> {
    source: F,
    target: T,
    dtype: DType,
    is_cast: bool,
    source_elements: Vec<u8>,
    expected: Vec<u8>,
    told: String,
}

/// Every element of a target is that of its source, broadcast and cast; the source keeps its own.
pub(super) fn elements<F, T>(pair: &Pair<'_, F, T>, case: &Case) -> Outcome {
    pair.kernels.set(true);
    let mut random = Random::new(case.seed);
    let mut pieces = Vec::new();
    for kind in &case.pieces {
        for _ in 0..kind.count.min(EQUAL) {
            pieces.push(piece(pair, kind, &mut random)?);
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
        same_bytes(&format!("the source of {what}"), &pair.from.read(&piece.source)?, &piece.source_elements)?;
    }
    Ok(())
}

fn piece<F, T>(pair: &Pair<'_, F, T>, kind: &Pieces, random: &mut Random) -> Result<Piece<F, T>, Failure> {
    let casts = Cast::new(kind.from.dtype, kind.to.dtype)
        .is_ok_and(|cast| pair.ordering().copies().is_some_and(|copies| copies.casts(cast).is_ok()));
    let dtype = if casts { kind.to.dtype } else { kind.from.dtype };
    let (from, to) = (&kind.from, Spec { dtype, ..kind.to.clone() });
    let bytes =
        if casts { model::floats(from.dtype, from.base, random) } else { model::random_bytes(from, random.bits()) };
    let source = pair.from.create(from, &bytes)?;
    let target = pair.to.create(&to, &model::random_bytes(&to, random.bits()))?;
    let mut expected = model::elements(&broadcast(from, &to.shape), &bytes);
    if casts {
        let cast = |element| model::cast(from.dtype, dtype, element);
        expected = expected.chunks(model::itemsize(from.dtype)).flat_map(cast).collect();
    }
    let (source_elements, told) = (model::elements(from, &bytes), format!("{from} into {to}"));
    Ok(Piece { source, target, dtype, is_cast: casts, source_elements, expected, told })
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
