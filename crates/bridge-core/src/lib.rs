//! The contract of truebridge.
//!
//! In every framework, memory has an owner. A [`DeviceBuffer`] is that memory with four promises: *what* it is, *where*
//! it is, *when* it may be touched, and *until when*. An [`Adapter`] exports its framework's tensor as [`Export`]: a
//! buffer, a dtype and a [`Layout`]. It accepts an [`Offer`] of such a buffer, and wraps the [`Lease`] on it as its
//! framework's tensor. [`transfer`] is
//! the only path between two adapters.
//!
//! These words are used throughout. The *producer* exports a tensor, and is or represents the *owner* of its memory.
//! The *consumer* imports it as a *view*. The *owner's stream* is the stream that the buffer names. A *reader* is a
//! stream in which a view is used.
//!
//! [`Adapter`] has an example that runs; the safety section of [`DeviceBuffer`] lists what an adapter promises.
//!
//! # Whose job each check is
//!
//! | check | done by |
//! |---|---|
//! | the object is a tensor of this framework, with one strided memory, outside autograd | the exporting adapter |
//! | deferred operations (conj and neg bits) are reported | the exporting adapter |
//! | shape, strides and offset are sound and lie inside the buffer | core: [`Layout::new`], [`Export::new`] |
//! | the view lies inside its allocation, where the driver knows that | core: [`Layout::extent_at`] |
//! | dtype, strides, alignment, device, read-only fit the target; whether to copy | core: [`plan`](plan()) |
//! | a lease is for the profile and the consumer of the adapter that imports it | core: [`Offer::accept`] |
//! | a capsule follows DLPack's rules | core: [`dlpack`] |
//! | an address belongs to the device that a capsule names | the crate for that device, `bridge-cuda` |
//! | a copy does not overlap the original and fits the target; the owner of a view waits for it | core: [`transfer`] |
//! | the consumer's stream waits for the owner's | core: [`transfer`], over [`Ordering`] |
//! | the owner's stream waits for every reader | core: [`Lease`], over [`Ordering`] |
//! | the memory is not reused before that, whatever its allocator does | the exporter: [`DeviceBuffer::reuse`] |
//! | the last view drops the lease, once, on any thread | the importing adapter |
//! | panics stop before C | core, in the drop of a [`Lease`]; adapters, in functions that C calls |
//!
//! Adapters therefore never read another framework's [`Profile`], and core calls frameworks through adapters only.
//!
//! # A transfer in time
//!
//! 1. [`Adapter::export`] exports the tensor. The owner's stream is the stream that is current in its framework.
//! 2. Core records the owner's stream in the producer's own [`Views`], because the tensor may itself be a view.
//! 3. If a copy is needed, the [`Copies`] of the ordering fill fresh memory ([`Adapter::empty`]). If it is the
//!    consumer's, it is the result, filled in the consumer's current stream after the owner's. If it is the producer's,
//!    the copy is imported instead of the original. If the copies of the ordering cannot copy, the frameworks do: see
//!    [`transfer`].
//! 4. If the consumer's current stream differs, core makes it wait for the work that is now in the owner's stream.
//! 5. [`Adapter::import`] accepts the offer and wraps the lease.
//! 6. The last view drops the lease. Core makes the owner's stream wait for the stream at import, for the stream
//!    current at the drop, and for every stream recorded in [`Views`]. Then it drops the owner's reference.
//!
//! None of this blocks the host, except if a consumer reads device memory on the host, and in moves that the caller
//! requests ([`Options::device`]).
//!
//! The crate depends on no framework, and on neither CUDA nor Python. The feature `dlpack`, on by default, is the
//! module [`dlpack`]; without it the crate needs only serde and smallvec.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Implements `Debug` with only these fields of a struct: the others are handles, or too long to print.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_fields {
    (impl[$($generics:tt)*] $name:ident $(<$($argument:tt),*>)? $(: $($field:ident),+)?) => {
        impl<$($generics)*> std::fmt::Debug for $name $(<$($argument),*>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))$($(.field(stringify!($field), &self.$field))+)?.finish_non_exhaustive()
            }
        }
    };
}

mod adapter;
mod advice;
mod batch;
mod buffer;
mod cast;
mod clash;
mod conversion;
mod copied;
mod copies;
mod copy_all;
mod copy_into;
mod device;
#[cfg(feature = "dlpack")]
pub mod dlpack;
mod dtype;
mod error;
mod failed;
mod fill;
mod fresh;
mod group;
mod held;
mod host;
mod host_copy;
mod layout;
mod lease;
mod moved;
mod order;
mod ordering;
mod output;
mod overlap;
mod owner;
mod pair;
mod pending;
mod permutation;
mod plan;
#[doc(hidden)]
pub mod planted;
pub mod poison;
mod prepared;
mod profile;
mod protected;
mod sync;
mod transfer;
mod views;

pub use adapter::{Adapter, COPY_ALIGNMENT};
pub use advice::Advice;
#[doc(hidden)]
pub use advice::python;
pub use buffer::{Access, Allocation, DeviceBuffer, Export, Memory, Reuse};
pub use cast::Cast;
pub use copied::{CopiedBy, copied_by};
pub use copies::{Copies, Piece, Planned, Strided};
pub use copy_all::{Misfit, copy_all};
pub use copy_into::{copied_into_by, copy_into};
pub use device::{Device, DeviceKind, ParseDeviceError, Stream};
pub use dtype::{DType, ParseDTypeError};
pub use error::{Error, ErrorKind, Result};
pub use failed::Failed;
pub use host::HostMemory;
pub use layout::Layout;
pub use lease::{Lease, Offer};

pub use order::{Dims, MAX_NDIM, Order};
pub use ordering::{Deferred, Flush, HostOnly, Ordering, Stats, stats};
pub use output::{Output, output};
pub use overlap::{overlap, repeats};
pub use owner::Owner;
pub use pair::Pair;
pub use pending::Pending;
pub use permutation::Permutation;
pub use plan::{Options, Plan, Reason, plan};
pub use prepared::Prepared;
pub use profile::{Profile, Strides};
pub use protected::{Imported, Protected};
#[cfg(shuttle)]
#[doc(hidden)]
pub use sync::explore;
pub use transfer::{Transfer, transfer, transfer_all};
pub use views::{Consumer, Keep, Spans, Views};
