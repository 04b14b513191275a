use crate::support::{ENDLESS, Page, Place, Running, SMALL, bytes, said, status};
use serde_json::Value;
use std::net::TcpListener;

fn small() -> Place {
    let place = Place::new(&[("small.yaml", SMALL)]);
    let trained = place.run(&["train", "small.yaml", "--quiet"]);
    assert!(trained.status.success(), "{}", said(&trained));
    place
}

#[test]
fn nothing_is_answered_without_the_token_or_under_another_name() {
    let place = small();
    let page = Page::open(&place, &[]);
    let zeros = format!("/list?token={}", "0".repeat(32));
    for path in ["/", "/list", "/view", "/script.js", "/stop", "/nothing", &zeros, "/?token=", "/?token=%00"]
    {
        for method in ["GET", "POST", "HEAD", "DELETE"] {
            let answer = page.ask(method, path, "");
            assert_eq!(status(&answer), 403, "{method} {path}");
            assert!(answer.ends_with("\r\n\r\n"), "{method} {path} has content: {answer}");
        }
    }
    // Somebody else's name that points here: a page of theirs would speak to us.
    let asked = format!("GET /list?token={} HTTP/1.1\r\nHost: evil.example:80\r\n\r\n", page.token);
    assert_eq!(status(&page.send(asked.as_bytes())), 403);
    let nameless = format!("GET /list?token={} HTTP/1.1\r\n\r\n", page.token);
    assert_eq!(status(&page.send(nameless.as_bytes())), 403);
    // With it, all is there; the first visit puts it into a cookie and out of the address.
    let first = page.ask("GET", &format!("/?token={}", page.token), "");
    assert_eq!(status(&first), 303);
    assert!(first.contains("HttpOnly; SameSite=Strict") && first.contains("Location: /\r\n"), "{first}");
    let root = page.ask("GET", "/", &page.cookie());
    assert_eq!(status(&root), 200);
    assert!(root.contains("Content-Security-Policy: default-src 'none'"), "{root}");
    assert_eq!(status(&page.ask("GET", "/nothing", &page.cookie())), 404);
    assert_eq!(status(&page.ask("POST", "/list", &page.cookie())), 405);
    // A form on another page has no cookie of ours, and says where it comes from.
    let foreign = page.cookie() + "Origin: http://evil.example\r\nContent-Length: 0\r\n";
    assert_eq!(status(&page.ask("POST", "/stop?run=x", &foreign)), 403);
}

#[test]
fn requests_that_are_none_are_refused_and_the_page_goes_on() {
    let place = small();
    let page = Page::open(&place, &[]);
    let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(20_000));
    let headers = format!("GET / HTTP/1.1\r\n{}", "X: y\r\n".repeat(5_000));
    let cases: [(&[u8], u16); 10] = [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/1.1 more\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (long.as_bytes(), 431),
    ];
    for (request, expected) in cases {
        let answer = page.send(request);
        assert_eq!(
            status(&answer),
            expected,
            "{:?}",
            String::from_utf8_lossy(&request[..request.len().min(60)])
        );
        assert!(answer.ends_with("\r\n\r\n"), "{answer}");
    }
    // The answer may be lost with the connection that is closed on unread bytes.
    assert!(matches!(page.send(headers.as_bytes()).split(' ').nth(1), None | Some("431")));
    // Connections that say nothing take no place for ever, and the others are answered.
    let idle: Vec<_> = (0..10).map(|_| std::net::TcpStream::connect(&page.address).unwrap()).collect();
    assert_eq!(page.json("/list")["runs"].as_array().unwrap().len(), 1);
    drop(idle);
}

