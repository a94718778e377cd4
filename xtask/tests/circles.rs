//! The files of a crate import from one another without a circle, so that each can be read after those that it names.
//! A folder counts as one file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates.
const CRATES: [&str; 16] = [
    "crates/bridge-candle",
    "crates/bridge-capi",
    "crates/bridge-core",
    "crates/bridge-cuda",
    "crates/bridge-cudarc",
    "crates/bridge-cupy",
    "crates/bridge-frameworks",
    "crates/bridge-ipc",
    "crates/bridge-ndarray",
    "crates/bridge-numpy",
    "crates/bridge-ort",
    "crates/bridge-pyo3",
    "crates/bridge-python",
    "crates/bridge-tensorflow",
    "crates/bridge-torch",
    "conformance",
];

/// Circles that stay, each with its reason.
const REASONS: [(&str, &str); 2] = [
    (
        "crates/bridge-frameworks: protocol, stated, table, unsupported",
        "the adapter of objects known by a protocol is one of the table's, and its errors name the table's frameworks",
    ),
    ("conformance: fault, sim", "the ordering of the simulated device has faults of its own, which the table plants"),
];

/// The files that each file imports from.
type Imports = BTreeMap<String, BTreeSet<String>>;

#[test]
fn the_files_of_a_crate_form_no_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let found: BTreeSet<_> =
        CRATES.iter().flat_map(|folder| circles(&imports(&root.join(folder).join("src")), folder)).collect();
    let kept = REASONS.iter().map(|(circle, _)| (*circle).to_owned()).collect();
    let new: Vec<_> = found.difference(&kept).collect();
    assert!(new.is_empty(), "move what these files share into one that imports none of them: {new:#?}");
    assert_eq!(found, kept, "a reason without a circle");
}

#[test]
fn a_circle_is_found() {
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let imports: Imports =
        [("a", named(&["b"])), ("b", named(&["c"])), ("c", named(&["b"]))].map(|(file, of)| (file.into(), of)).into();
    assert_eq!(circles(&imports, "crate"), named(&["crate: b, c"]));
    assert_eq!(named_by("use crate::{a::{B, c}, D};\n$crate::f!(crate::g::h());"), named(&["D", "a", "g"]));
}

/// Returns each circle as a line.
fn circles(imports: &Imports, folder: &str) -> BTreeSet<String> {
    let reached: BTreeMap<_, _> = imports.keys().map(|file| (file, reached_from(file, imports))).collect();
    let circle = |file: &String| {
        let back = |other: &&String| reached.get(other).is_some_and(|files| files.contains(file));
        reached[file].iter().filter(back).cloned().collect::<Vec<_>>().join(", ")
    };
    imports.keys().map(circle).filter(|files| !files.is_empty()).map(|files| format!("{folder}: {files}")).collect()
}

/// Returns the files that this one imports from, and those that they import from.
fn reached_from(file: &str, imports: &Imports) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![file.to_owned()];
    while let Some(file) = next.pop() {
        let new = imports.get(&file).into_iter().flatten().filter(|file| reached.insert((*file).clone()));
        next.extend(new.cloned().collect::<Vec<_>>());
    }
    reached
}

/// Returns what each file of a crate imports from the others.
fn imports(source: &Path) -> Imports {
    let lib = code(&source.join("lib.rs"));
    let exported = exported(&lib);
    let mut imports = Imports::new();
    for path in files(source) {
        let file = path.strip_prefix(source).expect("a file of the folder").with_extension("");
        let file = file.iter().next().expect("a name").to_string_lossy().into_owned();
        if file == "lib" || path.ends_with("tests.rs") {
            continue;
        }
        let named = named_by(&code(&path)).into_iter().map(|name| exported.get(&name).cloned().unwrap_or(name));
        let others: Vec<_> = named.filter(|name| *name != file).collect();
        imports.entry(file).or_default().extend(others);
    }
    imports
}

/// Returns the files of a folder, those in its folders included.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Returns the text of a file up to its tests, without comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("Rust");
    let text = text.split("#[cfg(test)]\nmod ").next().expect("a first part");
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Returns the file that each name comes from which `lib.rs` exports: `pub use file::{Name, Other};`.
fn exported(lib: &str) -> BTreeMap<String, String> {
    let uses = lib.split("use ").skip(1).filter_map(|statement| statement.split(';').next()?.split_once("::"));
    uses.flat_map(|(file, names)| identifiers(names).map(move |name| (name.to_owned(), file.to_owned()))).collect()
}

/// Returns the names of the root of the crate that a text uses: `crate::name` and `crate::{name, other}`.
fn named_by(text: &str) -> BTreeSet<String> {
    let paths = text.match_indices("crate::").filter(|(at, _)| !text[..*at].ends_with('$'));
    paths.flat_map(|(at, path)| roots(&text[at + path.len()..])).collect()
}

/// Returns the first names of a path, or of each path in braces.
fn roots(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else { return identifiers(path).take(1).map(str::to_owned).collect() };
    let (mut depth, mut parts) = (1, vec![String::new()]);
    for c in group.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match (c, depth) {
            (_, 0) => break,
            (',', 1) => parts.push(String::new()),
            _ => parts.last_mut().expect("one at least").push(c),
        }
    }
    parts.iter().filter_map(|part| identifiers(part).next()).map(str::to_owned).collect()
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !name.is_empty())
}
