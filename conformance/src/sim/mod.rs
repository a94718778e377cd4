//! A simulated device, and frameworks on it: the protocol runs here without a GPU.
//!
//! Work put into a stream of [`SimDevice`] runs later, in any order that the recorded waits allow, while the host runs
//! ahead. Vector clocks tell which work is ordered before which, so that a missing wait is found even in a run in which
//! it happens to do no harm. [`SimFramework`] is a framework with a caching allocator and an adapter, in several
//! [habits](Habits).

mod clock;
mod device;
mod framework;
mod memory;
mod pool;
mod subject;
mod tensor;

pub use device::{SimDevice, SimOrdering};
pub use framework::{HABITS, Habits, SimFramework};
pub use tensor::SimTensor;
