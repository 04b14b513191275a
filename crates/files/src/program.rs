//! How this program was started, for messages that say what to type.
use std::sync::OnceLock;

static PROGRAM: OnceLock<String> = OnceLock::new();

/// Says so once; the first has the word.
pub fn set_program(name: impl Into<String>) {
    let _ = PROGRAM.set(name.into());
}

/// `taper`, or `cargo xtask` where nobody said otherwise.
pub fn program() -> &'static str {
    PROGRAM.get().map_or("cargo xtask", String::as_str)
}

/// How to have a program with a feature that this one was built without.
pub fn built_with(feature: &str) -> String {
    match program() {
        "taper" => format!("`cargo install --path crates/taper --features {feature}` in its repository"),
        program => format!("`TAPER_FEATURES={feature} {program} …`"),
    }
}
