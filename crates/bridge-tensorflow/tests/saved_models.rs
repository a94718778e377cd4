//! Saved models, in the real TensorFlow of their series and without Python.

mod installed;

use bridge_core::{DType, ErrorKind, HostOnly, Options, Ordering, Result, transfer};
use bridge_ndarray::{HostArray, NdArray};
use bridge_tensorflow::{GraphEdges, Input, Runtime, SavedModel, Series, Session, SessionOptions};
use ndarray::{Array, array};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the folder has is a TensorFlow, or no library of this name.
fn open_as(series: Series, folder: &Path) -> bridge_core::Result<&'static Runtime> {
    // SAFETY: as above.
    unsafe { Runtime::open_as(series, folder) }
}

/// Returns the adapter.
fn ndarray() -> NdArray {
    // SAFETY: the memory of a tensor is used on one thread at a time.
    unsafe { NdArray::new() }
}

/// The folder of the model that `tests/data/saved_models.py` saves with this series.
fn saved(series: Series) -> PathBuf {
    let name = if series == Series::One { "saved1" } else { "saved2" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Runs a session with one input, and returns its only output.
fn run(session: &Session, graph: &GraphEdges, name: &str, fed: HostArray) -> HostArray {
    let (ndarray, ordering): (_, Arc<dyn Ordering>) = (ndarray(), Arc::new(HostOnly));
    let (fed, _) = transfer(&ndarray, graph, &fed, &ordering, &Options::default()).unwrap();
    let results = session.run(&[(name, &fed)]).unwrap();
    let [result] = &results[..] else { panic!("there is one output") };
    transfer(graph, &ndarray, result, &ordering, &Options::default()).unwrap().0
}

fn refused<T>(result: Result<T>, kind: ErrorKind, expected: &str) {
    let Err(error) = result else { panic!("{expected}: it was not refused") };
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

/// Everything that a session does with the model of a series.
fn check(runtime: &'static Runtime, series: Series) {
    let options = SessionOptions::default();
    let (graph, model) = (GraphEdges::new(runtime).unwrap(), SavedModel::read(&saved(series), &["serve"]).unwrap());
    assert_eq!(model.signatures().collect::<Vec<_>>(), ["look_up", "serving_default"]);
    let signature = model.signature("serving_default").unwrap();
    let [images] = signature.inputs() else { panic!("there is one input") };
    assert_eq!((&*images.key, images.dtype), ("images", Some(DType::FLOAT32)));
    assert_eq!(images.shape.as_deref(), Some(&[None, Some(3)][..]));
    assert_eq!(signature.outputs()[0].key, "scores");

    // The variables are restored.
    let expected = array![[12.0f32, 23.0], [20.0, 34.0]].into_dyn();
    let ones = || HostArray::from(array![[0.0f32, 1.0, 0.0], [1.0, 1.0, 2.0]].into_dyn());
    let by_signature = Session::open_signature(runtime, &model, "serving_default", &options).unwrap();
    let scores = run(&by_signature, &graph, "images", ones());
    assert_eq!(scores.to_array::<f32>().unwrap(), expected);
    assert_eq!(by_signature.outputs(), ["scores"]);
    // By the names of the tensors, which a session of a signature takes as well.
    let input = Input::new(&images.tensor, DType::FLOAT32, &[None, Some(3)]).unwrap();
    let output = &*signature.outputs()[0].tensor;
    let by_name = Session::open_saved_model(runtime, &model, &[input], &[output], &options).unwrap();
    assert_eq!(by_name.outputs(), [output]);
    for session in [&by_signature, &by_name] {
        let scores = run(session, &graph, &images.tensor, ones());
        assert_eq!(scores.to_array::<f32>().unwrap(), expected);
    }

    // The table is filled, from a file that is saved with the model.
    let table = Session::open_signature(runtime, &model, "look_up", &options).unwrap();
    let squares = run(&table, &graph, "keys", HostArray::from(array![3i64, 7, 1].into_dyn()));
    assert_eq!(squares.to_array::<i64>().unwrap(), array![9, -1, 1].into_dyn());

    let open = |name: &str| Session::open_signature(runtime, &model, name, &options);
    refused(open("train"), ErrorKind::Argument, "no signature \"train\": it has look_up, serving_default");
    refused(by_signature.run(&[]), ErrorKind::Argument, "the input images is not fed");
    let fed = HostArray::from(Array::<f32, _>::zeros([2, 4]).into_dyn());
    let ordering: Arc<dyn Ordering> = Arc::new(HostOnly);
    let (wide, _) = transfer(&ndarray(), &graph, &fed, &ordering, &Options::default()).unwrap();
    refused(by_signature.run(&[("images", &wide)]), ErrorKind::Argument, "has the shape [?, 3]");
    refused(by_signature.run(&[("image", &wide)]), ErrorKind::Argument, "no input image: it has images");
}

#[test]
fn saved_models_of_both_series_in_one_process() {
    let open = |series, folder: Option<PathBuf>| {
        if folder.is_none() {
            eprintln!("left out: no TensorFlow of series {series:?} (cargo xtask setup fetches it)");
        }
        folder.map(|folder| open_as(series, &folder).unwrap())
    };
    if let Some(two) = open(Series::Two, installed::two()) {
        check(two, Series::Two);
        check(two, Series::One);
    }
    if let Some(one) = open(Series::One, installed::one()) {
        check(one, Series::One);
        let newer = SavedModel::read(&saved(Series::Two), &["serve"]).unwrap();
        let opened = Session::open_signature(one, &newer, "serving_default", &SessionOptions::default());
        refused(opened, ErrorKind::Framework, "tensorflow reported");
    }
}

#[test]
fn what_is_no_saved_model_is_refused() {
    let folder = saved(Series::One);
    refused(SavedModel::read(&folder, &["train"]), ErrorKind::Argument, "has no graph with the tags [\"train\"]");
    refused(SavedModel::read(&folder, &["train"]), ErrorKind::Argument, "[[\"serve\"]]");
    refused(
        SavedModel::read(&folder.join("variables"), &["serve"]),
        ErrorKind::Argument,
        "the folder of a saved model",
    );
    let damaged = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged");
    std::fs::create_dir_all(&damaged).unwrap();
    std::fs::write(damaged.join("saved_model.pb"), b"no model").unwrap();
    refused(SavedModel::read(&damaged, &["serve"]), ErrorKind::Argument, "is not a saved model");
}

#[test]
fn an_error_keeps_the_error_of_the_system() {
    use std::error::Error as _;
    let error = SavedModel::read(std::path::Path::new("/nowhere"), &["serve"]).unwrap_err();
    let cause = error.source().and_then(|cause| cause.downcast_ref::<std::io::Error>()).unwrap();
    assert_eq!(cause.kind(), std::io::ErrorKind::NotFound);
}
