//! Saved models: the graph, its signatures, and the files that a session reads before the first run
//! (`tensorflow/core/protobuf/saved_model.proto`, `meta_graph.proto`, `saver.proto`).

use crate::graph::argument;
use crate::graph::definition::OutputName;
use crate::graph::input::Input;
use crate::runtime::dtypes;
use bridge_core::{DType, Error, ErrorKind, Result};
use prost::Message;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A saved model of TensorFlow 1.x or 2.x, as `tf.saved_model.save` and its predecessors write it into a folder.
///
/// [`Session::open_saved_model`](crate::Session::open_saved_model) and
/// [`Session::open_signature`](crate::Session::open_signature) restore its variables and fill its tables. A TensorFlow
/// loads the models that its own version or an older one has saved.
#[derive(Debug, Clone)]
pub struct SavedModel {
    folder: PathBuf,
    graph: MetaGraphDef,
    signatures: BTreeMap<String, Signature>,
}

/// What a saved model computes under a name: tensors of its graph, each by a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Signature {
    inputs: Vec<Endpoint>,
    outputs: Vec<Endpoint>,
}

/// An input or an output of a [`Signature`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Endpoint {
    /// Its name in the signature.
    pub key: String,
    /// The name of the tensor in the graph, such as `x:0`. Empty for a sparse or a composite tensor.
    pub tensor: String,
    /// Element type; `None` for one that no other framework has, such as strings.
    pub dtype: Option<DType>,
    /// Lengths, in elements, `None` for those that may differ; `None` as a whole for any shape.
    pub shape: Option<Vec<Option<i64>>>,
}

#[derive(Clone, PartialEq, Message)]
struct SavedModelDef {
    #[prost(message, repeated, tag = "2")]
    meta_graphs: Vec<MetaGraphDef>,
}

#[derive(Clone, PartialEq, Message)]
struct MetaGraphDef {
    #[prost(message, optional, tag = "1")]
    meta_info_def: Option<MetaInfoDef>,
    /// A `GraphDef`, which is imported as bytes.
    #[prost(bytes = "vec", tag = "2")]
    graph_def: Vec<u8>,
    #[prost(message, optional, tag = "3")]
    saver_def: Option<SaverDef>,
    #[prost(btree_map = "string, message", tag = "4")]
    collection_def: BTreeMap<String, CollectionDef>,
    #[prost(btree_map = "string, message", tag = "5")]
    signature_def: BTreeMap<String, SignatureDef>,
    #[prost(message, repeated, tag = "6")]
    asset_file_def: Vec<AssetFileDef>,
}

