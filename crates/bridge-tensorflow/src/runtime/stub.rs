//! A stub of Python, with which TensorFlow 1.x can be loaded.
//!
//! The one library of the 1.x wheel holds both the C functions and the extension module of Python 3.7, and is linked so
//! that it cannot be loaded before every symbol is found. The C functions call none of Python's. So this module writes
//! a small library that defines these symbols and names TensorFlow's library as one that it needs: loading the first
//! loads the second, which finds the symbols in the scope that the two share. No other library sees them, and
//! TensorFlow does not see the real Python, whose version differs.
//!
//! The functions do nothing and return 0. As the result of `Py_IsInitialized` it keeps operations that call back into
//! Python (`PyFunc`) from doing so.
//!
//! The stub also forwards the functions of the memory allocator to those of the process. TensorFlow would otherwise
//! find those of libc first, while libc and libstdc++ use a preloaded allocator (jemalloc, tcmalloc): memory that one
//! allocates, the other would free.

use bridge_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use object::Endianness;
use object::elf::{self, SymbolInfo};
use object::write::StringId;
use object::write::elf::{FileHeader, ProgramHeader, Sym, Writer};
use rustix::fs::{MemfdFlags, memfd_create};
use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Python's functions that the wheel of 1.15.5 needs (`nm --undefined-only`).
const FUNCTIONS: &str = "
    PyArg_ParseTuple PyArg_ParseTupleAndKeywords PyArg_UnpackTuple PyBool_FromLong PyBytes_AsString
    PyBytes_AsStringAndSize PyBytes_FromStringAndSize PyCFunction_NewEx PyCallable_Check PyCapsule_GetPointer
    PyCapsule_Import PyCapsule_New PyComplex_AsCComplex PyComplex_ImagAsDouble PyComplex_RealAsDouble PyDict_GetItem
    PyDict_Keys PyDict_New PyDict_Next PyDict_SetItem PyDict_SetItemString PyDict_Size PyErr_Clear
    PyErr_ExceptionMatches PyErr_Fetch PyErr_Format PyErr_NormalizeException PyErr_Occurred PyErr_Print PyErr_Restore
    PyErr_SetObject PyErr_SetString PyErr_WriteUnraisable PyEval_CallObjectWithKeywords PyEval_RestoreThread
    PyEval_SaveThread PyFloat_AsDouble PyFloat_FromDouble PyGILState_Ensure PyGILState_Release PyImport_AddModule
    PyImport_Import PyImport_ImportModule PyInstanceMethod_New PyIter_Next PyList_Append PyList_GetItem PyList_New
    PyList_SetItem PyList_Size PyList_Sort PyLong_AsDouble PyLong_AsLong PyLong_AsLongAndOverflow PyLong_AsLongLong
    PyLong_AsLongLongAndOverflow PyLong_AsUnsignedLong PyLong_AsUnsignedLongLong PyLong_FromLong PyLong_FromLongLong
    PyLong_FromSize_t PyLong_FromUnsignedLong PyLong_FromUnsignedLongLong PyLong_FromVoidPtr PyMapping_HasKey
    PyMapping_Keys PyMapping_Size PyModule_AddObject PyModule_Create2 PyModule_GetDict PyNumber_Float PyNumber_Long
    PyObject_Call PyObject_CallFunctionObjArgs PyObject_CallMethod PyObject_CallMethodObjArgs PyObject_CallObject
    PyObject_ClearWeakRefs PyObject_Free PyObject_GC_UnTrack PyObject_GenericGetAttr PyObject_GetAttr
    PyObject_GetAttrString PyObject_GetBuffer PyObject_GetItem PyObject_GetIter PyObject_HasAttrString PyObject_Hash
    PyObject_Init PyObject_IsInstance PyObject_IsSubclass PyObject_IsTrue PyObject_Malloc PyObject_Repr
    PyObject_RichCompareBool PyObject_SetAttr PyObject_Size PyObject_Str PyRun_SimpleStringFlags PySequence_Check
    PySequence_Fast PySequence_GetItem PySequence_Size PySequence_Tuple PySys_WriteStdout PyThreadState_Get
    PyTuple_GetItem PyTuple_New PyTuple_SetItem PyTuple_Size PyType_FromSpecWithBases PyType_GenericNew
    PyType_IsSubtype PyType_Ready PyUnicode_AsASCIIString PyUnicode_AsUTF8 PyUnicode_AsUTF8AndSize
    PyUnicode_AsUTF8String PyUnicode_Concat PyUnicode_DecodeUTF8 PyUnicode_FromFormat PyUnicode_FromString
    PyUnicode_FromStringAndSize PyUnicode_InternFromString PyWeakref_NewRef Py_BuildValue Py_DecRef Py_IsInitialized
    _PyArg_NoKeywords _PyObject_New _Py_CheckRecursiveCall
