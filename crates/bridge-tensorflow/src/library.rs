//! Finding TensorFlow's shared libraries.

use bridge_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};

/// Where the functions are, in the folder of the package; the first two have to be there. The last two are the same for
/// Python, by its new and its old name.
const NAMES: [&str; 4] = [
    "libtensorflow_framework.so.2",
    "libtensorflow_cc.so.2",
    "python/lib_pywrap_tensorflow_common.so",
    "python/_pywrap_tensorflow_internal.so",
];
const REQUIRED: usize = 2;

/// Do not load what is not loaded (`dlfcn.h` of Linux).
const RTLD_NOLOAD: i32 = 4;

/// What the supported versions are, in words for errors.
pub(crate) const SUPPORTED: &str = "TensorFlow 2.12 and later";

/// The libraries of one TensorFlow.
pub(crate) struct Libraries {
    pub(crate) folder: PathBuf,
    open: Vec<Library>,
}

impl Libraries {
    /// Those of the package in `folder` that the process has loaded already.
    pub(crate) fn loaded(folder: &Path) -> Result<Self> {
        // SAFETY: the libraries are loaded already, or not at all, so no code of theirs runs.
        let open = |name| unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_NOLOAD) };
        let found: Vec<_> = NAMES.iter().map(|name| open(*name)).collect();
        if let Some(missing) = found[..REQUIRED].iter().position(|library| library.is_err()) {
            let (name, folder) = (NAMES[missing], folder.display());
            let text = format!("the package in {folder} has not loaded {name}: supported are {SUPPORTED}");
            return Err(Error::new(ErrorKind::Version, text));
        }
        Ok(Self { folder: folder.into(), open: found.into_iter().flatten().collect() })
    }

    /// Loads those of the package in `folder`, without Python.
    pub(crate) fn load(folder: &Path) -> Result<Self> {
        let open = |name: &&str| {
            let path = folder.join(name);
            // SAFETY: loading runs the initialisers of the libraries, which TensorFlow makes for just that; that the
            // folder holds a TensorFlow is for the caller to know.
            unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
                let text = format!(
                    "{} is no folder of a TensorFlow package, such as site-packages/tensorflow ({error}): supported are {SUPPORTED}",
                    folder.display()
                );
                Error::new(ErrorKind::Missing, text)
            })
        };
        let open = NAMES[..REQUIRED].iter().map(open).collect::<Result<_>>()?;
        Ok(Self { folder: folder.into(), open })
    }

    /// The folder of the TensorFlow that this process has loaded, whoever loaded it.
    pub(crate) fn folder_loaded() -> Option<PathBuf> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
        let mut found = paths.filter(|path| path.ends_with(NAMES[0]));
        found.next().and_then(Path::parent)?.canonicalize().ok()
    }

    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: only the address is taken.
        let find = |library: &Library| unsafe { library.get::<*mut c_void>(name.as_bytes_with_nul()) }.map(|at| *at);
        self.open.iter().find_map(|library| find(library).ok())
    }

    /// The function with this name, if there is one.
    ///
    /// # Safety
    ///
    /// `F` is a pointer to a function, and its signature that of the function.
    pub(crate) unsafe fn optional<F: Copy>(&self, name: &str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a function pointer has the size of an address, and the caller vouches for the signature. The library
        // stays loaded: TensorFlow cannot be unloaded.
        self.symbol(name).map(|address| unsafe { std::mem::transmute_copy(&address) })
    }

    /// The same for one that has to be there.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Version`] if it is not.
    ///
    /// # Safety
    ///
    /// As for [`optional`](Self::optional).
    pub(crate) unsafe fn required<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller's obligation.
        unsafe { self.optional(name) }.ok_or_else(|| {
            let text = format!(
                "the TensorFlow in {} has no function {name}: supported are {SUPPORTED}",
                self.folder.display()
            );
            Error::new(ErrorKind::Version, text)
        })
    }
}
