//! The adapters that the runner knows, and which of them a run can use.

use super::options::Options;
use super::peers::{DLPACK, PEERS, Peer};
use super::variants::{EXTRA, VARIANTS, Variant, agree, beside, is_shared};
use crate::names::{PairName, adapter_of, in_other_process, remote};
use crate::report::{Host, LeftOut};
use bridge_core::{Device, DeviceKind};
use bridge_frameworks::{Framework, Source};
use serde_json::{Value, json};

/// An adapter that the runner knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The adapter's name.
    pub name: &'static str,
    /// The library whose tensors it takes.
    pub library: Library,
    /// Whether it runs only where it is named: another way into a framework that runs anyway.
    pub on_request: bool,
}

/// A library whose tensors are Python objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// One that has an adapter.
    Framework(Framework),
    /// One that is known only by a protocol. Its tensors are sources only.
    Peer(Peer),
}

impl Library {
    /// Returns its name, which is that of the module of its subject.
    pub fn name(self) -> &'static str {
        match self {
            Self::Framework(framework) => framework.name(),
            Self::Peer(peer) => peer.name,
        }
    }

    fn module(self) -> &'static str {
        match self {
            Self::Framework(framework) => framework.module(),
            Self::Peer(peer) => peer.module,
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Framework(framework) => framework.source(),
            Self::Peer(peer) => Source::Distributions(peer.distributions),
        }
    }

    fn devices(self) -> &'static [DeviceKind] {
        match self {
            Self::Framework(framework) => framework.devices(),
            Self::Peer(peer) => peer.devices,
        }
    }
}

/// PyTorch without the C exchange API, as versions before 2.10 are.
pub const TORCH_CAPSULES: Known =
    Known { name: "torch-capsules", library: Library::Framework(Framework::Torch), on_request: true };

/// NumPy without its C API, as with a version whose C API is not as expected.
pub const NUMPY_INTERFACE: Known =
    Known { name: "numpy-interface", library: Library::Framework(Framework::NumPy), on_request: true };

/// The suite's producer of DLPack with capsules that have neither a version nor flags, as those before DLPack 1.0.
const DLPACK_LEGACY: &str = "dlpack-legacy";

/// Returns every adapter: one for each framework, the further ones, and one for each library that is known only by a
/// protocol.
pub fn known() -> impl Iterator<Item = Known> {
    let plain = |library: Library| Known { name: library.name(), library, on_request: false };
    let frameworks = Framework::ALL.iter().copied().map(Library::Framework).map(plain);
    let peers = PEERS.iter().copied().map(Library::Peer).map(plain);
    let legacy = PEERS.iter().copied().filter(|peer| peer.name == DLPACK).map(Library::Peer);
    let legacy = legacy.map(|library| Known { name: DLPACK_LEGACY, library, on_request: true });
    frameworks.chain([TORCH_CAPSULES, NUMPY_INTERFACE]).chain(peers).chain(legacy)
}

impl Known {
    /// Returns the adapter with this name, which may be that of a variant.
    pub fn named(name: &str) -> Option<Self> {
        known().find(|known| known.name == adapter_of(name))
    }

    /// Returns the name, and where the framework is found: `module` and `distributions`, or the `variable` with its
    /// folder.
    pub fn description(self) -> Value {
        let Self { name, library, .. } = self;
        match library.source() {
            Source::Distributions(all) => json!({"name": name, "module": library.module(), "distributions": all}),
            Source::Folder(variable) => json!({"name": name, "variable": variable}),
        }
    }

    /// Returns why it cannot run on this device, if it cannot.
    fn left_out(self, device: Device, host: &Host) -> Option<String> {
        if !self.library.devices().contains(&device.kind) {
            return Some(match device {
                Device::CPU if host.gpus.is_empty() => "no CUDA device".into(),
                Device::CPU => "its tensors are on CUDA devices only, and this run is on the cpu".into(),
                _ => "host memory only".into(),
            });
        }
        if host.versions.contains_key(self.name) {
            return host.host_only.get(self.name).filter(|_| device.kind == DeviceKind::CUDA).cloned();
        }
        Some(match (host.refused.get(self.name), self.library.source()) {
            (Some(reason), _) => reason.clone(),
            (None, Source::Distributions(all)) => format!("not installed: pip install {}", all[0]),
            (None, Source::Folder(variable)) => format!(
                "not installed: cargo xtask setup fetches it, or set {variable} to the folder tensorflow_core of a \
                 TensorFlow 1.15 wheel"
            ),
        })
    }
}

