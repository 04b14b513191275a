//! Downloading from the hub.
//!
//! What `hf-hub` does: the client (endpoint, token, agent), the revision lookup, and the bytes themselves through its
//! ranged stream, with authentication, redirects and Xet storage. What it does not do (1.0), and is done here:
//!
//! - the sha256: `get_file_metadata` follows the redirect to the storage server and loses the hub's headers, and the
//!   tree listing drops the LFS hash, so one HEAD request that does not follow redirects reads `X-Linked-Etag`,
//!   `X-Linked-Size` and `X-Repo-Commit`;
//! - continuing a partial file, the check of what arrived, a time-out on silence, retries of a broken transfer;
//! - one lock a set, so that two processes do not fetch the same files, and placement by rename.
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use hf_hub::{HFClient, HFError, HFRepository, RepoTypeDataset};
use reqwest::StatusCode;

use super::meter::Meter;
use super::{Access, Record, RecordedFile};
use crate::{DataError, Spec};
use taper_files::sha256_file;

/// Fetches the files of a set into `root/<name>` and returns what is known of them. Files already there and intact are
/// not asked for again.
pub fn fetch(spec: &Spec, root: &Path, access: &Access, revision: Option<&str>) -> Result<Record, DataError> {
    let dir = root.join(spec.name);
    let io = |e| DataError::io(&dir, e);
    fs::create_dir_all(&dir).map_err(io)?;
    // Held until the end; a second process waits here and then finds everything in place.
    let lock = File::create(dir.join(".lock")).map_err(io)?;
    if lock.try_lock().is_err() {
        if access.progress {
            eprintln!("{}: another process is fetching it: waiting for that", spec.name);
        }
        lock.lock().map_err(io)?;
    }

    let wanted = revision.unwrap_or(spec.hub.revision);
    // An unreadable record is no record: the files are then checked against the hub again.
    let record = Record::read(&dir).ok().flatten().filter(|r| r.repo == spec.hub.id && r.revision == wanted);
    if let Some(record) = &record
        && spec.hub.files.iter().all(|file| record.holds(&dir, file))
    {
        return Ok(record.clone());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        let hub = Hub::new(spec, access)?;
        let commit = match record.as_ref().map(|r| &r.commit).filter(|c| is_commit(c)) {
            Some(commit) => commit.clone(),
            None => hub.commit(wanted).await?,
        };
        let (repo, revision) = (spec.hub.id.to_string(), wanted.to_string());
        let mut record = record.unwrap_or(Record { repo, revision, commit, files: Default::default() });
        for file in spec.hub.files {
            if !record.holds(&dir, file) {
                let arrived = hub.download(&record.commit, file, &dir.join(file)).await?;
                record.files.insert(file.to_string(), arrived);
                record.write(&dir)?;
            }
        }
        Ok(record)
    })
}

impl Record {
    /// Whether `file` is in `dir` as it arrived.
    fn holds(&self, dir: &Path, file: &str) -> bool {
        let found = sha256_file(&dir.join(file)).ok();
        self.files.get(file).zip(found).is_some_and(|(recorded, (_, sha256))| recorded.sha256 == sha256)
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// What the hub says of a file.
struct Head {
    bytes: u64,
    /// Its sha256, for files in large-file storage.
    sha256: Option<String>,
}

/// Why a try failed.
struct Failure {
    message: String,
    /// Another try may succeed.
    transient: bool,
}

struct Hub<'a> {
    access: &'a Access,
    id: &'static str,
    endpoint: String,
    repo: HFRepository<RepoTypeDataset>,
    /// Does not follow redirects.
    heads: reqwest::Client,
}

impl<'a> Hub<'a> {
    fn new(spec: &Spec, access: &'a Access) -> Result<Self, DataError> {
        let id = spec.hub.id;
        let failed = |message: String| DataError::Hub { url: id.into(), message: access.scrub(message) };
        // Retries are counted here, where bytes that arrived are kept.
        let mut builder = HFClient::builder().retry_max_attempts(0).cache_enabled(false);
        if let Some(endpoint) = &access.endpoint {
            builder = builder.endpoint(endpoint.as_str());
        }
        if let Some(token) = &access.token {
            builder = builder.token(token.0.as_str());
        }
        let client = builder.build().map_err(|e| failed(format!("expected a usable hub address: {e}")))?;
        let heads = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build();
        let heads = heads.map_err(|e| failed(e.to_string()))?;
        let (owner, name) = hf_hub::split_id(id);
        Ok(Self {
            access,
            id,
            endpoint: client.endpoint().to_string(),
            repo: client.dataset(owner, name),
            heads,
        })
    }

    /// The commit of a revision.
    async fn commit(&self, revision: &str) -> Result<String, DataError> {
        if is_commit(revision) {
            return Ok(revision.to_string());
        }
        let what = format!("revision {revision}");
        let info = self
            .tries(&what, async || self.repo.info().revision(revision).send().await.map_err(Failure::from));
        info.await?
            .sha
            .filter(|sha| is_commit(sha))
            .ok_or_else(|| self.error(&what, "the hub named no commit"))
    }

