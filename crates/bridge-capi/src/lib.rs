//! The C interface of tensor-bridge, for C++ and, over `ctypes`, for Pythons that the extension module is too new for.
//!
//! `include/tensor_bridge.h` is its documentation. A tensor of somebody else ([`tensor`]) is fed to a graph of
//! TensorFlow's, and what a run gives is taken ([`external`]) and viewed ([`view`]), in a session of Python's or in one
//! of its own ([`session`]).
//!
//! Nothing of Python is linked. In a Python process the package `tensor_bridge_tf1` hands the few functions over that
//! are needed ([`python`]); then owners are dropped with the GIL and never on TensorFlow's threads ([`release`]).
//!
//! Every function ends panics, and reports errors as a status with words ([`status`]).
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "the public things are the C functions, and those are in the header"
)]

mod external;
#[cfg(test)]
mod header;
mod memory;
mod pointers;
mod python;
mod release;
mod session;
mod stats;
mod status;
mod tensor;
mod view;

/// The version of the interface: `TB_ABI` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn tb_abi() -> u32 {
    1
}
