//! What PyTorch's libraries answer about a tensor without Python, at a tenth of the cost of an attribute.
//!
//! The functions are looked up by name, C functions of the stable interface where there is one. Offsets and answers are
//! compared with Python's for a few tensors before any is used: no version number decides. Where one of them is missing
//! or disagrees, the adapter asks Python.

use crate::counter::Counters;
use crate::describe::{Access, Describe};
use crate::exchange::Borrow;
use crate::fingerprint::{Fields, words};
use crate::keep_alive::{KeepAlive, Owner, Place, keep_alive};
use crate::library::{AtTensor, Held, MemoryOffsets, SEARCHED, function, search, word};
use crate::memory::Memory;
use bridge_core::dlpack::ffi::DLTensor;
use bridge_core::planted::is_planted;
use bridge_core::{DType, Error, ErrorKind, Pending, Result};
use bridge_pyo3::{Fingerprint, Guarded, PyTensor, probe, watch_for_exit};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::{self, NonNull};

/// Functions of tensors, and where they are found in the objects of Python and of C++.
pub(crate) struct Native {
    borrow: Borrow,
    functions: Functions,
    offsets: Offsets,
    describe: Option<Describe>,
    fields: Option<Fields>,
    counters: Option<Counters>,
    /// Whether [`Memory::keep`] does what it says.
    keeps_memory: bool,
}

#[derive(Clone, Copy)]
struct Functions {
    /// `bool c10::TensorImpl::requires_grad() const`
    requires_grad: unsafe extern "C" fn(*const c_void) -> bool,
    /// `bool at::native::is_conj(const at::Tensor&)`
    is_conj: unsafe extern "C" fn(AtTensor) -> bool,
    /// `bool at::native::is_neg(const at::Tensor&)`
    is_neg: unsafe extern "C" fn(AtTensor) -> bool,
    /// The code of the dtype: handle, result.
    dtype: unsafe extern "C" fn(AtTensor, *mut i32) -> c_int,
    /// The codes of `torch.int8` and of `torch.uint8`.
    int8: unsafe extern "C" fn() -> i32,
    uint8: unsafe extern "C" fn() -> i32,
    /// A new tensor over the storage of another: handle, dimensions, sizes, strides, offset, result.
    reinterpret: unsafe extern "C" fn(AtTensor, i64, *const i64, *const i64, i64, *mut AtTensor) -> c_int,
    delete: unsafe extern "C" fn(AtTensor) -> c_int,
}

impl Functions {
    fn find() -> Option<Self> {
        const CPU: &str = "libtorch_cpu.so";
        // SAFETY: the signatures are those of `torch/csrc/inductor/aoti_torch/c/shim.h`, and what the mangled names
        // say; a C++ function that reads a flag returns a `bool`.
        unsafe {
            Some(Self {
                requires_grad: function("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv")?,
                is_conj: function(CPU, "_ZN2at6native7is_conjERKNS_6TensorE")?,
                is_neg: function(CPU, "_ZN2at6native6is_negERKNS_6TensorE")?,
                dtype: function(CPU, "aoti_torch_get_dtype")?,
                int8: function(CPU, "aoti_torch_dtype_int8")?,
                uint8: function(CPU, "aoti_torch_dtype_uint8")?,
                reinterpret: function(CPU, "aoti_torch__reinterpret_tensor")?,
                delete: function(CPU, "aoti_torch_delete_tensor_object")?,
            })
        }
    }
}

/// Distances in bytes, found by looking.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Offsets {
    /// From a Python object to its `at::Tensor`.
    tensor: usize,
    /// From a `TensorImpl` to the pointer to its `StorageImpl`.
    storage: usize,
    memory: MemoryOffsets,
}

/// A tensor, and what Python says of it.
struct Sample<'py> {
    tensor: PyTensor<'py>,
    implementation: usize,
    storage: usize,
    /// Address of the memory.
    memory: usize,
    requires_grad: bool,
    is_conj: bool,
    is_neg: bool,
    /// The dtype, if it is one of [`BYTES`].
    byte: Option<DType>,
}