    /// Fetches one file to `path`.
    async fn download(&self, commit: &str, file: &str, path: &Path) -> Result<RecordedFile, DataError> {
        let head = self.tries(file, async || self.head(commit, file).await).await?;
        let part = PathBuf::from(format!("{}.part", path.display()));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|e| DataError::io(parent, e))?;
        }
        let resumed = fs::metadata(&part).is_ok_and(|m| m.len() > 0);
        let mut sha256 = self.transfer(commit, file, &head, &part).await?;
        if resumed && head.sha256.as_ref().is_some_and(|expected| *expected != sha256) {
            // What an earlier run left may be of another revision, or damaged: once more, from the start.
            remove(&part)?;
            sha256 = self.transfer(commit, file, &head, &part).await?;
        }
        if let Some(expected) = head.sha256.as_ref().filter(|expected| **expected != sha256) {
            remove(&part)?;
            let message = format!(
                "what arrived is not what the hub announced: expected sha256 {expected}, found {sha256}; it was not kept"
            );
            return Err(self.error(file, &message));
        }
        fs::rename(&part, path).map_err(|e| DataError::io(path, e))?;
        if let Some(parent) = path.parent() {
            // The rename is only durable once its directory is.
            File::open(parent).and_then(|d| d.sync_all()).map_err(|e| DataError::io(parent, e))?;
        }
        Ok(RecordedFile { bytes: head.bytes, confirmed: head.sha256.is_some(), sha256 })
    }

    /// What the hub says of a file, without following it to its storage.
    async fn head(&self, commit: &str, file: &str) -> Result<Head, Failure> {
        let mut url = format!("{}/datasets/{}/resolve/{commit}/{file}", self.endpoint, self.id);
        // The hub may redirect to a repository's present name, within itself.
        for _ in 0..5 {
            let mut request = self.heads.head(&url);
            if let Some(token) = &self.access.token {
                request = request.bearer_auth(&token.0);
            }
            let response = request.send().await.map_err(|e| Failure::from(HFError::from(e)))?;
            let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
            let (status, etag) = (response.status(), header("x-linked-etag"));
            match header("location") {
                Some(within) if status.is_redirection() && etag.is_none() && within.starts_with('/') => {
                    url = format!("{}{within}", self.endpoint);
                    continue;
                }
                _ if !status.is_success() && !status.is_redirection() => return Err(Failure::status(status)),
                _ => {}
            }
            let sha256 = etag.map(|e| e.trim_start_matches("W/").trim_matches('"').to_lowercase());
            let size = header("x-linked-size").or(header("content-length")).and_then(|s| s.parse().ok());
            let bytes = size.ok_or_else(|| Failure::lasting("the hub did not say how long the file is"))?;
            if let Some(other) = header("x-repo-commit").filter(|c| *c != commit) {
                return Err(Failure::lasting(format!(
                    "expected commit {commit}, the hub answered with {other}"
                )));
            }
            return Ok(Head { bytes, sha256: sha256.filter(|s| s.len() == 64) });
        }
        Err(Failure::lasting("the hub redirects in a circle"))
    }

    /// Brings `part` to its full length and returns its sha256. What is there already is kept and continued.
    async fn transfer(
        &self,
        commit: &str,
        file: &str,
        head: &Head,
        part: &Path,
    ) -> Result<String, DataError> {
        let meter = Meter::new(format!("{} {file}", self.id), head.bytes, self.access.progress);
        let mut without_progress = 0;
        loop {
            let io = |e| DataError::io(part, e);
            let mut out = OpenOptions::new().append(true).create(true).open(part).map_err(io)?;
            let mut have = out.metadata().map_err(io)?.len();
            if have > head.bytes {
                out.set_len(0).map_err(io)?;
                have = 0;
            }
            let before = have;
            meter.set(have);
            let failure = if have == head.bytes {
                None
            } else {
                self.stream(commit, file, head, &mut out, &mut have, &meter).await
            };
            out.sync_all().map_err(io)?;
            match failure {
                None => {
                    meter.finish();
                    return Ok(sha256_file(part)?.1);
                }
                Some(failure) => {
                    // A slow line that delivers may take as many tries as it needs.
                    without_progress = if have > before { 1 } else { without_progress + 1 };
                    if !failure.transient || without_progress >= self.access.attempts {
                        meter.abandon();
                        let kept = format!(
                            "{}; {have} of {} bytes are kept and will be continued",
                            failure.message, head.bytes
                        );
                        return Err(self.error(file, &kept));
                    }
                    tokio::time::sleep(self.pause(without_progress)).await;
                }
            }
        }
    }

    /// Appends what is missing of a file to `out`; `None` when it is complete.
    async fn stream(
        &self,
        commit: &str,
        file: &str,
        head: &Head,
        out: &mut File,
        have: &mut u64,
        meter: &Meter,
    ) -> Option<Failure> {
        let request =
            self.repo.download_file_stream().filename(file).revision(commit).range(*have..head.bytes).send();
        let (length, mut stream) = match self.in_time(request).await {
            Ok(answer) => answer,
            Err(failure) => return Some(failure),
        };
        if *have > 0 && length == Some(head.bytes) {
            // The server ignored the range and sends everything: what is here would be doubled.
            if let Err(e) = out.set_len(0) {
                return Some(Failure::lasting(e.to_string()));
            }
            *have = 0;
        }
        while *have < head.bytes {
            let next = async { Ok(stream.next().await) };
            let chunk = match self.in_time(next).await {
                Ok(Some(Ok(chunk))) => chunk,
                Ok(Some(Err(e))) => return Some(Failure { transient: true, ..Failure::from(e) }),
                Ok(None) => return Some(Failure::transient("the connection ended early")),
                Err(failure) => return Some(failure),
            };
            let room = usize::try_from(head.bytes - *have).unwrap_or(usize::MAX);
            if chunk.len() > room {
                return Some(Failure::lasting(format!(
                    "the server sent more than the announced {} bytes",
                    head.bytes
                )));
            }
            if let Err(e) = out.write_all(&chunk) {
                return Some(Failure::lasting(e.to_string()));
            }
            *have += chunk.len() as u64;
            meter.set(*have);
        }
        None
    }

    /// Repeats a request while its failures are transient.
    async fn tries<T>(
        &self,
        what: &str,
        request: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, DataError> {
        let mut tried = 1;
        loop {
            let answer = tokio::time::timeout(self.access.stall, request()).await;
            let failure = match answer.unwrap_or_else(|_| Err(self.silence())) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            if !failure.transient || tried >= self.access.attempts {
                return Err(self.error(what, &failure.message));
            }
            tokio::time::sleep(self.pause(tried)).await;
            tried += 1;
        }
    }

    async fn in_time<T>(&self, request: impl Future<Output = Result<T, HFError>>) -> Result<T, Failure> {
        match tokio::time::timeout(self.access.stall, request).await {
            Ok(answer) => answer.map_err(Failure::from),
            Err(_) => Err(self.silence()),
        }
    }

    fn silence(&self) -> Failure {
        Failure::transient(format!("the server sent nothing for {:?}", self.access.stall))
    }

    /// The pause after try number `tried`: doubling, at most a minute.
    fn pause(&self, tried: u32) -> Duration {
        self.access.pause.saturating_mul(1 << tried.saturating_sub(1).min(16)).min(Duration::from_secs(60))
    }

    fn error(&self, what: &str, message: &str) -> DataError {
        let url = format!("{}/datasets/{}: {what}", self.endpoint, self.id);
        DataError::Hub { url: self.access.scrub(url), message: self.access.scrub(message.to_string()) }
    }
}

