//! A TensorFlow in this process: its functions, its version, and what it can do.

pub(crate) mod api;
pub(crate) mod consumer;
pub(crate) mod dtypes;
pub(crate) mod kernel;
pub(crate) mod library;
pub(crate) mod release;
pub(crate) mod stub;

use crate::runtime::api::{Core, Cxx, Eager, Sessions, Version};
use crate::runtime::consumer::RuntimeConsumer;
use crate::runtime::dtypes::DTYPES;
use crate::runtime::library::{Libraries, Series};
use bridge_core::{DType, DeviceKind, Error, ErrorKind, Profile, Result, Strides};
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The alignment in bytes that addresses must have, on the host and on a GPU. Kernels of Eigen check it and end the
/// process (`Tensor::IsAligned`, `EIGEN_MAX_ALIGN_BYTES`); on an H200 with 2.21, 15 of 22 operations did so with an
/// address aligned to 32, and most others lost the CUDA context with one aligned to 8.
const ALIGNMENT: usize = 64;

/// A TensorFlow in this process, 1.x or 2.x. It needs neither headers nor C++ of TensorFlow: functions are looked up in
/// the libraries of the Python package.
pub struct Runtime {
    pub(crate) core: Core,
    pub(crate) sessions: Sessions,
    /// 1.x has no eager runtime that could take memory from elsewhere.
    eager: Option<Eager>,
    pub(crate) cxx: Cxx,
    pub(crate) consumer: Arc<RuntimeConsumer>,
    /// What it accepts and emits, on GPUs as well if it was built for them.
    pub(crate) profile: Profile,
    version: String,
    libraries: Libraries,
}

/// What the installed version offers beyond what every supported one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether it was built for CUDA, and its stream can be learnt.
    pub cuda: bool,
    /// Whether an eager tensor can be lent without the host waiting for the device.
    pub lends_without_waiting: bool,
}