";

/// Python's objects that it needs.
const OBJECTS: &str = "
    PyBool_Type PyCFunction_Type PyCapsule_Type PyComplex_Type PyExc_AssertionError PyExc_AttributeError
    PyExc_BufferError PyExc_Exception PyExc_IOError PyExc_ImportError PyExc_IndexError PyExc_MemoryError
    PyExc_NotImplementedError PyExc_OverflowError PyExc_RuntimeError PyExc_StopIteration PyExc_SyntaxError
    PyExc_SystemError PyExc_TypeError PyExc_ValueError PyExc_ZeroDivisionError PyFloat_Type PySet_Type PyTuple_Type
    PyType_Type _Py_CheckRecursionLimit _Py_FalseStruct _Py_NoneStruct _Py_NotImplementedStruct _Py_TrueStruct
";

/// The functions of libc and libstdc++ that an allocator may replace. All of them are forwarded, so that no two belong
/// to different allocators.
const ALLOCATOR: &str = "
    malloc free calloc realloc reallocarray memalign posix_memalign aligned_alloc valloc pvalloc malloc_usable_size
    _Znwm _Znam _ZnwmRKSt9nothrow_t _ZnamRKSt9nothrow_t
    _ZnwmSt11align_val_t _ZnamSt11align_val_t _ZnwmSt11align_val_tRKSt9nothrow_t _ZnamSt11align_val_tRKSt9nothrow_t
    _ZdlPv _ZdaPv _ZdlPvm _ZdaPvm _ZdlPvRKSt9nothrow_t _ZdaPvRKSt9nothrow_t
    _ZdlPvSt11align_val_t _ZdaPvSt11align_val_t _ZdlPvmSt11align_val_t _ZdaPvmSt11align_val_t
    _ZdlPvSt11align_val_tRKSt9nothrow_t _ZdaPvSt11align_val_tRKSt9nothrow_t
";

/// Look symbols up in this library first: calls into a CUDA of another version would abort the process.
const RTLD_DEEPBIND: i32 = 8;

/// A function of the stub, padded with traps.
type Code = [u8; 16];

/// xor eax, eax; ret
const RETURN_ZERO: Code = code(&[0x31, 0xc0, 0xc3]);

/// movabs r11, address; jmp r11. No function takes an argument in this register.
fn forward(address: usize) -> Code {
    let mut pass = code(&[0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xe3]);
    pass[2..10].copy_from_slice(&(address as u64).to_le_bytes());
    pass
}

const fn code(instructions: &[u8]) -> Code {
    /// int3
    const TRAP: u8 = 0xcc;
    let (mut padded, mut i) = ([TRAP; 16], 0);
    while i < instructions.len() {
        padded[i] = instructions[i];
        i += 1;
    }
    padded
}

/// Returns the names and addresses of the functions of the process's allocator: those in the global scope, where a
/// preloaded one comes first. TensorFlow's own libraries define the names that are missing there.
fn allocator() -> Vec<(&'static str, usize)> {
    let global = Library::this();
    let find = |name: &'static str| {
        let terminated = CString::new(name).ok()?;
        // SAFETY: only the address is taken.
        let found = unsafe { global.get::<*mut c_void>(terminated.as_bytes_with_nul()) }.ok()?;
        Some((name, found.addr()))
    };
    ALLOCATOR.split_whitespace().filter_map(find).collect()
}

