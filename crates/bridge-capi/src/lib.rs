//! The C interface of tensor-bridge: for C++ and, through `ctypes`, for versions of Python that are too old for the
//! extension module.
//!
//! `include/tensor_bridge.h` is its documentation. The caller's tensor ([`tensor`]) is fed to a graph of TensorFlow,
//! and the tensor that a run fetched is taken ([`external`]) and viewed ([`view`]). The session is Python's or one of
//! this library ([`session`]). Structures and objects of the header begin with `C` here.
//!
//! Nothing of Python is linked. In a Python process the package `tensor_bridge_tf1` passes the functions of the
//! interpreter ([`python`]); then owners are dropped with the GIL, and not on TensorFlow's threads.
//!
//! No panic leaves a function. Errors are a status and a message ([`status`]).
#![allow(rustdoc::private_intra_doc_links, reason = "the public items are the C functions, which the header documents")]

mod external;
#[cfg(test)]
mod header;
mod memory;
mod pointers;
mod python;
mod session;
mod stats;
mod status;
mod tensor;
mod view;

/// Returns the version of the interface: `TB_ABI` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn tb_abi() -> u32 {
    1
}
