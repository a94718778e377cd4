//! Where the elements of a tensor lie, by the definition of strides, in numbers that do not overflow.

use std::ops::Range;

/// Returns the addresses from the first to the last byte of a tensor that has elements, whose first one is at `first`.
/// `None` where they do not even fit into 128 bits.
pub fn extent(first: i128, shape: &[i64], strides: &[i64], itemsize: i128) -> Option<Range<i128>> {
    let step = |(length, stride): (&i64, &i64)| {
        (i128::from(*length) - 1).checked_mul(i128::from(*stride)).and_then(|step| step.checked_mul(itemsize))
    };
    let steps: Vec<i128> = shape.iter().zip(strides).map(step).collect::<Option<_>>()?;
    let reach = |sign: i128| {
        steps.iter().filter(|step| step.signum() == sign).try_fold(first, |sum, step| sum.checked_add(*step))
    };
    Some(reach(-1)?..reach(1)? + itemsize)
}

/// Returns the addresses of the elements in row-major order.
pub fn addresses(first: i128, shape: &[i64], strides: &[i64], itemsize: i128) -> Vec<i128> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let mut found = vec![first];
    for (length, stride) in shape.iter().zip(strides) {
        let steps = (0..*length).map(|i| i128::from(i) * i128::from(*stride) * itemsize);
        found = found.iter().flat_map(|start| steps.clone().map(move |step| start + step)).collect();
    }
    found
}

/// Returns the strides of a compact, row-major tensor, where they are numbers.
pub fn compact(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].wrapping_mul(shape[d]);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_lie_where_strides_say() {
        assert_eq!(extent(100, &[3, 2], &[-2, 1], 4), Some(84..108));
        assert_eq!(addresses(100, &[3, 2], &[-2, 1], 4), [100, 104, 92, 96, 84, 88]);
        assert_eq!((extent(0, &[], &[], 8), addresses(0, &[], &[], 8)), (Some(0..8), vec![0]));
        assert_eq!(extent(0, &[i64::MAX, i64::MAX], &[i64::MAX, i64::MAX], 255), None);
        assert_eq!((compact(&[2, 3, 4]), addresses(0, &[2, 0], &[1, 1], 1)), (vec![12, 4, 1], vec![]));
    }
}
