//! What a case does, in which stream, one step after the other.

use super::escaped;
use crate::names::adapter_of;
use crate::{Case, Picks, Route};
use std::fmt::Write;

/// Whose stream a step runs in.
#[derive(Clone, Copy, PartialEq)]
enum Whose {
    Source,
    Target,
    /// The streams of both that are current.
    Both,
}
use Whose::{Both, Source, Target};

/// A step: whose stream, which of the case's, and what is done there.
type Step = (Whose, fn(&Picks) -> usize, &'static str);

const ALLOCATE: fn(&Picks) -> usize = |picks| picks.allocate;
const WRITE: fn(&Picks) -> usize = |picks| picks.write;
const READ: fn(&Picks) -> usize = |picks| picks.read;
const ONWARD: fn(&Picks) -> usize = |picks| picks.onward;
const BACK: fn(&Picks) -> usize = |picks| picks.back;
const DROP: fn(&Picks) -> usize = |picks| picks.drop;

/// The steps of a property, by route; `None`: of every other route. Those of `release_order` all end with [`RETURNED`].
const STEPS: &[(&str, Option<Route>, &[Step])] = &[
    ("order", Some(Route::Onward), &[LATE_WRITE, IMPORT, (Source, BACK, "the view is imported back, and read")]),
    ("order", Some(Route::CopyOn), &[LATE_WRITE, IMPORT, (Source, BACK, "the view is copied back, and the copy read")]),
    ("order", None, &[LATE_WRITE, IMPORT, (Target, READ, "the view is read")]),
    ("release_order", Some(Route::Direct), &[CREATE, FILL, IMPORT, (Target, READ, LATE)]),
    ("release_order", Some(Route::Noted), &[CREATE, FILL, IMPORT, (Target, ONWARD, NOTED)]),
    ("release_order", Some(Route::Late), &[CREATE, FILL, IMPORT, (Target, DROP, LATE)]),
    (
        "release_order",
        Some(Route::Twice),
        &[CREATE, FILL, (Target, READ, "two views are imported"), (Target, ONWARD, TWICE)],
    ),
    (
        "release_order",
        Some(Route::Onward),
        &[CREATE, FILL, IMPORT, (Source, BACK, "the view is imported back, and read late")],
    ),
    (
        "release_order",
        Some(Route::CopyOn),
        &[
            CREATE,
            FILL,
            IMPORT,
            (Target, ONWARD, "the view's stream is delayed"),
            (Source, BACK, "the view is copied back"),
        ],
    ),
    (
        "release_order",
        Some(Route::Beside),
        &[
            CREATE,
            FILL,
            (Target, READ, "a view is imported, and another by the framework's own means"),
            (Source, BACK, "that other view is imported back"),
            (Both, DROP, "our view is dropped"),
            (Source, BACK, "what came back is read late"),
        ],
    ),
    (
        "release_order",
        Some(Route::Fresh),
        &[
            CREATE,
            FILL,
            (Target, READ, "in a separate stream: the tensor is imported, and the view read late"),
            (Target, READ, "that stream is destroyed"),
        ],
    ),
    (
        "release_order",
        Some(Route::Exported),
        &[
            CREATE,
            (Source, WRITE, "in a separate stream: the tensor is written late, and exported"),
            (Target, READ, "it is imported, and the view read late"),
            (Source, WRITE, "that other stream is destroyed"),
        ],
    ),
    (
        "release_order",
        Some(Route::Passing),
        &[
            CREATE,
            FILL,
            IMPORT,
            (Target, ONWARD, "a separate stream is recorded, and the view read there late"),
            (Target, ONWARD, "that stream is destroyed"),
        ],
    ),
    (
        "batch",
        None,
        &[
            (Source, ALLOCATE, "8 to 15 tensors are made"),
            (Source, WRITE, "they are written late"),
            (Target, READ, "all are imported together, and read late"),
            (Both, DROP, "tensors and views are dropped, in random order and on any thread"),
            GARBAGE,
            MORE,
        ],
    ),
    (
        "staging",
        None,
        &[
            (Source, WRITE, "a tensor is made and exported"),
            (Target, READ, "it is copied, late"),
            (Source, BACK, "another is made and exported"),
            (Target, ONWARD, "it is copied, late, while the first copy runs"),
        ],
    ),
    (
        "torn",
        None,
        &[
            (Source, WRITE, "the sources are written, late in some of the copies"),
            (Target, READ, "all pieces are copied, late in the other copies"),
            (Source, WRITE, "the sources are overwritten"),
            (Target, READ, "the targets are read"),
        ],
    ),
    (
        "failure",
        None,
        &[
            (Source, WRITE, "up to three tensors are made and exported"),
            (Target, READ, "they are imported, and one call on the way fails"),
            (Source, WRITE, "one is written late, and exported once more"),
            (Target, READ, "it is imported, and read late"),
            RELEASE,
            GARBAGE,
        ],
    ),
    (
        "moves",
        None,
        &[
            (Target, READ, MOVED),
            (Target, ONWARD, MOVED),
            (Target, READ, "the target is written late, and moved to the host"),
            (Target, ONWARD, "so is the other one"),
        ],
    ),
    (
        "devices",
        None,
        &[
            LATE_WRITE,
            (Target, READ, "it is imported while another device is the current one"),
            (Target, READ, LATE),
            (Both, READ, "everything is dropped while another device is the current one"),
            GARBAGE,
            MORE,
        ],
    ),
    (
        "graph",
        Some(Route::Forked),
        &[
            (Target, READ, "a capture begins in this stream"),
            (Target, ONWARD, "this one joins it: the tensor is written there, late, and exported"),
            (Target, READ, "it is imported and read"),
            (Target, READ, "the graph is replayed"),
        ],
    ),
    (
        "graph",
        Some(Route::Captured),
        &[
            CREATE,
            FILL,
            IMPORT,
            (Target, READ, "this stream is captured: the view is read, and dropped"),
            (Source, WRITE, "the tensor is dropped"),
            GARBAGE,
            MORE,
            (Target, READ, "the graph is replayed"),
        ],
    ),
    (
        "graph",
        Some(Route::Meanwhile),
        &[
            (Source, WRITE, "two tensors are made and exported"),
            (Target, READ, "one is imported"),
            (Target, ONWARD, "the other is imported"),
            (Target, READ, "this stream is captured: the first view is read"),
            (Target, ONWARD, "during the capture the second view is read late, and dropped"),
            (Target, READ, "the graph is replayed"),
        ],
    ),
    (
        "graph",
        None,
        &[
            (Source, WRITE, "the tensor is made and exported"),
            (Target, READ, "it is imported and read in this stream, which is being captured"),
            (Source, WRITE, "the tensor is written"),
            (Target, READ, "the graph is replayed"),
        ],
    ),
];

const MOVED: &str = "a tensor of the host is moved into one of the device, late";
const LATE_WRITE: Step = (Source, WRITE, "the tensor is written late");
const CREATE: Step = (Source, ALLOCATE, "the tensor is made");
const FILL: Step = (Source, WRITE, "it is written");
const IMPORT: Step = (Target, READ, "it is imported");
const LATE: &str = "the view is read late";
const NOTED: &str = "the stream is recorded, and the view read late";
const TWICE: &str = "the stream is recorded, one view dropped and the other read late";
const RELEASE: Step = (Both, DROP, "everything is dropped");
const GARBAGE: Step = (Source, ALLOCATE, "new blocks are filled with garbage");
const MORE: Step = (Source, WRITE, "and here, too");
const RETURNED: [Step; 3] = [RELEASE, GARBAGE, MORE];

/// Returns the steps of a case with the names of their streams; empty where the property has no streams.
fn steps(property: &str, case: &Case, names: [&str; 2]) -> Vec<(Vec<String>, String)> {
    let fits =
        |(name, route, _): &&(&str, Option<Route>, _)| *name == property && route.is_none_or(|r| r == case.route);
    let steps = STEPS.iter().find(fits).map_or(&[][..], |(.., steps)| steps);
    let stream = |name: &str, number| match number {
        0 => format!("{}, default stream", adapter_of(name)),
        number => format!("{}, stream {number}", adapter_of(name)),
    };
    let [from, to] = names;
    let streams = |(whose, pick, _): &Step| {
        let number = pick(&case.streams);
        let mut all = Vec::new();
        all.extend((*whose != Target).then(|| stream(from, number)));
        all.extend((*whose != Source).then(|| stream(to, number)));
        // One framework has one current stream.
        all.dedup();
        all
    };
    let end = RETURNED.iter().filter(|_| property == "release_order" && !steps.is_empty());
    steps.iter().chain(end).map(|step| (streams(step), step.2.to_owned())).collect()
}

/// Pixels between two steps, between two streams, and those of the names before them.
const STEP: usize = 44;
const LANE: usize = 34;
const NAMES: usize = 190;

/// Draws the streams of a case and its steps as SVG, and lists what each step does. A life has steps without streams.
/// Returns `None` where there is nothing to show.
pub(super) fn timeline(property: &str, case: &Case, names: [&str; 2]) -> Option<String> {
    let list = |lines: Vec<String>| {
        let items: String = lines.iter().map(|line| format!("<li>{}</li>", escaped(line))).collect();
        format!("<ol>{items}</ol>")
    };
    if !case.ops.is_empty() {
        return Some(list(case.ops.iter().map(ToString::to_string).collect()));
    }
    let steps = steps(property, case, names);
    if steps.is_empty() {
        return None;
    }
    let mut lanes: Vec<&String> = Vec::new();
    for stream in steps.iter().flat_map(|(streams, _)| streams) {
        if !lanes.contains(&stream) {
            lanes.push(stream);
        }
    }
    let (width, height) = (NAMES + steps.len() * STEP + 10, lanes.len() * LANE + 8);
    let mut svg = format!(
        r#"<svg class="timeline" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="streams of the case">"#
    );
    let middle = |stream: &String| {
        let lane = lanes.iter().position(|lane| *lane == stream).unwrap_or_default();
        lane * LANE + LANE / 2 + 4
    };
    for lane in &lanes {
        let (y, end) = (middle(lane), width - 10);
        let name = escaped(lane);
        let _ = write!(svg, r#"<text x="0" y="{}">{name}</text><path class="lane" d="M{NAMES} {y}H{end}"/>"#, y + 4);
    }
    for (number, (streams, _)) in steps.iter().enumerate() {
        let x = NAMES + number * STEP + STEP / 2;
        if let (Some(first), Some(last)) = (streams.first(), streams.get(1)) {
            let _ = write!(svg, r#"<path class="both" d="M{x} {}V{}"/>"#, middle(first), middle(last));
        }
        for stream in streams {
            let y = middle(stream);
            let _ = write!(svg, r#"<circle cx="{x}" cy="{y}" r="12"/>"#);
            let _ =
                write!(svg, r#"<text class="number" x="{x}" y="{}" text-anchor="middle">{}</text>"#, y + 4, number + 1);
        }
    }
    let lines = steps.iter().map(|(streams, does)| format!("{}: {does}", streams.join(" and "))).collect();
    Some(format!(r#"<div class="scroll">{svg}</svg></div>{}"#, list(lines)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Habits, SimDevice, SimFramework};
    use crate::{Op, PROPERTIES, Sides, property, tree};

    fn case(streams: Picks, route: Route) -> Case {
        let device = SimDevice::new(1);
        let sides = [Habits::Generous, Habits::Common].map(|habits| SimFramework::new(&device, habits));
        let case = tree(property("order").unwrap(), &Sides::of(&sides[0], &sides[1]), 1, 0).current();
        Case { streams, route, ..case }
    }

    #[test]
    fn streams_have_lanes_and_steps_have_numbers() {
        let picks = Picks { write: 2, read: 1, ..Picks::default() };
        let drawn = timeline("order", &case(picks, Route::Direct), ["torch+async", "cupy"]).unwrap();
        assert_eq!((drawn.matches("class=\"lane\"").count(), drawn.matches("<circle").count()), (2, 3), "{drawn}");
        assert!(drawn.contains("<li>torch, stream 2: the tensor is written late</li>"), "{drawn}");
        assert!(drawn.contains("<li>cupy, stream 1: the view is read</li>"), "{drawn}");
    }

    #[test]
    fn one_framework_has_one_current_stream() {
        let drawn = timeline("release_order", &case(Picks::default(), Route::Late), ["torch", "torch"]).unwrap();
        assert_eq!((drawn.matches("class=\"lane\"").count(), drawn.matches("class=\"both\"").count()), (1, 0));
    }

    #[test]
    fn every_property_with_streams_has_steps_for_each_of_its_routes() {
        let device = SimDevice::new(1);
        let (from, to) = (SimFramework::new(&device, Habits::Generous), SimFramework::new(&device, Habits::Common));
        let sides = Sides::of(&from, &to);
        for property in PROPERTIES {
            let cases = (0..200).map(|index| tree(property, &sides, 1, index).current());
            let used = |case: &Case| case.streams != Picks::default();
            for case in cases.filter(used) {
                let drawn = timeline(property.name, &case, ["torch", "cupy"]);
                assert!(drawn.is_some(), "{} by {:?} has no steps", property.name, case.route);
            }
        }
    }

    #[test]
    fn a_life_is_a_list_of_its_steps() {
        let life = Case { ops: vec![Op::Read(1), Op::Collect], ..case(Picks::default(), Route::Direct) };
        let list = timeline("life", &life, ["torch", "numpy"]).unwrap();
        assert_eq!(list, "<ol><li>read tensor 1</li><li>collect garbage and empty caches</li></ol>");
        assert_eq!(timeline("values", &case(Picks::default(), Route::Direct), ["torch", "numpy"]), None);
    }
}
