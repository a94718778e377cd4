//! The C interface of truebridge: for C++ and, through `ctypes`, for versions of Python that are too old for the
//! extension module.
//!
//! `include/truebridge.h` is its documentation. The caller's tensor ([`tensor`]) is fed to a graph of TensorFlow,
//! and the tensor that a run fetched is taken ([`external`]) and viewed ([`view`]). The session is Python's or one of
//! this library ([`session`]). Structures and objects of the header begin with `C` here.
//!
//! The library does not link Python. In a Python process the package `truebridge_tf1` passes the functions of the
//! interpreter ([`python`]); then owners are dropped with the GIL, and not on TensorFlow's threads.
//!
//! No panic leaves a function. Errors are a status and a message ([`status`]).
#![allow(rustdoc::private_intra_doc_links, reason = "the public items are the C functions, which the header documents")]

use bridge_core::{Error, ErrorKind};
use status::{Status, answer};

mod external;
#[cfg(test)]
mod header;
mod on_device;
mod pointers;
mod python;
mod reader;
mod session;
mod stats;
mod status;
mod streams;
mod tensor;
mod ticket;
mod transfer;
mod view;

/// The version of this interface. Another number means another interface: tb_require compares it with the library.
pub const TB_ABI: u32 = 3;

/// Returns the version of the interface of the library: its TB_ABI.
#[unsafe(no_mangle)]
pub extern "C" fn tb_abi() -> u32 {
    TB_ABI
}

/// Checks that the library has the interface of the header that the program was compiled with: pass TB_ABI. Call it
/// first. TB_VERSION for another number.
#[unsafe(no_mangle)]
pub extern "C" fn tb_require(abi: u32) -> Status {
    answer(|| match abi {
        TB_ABI => Ok(()),
        _ => {
            let text = format!(
                "the program was compiled for version {abi} of the interface, and the library has version {TB_ABI}: compile with the header of the library"
            );
            Err(Error::new(ErrorKind::Version, text))
        }
    })
}
