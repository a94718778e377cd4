//! Names are the field's. Words of earlier drafts are in no identifier, file name or heading, and some phrases are in
//! no text.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Words that no name has, and what names have instead.
const WORDS: [(&str, &str); 14] = [
    ("lent", "exported"),
    ("retire retired retires retiring reaper", "release, deferred or pending"),
    ("soon", "what it does, such as flush"),
    ("way ways road roads", "path, method, route, direction; between processes transport"),
    ("cross crosses crossed crossing crossings", "convert, conversion, transfer"),
    ("keeper keepers", "store"),
    ("rooms", "allocations, capacity"),
    ("stranger strangers foreign", "protocol, unsupported, imported"),
    ("vouch vouches vouched", "guarantee, trusted"),
    ("hull hulls", "extent"),
    ("witness witnesses", "oracle"),
    ("board boards bell bells", "registry, waker"),
    ("parcel parcels book books", "message, table"),
    ("untaken", "unclaimed"),
];

/// Phrases that no text has, and what texts have instead.
const PHRASES: [(&str, &str); 10] = [
    ("native way", "native method"),
    ("own way", "own method"),
    ("a keeper", "a store"),
    ("the reaper", "the thread of pending releases"),
    ("vouches for", "guarantees"),
    ("foreign memory", "imported memory"),
    ("foreign code", "external code"),
    ("it crosses", "it converts"),
    ("beside the", "next to the, with the, while the"),
    ("process of its own", "separate process"),
];

/// Where a word may stand, by the beginning of the path, and why.
const REASONS: [(&str, &str, &str); 5] = [
    ("benches/", "ways", "a bench whose reports are in docs/results"),
    ("crates/bridge-python/tests/test_benches.py", "ways", "the same bench"),
    ("xtask/site/tables.py", "ways", "the same reports"),
    ("xtask/site/tables.py", "keeper", "a report in docs/results, by the name that it has"),
    ("crates/bridge-python/tests/", "lent", "loans, which `lend` makes"),
];

/// Files whose text is not this project's, or is a list of the words.
const LEFT_OUT: [&str; 4] = ["docs/results/", "LICENSES/", "xtask/tests/words.rs", "Cargo.lock"];

/// Files with code, by their ends.
const CODE: [&str; 11] = ["rs", "py", "pyi", "c", "h", "hpp", "cpp", "cu", "cuh", "mjs", "txtar"];

/// What a declared name of one word follows.
const DECLARES: [&str; 13] =
    ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "let", "mut", "def", "class", "macro_rules"];

#[test]
fn names_and_texts_have_the_fields_words() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let listed = Command::new("git").arg("ls-files").current_dir(root).output().expect("git lists the files");
    let (mut found, mut used) = (Vec::new(), BTreeSet::new());
    for path in String::from_utf8(listed.stdout).expect("paths are UTF-8").lines() {
        if LEFT_OUT.iter().any(|left| path.starts_with(left)) {
            continue;
        }
        let Ok(text) = fs::read_to_string(root.join(path)) else { continue };
        for (name, word, instead) in names(path, &text).iter().flat_map(|name| wrong(name)) {
            match REASONS.iter().position(|(place, excused, _)| path.starts_with(place) && *excused == word) {
                Some(reason) => _ = used.insert(reason),
                None => found.push(format!("{path}: {name}: for {word} write {instead}")),
            }
        }
        let phrases = PHRASES.iter().filter(|(phrase, _)| text.contains(phrase));
        found.extend(phrases.map(|(phrase, instead)| format!("{path}: for \"{phrase}\" write {instead}")));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    let stale: Vec<_> = (0..REASONS.len()).filter(|reason| !used.contains(reason)).map(|at| REASONS[at]).collect();
    assert!(stale.is_empty(), "reasons that excuse nothing: {stale:?}");
}

#[test]
fn a_word_is_found() {
    let names = |path, text| names(path, text).iter().flat_map(|name| wrong(name)).map(|(_, word, _)| word).collect();
    let found: Vec<&str> = names("src/lib.rs", "let way = lent_by();\nstruct Hulls; // by the way");
    assert_eq!(found, ["hulls", "lent", "way"]);
    assert_eq!(names("a/keeper.md", "# Both ways\nThat way.") as Vec<&str>, ["ways", "keeper"]);
    assert_eq!(words("CUDAWay2_across-the_HTML"), ["cuda", "way", "across", "the", "html"]);
}

/// Returns the names in a file: its own, its headings, the identifiers of several words, and the declared ones of one.
fn names<'a>(path: &'a str, text: &'a str) -> BTreeSet<&'a str> {
    let mut names: BTreeSet<_> = path.rsplit('/').next().into_iter().collect();
    if path.ends_with(".md") {
        names.extend(text.lines().filter(|line| line.starts_with('#')));
    }
    if CODE.iter().any(|end| path.rsplit_once('.').is_some_and(|(_, its)| its == *end)) {
        let mut before = "";
        for token in text.split(|letter: char| letter != '_' && !letter.is_alphanumeric()) {
            if !names.contains(token) && (DECLARES.contains(&before) || words(token).len() > 1) {
                names.insert(token);
            }
            before = token;
        }
    }
    names
}

/// Returns the words of a name that it should not have, with the name and what it should have.
fn wrong(name: &str) -> Vec<(&str, &'static str, &'static str)> {
    let words = words(name);
    let listed = WORDS.iter().flat_map(|(words, instead)| words.split(' ').map(move |word| (word, *instead)));
    listed
        .filter(|(word, _)| words.iter().any(|own| own == word))
        .map(|(word, instead)| (name, word, instead))
        .collect()
}

/// Returns the words of a name in lower case: what underscores, other signs and humps divide.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = vec![String::new()];
    let letters: Vec<char> = name.chars().collect();
    for (at, letter) in letters.iter().enumerate() {
        let after_small = at > 0 && letters[at - 1].is_lowercase();
        let before_small = letters.get(at + 1).is_some_and(|next| next.is_lowercase());
        if !letter.is_alphabetic() || (letter.is_uppercase() && (after_small || before_small)) {
            words.push(String::new());
        }
        if letter.is_alphabetic() {
            words.last_mut().expect("there is one").extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}
