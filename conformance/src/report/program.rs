//! The lines that show a case without this package: the same tensor, and the target's own function for it.

use crate::names::{adapter_of, in_other_process};
use crate::{Case, Spec};
use bridge_core::Pending;

/// The lines of Python of one framework. Words in braces are filled in.
struct Row {
    /// The adapters whose tensors these are.
    adapters: &'static [&'static str],
    import: &'static str,
    /// The device: `{kind}` is `cpu` or `cuda`, `{index}` its number.
    device: &'static str,
    /// `{n}` elements of `{dtype}` on `{device}`, from 0 up.
    base: &'static str,
    /// Moves `base` to an address of `{align}` bytes after a multiple of 128, by memory of `{room}` bytes.
    moved: &'static [&'static str],
    /// The tensor in `base`: `{shape}`, `{strides}` in elements, `{bytes}` the strides in bytes, `{offset}` in elements.
    view: &'static str,
    /// Makes `x` read-only.
    lock: Option<&'static str>,
    /// Takes `{x}`.
    take: &'static str,
    /// Whether `take` has the keyword `copy=`.
    copies: bool,
    /// The address of `{x}`, and a statement that writes to it, where there are such.
    pointer: Option<&'static str>,
    fill: Option<&'static str>,
}

const ROWS: [Row; 6] = [
    Row {
        adapters: &["torch", "torch-capsules"],
        import: "import torch",
        device: "{kind}:{index}",
        base: "torch.arange({n}, device=\"{device}\").to(torch.{dtype})",
        moved: &[
            "raw = torch.zeros({room}, dtype=torch.uint8, device=\"{device}\")",
            "raw = raw[-raw.data_ptr() % 128 + {align}:][:{nbytes}].view(torch.{dtype})",
            "base = raw.copy_(base)",
        ],
        view: "torch.as_strided(base, {shape}, {strides}, {offset})",
        lock: None,
        take: "torch.from_dlpack({x}{copy})",
        copies: true,
        pointer: Some("{x}.data_ptr()"),
        fill: Some("{x}.fill_(1)"),
    },
    Row {
        adapters: &["cupy"],
        import: "import cupy",
        device: "{index}",
        base: "cupy.arange({n}).astype(\"{dtype}\")",
        moved: &[
            "raw = cupy.zeros({room}, \"uint8\")",
            "raw = raw[-raw.data.ptr % 128 + {align}:][:{nbytes}].view(\"{dtype}\")",
            "raw[:] = base; base = raw",
        ],
        view: "cupy.lib.stride_tricks.as_strided(base[{offset}:], {shape}, {bytes})",
        lock: None,
        take: "cupy.from_dlpack({x}{copy})",
        copies: true,
        pointer: Some("{x}.data.ptr"),
        fill: Some("{x}.fill(1)"),
    },
    Row {
        adapters: &["numpy", "numpy-interface"],
        import: "import numpy as np",
        device: "",
        base: "np.arange({n}).astype(\"{dtype}\")",
        moved: &[
            "raw = np.zeros({room}, \"uint8\")",
            "raw = raw[-raw.ctypes.data % 128 + {align}:][:{nbytes}].view(\"{dtype}\")",
            "raw[:] = base; base = raw",
        ],
        view: "np.lib.stride_tricks.as_strided(base[{offset}:], {shape}, {bytes})",
        lock: Some("x.flags.writeable = False"),
        take: "np.from_dlpack({x}{copy})",
        copies: true,
        pointer: Some("{x}.ctypes.data"),
        fill: Some("{x}.fill(1)"),
    },
    Row {
        adapters: &["jax"],
        import: "import jax",
        device: "jax.devices(\"{kind}\")[{index}]",
        base: "jax.numpy.arange({n}, device={device}).astype(\"{dtype}\")",
        moved: &[],
        view: "base[{offset}:].reshape({shape})",
        lock: None,
        take: "jax.dlpack.from_dlpack({x}{copy})",
        copies: true,
        pointer: Some("{x}.unsafe_buffer_pointer()"),
        fill: None,
    },
    Row {
        adapters: &["tensorflow"],
        import: "import tensorflow as tf",
        device: "{kind}:{index}",
        base: "tf.cast(tf.range({n}), \"{dtype}\")",
        moved: &[],
        view: "tf.reshape(base[{offset}:], {shape})",
        lock: None,
        take: "tf.experimental.dlpack.from_dlpack({x}.__dlpack__())",
        copies: false,
        pointer: None,
        fill: None,
    },
    Row {
        adapters: &["paddle"],
        import: "import paddle",
        device: "",
        base: "paddle.arange({n}).astype(\"{dtype}\")",
        moved: &[],
        view: "paddle.as_strided(base, {shape}, {strides}, {offset})",
        lock: None,
        take: "paddle.from_dlpack({x})",
        copies: false,
        pointer: Some("{x}.data_ptr()"),
        fill: Some("{x}.fill_(1)"),
    },
];

