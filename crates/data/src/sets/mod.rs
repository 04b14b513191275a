//! The data sets that come with Taper, one file a family.
mod arrays;
mod folder;
mod ptb;
mod synthetic_images;
mod synthetic_text;
mod text;
mod vision;

use std::sync::Arc;

use super::Dataset;

/// Every built-in data set.
pub fn all() -> Vec<Arc<dyn Dataset>> {
    vec![
        Arc::new(&vision::MNIST),
        Arc::new(&vision::FASHION_MNIST),
        Arc::new(&vision::CIFAR10),
        Arc::new(&vision::CIFAR100),
        Arc::new(folder::Folder),
        Arc::new(arrays::ArrayFile),
        Arc::new(ptb::Ptb),
        Arc::new(text::TextFiles),
        Arc::new(synthetic_images::SyntheticImages),
        Arc::new(synthetic_text::SyntheticText),
    ]
}
