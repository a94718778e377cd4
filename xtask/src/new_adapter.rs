//! Writes what a new adapter needs: its crate, and its rows in the tables.
//!
//! The templates are archives in `xtask/templates`: whole files by their places in the repository, and `rows.txt`, whose
//! rows go before the end marks of lists (`adapters: end`). They are written for a framework `MadeUp`, whose name is replaced.
//! Lines between `% if WORD` and `% end` are for adapters of that kind.

use crate::run::{Result, at, cargo, run};
use clap::Args;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A new adapter.
#[derive(Debug, Args)]
pub struct NewAdapter {
    /// The framework's name, as its users write it: MXNet is `mxnet` in code and `MXNet` in prose.
    name: String,
    /// Its tensors are objects of Python.
    #[arg(long, required_unless_present = "rust", conflicts_with = "rust")]
    python: bool,
    /// Its tensors are values of Rust.
    #[arg(long)]
    rust: bool,
    /// It has tensors on CUDA devices.
    #[arg(long)]
    cuda: bool,
    /// It has its own kernels for copies.
    #[arg(long)]
    compact: bool,
    /// Its tensors do not change.
    #[arg(long)]
    no_writes: bool,
    /// What `pip install` calls it, where that is not its name in code.
    #[arg(long, value_name = "NAME", conflicts_with = "rust")]
    distribution: Option<String>,
}

/// What ends a list that adapters have a row in.
const END: &str = "adapters: end";

/// What begins a part of a template for some adapters, and what ends it.
const IF: &str = "% if ";
const FI: &str = "% end";

/// The file of a template that has the rows of lists.
const ROWS: &str = "rows.txt";

/// What begins the row of a file, which is followed by the number of the list in the file, if that is not the first.
const ROW: &str = "== ";

/// What the templates call the framework: in code, in prose, and where it is installed.
const NAMES: [&str; 3] = ["madeup", "MadeUp", "MADEUP"];

/// The folder that every crate links to.
const LICENSES: &str = "LICENSES";

impl NewAdapter {
    /// An adapter for memory of the host.
    #[cfg(test)]
    pub fn of_host(name: &str, python: bool) -> Self {
        Self {
            name: name.into(),
            python,
            rust: !python,
            cuda: false,
            compact: false,
            no_writes: false,
            distribution: None,
        }
    }

    /// Returns the names in code and in prose, and that of the distribution.
    ///
    /// # Errors
    ///
    /// For a name that is not one word of letters, digits and `_`.
    fn names(&self) -> Result<[String; 3]> {
        let code = self.name.to_lowercase();
        let is_word =
            code.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_');
        if !is_word || !code.starts_with(|letter: char| letter.is_ascii_lowercase()) {
            return Err(format!("{:?} is not a name: pass one word of letters, digits and _", self.name));
        }
        let prose = match self.name == code {
            true => code.split('_').map(capital).collect(),
            false => self.name.replace('_', ""),
        };
        let distribution = self.distribution.clone().unwrap_or_else(|| code.clone());
        Ok([code, prose, distribution])
    }

    /// Returns the words for which parts of the templates are kept.
    fn kinds(&self) -> BTreeSet<&'static str> {
        let either = |is: bool, yes, no| if is { yes } else { no };
        BTreeSet::from([
            either(self.cuda, "cuda", "host"),
            either(self.compact, "compact", "copied"),
            either(self.no_writes, "immutable", "writes"),
        ])
    }

    /// Writes the adapter into the repository at `root`. Returns the files that are new or changed.
    ///
    /// # Errors
    ///
    /// Where the crate is there already, or a list has no mark. Nothing is written then.
    pub fn write(&self, root: &Path) -> Result<Vec<PathBuf>> {
        let (names, kinds) = (self.names()?, self.kinds());
        let filled = |text: &str| kept(text, &kinds).map(|text| replaced(&text, &names));
        let templates = archive(root, if self.python { "templates/python" } else { "templates/rust" })?;
        let mut written = Vec::new();
        for (place, text) in templates.iter().filter(|(place, _)| place != ROWS) {
            let text = filled(text)?;
            if !text.is_empty() {
                written.push((PathBuf::from(replaced(place, &names)), text));
            }
        }
        if let Some((place, _)) = written.iter().find(|(place, _)| root.join(place).exists()) {
            return Err(format!("{} is there already: remove it, or choose another name", place.display()));
        }
        written.extend(rows(root, &filled(&rows_of(&templates)?)?)?);
        for (place, text) in &written {
            let path = root.join(place);
            let folder = path.parent().unwrap_or(root);
            at(folder, fs::create_dir_all(folder))?;
            at(&path, fs::write(&path, text))?;
        }
        let own = PathBuf::from(format!("crates/bridge-{}", names[0]));
        let link = root.join(&own).join(LICENSES);
        at(&link, symlink(Path::new("../..").join(LICENSES), &link))?;
        written.push((own.join(LICENSES), String::new()));
        let package = format!("truebridge-{}", names[0]);
        run(cargo(&["fmt", "-p", &package]).current_dir(root))?;
        Ok(written.into_iter().map(|(place, _)| place).collect())
    }

    /// Returns what to run first.
    pub fn first(&self) -> Result<String> {
        let [name, ..] = self.names()?;
        Ok(match self.python {
            true => {
                format!(
                    "cargo xtask generate tables && cargo xtask conformance --device cpu --adapters {name},numpy --seed 1"
                )
            }
            false => format!("cargo test -p truebridge-{name}"),
        })
    }
}

