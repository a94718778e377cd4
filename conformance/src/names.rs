//! Names in options and reports. The name of an adapter may end with a mark and a variant, or with the mark and the
//! word that puts the adapter into another process.

/// Stands between the name of an adapter and that of a variant.
pub(crate) const MARK: char = '+';

/// Stands in a report where a property would, for a pair that no worker could judge.
pub(crate) const WORKER: &str = "worker";

/// Returns the adapter's name, without that of a variant.
pub(crate) fn adapter_of(name: &str) -> &str {
    name.split_once(MARK).map_or(name, |(adapter, _)| adapter)
}

/// Returns the name of the adapter in another process.
pub(crate) fn remote(name: &str) -> String {
    format!("{name}{MARK}remote")
}

/// Returns the adapter's name in the other process, if it is in another.
pub(crate) fn in_other_process(name: &str) -> Option<&str> {
    name.strip_suffix("remote")?.strip_suffix(MARK)
}