/// The dtypes that NumPy has itself: the others are those of ml_dtypes.
const NATIVE: &str =
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128";

/// Returns the program, or why there is none. Its last line shows what the property is about.
pub(super) fn program(property: &str, case: &Case, device: &str, names: [&str; 2]) -> Result<String, String> {
    if names.iter().any(|name| in_other_process(name).is_some()) {
        return Err("The frameworks are in two processes, between which they exchange nothing by themselves.".into());
    }
    let [from, to] = names.map(|name| {
        let adapter = adapter_of(name);
        ROWS.iter()
            .find(|row| row.adapters.contains(&adapter))
            .ok_or_else(|| format!("This page has no lines for the own functions of {adapter}."))
    });
    let (from, to) = (from?, to?);
    let shown = match property {
        "order" | "release_order" => {
            let [from, to] = [from, to].map(|row| row.adapters[0]);
            let name = property.replace('_', " ");
            return Err(format!(
                "The race depends on streams: cargo xtask scoreboard --pairs {from}:{to} --properties '{name}' --by own \
                 --print shows the lines that run it."
            ));
        }
        "values" | "dtype" | "shape" | "huge" => "print(x, y, sep=\"\\n\")".to_owned(),
        "identity" | "honesty" | "profile" => match (from.pointer, to.pointer) {
            (Some(x), Some(y)) => format!("print({}, {})", x.replace("{x}", "x"), y.replace("{x}", "y")),
            _ => return Err("TensorFlow does not say at which address a tensor is.".into()),
        },
        "read_only" | "aliasing" => match to.fill {
            Some(fill) => format!("{}\nprint(x)", fill.replace("{x}", "y")),
            None => return Err("The target's framework does not write to tensors.".into()),
        },
        "round_trip" => format!("print(x, {}, sep=\"\\n\")", from.taken("y", None)),
        _ => {
            return Err(
                "The property is about more than one exchange of a tensor, and only truebridge makes those calls: \
                        it cannot be shown without the package."
                    .into(),
            );
        }
    };
    let made = from.made(&case.spec, device)?;
    let mut imports = vec![from.import, to.import];
    imports.dedup();
    // TensorFlow shows stubs of CUDA to what is loaded after it.
    imports.sort_by_key(|import| import.ends_with("tf"));
    let lines = imports.into_iter().map(str::to_owned).chain(made);
    let lines: Vec<_> = lines.chain([format!("y = {}", to.taken("x", case.copy)), shown]).collect();
    Ok(lines.join("\n") + "\n")
}

impl Row {
    fn taken(&self, x: &str, copy: Option<bool>) -> String {
        let copy = match copy {
            Some(copy) if self.copies => format!(", copy={}", if copy { "True" } else { "False" }),
            _ => String::new(),
        };
        self.take.replace("{x}", x).replace("{copy}", &copy)
    }

