//! The version: `workspace.package.version` in Cargo.toml, and the files that have to state it as well.

use crate::run::{Result, ask, at, cargo, root};
use std::fs;

/// The version of this build.
pub const CURRENT: &str = env!("CARGO_PKG_VERSION");

/// The files that state it. The first line is that of the workspace; of the others each is checked against it.
const FILES: [&str; 7] = [
    "Cargo.toml",
    "crates/bridge-capi/packaging/TruebridgeConfigVersion.cmake",
    "crates/bridge-capi/packaging/truebridge.pc",
    "crates/bridge-capi/python/truebridge_tf1/__init__.py",
    "examples/adapter/Cargo.toml",
    "xtask/templates/python.txtar",
    "xtask/templates/rust.txtar",
];

/// What begins a line with the version, or is in a line that names a crate of this repository, and what is before the
/// version there.
const LINES: [(&str, &str); 5] = [
    ("version = ", "version = \""),
    ("path = ", "version = \""),
    ("set(PACKAGE_VERSION", "PACKAGE_VERSION \""),
    ("Version: ", "Version: "),
    ("__version__ = ", "__version__ = \""),
];

/// Writes another version into every file that states it, and into the lock files.
pub fn write(version: &str) -> Result<()> {
    if !is_version(version) {
        return Err(format!("{version:?} is not a version such as 0.2.0 or 0.2.0-rc.1"));
    }
    for file in FILES {
        let path = root().join(file);
        let text = at(&path, fs::read_to_string(&path))?;
        at(&path, fs::write(&path, rewritten(&text, version)))?;
        println!("{file}");
    }
    for manifest in ["Cargo.toml", "examples/adapter/Cargo.toml"] {
        let update = ask(&mut cargo(&["update", "--workspace", "--offline", "--quiet", "--manifest-path", manifest]));
        update.ok_or_else(|| format!("cargo does not update the lock file of {manifest}"))?;
    }
    println!("next: name the section {version} in CHANGELOG.md, with its date");
    Ok(())
}

/// Checks that all files state the version of this build. Returns how many lines do.
pub fn agree() -> Result<usize> {
    let (mut count, mut wrong) = (0, Vec::new());
    for file in FILES {
        let path = root().join(file);
        let text = at(&path, fs::read_to_string(&path))?;
        let stated: Vec<&str> = text.lines().filter_map(|line| stated(line).map(|(_, version, _)| version)).collect();
        if stated.is_empty() {
            wrong.push(format!("{file} states no version"));
        }
        count += stated.len();
        let others = stated.into_iter().filter(|version| *version != CURRENT);
        wrong.extend(
            others.map(|version| {
                format!("{file} states {version}, not {CURRENT}: run cargo xtask package --set-version")
            }),
        );
    }
    if wrong.is_empty() { Ok(count) } else { Err(wrong.join("\n")) }
}

fn is_version(version: &str) -> bool {
    let (numbers, before) = version.split_once('-').map_or((version, None), |(numbers, rest)| (numbers, Some(rest)));
    let number = |part: &str| part.parse::<u32>().is_ok_and(|number| number.to_string() == part);
    let word = |part: &str| !part.is_empty() && part.chars().all(|letter| letter.is_ascii_alphanumeric());
    numbers.split('.').count() == 3
        && numbers.split('.').all(number)
        && before.is_none_or(|before| before.split('.').all(word))
}

/// Returns the version that a line states, with what is before and after it.
fn stated(line: &str) -> Option<(&str, &str, &str)> {
    let (_, before) = LINES.into_iter().find(|(begins, _)| {
        line.starts_with(begins) || *begins == "path = " && line.contains("{ ") && line.contains(begins)
    })?;
    let start = line.find(before)? + before.len();
    let part = |letter: char| letter.is_ascii_alphanumeric() || letter == '.' || letter == '-';
    let length = line[start..].find(|letter| !part(letter)).unwrap_or(line.len() - start);
    let version = &line[start..start + length];
    is_version(version).then_some((&line[..start], version, &line[start + length..]))
}

/// Returns the text with another version in the lines that state one.
fn rewritten(text: &str, version: &str) -> String {
    let line = |line| match stated(line) {
        Some((before, _, after)) => format!("{before}{version}{after}\n"),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_states_the_version_of_the_workspace() {
        assert!(agree().unwrap() > FILES.len());
    }

    #[test]
    fn a_version_is_written_where_it_is_stated_and_nowhere_else() {
        let text = "version = \"0.1.0\"\nours = { path = \"a\", version = \"0.1.0\", features = [\"b\"] }\n\
                    theirs = { version = \"0.1.0\" }\nVersion: 0.1.0\nset(PACKAGE_VERSION \"0.1.0\")\n\
                    rust-version = \"1.88\"\n";
        let expected = "version = \"0.2.0-rc.1\"\nours = { path = \"a\", version = \"0.2.0-rc.1\", features = [\"b\"] }\n\
                        theirs = { version = \"0.1.0\" }\nVersion: 0.2.0-rc.1\nset(PACKAGE_VERSION \"0.2.0-rc.1\")\n\
                        rust-version = \"1.88\"\n";
        assert_eq!(rewritten(text, "0.2.0-rc.1"), expected);
        assert_eq!(rewritten(expected, "0.1.0"), text);
    }

    #[test]
    fn a_version_has_three_numbers() {
        assert!(["0.1.0", "1.20.3", "0.2.0-rc.1"].into_iter().all(is_version));
        assert!(!["1", "0.1", "0.1.0.0", "v0.1.0", "0.01.0", "0.1.0-", "0.1.0-a b", ""].into_iter().any(is_version));
    }
}
