//! A tensor of `tch`, a kernel that is launched through `cudarc`, and the same tensor in `tch`. Nothing is copied, and
//! the host waits for nothing before it reads the result. Needs a CUDA device.
//!
//! ```sh
//! LIBTORCH_USE_PYTORCH=1 cargo run -p truebridge-torch --no-default-features --features tch --example kernel
//! ```

use bridge_core::{Options, transfer};
use bridge_cudarc::Cudarc;
use bridge_torch::Tch;
use cudarc::driver::{LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::error::Error;
use tch::{Device, Kind, Tensor};

/// Multiplies `count` float32 elements at `data` by `factor`.
const SCALE: &str = "
.version 7.0
.target sm_60
.address_size 64

.visible .entry scale(.param .u64 data, .param .f32 factor, .param .u32 count)
{
    .reg .pred %outside;
    .reg .b32 %i, %block, %threads, %thread, %count;
    .reg .f32 %factor, %element;
    .reg .b64 %data, %offset;
    ld.param.u64 %data, [data];
    ld.param.f32 %factor, [factor];
    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %threads, %thread;
    setp.ge.u32 %outside, %i, %count;
    @%outside ret;
    cvta.to.global.u64 %data, %data;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %data, %data, %offset;
    ld.global.f32 %element, [%data];
    mul.f32 %element, %element, %factor;
    st.global.f32 [%data], %element;
    ret;
}
";

fn main() -> Result<(), Box<dyn Error>> {
    let cudarc = match Cudarc::of_device(0) {
        Ok(cudarc) => cudarc,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    // SAFETY: the memory of a tensor is used on one thread at a time.
    let (tch, stream) = (unsafe { Tch::new()? }, cudarc.stream());
    let scale = stream.context().load_module(Ptx::from_src(SCALE))?.load_function("scale")?;
    let (count, factor) = (1u32 << 20, 3.0f32);

    let tensor = Tensor::arange(i64::from(count), (Kind::Float, Device::Cuda(0)));
    let ordering = bridge_cuda::ordering();
    let (mut array, done) = transfer(&tch, &cudarc, &tensor, ordering, &Options::default())?;
    println!("the kernel's stream waits for tch's: {:?}", done.ordered);
    let mut writing = array.write::<f32>()?;
    // SAFETY: the parameters are those of the kernel, which writes to `count` elements.
    unsafe {
        let mut view = writing.view();
        let mut launch = stream.launch_builder(&scale);
        launch.arg(&mut view).arg(&factor).arg(&count);
        launch.launch(LaunchConfig::for_num_elems(count))?;
    }
    drop(writing);

    // The stream of tch waits for the kernel's.
    let (scaled, done) = transfer(&cudarc, &tch, &array, ordering, &Options::default())?;
    assert_eq!((scaled.data_ptr(), done.bytes_copied), (tensor.data_ptr(), 0));
    assert_eq!(scaled.double_value(&[i64::from(count) - 1]), f64::from((count - 1) as f32 * factor));
    println!("{} elements scaled in place", scaled.numel());
    Ok(())
}
