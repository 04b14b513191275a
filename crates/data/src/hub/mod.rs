//! The Hugging Face hub: where each set lives there, how to reach it, and what is remembered of a download.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::DataError;
use taper_files::{place, read_regular};

#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod meter;
#[cfg(feature = "hub")]
pub use fetch::fetch;

/// A data set on the hub.
#[derive(Debug)]
pub struct Repo {
    /// `owner/name`.
    pub id: &'static str,
    /// The revision to take unless the recipe names another.
    pub revision: &'static str,
    /// The files to take.
    pub files: &'static [&'static str],
}

/// How to reach the hub.
#[derive(Clone, Debug)]
pub struct Access {
    /// `HF_ENDPOINT`; `None` is the hub itself.
    pub endpoint: Option<String>,
    /// `HF_TOKEN`, or the token file of the hub's own tools when `None`.
    pub token: Option<Token>,
    /// Tries of a request or transfer before giving up.
    pub attempts: u32,
    /// The pause before the second try; it doubles each time.
    pub pause: Duration,
    /// A server that sends nothing for this long is given up for this try.
    pub stall: Duration,
    /// Show progress on stderr: a bar, or lines where it is no terminal.
    pub progress: bool,
    /// A program that downloads for a build that cannot: called as `<program> data fetch NAME --revision R`, it fills
    /// the cache. `cargo xtask` names itself in `TAPER_FETCH`.
    pub program: Option<PathBuf>,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            endpoint: None,
            token: None,
            attempts: 5,
            pause: Duration::from_millis(500),
            stall: Duration::from_secs(30),
            progress: false,
            program: None,
        }
    }
}

impl Access {
    /// `HF_ENDPOINT`, the token where the hub's own tools keep it (`HF_TOKEN`, the file `HF_TOKEN_PATH`, the file
    /// `token` in `HF_HOME`), the program `TAPER_FETCH`, and a progress bar.
    pub fn from_env() -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let home = || {
            var("HF_HOME").map(PathBuf::from).or(std::env::home_dir().map(|h| h.join(".cache/huggingface")))
        };
        let file = || var("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| home().map(|h| h.join("token")));
        let stored = || file().and_then(|path| std::fs::read_to_string(path).ok());
        let token = var("HF_TOKEN").or_else(stored).map(|t| t.trim().to_string()).filter(|t| !t.is_empty());
        let program = var("TAPER_FETCH").map(PathBuf::from);
        Self {
            endpoint: var("HF_ENDPOINT"),
            token: token.map(Token),
            progress: true,
            program,
            ..Self::default()
        }
    }

    /// Whether anything can be downloaded at all.
    pub fn can_fetch(&self) -> bool {
        cfg!(feature = "hub") || self.program.is_some()
    }

    /// A message without the token, should a server have echoed it.
    #[cfg(feature = "hub")]
    fn scrub(&self, message: String) -> String {
        match &self.token {
            Some(token) if !token.0.is_empty() => message.replace(&token.0, "***"),
            _ => message,
        }
    }
}

/// A secret: it is sent to the hub and shown to nobody.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(***)")
    }
}

/// What is remembered of a download, beside its files, in `download.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// `owner/name`.
    pub repo: String,
    /// The revision asked for.
    pub revision: String,
    /// The commit all files are from.
    pub commit: String,
    /// Each file's length and hash when it arrived.
    pub files: BTreeMap<String, RecordedFile>,
}

/// A downloaded file as it arrived.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedFile {
    /// Its length.
    pub bytes: u64,
    /// Its sha256.
    pub sha256: String,
    /// The hub's own sha256 (its LFS etag) was the same; `false` where the hub gave none.
    pub confirmed: bool,
}

impl Record {
    const NAME: &str = "download.json";

    /// The record of the download in `dir`; `None` when there is none.
    pub fn read(dir: &Path) -> Result<Option<Self>, DataError> {
        let path = dir.join(Self::NAME);
        // A record names a few files.
        match read_regular(&path, 1 << 20) {
            Ok(bytes) => {
                let record =
                    serde_json::from_slice(&bytes).map_err(|e| DataError::format(&path, e.to_string()))?;
                Ok(Some(record))
            }
            Err(e) if e.source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes the record into `dir`.
    pub fn write(&self, dir: &Path) -> Result<(), DataError> {
        let path = dir.join(Self::NAME);
        let json = serde_json::to_vec_pretty(self).map_err(|e| DataError::format(&path, e.to_string()))?;
        Ok(place(&path, &json)?)
    }
}

/// Has the files of a set fetched into `root/<name>` by [`Access::program`]: this build has no downloader of its own.
#[cfg(not(feature = "hub"))]
pub fn fetch(
    spec: &super::Spec,
    root: &Path,
    access: &Access,
    revision: Option<&str>,
) -> Result<Record, DataError> {
    use std::process::{Command, Stdio};
    let failed = |message: String| DataError::Hub { url: spec.hub.id.into(), message };
    let Some(program) = &access.program else {
        let advice = match taper_files::program() {
            "taper" => taper_files::built_with("hub"),
            program => format!("`{program} data fetch {}`", spec.name),
        };
        let message =
            format!("this build cannot download (it lacks the feature `hub`): {advice} builds one that can");
        return Err(failed(message));
    };
    let mut command = Command::new(program);
    command.args(["data", "fetch", spec.name, "--revision", revision.unwrap_or(spec.hub.revision)]);
    // Its report is for whoever calls it by name; progress and errors go to stderr.
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(Record::read(&root.join(spec.name))?.unwrap_or_default()),
        Ok(status) => Err(failed(format!("{} data fetch {}: {status}", program.display(), spec.name))),
        Err(e) => Err(failed(format!("{}: {e}", program.display()))),
    }
}
