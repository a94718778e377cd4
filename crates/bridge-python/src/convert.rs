//! `truebridge.to_torch` and its sisters.

use crate::conversions;
use crate::errors::into_python;
use crate::frameworks::{Framework, named};
use crate::options::takes_keywords;

takes_keywords! {
    // adapters: begin
    /// Return a ``torch.Tensor`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     A tensor of one of the frameworks, an object with ``__dlpack__``, ``__cuda_array_interface__`` or
    ///     ``__array_interface__``, or a DLPack capsule, which this call consumes. Or a dict, a list, a tuple, a named
    ///     tuple, a dataclass or another mapping or sequence that holds tensors, at any depth.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// torch.Tensor or container
    ///     In place, or a copy. For a container a new one of the same class, in which each tensor is converted and
    ///     everything else is the same object. Of a mapping or a sequence whose class does not say how to make one, a
    ///     dict or a list. An empty container is returned itself.
    ///
    /// Raises
    /// ------
    /// BridgeTypeError
    ///     If ``x`` is not a tensor and holds none, or if an object in it that is not a container holds one.
    /// BridgeDTypeError
    ///     If the target has no such dtype.
    /// BridgeBufferError
    ///     If a copy is needed and ``copy=False``; or if the memory is read-only, requires grad, or was consumed
    ///     before.
    /// BridgeValueError
    ///     If a keyword has a value that it cannot have, or ``x`` is on a device that the target does not have.
    /// BridgeImportError
    ///     If the target is not installed.
    ///
    /// Warns
    /// -----
    /// ImmutableWarning
    ///     If the result may be written to, and shares memory that its framework never changes: once for each pair of
    ///     frameworks, and not with ``read_only=True``.
    ///
    /// Notes
    /// -----
    /// On a device, the target's current stream waits for the producer's, and the owner reuses the memory after the
    /// target's stream. The host waits only for elements that it receives, and for a move of up to 4 MiB in an
    /// idle stream. A permutation, an order and a move take one
    /// copy together, made on the device of ``x``.
    ///
    /// Tensors of TensorFlow and JAX do not change, and TensorFlow's constants are shared in the whole process: to write to
    /// the result, pass ``copy=True``. An unversioned capsule does not say whether its memory may be written: NumPy takes it as
    /// read-only, the other targets as writable. A capsule on a CUDA device does not name the stream that its tensor is
    /// written on: order that work before the legacy default stream, or pass the tensor itself.
    ///
    /// An error about a tensor of a container names the path to it, and nothing of the container is converted.
    ///
    /// See Also
    /// --------
    /// plan : says what a conversion would do.
    /// copy : fills a tensor that exists.
    ///
    /// Examples
    /// --------
    /// >>> import numpy as np
    /// >>> import truebridge as tb
    /// >>> a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    /// >>> t = tb.to_torch(a)
    /// >>> t[0, 0] = 42  # the memory of a
    /// >>> float(a[0, 0])
    /// 42.0
    /// >>> tb.to_torch({"image": a, "step": 7}, permute=(1, 0))["image"].shape
    /// torch.Size([3, 2])
    fn to_torch(x; keywords) {
        conversions::convert(x, Framework::Torch, keywords)
    }

    /// Return a ``cupy.ndarray`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``. A tensor of the host is moved with ``device="cuda"``.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// cupy.ndarray or container
    ///     In place, or a copy. Ready in CuPy's current stream.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``.
    ///
    /// See Also
    /// --------
    /// record_stream : for a result that is used in one more stream.
    ///
    /// Examples
    /// --------
    /// >>> import torch
    /// >>> import truebridge as tb
    /// >>> t = torch.arange(3.0, device="cuda")
    /// >>> a = tb.to_cupy(t)
    /// >>> a *= 2  # the memory of t
    /// >>> t.tolist()
    /// [0.0, 2.0, 4.0]
    fn to_cupy(x; keywords) {
        conversions::convert(x, Framework::CuPy, keywords)
    }

    /// Return a ``numpy.ndarray`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``. A tensor of a CUDA device is moved with ``device="cpu"``, and the host waits for it.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// numpy.ndarray or container
    ///     In place, or a copy. Read-only where the memory of ``x`` is.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``. ``kind`` is ``"device"`` for a tensor that is not in memory of the host.
    ///
    /// Notes
    /// -----
    /// Nothing waits for a device that still writes ``x``, a pinned tensor of the host, as
    /// ``x.copy_(y, non_blocking=True)`` does: synchronize its stream first.
    ///
    /// Examples
    /// --------
    /// >>> import torch
    /// >>> import truebridge as tb
    /// >>> t = torch.zeros(2, 3)
    /// >>> tb.to_numpy(t.T).strides  # bytes
    /// (4, 12)
    /// >>> tb.to_numpy(t.T, order="C").strides  # a copy
    /// (8, 4)
    fn to_numpy(x; keywords) {
        conversions::convert(x, Framework::NumPy, keywords)
    }

    /// Return an eager ``tf.Tensor`` of TensorFlow 2 over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// tensorflow.Tensor or container
    ///     In place if ``x`` is compact and 64 divides its address in bytes, else a copy.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``.
    ///
    /// Notes
    /// -----
    /// TensorFlow never writes to ``x``, except by the raw operations ``InplaceUpdate``, ``InplaceAdd`` and
    /// ``InplaceSub``. Read-only memory stays read-only when it is exported again. While a ``tf.function`` is traced,
    /// the result becomes a constant of the function: pass it as an argument.
    ///
    /// See Also
    /// --------
    /// tensorflow : for graphs and sessions.
    ///
    /// Examples
    /// --------
    /// >>> import torch
    /// >>> import truebridge as tb
    /// >>> nchw = torch.rand(8, 3, 32, 32)
    /// >>> tb.to_tensorflow(nchw, permute=(0, 2, 3, 1)).shape
    /// TensorShape([8, 32, 32, 3])
    fn to_tensorflow(x; keywords) {
        conversions::convert(x, Framework::TensorFlow, keywords)
    }

    /// Return a ``jax.Array`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// jax.Array or container
    ///     In place if ``x`` is compact and 64 divides its address in bytes, else a copy. Committed to its device.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``. ``kind`` is ``"dtype"`` for elements of 64 bits without ``jax_enable_x64``.
    ///
    /// Notes
    /// -----
    /// Arrays of JAX do not change: do not write to ``x`` while JAX uses the result. JAX computes on the host in its
    /// own threads, and may read ``x`` after a function has returned: wait for what it returned with
    /// ``jax.block_until_ready`` before you write to ``x``, or pass ``copy=True``.
    ///
    /// Examples
    /// --------
    /// >>> import numpy as np
    /// >>> import truebridge as tb
    /// >>> tb.to_jax(np.ones(3, np.float32)).sum()
    /// Array(3., dtype=float32)
    fn to_jax(x; keywords) {
        conversions::convert(x, Framework::JAX, keywords)
    }

    /// Return a ``paddle.Tensor`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// paddle.Tensor or container
    ///     In place, or a copy.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``.
    ///
    /// Examples
    /// --------
    /// >>> import numpy as np
    /// >>> import truebridge as tb
    /// >>> tuple(tb.to_paddle(np.ones(3, np.float32)).shape)
    /// (3,)
    fn to_paddle(x; keywords) {
        conversions::convert(x, Framework::Paddle, keywords)
    }
    // adapters: end
    /// Return a tensor of the framework named ``target`` over the memory of ``x``.
    ///
    /// Parameters
    /// ----------
    /// x : tensor or container of tensors
    ///     As for ``to_torch``.
    /// target : Target
    ///     The name of a framework. ``"tensorflow1"`` is TensorFlow 1.15, which ``tensorflow.v1.open`` has loaded.
    ///     ``"pytorch"``, ``"np"``, ``"cp"``, ``"tf"`` and ``"tf1"`` are accepted too, in either case.
    #[doc = include_str!("docs/keywords.txt")]
    /// Returns
    /// -------
    /// tensor or container
    ///     As from ``to_torch``.
    ///
    /// Raises
    /// ------
    /// BridgeError
    ///     As for ``to_torch``. ``kind`` is ``"argument"`` for a target that is none of these.
    ///
    /// Examples
    /// --------
    /// >>> import numpy as np
    /// >>> import truebridge as tb
    /// >>> tb.convert(np.ones(3, np.int16), "torch")
    /// tensor([1, 1, 1], dtype=torch.int16)
    fn convert(x, target; keywords) {
        let target = named(target).map_err(|error| into_python(x.py(), error))?;
        conversions::convert(x, target, keywords)
    }

    /// As ``convert``, for the package itself: without a warning of immutable memory.
    fn convert_inside(x, target; keywords) {
        let target = named(target).map_err(|error| into_python(x.py(), error))?;
        conversions::convert_inside(x, target, keywords)
    }
}
