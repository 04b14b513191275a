use super::Failure;
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;

/// Prints completions of the `taper` binary for a shell
///
///   taper completions bash > ~/.local/share/bash-completion/completions/taper
///   taper completions zsh > ~/.zfunc/_taper
///   taper completions fish > ~/.config/fish/completions/taper.fish
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Args::command().bin_name("taper"), "taper", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}
