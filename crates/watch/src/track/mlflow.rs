//! MLflow by its REST interface: a run of ours is one of its runs, known by our id, and a sweep is a run with others inside.
//!
//! How far the metrics were sent is kept with the run itself, as a tag that goes in the same request as the numbers. A request that
//! was sent and never answered may have been carried out: before the first numbers after a start, those that are there are asked for
//! and left out.
use super::client::{Answer, Client};
use super::wall::Wall;
use super::{TrackError, Tracked, io, text};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;
use taper_train::run::{Record, Status};

/// MLflow takes a thousand numbers and tags in a request.
const MOST_METRICS: usize = 990;
/// Nor more settings.
const MOST_PARAMS: usize = 100;
/// Nor longer ones.
const LONGEST: usize = 6000;

/// The tag by which a run is known.
const ID: &str = "taper.id";
/// The tag of a run that others are inside of.
const SWEEP: &str = "taper.sweep";
/// The tag that says up to which byte `metrics.jsonl` was sent.
const SENT: &str = "taper.sent";
/// The tag with the digests of the files that were sent.
const FILES: &str = "taper.files";

/// A server of MLflow and one of its experiments.
#[derive(Debug)]
pub struct Mlflow {
    client: Client,
    experiment: String,
    /// The experiment's id, once it is known.
    id: Option<String>,
    /// Runs whose last request was answered, with the byte up to which their metrics were sent.
    sent: HashMap<String, u64>,
}

/// A run as the server has it.
#[derive(Debug)]
struct Remote {
    id: String,
    artifacts: String,
    status: String,
    tags: HashMap<String, String>,
}

impl Remote {
    fn of(run: &Value) -> Option<Self> {
        let info = &run["info"];
        let pair = |tag: &Value| Some((tag["key"].as_str()?.to_owned(), tag["value"].as_str()?.to_owned()));
        let tags = run["data"]["tags"].as_array().into_iter().flatten().filter_map(pair).collect();
        Some(Self {
            id: info["run_id"].as_str()?.to_owned(),
            artifacts: info["artifact_uri"].as_str().unwrap_or_default().to_owned(),
            status: info["status"].as_str().unwrap_or_default().to_owned(),
            tags,
        })
    }
}

impl Mlflow {
    /// A server by its address, and the name of the experiment that runs go to. Nothing is asked yet.
    pub fn new(address: &str, experiment: &str, answering: Duration) -> Result<Self, TrackError> {
        let client = Client::new(address, answering)?;
        Ok(Self { client, experiment: experiment.to_owned(), id: None, sent: HashMap::new() })
    }

    fn call(&self, method: &str, what: &str, body: Option<&Value>) -> Result<Answer, TrackError> {
        self.client.json(method, &format!("/api/2.0/mlflow/{what}"), body)
    }

    /// As `call`, where only success will do.
    fn post(&self, what: &str, body: &Value) -> Result<Value, TrackError> {
        let answer = self.call("POST", what, Some(body))?;
        match answer.status {
            404 => Err(self.wrong(&format!(
                "it knows no {what}: {}",
                answer.json()["message"].as_str().unwrap_or("is it MLflow?")
            ))),
            _ => Ok(answer.json()),
        }
    }

    fn wrong(&self, message: &str) -> TrackError {
        TrackError::Server { server: self.client.server.clone(), message: message.to_owned() }
    }

    /// Brings what is new of all runs; gives the count of numbers.
    pub(super) fn track(&mut self, runs: &[Tracked]) -> Result<u64, TrackError> {
        let experiment = self.experiment()?;
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        for run in runs {
            *names.entry(run.recipe.name.as_str()).or_default() += 1;
        }
        let mut parents: HashMap<&str, Remote> = HashMap::new();
        for (name, _) in names.iter().filter(|(_, count)| **count > 1) {
            parents.insert(name, self.parent(&experiment, name)?);
        }
        let mut added = 0;
        for run in runs {
            let parent = parents.get(run.recipe.name.as_str());
            added += self.one(&experiment, run, parent.map(|parent| parent.id.as_str()))?;
        }
        for (name, parent) in &parents {
            let inside = || runs.iter().filter(|run| run.recipe.name == **name);
            let status = match inside().any(|run| run.running) {
                true => "RUNNING",
                false if inside().all(|run| run.status() == Some(Status::Finished)) => "FINISHED",
                false => "FAILED",
            };
            self.close(
                parent,
                status,
                Some(millis(inside().map(|run| Wall::read(&run.folder).ended()).fold(0.0, f64::max))),
            )?;
        }
        Ok(added)
    }

    fn experiment(&mut self) -> Result<String, TrackError> {
        if let Some(id) = &self.id {
            return Ok(id.clone());
        }
        let found = self.call(
            "GET",
            &format!("experiments/get-by-name?experiment_name={}", escaped(&self.experiment)),
            None,
        )?;
        let mut id = found.json()["experiment"]["experiment_id"].as_str().map(str::to_owned);
        if id.is_none() {
            let made = self.post("experiments/create", &json!({ "name": self.experiment }))?;
            id = made["experiment_id"].as_str().map(str::to_owned);
        }
        let id = id.ok_or_else(|| self.wrong("it gave no experiment: is it a server of MLflow?"))?;
        self.id = Some(id.clone());
        Ok(id)
    }

