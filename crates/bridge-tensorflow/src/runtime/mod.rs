//! A TensorFlow in this process, of either series: its functions, its version, and what it can do.
//!
//! | module | contents |
//! |---|---|
//! | [`library`], [`stub`] | finding and loading the shared libraries; the Python symbols that those of 1.x need |
//! | [`api`], [`cxx`], [`status`] | the C functions, the one C++ function, the errors that they report |
//! | [`dtypes`], [`tensor`] | TensorFlow's dtypes and tensors |
//! | [`gpus`], [`consumer`], [`release`] | what leases need: streams, read-only memory, views, the release of memory |
//! | [`kernel`], [`stream`] | operations of our own, and the one that reports a GPU's stream |
//!
//! [`Runtime`] is defined here. [`kernel`] and [`stream`] import it; it imports neither of them.

pub(crate) mod api;
pub(crate) mod consumer;
pub(crate) mod cxx;
pub(crate) mod dtypes;
pub(crate) mod gpus;
pub(crate) mod kernel;
pub(crate) mod library;
pub(crate) mod release;
pub(crate) mod status;
pub(crate) mod stream;
pub(crate) mod stub;
pub(crate) mod tensor;

use crate::runtime::api::{Core, Sessions};
use crate::runtime::consumer::RuntimeConsumer;
use crate::runtime::cxx::GpuDevice;
use crate::runtime::dtypes::DTYPES;
use crate::runtime::library::{Libraries, Series, Version};
use bridge_core::{DType, DeviceKind, Error, ErrorKind, Profile, Result, Strides};
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The alignment of addresses in bytes, on the host and on a GPU. Kernels of Eigen check it and abort the process
/// (`Tensor::IsAligned`, `EIGEN_MAX_ALIGN_BYTES`): on an H200 with 2.21, 15 of 22 operations did so at an address
/// aligned to 32, and most others lost the CUDA context at one aligned to 8.
const ALIGNMENT: usize = 64;

/// A TensorFlow in this process, 1.x or 2.x. Its functions are looked up in the libraries of the Python package.
pub struct Runtime {
    pub(crate) core: Core,
    pub(crate) sessions: Sessions,
    /// In builds for CUDA that show their streams.
    pub(crate) gpu_device: Option<GpuDevice>,
    pub(crate) consumer: Arc<RuntimeConsumer>,
    /// What it accepts, on GPUs as well if it was built for them.
    pub(crate) profile: Profile,
    version: String,
    libraries: Libraries,
}

/// The runtime of each series.
static RUNTIMES: [OnceLock<Runtime>; 2] = [const { OnceLock::new() }; 2];
/// Held while one of them is opened.
static OPENING: Mutex<()> = Mutex::new(());

impl Runtime {
    /// Returns the TensorFlow of this series that the process has loaded, by Python or otherwise.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if there is none, [`ErrorKind::Version`] if it is not supported or lacks a function.
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

