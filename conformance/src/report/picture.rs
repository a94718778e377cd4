//! A picture of a tensor's layout: its base buffer, and the elements of the view in it.

use crate::{Spec, model};
use std::fmt::Write;

/// The most elements of a base buffer that is drawn element by element.
const MOST: usize = 256;

/// The most elements of a view that is drawn: beyond, only its first and last element are.
const MOST_PLACES: usize = 1 << 20;

/// Pixels of an element.
const CELL: usize = 26;

/// Elements of a line, where no stride gives a better number.
const LINE: usize = 16;

/// Parts of a base buffer that is drawn in parts.
const PARTS: usize = 128;

/// Draws the layout as SVG.
pub(super) fn layout(spec: &Spec) -> String {
    let elements = elements(spec);
    if spec.base <= MOST { cells(spec, &elements) } else { parts(spec, &elements) }
}

/// Returns what the picture means.
pub(super) fn legend(spec: &Spec) -> &'static str {
    if spec.base <= MOST {
        "The base buffer, an element a square. Grey ones are not part of the view. Numbers are those of the view's \
         elements in row-major order; later ones are paler. A thick border marks the first, and a \
         yellow one with a + an element that the view has several times."
    } else {
        "The base buffer, in parts of equal length. Grey ones hold no element of the view; the stronger the colour, the \
         more elements a part holds."
    }
}

/// Returns the index of each element of the view in the base buffer, in row-major order.
fn elements(spec: &Spec) -> Vec<usize> {
    let count = model::numel(&spec.shape);
    let places = match count {
        0 => Vec::new(),
        count if count <= MOST_PLACES => model::places(&spec.shape, &spec.strides),
        _ => vec![0, spec.shape.iter().zip(&spec.strides).map(|(length, stride)| (length - 1) * stride).sum()],
    };
    let at = |place: i64| usize::try_from(spec.offset as i64 + place).ok().filter(|at| *at < spec.base);
    places.into_iter().filter_map(at).collect()
}

/// Returns the number of elements of a line: a stride of the view, so that its rows stand below each other.
fn line(spec: &Spec) -> usize {
    let long = spec.shape.iter().zip(&spec.strides).filter(|(length, _)| **length > 1);
    let strides = long.map(|(_, stride)| stride.unsigned_abs() as usize).filter(|stride| (4..=LINE).contains(stride));
    strides.max().unwrap_or(LINE).min(spec.base.max(1))
}

fn cells(spec: &Spec, elements: &[usize]) -> String {
    let line = line(spec);
    let lines = spec.base.div_ceil(line).max(1);
    let mut svg = open(line * CELL + 2, lines * CELL + 2, spec);
    for at in 0..spec.base {
        let numbers: Vec<_> = elements.iter().enumerate().filter(|(_, place)| **place == at).map(|(i, _)| i).collect();
        let (x, y) = (at % line * CELL + 1, at / line * CELL + 1);
        let class = match numbers.len() {
            0 => "rest",
            1 if numbers[0] == 0 => "element first",
            1 => "element",
            _ => "element many",
        };
        // From the first element on they grow paler, so that the order is seen.
        let shade = numbers.first().map_or(1.0, |number| 1.0 - 0.7 * *number as f64 / elements.len() as f64);
        let size = CELL - 2;
        let _ = write!(
            svg,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{size}" height="{size}" rx="3" fill-opacity="{shade:.2}"/>"#
        );
        if let Some(number) = numbers.first() {
            let more = if numbers.len() > 1 { "+" } else { "" };
            let (x, y) = (x + size / 2, y + size / 2 + 4);
            let _ = write!(svg, r#"<text x="{x}" y="{y}" text-anchor="middle">{number}{more}</text>"#);
        }
    }
    svg + "</svg>"
}

fn parts(spec: &Spec, elements: &[usize]) -> String {
    let mut counts = [0usize; PARTS];
    for at in elements {
        counts[(*at as u128 * PARTS as u128 / spec.base as u128) as usize] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or_default().max(1);
    let (width, height) = (5, 34);
    let mut svg = open(PARTS * width + 2, height + 2, spec);
    for (part, count) in counts.iter().enumerate() {
        let (x, class) = (part * width + 1, if *count > 0 { "element" } else { "rest" });
        let shade = if *count > 0 { 0.3 + 0.7 * *count as f64 / most as f64 } else { 1.0 };
        let wide = width - 1;
        let _ = write!(
            svg,
            r#"<rect class="{class}" x="{x}" y="1" width="{wide}" height="{height}" fill-opacity="{shade:.2}"/>"#
        );
    }
    svg + "</svg>"
}

fn open(width: usize, height: usize, spec: &Spec) -> String {
    format!(
        r#"<svg class="layout" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="layout of {spec}">"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::DType;

    fn spec(shape: &[i64], strides: &[i64], offset: usize, base: usize) -> Spec {
        Spec { strides: strides.into(), offset, base, ..Spec::compact(DType::FLOAT32, shape) }
    }

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    #[test]
    fn every_element_of_the_base_buffer_is_drawn_and_those_of_the_view_have_numbers() {
        // Two rows of three, backwards, of a buffer with rows of five.
        let svg = layout(&spec(&[2, 3], &[-5, 1], 5, 11));
        assert_eq!((count(&svg, "<rect"), count(&svg, "<text"), count(&svg, "element first")), (11, 6, 1));
        assert!(svg.contains(r#"width="132""#), "lines of five: {svg}");
        let first = svg.find("element first").unwrap();
        assert!(svg.find(r#"class="element""#).unwrap() < first, "element 0 lies after those of the second row");
    }

    #[test]
    fn an_element_that_the_view_has_twice_is_marked() {
        let svg = layout(&spec(&[3, 2], &[0, 1], 0, 2));
        assert_eq!((count(&svg, "element many"), count(&svg, "+</text>")), (2, 2));
    }

    #[test]
    fn what_has_no_elements_and_what_has_gigabytes_is_drawn() {
        assert_eq!(count(&layout(&spec(&[0, 3], &[3, 1], 0, 0)), "<rect"), 0);
        let far = layout(&spec(&[2, 3], &[1 << 31, 1], 0, 1 << 32));
        assert_eq!((count(&far, "<rect"), count(&far, r#"class="element""#)), (PARTS, 2));
        let long = layout(&spec(&[1 << 24], &[1], 0, 1 << 24));
        assert_eq!(count(&long, r#"class="element""#), 2);
    }
}
