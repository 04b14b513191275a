//! Says whether MNIST is there to be compiled in: it is in the repository, and too large for a package.
fn main() {
    // Asked for now: a build folder may have come from another checkout.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(std::path::PathBuf::from).unwrap_or_default();
    let mnist = package.join("../../data/mnist");
    println!("cargo::rerun-if-changed={}", mnist.display());
    println!("cargo::rustc-check-cfg=cfg(embedded_mnist)");
    let wanted = std::env::var_os("CARGO_FEATURE_EMBEDDED_MNIST").is_some();
    if wanted && mnist.is_dir() {
        println!("cargo::rustc-cfg=embedded_mnist");
    }
}
