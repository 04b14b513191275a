//! Says whether MNIST is there to be compiled in: it is in the repository, and too large for a package.
fn main() {
    let mnist = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/mnist");
    println!("cargo::rerun-if-changed={mnist}");
    println!("cargo::rustc-check-cfg=cfg(embedded_mnist)");
    let wanted = std::env::var_os("CARGO_FEATURE_EMBEDDED_MNIST").is_some();
    if wanted && std::path::Path::new(mnist).is_dir() {
        println!("cargo::rustc-cfg=embedded_mnist");
    }
}
