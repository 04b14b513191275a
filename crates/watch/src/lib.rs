//! Live views of runs, and trackers that follow them: a local [page](Server) and more, by reading run folders and nothing else.
//!
//! Training knows nothing of who watches: runs on other machines are watched through a shared folder, runs of yesterday as those of
//! now, and no training ever waits for a viewer. The figures are those of [`taper_report`], drawn by its code.
//!
//! ```no_run
//! use taper_watch::{Options, Server};
//! let server = Server::bind(&Options::default())?;
//! println!("{}", server.url());
//! server.serve();
//! # #[allow(unreachable_code)]
//! # Ok::<(), taper_watch::ServeError>(())
//! ```
mod catalog;
mod follow;
mod http;
mod machine;
mod pace;
mod server;
mod stop;
mod token;
pub mod track;
pub mod tui;
mod view;

pub use catalog::{Catalog, Entry, State};
pub use follow::Follow;
pub use machine::Machine;
pub use server::{Options, PORT, ServeError, Server};
pub use stop::stop;
pub use view::{View, Watcher};