/// The dtypes whose names in DLPack narrower dtypes have as well.
pub(crate) const BYTES: [DType; 2] = [DType::INT8, DType::UINT8];

impl<'py> Sample<'py> {
    fn of(tensor: PyTensor<'py>) -> PyResult<Self> {
        let storage = tensor.call_method0("untyped_storage")?;
        let answers = |name| tensor.call_method0(name)?.is_truthy();
        let dtype = tensor.getattr("dtype")?.to_string();
        Ok(Self {
            implementation: tensor.getattr("_cdata")?.extract()?,
            storage: storage.getattr("_cdata")?.extract()?,
            memory: storage.call_method0("data_ptr")?.extract()?,
            requires_grad: tensor.getattr("requires_grad")?.is_truthy()?,
            is_conj: answers("is_conj")?,
            is_neg: answers("is_neg")?,
            byte: BYTES.into_iter().find(|byte| dtype == format!("torch.{byte}")),
            tensor,
        })
    }

    /// Returns a plain tensor, one with each bit, one that requires grad, and one whose memory has another owner.
    fn some(torch: &Bound<'py, PyModule>) -> PyResult<[Self; 5]> {
        let py = torch.py();
        let options = |dtype: &str| -> PyResult<Bound<'py, PyDict>> {
            [("dtype", torch.getattr(dtype)?), ("device", "cpu".into_pyobject(py)?.into_any())].into_py_dict(py)
        };
        let plain = torch.call_method("zeros", (2,), Some(&options("complex64")?))?;
        let conjugated = plain.call_method0("conj")?;
        let negated = conjugated.getattr("imag")?;
        let leaf = torch.call_method("zeros", (3,), Some(&options("float32")?))?.call_method0("requires_grad_")?;
        let bytes = py.import("builtins")?.call_method1("bytearray", (64,))?;
        let imported = [("dtype", torch.getattr("uint8")?)].into_py_dict(py)?;
        let imported = torch.call_method("frombuffer", (bytes,), Some(&imported))?;
        Ok([Self::of(plain)?, Self::of(conjugated)?, Self::of(negated)?, Self::of(leaf)?, Self::of(imported)?])
    }

    /// Returns the offsets that hold for this tensor. `None` for the deleter where its memory is not PyTorch's own.
    fn offsets(&self) -> PyResult<Option<Offsets>> {
        let length: usize = self.tensor.get_type().getattr("__basicsize__")?.extract()?;
        let object = self.tensor.as_ptr().expose_provenance();
        // SAFETY: the three objects are alive with the tensor, and as long as searched.
        let found = || unsafe {
            let tensor = search(object, length, self.implementation)?;
            let storage = search(self.implementation, SEARCHED, self.storage)?;
            let memory = MemoryOffsets::find(self.storage, self.memory)?;
            Some(Offsets { tensor, storage, memory })
        };
        Ok(found())
    }
}

