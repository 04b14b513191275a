//! Statistics for a few paired seeds, tables, and plots: pure functions of numbers and labels.
//!
//! [`stats`] says what numbers can show, [`table`] sets them for people and programs, [`plot`] draws them as SVG (and PNG,
//! with the feature `png`). Nothing here knows of runs, recipes or optimizers, and equal input gives equal bytes.
//!
//! ```
//! use taper_figures::stats::student;
//! use taper_figures::table::{Table, mean_text};
//! let accuracy = student(&[97.71, 97.78, 97.47], 0.95).unwrap();
//! let mut table = Table::new(["optimizer", "accuracy, %"]);
//! table.row(["decgd".to_owned(), mean_text("perplexity", &accuracy)]);
//! assert!(table.markdown().contains("97.65 ± 0.40"));
//! ```
pub mod plot;
pub mod stats;
pub mod table;