    /// The run with a tag, if there is one.
    fn find(&self, experiment: &str, tag: &str, value: &str) -> Result<Option<Remote>, TrackError> {
        let value = value.replace('\'', "");
        let found = self.post(
            "runs/search",
            &json!({
                "experiment_ids": [experiment], "filter": format!("tags.`{tag}` = '{value}'"), "max_results": 1,
                "run_view_type": "ACTIVE_ONLY",
            }),
        )?;
        Ok(found["runs"].get(0).and_then(Remote::of))
    }

    fn create(
        &self,
        experiment: &str,
        name: &str,
        began: f64,
        tags: &[(&str, &str)],
    ) -> Result<Remote, TrackError> {
        let tags: Vec<Value> =
            tags.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
        let made = self.post(
            "runs/create",
            &json!({ "experiment_id": experiment, "run_name": name, "start_time": millis(began), "tags": tags }),
        )?;
        Remote::of(&made["run"]).ok_or_else(|| self.wrong("it made no run: is it a server of MLflow?"))
    }

    /// The run that the runs of a sweep are inside of.
    fn parent(&self, experiment: &str, name: &str) -> Result<Remote, TrackError> {
        match self.find(experiment, SWEEP, name)? {
            Some(found) => Ok(found),
            None => self.create(experiment, name, Wall::default().began(), &[(SWEEP, name)]),
        }
    }

    /// Brings one run.
    fn one(&mut self, experiment: &str, run: &Tracked, parent: Option<&str>) -> Result<u64, TrackError> {
        let wall = Wall::read(&run.folder);
        let id = run.recipe.id();
        let remote = match self.find(experiment, ID, id)? {
            Some(found) => found,
            None => {
                let mut tags = vec![(ID, id)];
                tags.extend(parent.map(|parent| ("mlflow.parentRunId", parent)));
                let remote = self.create(experiment, &run.name(), wall.began(), &tags)?;
                let params: Vec<Value> = run
                    .settings()
                    .into_iter()
                    .map(|(key, value)| json!({ "key": key_of(&key), "value": short(&text(&value)) }))
                    .collect();
                for params in params.chunks(MOST_PARAMS) {
                    self.post("runs/log-batch", &json!({ "run_id": remote.id, "params": params }))?;
                }
                remote
            }
        };
        let added = self.metrics(run, &remote, &wall)?;
        self.files(run, &remote)?;
        let (status, reason) = match run.status() {
            None => ("RUNNING", None),
            Some(Status::Finished) => ("FINISHED", None),
            Some(Status::Diverged) => {
                ("FAILED", run.summary.as_ref().and_then(|summary| summary.reason.clone()))
            }
            Some(Status::Interrupted) => ("KILLED", None),
        };
        if let Some(reason) = reason.filter(|reason| remote.tags.get("taper.reason") != Some(reason)) {
            self.post(
                "runs/set-tag",
                &json!({ "run_id": remote.id, "key": "taper.reason", "value": short(&reason) }),
            )?;
        }
        self.close(&remote, status, (status != "RUNNING").then(|| millis(wall.ended())))?;
        Ok(added)
    }

    /// Says how a run stands, if that is new.
    fn close(&self, remote: &Remote, status: &str, ended: Option<i64>) -> Result<(), TrackError> {
        if remote.status != status {
            let mut body = json!({ "run_id": remote.id, "status": status });
            if let Some(ended) = ended.filter(|_| status != "RUNNING") {
                body["end_time"] = ended.into();
            }
            self.post("runs/update", &body)?;
        }
        Ok(())
    }

    /// Sends the numbers that are new.
    fn metrics(&mut self, run: &Tracked, remote: &Remote, wall: &Wall) -> Result<u64, TrackError> {
        let told = remote.tags.get(SENT).and_then(|sent| sent.parse().ok()).unwrap_or(0);
        let sure = self.sent.get(&remote.id).copied();
        let from = sure.unwrap_or(told).max(told);
        let (mut batch, mut end, mut added, mut first) = (Vec::new(), from, 0, sure.is_none());
        let mut send = |server: &mut Self, batch: &mut Vec<Value>, end: u64| -> Result<(), TrackError> {
            if batch.is_empty() {
                return Ok(());
            }
            if std::mem::take(&mut first) {
                server.leave_out(&remote.id, batch)?;
            }
            added += batch.len() as u64;
            let tags = [json!({ "key": SENT, "value": end.to_string() })];
            server.post("runs/log-batch", &json!({ "run_id": remote.id, "metrics": batch, "tags": tags }))?;
            batch.clear();
            server.sent.insert(remote.id.clone(), end);
            Ok(())
        };
        run.records(from, |record, after| {
            let numbers = numbers(&record, wall);
            // A record goes whole: the tag counts whole lines. One with more numbers than a request takes is sent in parts first.
            if batch.len() + numbers.len() > MOST_METRICS {
                send(self, &mut batch, end)?;
            }
            for part in numbers.chunks(MOST_METRICS) {
                if batch.len() + part.len() > MOST_METRICS {
                    send(self, &mut batch, end)?;
                }
                batch.extend_from_slice(part);
            }
            end = after;
            Ok(())
        })?;
        send(self, &mut batch, end)?;
        Ok(added)
    }

