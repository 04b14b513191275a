use super::{Common, Failure};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use taper_watch::{Options, Server, tui};

/// Shows runs as they go, in a page on this machine
///
/// Reads run folders and nothing else: runs of other processes and of other machines that share the folder, finished or under way.
/// The address that is printed has a token in it, without which nobody sees anything.
///
///   cargo xtask watch
///   cargo xtask watch runs/mnist-mlp-* elsewhere/runs
///   cargo xtask watch --port 8080
///   cargo xtask watch --tui
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folders of runs, or runs
    #[arg(value_name = "DIR", default_value = "runs")]
    folders: Vec<PathBuf>,
    /// In this terminal in place of a page
    #[arg(long, conflicts_with_all = ["port", "address"])]
    tui: bool,
    /// The port [default: 7007, or one that is free]
    #[arg(long, value_name = "N")]
    port: Option<u16>,
    /// Listens on another address than this machine's own loopback: 0.0.0.0 is all of them
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
}

pub fn run(args: &Args, common: &Common) -> Result<(), Failure> {
    // A folder that a run will make may come later; a name that is mistyped should be heard of now.
    let missing = |folder: &&PathBuf| !folder.is_dir();
    if let Some(missing) = args.folders.iter().find(missing) {
        return Err(Failure::usage(format!(
            "error: {}: there is no such folder: expected a run, or a folder of runs as `train` and `sweep` make it",
            missing.display()
        )));
    }
    if args.tui {
        return tui::show(&args.folders, &Arc::default(), false)
            .map_err(|e| Failure::usage(format!("error: --tui: {e}")));
    }
    let options = Options { runs: args.folders.clone(), address: args.address, port: args.port };
    let server = Server::bind(&options).map_err(|e| Failure::usage(format!("error: {e}")))?;
    if server.is_open() {
        eprintln!(
            "warning: listening on {}, which other machines may reach: whoever has the address with its token sees these runs and \
             can stop them, and the connection is not encrypted",
            args.address
        );
    }
    writeln!(std::io::stdout(), "{}", server.url())?;
    if !common.quiet {
        eprintln!("open it in a browser; Ctrl-C ends the page, never a run");
    }
    server.serve()
}