/// Returns the pairs that run, and the adapters that do not.
///
/// # Errors
///
/// An adapter that does not exist was named.
pub fn select(options: &Options, device: Device, host: &Host) -> Result<(Vec<PairName>, Vec<LeftOut>), String> {
    let of_pairs = options.pairs.iter().flat_map(|pair| [&pair.from, &pair.to]);
    let of_pairs = of_pairs.map(|name| in_other_process(name).unwrap_or(name));
    let named: Vec<&str> = options.adapters.iter().map(String::as_str).chain(of_pairs).collect();
    let here = known().flat_map(with_variants).collect::<Vec<_>>();
    if let Some(unknown) = named.iter().find(|name| !here.iter().any(|here| here == *name)) {
        return Err(format!("there is no adapter {unknown:?}: there are {}", here.join(", ")));
    }
    if let Some(pair) = options.pairs.iter().find(|pair| is_peer(&pair.to)) {
        let (from, to) = (&pair.from, &pair.to);
        return Err(format!("{to} is known only by its protocol, which makes it a source: run {to}:{from}"));
    }
    let is_named = |name: &str| named.contains(&name);
    // Across processes the other one has the frameworks as they are.
    let is_extra = |name: &str| named.is_empty() && !options.across_processes && EXTRA.contains(&name);
    let wanted = known().flat_map(|known| with_variants(known).map(move |name| (known, name)));
    let wanted = wanted.filter(|(known, name)| {
        let by_variants = options.variants && (named.is_empty() || is_named(known.name));
        let plain = named.is_empty() && name == known.name;
        is_named(name) || is_extra(name) || !known.on_request && (plain || by_variants)
    });
    let (mut fit, mut left_out) = (Vec::new(), Vec::new());
    for (known, name) in wanted {
        let host_memory = device.kind == DeviceKind::CPU && name != known.name && !EXTRA.contains(&name.as_str());
        let reason = host_memory.then(|| "a variant is about memory of a CUDA device".into());
        match known.left_out(device, host).or(reason) {
            // The plain adapter says why.
            Some(_) if is_extra(&name) => (),
            Some(reason) => left_out.push(LeftOut { adapter: name, reason }),
            None => fit.push(name),
        }
    }
    let both = fit.iter().flat_map(|from| fit.iter().map(|to| (from.clone(), to.clone())));
    let all = both.flat_map(|(from, to)| {
        let one = PairName { from: from.clone(), to: to.clone() };
        // The other process has the frameworks as they are, and the suite's tensors go there and back in place.
        let plain = |name: &String| Known::named(name).is_some_and(|known| known.name == name);
        let shared = is_shared(&from) && is_shared(&to);
        let there = (shared && plain(&to)).then(|| PairName { from: from.clone(), to: remote(&to) });
        let back = (shared && plain(&from)).then(|| PairName { from: remote(&from), to: to.clone() });
        let across = there.into_iter().chain(back).filter(|_| options.across_processes || !options.pairs.is_empty());
        (!options.across_processes).then_some(one).into_iter().chain(across)
    });
    let chosen = |pair: &PairName| {
        let (from, to) = (pair.from.as_str(), pair.to.as_str());
        // All variants with all others would be too many pairs: each runs with itself and the plain frameworks.
        let plain = |name| is_named(name) || adapter_of(name) == name || in_other_process(name).is_some();
        let few = from == to || plain(from) || plain(to);
        let extra = !is_extra(from) || to == beside(device);
        let extra = extra && (!is_extra(to) || from == beside(device));
        // A library that no adapter knows is a source in this process.
        let here = in_other_process(from).or(in_other_process(to)).is_none();
        let taken = !is_peer(to) && (here || !is_peer(from));
        let is_chosen = options.pairs.is_empty() || options.pairs.iter().any(|named| options.chooses(pair, named));
        agree(from, to) && few && extra && taken && is_chosen
    };
    Ok((all.filter(chosen).collect(), left_out))
}

/// Returns why a pair that is named does not run, although both of its adapters do.
pub fn obstacle(pair: &PairName) -> &'static str {
    let others = [&pair.from, &pair.to].map(|name| in_other_process(name).is_some());
    if others == [true, true] {
        "one of two frameworks is in another process, not both"
    } else if is_peer(in_other_process(&pair.from).unwrap_or(&pair.from)) {
        "a library that is known only by its protocol is a source in the process of its target"
    } else if !agree(&pair.from, &pair.to) {
        "a framework has one allocator in a process"
    } else {
        "in another process is a framework with its own allocator, and with it one whose memory can be opened there"
    }
}

/// Returns whether a name is that of a library that no adapter knows.
fn is_peer(name: &str) -> bool {
    Known::named(name).is_some_and(|known| matches!(known.library, Library::Peer(_)))
}