#[test]
fn a_port_in_use_and_a_folder_that_is_none_are_said() {
    let place = small();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = place.run(&["watch", "runs", "--port", &port]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        said(&output).contains(&format!("127.0.0.1:{port}: ")) && said(&output).contains("--port"),
        "{}",
        said(&output)
    );
    let output = place.run(&["watch", "nothing"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("nothing: there is no such folder"), "{}", said(&output));
}

#[test]
fn the_figures_are_those_of_a_report() {
    let place = small();
    let page = Page::open(&place, &[]);
    let key = page.json("/list")["first"][0].as_str().unwrap().to_owned();
    let view = page.json(&format!("/view?runs={key}"));
    let html = |id: &str| {
        let sections = view["sections"].as_array().unwrap();
        let section =
            sections.iter().find(|section| section["id"] == id).unwrap_or_else(|| panic!("no {id}: {view}"));
        section["html"].as_str().unwrap().to_owned()
    };
    let output = place.run(&["report", "runs", "--out", "report.html"]);
    assert!(output.status.success(), "{}", said(&output));
    let report = std::fs::read_to_string(place.path("report.html")).unwrap();
    let picture = |html: &str| {
        let start = html.find("<div class=\"view\"").unwrap();
        html[start..start + html[start..].find("</svg>").unwrap()].to_owned()
    };
    assert_eq!(picture(&html("figures0")), picture(&report), "the learning curve, to the byte");
    assert!(html("workers").contains("finished"));
    assert!(html("figures2").contains("‖Δw‖"), "update-to-weight ratios");
    assert!(html("log").contains("step 12"));
    // The same view again has nothing to send.
    let answer = page.ask("GET", &format!("/view?runs={key}"), &page.cookie());
    let tag = answer.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap();
    let again =
        page.ask("GET", &format!("/view?runs={key}"), &format!("{}If-None-Match: {tag}\r\n", page.cookie()));
    assert_eq!(status(&again), 304);
}

#[test]
fn a_folder_that_vanishes_and_a_line_that_is_half_written_are_said_and_the_page_goes_on() {
    let place = small();
    let run = place.folder("small");
    let metrics = String::from_utf8(bytes(&run, "metrics.jsonl")).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
    // Half of the last line, as a process in the middle of it leaves it.
    std::fs::write(run.join("metrics.jsonl"), &metrics[..metrics.len() - 20]).unwrap();
    let page = Page::open(&place, &[]);
    let key = page.json("/list")["first"][0].as_str().unwrap().to_owned();
    let path = format!("/view?runs={key}");
    let texts = |view: &Value| view["sections"].to_string();
    let view = page.json(&path);
    assert!(texts(&view).contains("stopped") && !texts(&view).contains("problem"), "{view}");
    std::fs::remove_dir_all(&run).unwrap();
    page.until(&path, |view| texts(view).contains("the folder is gone").then_some(()));
    page.until("/list?since=0", |list| (list["runs"][0][2] == "gone").then_some(()));
    let unknown = page.json("/view?runs=0123456789ab,,%00,../..");
    assert_eq!(unknown["sections"], serde_json::json!([]));
}

#[cfg(target_os = "linux")]
#[test]
fn a_click_stops_a_run_with_a_checkpoint_and_it_goes_on_to_the_same_bytes() {
    let longer = SMALL.replace(
        "train: {epochs: 3, log_every: 1, probe: true}",
        "train: {epochs: 12000, log_every: 500, eval_every: 500, checkpoint: {every_epochs: null}}",
    );
    let place = Place::new(&[("small.yaml", &longer)]);
    std::fs::create_dir(place.path("runs")).unwrap();
    let page = Page::open(&place, &[]);
    let mut training = Running(place.taper(&["train", "small.yaml", "--quiet"]).spawn().unwrap());
    let key = page.until("/list?since=0", |list| {
        let run = &list["runs"][0];
        assert_ne!(run[2], "finished", "it was not seen at work");
        (run[2] == "running" && run[3].as_u64() > Some(0)).then(|| run[0].as_str().unwrap().to_owned())
    });
    let answer = page.ask("POST", &format!("/stop?run={key}"), &(page.cookie() + "Content-Length: 0\r\n"));
    assert_eq!(status(&answer), 200, "{answer}");
    assert!(answer.contains("was asked to stop"), "{answer}");
    assert_eq!(training.0.wait().unwrap().code(), Some(130));
    let run = place.folder("small");
    assert!(run.join("checkpoints").read_dir().unwrap().next().is_some());
    page.until("/list?since=0", |list| (list["runs"][0][2] == "stopped").then_some(()));
    let refused = page.ask("POST", &format!("/stop?run={key}"), &(page.cookie() + "Content-Length: 0\r\n"));
    assert_eq!(status(&refused), 409);
    assert!(refused.contains("nobody is at work on it"), "{refused}");
    // Gone on with, it is the run that was never stopped.
    assert!(place.run(&["train", "small.yaml", "--quiet"]).status.success());
    assert!(place.run(&["train", "small.yaml", "--quiet", "--runs", "whole"]).status.success());
    let whole = place.path("whole").join(run.file_name().unwrap());
    for file in ["metrics.jsonl", "summary.json"] {
        assert_eq!(bytes(&run, file), bytes(&whole, file), "{file}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_of_another_machine_is_not_stopped_from_here() {
    let place = Place::new(&[("endless.yaml", ENDLESS)]);
    std::fs::create_dir(place.path("runs")).unwrap();
    let page = Page::open(&place, &[]);
    let mut training = place.taper(&["train", "endless.yaml", "--quiet"]);
    let mut training = Running(training.env("TAPER_HOST", "elsewhere").spawn().unwrap());
    let key = page.until("/list?since=0", |list| {
        let run = &list["runs"][0];
        (run[2] == "running").then(|| run[0].as_str().unwrap().to_owned())
    });
    let view = page.json(&format!("/view?runs={key}")).to_string();
    assert!(view.contains("on elsewhere") && !view.contains("data-stop"), "{view}");
    let refused = page.ask("POST", &format!("/stop?run={key}"), &(page.cookie() + "Content-Length: 0\r\n"));
    assert_eq!(status(&refused), 409);
    assert!(refused.contains("another machine"), "{refused}");
    assert!(training.0.try_wait().unwrap().is_none(), "it was stopped");
}

#[cfg(target_os = "linux")]
#[test]
fn the_runs_that_a_sweep_has_before_it_are_waiting_and_nobody_else_minds() {
    let place = Place::new(&[("endless.yaml", ENDLESS), ("small.yaml", SMALL)]);
    std::fs::create_dir(place.path("runs")).unwrap();
    // What somebody else left there says nothing.
    std::fs::write(place.path("runs/.planned-other.json"), "{\"a\": [").unwrap();
    std::fs::create_dir(place.path("runs/.planned-folder.json")).unwrap();
    let page = Page::open(&place, &[]);
    let sweep = ["sweep", "endless.yaml", "--quiet", "--set", "sweep={seeds: [1, 2, 3]}"];
    let mut sweep = Running(place.taper(&sweep).spawn().unwrap());
    let key = page.until("/list?since=0", |list| {
        let run = &list["runs"][0];
        (run[2] == "running").then(|| run[0].as_str().unwrap().to_owned())
    });
    let view = format!("/view?runs={key}");
    let waits = |view: &Value| view.to_string().contains("endless: 2 waiting: seed=2 · seed=3").then_some(());
    page.until(&view, waits);
    let process = libc::pid_t::try_from(sweep.0.id()).unwrap();
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(process, libc::SIGINT) };
    assert_eq!(sweep.0.wait().unwrap().code(), Some(130));
    // They are still to be done.
    page.until(&view, waits);
    // Once all were tried nothing is left of it.
    let output = place.run(&["sweep", "small.yaml", "--quiet", "--set", "sweep={seeds: [1, 2]}"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(!place.path("runs/.planned-small.json").exists());
    let list =
        page.until("/list?since=0", |list| (list["runs"].as_array()?.len() == 3).then(|| list.clone()));
    let small =
        list["runs"].as_array().unwrap().iter().find(|run| run[1].as_str().unwrap().starts_with("small-"));
    let view = page.json(&format!("/view?runs={}", small.unwrap()[0].as_str().unwrap())).to_string();
    assert!(!view.contains("waiting"), "{view}");
    // To those who read runs the folder is what it was.
    assert!(place.path("runs/.planned-endless.json").is_file());
    let output = place.run(&["report", "runs", "--out", "report.html"]);
    assert!(output.status.success() && !said(&output).contains("planned"), "{}", said(&output));
    let output = place.run(&["track", "runs", "--to", "csv", "--out", "tables"]);
    assert!(said(&output).contains("3 runs,"), "{}", said(&output));
}

#[test]
fn thousands_of_runs_are_listed() {
    let place = small();
    let run = place.folder("small");
    let (recipe, summary) = (bytes(&run, "recipe.yaml"), bytes(&run, "summary.json"));
    for number in 0..2000 {
        let folder = place.path("runs").join(format!("many-{number:012x}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("recipe.yaml"), &recipe).unwrap();
        std::fs::write(folder.join("summary.json"), &summary).unwrap();
    }
    let page = Page::open(&place, &[]);
    let list = page.json("/list?since=0");
    assert_eq!(list["runs"].as_array().unwrap().len(), 2001);
    let version = list["version"].as_u64().unwrap();
    let news = page.json(&format!("/list?since={version}"));
    assert_eq!(news["runs"].as_array().unwrap().len(), 0, "only what is new is sent");
    let all: Vec<&str> =
        list["runs"].as_array().unwrap().iter().map(|run| run[0].as_str().unwrap()).collect();
    let view = page.json(&format!("/view?runs={}", all[..1000].join(",")));
    assert!(!view["sections"].as_array().unwrap().is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn the_page_works_in_a_browser() {
    let tool = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check_watch.py");
    let checked = std::process::Command::new("python3").arg(tool).arg(env!("CARGO_BIN_EXE_taper")).output();
    match checked {
        Err(e) => eprintln!("skipped: no python3: {e}"),
        Ok(output) if output.status.code() == Some(3) => eprintln!("skipped: {}", said(&output)),
        Ok(output) => assert!(output.status.success(), "{}", said(&output)),
    }
}
