//! A simulated device, and frameworks on it: the protocol runs here without a GPU.
//!
//! Work submitted to a stream of [`SimDevice`] runs later, in any order that the recorded waits allow, while the host
//! runs ahead. Vector clocks record which work is ordered before which, so that a missing wait is found even in a run
//! in which it does no harm. [`SimFramework`] is a framework with a caching allocator and an adapter, in several
//! [habits](Habits).

mod clock;
mod copies;
mod device;
mod faults;
mod framework;
mod memory;
mod ordering;
mod pool;
mod subject;
mod tables;
mod tensor;

pub use crate::habits::{HABITS, Habits};
pub use device::SimDevice;
pub use faults::run_faults;
pub use framework::SimFramework;
pub use ordering::SimOrdering;
pub use tensor::SimTensor;
