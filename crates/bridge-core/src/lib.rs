//! The contract of tensor-bridge.
//!
//! Every framework has one thing in common: memory with an owner. This crate names it, a [`DeviceBuffer`], with the
//! four promises that go with it: what it is, where it is, when it may be touched, and until when. An [`Adapter`] lends
//! its framework's tensor as a [`Lent`] buffer, or wraps a [`Lease`] on a lent buffer as its framework's tensor.
//! [`transfer`] is the one way from one to the other.
//!
//! # Whose job each check is
//!
//! | check | who |
//! |---|---|
//! | the object is a tensor of this framework, with one strided memory, outside autograd | the exporting adapter |
//! | pending operations (conj and neg bits) are reported | the exporting adapter |
//! | shape, strides and offset are sound and lie inside the buffer | core: [`Layout::new`], [`Lent::new`] |
//! | dtype, strides, alignment, device, read-only fit the target; whether to copy | core: [`plan`](plan()) |
//! | a capsule follows DLPack's rules | core: [`dlpack`] |
//! | an address belongs to the device that a capsule names | the crate for that device, `bridge-cuda` |
//! | a copy lies apart from the original and fits the target; the owner of a view waits for it | core: [`transfer`] |
//! | the consumer's stream waits for the owner's | core: [`transfer`], over [`Ordering`] |
//! | the owner's stream waits for every reader | core: [`Lease`], over [`Ordering`] |
//! | the memory is not reused before that, whatever the allocator's habits | the exporting adapter: [`DeviceBuffer::reuse`] |
//! | the last view drops the lease, once, on any thread | the importing adapter |
//! | panics stop before C | core, in the drop of a [`Lease`]; adapters, in functions that C calls |
//!
//! Adapters therefore never look at a [`Profile`], and core never calls a framework.
//!
//! # The protocol in time
//!
//! 1. [`Adapter::export`]: the owner's stream is the one current in its framework.
//! 2. The owner's stream is noted in the producer's own [`Views`], in case the tensor is a view itself.
//! 3. Where the consumer's current stream differs, it is made to wait for a point in the owner's stream.
//! 4. [`Adapter::import`].
//! 5. When the last view is dropped, the owner's stream is made to wait for the stream at import, the one current where the
//!    view is dropped, and those noted in [`Views`]. Only then is the owner's reference dropped.
//!
//! Nothing of this blocks the host, except where a consumer reads device memory on the host. There is no framework, no CUDA and no Python among this crate's dependencies.

mod adapter;
mod buffer;
mod device;
pub mod dlpack;
mod dtype;
mod error;
mod host;
mod layout;
mod lease;
mod plan;
mod profile;
mod spans;
mod stream;
mod views;

pub use adapter::{Adapter, COPY_ALIGNMENT, Consumer, Transfer, transfer};
pub use buffer::{Access, Allocation, DeviceBuffer, Lent, Memory, Pending, Reuse};
pub use device::{Device, DeviceKind, ParseDeviceError};
pub use dtype::{DType, ParseDTypeError};
pub use error::{Error, ErrorKind, Result};
pub use layout::{Dims, Layout, MAX_NDIM};
pub use lease::{Lease, Stats, stats};
pub use plan::{Options, Plan, Reason, plan};
pub use profile::{Profile, Strides};
pub use spans::Spans;
pub use stream::{Deferred, HostOnly, Ordering, Stream};
pub use views::{Keep, Views};