fn capital(word: &str) -> String {
    let (first, rest) = word.split_at(word.len().min(1));
    first.to_uppercase() + rest
}

fn read(path: &Path) -> Result<String> {
    at(path, fs::read_to_string(path))
}

/// Returns the files in an archive of `xtask`, with their places.
pub fn archive(root: &Path, name: &str) -> Result<Vec<(String, String)>> {
    let text = read(&root.join(format!("xtask/{name}.txtar")))?;
    let utf8 = |(place, bytes): (String, Vec<u8>)| Ok((place, String::from_utf8(bytes).map_err(|e| e.to_string())?));
    bridge_fuzz::unpacked(&text).into_iter().map(utf8).collect()
}

/// Returns the rows of a template.
fn rows_of(template: &[(String, String)]) -> Result<String> {
    let found = template.iter().find(|(place, _)| place == ROWS);
    found.map(|(_, rows)| rows.clone()).ok_or_else(|| format!("the template has no {ROWS}"))
}

/// Returns a template without the parts for other kinds of adapter.
fn kept(text: &str, kinds: &BTreeSet<&str>) -> Result<String> {
    let (mut lines, mut within) = (String::new(), None);
    for line in text.lines() {
        if let Some((_, word)) = line.split_once(IF) {
            within = Some(word);
        } else if line.trim_end().ends_with(FI) {
            within.take().ok_or("a part of a template ends that has not begun")?;
        } else if within.is_none_or(|word| kinds.contains(word)) {
            lines.push_str(line);
            lines.push('\n');
        }
    }
    match within {
        Some(word) => Err(format!("the part of a template for {word} has no end")),
        None => Ok(lines),
    }
}

/// Returns a text of a template for the framework with these names.
fn replaced(text: &str, names: &[String; 3]) -> String {
    NAMES.iter().zip(names).fold(text.to_owned(), |text, (made_up, name)| text.replace(made_up, name))
}

/// Returns the files that get the rows of a template, with them.
fn rows(root: &Path, template: &str) -> Result<Vec<(PathBuf, String)>> {
    let mut changed: Vec<(PathBuf, String)> = Vec::new();
    for row in template.split_terminator(ROW).filter(|row| !row.is_empty()) {
        let (head, row) = row.split_once('\n').unwrap_or((row, ""));
        let (place, list) = head.split_once(' ').unwrap_or((head, "1"));
        let list: usize = list.parse().map_err(|_| format!("{list} is not the number of a list"))?;
        let place = PathBuf::from(place);
        let known = changed.iter().position(|(known, _)| *known == place);
        let text = match known {
            Some(known) => changed.swap_remove(known).1,
            None => read(&root.join(&place))?,
        };
        let (end, _) = text
            .match_indices(END)
            .nth(list - 1)
            .ok_or_else(|| format!("{} has no mark `{END}` number {list}: the template names it", place.display()))?;
        let line = text[..end].rfind('\n').map_or(0, |newline| newline + 1);
        changed.push((place, [&text[..line], row, &text[line..]].concat()));
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(name: &str) -> NewAdapter {
        NewAdapter { no_writes: true, ..NewAdapter::of_host(name, true) }
    }

    #[test]
    fn a_framework_has_a_name_in_code_and_one_in_prose() {
        for (name, code, prose) in
            [("jax", "jax", "Jax"), ("MXNet", "mxnet", "MXNet"), ("two_words", "two_words", "TwoWords")]
        {
            assert_eq!(new(name).names().unwrap(), [code, prose, code]);
        }
        let named = NewAdapter { distribution: Some("scikit-x".into()), ..new("skx") };
        assert_eq!(named.names().unwrap(), ["skx", "Skx", "scikit-x"]);
        for wrong in ["", "9x", "a-b", "a b", "ä", "_a", "../x"] {
            assert!(new(wrong).names().is_err(), "{wrong}");
        }
    }

    #[test]
    fn parts_are_kept_for_their_kinds() {
        let text = "a\n//% if writes\nb\n//% end\n    #% if host\nc\n    #% end\nd\n";
        assert_eq!(kept(text, &new("x").kinds()).unwrap(), "a\nc\nd\n");
        assert!(kept("//% if host\n", &new("x").kinds()).is_err());
        assert!(kept("//% end\n", &new("x").kinds()).is_err());
    }

    /// Every mark that the templates name is there, whatever the kind of the adapter.
    #[test]
    fn every_row_has_its_list() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for kind in ["python", "rust"] {
            let template = rows_of(&archive(root, &format!("templates/{kind}")).unwrap()).unwrap();
            let filled = kept(&template, &new("x").kinds()).unwrap();
            assert!(rows(root, &filled).unwrap().len() >= 4);
        }
    }
}