impl Native {
    /// Returns the functions if all exist, and agree with Python about a few tensors.
    ///
    /// # Errors
    ///
    /// What ends the program, such as `KeyboardInterrupt`.
    pub(crate) fn find(torch: &Bound<'_, PyModule>, borrow: Option<Borrow>) -> PyResult<Option<Self>> {
        let Some((borrow, functions)) = borrow.zip(Functions::find()) else { return Ok(None) };
        let look = || -> PyResult<Option<Self>> {
            let samples = Sample::some(torch)?;
            let [plain, .., leaf, imported] = &samples;
            let Some(offsets) = plain.offsets()? else { return Ok(None) };
            let mut native =
                Self { borrow, functions, offsets, describe: None, fields: None, counters: None, keeps_memory: false };
            let access = probe(torch.py(), Access::find(torch, offsets.storage, offsets.memory.address))?.flatten();
            // SAFETY: the implementation is alive with its tensor.
            native.describe =
                access.and_then(|access| Describe::find(unsafe { word(plain.implementation, 0) }, access));
            let agrees = samples.iter().all(|sample| native.agrees(sample)) && leaf.offsets()? == Some(offsets);
            let [own, same, other] = [plain, leaf, imported].map(|sample| native.deleter(&sample.tensor));
            Ok((agrees && own == same && own != other).then_some(native))
        };
        let Some(mut native) = probe(torch.py(), look())?.flatten() else { return Ok(None) };
        native.fields = probe(torch.py(), Fields::find(torch, native.offsets.storage))?.flatten();
        native.keeps_memory = probe(torch.py(), native.keeps_memory(torch))? == Some(true);
        native.counters = probe(torch.py(), Counters::find(torch, |object| native.tensor(object)))?.flatten();
        Ok(Some(native))
    }

    /// Returns whether memory stays that PyTorch lets go of, tried out with a storage that gets other memory.
    fn keeps_memory(&self, torch: &Bound<'_, PyModule>) -> PyResult<bool> {
        let options = [("device", "cpu".into_pyobject(torch.py())?)].into_py_dict(torch.py())?;
        let sample = torch.call_method("zeros", (8,), Some(&options))?;
        // SAFETY: the tensor keeps its storage, whose memory is on the host. The GIL is held.
        let kept =
            unsafe { Memory::of(self.storage(&sample), self.offsets.memory, || true).map(|memory| memory.keep()) };
        let Some(kept) = kept else { return Ok(false) };
        let before = kept.is_let_go();
        sample.call_method0("untyped_storage")?.call_method1("resize_", (4096,))?;
        Ok(!before && kept.is_let_go())
    }

    fn agrees(&self, sample: &Sample<'_>) -> bool {
        let object = sample.tensor.as_ptr().expose_provenance();
        let is_byte = |byte| self.is_byte(&sample.tensor, byte);
        let is_described = || match (self.describe(&sample.tensor), self.ask(&sample.tensor)) {
            (Some(one), Ok(other)) => fields(&one) == fields(&other),
            (described, _) => described.is_none(),
        };
        // SAFETY: the object is a tensor, whose header ends after the offset, and its implementation is alive.
        unsafe {
            word(object, self.offsets.tensor) == sample.implementation
                && word(sample.implementation, self.offsets.storage) == sample.storage
                && self.memory(&sample.tensor) == sample.memory
                && self.requires_grad(&sample.tensor) == sample.requires_grad
                && (self.functions.is_conj)(self.tensor(&sample.tensor)) == sample.is_conj
                && (self.functions.is_neg)(self.tensor(&sample.tensor)) == sample.is_neg
                && is_described()
                && BYTES.map(is_byte) == BYTES.map(|byte| sample.byte == Some(byte))
        }
    }

    /// Returns the `at::Tensor` of an object of the type `torch.Tensor`, or of one that extends it.
    pub(crate) fn tensor(&self, object: &PyTensor<'_>) -> AtTensor {
        object.as_ptr().wrapping_byte_add(self.offsets.tensor).cast()
    }

    /// Returns whether autograd tracks the tensor.
    pub(crate) fn requires_grad(&self, object: &PyTensor<'_>) -> bool {
        // SAFETY: a tensor points to its implementation, which the object keeps.
        unsafe { (self.functions.requires_grad)(*self.tensor(object)) }
    }

    /// Returns whether the dtype is one of [`BYTES`], and PyTorch's own of that name.
    pub(crate) fn is_byte(&self, object: &PyTensor<'_>, byte: DType) -> bool {
        let mut code = -1;
        // SAFETY: the object keeps the tensor, and the code is writable. The other functions have no obligations.
        unsafe {
            let known = match byte {
                DType::INT8 => (self.functions.int8)(),
                DType::UINT8 => (self.functions.uint8)(),
                _ => return false,
            };
            (self.functions.dtype)(self.tensor(object), &mut code) == 0 && code == known
        }
    }

