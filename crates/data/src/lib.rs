//! Data sets by name, from anywhere, verified.
//!
//! ```text
//!  name ── registry ── Dataset::load ── Search (--data, TAPER_DATA, cache, embedded, hub)
//!                          │ decode (idx, cifar, parquet, photo, npz, text)
//!                          │ prove  (digest)
//!                          ▼
//!                  Images: u8 or f32 ── ImagePipeline ── ImageBatch: f32, ahead of the training step
//!                  Text: u32 ─────────── TextStream, TextWindows ── TextBatch
//! ```
//! A new data set is one file: implement [`Dataset`] and [`register`](DataRegistry::register) it.
//!
//! ```
//! use taper_data::{Data, DataRegistry, Search};
//! let loaded = DataRegistry::builtin().get("mnist")?.load(&serde_json::json!({}), &Search::default())?;
//! let Data::Images { train, test } = loaded.data else { unreachable!() };
//! assert_eq!((train.len(), test.len()), (60_000, 10_000));
//! assert!(loaded.provenance.verified);
//! # Ok::<(), taper_data::DataError>(())
//! ```
mod augment;
mod body;
#[cfg(feature = "tokenizers")]
mod bpe;
#[cfg(not(feature = "tokenizers"))]
#[path = "no_bpe.rs"]
mod bpe;
#[cfg(feature = "candle-datasets")]
pub mod candle;
mod cifar;
mod digest;
mod error;
mod files;
pub mod hub;
mod idx;
mod images;
pub mod inventory;
mod npz;
mod parquet;
pub mod photo;
mod pipeline;
mod progress;
mod registry;
mod search;
mod sets;
mod split;
mod stream;
mod subset;
mod text;
mod windows;

use serde::{Deserialize, Serialize};

pub use augment::{Alternate, Augment, Fill, Flip, Mix, Normalize};
pub use bpe::Bpe;
pub use digest::Content;
pub use error::{DataError, Mismatch};
pub use files::Source;
pub use images::{Depth, Images, Shape};
pub use pipeline::{ByteBatch, ImageBatch, ImageEpoch, ImagePipeline, PipelineConfig};
pub use registry::{DataRegistry, Dataset, Description, Kind, OptionDoc, options};
pub use search::{Form, Found, Layout, Search, Spec, find};
pub use split::{SplitSize, split};
pub use stream::{Lengths, TextBatch, TextStream, Window};
pub use subset::Subset;
pub use text::{EOS, Text, UNK, Unit, Vocabulary};
pub use windows::{Order, TextWindows};

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
    /// A stream of words, characters, bytes or pieces.
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
    /// The names of the classes in the order of their labels, where the data has names for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Nats a word, when the text's source is known: no model's loss can be below it but by chance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_rate: Option<f64>,
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
        Self {
            name: name.into(),
            source: "generated".into(),
            revision: None,
            files: Vec::new(),
            content,
            verified: true,
            subset: None,
            classes: Vec::new(),
            entropy_rate: None,
        }
    }

    /// What has to be said beside every result on this data.
    pub fn remarks(&self) -> Vec<String> {
        let Self { name, .. } = self;
        let subset = self.subset.as_ref().map(|subset| format!("{name} is a subset: {subset}."));
        let unverified = (!self.verified)
            .then(|| format!("{name} was not verified: the recipe says `data.verify: false`."));
        let floor = self.entropy_rate.map(|rate| {
            format!("{name} has an entropy of {rate:.4} nats a word: no perplexity below {:.2}.", rate.exp())
        });
        [subset, unverified, floor].into_iter().flatten().collect()
    }
}