    /// Takes out of a batch what the server has already.
    fn leave_out(&self, run: &str, batch: &mut Vec<Value>) -> Result<(), TrackError> {
        let keys: BTreeSet<String> =
            batch.iter().filter_map(|m| m["key"].as_str().map(str::to_owned)).collect();
        // The mean over an epoch and the loss of its last step have one name and one step: the value tells them apart.
        let mut there: HashSet<(String, i64, String)> = HashSet::new();
        for key in keys {
            let mut page = String::new();
            loop {
                let what = format!(
                    "metrics/get-history?run_id={run}&metric_key={}&max_results=10000{page}",
                    escaped(&key)
                );
                let answer = self.call("GET", &what, None)?.json();
                let steps = answer["metrics"].as_array().into_iter().flatten();
                there.extend(steps.map(|m| (key.clone(), step_of(m), value_of(m))));
                match answer["next_page_token"].as_str().filter(|token| !token.is_empty()) {
                    Some(token) => page = format!("&page_token={}", escaped(token)),
                    None => break,
                }
            }
        }
        batch.retain(|metric| {
            let key = metric["key"].as_str().unwrap_or_default();
            !there.contains(&(key.to_owned(), step_of(metric), value_of(metric)))
        });
        Ok(())
    }

    /// Sends the files of a run that are new: through the server, which puts them where it keeps such.
    fn files(&self, run: &Tracked, remote: &Remote) -> Result<(), TrackError> {
        let Some(place) = remote.artifacts.strip_prefix("mlflow-artifacts:") else { return Ok(()) };
        let place = place.trim_start_matches('/');
        // Metrics that still grow are sent as numbers; the file comes with the end.
        let names: &[&str] = match run.running {
            true => &["recipe.yaml"],
            false => &["recipe.yaml", "manifest.json", "metrics.jsonl", "summary.json", "timing.jsonl"],
        };
        let mut digests = Vec::new();
        let sent = remote.tags.get(FILES).map_or("", String::as_str);
        for name in names {
            let path = run.folder.join(name);
            let Ok((length, digest)) = taper_files::sha256_file(&path) else { continue };
            let word = format!("{name}:{}", &digest[..16]);
            if !sent.split(' ').any(|other| other == word) && length <= LARGEST {
                let bytes = std::fs::read(&path).map_err(io(&path))?;
                let to = format!("/api/2.0/mlflow-artifacts/artifacts/{place}/{name}");
                self.client.ask("PUT", &to, Some(("application/octet-stream", &bytes)))?;
            }
            digests.push(word);
        }
        let digests = digests.join(" ");
        if digests != sent {
            self.post("runs/set-tag", &json!({ "run_id": remote.id, "key": FILES, "value": digests }))?;
        }
        Ok(())
    }
}

/// The step of a metric: a number, or a number as text.
fn step_of(metric: &Value) -> i64 {
    let step = &metric["step"];
    step.as_i64().or_else(|| step.as_str()?.parse().ok()).unwrap_or(0)
}

/// The value of a metric, to the bit.
fn value_of(metric: &Value) -> String {
    let value = &metric["value"];
    value.as_f64().map_or_else(|| text(value), |value| format!("{value:?}"))
}

/// Larger files than this are not sent.
const LARGEST: u64 = 256 << 20;

/// The numbers of a record.
fn numbers(record: &Record, wall: &Wall) -> Vec<Value> {
    let at = millis(wall.at(record.step));
    let number = |value: f64| match value {
        value if value.is_finite() => json!(value),
        value if value.is_nan() => json!("NaN"),
        value => json!(if value > 0.0 { "Infinity" } else { "-Infinity" }),
    };
    let step = i64::try_from(record.step).unwrap_or(i64::MAX);
    let metric = |(name, value): (&String, &f64)| {
        let key = key_of(&format!("{}/{name}", record.split.name()));
        json!({ "key": key, "value": number(*value), "timestamp": at, "step": step })
    };
    record.values.iter().map(metric).collect()
}

fn millis(seconds: f64) -> i64 {
    (1000.0 * seconds).round() as i64
}

/// A name of the letters that MLflow takes.
fn key_of(name: &str) -> String {
    let letter = |c: char| if c.is_alphanumeric() || "_-. :/".contains(c) { c } else { '_' };
    name.chars().map(letter).take(250).collect()
}

fn short(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

/// Text inside an address.
fn escaped(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}
