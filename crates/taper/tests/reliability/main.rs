//! What a run promises: the same bytes for any number of threads and however often it was killed, and no silent loss
//! when its files are damaged or cannot be written.
mod common;
mod compare;
mod faults;
mod interrupts;
mod kills;
mod threads;
mod verify;
