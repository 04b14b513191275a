//! Data sets by name, from anywhere, verified.
//!
//! ```text
//!  name ── registry ── Dataset::load ── Search (--data, TAPER_DATA, cache, embedded, hub)
//!                          │ decode (idx, cifar, parquet, text)
//!                          │ prove  (digest)
//!                          ▼
//!                  Images: u8 ── ImagePipeline ── ImageBatch: f32, ahead of the training step
//!                  Text: u32  ── TextStream ───── TextBatch
//! ```
//! A new data set is one file: implement [`Dataset`] and [`register`](DataRegistry::register) it.
//!
//! ```
//! use taper_train::data::{Data, DataRegistry, Search};
//! let loaded = DataRegistry::builtin().get("mnist")?.load(&serde_json::json!({}), &Search::default())?;
//! let Data::Images { train, test } = loaded.data else { unreachable!() };
//! assert_eq!((train.len(), test.len()), (60_000, 10_000));
//! assert!(loaded.provenance.verified);
//! # Ok::<(), taper_train::data::DataError>(())
//! ```
mod augment;
mod cifar;
pub mod cli;
mod digest;
mod error;
mod files;
pub mod hub;
mod idx;
mod images;
mod parquet;
mod pipeline;
mod registry;
mod search;
mod sets;
mod split;
mod stream;
mod subset;
mod text;

use serde::{Deserialize, Serialize};

pub use augment::{Augment, Mix, Normalize};
pub use digest::Content;
pub use error::{DataError, Mismatch};
pub use files::Source;
pub use images::{Images, Shape};
pub use pipeline::{ImageBatch, ImageEpoch, ImagePipeline, PipelineConfig};
pub use registry::{DataRegistry, Dataset, Description, OptionDoc, options};
pub use search::{Form, Found, Layout, Search, Spec, find};
pub use split::{SplitSize, split};
pub use stream::{Lengths, TextBatch, TextStream, Window};
pub use subset::Subset;
pub use text::{EOS, Text, UNK, Vocabulary};

/// A data set in memory.
#[derive(Clone, Debug)]
pub enum Data {
    /// Labelled images.
    Images {
        /// To train on.
        train: Images,
        /// To report on.
        test: Images,
    },
    /// A stream of words.
    Text(Text),
}

/// A data set with the proof of where it came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The samples.
    pub data: Data,
    /// How its images are normalised unless the recipe says otherwise; `None` for text.
    pub normalize: Option<Normalize>,
    /// Where it came from.
    pub provenance: Provenance,
}

/// Where a data set came from and what proves it: the manifest of a run repeats this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// The data set.
    pub name: String,
    /// A directory, `embedded`, `generated`, or the hub's address.
    pub source: String,
    /// The hub's commit, for a download.
    pub revision: Option<String>,
    /// The files read.
    pub files: Vec<FileRecord>,
    /// The digests of the decoded content.
    pub content: Vec<Content>,
    /// The content is the data set's, by its digests. `false` only where the recipe says `verify: false`.
    pub verified: bool,
    /// What to declare beside every result when this is not the whole set.
    pub subset: Option<String>,
}

/// One file that was read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its path.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// Its hash.
    pub sha256: String,
}

impl Provenance {
    /// Of a set that was made, not found.
    pub fn generated(name: &str, content: Vec<Content>) -> Self {
        let (name, source) = (name.into(), "generated".into());
        Self { name, source, revision: None, files: Vec::new(), content, verified: true, subset: None }
    }
}
