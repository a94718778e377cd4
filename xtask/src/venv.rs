//! The virtual environments that the suite and the Python tests run in.

use crate::run::{Result, ask, at, program, root, run, target};
use std::fs;
use std::path::{Path, PathBuf};

/// A virtual environment in the target folder.
pub struct Venv {
    /// Its folder.
    name: &'static str,
    /// Requirements files: for any machine, and for a machine with a CUDA device.
    requirements: &'static [&'static str],
    /// Whether it also holds what `requirements.txt` in the folder of a crate names.
    of_crates: bool,
    /// Which Pythons can be used: in words, and as an expression that such a Python evaluates to `True`.
    python: &'static str,
    fits: &'static str,
    /// The variable that names the Python to use.
    variable: &'static str,
    /// Names of programs that may be such a Python; the first that works is used.
    names: &'static [&'static str],
    /// The start of the names of pyenv's folders that hold one.
    version: &'static str,
    /// Modules without which the environment is useless.
    essential: &'static [&'static str],
}

/// The environment that nearly everything runs in.
pub const MAIN: Venv = Venv {
    name: "venv",
    requirements: &["xtask/requirements.txt", "xtask/requirements-cuda.txt"],
    of_crates: true,
    python: "Python 3.10 or later with venv",
    fits: "sys.version_info >= (3, 10)",
    variable: "PYTHON",
    names: &["python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.14"],
    version: "3.1",
    essential: &[],
};

/// The environment for `truebridge_tf1`, with TensorFlow 1.15.
pub const PYTHON37: Venv = Venv {
    name: "venv37",
    requirements: &["xtask/requirements-python37.txt"],
    of_crates: false,
    python: "Python 3.7 with venv",
    fits: "sys.version_info[:2] == (3, 7)",
    variable: "PYTHON37",
    names: &["python3.7", "python3"],
    version: "3.7.",
    essential: &["pytest", "tensorflow"],
};

/// The environment that the kernels are compiled in.
pub const KERNELS: Venv = Venv {
    name: "venv-kernels",
    requirements: &["xtask/requirements-kernels.txt"],
    of_crates: false,
    essential: &["nvidia.cuda_nvrtc", "nvidia.nvfatbin"],
    ..MAIN
};

/// The environment that builds wheels.
pub const WHEELS: Venv = Venv {
    name: "venv-wheels",
    requirements: &["xtask/requirements-wheels.txt"],
    of_crates: false,
    essential: &["auditwheel", "maturin", "ziglang"],
    ..MAIN
};

/// The environment that builds the documentation site. It is the same on every machine.
pub const SITE: Venv = Venv {
    name: "venv-site",
    requirements: &["xtask/requirements-site.txt"],
    of_crates: false,
    essential: &["mkdocs", "material", "mkdocstrings_handlers.python"],
    ..MAIN
};

