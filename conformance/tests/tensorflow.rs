//! TensorFlow's graphs, 1.15 and 2.x, with every adapter for Rust, in both directions: on the host and on the first
//! CUDA device. There is no Python in the process.
//!
//! `TRUEBRIDGE_CASES` sets the cases of a pair, `TRUEBRIDGE_SEED` the seed; `TRUEBRIDGE_TENSORFLOW1` and
//! `TRUEBRIDGE_TENSORFLOW2` name the folders of the packages.

#[path = "../../crates/bridge-tensorflow/tests/installed/mod.rs"]
mod installed;
mod judge;

use bridge_conformance::Subject;
#[cfg(feature = "candle-cuda")]
use bridge_conformance::rust::CandleCudaSubject;
use bridge_conformance::rust::{CandleSubject, CudarcSubject, NdArraySubject, TchSubject, TensorFlowSubject};
use bridge_core::Device;
use bridge_tensorflow::{Runtime, Series};
use judge::{judge, present};
use std::sync::Once;

fn tensorflow(series: Series, device: Device) -> Option<TensorFlowSubject> {
    static PENDING: Once = Once::new();
    // SAFETY: every test comes here first. So no TensorFlow is loaded that could read the environment, libtorch has not
    // been called, and Rust's own functions take turns.
    PENDING.call_once(|| unsafe { std::env::set_var("TF_SYNC_ON_FINISH", "false") });
    let folder = match series {
        Series::One => installed::one(),
        _ => installed::two(),
    };
    let Some(folder) = folder else {
        println!("skipped: no TensorFlow of series {series:?} (cargo xtask setup fetches it)");
        return None;
    };
    // SAFETY: it is the folder of a TensorFlow.
    present(TensorFlowSubject::new(unsafe { Runtime::open_as(series, &folder) }.unwrap(), device))
}

fn judge_both_directions<T>(tensorflow: &TensorFlowSubject, other: &dyn Subject<Tensor = T>) {
    judge(tensorflow, other);
    judge(other, tensorflow);
}

macro_rules! pairs {
    ($($(#[$condition:meta])? $name:ident: $series:ident on $device:expr, $other:expr;)*) => {$(
        #[test]
        $(#[$condition])?
        fn $name() {
            let Some(tensorflow) = tensorflow(Series::$series, $device) else { return };
            let Some(other) = present($other) else { return };
            judge_both_directions(&tensorflow, &other);
        }
    )*};
}

pairs! {
    tensorflow1_and_tch: One on Device::CPU, TchSubject::new(Device::CPU);
    tensorflow1_and_ndarray: One on Device::CPU, Ok(NdArraySubject::default());
    tensorflow1_and_candle: One on Device::CPU, Ok(CandleSubject::default());
    tensorflow2_and_tch: Two on Device::CPU, TchSubject::new(Device::CPU);
    tensorflow2_and_ndarray: Two on Device::CPU, Ok(NdArraySubject::default());
    tensorflow2_and_candle: Two on Device::CPU, Ok(CandleSubject::default());
    tensorflow1_and_tch_on_cuda: One on Device::cuda(0), TchSubject::new(Device::cuda(0));
    tensorflow1_and_cudarc: One on Device::cuda(0), CudarcSubject::new(0);
    tensorflow2_and_tch_on_cuda: Two on Device::cuda(0), TchSubject::new(Device::cuda(0));
    tensorflow2_and_cudarc: Two on Device::cuda(0), CudarcSubject::new(0);
    #[cfg(feature = "candle-cuda")]
    tensorflow1_and_candle_on_cuda: One on Device::cuda(0), CandleCudaSubject::new(0);
    #[cfg(feature = "candle-cuda")]
    tensorflow2_and_candle_on_cuda: Two on Device::cuda(0), CandleCudaSubject::new(0);
}
