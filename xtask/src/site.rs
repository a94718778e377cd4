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

/// Writes the tables of the pages from the reports, or compares them with the reports.
pub fn tables(check: bool) -> Result<()> {
    let arguments: &[&str] = if check { &["xtask/site/tables.py", "--check"] } else { &["xtask/site/tables.py"] };
    run(&mut program(venv::MAIN.ready()?, arguments))
}
