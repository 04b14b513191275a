//! Where data sets are looked for: `--data`, `TAPER_DATA`, the user's cache, the embedded default, the hub.
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::files::{Source, is_file};
use super::{DataError, FileRecord, hub};

/// Where to look, and whether the network may be used. Plain data: [`from_env`](Self::from_env) reads the environment.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The directory the user named (`--data`).
    pub dir: Option<PathBuf>,
    /// `TAPER_DATA`.
    pub env_dir: Option<PathBuf>,
    /// Downloads, digests and vocabularies live here: `TAPER_CACHE`, else `$XDG_CACHE_HOME/taper`, else `~/.cache/taper`.
    pub cache: Option<PathBuf>,
    /// Never touch the network.
    pub offline: bool,
    /// Compute content digests even where they are remembered (`taper data check`).
    pub fresh: bool,
    /// Write nothing: what could be kept in the cache is not.
    pub read_only: bool,
    /// How to reach the hub.
    pub hub: hub::Access,
}

impl Search {
    /// The search of the command line: `dir` is `--data`, `offline` is `--offline`; the rest comes from `TAPER_DATA`,
    /// `TAPER_CACHE`, `XDG_CACHE_HOME`, `TAPER_OFFLINE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`.
    pub fn from_env(dir: Option<PathBuf>, offline: bool) -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache = path("TAPER_CACHE")
            .or_else(|| path("XDG_CACHE_HOME").map(|p| p.join("taper")))
            .or_else(|| std::env::home_dir().map(|p| p.join(".cache").join("taper")));
        let offline = offline || ["TAPER_OFFLINE", "HF_HUB_OFFLINE"].into_iter().any(is_set);
        let (fresh, read_only, hub) = (false, false, hub::Access::from_env());
        Self { dir, env_dir: path("TAPER_DATA"), cache, offline, fresh, read_only, hub }
    }

    /// The same search for a look that leaves nothing behind: no download and nothing new in the cache.
    pub fn looking_only(self) -> Self {
        Self { offline: true, read_only: true, ..self }
    }

    /// The cache, if it may be written.
    pub(crate) fn keeps(&self) -> Option<&PathBuf> {
        self.cache.as_ref().filter(|_| !self.read_only)
    }

    /// A path of the user's own files: one that is not absolute is under the directory the user named, when it is there.
    pub fn resolve(&self, path: &Path) -> PathBuf {
        let mut roots = self.dir.iter().chain(&self.env_dir).map(|root| root.join(path));
        roots.find(|path| path.exists()).unwrap_or_else(|| path.to_path_buf())
    }

    /// The directory downloads are placed in, with the layout of a `--data` directory.
    pub fn downloads(&self) -> Option<PathBuf> {
        self.cache.as_ref().map(|c| c.join("data"))
    }
}

/// Whether an environment variable is a yes, as the hub's own tools read it.
fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|v| matches!(v.to_lowercase().as_str(), "1" | "on" | "yes" | "true"))
}

/// How the files of a set are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// IDX: train images, train labels, test images, test labels.
    Idx,
    /// Parquet as on the hub: one file a split.
    Parquet,
    /// CIFAR's binary records: the train files, then the test file.
    CifarBinary,
    /// CIFAR's `.tar.gz` of binary records.
    CifarArchive,
    /// Text, one sentence a line: one file a split.
    Lines,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idx => "IDX files",
            Self::Parquet => "parquet files",
            Self::CifarBinary => "CIFAR's binary files",
            Self::CifarArchive => "CIFAR's archive",
            Self::Lines => "lines of text",
        })
    }
}

/// A set of files that together hold a data set.
#[derive(Debug)]
pub struct Layout {
    /// Their encoding.
    pub form: Form,
    /// Each needed file, as the names it may have.
    pub files: &'static [&'static [&'static str]],
}

/// What is known of a data set that lives in files.
#[derive(Debug)]
pub struct Spec {
    /// The data set.
    pub name: &'static str,
    /// The layouts understood, the preferred first.
    pub layouts: &'static [Layout],
    /// Where the hub has it.
    pub hub: hub::Repo,
    /// The files compiled in, in the order of the first layout; empty when there are none.
    pub embedded: &'static [(&'static str, &'static [u8])],
}

/// The files of a data set, found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where: a directory, `embedded`, or the hub's address.
    pub place: String,
    /// Their encoding.
    pub form: Form,
    /// The files, in the layout's order.
    pub files: Vec<Source>,
    /// What the hub said of the files when they were downloaded.
    pub download: Option<hub::Record>,
}