    /// Returns the lines that make the tensor.
    fn made(&self, spec: &Spec, device: &str) -> Result<Vec<String>, String> {
        let dtype = spec.dtype.to_string();
        let mut lines = Vec::new();
        if self.base.contains(".astype(\"{dtype}\")") && !NATIVE.split(' ').any(|native| native == dtype) {
            lines.push("import ml_dtypes".to_owned());
        }
        let Some(itemsize) = spec.dtype.itemsize().filter(|_| spec.dtype.lanes == 1) else {
            return Err("The elements have less than a byte, and no function makes such tensors from numbers.".into());
        };
        let (kind, index) = device.split_once(':').unwrap_or((device, "0"));
        let nbytes = spec.base * itemsize;
        let place = self.device.replace("{kind}", kind).replace("{index}", index);
        let tuple = |numbers: Vec<i64>| {
            let all: Vec<_> = numbers.iter().map(i64::to_string).collect();
            format!("({}{})", all.join(", "), if all.len() == 1 { "," } else { "" })
        };
        let filled = |text: &str| {
            text.replace("{device}", &place)
                .replace("{n}", &spec.base.to_string())
                .replace("{nbytes}", &nbytes.to_string())
                .replace("{room}", &(nbytes + 2 * Spec::GRAIN).to_string())
                .replace("{align}", &spec.align.to_string())
                .replace("{dtype}", &dtype)
                .replace("{shape}", &tuple(spec.shape.clone()))
                .replace("{strides}", &tuple(spec.strides.clone()))
                .replace("{bytes}", &tuple(spec.strides.iter().map(|stride| stride * itemsize as i64).collect()))
                .replace("{offset}", &spec.offset.to_string())
        };
        lines.push(format!("base = {}", filled(self.base)));
        lines.extend(self.moved.iter().filter(|_| spec.align > 0).map(|line| filled(line)));
        lines.push(format!("x = {}", filled(self.view)));
        match spec.pending {
            None => {}
            Some(Pending::Conjugation) => lines.push("x = x.conj()".into()),
            Some(Pending::Negation) => lines.push("x = torch._neg_view(x)".into()),
            Some(Pending::NegatedConjugation) => lines.push("x = torch._neg_view(x.conj())".into()),
            Some(_) => return Err("The tensor is a field of an array of records: its strides split elements.".into()),
        }
        lines.extend(self.lock.filter(|_| spec.read_only).map(str::to_owned));
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bridge_core::DType;

    /// Two rows of three, backwards, of a buffer with rows of five.
    fn case() -> Case {
        let spec = Spec { strides: vec![-5, 1], offset: 5, base: 11, ..Spec::compact(DType::FLOAT32, &[2, 3]) };
        serde_json::from_value(serde_json::json!({ "spec": spec, "seed": 7 })).unwrap()
    }

    #[test]
    fn the_lines_make_the_tensor_of_the_case_and_call_the_target_alone() {
        let mut case = case();
        let expected = "import numpy as np\nimport torch\nbase = np.arange(11).astype(\"float32\")\nx = \
                        np.lib.stride_tricks.as_strided(base[5:], (2, 3), (-20, 4))\ny = torch.from_dlpack(x)\n\
                        print(x, y, sep=\"\\n\")\n";
        assert_eq!(program("values", &case, "cpu", ["numpy-interface", "torch"]).unwrap(), expected);
        (case.copy, case.spec.align, case.spec.read_only) = (Some(true), 16, true);
        let text = program("read_only", &case, "cpu", ["numpy", "torch"]).unwrap();
        assert!(
            text.contains("raw = np.zeros(300, \"uint8\")\nraw = raw[-raw.ctypes.data % 128 + 16:][:44]"),
            "{text}"
        );
        assert!(
            text.contains("x.flags.writeable = False\ny = torch.from_dlpack(x, copy=True)\ny.fill_(1)\n"),
            "{text}"
        );
        let text = program("round_trip", &case, "cuda:1", ["torch", "tensorflow"]).unwrap();
        assert!(text.contains("torch.arange(11, device=\"cuda:1\")") && !text.contains("writeable"), "{text}");
        assert!(text.ends_with("(x.__dlpack__())\nprint(x, torch.from_dlpack(y), sep=\"\\n\")\n"), "{text}");
        (case.spec.dtype, case.spec.pending) = (DType::COMPLEX64, Some(Pending::NegatedConjugation));
        let text = program("identity", &case, "cuda:0", ["torch", "cupy"]).unwrap();
        assert!(text.contains("x = torch._neg_view(x.conj())\n"), "{text}");
        assert!(text.ends_with("print(x.data_ptr(), y.data.ptr)\n"), "{text}");
    }

    #[test]
    fn where_lines_cannot_show_it_a_sentence_says_why() {
        let mut case = case();
        let why = |property: &str, case: &Case, names| program(property, case, "cpu", names).unwrap_err();
        assert!(why("torn", &case, ["torch", "numpy"]).contains("only truebridge makes those calls"));
        assert!(why("values", &case, ["warp", "numpy"]).contains("functions of warp"));
        assert!(why("values", &case, ["torch", "numpy+remote"]).contains("two processes"));
        assert!(
            why("release_order", &case, ["torch", "cupy"]).contains("--pairs torch:cupy --properties 'release order'")
        );
        case.spec.dtype = DType::FLOAT4_E2M1FN_X2;
        assert!(why("values", &case, ["torch", "numpy"]).contains("less than a byte"));
    }
}