    /// Returns the TensorFlow of the Python package in `folder` (`site-packages/tensorflow`,
    /// `site-packages/tensorflow_core` of 1.15). Loads it without Python, unless the process has loaded it. 1.x and 2.x
    /// may be in one process: neither adds its symbols to the global scope.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Missing`] if the folder holds no TensorFlow or it cannot be loaded, [`ErrorKind::Version`] if it is
    /// not supported, and [`ErrorKind::Argument`] if the process has loaded another one of the same series.
    ///
    /// # Safety
    ///
    /// What has the names of TensorFlow's libraries in the folder is TensorFlow.
    pub unsafe fn open(folder: &Path) -> Result<&'static Self> {
        let (series, folder) = library::find(folder)?;
        // SAFETY: the caller's obligation.
        unsafe { Self::open_found(series, folder) }
    }

    /// Returns the TensorFlow in `folder` as [`open`](Self::open) does, which must be of this series.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), and [`ErrorKind::Version`] for a folder of the other series.
    ///
    /// # Safety
    ///
    /// As for [`open`](Self::open).
    pub unsafe fn open_as(series: Series, folder: &Path) -> Result<&'static Self> {
        let (found, folder) = library::find(folder)?;
        if found != series {
            let (folder, supported) = (folder.display(), series.supported());
            let text = format!(
                "{folder} holds another series, of which {} is supported: here it must be {supported}",
                found.supported()
            );
            return Err(Error::new(ErrorKind::Version, text));
        }
        // SAFETY: the caller's obligation.
        unsafe { Self::open_found(series, folder) }
    }

    /// # Safety
    ///
    /// As for [`open`](Self::open).
    unsafe fn open_found(series: Series, folder: PathBuf) -> Result<&'static Self> {
        let other = |used: &Path| {
            let used = used.display();
            let text = format!(
                "this process has loaded the TensorFlow in {used}, and cannot unload it: start another process"
            );
            Error::new(ErrorKind::Argument, text)
        };
        let runtime = Self::get_or(series, || match Libraries::folder_loaded(series) {
            Some(loaded) if loaded == folder => Libraries::loaded(series, &folder),
            Some(loaded) => Err(other(&loaded)),
            // SAFETY: the caller's obligation.
            None => unsafe { Libraries::load(series, &folder) },
        })?;
        if runtime.folder() == folder { Ok(runtime) } else { Err(other(runtime.folder())) }
    }

    fn get_or(series: Series, find: impl FnOnce() -> Result<Libraries>) -> Result<&'static Self> {
        let slot = &RUNTIMES[series as usize];
        if let Some(runtime) = slot.get() {
            return Ok(runtime);
        }
        let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.get() {
            Some(runtime) => Ok(runtime),
            None => {
                let runtime = Self::new(find()?)?;
                Ok(slot.get_or_init(|| runtime))
            }
        }
    }

    /// Returns the runtime in a slot, if it is open. The slot is the series as a number.
    pub(crate) fn in_slot(slot: usize) -> Option<&'static Self> {
        RUNTIMES[slot].get()
    }

    fn new(libraries: Libraries) -> Result<Self> {
        let series = libraries.series;
        // SAFETY: the function has this signature in every version and no obligations; the string lives as long as the
        // library.
        let version = unsafe {
            let version_of = libraries.required::<unsafe extern "C" fn() -> *const std::ffi::c_char>("TF_Version")?;
            CStr::from_ptr(version_of()).to_string_lossy().into_owned()
        };
        let Some(numbers) = parse(&version).filter(|numbers| series.supports(*numbers)) else {
            let supported = Series::ALL.map(Series::supported).join(", ");
            let folder = libraries.folder.display();
            let text = format!("the TensorFlow in {folder} is {version}: supported are {supported}");
            return Err(Error::new(ErrorKind::Version, text));
        };
        let (core, gpu_device) = (Core::find(&libraries)?, GpuDevice::find(&libraries, numbers));
        let cuda = gpu_device.is_some().then_some(DeviceKind::CUDA);
        let profile = Profile::export_only(series.name())
            .with_dtypes(known_dtypes(&core))
            .with_strides(Strides::Compact)
            .with_alignment(ALIGNMENT)
            .with_devices([DeviceKind::CPU].into_iter().chain(cuda).collect())
            .with_private_functions(cxx::shows_streams(numbers));
        Ok(Self {
            core,
            sessions: Sessions::find(&libraries)?,
            gpu_device,
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

    /// Returns whether this is a build for CUDA whose streams can be queried.
    pub fn has_cuda(&self) -> bool {
        self.gpu_device.is_some()
    }

    /// The libraries and their version, to look further functions up.
    pub(crate) fn libraries(&self) -> (&Libraries, Version) {
        (&self.libraries, parse(&self.version).expect("the version was parsed before"))
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({} in {})", self.version, self.folder().display())
    }
}

/// Returns the dtypes of the table that this version has.
fn known_dtypes(core: &Core) -> Vec<DType> {
    // SAFETY: the function takes any number.
    let known = |code| unsafe { (core.TF_DataTypeSize)(code) } > 0;
    DTYPES.iter().filter(|(_, code)| known(*code)).map(|(dtype, _)| *dtype).collect()
}

/// Returns the first two numbers of a version.
fn parse(version: &str) -> Option<Version> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
