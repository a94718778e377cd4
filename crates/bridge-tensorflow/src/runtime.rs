//! A TensorFlow in this process: its functions, its version, and what it can do.

use crate::api::{Core, Cxx, Eager};
use crate::library::{Libraries, SUPPORTED};
use bridge_core::{Error, ErrorKind, Result};
use std::ffi::CStr;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The oldest version that is supported.
const OLDEST: (u32, u32) = (2, 12);

/// A TensorFlow 2 in this process. It needs neither headers nor C++ of TensorFlow: functions are looked up in the
/// libraries of the Python package.
pub struct Runtime {
    pub(crate) core: Core,
    pub(crate) eager: Eager,
    pub(crate) cxx: Cxx,
    version: String,
    libraries: Libraries,
}

/// What the installed version offers beyond what every supported one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether it was built for CUDA, and its stream can be learnt.
    pub cuda: bool,
    /// Whether a tensor can be lent without the host waiting for the device.
    pub lends_without_waiting: bool,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
/// Held while the one runtime is looked for.
static LOOKING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// The TensorFlow that this process has loaded, by Python or otherwise.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if there is none, [`ErrorKind::Version`] if it is older than 2.12 or lacks a function.
    pub fn loaded() -> Result<&'static Self> {
        Self::get_or(|| {
            let folder = Libraries::folder_loaded().ok_or_else(|| {
                let text = format!("this process has loaded no TensorFlow 2: supported are {SUPPORTED}");
                Error::new(ErrorKind::Missing, text)
            })?;
            Libraries::loaded(&folder)
        })
    }

    /// The TensorFlow of the Python package in `folder` (`site-packages/tensorflow`), which is loaded without Python
    /// unless the process has it already.
    ///
    /// # Errors
    ///
    /// As for [`loaded`](Self::loaded), and [`ErrorKind::Argument`] if the process has another one: there can be one
    /// TensorFlow 2 in a process.
    pub fn open(folder: &Path) -> Result<&'static Self> {
        let folder = folder.canonicalize().map_err(|error| {
            Error::new(ErrorKind::Missing, format!("there is no folder {} ({error})", folder.display()))
        })?;
        let runtime = Self::get_or(|| match Libraries::folder_loaded() {
            Some(loaded) => Libraries::loaded(&loaded),
            None => Libraries::load(&folder),
        })?;
        let used = &runtime.libraries.folder;
        (*used == folder).then_some(runtime).ok_or_else(|| {
            Error::new(ErrorKind::Argument, format!("this process uses the TensorFlow in {} already", used.display()))
        })
    }

    fn get_or(find: impl FnOnce() -> Result<Libraries>) -> Result<&'static Self> {
        let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
        match RUNTIME.get() {
            Some(runtime) => Ok(runtime),
            None => {
                let runtime = Self::new(find()?)?;
                Ok(RUNTIME.get_or_init(|| runtime))
            }
        }
    }

    /// The runtime whose kernels run.
    pub(crate) fn current() -> Option<&'static Self> {
        RUNTIME.get()
    }

    fn new(libraries: Libraries) -> Result<Self> {
        let core = Core::find(&libraries)?;
        // SAFETY: the function has no obligations, and gives a string that lives as long as the library.
        let version = unsafe { CStr::from_ptr((core.TF_Version)()) }.to_string_lossy().into_owned();
        if parse(&version).is_none_or(|version| version < OLDEST) {
            let text = format!("this is TensorFlow {version}: supported are {SUPPORTED}");
            return Err(Error::new(ErrorKind::Version, text));
        }
        Ok(Self { eager: Eager::find(&libraries)?, cxx: Cxx::find(&libraries), core, version, libraries })
    }

    /// The version, such as `2.21.0`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What this version offers.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { cuda: self.cxx.gpu_device.is_some(), lends_without_waiting: self.cxx.tensor.is_some() }
    }

    #[cfg(feature = "python")]
    pub(crate) fn libraries(&self) -> &Libraries {
        &self.libraries
    }
}

/// The first two numbers of a version.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