/// More than the size of any of the objects, in bytes.
const OBJECT: u64 = 1024;
/// The alignment of segments, in bytes.
const PAGE: u64 = 4096;

/// Loads the library at `path`, which needs Python's symbols. The returned one has its symbols and those of the
/// libraries that it needs.
///
/// # Errors
///
/// [`ErrorKind::Missing`] with the system's reason.
///
/// # Safety
///
/// The file is a library whose initialisers may run, and the functions of Python that it calls may do nothing.
pub(crate) unsafe fn load(path: &Path) -> Result<Library> {
    let missing = |text: String| Error::new(ErrorKind::Missing, format!("{} cannot be loaded: {text}", path.display()));
    if !cfg!(target_arch = "x86_64") {
        return Err(missing("TensorFlow 1.x exists only for x86-64".into()));
    }
    if path.as_os_str().as_bytes().contains(&b'$') {
        return Err(missing("the dynamic loader expands a $ in a path: move the folder".into()));
    }
    let stub = make(path, &allocator()).map_err(|error| missing(error.to_string()).caused_by(error))?;
    let name = "truebridge-python";
    let mut file: File =
        memfd_create(name, MemfdFlags::CLOEXEC).map_err(|error| missing(error.to_string()).caused_by(error))?.into();
    file.write_all(&stub).map_err(|error| missing(error.to_string()).caused_by(error))?;
    // The loader identifies the stub by this name. The descriptor stays open, so that the name never means another
    // file.
    let stub = format!("/proc/self/fd/{}", std::mem::ManuallyDrop::new(file).as_raw_fd());
    // SAFETY: the stub has no initialisers; the rest is the caller's obligation.
    let library = unsafe { Library::open(Some(stub), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND) };
    library.map_err(|error| missing(reason(&error)).caused_by(error))
}

/// Returns the system's reason for not loading a library, which names what is missing.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns a shared library with Python's symbols that needs the library at `path`, and forwards these functions.
fn make(path: &Path, forwarded: &[(&str, usize)]) -> object::write::Result<Vec<u8>> {
    let functions = FUNCTIONS.split_whitespace().map(|name| (name, Place::Code(0)));
    let objects = OBJECTS.split_whitespace().map(|name| (name, Place::Data));
    let passed = (1..).zip(forwarded).map(|(i, (name, _))| (*name, Place::Code(i)));
    let symbols: Vec<(&str, Place)> = functions.chain(objects).chain(passed).collect();
    let text = [RETURN_ZERO].into_iter().chain(forwarded.iter().map(|(_, address)| forward(*address)));
    let text = text.collect::<Vec<Code>>().concat();
    let (mut bytes, needed) = (Vec::new(), path.as_os_str().as_bytes());
    let mut file = Writer::new(Endianness::Little, true, &mut bytes);

    file.reserve_file_header();
    file.reserve_program_headers(4);
    let needed = file.add_dynamic_string(needed);
    let names: Vec<_> = symbols.iter().map(|(name, _)| file.add_dynamic_string(name.as_bytes())).collect();
    let offsets = reserve(&mut file, names.len() as u32, text.len() as u64)?;

    write_headers(&mut file, &offsets)?;
    write_symbols(&mut file, &offsets, names.into_iter().zip(&symbols))?;
    write_dynamic(&mut file, &offsets, needed)?;
    file.write_align(64);
    file.write(&[0; OBJECT as usize]);
    file.write_align(PAGE);
    file.write(&text);
    Ok(bytes)
}

/// A symbol: an index into the functions, or into the objects.
enum Place {
    Code(u64),
    Data,
}

/// The offsets in the file, which are also the addresses from the start of the library on.
struct Offsets {
    dynsym: u64,
    dynstr: u64,
    hash: u64,
    dynamic: u64,
    data: u64,
    /// The length of what is writable: all up to the code.
    writable: u64,
    code: u64,
    code_len: u64,
}