/// Returns the names of every adapter, here and in another process, and of its variants.
pub fn names() -> Vec<String> {
    known().flat_map(|known| with_variants(known).chain([remote(known.name)])).collect()
}

/// Returns the name of an adapter, and those of its variants.
fn with_variants(known: Known) -> impl Iterator<Item = String> {
    let variants = VARIANTS.iter().filter(move |variant| variant.adapter() == known.name).map(Variant::full_name);
    std::iter::once(known.name.to_owned()).chain(variants)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn host(installed: &[&str], gpus: &[&str]) -> Host {
        let versions = installed.iter().map(|name| ((*name).into(), "1.0".into())).collect();
        Host { versions, gpus: gpus.iter().map(|name| (*name).into()).collect(), ..Host::default() }
    }

    /// The names of the pairs that run, and `adapter: reason` for what is left out.
    fn select_names(line: &str, device: Device, host: &Host) -> Result<(Vec<String>, Vec<String>), String> {
        let argv: Vec<String> = line.split_whitespace().map(String::from).collect();
        let (pairs, left_out) = select(&Options::read(&argv).unwrap(), device, host)?;
        let left_out = left_out.iter().map(|left| format!("{}: {}", left.adapter, left.reason));
        Ok((pairs.iter().map(PairName::to_string).collect(), left_out.collect()))
    }

    #[test]
    fn descriptions_say_where_a_framework_is_found() {
        let described = |name| Known::named(name).unwrap().description();
        assert_eq!(described("torch-capsules")["module"], "torch");
        assert_eq!(described("numpy-interface")["module"], "numpy");
        assert_eq!(described("cupy+async")["distributions"][0], "cupy-cuda13x");
        assert_eq!(described("tensorflow1")["variable"], "TRUEBRIDGE_TENSORFLOW1");
        assert_eq!(Known::named("mxnet"), None);
    }

    #[test]
    fn a_library_that_no_adapter_knows_is_a_source_in_this_process() {
        assert_eq!(Known::named("warp").unwrap().description()["distributions"][0], "warp-lang");
        let host = host(&["torch", "warp", "pyarrow"], &[]);
        let (pairs, left_out) = select_names("", Device::CPU, &host).unwrap();
        assert_eq!(pairs, ["torch:torch", "warp:torch", "pyarrow:torch"]);
        assert!(left_out.contains(&"numba: no CUDA device".into()), "{left_out:?}");
        let across = select_names("--across-processes", Device::CPU, &host).unwrap().0;
        assert_eq!(across, ["torch:torch+remote", "torch+remote:torch"]);
        let refused = select_names("--pairs torch:warp", Device::CPU, &host).unwrap_err();
        assert!(refused.contains("run warp:torch"), "{refused}");
        let other = select_names("--adapters pyarrow", Device::cuda(0), &host).unwrap().1;
        assert_eq!(other, ["pyarrow: host memory only"]);
    }

    #[test]
    fn on_the_cpu_cupy_is_left_out() {
        let (pairs, left_out) = select_names("", Device::CPU, &host(&["torch", "numpy", "cupy"], &[])).unwrap();
        let extra = ["torch+package:numpy", "numpy:torch+package"];
        assert_eq!(pairs, ["torch:torch", "torch:numpy", extra[0], "numpy:torch", extra[1], "numpy:numpy"]);
        assert_eq!(left_out[..2], ["cupy: no CUDA device", "jax: not installed: pip install jax"]);
    }

    #[test]
    fn what_every_run_has_beside_the_plain_adapters_goes_beside_one_of_them() {
        let host = host(&["torch", "torch-capsules", "numpy", "jax"], &[]);
        let (pairs, _) = select_names("", Device::CPU, &host).unwrap();
        let extra: Vec<_> = pairs.iter().filter(|pair| EXTRA.iter().any(|extra| pair.contains(extra))).collect();
        let names = ["torch+package", "jax+x32", "torch-capsules"];
        let both = names.iter().flat_map(|name| [format!("numpy:{name}"), format!("{name}:numpy")]);
        assert_eq!(extra.into_iter().cloned().collect::<BTreeSet<_>>(), both.collect());
        let named = select_names("--pairs torch:jax+x32,torch-capsules:torch", Device::CPU, &host).unwrap().0;
        assert_eq!(named, ["torch:jax+x32", "torch-capsules:torch"]);
        assert!(select_names("--adapters torch,numpy", Device::CPU, &host).unwrap().0.len() == 4);
    }

    #[test]
    fn what_is_not_installed_names_its_package() {
        let host = host(&["torch", "tensorflow"], &["GPU"]);
        let (pairs, left_out) = select_names("", Device::cuda(0), &host).unwrap();
        assert_eq!(pairs, ["torch:torch", "torch:tensorflow", "tensorflow:torch", "tensorflow:tensorflow"]);
        assert_eq!(left_out[..2], ["cupy: not installed: pip install cupy-cuda13x", "numpy: host memory only"]);
    }

    #[test]
    fn what_is_no_package_says_where_it_is_looked_for() {
        let mut host = host(&["numpy"], &[]);
        let reason = |host: &Host| select_names("--adapters tensorflow1,numpy", Device::CPU, host).unwrap().1;
        assert!(reason(&host)[0].contains("TRUEBRIDGE_TENSORFLOW1"));
        host.refused.insert("tensorflow1".into(), "this is TensorFlow 1.14.0".into());
        assert_eq!(reason(&host), ["tensorflow1: this is TensorFlow 1.14.0"]);
        host.versions.insert("tensorflow1".into(), "1.15.5".into());
        host.host_only.insert("tensorflow1".into(), "a build without CUDA".into());
        assert!(reason(&host).is_empty());
        let on_cuda = select_names("--adapters tensorflow1", Device::cuda(0), &host).unwrap().1;
        assert_eq!(on_cuda, ["tensorflow1: a build without CUDA"]);
    }

    #[test]
    fn variants_go_beside_themselves_and_the_plain_frameworks() {
        let host = host(&["torch", "cupy"], &["GPU"]);
        let (pairs, _) = select_names("--variants --adapters torch,cupy", Device::cuda(0), &host).unwrap();
        let has = |pair: &str| pairs.iter().any(|name| name == pair);
        assert!(has("torch:cupy") && has("torch+async:cupy") && has("torch+async:torch+async"), "{pairs:?}");
        assert!(has("cupy:torch+pluggable") && has("torch:cupy+managed"), "{pairs:?}");
        assert!(!has("torch+async:torch") && !has("torch+async:torch+uncached"), "{pairs:?}");
        assert!(!has("torch+async:cupy+managed") && !pairs.iter().any(|name| name.contains("tensorflow")), "{pairs:?}");
        let (pairs, _) = select_names("--pairs torch+async:cupy+managed", Device::cuda(0), &host).unwrap();
        assert_eq!(pairs, ["torch+async:cupy+managed"]);
        assert!(select_names("--adapters torch+bfc", Device::cuda(0), &host).is_err());
    }

    #[test]
    fn variants_are_left_out_on_the_cpu() {
        let host = host(&["torch", "numpy"], &[]);
        let (pairs, left_out) = select_names("--variants --adapters torch,numpy", Device::CPU, &host).unwrap();
        assert!(pairs.len() >= 4 && pairs.iter().all(|pair| !pair.contains("async")), "{pairs:?}");
        assert!(left_out.iter().any(|left| left.starts_with("torch+async: a variant is about")), "{left_out:?}");
    }

    #[test]
    fn across_processes_one_of_two_is_in_another() {
        let host = host(&["torch", "numpy"], &[]);
        let select = |line: &str| select_names(line, Device::CPU, &host);
        let (pairs, _) = select("--across-processes --adapters torch,numpy").unwrap();
        assert_eq!(pairs.len(), 8);
        assert_eq!(
            pairs[..4],
            ["torch:torch+remote", "torch+remote:torch", "torch:numpy+remote", "torch+remote:numpy"]
        );
        assert_eq!(select("--pairs numpy+remote:torch").unwrap().0, ["numpy+remote:torch"]);
        let both = ["torch+remote:numpy", "torch:numpy+remote"];
        let mut named = select("--across-processes --pairs torch:numpy").unwrap().0;
        named.sort();
        assert_eq!(named, both);
        assert_eq!(select("--across-processes --pairs torch:numpy+remote").unwrap().0, both[1..]);
        assert!(select("--pairs mxnet+remote:torch").is_err() && select("--adapters torch+remote").is_err());
        assert!(names().contains(&"numpy+remote".into()));
    }

    #[test]
    fn pairs_are_taken_as_named() {
        let host = host(&["torch", "numpy"], &[]);
        assert_eq!(select_names("--pairs numpy:torch", Device::CPU, &host).unwrap().0, ["numpy:torch"]);
        assert_eq!(select_names("--adapters torch", Device::CPU, &host).unwrap().0, ["torch:torch"]);
        assert!(select_names("--pairs torch:mxnet", Device::CPU, &host).unwrap_err().contains("mxnet"));
    }
}