/// Finds a data set. `revision` overrides the hub revision; what was downloaded at another one, or is compiled in, does not
/// stand for it. A directory that the user named is taken as it is.
pub fn find(spec: &Spec, search: &Search, revision: Option<&str>) -> Result<Found, DataError> {
    let mut looked = Vec::new();
    for (label, root) in [("--data", &search.dir), ("TAPER_DATA", &search.env_dir)] {
        match root {
            Some(root) => match find_in(spec, root)? {
                Ok(found) => return Ok(found),
                Err(lacks) => looked.push(format!("{label} {}: {lacks}", root.display())),
            },
            None => looked.push(format!("{label}: not set")),
        }
    }
    match &search.downloads() {
        Some(root) => match find_in(spec, root)? {
            Ok(found) => {
                let found = found.with_record(&root.join(spec.name))?;
                match revision.filter(|wanted| !found.is_of(wanted)) {
                    None => return Ok(found),
                    Some(wanted) => {
                        let holds = found.download.map_or("files of no known revision".into(), |record| {
                            format!("revision {} (commit {})", record.revision, record.commit)
                        });
                        looked.push(format!("cache {}: holds {holds}, not {wanted}", root.display()));
                    }
                }
            }
            Err(lacks) => looked.push(format!("cache {}: {lacks}", root.display())),
        },
        None => looked.push("cache: no TAPER_CACHE, XDG_CACHE_HOME or home directory".into()),
    }
    let other = revision.filter(|wanted| *wanted != spec.hub.revision);
    if let Some(wanted) = other.filter(|_| !spec.embedded.is_empty()) {
        looked.push(format!("compiled in: is revision {}, not {wanted}", spec.hub.revision));
    } else if !spec.embedded.is_empty() {
        let source =
            |(name, bytes): &(&str, &'static [u8])| Source::Embedded(Path::new("embedded").join(name), bytes);
        let (form, files) = (spec.layouts[0].form, spec.embedded.iter().map(source).collect());
        return Ok(Found { place: "embedded".into(), form, files, download: None });
    }
    let forbidden = match (search.offline, search.hub.can_fetch()) {
        (true, _) => Some("offline"),
        (false, false) => Some("this build lacks the feature `hub`"),
        (false, true) => None,
    };
    if let Some(reason) = forbidden {
        looked.push(format!("hub {}: not asked, because {reason}", spec.hub.id));
        return Err(missing(spec, looked, revision));
    }
    let Some(root) = search.downloads() else { return Err(missing(spec, looked, revision)) };
    hub::fetch(spec, &root, &search.hub, revision)?;
    match find_in(spec, &root)? {
        Ok(found) => found.with_record(&root.join(spec.name)),
        Err(lacks) => {
            looked.push(format!("hub {}: fetched, but {lacks}", spec.hub.id));
            Err(missing(spec, looked, revision))
        }
    }
}

/// The files of a set under `root/<name>` or `root` itself; otherwise what is lacking.
pub fn find_in(spec: &Spec, root: &Path) -> Result<Result<Found, String>, DataError> {
    if !root.exists() {
        return Ok(Err("no such directory".into()));
    }
    let mut lacks = None;
    for base in [root.join(spec.name), root.to_path_buf()] {
        for layout in spec.layouts {
            let mut files = Vec::new();
            let mut absent = Vec::new();
            for names in layout.files {
                match first_file(&base, names)? {
                    Some(path) => files.push(Source::Disk(path)),
                    None => absent.push(names[0]),
                }
            }
            if absent.is_empty() {
                let place = base.display().to_string();
                return Ok(Ok(Found { place, form: layout.form, files, download: None }));
            }
            if !files.is_empty() {
                lacks.get_or_insert_with(|| format!("incomplete, lacks {}", absent.join(", ")));
            }
        }
    }
    Ok(Err(lacks.unwrap_or_else(|| format!("no {0}/ with files of {0}", spec.name))))
}

fn first_file(base: &Path, names: &[&str]) -> Result<Option<PathBuf>, DataError> {
    for name in names {
        let path = base.join(name);
        if is_file(&path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

impl Found {
    /// Whether this was downloaded at a revision, named or by its commit.
    fn is_of(&self, revision: &str) -> bool {
        self.download.as_ref().is_some_and(|record| record.revision == revision || record.commit == revision)
    }

    /// Adds what was recorded when the files in `dir` were downloaded.
    fn with_record(mut self, dir: &Path) -> Result<Self, DataError> {
        self.download = hub::Record::read(dir)?;
        Ok(self)
    }
}

fn missing(spec: &Spec, looked: Vec<String>, revision: Option<&str>) -> DataError {
    let one_of: Vec<String> = spec
        .layouts
        .iter()
        .map(|layout| {
            let names: Vec<&str> = layout.files.iter().map(|names| names[0]).collect();
            format!("  {}/{{{}}}", spec.name, names.join(","))
        })
        .collect();
    let supply = format!(
        "supply it with `{} data fetch {}{}` where there is a network, or put one of these under a directory and name it \
         with --data or TAPER_DATA:\n{}",
        taper_files::program(),
        spec.name,
        revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default(),
        one_of.join("\n")
    );
    DataError::Missing { name: spec.name.into(), looked, supply }
}

impl Found {
    /// Hashes the files. One that changed since its download is an error.
    pub fn hash(&self, name: &str) -> Result<Vec<FileRecord>, DataError> {
        let hash = |file: &Source| {
            let (bytes, sha256) = file.sha256()?;
            let recorded = self.download.as_ref().and_then(|d| {
                d.files.iter().find(|(path, _)| file.path().ends_with(path)).map(|(_, recorded)| recorded)
            });
            if let Some(recorded) = recorded.filter(|r| r.sha256 != sha256) {
                let (path, expected) = (file.path().to_path_buf(), recorded.sha256.clone());
                return Err(DataError::Damaged { name: name.into(), path, expected, found: sha256 });
            }
            Ok(FileRecord { path: file.path().display().to_string(), bytes, sha256 })
        };
        self.files.par_iter().map(hash).collect()
    }
}
