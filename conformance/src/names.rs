//! Names in options and reports. The name of an adapter may end with a mark and a variant, or with the mark and the
//! word that puts the adapter into another process.

use std::str::FromStr;

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

/// An ordered pair of adapters, `from:to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairName {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
}

impl FromStr for PairName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            Some((from, to)) if !from.is_empty() && !to.is_empty() => Ok(Self { from: from.into(), to: to.into() }),
            _ => Err("say two adapters, such as torch:cupy".into()),
        }
    }
}

impl PairName {
    /// Returns the pair as it is shown, `from → to`.
    pub fn arrow(&self) -> String {
        format!("{} → {}", self.from, self.to)
    }
}

impl std::fmt::Display for PairName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.from, self.to)
    }
}