/// One of each series.
static RUNTIMES: [OnceLock<Runtime>; 2] = [const { OnceLock::new() }; 2];
/// Held while one of them is looked for.
static LOOKING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// The TensorFlow of this series that the process has loaded, by Python or otherwise.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if there is none, [`ErrorKind::Version`] if it is not a supported one or lacks a function.
    pub fn loaded(series: Series) -> Result<&'static Self> {
        Self::get_or(series, || {
            let folder = Libraries::folder_loaded(series).ok_or_else(|| {
                let text = match Series::ALL.into_iter().find(|other| Libraries::folder_loaded(*other).is_some()) {
                    Some(other) => format!(
                        "this process has loaded a TensorFlow of another series (supported of it is {})",
                        other.supported()
                    ),
                    None => "this process has loaded no TensorFlow".into(),
                };
                Error::new(ErrorKind::Missing, format!("{text}: supported is {}", series.supported()))
            })?;
            Libraries::loaded(series, &folder)
        })
    }

    /// The TensorFlow of the Python package in `folder` (`site-packages/tensorflow`, `site-packages/tensorflow_core` of
    /// 1.15), which is loaded without Python unless the process has it already. 1.x and 2.x may be in one process: neither
    /// shows its symbols to anybody. The folder is trusted like a program: what its libraries do when they are loaded is
    /// done.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if the folder holds no TensorFlow or it cannot be loaded, [`ErrorKind::Version`] if it is
    /// not a supported one, and [`ErrorKind::Argument`] if the process has another one of the same series: there can be one.
    pub fn open(folder: &Path) -> Result<&'static Self> {
        let (series, folder) = library::find(folder)?;
        Self::open_found(series, folder)
    }

    /// The same for a folder that has to hold this series.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), and [`ErrorKind::Version`] for a folder of the other series.
    pub fn open_as(series: Series, folder: &Path) -> Result<&'static Self> {
        let (found, folder) = library::find(folder)?;
        if found != series {
            let (folder, supported) = (folder.display(), series.supported());
            let text = format!(
                "{folder} holds another series, of which {} is supported: here it must be {supported}",
                found.supported()
            );
            return Err(Error::new(ErrorKind::Version, text));
        }
        Self::open_found(series, folder)
    }

    fn open_found(series: Series, folder: PathBuf) -> Result<&'static Self> {
        let other = |used: &Path| {
            let used = used.display();
            let text =
                format!("this process has loaded the TensorFlow in {used} already, for good: start another process");
            Error::new(ErrorKind::Argument, text)
        };
        let runtime = Self::get_or(series, || match Libraries::folder_loaded(series) {
            Some(loaded) if loaded == folder => Libraries::loaded(series, &folder),
            Some(loaded) => Err(other(&loaded)),
            None => Libraries::load(series, &folder),
        })?;
        if runtime.folder() == folder { Ok(runtime) } else { Err(other(runtime.folder())) }
    }

    fn get_or(series: Series, find: impl FnOnce() -> Result<Libraries>) -> Result<&'static Self> {
        let slot = &RUNTIMES[series as usize];
        if let Some(runtime) = slot.get() {
            return Ok(runtime);
        }
        let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.get() {
            Some(runtime) => Ok(runtime),
            None => {
                let runtime = Self::new(find()?)?;
                Ok(slot.get_or_init(|| runtime))
            }
        }
    }

    /// The runtime in a slot: a series as a number.
    pub(crate) fn in_slot(slot: usize) -> Option<&'static Self> {
        RUNTIMES[slot].get()
    }

    fn new(libraries: Libraries) -> Result<Self> {
        let series = libraries.series;
        // SAFETY: the function has had this signature in every version; it has no obligations, and gives a string that
        // lives as long as the library.
        let version = unsafe {
            let tell = libraries.required::<unsafe extern "C" fn() -> *const std::ffi::c_char>("TF_Version")?;
            CStr::from_ptr(tell()).to_string_lossy().into_owned()
        };
        let Some(numbers) = parse(&version).filter(|numbers| series.supports(*numbers)) else {
            let supported = Series::ALL.map(Series::supported).join(", ");
            let folder = libraries.folder.display();
            let text = format!("the TensorFlow in {folder} is {version}: supported are {supported}");
            return Err(Error::new(ErrorKind::Version, text));
        };
        let (core, cxx) = (Core::find(&libraries)?, Cxx::find(&libraries, numbers));
        let cuda = cxx.gpu_device.is_some().then_some(DeviceKind::CUDA);
        let profile = Profile {
            name: series.name().into(),
            dtypes: dtypes(&core),
            strides: Strides::Compact,
            alignment: ALIGNMENT,
            devices: [DeviceKind::CPU].into_iter().chain(cuda).collect(),
            keeps_read_only: true,
            waits_on_export: false,
            private_functions: Cxx::shows_streams(numbers),
        };
        Ok(Self {
            core,
            sessions: Sessions::find(&libraries)?,
            eager: if series == Series::Two { Some(Eager::find(&libraries)?) } else { None },
            cxx,
            consumer: Arc::new(RuntimeConsumer::new(series)),
            profile,
            version,
            libraries,
        })
    }

    /// The version, such as `2.21.0`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The series that the version belongs to.
    pub fn series(&self) -> Series {
        self.libraries.series
    }

    /// The folder of the package.
    pub fn folder(&self) -> &Path {
        &self.libraries.folder
    }

    /// What this version offers.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { cuda: self.cxx.gpu_device.is_some(), lends_without_waiting: self.cxx.tensor.is_some() }
    }

    /// Of 2.x: whoever has a tensor or a context of the eager runtime asks.
    pub(crate) fn eager(&self) -> &Eager {
        self.eager.as_ref().expect("only 2.x has tensors of the eager runtime")
    }

    #[cfg(feature = "python")]
    pub(crate) fn libraries(&self) -> &Libraries {
        &self.libraries
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({} in {})", self.version, self.folder().display())
    }
}

/// Those of our table that this version has.
fn dtypes(core: &Core) -> Vec<DType> {
    // SAFETY: the function takes any number.
    let known = |code| unsafe { (core.TF_DataTypeSize)(code) } > 0;
    DTYPES.iter().filter(|(_, code)| known(*code)).map(|(dtype, _)| *dtype).collect()
}

/// The first two numbers of a version.
fn parse(version: &str) -> Option<Version> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