/// Reserves room for so many symbols, and for what follows the headers.
fn reserve(file: &mut Writer<'_>, symbols: u32, code_len: u64) -> object::write::Result<Offsets> {
    for _ in 0..symbols {
        file.reserve_dynamic_symbol_index();
    }
    // The writer needs the indices of sections, although it writes no table of them: the loader reads none.
    file.reserve_dynsym_section_index();
    file.reserve_dynstr_section_index();
    file.reserve_hash_section_index();
    file.reserve_dynamic_section_index();
    let dynsym = file.reserve_dynsym();
    let dynstr = file.reserve_dynstr()?;
    let hash = file.reserve_hash(symbols, symbols + 1);
    let dynamic = file.reserve_dynamic(7);
    let data = file.reserve(OBJECT, 64);
    let writable = file.reserved_len();
    let code = file.reserve(code_len, PAGE);
    Ok(Offsets { dynsym, dynstr, hash, dynamic, data, writable, code, code_len })
}

/// Writes the headers of the file and of what the loader maps.
fn write_headers(file: &mut Writer<'_>, at: &Offsets) -> object::write::Result<()> {
    file.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: elf::EM_X86_64,
        e_entry: 0,
        e_flags: elf::FileFlags::default(),
    })?;
    file.write_align_program_headers();
    // The loader writes addresses into the dynamic section.
    for (p_type, p_flags, start, len) in [
        (elf::PT_LOAD, elf::PF_R | elf::PF_W, 0, at.writable),
        (elf::PT_LOAD, elf::PF_R | elf::PF_X, at.code, at.code_len),
        (elf::PT_DYNAMIC, elf::PF_R | elf::PF_W, at.dynamic, at.data - at.dynamic),
        // Without it the loader makes the stacks of the process executable, or refuses to.
        (elf::PT_GNU_STACK, elf::PF_R | elf::PF_W, 0, 0),
    ] {
        file.write_program_header(&ProgramHeader {
            p_type,
            p_flags,
            p_offset: start,
            p_vaddr: start,
            p_paddr: start,
            p_filesz: len,
            p_memsz: len,
            p_align: PAGE,
        });
    }
    Ok(())
}

/// Writes the symbols, their names, and the table by which the loader finds them.
fn write_symbols<'a>(
    file: &mut Writer<'_>,
    at: &Offsets,
    symbols: impl Iterator<Item = (StringId, &'a (&'a str, Place))>,
) -> object::write::Result<()> {
    let mut hashes = Vec::new();
    file.write_null_dynamic_symbol();
    for (string, (name, place)) in symbols {
        let (kind, value) = match place {
            Place::Code(i) => (elf::STT_FUNC, at.code + i * size_of::<Code>() as u64),
            Place::Data => (elf::STT_OBJECT, at.data),
        };
        let st_name = file.dynamic_string_offset(Some(string));
        file.write_dynamic_symbol(&Sym {
            section: None,
            st_name,
            st_info: SymbolInfo::new(elf::STB_GLOBAL, kind),
            st_other: Default::default(),
            // Any section: 0 would mean that the symbol is undefined.
            st_shndx: elf::SymbolSection(1),
            st_value: value,
            st_size: 0,
        });
        hashes.push(elf::hash(name.as_bytes()));
    }
    file.write_dynstr();
    let count = hashes.len() as u32;
    file.write_hash(count, count + 1, |i| i.checked_sub(1).map(|i| hashes[i as usize]));
    Ok(())
}

/// Writes what the loader reads first: where the tables are, and the library that this one needs.
fn write_dynamic(file: &mut Writer<'_>, at: &Offsets, needed: StringId) -> object::write::Result<()> {
    let dynstr_len = file.dynstr_len().into();
    file.write_align_dynamic();
    file.write_dynamic_string(elf::DT_NEEDED, needed)?;
    for (tag, value) in [
        (elf::DT_HASH, at.hash),
        (elf::DT_STRTAB, at.dynstr),
        (elf::DT_STRSZ, dynstr_len),
        (elf::DT_SYMTAB, at.dynsym),
        (elf::DT_SYMENT, 24),
        (elf::DT_NULL, 0),
    ] {
        file.write_dynamic(tag, value)?;
    }
    Ok(())
}