    /// Returns the deferred operations, if there are any.
    pub(crate) fn pending(&self, object: &PyTensor<'_>) -> Option<Pending> {
        let tensor = self.tensor(object);
        // SAFETY: the object keeps the tensor; the functions read its flags.
        unsafe { Pending::of((self.functions.is_conj)(tensor), (self.functions.is_neg)(tensor)) }
    }

    /// Returns the address of the deleter of the tensor's memory; 0 for a tensor without a storage.
    pub(crate) fn deleter(&self, object: &PyTensor<'_>) -> usize {
        self.word_of_storage(object, self.offsets.memory.deleter)
    }

    /// Returns the address of the memory of the tensor's storage; 0 for a tensor without one.
    pub(crate) fn memory(&self, object: &PyTensor<'_>) -> usize {
        self.word_of_storage(object, self.offsets.memory.address)
    }

    /// Returns the address of the tensor's storage; 0 for a tensor without one.
    pub(crate) fn storage(&self, object: &PyTensor<'_>) -> usize {
        // SAFETY: the object keeps its implementation; the offset is inside.
        unsafe { word((*self.tensor(object)).expose_provenance(), self.offsets.storage) }
    }

    fn word_of_storage(&self, object: &PyTensor<'_>, offset: usize) -> usize {
        let storage = self.storage(object);
        // SAFETY: the tensor keeps its storage, and the offset is inside.
        if storage == 0 { 0 } else { unsafe { word(storage, offset) } }
    }

    /// Returns the addresses of the tensor's storage, where they are known: `storage.resize_()` leaves views that reach
    /// beyond it.
    pub(crate) fn range(&self, object: &PyTensor<'_>) -> Option<Range<usize>> {
        let start = self.memory(object);
        // SAFETY: the object keeps its tensor.
        let size = self.describe.as_ref().and_then(|describe| unsafe { describe.storage_size(self.tensor(object)) });
        Some(start..start.checked_add(size?)?)
    }

    /// Describes the tensor. Shape and strides are the tensor's own: they are valid while it is alive and unchanged.
    pub(crate) fn borrow(&self, object: &PyTensor<'_>) -> PyResult<DLTensor> {
        let mut described = self.describe(object).map_or_else(|| self.ask(object), Ok)?;
        // PyTorch adds the offset of a view to the null pointer of a storage that was freed.
        if self.memory(object) == 0 {
            described.data = ptr::null_mut();
        }
        Ok(described)
    }

    fn describe(&self, object: &PyTensor<'_>) -> Option<DLTensor> {
        // SAFETY: the object keeps its tensor.
        self.describe.as_ref().and_then(|describe| unsafe { describe.describe(self.tensor(object)) })
    }

