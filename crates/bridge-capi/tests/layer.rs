//! The C++ layer: by itself, and with the libraries of PyTorch's and TensorFlow's wheels in one program.

#[path = "compiler/mod.rs"]
mod compiler;

use compiler::{Source, capi, runs};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Says why nothing is compiled, where there is no compiler.
fn compiler() -> Result<(), String> {
    let found = Command::new("c++").arg("--version").output();
    found.map(drop).map_err(|error| format!("there is no C++ compiler: c++ does not start: {error}"))
}

/// Returns the folder of packages of the Python that the tests use, or the reason why nothing is compiled against it.
fn packages() -> Result<PathBuf, String> {
    compiler()?;
    let python =
        std::env::var_os("PYO3_PYTHON").map_or_else(|| compiler::target().join("venv/bin/python"), PathBuf::from);
    let code = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let asked = Command::new(&python).args(["-c", code]).output();
    let asked = asked.map_err(|error| format!("{} does not start: {error}", python.display()))?;
    let folder = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
    let needed = ["torch/include/ATen/DLConvertor.h", "tensorflow/include/tensorflow/c/tf_tensor.h"];
    match needed.iter().find(|file| !folder.join(file).is_file()) {
        Some(file) => {
            Err(format!("{} has no {file}: cargo xtask setup installs PyTorch and TensorFlow", folder.display()))
        }
        None => Ok(folder),
    }
}

/// Arguments that name the headers of both wheels, as the system's: their warnings are not ours.
fn headers(packages: &Path) -> Vec<String> {
    let folders = ["torch/include", "tensorflow/include"].map(|folder| packages.join(folder).display().to_string());
    folders.into_iter().flat_map(|folder| ["-isystem".into(), folder]).collect()
}

/// The libraries of the wheels: the framework, their folder, and their names.
const LIBRARIES: [(&str, &str, &[&str]); 2] = [
    ("torch", "torch/lib", &["-ltorch", "-ltorch_cpu", "-lc10"]),
    ("tensorflow", "tensorflow", &["-l:libtensorflow_framework.so.2", "-l:libtensorflow_cc.so.2"]),
];

/// The CUDA runtime of PyTorch's wheel, in the folder of its version.
const RUNTIME: &str = "nvidia/cu13/lib/libcudart.so.13";

/// Arguments that link the libraries of both wheels, those of `first` before the others. The CUDA runtime comes before
/// both: TensorFlow exports stubs of it, which would take its place for PyTorch.
fn linked(packages: &Path, first: &str) -> Vec<String> {
    let mut libraries = LIBRARIES;
    libraries.sort_by_key(|(framework, ..)| *framework != first);
    let runtime = packages.join(RUNTIME);
    let runtime = runtime.is_file().then_some((runtime.parent().unwrap().to_path_buf(), &["-l:libcudart.so.13"][..]));
    let libraries = libraries.map(|(_, folder, names)| (packages.join(folder), names));
    let arguments = runtime.into_iter().chain(libraries).flat_map(|(folder, names)| {
        let places = [format!("-L{}", folder.display()), format!("-Wl,-rpath,{}", folder.display())];
        places.into_iter().chain(names.iter().map(|name| name.to_string()))
    });
    ["-Wl,--no-as-needed".into()].into_iter().chain(arguments).collect()
}

#[test]
fn the_layer_without_a_framework() {
    if let Err(reason) = compiler() {
        return println!("left out: {reason}");
    }
    assert_eq!(runs(&mut Command::new(Source::Cxx(capi().join("tests/layer.cpp")).compiled("layer", &[]))), "");
}

/// With each framework loaded first.
#[test]
fn torch_and_tensorflow_in_one_program() {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => return println!("left out: {reason}"),
    };
    let source = Source::Cxx(capi().join("tests/frameworks.cpp"));
    let object = source.object("frameworks.o", &headers(&packages));
    for first in LIBRARIES.map(|(framework, ..)| framework) {
        let program = object.compiled(&format!("{first}-first"), &linked(&packages, first));
        let told = runs(Command::new(program).env("TF_CPP_MIN_LOG_LEVEL", "3"));
        told.lines().filter(|line| line.starts_with("left out")).for_each(|line| println!("{line}"));
        assert_eq!(told.lines().last(), Some("torch and tensorflow in one process"));
    }
}

#[test]
fn the_example_runs_a_graph_on_tensors_of_torch() {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => return println!("left out: {reason}"),
    };
    let source = Source::Cxx(capi().join("../../examples/tf_to_torch.cpp"));
    let program = source.compiled("tf_to_torch", &[headers(&packages), linked(&packages, "torch")].concat());
    let graph = capi().join("../bridge-tensorflow/tests/data/line.pb");
    let told = runs(Command::new(program).arg(graph).env("TF_CPP_MIN_LOG_LEVEL", "3"));
    let numbers: Vec<f32> = told.lines().filter_map(|line| line.trim().parse().ok()).collect();
    assert_eq!(numbers, [0., 1., 2., 3., 4., 5., 1., 3., 5., 7., 9., 11.], "{told}");
}