impl Venv {
    /// Returns the Python of the environment, which may lack what it needs yet. Makes the environment where there is none.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    pub fn made(&self) -> Result<PathBuf> {
        let venv = self.folder();
        let python = venv.join("bin/python");
        if !self.works(&python) {
            let missing = || format!("no {} was found: install one, or set {}", self.python, self.variable);
            let found = self.find().ok_or_else(missing)?;
            println!("making {} with {}", venv.display(), found.display());
            run(program(&found, &["-m", "venv", "--clear"]).arg(&venv))?;
        }
        Ok(python)
    }

    /// Returns the Python of the environment. Makes the environment, and completes it where the requirements have
    /// changed.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    pub fn ready(&self) -> Result<PathBuf> {
        let (python, venv) = (self.made()?, self.folder());
        self.install(&python, &venv.join("requirements.stamp"))?;
        let script = "import importlib.util as u, sys; print(*(m for m in sys.argv[1:] if not u.find_spec(m)))";
        match ask(program(&python, &["-c", script]).args(self.essential)) {
            Some(missing) if missing.is_empty() => Ok(python),
            missing => Err(format!("{} lacks {}", venv.display(), missing.unwrap_or("a working Python".into()))),
        }
    }

    fn folder(&self) -> PathBuf {
        target().join(self.name)
    }

    /// Installs the requirements, unless the stamp says that this has been done. Names and leaves out those that cannot
    /// be installed for this Python.
    fn install(&self, python: &Path, stamp: &Path) -> Result<()> {
        let files = self.files()?;
        let texts = files.iter().map(|file| at(file.as_ref(), fs::read_to_string(root().join(file))));
        let wanted = texts.collect::<Result<String>>()?;
        if fs::read_to_string(stamp).is_ok_and(|done| done == wanted) {
            return Ok(());
        }
        // What is imported is compiled then: to compile all that is installed takes half a minute.
        let install = ["-m", "pip", "install", "--quiet", "--no-compile"];
        let pip = |what: &[&str]| run(program(python, &install).args(what));
        println!("installing what {} name", files.join(" and "));
        let together: Vec<&str> = files.iter().flat_map(|file| ["-r", file.as_str()]).collect();
        if pip(&together).is_ok() {
            return at(stamp, fs::write(stamp, wanted));
        }
        println!("not everything can be had together: trying one by one");
        let left_out: Vec<&str> = requirements(&wanted).filter(|one| pip(&[one]).is_err()).collect();
        println!("left out: {}", left_out.join(", "));
        Ok(())
    }

    /// Returns the requirements files that are for this machine.
    fn files(&self) -> Result<Vec<String>> {
        let own = &self.requirements[..if has_cuda() { self.requirements.len() } else { 1 }];
        let mut files: Vec<String> = own.iter().map(ToString::to_string).collect();
        if self.of_crates {
            let crates = at("crates".as_ref(), fs::read_dir(root().join("crates")))?.flatten();
            let named = crates.map(|one| format!("crates/{}/requirements.txt", one.file_name().to_string_lossy()));
            files.extend(named.filter(|file| root().join(file).is_file()));
            files[own.len()..].sort();
        }
        Ok(files)
    }

    fn find(&self) -> Option<PathBuf> {
        let chosen = std::env::var_os(self.variable).map(PathBuf::from);
        let named = self.names.iter().map(PathBuf::from);
        chosen.into_iter().chain(named).chain(of_pyenv(self.version)).find(|python| self.works(python))
    }

    fn works(&self, python: &Path) -> bool {
        works(python, self.fits)
    }
}

/// Returns a Python of this version, such as `3.12`, if there is one.
pub fn interpreter(version: &str) -> Option<PathBuf> {
    let fits = format!("'.'.join(map(str, sys.version_info[:2])) == '{version}'");
    let named = PathBuf::from(format!("python{version}"));
    [named].into_iter().chain(of_pyenv(&format!("{version}."))).find(|python| works(python, &fits))
}

/// Returns the Pythons that pyenv has installed whose versions begin so, the newest first as far as their names tell.
fn of_pyenv(version: &str) -> Vec<PathBuf> {
    let top = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let top = top.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let folders = top.and_then(|top| fs::read_dir(top.join("versions")).ok()).into_iter().flatten().flatten();
    let fitting = folders.filter(|folder| folder.file_name().to_string_lossy().starts_with(version));
    let mut found: Vec<_> = fitting.map(|folder| folder.path().join("bin/python")).collect();
    found.sort_by(|one, other| other.cmp(one));
    found
}

/// Returns whether this is a Python that can be used. It is run, because a shim may stand for no Python.
fn works(python: &Path, fits: &str) -> bool {
    let script = format!("import sys, ssl, venv, ensurepip; print({fits})");
    ask(&mut program(python, &["-c", &script])).is_some_and(|answer| answer == "True")
}

/// Returns the requirements in the text of a requirements file.
fn requirements(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns whether there is a CUDA device, as far as can be seen without loading its driver.
pub fn has_cuda() -> bool {
    let listed = fs::read_dir("/proc/driver/nvidia/gpus").is_ok_and(|mut gpus| gpus.next().is_some());
    listed
        || Path::new("/dev/nvidia0").exists()
        || ask(&mut program("nvidia-smi", &["-L"])).is_some_and(|l| !l.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_no_requirements() {
        let text = "# words\n\na==1\n  b==2; python_version < \"3\"\n";
        assert_eq!(requirements(text).collect::<Vec<_>>(), ["a==1", "b==2; python_version < \"3\""]);
    }

    #[test]
    fn a_program_that_is_no_python_is_skipped() {
        assert!(!MAIN.works(Path::new("/bin/false")));
        assert!(!MAIN.works(Path::new("/nowhere/python3")));
    }
}
