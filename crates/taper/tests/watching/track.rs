use crate::support::{Place, Running, SMALL, bytes, said};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

fn small() -> Place {
    let place = Place::new(&[("small.yaml", SMALL)]);
    for seed in ["seed=1", "seed=2"] {
        assert!(place.run(&["train", "small.yaml", "--quiet", "--set", seed]).status.success());
    }
    place
}

#[test]
fn comma_separated_values_are_the_metrics() {
    let place = small();
    let track = ["track", "runs", "--to", "csv", "--out", "tables"];
    let output = place.run(&track);
    assert!(output.status.success(), "{}", said(&output));
    for run in place.path("runs").read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        let name = format!("{}.csv", run.file_name().unwrap().to_string_lossy());
        let table = String::from_utf8(bytes(&place.path("tables"), &name)).unwrap();
        let mut rows = table.lines();
        assert_eq!(rows.next(), Some("step,epoch,split,metric,value"));
        for line in String::from_utf8(bytes(&run, "metrics.jsonl")).unwrap().lines() {
            let record: taper_train::run::Record = serde_json::from_str(line).unwrap();
            for (metric, value) in &record.values {
                let row =
                    format!("{},{},{},{metric},{value}", record.step, record.epoch, record.split.name());
                assert_eq!(rows.next(), Some(row.as_str()));
            }
        }
        assert_eq!(rows.next(), None);
    }
    assert!(said(&place.run(&track)).contains("2 runs, 0 new entries"));
    let output = place.run(&["track", "tables", "--to", "csv", "--out", "more"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("no run is in it"), "{}", said(&output));
}

#[test]
fn a_server_that_is_away_or_fails_or_is_none_costs_nothing_but_a_message() {
    let place = small();
    let before: Vec<Vec<u8>> =
        ["metrics.jsonl", "summary.json"].map(|file| bytes(&place.folder("small"), file)).into();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let track =
        |server: &str| place.run(&["track", "runs", "--to", "mlflow", "--server", server, "--limit", "1"]);
    let output = track(&format!("http://{port}"));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("no connection") && said(&output).contains("nothing is lost"),
        "{}",
        said(&output)
    );
    for (address, what) in [("https://h", "https is not spoken here"), ("h:5", "expected an address like")] {
        let output = track(address);
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(what), "{}", said(&output));
    }
    // One that fails, one that is slow, one that speaks something else: each is asked four times at most.
    for (answer, what) in [
        ("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "it answered 500"),
        ("", "the answer broke off"),
        ("SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "is it a server of MLflow?"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        let output = track(&address);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(what), "{answer:?}: {}", said(&output));
    }
    let after: Vec<Vec<u8>> =
        ["metrics.jsonl", "summary.json"].map(|file| bytes(&place.folder("small"), file)).into();
    assert!(before == after);
}

#[test]
fn a_server_that_takes_requests_and_never_answers_is_left_after_a_while() {
    let place = small();
    let before = bytes(&place.folder("small"), "metrics.jsonl");
    let track = |listener: &TcpListener| {
        let server = format!("http://{}", listener.local_addr().unwrap());
        let output =
            place.run(&["track", "runs", "--to", "mlflow", "--server", server.as_str(), "--limit", "1"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            said(&output).contains(&format!("{server}: no answer within 1 s (4 tries): nothing is lost")),
            "{}",
            said(&output)
        );
    };
    // The system takes connections, and nobody ever reads what they say.
    track(&TcpListener::bind("127.0.0.1:0").unwrap());
    // Somebody reads it, begins an answer, and never ends it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let begins = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for stream in begins.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{");
            open.push(stream);
        }
    });
    track(&listener);
    assert!(before == bytes(&place.folder("small"), "metrics.jsonl"));
}