#[derive(Clone, PartialEq, Message)]
struct MetaInfoDef {
    #[prost(string, repeated, tag = "4")]
    tags: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct SaverDef {
    #[prost(string, tag = "1")]
    filename_tensor_name: String,
    #[prost(string, tag = "3")]
    restore_op_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct CollectionDef {
    #[prost(message, optional, tag = "1")]
    node_list: Option<NodeList>,
    #[prost(message, optional, tag = "5")]
    any_list: Option<AnyList>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyList {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Any>,
}

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct NodeList {
    #[prost(string, repeated, tag = "1")]
    value: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct SignatureDef {
    #[prost(btree_map = "string, message", tag = "1")]
    inputs: BTreeMap<String, TensorInfo>,
    #[prost(btree_map = "string, message", tag = "2")]
    outputs: BTreeMap<String, TensorInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorInfo {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "2")]
    dtype: i32,
    #[prost(message, optional, tag = "3")]
    tensor_shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorShapeProto {
    #[prost(message, repeated, tag = "2")]
    dim: Vec<Dim>,
    #[prost(bool, tag = "3")]
    unknown_rank: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Dim {
    #[prost(int64, tag = "1")]
    size: i64,
}

#[derive(Clone, PartialEq, Message)]
struct AssetFileDef {
    #[prost(message, optional, tag = "1")]
    tensor_info: Option<TensorInfo>,
    #[prost(string, tag = "2")]
    filename: String,
}

/// A scalar string, as the value of an attribute (`tensorflow/core/framework/attr_value.proto`, `tensor.proto`).
#[derive(Clone, PartialEq, Message)]
struct AttrValue {
    #[prost(message, optional, tag = "8")]
    tensor: Option<TensorProto>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorProto {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(bytes = "vec", repeated, tag = "8")]
    string_val: Vec<Vec<u8>>,
}

/// The signature whose output names the operation that initialises a model of 2.x, and the collections that do so in
/// one of 1.x (`tensorflow/cc/saved_model/constants.h`).
const INITIALISER: &str = "__saved_model_init_op";
const INITIALISERS: [&str; 2] = ["saved_model_main_op", "legacy_init_op"];

/// The collection of the assets in a model of 1.x, each an `AssetFileDef`. A model of 2.x has a field for them.
const ASSETS: &str = "saved_model_assets";

/// `DT_STRING`
pub(crate) const STRING: i32 = 7;

impl Endpoint {
    fn of((key, info): (String, TensorInfo)) -> Self {
        let lengths = |shape: TensorShapeProto| {
            let length = |dim: &Dim| Some(dim.size).filter(|length| *length >= 0);
            (!shape.unknown_rank).then(|| shape.dim.iter().map(length).collect())
        };
        let (dtype, shape) = (dtypes::dtype(info.dtype).ok(), info.tensor_shape.and_then(lengths));
        Self { key, tensor: info.name, dtype, shape }
    }

    /// Returns the input of a session for it, which is fed by its key or by the name of its tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Dtype`] for a dtype that no other framework has, [`ErrorKind::Argument`] for a sparse or a
    /// composite tensor, and those of [`Input::new`].
    pub fn input(&self) -> Result<Input> {
        let dtype = self.conversion("input")?;
        let input = match &self.shape {
            Some(shape) => Input::new(&self.tensor, dtype, shape),
            None => Input::of_any_shape(&self.tensor, dtype),
        }?;
        Ok(Input { key: Some(self.key.clone()), ..input })
    }
}

impl Endpoint {
    /// Returns the dtype, if another framework has it.
    pub(crate) fn conversion(&self, kind: &str) -> Result<DType> {
        let key = &self.key;
        if self.tensor.is_empty() {
            return Err(argument(format!(
                "the {kind} {key} of the signature is a sparse or a composite tensor, which has no plain memory: save \
                 the model with a signature that has its parts, or a dense tensor (tf.sparse.to_dense)"
            )));
        }
        self.dtype.ok_or_else(|| {
            let text = format!(
                "the {kind} {key} of the signature is a tensor of strings, or of another dtype that cannot be converted: save \
                 the model with a signature that has numbers"
            );
            Error::new(ErrorKind::Dtype, text)
        })
    }
}

impl Signature {
    /// Refuses what a session cannot feed or fetch.
    pub(crate) fn check(&self) -> Result<()> {
        for (i, input) in self.inputs.iter().enumerate() {
            input.conversion("input")?;
            if let Some(other) = self.inputs[..i].iter().find(|other| other.tensor == input.tensor) {
                let (first, second, tensor) = (&other.key, &input.key, &input.tensor);
                return Err(argument(format!(
                    "the inputs {first} and {second} of the signature are one tensor, {tensor}, which can be fed once: \
                     save the model with a signature that names it once"
                )));
            }
        }
        self.outputs.iter().try_for_each(|output| output.conversion("output").map(drop))
    }

    fn of(definition: SignatureDef) -> Self {
        let endpoints = |infos: BTreeMap<String, TensorInfo>| infos.into_iter().map(Endpoint::of).collect();
        Self { inputs: endpoints(definition.inputs), outputs: endpoints(definition.outputs) }
    }

    /// The inputs, in the order of their keys.
    pub fn inputs(&self) -> &[Endpoint] {
        &self.inputs
    }

    /// The outputs, in the order of their keys.
    pub fn outputs(&self) -> &[Endpoint] {
        &self.outputs
    }
}

impl SavedModel {
    /// Reads `saved_model.pb` in `folder`, and takes the graph with exactly these tags: `["serve"]` for most models.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] if the folder holds no saved model, or none with these tags, or the file is damaged.
    pub fn read(folder: &Path, tags: &[&str]) -> Result<Self> {
        let path = folder.join("saved_model.pb");
        let bytes = fs::read(&path).map_err(|error| {
            argument(format!("{} cannot be read ({error}): name the folder of a saved model", path.display()))
                .caused_by(error)
        })?;
        let model = SavedModelDef::decode(&*bytes).map_err(|error| {
            argument(format!("{} is not a saved model ({error}): name the folder of one", path.display()))
                .caused_by(error)
        })?;
        let tags_of = |graph: &MetaGraphDef| graph.meta_info_def.clone().unwrap_or_default().tags;
        let sorted = |mut tags: Vec<String>| {
            tags.sort();
            tags
        };
        let wanted = sorted(tags.iter().map(ToString::to_string).collect());
        let found = model.meta_graphs.iter().find(|graph| sorted(tags_of(graph)) == wanted);
        let mut graph = found.cloned().ok_or_else(|| {
            let tagged: Vec<_> = model.meta_graphs.iter().map(tags_of).collect();
            let folder = folder.display();
            argument(format!("{folder} has no graph with the tags {tags:?}: name those of one that it has, {tagged:?}"))
        })?;
        if graph.asset_file_def.is_empty() {
            let assets = graph.collection_def.get(ASSETS).and_then(|assets| assets.any_list.clone());
            let assets = assets.unwrap_or_default().value.into_iter().map(|asset| AssetFileDef::decode(&*asset.value));
            graph.asset_file_def = assets.collect::<Result<_, _>>().map_err(|error| {
                argument(format!("{} names a damaged asset ({error}): save the model again", path.display()))
                    .caused_by(error)
            })?;
        }
        let initialiser = graph.signature_def.remove(INITIALISER);
        let signatures = std::mem::take(&mut graph.signature_def);
        let signatures = signatures.into_iter().map(|(name, definition)| (name, Signature::of(definition))).collect();
        graph.signature_def.extend(initialiser.map(|initialiser| (INITIALISER.into(), initialiser)));
        Ok(Self { folder: folder.into(), graph, signatures })
    }

    /// The names of the signatures, sorted.
    pub fn signatures(&self) -> impl Iterator<Item = &str> {
        self.signatures.keys().map(String::as_str)
    }

    /// Returns the signature with this name: `serving_default` in most models.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Argument`] if there is none, and names those that there are.
    pub fn signature(&self, name: &str) -> Result<&Signature> {
        self.signatures.get(name).ok_or_else(|| {
            let names: Vec<_> = self.signatures().collect();
            argument(format!("the saved model has no signature {name:?}: it has {}", names.join(", ")))
        })
    }

    /// A serialised `GraphDef`.
    pub(crate) fn graph_def(&self) -> &[u8] {
        &self.graph.graph_def
    }

    /// The strings that the graph reads paths from, each with its value, an `AttrValue`: the prefix of the checkpoint
    /// and the assets.
    pub(crate) fn paths(&self) -> Result<Vec<(OutputName, Vec<u8>)>> {
        let checkpoint = self.saver().map(|saver| (saver.filename_tensor_name.clone(), self.checkpoint()));
        let assets = self.graph.asset_file_def.iter().filter_map(|asset| {
            let path = self.folder.join("assets").join(&asset.filename);
            Some((asset.tensor_info.as_ref()?.name.clone(), path))
        });
        let path = |(name, path): (String, PathBuf)| {
            let string_val = vec![path.as_os_str().as_bytes().to_vec()];
            let value = AttrValue { tensor: Some(TensorProto { dtype: STRING, string_val }) };
            Ok((OutputName::parse(&name)?, value.encode_to_vec()))
        };
        // An asset may be listed more than once.
        let by_tensor: BTreeMap<String, PathBuf> = checkpoint.into_iter().chain(assets).collect();
        by_tensor.into_iter().map(path).collect()
    }

    /// The names of the operations to run, in this order, before the first run: one restores the variables, one
    /// initialises the rest.
    pub(crate) fn operations(&self) -> Vec<String> {
        let restore = self.saver().map(|saver| saver.restore_op_name.clone());
        let signature = self.graph.signature_def.get(INITIALISER);
        let of_signature = signature.and_then(|signature| Some(signature.outputs.values().next()?.name.clone()));
        let of_collections = || {
            let nodes = INITIALISERS.iter().filter_map(|name| self.graph.collection_def.get(*name)?.node_list.clone());
            nodes.flat_map(|nodes| nodes.value).next()
        };
        restore.into_iter().chain(of_signature.or_else(of_collections)).filter(|name| !name.is_empty()).collect()
    }

    /// What restores the variables, if there are any.
    fn saver(&self) -> Option<&SaverDef> {
        let saver = self.graph.saver_def.as_ref().filter(|saver| !saver.restore_op_name.is_empty());
        saver.filter(|_| self.checkpoint().with_extension("index").is_file())
    }

    fn checkpoint(&self) -> PathBuf {
        self.folder.join("variables/variables")
    }
}
