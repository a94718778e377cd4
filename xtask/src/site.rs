//! The documentation site: static pages out of docs/, the docstrings and the reports.

use crate::run::{Result, program, run, target};
use crate::venv;
use std::path::PathBuf;

/// Builds the site into the target folder, and returns the folder. A broken link, a missing report and a name without a
/// place in the reference are errors.
pub fn build() -> Result<PathBuf> {
    let site = target().join("site");
    let python = venv::SITE.ready()?;
    // Not --quiet: the warnings that it hides would not be errors.
    let arguments = ["-m", "mkdocs", "build", "--strict", "--config-file", "xtask/site/mkdocs.yml"];
    run(program(&python, &arguments).env("NO_MKDOCS_2_WARNING", "1").arg("--site-dir").arg(&site))?;
    Ok(site)
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
