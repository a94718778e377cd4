//! Finding TensorFlow's shared libraries.

use crate::runtime::stub;
use bridge_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, OsString, c_void};
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The first two numbers of a version.
pub(crate) type Version = (u32, u32);
/// Versions from one to another, both included.
pub(crate) type Versions = RangeInclusive<Version>;

/// Versions of TensorFlow with the same libraries. A process can have one of each series at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Series {
    /// TensorFlow 1.x: 1.15.
    One,
    /// TensorFlow 2.x: 2.12 and later.
    Two,
}

impl Series {
    pub(crate) const ALL: [Self; 2] = [Self::One, Self::Two];

    /// The name of the framework in profiles.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::One => "tensorflow1",
            Self::Two => "tensorflow",
        }
    }

    /// The supported versions, in words for errors.
    pub(crate) const fn supported(self) -> &'static str {
        match self {
            Self::One => "TensorFlow 1.15",
            Self::Two => "TensorFlow 2.12 and later",
        }
    }

    /// Returns whether a version is supported.
    pub(crate) fn supports(self, version: Version) -> bool {
        match self {
            Self::One => version == (1, 15),
            Self::Two => version >= (2, 12),
        }
    }

    /// The libraries with the functions, in the folder of the package, and how many of them are required. The first one
    /// identifies the series. The last two of 2.x are Python's, by its new and its old name.
    const fn names(self) -> (&'static [&'static str], usize) {
        match self {
            Self::One => (&["libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"], 2),
            Self::Two => (
                &[
                    "libtensorflow_framework.so.2",
                    "libtensorflow_cc.so.2",
                    "python/lib_pywrap_tensorflow_common.so",
                    "python/_pywrap_tensorflow_internal.so",
                ],
                2,
            ),
        }
    }

    /// Returns the series of the package in this folder.
    fn of(folder: &Path) -> Option<Self> {
        Self::ALL.into_iter().find(|series| folder.join(series.names().0[0]).is_file())
    }
}

/// Fail if the library is not loaded yet (`dlfcn.h` of Linux).
const RTLD_NOLOAD: i32 = 4;

/// The libraries of one TensorFlow.
pub(crate) struct Libraries {
    pub(crate) series: Series,
    pub(crate) folder: PathBuf,
    open: Vec<Library>,
}

/// Returns the folder with the libraries of a package: `path` itself, or a folder of it. The package of 1.15 is
/// `tensorflow_core`; the `tensorflow` next to it has no libraries.
///
/// # Errors
///
/// [`ErrorKind::Missing`] if there are none.
pub(crate) fn find(path: &Path) -> Result<(Series, PathBuf)> {
    let missing = |text: String| {
        let supported = Series::ALL.map(Series::supported).join(", ");
        let text = format!(
            "{text}: name the folder of a TensorFlow package, such as site-packages/tensorflow, or site-packages/tensorflow_core of 1.15 (supported are {supported})"
        );
        Error::new(ErrorKind::Missing, text)
    };
    let path = path
        .canonicalize()
        .map_err(|error| missing(format!("there is no folder {} ({error})", path.display())).caused_by(error))?;
    if path.is_file() {
        let text = format!(
            "{0} is a file: unpack a wheel with `python -m zipfile -e {0} FOLDER`, and name that folder",
            path.display()
        );
        return Err(Error::new(ErrorKind::Missing, text));
    }
    let beside = path.ends_with("tensorflow").then(|| path.join("../tensorflow_core"));
    let mut places = [path.clone(), path.join("tensorflow_core"), path.join("tensorflow")].into_iter().chain(beside);
    let found = places.find_map(|place| Some((Series::of(&place)?, place.canonicalize().ok()?)));
    found.ok_or_else(|| missing(format!("{} holds no libraries of TensorFlow", path.display())))
}

impl Libraries {
    /// Opens the libraries of the package in `folder`, which the process has loaded already.
    pub(crate) fn loaded(series: Series, folder: &Path) -> Result<Self> {
        // SAFETY: a library that is not loaded yet is not opened, so no initialiser runs.
        let open = |name| unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_NOLOAD) };
        let (names, required) = series.names();
        let found: Vec<_> = names.iter().map(|name| open(*name)).collect();
        if let Some(missing) = found[..required].iter().position(|library| library.is_err()) {
            let (name, folder, supported) = (names[missing], folder.display(), series.supported());
            let text = format!("the package in {folder} has not loaded {name}: supported is {supported}");
            return Err(Error::new(ErrorKind::Version, text));
        }
        Ok(Self { series, folder: folder.into(), open: found.into_iter().flatten().collect() })
    }

    /// Loads the libraries of the package in `folder`, without Python.
    ///
    /// # Safety
    ///
    /// That of [`Runtime::open`](super::Runtime::open).
    pub(crate) unsafe fn load(series: Series, folder: &Path) -> Result<Self> {
        let (names, required) = series.names();
        let open = |name: &&str| {
            let path = folder.join(name);
            // SAFETY: loading runs the libraries' initialisers, which are meant to run then: the caller's obligation.
            unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
                Error::new(ErrorKind::Missing, format!("{} cannot be loaded: {error}", path.display())).caused_by(error)
            })
        };
        let open = match series {
            // SAFETY: as above. Only its Python module calls Python's functions, and that is not used here.
            Series::One => vec![unsafe { stub::load(&folder.join(names[1])) }?],
            Series::Two => names[..required].iter().map(open).collect::<Result<_>>()?,
        };
        Ok(Self { series, folder: folder.into(), open })
    }

    /// Returns the folder of the TensorFlow of this series that the process has loaded, by Python or otherwise.
    pub(crate) fn folder_loaded(series: Series) -> Option<PathBuf> {
        let maps = std::fs::read("/proc/self/maps").ok()?;
        let path = |line: &[u8]| line.iter().position(|byte| *byte == b'/').map(|at| line[at..].to_vec());
        let mut paths =
            maps.split(|byte| *byte == b'\n').filter_map(path).map(|path| PathBuf::from(OsString::from_vec(path)));
        let found = paths.find(|path| path.ends_with(series.names().0[0]))?;
        found.parent()?.canonicalize().ok()
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: only the address is taken.
        let find = |library: &Library| unsafe { library.get::<*mut c_void>(name.as_bytes_with_nul()) }.map(|at| *at);
        self.open.iter().find_map(|library| find(library).ok())
    }

    /// Returns the function with this name, if there is one.
    ///
    /// # Safety
    ///
    /// `F` is a pointer to a function, and its signature that of the function.
    pub(crate) unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a function pointer has the size of an address; the signature is the caller's obligation. The library
        // stays loaded: TensorFlow cannot be unloaded.
        self.symbol(name).map(|address| unsafe { std::mem::transmute_copy(&address) })
    }

    /// Returns the function with this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`] if it is missing.
    ///
    /// # Safety
    ///
    /// As for [`optional`](Self::optional).
    pub(crate) unsafe fn required<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller's obligation.
        unsafe { self.optional(name) }.ok_or_else(|| {
            let (folder, supported) = (self.folder.display(), self.series.supported());
            let text = format!("the TensorFlow in {folder} has no function {name}: supported is {supported}");
            Error::new(ErrorKind::Version, text)
        })
    }
}
