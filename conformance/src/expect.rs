//! Failures that are expected, and cases that failed once: both are data.

use crate::properties::property;
use crate::{Case, PairReport, Verdict};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A failure that is expected, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
    /// The property.
    pub property: String,
    /// A device or a kind of device, such as `cpu` or `cuda`; without one, every device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Why the framework cannot do it.
    pub reason: String,
}

impl Expectation {
    fn is_about(&self, report: &PairReport) -> bool {
        let kind = report.device.split(':').next();
        let device = self.device.as_deref();
        (&self.from, &self.to) == (&report.from, &report.to)
            && (device.is_none() || device == kind || device == Some(&report.device))
    }
}

/// Turns failures that are expected into [`Verdict::Expected`], and expected failures that passed into failures.
pub fn apply(expectations: &[Expectation], report: &mut PairReport) {
    for expectation in
        expectations.iter().filter(|expectation| expectation.is_about(report)).cloned().collect::<Vec<_>>()
    {
        let judged = report.properties.iter_mut().find(|property| property.name == expectation.property);
        let Some(judged) = judged else { continue };
        let Expectation { reason, .. } = expectation;
        (judged.verdict, judged.reason) = match (judged.verdict, judged.reason.take()) {
            (Verdict::Failed | Verdict::Crashed, Some(seen)) => (Verdict::Expected, Some(format!("{reason} ({seen})"))),
            (Verdict::Failed | Verdict::Crashed, None) => (Verdict::Expected, Some(reason)),
            (Verdict::Passed, _) => {
                let text = format!("expected to fail ({reason}), but it passed: remove the expectation");
                (Verdict::Failed, Some(text))
            }
            other => other,
        };
    }
}

/// Returns one line for each expectation that matches nothing: its property does not exist, an adapter is not one of
/// `adapters`, or the property has no meaning for a pair that ran.
pub fn stale(expectations: &[Expectation], adapters: &[String], ran: &[PairReport]) -> Vec<String> {
    let unknown = |name: &String| !adapters.contains(name);
    let why = |expectation: &Expectation| {
        if property(&expectation.property).is_none() {
            return Some(format!("there is no property {:?}", expectation.property));
        }
        if let Some(name) = [&expectation.from, &expectation.to].into_iter().find(|name| unknown(name)) {
            return Some(format!("there is no adapter {name:?}"));
        }
        if expectation.reason.trim().is_empty() {
            return Some("it has no reason".into());
        }
        let mut judged = ran.iter().filter(|report| expectation.is_about(report)).flat_map(|report| &report.properties);
        let idle = judged.any(|judged| judged.name == expectation.property && judged.verdict == Verdict::NotApplicable);
        idle.then(|| "the property has no meaning for this pair".into())
    };
    let line = |expectation: &Expectation| {
        let Expectation { from, to, property, .. } = expectation;
        why(expectation).map(|why| format!("the expectation for {from} → {to}, {property}, is stale: {why}"))
    };
    expectations.iter().filter_map(line).collect()
}

/// A shrunk case that failed once. Later runs replay it first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Regression {
    /// The source.
    pub from: String,
    /// The target.
    pub to: String,
    /// The property.
    pub property: String,
    /// The case.
    pub case: Case,
}

impl Regression {
    pub(crate) fn is_about(&self, report: &PairReport, property: &str) -> bool {
        (&self.from, &self.to) == (&report.from, &report.to) && self.property == property
    }

    /// Writes the case into `folder`. The same case always has the same file name.
    ///
    /// # Errors
    ///
    /// What the file system reports.
    pub fn write(&self, folder: &Path) -> io::Result<PathBuf> {
        let (name, text) = self.file()?;
        fs::create_dir_all(folder)?;
        let path = folder.join(name);
        fs::write(&path, text + "\n")?;
        Ok(path)
    }

    /// Removes the file that [`write`](Self::write) has made in `folder`. Returns its path, or `None` where there is none.
    #[cfg(feature = "runner")]
    pub(crate) fn remove(&self, folder: &Path) -> Option<PathBuf> {
        let path = folder.join(self.file().ok()?.0);
        fs::remove_file(&path).is_ok().then_some(path)
    }

    fn file(&self) -> io::Result<(String, String)> {
        let text = serde_json::to_string_pretty(self)?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Ok((format!("{}-{}-{}-{:08x}.json", self.from, self.to, self.property, hasher.finish() as u32), text))
    }

    /// Reads one case.
    ///
    /// # Errors
    ///
    /// What the file system reports, and [`io::ErrorKind::InvalidData`] for another content.
    pub fn read(path: &Path) -> io::Result<Self> {
        read(path)
    }

    /// Reads every case in `folder`, sorted by name, or none where there is no such folder.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub fn read_all(folder: &Path) -> io::Result<Vec<Self>> {
        if !folder.is_dir() {
            return Ok(Vec::new());
        }
        let paths: io::Result<Vec<_>> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
        let mut paths = paths?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        paths.iter().map(|path| read(path)).collect()
    }
}

/// Reads the expectations, a JSON list.
///
/// # Errors
///
/// What the file system reports, and [`io::ErrorKind::InvalidData`] for another content.
pub fn read_expectations(path: &Path) -> io::Result<Vec<Expectation>> {
    read(path)
}

fn read<R: DeserializeOwned>(path: &Path) -> io::Result<R> {
    let named = |kind, error: &dyn std::fmt::Display| io::Error::new(kind, format!("{}: {error}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| named(error.kind(), &error))?;
    serde_json::from_str(&text).map_err(|error| named(io::ErrorKind::InvalidData, &error))
}
