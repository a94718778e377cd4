//! No modules of a folder import from one another in a circle, so each can be read after those that it names. A module
//! and its folder count as one. Items that a module shares with its parent are not counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of each folder, each with those that it imports from.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The names from the root of a crate to a module, or to an item.
type Names = Vec<String>;

#[test]
fn the_modules_of_a_folder_form_no_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let crates = fs::read_dir(root.join("crates")).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    let folders = crates.map(|name| format!("crates/{}", name.display())).chain(["conformance".to_owned()]);
    let found: BTreeSet<_> = folders.flat_map(|folder| circles_of(&modules(&root.join(&folder)), &folder)).collect();
    assert!(found.is_empty(), "move what these modules share into one that imports none of them: {found:#?}");
}

#[test]
fn a_circle_is_found() {
    let crate_of = |files: &[(&str, &str)]| {
        let module = |(names, code): &(&str, &str)| (path(names), (*code).to_owned());
        circles_of(&files.iter().map(module).collect(), "crate")
    };
    let lib = ("", "pub use b::{B, C};\npub(crate) use d::*;");
    let found =
        crate_of(&[lib, ("a", "use crate::B;"), ("b", "crate::c::f()"), ("c", "use crate::{a::{A}, B};"), ("d", "")]);
    assert_eq!(Vec::from_iter(found), ["crate: a, b, c"]);
    let below = [("a", "use x::X;"), ("a::x", "use super::y;"), ("a::y", "crate::a::X; super::super::b::B"), ("b", "")];
    assert_eq!(Vec::from_iter(crate_of(&below)), ["crate/a: x, y"]);
    let apart =
        [("a", "use super::b;"), ("a::x", "super::A; $crate::a::x!(); use super::y::Y"), ("a::y", ""), ("b", "")];
    assert!(crate_of(&apart).is_empty());
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

/// Returns the circles of a crate, each as a line.
fn circles_of(modules: &BTreeMap<Names, String>, name: &str) -> BTreeSet<String> {
    let mut folders = BTreeMap::<&[String], Imports>::new();
    for (module, code) in modules {
        for imported in named_by(code, module).iter().map(|names| resolved(names, modules)) {
            let common = module.iter().zip(&imported).take_while(|(own, other)| own == other).count();
            if let (Some(own), Some(other)) = (module.get(common), imported.get(common)) {
                folders.entry(&module[..common]).or_default().entry(own.clone()).or_default().insert(other.clone());
            }
        }
    }
    folders
        .iter()
        .flat_map(|(folder, imports)| circles(imports, &[&[name.to_owned()], *folder].concat().join("/")))
        .collect()
}

/// Returns the modules of a crate, each with its text.
fn modules(folder: &Path) -> BTreeMap<Names, String> {
    let source = folder.join("src");
    let names = |path: &Path| {
        let path = path.strip_prefix(&source).expect("a file of the folder").with_extension("");
        let mut names: Names = path.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.pop_if(|name| ["lib", "mod"].contains(&name.as_str()));
        names
    };
    files(&source).iter().filter(|path| !path.ends_with("tests.rs")).map(|path| (names(path), code(path))).collect()
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

/// Returns the module with the item that these names lead to, through the `use` of those that only export it.
fn resolved(names: &[String], modules: &BTreeMap<Names, String>) -> Names {
    let (mut names, mut seen) = (names.to_vec(), BTreeSet::new());
    loop {
        let known = (0..=names.len()).rev().find(|length| modules.contains_key(&names[..*length])).unwrap_or(0);
        let (module, item) = (&names[..known], names.get(known));
        let code = modules.get(module).map_or("", String::as_str);
        let uses = code.split("use ").skip(1).filter_map(|statement| statement.split_once(';'));
        let mut used = uses.flat_map(|(statement, _)| paths(statement)).filter(|path| path.len() > 1);
        let path = used.find(|path| path.last() == item);
        let from = path.map(|path| absolute(&path, module).unwrap_or_else(|| [module, &path].concat()));
        match from.filter(|from| modules.contains_key(&from[..from.len() - 1]) && seen.insert(from.clone())) {
            Some(from) => names = from,
            None => return module.to_vec(),
        }
    }
}

/// Returns the names from the root of the crate that a text of a module uses: of paths after `crate::` and `super::`.
fn named_by(code: &str, module: &[String]) -> BTreeSet<Names> {
    let starts = ["crate::", "super::"].into_iter().flat_map(|start| code.match_indices(start));
    let starts = starts.filter(|(at, _)| !code[..*at].ends_with(['$', ':']));
    starts.flat_map(|(at, _)| paths(&code[at..])).filter_map(|path| absolute(&path, module)).collect()
}

/// Returns the names from the root of the crate of a path in a module, if it begins with `crate` or `super`.
fn absolute(path: &[String], module: &[String]) -> Option<Names> {
    let up = path.iter().take_while(|name| *name == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "super" => Some([module.get(..module.len().checked_sub(up)?)?, &path[up..]].concat()),
        _ => None,
    }
}

/// Returns the path that a text begins with, or each path of its groups: `a::{b, c::D}` are two.
fn paths(text: &str) -> Vec<Names> {
    let name: String = text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let rest = text.trim_start()[name.len()..].strip_prefix("::").map(str::trim_start);
    let of = |rest: &str| match rest.strip_prefix('{') {
        Some(group) => parts(group).iter().flat_map(|part| paths(part)).collect(),
        None => paths(rest),
    };
    let below = rest.map(of).unwrap_or_default();
    match (name.is_empty(), below.is_empty()) {
        (true, _) => Vec::new(),
        (false, true) => vec![vec![name]],
        (false, false) => below.into_iter().map(|path| [vec![name.clone()], path].concat()).collect(),
    }
}

/// Returns the parts of a group up to its end, which commas separate.
fn parts(group: &str) -> Vec<String> {
    let (mut depth, mut parts) = (1, vec![String::new()]);
    for c in group.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match (c, depth) {
            (_, 0) => break,
            (',', 1) => parts.push(String::new()),
            _ => parts.last_mut().expect("one at least").push(c),
        }
    }
    parts
}

fn path(names: &str) -> Names {
    names.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