fn remove(path: &Path) -> Result<(), DataError> {
    fs::remove_file(path).map_err(|e| DataError::io(path, e))
}

impl Failure {
    fn transient(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: true }
    }

    fn lasting(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: false }
    }

    fn status(status: StatusCode) -> Self {
        let advice = match status.as_u16() {
            401 => ": it asks for a token; set HF_TOKEN",
            403 => ": the token may not read this; ask for access on the data set's page",
            404 => ": there is no such file or revision",
            _ => "",
        };
        let transient = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
        Self { message: format!("the hub answered {status}{advice}"), transient }
    }
}

impl From<HFError> for Failure {
    fn from(error: HFError) -> Self {
        match error {
            HFError::Http { context } => Self::status(context.status),
            HFError::AuthRequired { .. } => Self::status(StatusCode::UNAUTHORIZED),
            HFError::Forbidden { .. } => Self::status(StatusCode::FORBIDDEN),
            HFError::RateLimited { .. } => Self::status(StatusCode::TOO_MANY_REQUESTS),
            HFError::RepoNotFound { .. }
            | HFError::RevisionNotFound { .. }
            | HFError::EntryNotFound { .. } => Self::status(StatusCode::NOT_FOUND),
            HFError::Request { source, .. } => {
                // The address may be a signed one, which is a secret for as long as it is valid.
                let source = source.without_url();
                let reason =
                    std::iter::successors(Some(&source as &dyn std::error::Error), |e| e.source()).last();
                let reason = reason.map(|e| e.to_string()).unwrap_or_default();
                let connected = !source.is_connect();
                let message = if connected { "the connection broke" } else { "no connection to the hub" };
                Self::transient(format!(
                    "{message} ({reason}){}",
                    if connected { "" } else { "; is there a network?" }
                ))
            }
            other => Self::lasting(other.to_string()),
        }
    }
}