    /// Asks the exchange table for the description, or for the exception that says why there is none.
    fn ask(&self, object: &PyTensor<'_>) -> PyResult<DLTensor> {
        let mut tensor = MaybeUninit::<DLTensor>::uninit();
        // SAFETY: the object is a tensor of the type that the table came from, and the GIL is held.
        match unsafe { (self.borrow)(object.as_ptr().cast(), tensor.as_mut_ptr()) } {
            // SAFETY: the function has succeeded, and so filled it in.
            0 => Ok(unsafe { tensor.assume_init() }),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    /// Returns the words by which [`has_fingerprint`](Self::has_fingerprint) sees that a tensor has not changed; none
    /// where that is not known.
    pub(crate) fn fingerprint(&self, object: &PyTensor<'_>) -> Fingerprint {
        // SAFETY: the object keeps its tensor.
        let implementation = unsafe { (*self.tensor(object)).expose_provenance() };
        let Some(fields) = self.fields.filter(|_| self.storage(object) != 0) else { return Fingerprint::default() };
        // SAFETY: the implementation is alive, and so is its storage; the GIL is held.
        unsafe { [&[implementation], fields.of(implementation), self.owner(implementation)].concat().into() }
    }

    /// Returns what an implementation's storage says of its memory: its address, and how it is freed.
    ///
    /// # Safety
    ///
    /// That of [`words`]. The implementation has a storage.
    unsafe fn owner<'a>(&self, implementation: usize) -> &'a [usize] {
        // SAFETY: the caller's obligation.
        unsafe { words(word(implementation, self.offsets.storage) + self.offsets.memory.address, 3) }
    }

    /// Returns whether a tensor is as it was at its fingerprint, and does not require grad. PyTorch is queried for the
    /// latter: the words of a fingerprint do not say it.
    pub(crate) fn has_fingerprint(&self, object: &PyTensor<'_>, fingerprint: &Fingerprint) -> bool {
        let (Some(fields), [known, words @ ..]) = (self.fields, &**fingerprint) else { return false };
        // SAFETY: the object keeps its implementation and that its storage; the GIL is held.
        unsafe {
            let implementation = (*self.tensor(object)).expose_provenance();
            let (own, memory) = words.split_at(fields.count());
            implementation == *known
                && fields.of(implementation) == own
                && self.owner(implementation) == memory
                && !self.requires_grad(object)
        }
    }

    /// Increments the version counter of a tensor without Python. Returns `false` where that cannot be.
    pub(crate) fn count(&self, object: &PyTensor<'_>) -> bool {
        let tensor = self.tensor(object);
        // SAFETY: the object keeps its tensor.
        self.counters.as_ref().is_some_and(|counters| unsafe { counters.count(tensor) })
    }

    /// Returns a hold on the memory of a tensor on the host, or else on its storage. PyTorch's own object would not do:
    /// operations such as `set_` replace the memory of a tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Framework`] for a tensor without a storage.
    pub(crate) fn keep_alive(&self, object: &PyTensor<'_>, is_on_host: bool) -> Result<KeepAlive> {
        let storage = self.storage(object);
        if is_on_host && storage != 0 && self.keeps_memory && !is_planted("torch_storage_kept") {
            // SAFETY: the tensor keeps its storage, whose memory is on the host. The GIL is held.
            if let Some(memory) = unsafe { Memory::of(storage, self.offsets.memory, || is_shared(object)) } {
                watch_for_exit(object.py());
                // SAFETY: as above.
                return keep_alive(Place::Memory(memory), || Ok(Owner::Memory(unsafe { memory.keep() })));
            }
        }
        keep_alive(Place::Storage(storage), || {
            let mut held = ptr::null_mut();
            // SAFETY: the object keeps the tensor. No dimensions are read, and the result is writable and ours. The
            // function catches what C++ throws.
            let code =
                unsafe { (self.functions.reinterpret)(self.tensor(object), 0, ptr::null(), ptr::null(), 0, &mut held) };
            let Some(tensor) = NonNull::new(held).filter(|_| code == 0) else {
                let text = "the tensor has no storage: pass a .clone() of it";
                return Err(Error::new(ErrorKind::Framework, text));
            };
            watch_for_exit(object.py());
            Ok(Owner::Storage(Guarded::new(Held { tensor, delete: self.functions.delete })))
        })
    }
}

/// Returns whether processes can share the memory of a tensor, as far as PyTorch knows.
#[cold]
fn is_shared(object: &PyTensor<'_>) -> bool {
    let is_shared = || object.call_method0("untyped_storage")?.call_method0("is_shared")?.is_truthy();
    !matches!(probe(object.py(), is_shared()), Ok(Some(false)))
}

/// Returns all that a description says.
fn fields(described: &DLTensor) -> impl PartialEq + use<> {
    let DLTensor { data, device, ndim, dtype, shape, strides, byte_offset } = *described;
    (data, device, ndim, dtype, shape, strides, byte_offset)
}