/// A Python that has these packages.
fn python(modules: &[&str]) -> Option<&'static str> {
    let imports: Vec<String> = modules.iter().map(|module| format!("import {module}")).collect();
    let has = |python: &&str| {
        let mut command = Command::new(python);
        command.args(["-c", &imports.join("; ")]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    ["python3", "python"].into_iter().find(has)
}

fn tool(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools").join(name)
}

#[test]
fn mlflow_has_what_the_runs_have_and_twice_is_once() {
    let Some(python) = python(&["mlflow", "flask", "sqlalchemy"]) else {
        eprintln!("skipped: no Python with mlflow: pip install mlflow");
        return;
    };
    let place = small();
    let mut server = Command::new(python);
    server
        .arg(tool("serve_mlflow.py"))
        .arg(place.path("mlflow"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut server = Running(server.spawn().unwrap());
    let mut address = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.0.stdout.take().unwrap()), &mut address)
        .unwrap();
    let address = address.trim();
    let track = || place.run(&["track", "runs", "--to", "mlflow", "--server", address]);
    let output = track();
    assert!(output.status.success(), "{}", said(&output));
    let output = track();
    assert!(said(&output).contains("2 runs, 0 new entries"), "{}", said(&output));
    let read = Command::new(python)
        .arg(tool("read_mlflow.py"))
        .arg(address)
        .arg(place.path("runs"))
        .output()
        .unwrap();
    assert!(read.status.success(), "{}{}", String::from_utf8_lossy(&read.stdout), said(&read));
}

#[test]
fn tensorboard_has_what_the_runs_have_with_true_times() {
    let Some(python) = python(&["tensorboard"]) else {
        eprintln!("skipped: no Python with tensorboard: pip install tensorboard");
        return;
    };
    let place = small();
    let track = ["track", "runs", "--to", "tensorboard", "--out", "logs"];
    let output = place.run(&track);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&place.run(&track)).contains("2 runs, 0 new entries"));
    let mut read = Command::new(python);
    read.arg(tool("read_events.py")).args(["--tracked", "logs"]).current_dir(place.path(""));
    let runs = place.path("runs").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let read = read.args(runs).output().unwrap();
    assert!(read.status.success(), "{}{}", String::from_utf8_lossy(&read.stdout), said(&read));
}

#[test]
fn weights_and_biases_has_what_the_runs_have() {
    let place = small();
    // One that is larger than a block, and one that did not end well.
    let long = ["train", "small.yaml", "--quiet", "--set", "train.epochs=40", "--set", "name=long"];
    assert!(place.run(&long).status.success());
    let diverging = ["train", "small.yaml", "--quiet", "--set", "optimizer={name: sgd, lr: 1e30}"];
    assert_eq!(place.run(&diverging).status.code(), Some(1));
    let track = ["track", "runs", "--to", "wandb-offline"];
    let output = place.run(&track);
    assert!(output.status.success(), "{}", said(&output));
    let file = || {
        let folders = place.path("wandb").read_dir().unwrap().map(|entry| entry.unwrap().path());
        let id = place.folder("long").to_string_lossy().rsplit('-').next().unwrap().to_owned();
        let folder = folders.into_iter().find(|folder| folder.to_string_lossy().ends_with(&id)).unwrap();
        folder.join(format!("run-{id}.wandb"))
    };
    let whole = std::fs::read(file()).unwrap();
    assert!(said(&place.run(&track)).contains("4 runs, 0 new entries"));
    // What was sent before there was more is marked as sent: it is to be sent again. A half-written file is made whole.
    let mark = file().with_extension("wandb.synced");
    std::fs::write(&mark, "").unwrap();
    assert!(place.run(&track).status.success());
    assert!(mark.is_file(), "nothing is new");
    std::fs::write(file(), &whole[..whole.len() / 2]).unwrap();
    assert!(place.run(&track).status.success());
    assert!(std::fs::read(file()).unwrap() == whole && !mark.exists());

    let Some(python) = python(&["wandb.sdk.internal.datastore"]) else {
        eprintln!("skipped: no Python with wandb's reader: pip install wandb==0.25.0");
        return;
    };
    let mut read = Command::new(python);
    read.arg(tool("read_wandb.py")).arg("wandb").current_dir(place.path(""));
    let runs = place.path("runs").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let read = read.args(runs).output().unwrap();
    assert!(read.status.success(), "{}{}", String::from_utf8_lossy(&read.stdout), said(&read));
}
