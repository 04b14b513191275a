use super::Failure;
use clap::{Command, CommandFactory};
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
    clap_complete::generate(args.shell, &mut visible(&super::Args::command()), "taper", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

/// A command without its hidden options, which clap_complete would offer like all others.
fn visible(command: &Command) -> Command {
    // clap wants names that live as long as the program, which ends after this.
    let name: &'static str = command.get_name().to_owned().leak();
    let options = command.get_arguments().filter(|option| !option.is_hide_set()).cloned();
    let mut out = Command::new(name).args(options).subcommands(command.get_subcommands().map(visible));
    if let Some(about) = command.get_about() {
        out = out.about(about.clone());
    }
    out.version(env!("CARGO_PKG_VERSION"))
}
