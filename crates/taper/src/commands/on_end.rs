//! `--on-end`: a command of the user's that is told how training ended, whichever way that was.
use super::Failure;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use taper_train::run::{Status, folder};

/// What a command line ended with.
#[derive(Debug, Default)]
pub struct Ended {
    /// The last run that was begun: its name and its folder.
    pub run: Option<(String, std::path::PathBuf)>,
    /// Of a sweep: runs with a result, and all.
    pub runs: Option<(usize, usize)>,
}

/// One word for how it ended: `finished`, `diverged`, `interrupted` or `failed`.
fn outcome(result: &Result<(), Failure>, run: Option<&Path>) -> &'static str {
    let status = run.and_then(|run| folder::summary(run).ok().flatten()).map(|summary| summary.status);
    match (result, status) {
        (Err(Failure { code: 130, .. }), _) => "interrupted",
        (_, Some(Status::Diverged)) => "diverged",
        (Ok(()), Some(Status::Interrupted)) => "interrupted",
        (Ok(()), _) => "finished",
        (Err(_), _) => "failed",
    }
}

/// Runs the command. Whatever becomes of it changes nothing in the result, but is said.
pub fn tell(command: &str, of: &str, result: &Result<(), Failure>, ended: &Ended) {
    let (name, run) =
        ended.run.as_ref().map_or((None, None), |(name, run)| (Some(name), Some(run.as_path())));
    let (message, code) = match result {
        Ok(()) => ("", 0),
        Err(failure) => (failure.message.as_str(), failure.code),
    };
    let absolute = run.map(|run| std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf()));
    let text = |text: &str| OsString::from(text.replace('\0', "\u{fffd}"));
    let mut facts: Vec<(&str, OsString)> = vec![
        ("TAPER_COMMAND", of.into()),
        ("TAPER_OUTCOME", outcome(result, run).into()),
        ("TAPER_EXIT_CODE", code.to_string().into()),
        ("TAPER_MESSAGE", text(message)),
        ("TAPER_NAME", text(name.map_or("", String::as_str))),
        ("TAPER_RUN", absolute.unwrap_or_default().into()),
    ];
    if let Some((done, all)) = ended.runs {
        facts.extend([("TAPER_DONE", done.to_string().into()), ("TAPER_ALL", all.to_string().into())]);
    }
    let mut shell = if cfg!(windows) { Command::new("cmd") } else { Command::new("sh") };
    shell.arg(if cfg!(windows) { "/C" } else { "-c" }).arg(command).envs(facts);
    // Standard output is for the folders of runs.
    let status = shell.stdin(Stdio::null()).stdout(std::io::stderr()).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("warning: --on-end: `{command}` ended with {status}; the result is not touched by it")
        }
        Err(e) => eprintln!(
            "warning: --on-end: `{command}` cannot be started: {e}; the result is not touched by it"
        ),
    }
}
