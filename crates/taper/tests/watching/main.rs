//! Watching: the page's server, trackers, progress and notifications, by the binary itself and on runs that it trains.
mod on_end;
mod page;
mod support;
mod track;
