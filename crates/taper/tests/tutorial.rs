//! Every command of docs/tutorial.md, in an empty folder, with nothing but the binary: what it prints is what the page says, but for
//! numbers.
//!
//! `TAPER_UPDATE_TUTORIAL=1 cargo test --release --workspace --test tutorial` writes down anew what the commands print.
//! `TAPER_PEER_PYTHON` names a Python with torch and onnxruntime for those that need one; without it they are left out, which is
//! said, and with `TAPER_REQUIRE_TOOLS=1` that fails.
#![cfg(unix)]
use regex::Regex;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A part of the page.
enum Part {
    /// Lines that are neither run nor compared.
    Prose(String),
    /// A file that the reader is to write.
    File { fence: String, name: String, text: String },
    /// A command and what it prints.
    Command { text: String, printed: String },
}

/// A line that begins a block of commands, and one that ends any block.
const CONSOLE: &str = "```console";
const END: &str = "```";

fn parts(page: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let file =
            line.strip_prefix(END).and_then(|info| info.split_once(' ')).map(|(_, name)| name.to_owned());
        if let Some(name) = file {
            let text =
                lines.by_ref().take_while(|line| *line != END).map(|line| format!("{line}\n")).collect();
            parts.push(Part::File { fence: line.to_owned(), name, text });
        } else if line == CONSOLE {
            while let Some(line) = lines.next().filter(|line| *line != END) {
                let text = line
                    .strip_prefix("$ ")
                    .unwrap_or_else(|| panic!("expected `$ command`, found {line}"))
                    .to_owned();
                let mut printed = String::new();
                while let Some(line) = lines.next_if(|line| *line != END && !line.starts_with("$ ")) {
                    printed += &format!("{line}\n");
                }
                parts.push(Part::Command { text, printed });
            }
        } else {
            parts.push(Part::Prose(format!("{line}\n")));
        }
    }
    parts
}

/// The page that these parts are of.
fn page(parts: &[Part]) -> String {
    let (mut page, mut open) = (String::new(), false);
    for part in parts {
        let command = matches!(part, Part::Command { .. });
        match (open, command) {
            (false, true) => page += &format!("{CONSOLE}\n"),
            (true, false) => page += &format!("{END}\n"),
            _ => {}
        }
        open = command;
        match part {
            Part::Prose(text) => page += text,
            Part::File { fence, text, .. } => page += &format!("{fence}\n{text}{END}\n"),
            Part::Command { text, printed } => page += &format!("$ {text}\n{printed}"),
        }
    }
    if open { page + END + "\n" } else { page }
}

/// Lines without what differs from machine to machine: numbers with their units, ids, the widths of columns.
fn without_numbers(text: &str) -> Vec<String> {
    let [id, number, blank] = [
        r"\b[0-9a-f]{12}\b",
        r"(([0-9]+([.,][0-9]+)*(e-?[0-9]+)?|\bNaN\b|\binf\b)( ?(ms|s|min|h|B|kB|MB|GB|KiB|MiB|GiB)\b)?|·)( ?%)?",
        r"[ :-]+|\|-+\|",
    ]
    .map(|pattern| Regex::new(pattern).unwrap());
    let mask = |line: &str| {
        let line = id.replace_all(line, "ID");
        let line = number.replace_all(&line, "#");
        blank.replace_all(&line, " ").trim().to_owned()
    };
    text.lines().map(mask).collect()
}

/// A Python for the commands that need one, if it has what they need.
fn python() -> Option<PathBuf> {
    let python = std::env::var_os("TAPER_PEER_PYTHON").map_or("python3".into(), PathBuf::from);
    let test = "import numpy, onnxruntime, torch";
    let output = Command::new(&python).args(["-c", test]).output();
    let missing = match &output {
        Ok(output) if output.status.success() => return Some(python),
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(e) => e.to_string(),
    };
    assert!(std::env::var_os("TAPER_REQUIRE_TOOLS").is_none(), "{}: {missing}", python.display());
    println!("skipped the commands with python: {}: {missing}", python.display());
    None
}

/// Runs a line of the shell with our binary first in its path; what it printed, errors among it.
fn shell(line: &str, folder: &Path, path: &Path) -> String {
    let system = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command.args(["-c", &format!("set -e -o pipefail\n{{ {line}\n}} 2>&1")]).current_dir(folder);
    command
        .env("PATH", format!("{}:{system}", path.display()))
        .env_remove("TAPER_DATA")
        .env("TAPER_OFFLINE", "1");
    let output = command.env("TAPER_CACHE", path.join("cache")).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{line}\n{printed}");
    printed
}

#[test]
fn every_command_of_the_tutorial_does_what_it_says() {
    let tutorial = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tutorial.md");
    let text = std::fs::read_to_string(&tutorial).unwrap();
    let mut parts = parts(&text);
    assert_eq!(page(&parts), text, "the page is read as it is written");

    let (home, bin) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(env!("CARGO_BIN_EXE_taper"), bin.path().join("taper")).unwrap();
    let python = python();
    if let Some(python) = &python {
        // A link would lose the virtual environment that the program is part of.
        let script = bin.path().join("python");
        std::fs::write(&script, format!("#!/bin/sh\nexec '{}' \"$@\"\n", python.display())).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let update = std::env::var_os("TAPER_UPDATE_TUTORIAL").is_some();
    let (mut commands, mut left_out) = (0, 0);
    for part in &mut parts {
        match part {
            Part::Prose(_) => {}
            Part::File { name, text, .. } => std::fs::write(home.path().join(name), text).unwrap(),
            Part::Command { text, .. } if text.starts_with("python ") && python.is_none() => left_out += 1,
            Part::Command { text, printed } => {
                let found = shell(text, home.path(), bin.path());
                commands += 1;
                if update {
                    *printed = found;
                    continue;
                }
                let found = without_numbers(&found);
                for line in without_numbers(printed) {
                    assert!(
                        found.contains(&line),
                        "`{text}` does not print `{line}` but\n{}",
                        found.join("\n")
                    );
                }
            }
        }
    }
    assert!(commands + left_out >= 9, "{commands} commands and {left_out} left out are not the tutorial");
    if update {
        std::fs::write(&tutorial, page(&parts)).unwrap();
    }
}

#[test]
fn numbers_are_masked_and_words_are_not() {
    let same = [
        ("| 3   |     980 | 97.96 % |", "| 3 | 1012 |  98.9 % |"),
        ("| --- | ------: |", "| ---- | ---: |"),
        ("runs/tutorial-0123456789ab", "runs/tutorial-ba9876543210"),
        ("12.1 s and 340 MB", "340 ms and 1.2 GB"),
        ("·", "7"),
    ];
    for (a, b) in same {
        assert_eq!(without_numbers(a), without_numbers(b));
    }
    assert_ne!(without_numbers("accuracy 97"), without_numbers("loss 97"));
}
